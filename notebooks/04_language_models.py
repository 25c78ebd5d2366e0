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
# # Language models
#
# `load` takes any decoder that TransformerLens's bridge takes: a friendly name such as
# `llama-3.1-8b`, a Hub id, a GGUF file or a local folder. This notebook studies SmolLM2-135M, which
# has RoPE in all of its 30 layers, where `make real` has fetched it. Elsewhere `rope-tiny`, a small
# model that ships, takes its place. `nope-tiny` ships too and has no RoPE. **With
# the weights of Llama 3.1 and a GPU, set `names = ["llama-3.1-8b"]`**: only the first four layers
# are loaded, about 4 GB.

# %%
# Where nope_probe is missing, this installs it from the clone that the notebook is in. On Colab,
# clone the repository first, and go to its folder: %cd nope_probe/notebooks
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", ".."], check=True)

# %%
from pathlib import Path

import pandas as pd
from IPython.display import display

from nope_probe import (
    Ablation,
    ablated,
    capture_scores,
    capture_stages,
    figures,
    load,
    measure,
    row_centred,
    sequences,
)

fetched = Path.home() / ".cache" / "nope_probe" / "SmolLM2-135M-Instruct.Q4_1.gguf"
names = ["smollm2-135m" if fetched.is_file() else "rope-tiny", "nope-tiny"]

# %% [markdown]
# ## Load the first layers
#
# `load` compares the hooked model with plain transformers, and refuses one whose hook points do
# not carry what it computes. The relative errors that it found are in the last line: about 1e-6.

# %%
models = {name: load(name, n_layers=4) for name in names}
data = {
    name: sequences(tokenizer=each.tokenizer, n_seqs=128, seq_len=48)
    for name, each in models.items()
}
for each in models.values():
    display(each)

# %% [markdown]
# ## The score maps
#
# Mean attention scores before softmax. Colours leave out the first key: its scores are an attention
# sink, with or without a BOS token, and would hide the rest.

# %%
scores = {
    name: capture_scores(each.model, data[name].inputs, documents=data[name].documents)
    for name, each in models.items()
}
for name, each in scores.items():
    display(figures.score_maps(each, title=f"{name}: mean scores"))

# %% [markdown]
# ## With RoPE the pattern is striped, without it nearer keys win
#
# A constant per row changes nothing after softmax. Less each row's mean over the keys after the
# first, a score map is the *positional pattern*: red keys are preferred for their place alone. The
# first key's *lead*, its score less that mean, is another matter. Move the slider from L0 to L3.

# %%
patterns = {name: row_centred(each.mean, skip_keys=each.skip_keys) for name, each in scores.items()}
figures.term_maps(patterns, title="Positional patterns", layer=1)

# %% [markdown]
# Locality is the rank correlation of a row with the key's position, 1 where nearer keys always win;
# the relative R² is the share of the pattern that depends on the distance i - j alone.

# %%
measured = {name: measure(each) for name, each in scores.items()}
pd.DataFrame(
    {
        (name, column): [getattr(layer, field) for layer in layers.values()]
        for name, layers in measured.items()
        for column, field in {"locality": "locality", "relative R²": "relative_r2"}.items()
    }
).rename_axis("layer")

# %% [markdown]
# **Exercise.** What makes the stripes of the model with RoPE in L1, and which measure says so?
#
# <details><summary>Answer</summary>
#
# RoPE turns queries and keys by angles in proportion to their positions, so that a score depends
# on the distance i - j, through cosines of it: a stripe is a distance that is liked, or not. Its
# relative R² is 1, while its locality is below that of L2 of `nope-tiny`. R² alone would not show
# RoPE at work, though: a pattern linear in the key's position is a function of the distance too,
# once each row's mean is taken off.
#
# </details>

# %% [markdown]
# ## Without RoPE, only the first key is left
#
# The first block of the model with RoPE, after RoPE is removed in every layer: its stages from the
# input to the next block's scores, intact, without RoPE, and their difference.

# %%
first = names[0]
model, inputs, documents = models[first].model, data[first].inputs, data[first].documents
intact = capture_stages(model, inputs, layer=0, documents=documents)
with ablated(model, Ablation(remove=["rope"])):
    without = capture_stages(model, inputs, layer=0, documents=documents)
    scores_without = capture_scores(model, inputs, documents=documents)
figures.circuit(without, layer=0, removed=["rope"], reference=intact)

# %% [markdown]
# The first key's lead and the amplitude of the pattern among the other keys (its RMS), in nats,
# with 95% intervals over documents. An interval that reaches 0 cannot be told from no pattern.

# %%
ran = {"intact": measure(scores[first]), "without RoPE": measure(scores_without)}
pd.DataFrame(
    {
        (field, name): [getattr(layer, field) for layer in layers.values()]
        for field in ("lead", "amplitude")
        for name, layers in ran.items()
    }
).rename_axis("layer")

# %% [markdown]
# **Exercise.** Without RoPE, the mask is still there. Does the model with RoPE fall back on it
# among the other keys, as `nope-tiny` does?
#
# <details><summary>Answer</summary>
#
# No. Among the other keys nothing is left that can be told from noise (in L3 of `rope-tiny`, less
# than half). `nope-tiny` makes 4 nats in L2 from the mask alone (`measure(scores["nope-tiny"])`): a
# model that was trained with RoPE had no need to. What the mask makes here is the first key, and it
# stays without RoPE.
#
# </details>
