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
# # A series of runs
#
# One run gives one answer. Does it hold in longer texts, in another model, with more texts? Runs
# that differ in settings make a series: `difference` puts all their numbers into one table, and
# tests each run against the run before it.

# %%
# Where nope_probe is missing, this installs it from the clone that the notebook is in. On Colab,
# clone the repository first, and go to its folder: %cd nope_probe/notebooks
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", ".."], check=True)

# %%
import plotly.express as px

from nope_probe import difference, run_ablations

twins, lengths = ("nope-tiny", "rope-tiny"), (16, 32, 64)
runs = [run_ablations(name, seq_len=n, n_seqs=48) for name in twins for n in lengths]
table = difference(*runs)
table.columns.tolist()

# %% [markdown]
# The first columns are the run and the settings that differ: `seq_len` is the axis, and each
# `model` is a line along it. Then a row names its number: `table` is the runs' table, `removed` the
# condition, `number` the column. `value` has a 95% interval, and `difference` is the change from
# the next shorter length of the same model, with its p-value by Holm's rule.
#
# ## The order of the other keys
#
# Means over all layers, nats. Where the length doubles, the order grows in both models. At every
# length, next to none of it is left in `nope-tiny` without the mask or without written position,
# and in `rope-tiny` without RoPE.

# %%
means = table[table["table"] == "over_layers"]
sources = means[means["removed"].isin(["intact", "mask", "written", "rope"])]
order = sources[sources["number"] == "order"]
order.pivot(index=["model", "removed"], columns="seq_len", values="value").round(2)

# %% [markdown]
# ## What it costs
#
# The rise of the loss without written position and without RoPE.

# %%
costs = sources[(sources["number"] == "cost") & sources["removed"].isin(["written", "rope"])]
costs = costs.assign(above=costs["value_high"] - costs["value"])
figure = px.line(
    costs,
    x="seq_len",
    y="value",
    error_y="above",
    color="removed",
    facet_col="model",
    markers=True,
    labels={"value": "cost, nats"},
    width=800,
    height=320,
)
figure.update_xaxes(tickvals=lengths)

# %% [markdown]
# ## What changed with the length
#
# Of the costs, these changed from one length to the next beyond noise.

# %%
columns = ["model", "removed", "seq_len", "difference", "difference_low", "difference_high"]
costs[costs["differs"]][columns].round(2)

# %% [markdown]
# **Exercise.** How do the costs depend on the number of texts? Make a series of `n_seqs`.
#
# <details><summary>Answer</summary>
#
# ```python
# runs = [run_ablations("nope-tiny", seq_len=32, n_seqs=n) for n in (16, 48, 144)]
# costs = difference(*runs).query("table == 'over_layers' and number == 'cost'")
# costs[costs["removed"] == "written"][["n_seqs", "value", "value_low", "value_high"]]
# ```
#
# With 16 texts the cost comes out low: the means that the removal takes away are estimated on half
# of them, and 8 texts are too few. From 48 on it stays within its interval.
#
# </details>
