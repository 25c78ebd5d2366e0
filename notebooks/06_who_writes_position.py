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
# # Who writes position
#
# Nothing is removed here to find out: the first key's lead and the pattern among the other keys
# split exactly into what RoPE does by itself and what components wrote into the residual stream.
# Then hooks move what they wrote, and attention follows.

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
    calibrate,
    capture_scores,
    figures,
    load,
    measure,
    run_trace,
    sequences,
)

twins = {name: load(name) for name in ("nope-tiny", "rope-tiny")}
model = twins["nope-tiny"].model
data = sequences(tokenizer=twins["nope-tiny"].tokenizer, n_seqs=128, seq_len=48)

# %% [markdown]
# ## Rotation, or written
#
# `rotation` is RoPE on mean vectors that know nothing of position. The three `written` terms are
# position that keys, queries or both carry. What each term makes of L1's lead and pattern, nats;
# 95% intervals are in the columns that are left out here.

# %%
traces = {name: run_trace(twin.model, data, confirm=0) for name, twin in twins.items()}
pd.DataFrame(
    {
        name: trace.tables["terms"][trace.tables["terms"]["layer"] == 1].set_index(["of", "term"])[
            "part"
        ]
        for name, trace in traces.items()
    }
).round(3)

# %% [markdown]
# RoPE's pattern is rotation alone. Without position encoding all of it was written, and the table
# of writers says by whom: MLP0 into the keys of L1, two heads of L1 into those of L2 and L3. Leads
# are left out here.

# %%
writers = traces["nope-tiny"].tables["writers"]
strong = writers[(writers["of"] == "pattern") & (writers["part"].abs() > 0.2)]
strong[["layer", "side", "writer", "part", "part_low", "part_high"]].round(3)

# %%
terms = {name: traces["nope-tiny"].maps[f"L2/{name}"][None] for name in ("all", "written_key")}
figures.term_maps(
    {name: figures.RowMaps(values=values, skip_keys=1) for name, values in terms.items()},
    title="L2's pattern, and what was written into its keys",
    layers=[2],
)

# %% [markdown]
# **Exercise.** L0H0 writes next to nothing of L1's pattern. Take its position away, and see what
# L1 keeps.
#
# <details><summary>Answer</summary>
#
# The next cell does it for MLP0; write `position[L0H0]`. L1 loses about 0.12 of its 0.30 nats: MLP0
# reads what L0H0 writes, and a part counts the direct path alone.
#
# </details>

# %%
calibration = calibrate(model, data.inputs, writers=["MLP0"])
with ablated(model, Ablation(remove=["position[MLP0]"]), calibration):
    without = capture_scores(model, data.inputs, documents=data.documents)
intact = capture_scores(model, data.inputs, documents=data.documents)
pd.DataFrame(
    {
        name: [each.amplitude for each in measure(maps).values()]
        for name, maps in {"intact": intact, "without the position of MLP0": without}.items()
    },
    index=["L0", "L1", "L2", "L3"],
)

# %% [markdown]
# ## Move the clock
#
# The positional mean of L1H0: its mean output at each position, less the mean of these. A hook adds
# it again, or takes it away: 0 is without, 1 is the intact model, 2 has it twice. L2's pattern
# follows.

# %%
outputs = []
keep = ("blocks.1.attn.hook_z", lambda z, hook: outputs.append(z[:, :, 0]))
model.run_with_hooks(data.inputs, return_type=None, fwd_hooks=[keep])
mean = outputs[0].mean(0) @ model.blocks[1].attn.W_O[0]
clock = (mean - mean[1:].mean(0)).detach()

rows = {}
for factor in (0.0, 0.5, 1.0, 1.5, 2.0):
    scale = ("blocks.1.hook_attn_out", lambda out, hook, c=factor: out + (c - 1) * clock)
    with model.hooks(fwd_hooks=[scale]):
        maps = capture_scores(model, data.inputs, layers=[2], documents=data.documents)
    rows[factor] = measure(maps)[2].amplitude
pd.DataFrame({"RMS of L2's pattern, nats": rows}).rename_axis("times L1H0's position")

# %% [markdown]
# ## Swap two positions
#
# The clock of position 8 goes to position 40, and that of 40 to 8. What the tokens say stays where
# it was. The last query of L2 now prefers key 8 to key 40.

# %%
n_pos = data.inputs.shape[1]
near, far = 8, n_pos - 8
order = torch.arange(n_pos)
order[[near, far]] = order[[far, near]]
swap = ("blocks.1.hook_attn_out", lambda out, hook: out + clock[order] - clock)
swapped = {}
for name, hooks in {"intact": [], "swapped": [swap]}.items():
    with model.hooks(fwd_hooks=hooks):
        scores = capture_scores(model, data.inputs, layers=[2]).mean[0]
    swapped[name] = {f"key {key}": float(scores[-1, key]) for key in (near, far)}
display(pd.DataFrame(swapped).T.round(2))

# %% [markdown]
# **Exercise.** Swap the clock of L1H1 too. How much more does attention move?
#
# <details><summary>Answer</summary>
#
# L1H1 and L1H0 write most of L2's pattern, along nearly the same direction;
# MLP1, which pushes back, reads both and so takes part of the swap away.
#
# </details>
