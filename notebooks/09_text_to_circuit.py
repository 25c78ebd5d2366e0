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
# # From a text to a circuit to its removal
#
# A head looks at a token of your text. Why? This notebook goes back from that look to what earlier
# heads moved there, and then removes RoPE from the heads that the circuit is made of, to see what
# the model does with them.

# %%
# Where nope_probe is missing, this installs it from the clone that the notebook is in. On Colab,
# clone the repository first, and go to its folder: %cd nope_probe/notebooks
import subprocess
import sys
from importlib.util import find_spec

if find_spec("nope_probe") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", ".."], check=True)

# %%
from IPython.display import display

from nope_probe import run_attention, run_heads, text_view

text = "def area(width, height): return width * height"

# %% [markdown]
# ## Why a head looks where it looks
#
# From the second " he", L3H3 looks at what followed the first. Its score is a sum over what earlier
# writers put into the key and the query. A head that wrote the key moved its part from tokens that
# it looked at, and why it looked there is the same question again: a step back.

# %%
run = run_attention("rope-tiny", text=text, n_seqs=128, seq_len=32, why="L3H3", query=14, steps=2)
why = text_view(run).why
columns = ["step", "layer", "head", "query", "key", "writer", "side", "moved_from", "nats"]
strongest = why.steps[columns].sort_values("nats", key=abs, ascending=False)
strongest.head(8)

# %% [markdown]
# L1H3 looked at the token before, by rotation, and moved it. That is induction, found from one
# pass. The term is direct. With the moved part taken out of the model, and all later blocks
# responding, the score of L3H3 falls by the effect, in the last row:

# %%
display(why.terms)

# %% [markdown]
# ## What the circuit's first head is for
#
# L1H3 is the head with the most position among its other keys. RoPE is removed from it, and from
# every head alone. A second copy of random tokens costs more without that of L1H3, in nats per
# token, and hardly more without that of any other head:

# %%
tested = run_heads(
    "rope-tiny", remove="rope", by="others", k=[1], n_seqs=32, seq_len=32, mean_seqs=128
)
alone = tested.tables["single"]
alone = alone[alone["measure"] == "copy_random"]
display(alone.nlargest(4, "cost")[["layer", "head", "cost", "cost_low", "cost_high"]])

# %% [markdown]
# **Exercise.** Does the content of L1H3's attention matter as its RoPE does?
#
# <details><summary>Answer</summary>
#
# `run_heads("rope-tiny", remove="content", by="others", k=[1])`: hardly. L1H3 looks at
# the token before in every text, so its mean attention does nearly the same.
#
# </details>
