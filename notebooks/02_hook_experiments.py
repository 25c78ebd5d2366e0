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
# # Experiments with hooks
#
# Everything here is written through TransformerLens's own hook points, so your own hooks work
# beside it, and any TransformerLens model of yours can stand in for the shipped one.

# %%
import torch
from IPython.display import display
from nope_probe.figures.circuit import circuit

from nope_probe import Ablation, ablated, capture_scores, capture_stages, load, measure, sequences
from nope_probe.figures.circuit_views import Circuit
from nope_probe.figures.maps import score_maps

loaded = load("nope-tiny")
model = loaded.model
inputs = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40).inputs

# %% [markdown]
# ## Hooks of your own
#
# A hook is `(tensor, hook) -> tensor`. This one reads the scores of L1.

# %%
seen = {}
model.run_with_hooks(
    inputs[:8],
    return_type=None,
    fwd_hooks=[("blocks.1.attn.hook_attn_scores", lambda t, hook: seen.update(scores=t.detach()))],
)
display(seen["scores"].shape)  # [batch, head, query_pos, key_pos]

# %% [markdown]
# ## Stages (a) to (i) of a block
#
# The paper's Figure 3: hover over a cell for query, key and value; the buttons switch between the
# maps and what is left of them when each diagonal's mean is taken off.

# %%
stages = capture_stages(model, inputs, layer=0)
intact = {letter: stages.mean(letter).float().numpy() for letter in stages.folds}
circuit(Circuit(layer=0, maps=intact))

# %% [markdown]
# ## Switch the mask off and see the pattern go
#
# `ablated` is a context manager; afterwards the model is what it was, to the last bit.

# %%
with ablated(model, Ablation(remove=["mask"])):
    stages = capture_stages(model, inputs, layer=0)
    without = capture_scores(model, inputs)
shown = {letter: stages.mean(letter).float().numpy() for letter in stages.folds}
circuit(Circuit(layer=0, maps=shown, removed=("mask",), reference=intact))

# %% [markdown]
# How strong the pattern of each layer is, in nats, with the mask and without:

# %%
with_mask = capture_scores(model, inputs)
[
    (layer, round(one.amplitude.value, 3), round(other.amplitude.value, 3))
    for layer, (one, other) in enumerate(
        zip(measure(with_mask.folds), measure(without.folds), strict=True)
    )
]

# %% [markdown]
# ## Patch one head's pattern
#
# L0H0 attends evenly to all keys up to the query, whatever it has learned. The other
# heads stay; the score maps of the later layers change.

# %%
even = torch.ones(40, 40).tril()
even /= even.sum(-1, keepdim=True)
patch = (
    "blocks.0.attn.hook_pattern",
    lambda t, hook: t.index_copy(1, torch.tensor([0]), even.expand(len(t), 1, 40, 40)),
)
with model.hooks(fwd_hooks=[patch]):
    patched = capture_scores(model, inputs)
score_maps((patched.mean - with_mask.mean).float().numpy(), title="What the patch changes, nats")
