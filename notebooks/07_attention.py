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
# # Position in attention
#
# A head's attention differs from text to text, and part of it is the same in every text: position.
# This notebook splits the attention of each head, reads one text with it, asks why a head looks
# where it looks, and removes RoPE to see what is left.

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
from IPython.display import display

from nope_probe import figures, run_attention, text_view

text = "def area(width, height):\n    return width * height"
options = {"text": text, "n_seqs": 128, "seq_len": 48}

# %% [markdown]
# ## The first key, and position among the other keys
#
# There are two questions. What does the first key get? The ring is its weight. And where a head
# looks among the other keys: how much of that is position? It is the colour: 0% where position says
# nothing of where the head looks, 100% where the text says nothing. Area is information: how far
# the weights are from uniform, in nats.

# %%
query = 15  # the second " he"
rope = run_attention("rope-tiny", why="L3H3", query=query, **options)
figures.of_run(rope)["All heads: sinks, order and content"]

# %% [markdown]
# L1H3 hardly looks at BOS, and among the other keys it is nearly all position. L3H3 looks at BOS
# wherever it finds nothing else; among the keys after BOS (`others_share`) it is nearly all
# content:

# %%
heads = rope.tables["attention"].set_index(["layer", "head"])
columns = [
    "information",
    "first_weight",
    "others_share",
    "others_share_low",
    "others_share_high",
]
heads.loc[[(1, 3), (3, 3)], columns].round(2)

# %% [markdown]
# ## One text
#
# The same heads in one text. Click a head, and a token to ask where the head looks from there. The
# switch compares with other texts: *position* is the mean over the sequences of the run.

# %%
view = text_view(rope)
display(view)

# %% [markdown]
# From the second ` he`, L1H3 looks at the token before it, as it does anywhere. L3H3 looks at what
# followed the first ` he`, where no other text makes it look.


# %%
def strongest_keys(view):
    """Return the key that each of the two heads looks at, and its weights."""
    rows = {}
    for layer, head in ((1, 3), (3, 3)):
        key = view.weights[layer, head, query].argmax()
        rows[f"L{layer}H{head}"] = {
            "key": view.pieces[key] or view.names[key],
            "in this text": view.weights[layer, head, query, key],
            "in other texts": view.position[layer, head, query, key],
        }
    return pd.DataFrame(rows).T


strongest_keys(view)

# %% [markdown]
# ## Why this head looks there
#
# The score of a key, less the mean over the keys, is a sum: position, the same in every text, and
# what earlier components wrote into this key and this query. The largest terms of the key that
# L3H3 looks at, in nats:

# %%
terms = rope.tables["why"]
chosen = terms[terms["key"] == terms.loc[terms["weight"].idxmax(), "key"]]
chosen.sort_values("nats", key=abs, ascending=False)[["token", "side", "term", "nats"]].head(
    6
).round(2)

# %% [markdown]
# L1H3 wrote ten of the eleven nats into this key: which token came before it. The two heads of the
# table above work together: a positional head writes what a content head reads.
#
# ## Without RoPE
#
# The same model and text, with RoPE removed from every layer.

# %%
without = run_attention("rope-tiny", remove=["rope"], **options)
figures.of_run(without)["All heads: sinks, order and content"]

# %%
strongest_keys(text_view(without))

# %% [markdown]
# Among the keys after BOS, no head keeps a share of more than a few percent: that position was
# RoPE's. What position is left is about BOS, which is like no other token. L3H3 loses its key too,
# although its attention there is content: L1H3 no longer says which token came before. What is left
# of it is the BOS token, in this text as in any other.
#
# **Exercise.** `nope-tiny` has no RoPE and was trained so. Which of its heads attend by position?
#
# <details><summary>Answer</summary>
#
# `run_attention("nope-tiny", **options).tables["attention"]`: heads of L0 and L1 by what they give
# BOS (their `others_share` is near 0), and heads of L2 and L3 among the other keys too, up to 77%
# in L2H1. The causal mask makes this position.
#
# </details>
