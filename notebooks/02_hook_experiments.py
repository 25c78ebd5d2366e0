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
# # Experiments with hooks
#
# Everything here is written through TransformerLens's hook points, so your hooks work
# next to it, and any TransformerLens model of yours can take the place of the shipped one.

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
    row_centred,
    run_ablations,
    sequences,
)

loaded = load("nope-tiny")
model = loaded.model
data = sequences(tokenizer=loaded.tokenizer, n_seqs=128, seq_len=40)
tokens = data.inputs
display(loaded)

# %% [markdown]
# ## Remove one part after the other
#
# The mask is the source of this model's pattern. Weights are removed by their mean, so that queries
# or keys are constant, or attention writes a constant. The slider chooses the layer.

# %%
study = run_ablations(model, tokens[:64, :24])
figures.of_run(study)["The pattern without each part"]

# %% [markdown]
# **Exercise.** In L2, compare the patterns. Which weights does the mask need to make the pattern,
# and does that make them sources?
#
# <details><summary>Answer</summary>
#
# With constant keys, or with attention that writes a constant, nothing of the pattern is kept, as
# without the mask: keys carry what attention wrote. With constant queries the pattern is even
# larger: every query wants the same of the keys. That the mask needs W_K and W_O does not make them
# sources: only the mask breaks the symmetry between positions, and they shape what it makes.
#
# </details>

# %% [markdown]
# ## Your hooks
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
# The paper's Figure 3. In a live figure, hover over a cell for query, key and value.
# `kind="cosines"` shows cosines, `kind="less diagonal means"` maps less the mean of each diagonal.

# %%
start = tokens[:, :26]  # fewer positions keep the notebook small
intact = capture_stages(model, start, layer=0)
display(intact)
figures.circuit(intact, layer=0)

# %% [markdown]
# ## Remove the mask, and the pattern is gone
#
# `ablated` is a context manager; afterwards the model's outputs are bit-identical to before.

# %%
with ablated(model, Ablation(remove=["mask"])):
    without = capture_stages(model, start, layer=0)
    scores_without = capture_scores(model, tokens, documents=data.documents)
figures.circuit(without, layer=0, removed=["mask"], reference=intact)

# %% [markdown]
# The strength of each layer's positional pattern, in nats, with its 95% interval. `documents` says
# which sequences are of one document, so that intervals are over documents.
# Amplitude is of the pattern among the other keys; how far the first key's score is from theirs is
# `lead`. An interval that holds 0 cannot be told from no pattern at all.

# %%
scores = capture_scores(model, tokens, documents=data.documents)
conditions = {"intact": scores, "without the mask": scores_without}
pd.DataFrame(
    {
        name: [each.amplitude for each in measure(maps).values()]
        for name, maps in conditions.items()
    },
    index=["L0", "L1", "L2", "L3"],
)

# %% [markdown]
# **Exercise.** `measure(scores_without)[3].lead` is about -4 nats, without the mask. Where does
# this lead come from?
#
# <details><summary>Answer</summary>
#
# From the first token. BOS is the same token in every sequence and is scored unlike all others. Its
# lead marks a token, not a position: among the other keys nothing is left.
#
# </details>

# %% [markdown]
# ## Patch one head's attention
#
# L0H0 attends evenly to all keys up to the query, whatever it has learned. The other heads stay;
# the positional patterns of the later layers change (move the slider; L0 itself reads its scores
# before the patch). TransformerLens calls the attention weights `hook_pattern`: they are not the
# positional pattern, which is a score map less each row's mean, here over the keys after the first.

# %%
n_pos = tokens.shape[1]
even = torch.ones(n_pos, n_pos).tril()
even /= even.sum(-1, keepdim=True)
patch = (
    "blocks.0.attn.hook_pattern",
    lambda t, hook: t.index_copy(1, torch.tensor([0]), even.expand(len(t), 1, n_pos, n_pos)),
)
with model.hooks(fwd_hooks=[patch]):
    patched = capture_scores(model, tokens, documents=data.documents)
before, after = (row_centred(each.mean, skip_keys=1) for each in (scores, patched))
figures.term_maps(
    {"intact": before, "L0H0 patched": after, "change": after - before},
    title="The positional pattern, with L0H0 attending evenly",
    layer=1,
)
