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
# # Language models
#
# `load` takes any decoder that TransformerLens's bridge takes: a friendly name such as
# `llama-3.1-8b`, a Hub id or a local folder. Here a small random Llama is made in a temporary
# folder, so that the notebook runs anywhere. **If you have the weights of Llama 3.1, set
# `name = "llama-3.1-8b"`**: only the first layers are loaded.

# %%
import tempfile
from pathlib import Path

import torch
from IPython.display import display
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nope_probe import (
    Ablation,
    ablated,
    capture_scores,
    capture_stages,
    figures,
    load,
    measure,
    sequences,
)

# %% [markdown]
# ## A random Llama in a folder

# %%
folder = Path(tempfile.mkdtemp()) / "random-llama"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=0,
)
LlamaForCausalLM(config).save_pretrained(folder)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=alphabet[0]).save_pretrained(folder)

name = str(folder)

# %% [markdown]
# ## Load the first layers
#
# `info` holds what is known of the model, and how far it is from plain transformers (the parity
# check).

# %%
loaded = load(name, n_layers=2)
data = sequences(tokenizer=loaded.tokenizer, n_seqs=96, seq_len=48)
display(loaded.info.parity)

# %% [markdown]
# ## Score maps

# %%
scores = capture_scores(loaded.model, data.inputs)
figures.score_maps(scores)

# %% [markdown]
# ## The first block, with and without RoPE
#
# In the third choice of the switch, the change against the intact model.

# %%
intact = capture_stages(loaded.model, data.inputs, layer=0)
with ablated(loaded.model, Ablation(remove=["rope"])):
    without = capture_stages(loaded.model, data.inputs, layer=0)
    scores_without = capture_scores(loaded.model, data.inputs)
figures.circuit(without, layer=0, removed=["rope"], reference=intact)

# %% [markdown]
# The strength of each layer's pattern, in nats, with its 95% interval: intact, then without RoPE. A
# random model has little; an interval that reaches 0 cannot be told from noise.

# %%
skip = int(data.bos)
[
    (one.amplitude, two.amplitude)
    for one, two in zip(measure(scores, skip), measure(scores_without, skip), strict=True)
]
