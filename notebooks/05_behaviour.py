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
# # Behaviour: does the pattern do anything?
#
# A heat map does not show that attention's positional pattern matters. Here the same parts are
# removed, and what the model predicts is measured: in nats, with intervals over documents, always
# against the intact model on the same tokens.

# %%
# Installs nope_probe where it is missing, as on Colab; elsewhere it does nothing.
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "nope-probe"], check=True)

# %%
from nope_probe import Ablation, ablated, capture_losses, figures, load, run_behaviour, sequences

# %% [markdown]
# ## By hand: losses with and without RoPE
#
# `capture_losses` returns the loss of every token but the first; no logits are kept.

# %%
loaded = load("rope-tiny")
data = sequences(tokenizer=loaded.tokenizer, n_seqs=32, seq_len=64)
intact = capture_losses(loaded.model, data.inputs)
with ablated(loaded.model, Ablation(remove=["rope"])):
    without_rope = capture_losses(loaded.model, data.inputs)
rise = (without_rope - intact).mean(1)
f"{intact.mean():.2f} nats; without RoPE {rise.mean():+.2f} ± {2 * rise.std() / 32**0.5:.2f}"

# %% [markdown]
# Without the mask every token sees the next one, and this loss would mean nothing. Remove the mask
# among the first tokens alone (a bidirectional prefix), and score the causal rest. The logits at
# position 31, the last of the prefix, predict token 32: column 31 of the losses.

# %%
with ablated(loaded.model, Ablation(remove=["mask"], prefix=32)):
    without_mask = capture_losses(loaded.model, data.inputs)
rise = (without_mask - intact)[:, 31:].mean(1)
f"without the mask in the prefix {rise.mean():+.2f} ± {2 * rise.std() / 32**0.5:.2f} nats"

# %% [markdown]
# ## All measures of the NoPE twin
#
# What the `behaviour` command does, here on fewer sequences. The run is kept in a folder;
# the same call reads it again.

# %%
run = run_behaviour(
    "nope-tiny",
    n_seqs=32,
    seq_len=64,
    measures=["loss", "order", "bos", "position", "pattern"],
    remove=["mask", "qk", "mlp"],
)
table = run.tables["behaviour"]
table.pivot(index="condition", columns="measure", values="difference").round(2)

# %% [markdown]
# Position can be read from the residual stream, although the model has no position encoding, and
# without the mask it cannot: that is where it comes from. Open markers are untrained models.

# %%
figures.decodability(run.tables["decodability"])

# %% [markdown]
# Do the removals that take the pattern also take behaviour? Not in proportion: the pattern has one
# source here, the loss has many.

# %%
figures.pattern_and_behaviour(
    run.tables["bridge"], {"loss": "rise of the loss, nats", "position": "rise of position error"}
)

# %% [markdown]
# The loss by position: where the mask is removed, from the end of the prefix on.

# %%
figures.loss_by_position(run.tables["loss_by_position"], title="Loss by position")

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
