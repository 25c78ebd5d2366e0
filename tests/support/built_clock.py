"""A HookedTransformer built by hand, in which heads of L0 tell L1 how far BOS is."""

from typing import Any

import torch
from support.tiny_models import N_POS


def bos_reader(strength: tuple[float, float]) -> Any:
    """Return a model by hand: two heads of L0 see BOS fade, and L1's keys read what they write.

    Coordinate 0 of a token is 1 for BOS, coordinate 1 is empty, the others are random content. All
    heads of L0 attend evenly, so that BOS has the weight 1 / (i + 1); head h writes that weight
    times `strength[h]` along coordinate 1, which is all that L1's keys read; L1's query is 1.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2, d_model=7, n_ctx=N_POS, d_head=3, n_heads=2, d_vocab=17, attn_only=True,
        normalization_type=None, positional_embedding_type="standard", seed=0,
    )  # fmt: skip
    model = HookedTransformer(config)
    for parameter in model.parameters():
        parameter.data.zero_()
    content = torch.randn(17, 5, generator=torch.Generator().manual_seed(3))
    model.embed.W_E.data[:, 2:] = content
    model.embed.W_E.data[0] = torch.eye(7)[0]
    first, second = (block.attn for block in model.blocks)
    for head, size in enumerate(strength):
        first.W_V.data[head, 0, 0] = 1
        first.W_O.data[head, 0, 1] = size
    second.W_K.data[:, 1, 0] = 1
    second.b_Q.data[:, 0] = 1
    return model
