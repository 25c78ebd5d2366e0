# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attribution: where does the positional pattern come from?
#
# A mean score map holds two answers. The *lead* of the first key is its score less the mean of the
# other keys' scores, in nats. The *pattern* among the other keys is their scores less each row's
# mean: which of them are preferred for their place alone. Two small models were trained alike, one
# with RoPE and one without position encoding. Causal mask and RoPE are the *sources* of lead and
# pattern, because only these two break the symmetry between positions. Weights shape what the
# sources make; they are never a source.

# %%
# Installs nope_probe where it is missing, as on Colab; elsewhere it does nothing.
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "nope-probe"], check=True)

# %%
import pandas as pd
from IPython.display import display

from nope_probe import (
    Ablation,
    ablated,
    attribute,
    capture_scores,
    figures,
    load,
    run_ablations,
    sequences,
)

# %% [markdown]
# ## With RoPE, RoPE is the main source
#
# `run_ablations` runs the intact model, the model without the mask, without RoPE, and without
# both. *Position's part* is what the model without any source does not have. A source's loss is
# how much of position's part goes when this source is removed. `remove` names weights to remove as
# well, here the query-key circuit (W_Q and W_K together).

# %%
loaded = load("rope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
study = run_ablations(loaded.model, data, remove=["qk"])
display(study)
figures.source_losses(study.tables["sources"])

# %% [markdown]
# Losses of two sources need not add up to 100%. A loss below 0 means that position's part is larger
# without the source: the pattern of L2 grows without the mask. The mask does nothing in L0, whose
# scores are made before any masked attention. L3's pattern needs both sources.
#
# How much of the lead and of the pattern do the sources make at all? `from_sources` says so, with
# 95% intervals in the columns that are left out here.

# %%
intact = study.tables["pattern"].query("removed == 'intact'").set_index("layer")
columns = ["lead", "lead_from_sources", "amplitude", "pattern_from_sources"]
intact[columns].round(2)

# %% [markdown]
# The sources make the pattern. They do not make the lead: the first key is BOS here, and its
# lead is there without mask and RoPE too. From L1 on the sources even lower it, so that their share
# is negative.
#
# The four runs also split position's part exactly, into mask, RoPE and mask × RoPE (what the two
# make only together). These terms are maps, in nats, and add up to the pattern with what is left
# without sources. The first key's lead is the left column. Move the slider: in L3, where the
# pattern is weak, mask and RoPE share it.

# %%
terms = ["without_sources", "mask", "rope", "mask_x_rope"]
maps = {name: study.maps[f"term/{name}"] for name in terms} | {"all": study.maps["pattern/intact"]}
figures.term_maps(maps, title="Terms of lead and pattern, and their sum", layer=1)

# %% [markdown]
# ## What a weight shapes
#
# A weight is removed with and without the sources, and its loss is of position's part, by the same
# rule. By *mean* queries and keys are constant, so that no layer can read what earlier layers
# wrote: RoPE on constant vectors is still L1's whole pattern. By *identity* queries and keys are
# the layer's input itself, and most of the pattern is lost. So the pattern needs what W_Q and W_K
# bring to constant queries and keys, and not what they read of each token, except in L3.

# %%
figures.weight_losses(study.tables["weights"])

# %% [markdown]
# The same removals for every layer and head. The first key's lead is the left column, divided
# as the scale below each map says. The numbers below the maps change too.

# %%
figures.explore(loaded.model, data.inputs[:64], remove=["qk"])

# %% [markdown]
# **Exercise.** Is there a head whose pattern does not need RoPE? Look through L1 to L3 with RoPE
# removed.
#
# <details><summary>Answer</summary>
#
# In L3, H3 keeps about half of its pattern, with a narrow interval; in L1 no head keeps a
# twentieth. Where an interval holds 0, as for some heads of L3, nothing can be said.
#
# </details>

# %% [markdown]
# ## Without RoPE, the mask is the source
#
# The NoPE twin, from captures that you make. Conditions are named by what is removed; `attribute`
# finds the sources from the names. A single source loses 100% by definition, so look at
# `from_sources` and at the sizes: how large lead and pattern are, and what is left without the
# mask, in nats.

# %%
loaded = load("nope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
intact = capture_scores(loaded.model, data.inputs, documents=data.documents)
with ablated(loaded.model, Ablation(remove=["mask"])):
    without = capture_scores(loaded.model, data.inputs, documents=data.documents)
layers = attribute({(): intact, "mask": without})
pd.DataFrame(
    {
        (question, column): [getattr(layer.by_question[question], field) for layer in layers]
        for question in ("lead", "pattern")
        for column, field in {
            "nats": "size",
            "without the mask": "without_sources",
            "from the mask": "from_sources",
        }.items()
    },
    index=[f"L{layer.layer}" for layer in layers],
)

# %% [markdown]
# The mask makes the pattern, from L1 on. The lead has a part without the mask: BOS is
# the same token in every sequence, and is scored unlike the others. In L3 that part is -4.3 nats
# and the mask's is +3.3, so that the share of the mask is negative.

# %% [markdown]
# **Exercise.** Without position encoding, what is left of L1's pattern without the mask, and
# how would you find out whether it comes from the text?
#
# <details><summary>Answer</summary>
#
# Next to nothing: an interval that holds 0 cannot be told from no pattern at all. What there is
# cannot come from position, since nothing distinguishes positions. Neighbouring tokens of a
# text resemble each other, so a mean score can depend on the distance. Run it again on shuffled
# tokens, `sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40, shuffle=True)`: what is
# left then is not the text's.
#
# </details>
