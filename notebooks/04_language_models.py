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
# # Language models
#
# `load` takes any decoder that TransformerLens's bridge takes: a friendly name such as
# `llama-3.1-8b`, a Hub id or a local folder. This notebook studies the two shipped models, so that
# it runs anywhere: they were trained alike on Python's standard library, one with RoPE, one
# without. **With the weights of Llama 3.1, set `names = ["llama-3.1-8b"]`**: only the first layers
# are loaded.

# %%
# Installs nope_probe where it is missing, as on Colab; elsewhere it does nothing.
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "nope-probe"], check=True)

# %%
from IPython.display import display

from nope_probe import (
    Ablation,
    ablated,
    capture_scores,
    capture_stages,
    figures,
    load,
    measure,
    sequences,
)

names = ["rope-tiny", "nope-tiny"]

# %% [markdown]
# ## Load the first layers
#
# What is shown is what is known of the models, and how far each is from plain transformers (the
# parity check): relative errors around 1e-6.

# %%
models = {name: load(name, n_layers=4) for name in names}
data = {
    name: sequences(tokenizer=each.tokenizer, n_seqs=128, seq_len=48)
    for name, each in models.items()
}
for each in models.values():
    display(each)

# %% [markdown]
# ## Score maps
#
# Colours leave out the first key, BOS: its scores are an attention sink and would hide the rest.

# %%
scores = {name: capture_scores(each.model, data[name].inputs) for name, each in models.items()}
for name, each in scores.items():
    display(each)
    display(figures.score_maps(each, title=f"{name}: mean scores"))

# %% [markdown]
# ## The first block, with and without RoPE
#
# In the third choice of the switch, the change against the intact model.

# %%
first = names[0]
model, tokens = models[first].model, data[first].inputs
intact = capture_stages(model, tokens, layer=0)
with ablated(model, Ablation(remove=["rope"])):
    without = capture_stages(model, tokens, layer=0)
    scores_without = capture_scores(model, tokens)
figures.circuit(without, layer=0, removed=["rope"], reference=intact)

# %% [markdown]
# The strength of each layer's pattern, in nats, with its 95% interval: intact, then without RoPE.
# An interval that reaches 0 cannot be told from noise.

# %%
{
    f"L{layer}": (one.amplitude, other.amplitude)
    for layer, (one, other) in enumerate(
        zip(measure(scores[first]), measure(scores_without), strict=True)
    )
}

# %% [markdown]
# **Exercise.** Without RoPE, the mask is still there. Does the RoPE twin fall back on it, as the
# NoPE twin does?
#
# <details><summary>Answer</summary>
#
# Hardly. In L0 to L2 nothing is left that can be told from noise, and L3 keeps less than half of
# its amplitude. The NoPE twin makes 4 nats in L2 from the mask alone
# (`measure(scores["nope-tiny"])`): a model that was trained with RoPE had no need to.
#
# </details>
