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
# # The parameter-free transformer: theory against simulation
#
# A decoder without weights and without position encoding, softmax(causal(Y Yᵀ)) Y + X, still has a
# positional pattern. Its inputs are random unit vectors whose expected inner product is α. From L1
# on (layers count from 0), a query's scores rise towards nearer keys: the causal mask alone does
# it, because tokens that share their past become similar.
#
# Figures are kept as pictures. In JupyterLab, where plotly is installed, a picture becomes a live
# figure once the pointer enters it; sliders and switches work everywhere, without a kernel.

# %%
# Where nope_probe is missing, this installs it from the clone that the notebook is in. On Colab,
# clone the repository first, and go to its folder: %cd nope_probe/notebooks
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", ".."], check=True)

# %%
import torch
from IPython.display import display

from nope_probe import figures, gaussian, load, run_ablations, simulate_scores, theory_scores

# %% [markdown]
# ## Theory
#
# The mean field is exact as the dimension grows. L0 is constant off the diagonal: inputs are
# exchangeable, and no mask has acted on them yet. Every later layer has a pattern.

# %%
n_pos = 50
theory = theory_scores(torch.tensor([0.2]).double(), n_pos, 4)[0]
figures.score_maps(theory, title="Theory, alpha = 0.2")

# %% [markdown]
# The last query's scores for keys 0, 10, ... 40, per layer: they rise towards the query.

# %%
theory[:, -1, 0:n_pos:10]

# %% [markdown]
# **Exercise.** Why is L0 flat? What would have to be true of the inputs for it not to be?
#
# <details><summary>Answer</summary>
#
# L0's scores are inner products of the inputs themselves. All pairs of inputs have the same
# expectation α, so every cell off the diagonal is α. Inputs whose neighbours are alike, as in text,
# would have a pattern in L0 already: content, not the mask.
#
# </details>

# %% [markdown]
# ## Simulation
#
# The same model is a configuration of TransformerLens. Its weights are identities, its inputs are
# vectors, and a control variate takes off most of the noise.

# %%
model = load("parameter-free").model
simulation = simulate_scores(model, alpha=0.2, seq_len=n_pos, n_samples=256, seed=0)
display(simulation.best)
figures.score_maps(simulation.best, title="256 samples, alpha = 0.2")

# %% [markdown]
# Theory and simulation differ by about 1/d, here d = 64. The largest gap per layer, in nats:

# %%
(simulation.best.mean - theory).nan_to_num().abs().amax((-1, -2))

# %% [markdown]
# ## Remove the mask
#
# The same simulation with and without the mask. Move the slider: L0 does not change, and every
# later layer loses its whole pattern.

# %%
vectors = gaussian(n_seqs=256, seq_len=32, d_model=64, alpha=0.2)
study = run_ablations(model, vectors, remove=["sources"])
figures.of_run(study)["The pattern without each part"]

# %% [markdown]
# **Exercise.** With RoPE (`load("parameter-free-rope")`), which layers change when RoPE is removed,
# and which when the mask is removed?
#
# <details><summary>Answer</summary>
#
# RoPE rotates queries and keys in every layer, so L0 changes too. The mask acts through what
# earlier layers have mixed, so L0 does not change. Both are in the same figure of
# `run_ablations(load("parameter-free-rope").model, vectors, remove=["sources"])`.
#
# </details>
