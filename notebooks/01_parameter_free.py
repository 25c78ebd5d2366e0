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
# # The parameter-free transformer: theory against simulation
#
# A decoder without weights and without position encoding, softmax(causal(Y Yᵀ)) Y + X, still has a
# positional pattern. Its inputs are random unit vectors whose expected inner product is α. From L1
# on (layers count from 0), a query's scores rise towards nearer keys: the causal mask alone does
# it, because tokens that share their past become similar.

# %%
import torch
from IPython.display import display

from nope_probe import figures, load, simulate_scores, theory_scores

# %% [markdown]
# ## Theory
#
# The mean field is exact as the dimension grows. L0 is constant off the diagonal: inputs are
# exchangeable, and no mask has acted on them yet. Every later layer has a pattern.

# %%
theory = theory_scores(torch.tensor([0.2]).double(), 50, 4)[0]
figures.score_maps(theory, title="Theory, alpha = 0.2")

# %% [markdown]
# The last query's scores for keys 0, 10, ... 40, per layer: they rise towards the query.

# %%
theory[:, -1, 0:50:10]

# %% [markdown]
# ## An alpha slider
#
# One map per α, in L1; the slider's step k is α = k / 10. (The slider says "L".)

# %%
alphas = torch.arange(9).double() / 10
by_alpha = theory_scores(alphas, 50, 2)[:, 1]
figures.score_maps(by_alpha, title="L1, by alpha: step k is alpha = k / 10")

# %% [markdown]
# ## Simulation
#
# The same model is a configuration of TransformerLens. Its weights are identities, its inputs are
# vectors, and a control variate takes off most of the noise.

# %%
model = load("parameter-free").model
simulation = simulate_scores(model, alpha=0.2, seq_len=50, n_samples=256, seed=0)
display(figures.score_maps(simulation.best, title="256 samples, alpha = 0.2"))

# %% [markdown]
# Theory and simulation differ by about 1/d, here d = 64. The largest gap per layer, in nats:

# %%
(simulation.best.mean - theory).nan_to_num().abs().amax((-1, -2))
