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
# # Behaviour: what does a model do with position?
#
# A heat map does not show that a model needs its positional pattern. Here its causes are
# removed, and what the model predicts is measured: in nats, with 95% intervals over documents,
# always against the intact model on the same tokens.

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

from nope_probe import (
    Ablation,
    ablated,
    capture_losses,
    figures,
    load,
    run_behaviour,
    sequences,
)

# %% [markdown]
# ## Without RoPE, the RoPE twin predicts much worse
#
# `capture_losses` returns the loss of every token but the first; no logits are kept.

# %%
loaded = load("rope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=32, seq_len=64)
intact = capture_losses(loaded.model, data.inputs)
with ablated(loaded.model, Ablation(remove=["rope"])):
    without_rope = capture_losses(loaded.model, data.inputs)


def rise_of_the_loss(losses, start=0):
    """Return the mean rise of the loss, with its interval over documents."""
    rises = pd.Series((losses - intact)[:, start:].mean(1).numpy())
    by_document = rises.groupby(data.documents.tolist()).mean()
    return f"{rises.mean():+.2f} ± {1.96 * by_document.sem():.2f} nats per token"


f"intact {intact.mean():.2f}; without RoPE {rise_of_the_loss(without_rope)}"

# %% [markdown]
# Without the mask every token sees the next one, and this loss would mean nothing. Remove the mask
# among the first tokens alone (a bidirectional prefix), and score the causal rest. The logits at
# position 31, the last of the prefix, predict token 32: column 31 of the losses.

# %%
with ablated(loaded.model, Ablation(remove=["mask"], prefix=32)):
    without_mask = capture_losses(loaded.model, data.inputs)
f"without the mask in the prefix {rise_of_the_loss(without_mask, start=31)}"

# %% [markdown]
# **Exercise.** Why is the loss without the mask scored behind a prefix, and not everywhere?
#
# <details><summary>Answer</summary>
#
# Without the mask a token sees its successor, which it has to predict: its loss says nothing of
# language. Behind a bidirectional prefix queries are causal again, and are scored as ever; the
# intact model is scored on the same tokens.
#
# </details>

# %% [markdown]
# ## The NoPE twin: every removal costs something else
#
# What the `behaviour` command does, here on fewer sequences. With `out="runs/nope-tiny"` the run
# would be kept in a folder, and the same call would read it again.

# %%
run = run_behaviour(
    "nope-tiny",
    n_seqs=32,
    seq_len=64,
    measures=["loss", "order", "bos", "position"],
    remove=["mask", "qk", "mlp"],
)
names = {
    "loss": "loss, all tokens",
    "loss_suffix": "loss behind the prefix",
    "order": "rise if the order is shuffled",
    "without_bos": "rise if BOS is dropped",
    "other_first": "rise if BOS is another token",
    "position": "error of the decoded position",
}
table = run.tables["behaviour"].query("removed != 'intact'").copy()
table["change"] = table.apply(
    lambda row: (
        f"{row.difference:+.2f} [{row.difference_low:+.2f}, {row.difference_high:+.2f}]"
        if pd.notna(row.difference)
        else "not scored"
    ),
    axis=1,
)
table.pivot(index="measure", columns="removed", values="change").rename(names).loc[
    list(names.values())
]

# %% [markdown]
# Each cell is a change against the intact model: nats per token in the losses, positions in the
# last row. The rises ask how much a perturbed input raises the loss, so that a negative
# change means that the model depends on it less than before: without its QK circuit or its MLPs it
# has little left to lose.
#
# Position can be read from the residual stream, although the model has no position encoding;
# without the mask it cannot, at any layer (chance is about 16 positions). That is where it comes
# from. Open markers are untrained models.

# %%
drawn = figures.of_run(run)
drawn["How well position can be read"]

# %% [markdown]
# The loss by position: where the mask is removed, from the end of the prefix on.

# %%
drawn["Loss by position"]

# %% [markdown]
# **Exercise.** Of the three, the MLPs cost the most loss. Does that make MLPs more important than
# the mask?
#
# <details><summary>Answer</summary>
#
# For the loss, as removed here, yes; for position, no. The loss without MLPs, over 10 nats, is
# above that of guessing evenly among the 2,048 tokens (ln 2048 = 7.6 nats): the model is broken,
# and a broken model does not show what a part is for. Removals that leave it working are the ones
# to compare, such as a prefix without the mask.
#
# </details>
