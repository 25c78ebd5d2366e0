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
# Where nope_probe is missing, this installs it from the clone that the notebook is in. On Colab,
# clone the repository first, and go to its folder: %cd nope_probe/notebooks
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", ".."], check=True)

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
# ## With RoPE, the order is RoPE's
#
# `run_ablations` runs the intact model, the model without the mask, without RoPE, and without
# mask + RoPE, and with queries, keys, both or what attention writes constant. For each it says the
# lead, and how much of the intact model's order of the other keys is there, both in nats: no number
# needs to be divided by another.

# %%
loaded = load("rope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
study = run_ablations(loaded.model, data)
display(study)
figures.of_run(study)["The three numbers in every layer"]

# %% [markdown]
# The order of L1 and L2 is there without the mask and gone without RoPE. L3's is weak, and needs
# RoPE too. The mask does nothing in L0, whose scores are made before any masked attention. With
# constant queries and keys the order of L1 stays: RoPE on constant vectors makes it, and nothing
# that W_Q and W_K read of each token is needed.
#
# The lead is another story: the first key is BOS here, and its lead is there without mask and RoPE
# too. It is the token's: with constant keys it is gone.

# %%
table = study.tables["pattern"].query("layer == 3").set_index(["removed", "replacement"])
table[["lead", "order", "amplitude"]].round(2)

# %% [markdown]
# The four runs of the sources also split the map exactly, into mask, RoPE and mask × RoPE (what the
# two make only together) and what is left without sources. These terms are maps, in nats, and add
# up to the intact map. The first key's lead is the left column. Move the slider: in L3, where the
# pattern is weak, mask and RoPE share it.

# %%
terms = ["without_sources", "mask", "rope", "mask_x_rope"]
maps = {name: study.maps[f"term/{name}"] for name in terms} | {"all": study.maps["pattern/intact"]}
figures.term_maps(maps, title="Terms of lead and pattern, and their sum", layer=1)

# %% [markdown]
# The same for every head: each point is a head's order, without RoPE against intact.

# %%
study = run_ablations(loaded.model, data.inputs[:64], remove=["sources"], per_head=True)
heads = study.tables["head_pattern"].query("removed == 'rope'")
figures.of_run(study)["Heads without each source"]

# %% [markdown]
# **Exercise.** Is there a head whose pattern does not need RoPE? Look through L1 to L3 of `heads`.
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
# returns the values of each.

# %%
loaded = load("nope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
intact = capture_scores(loaded.model, data.inputs, documents=data.documents)
with ablated(loaded.model, Ablation(remove=["mask"])):
    without = capture_scores(loaded.model, data.inputs, documents=data.documents)
layers = attribute({(): intact, "mask": without})
pd.DataFrame(
    {
        (name, removed): [getattr(layer.conditions[removed], name) for layer in layers.values()]
        for name in ("lead", "order")
        for removed in ("intact", "mask")
    },
    index=[f"L{layer}" for layer in layers],
)

# %% [markdown]
# The mask makes the order, from L1 on: nothing of it is there without the mask. The lead has a
# part without the mask: BOS is the same token in every sequence, and is scored unlike the others.

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
