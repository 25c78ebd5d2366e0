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
# # Is a model without its mask still the model?
#
# Removing the causal mask runs a model as it was never trained. Does the result say something of
# the model, or is it an artefact? Two experiments on SmolLM2-135M answer (`make real` fetches it).
# A third takes out what the mask does to position, and leaves the model causal.

# %%
# Where nope_probe is missing, this installs it from the clone that the notebook is in. On Colab,
# clone the repository first, and go to its folder: %cd nope_probe/notebooks
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", ".."], check=True)

# %%
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import display

from nope_probe import Ablation, ablated, capture_scores, load, measure, row_centred, sequences

fetched = Path.home() / ".cache" / "nope_probe" / "SmolLM2-135M-Instruct.Q4_1.gguf"
name, deep = ("smollm2-135m", 512) if fetched.is_file() else ("rope-tiny", 256)
loaded = load(name, n_layers=4)
model, tokenizer = loaded.model, loaded.tokenizer
short = sequences(tokenizer=tokenizer, n_seqs=64, seq_len=64)

# %% [markdown]
# ## Without the mask, the start of a text is like its depth
#
# With the mask a token early in a text sees few tokens; without it, every token sees all of them,
# as a token deep in a long text does. So the pattern without the mask (64 tokens) should be that of
# the last positions of long sequences. It is: R² says how much of the deep pattern it accounts
# for, next to the intact model at the start of a text.

# %%
long = capture_scores(model, sequences(tokenizer=tokenizer, n_seqs=24, seq_len=deep)).mean
intact = capture_scores(model, short).mean
with ablated(model, "mask"):
    without = capture_scores(model, short).mean

n = intact.shape[-1] - 1  # the keys after the first
below = torch.ones(n, n).tril(-1).bool()
patterns = {
    key: torch.stack([row_centred(layer)[below] for layer in maps[:, -n:, -n:]])
    for key, maps in {"deep": long, "start, intact": intact, "start, no mask": without}.items()
}
missed = {
    key: ((pattern - patterns["deep"]) ** 2).sum(-1) / (patterns["deep"] ** 2).sum(-1)
    for key, pattern in patterns.items()
    if key != "deep"
}
layers = pd.Index([f"L{layer}" for layer in range(len(intact))], name="layer")
pd.DataFrame({f"R², {key}": 1 - x.numpy() for key, x in missed.items()}, layers).round(2)

# %% [markdown]
# ## One row of the mask makes a second first token
#
# The first token sees itself alone. In SmolLM2 its residual stream has a norm of more than 800
# after L2, where all others have about 90. Is it the token, the place, or the mask? A hook changes
# one row of the mask in L0 to L2: token 32 sees itself alone, or token 0 sees all.

# %%
rows = torch.arange(short.inputs.shape[1])
causal = rows <= rows[:, None]
alone, sees_all = causal.clone(), causal.clone()
alone[32, :32] = False
sees_all[0] = True
masks = {"intact": causal, "token 32 sees itself alone": alone, "token 0 sees all": sees_all}
scores = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(3)]

norms = {}
for label, visible in masks.items():
    kept = []

    def hide(values, hook, visible=visible):
        """Hide what a token does not see."""
        return values.masked_fill(~visible, torch.finfo(values.dtype).min)

    keep = ("blocks.3.hook_resid_pre", lambda x, hook, kept=kept: kept.append(x))
    hooks = [(point, hide) for point in scores]
    # Without the model's mask in L0 to L2, the hooks put in another.
    with ablated(model, Ablation(remove="mask", layers=range(3))), torch.no_grad():
        model.run_with_hooks(short.inputs, return_type=None, fwd_hooks=[*hooks, keep])
    norms[label] = kept[0].norm(dim=-1).mean(0)
pd.DataFrame(norms).iloc[[0, 16, 32, 48]].rename_axis("position").round(0)

# %%
figure = go.Figure([go.Scatter(y=norm, name=label) for label, norm in norms.items()])
figure.update_yaxes(title="norm of the residual stream after L2")
figure.update_xaxes(title="position")
legend = {"orientation": "h", "y": 1.15}
margin = {"t": 30, "b": 50, "l": 60, "r": 20}
figure.update_layout(template="plotly_white", width=760, height=320, legend=legend, margin=margin)
display(figure)

# %% [markdown]
# Token 32, which sees itself alone, becomes a second first token; token 0, which sees all, is a
# token like all others. So the first token's mark, and with it the first key's lead, is made by
# what the mask lets a token see.
#
# **Exercise.** Let token 32 see itself and token 31. Is it still a second first token?
#
# <details><summary>Answer</summary>
#
# Set `alone[32, :31] = False` instead. One other token in sight takes three quarters of the norm
# away (195 for 783), and four others all of it (104).
#
# </details>

# %% [markdown]
# ## What the mask writes, taken out of a causal model
#
# The mask's removal breaks more than position: the model sees its future. What the mask does to
# position is to let blocks write it into the residual stream. The removal `written` takes that
# out, and the model stays causal. In `nope-tiny`, which has no position encoding, both take the
# order of the other keys away. Only without written position does the loss mean something: each
# token is still predicted from the tokens before it. The null permutes the positions of each text
# before its means are taken: the same noise and no position.

# %%
nope = load("nope-tiny")
tokens = sequences(tokenizer=nope.tokenizer, n_seqs=128, seq_len=64).inputs
numbers = {}
for removed in ([], ["mask"], ["written"], ["written_null"]):
    with ablated(nope.model, Ablation(remove=removed), tokens=tokens), torch.no_grad():
        pattern = measure(capture_scores(nope.model, tokens))[2]
        logits = nope.model(tokens)[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    numbers[" ".join(removed) or "intact"] = {
        "pattern of L2, nats": pattern.amplitude.value,
        "first key's lead, nats": pattern.lead.value,
        "loss, nats": None if "mask" in removed else float(loss),
    }
pd.DataFrame(numbers).T.astype(float).round(2)

# %% [markdown]
# All of the pattern is written, and text costs 0.8 nats more without it than in the null. The first
# key trails even further: the first token keeps what is written there, and the others lose it.
#
# **Exercise.** Take the first token's mark too (`Ablation(remove=["written"], kept_positions=0)`).
# Does the first key still trail?
#
# <details><summary>Answer</summary>
#
# No: its lead is 0.2 nats, no more than noise, and text costs another 0.3 nats. What the first key
# had against it was the position that blocks write at the first token.
#
# </details>
