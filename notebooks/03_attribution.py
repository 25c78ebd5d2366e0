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
# The positional pattern is a layer's mean score map less each row's mean: what softmax sees of
# position. Two small models were trained alike, one without position encoding and one with RoPE.
# Causal mask and RoPE are the *sources* of their patterns, since only these two tell positions
# apart. Weights shape what the sources bring; they are never a source.

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
# both. The differences of the four are terms that add up to the pattern: content (what is left
# without either), mask, RoPE, and mask × RoPE (what the two bring only together). `players` asks
# for more: which parts the pattern needs, from all combinations of them.

# %%
loaded = load("rope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
study = run_ablations(loaded.model, data, players=["mask", "rope", "qk"])
display(study)
figures.source_shares(study.sources)

# %% [markdown]
# A term's share is its inner product with the pattern, relative to the pattern's own. The shares
# of a layer add up to 1, and a negative one works against the pattern: mask × RoPE in L2. A share
# has two parts, at the first key (full colour) and among the other keys. The first key is BOS here,
# whose own score is content: it is most of the pattern of L0 and L3. Among the other keys alone,
# the mask brings nothing to L0, whose scores are made before any masked attention.

# %%
shares = study.sources[study.sources.term != "position"]  # position: all but content
others = shares.pivot(index="layer", columns="term", values="share_others")
others.div(others.sum(axis=1), axis=0).round(3)

# %% [markdown]
# The terms are maps, in nats, and their sum is the pattern. Move the slider: in L3, where the
# pattern is weakest, mask and RoPE share it.

# %%
names = ["content", "mask", "rope", "mask_x_rope", "all"]
maps = {name: study.maps["pattern/all" if name == "all" else f"source/{name}"] for name in names}
figures.term_maps(maps, title="Terms of the positional pattern, and their sum", layer=1)

# %% [markdown]
# ## Without its query-key circuit, most of the pattern is lost
#
# A *player* is kept or removed as a whole: here the mask, RoPE and the query-key circuit (W_Q and
# W_K together). *Lost without it* says how much goes when it alone is removed, *there alone* what a
# source brings when all others are. The *Shapley share* is a mean over all orders of removal.
# That the pattern needs the circuit does not make it a source: alone, it brings no position.

# %%
figures.player_shares(study.players)

# %% [markdown]
# The same players as switches, for every layer and head; the numbers below the maps change too.

# %%
figures.explore(loaded.model, data.inputs[:64], players=["mask", "rope", "qk"])

# %% [markdown]
# **Exercise.** Is there a head whose pattern does not need RoPE? Look through L1 to L3 with RoPE
# switched off.
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
# The NoPE twin, from captures of your own. Conditions are named by what is removed; `attribute`
# finds the sources from the names. Sequences begin with BOS, an attention sink, whose own score is
# content and most of the pattern of L0 and L1: `share_others` is what a term brings among the other
# keys, as a share of the whole pattern.

# %%
loaded = load("nope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
intact = capture_scores(loaded.model, data.inputs, documents=data.documents)
with ablated(loaded.model, Ablation(remove=["mask"])):
    without = capture_scores(loaded.model, data.inputs, documents=data.documents)
layers = attribute({(): intact, "mask": without})
pd.DataFrame(
    [{each.term: each.share_others for each in layer.sources} for layer in layers],
    index=[f"L{layer.layer}" for layer in layers],
)

# %% [markdown]
# **Exercise.** Without position encoding, what is the content term of L1, and how would you find
# out whether it comes from the text?
#
# <details><summary>Answer</summary>
#
# What the model without its mask still has: at most a few percent of the pattern. It cannot come
# from position, since nothing tells positions apart any more. Neighbouring tokens of a text
# resemble each other, and so the mean score depends on the distance. Run it again on shuffled
# tokens, `sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40, shuffle=True)`: what is
# left then is not the text's.
#
# </details>
