# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attribution: where does the pattern come from?
#
# Two small models were trained alike, one without position encoding and one with RoPE. Mask and
# RoPE break the symmetry between positions; weights shape what these start, and are never a source.

# %%
import pandas as pd

from nope_probe import Ablation, ablated, attribute, capture_scores, load, sequences
from nope_probe.analyses.pattern import row_centred
from nope_probe.experiments.tables import sources_table
from nope_probe.figures.maps import term_maps
from nope_probe.figures.shares import source_shares

# %% [markdown]
# ## The RoPE twin: four runs
#
# The intact model, and the model without the mask, without RoPE, and without either. Conditions are
# named by what is removed.

# %%
loaded = load("rope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
skip = int(data.bos)
conditions = [frozenset(), frozenset({"mask"}), frozenset({"rope"}), frozenset({"mask", "rope"})]
maps = {}
for removed in conditions:
    with ablated(loaded.model, Ablation(remove=sorted(removed))):
        maps[removed] = capture_scores(loaded.model, data.inputs).folds
sources = sources_table(attribute(maps, position="rope", skip_keys=skip))
source_shares(sources)

# %% [markdown]
# The shares of a layer add up to 1; those of L0 come from RoPE and content, since the mask has
# acted on nothing yet.

# %%
sources.pivot(index="layer", columns="term", values="share").round(3)

# %% [markdown]
# The pattern itself, and what is left of it without the mask or without RoPE:

# %%
patterns = {
    name: row_centred(maps[frozenset(removed)].mean(0), skip).float().numpy()
    for name, removed in (("all", ()), ("without mask", ("mask",)), ("without RoPE", ("rope",)))
}
term_maps(patterns, title="The pattern, and without its sources", layer=1)

# %% [markdown]
# ## The NoPE twin: the mask is all there is
#
# Without position encoding, what the mask brings and the content make the whole pattern.

# %%
loaded = load("nope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
maps = {}
for removed in (frozenset(), frozenset({"mask"})):
    with ablated(loaded.model, Ablation(remove=sorted(removed))):
        maps[removed] = capture_scores(loaded.model, data.inputs).folds
layers = attribute(maps, position=None, skip_keys=int(data.bos))
pd.DataFrame(sources_table(layers)).pivot(index="layer", columns="term", values="share").round(3)
