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
# beside it, and any TransformerLens model of yours can take the place of the shipped one.

# %%
import torch
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

loaded = load("nope-tiny")
model = loaded.model
tokens = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40).inputs

# %% [markdown]
# ## Hooks of your own
#
# A hook is `(tensor, hook) -> tensor`. This one reads the scores of L1.

# %%
seen = {}
model.run_with_hooks(
    tokens[:8],
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
intact = capture_stages(model, tokens, layer=0)
figures.circuit(intact, layer=0)

# %% [markdown]
# ## Remove the mask, and the pattern is gone
#
# `ablated` is a context manager; afterwards the model's outputs are bit-identical to before.

# %%
with ablated(model, Ablation(remove=["mask"])):
    without = capture_stages(model, tokens, layer=0)
    scores_without = capture_scores(model, tokens)
figures.circuit(without, layer=0, removed=["mask"], reference=intact)

# %% [markdown]
# The strength of each layer's pattern, in nats, with the mask and without:

# %%
scores = capture_scores(model, tokens)
[
    (f"L{layer}", round(one.amplitude.value, 3), round(other.amplitude.value, 3))
    for layer, (one, other) in enumerate(zip(measure(scores), measure(scores_without), strict=True))
]

# %% [markdown]
# ## Patch one head's attention
#
# L0H0 attends evenly to all keys up to the query, whatever it has learned. The other heads stay;
# the score maps of the later layers change. (TransformerLens calls the attention weights
# `hook_pattern`: they are not the positional pattern of this package.)

# %%
even = torch.ones(40, 40).tril()
even /= even.sum(-1, keepdim=True)
patch = (
    "blocks.0.attn.hook_pattern",
    lambda t, hook: t.index_copy(1, torch.tensor([0]), even.expand(len(t), 1, 40, 40)),
)
with model.hooks(fwd_hooks=[patch]):
    patched = capture_scores(model, tokens)
figures.score_maps(patched.mean - scores.mean, title="What the patch changes, nats")
