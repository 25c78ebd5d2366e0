"""Models with weights by hand: one of induction alone, and one whose L0 tells L1 how far BOS is."""

from typing import Any

import pytest
import torch
from support.tiny_models import N_POS, hooked_transformer

from nope_probe.models.parameter_free import has_hooked_transformer

N_VOCAB, PREFER = 7, 40.0


def induction_model(n_pos: int) -> Any:
    """L0H0 writes the previous token next to each token; L1H0 looks for its own token there."""
    if not has_hooked_transformer():
        pytest.skip("built from a HookedTransformer")
    sizes = {"d_model": 2 * N_VOCAB + n_pos, "n_heads": 1, "d_head": n_pos, "d_vocab": N_VOCAB}
    sizes |= {"n_ctx": n_pos, "attn_scale": 1.0}
    model = hooked_transformer(**sizes, attn_only=True, normalization_type=None, init_weights=False)
    token, before, at = slice(0, N_VOCAB), slice(N_VOCAB, 2 * N_VOCAB), slice(2 * N_VOCAB, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[:, token] = torch.eye(N_VOCAB)
        model.pos_embed.W_pos[:, at] = torch.eye(n_pos)
        first, second = (block.attn for block in model.blocks)
        first.W_Q[0, at] = PREFER * torch.eye(n_pos)
        first.W_K[0, at] = torch.eye(n_pos).roll(1, 1)  # the key of j is found by the query j + 1
        first.W_V[0, token, :N_VOCAB] = torch.eye(N_VOCAB)
        first.W_O[0, :N_VOCAB, before] = torch.eye(N_VOCAB)
        second.W_Q[0, token, :N_VOCAB] = 3 * torch.eye(N_VOCAB)
        second.W_K[0, before, :N_VOCAB] = torch.eye(N_VOCAB)
    return model


def bos_reader(strength: tuple[float, float]) -> Any:
    """Return a model by hand: two heads of L0 see BOS fade, and L1's keys read what they write.

    Coordinate 0 of a token is 1 for BOS, coordinate 1 is empty, the others are random content. All
    heads of L0 attend evenly, so that BOS has the weight 1 / (i + 1); head h writes that weight
    times `strength[h]` along coordinate 1, which is all that L1's keys read; L1's query is 1.
    """
    sizes = {"d_model": 7, "n_ctx": N_POS, "d_head": 3, "n_heads": 2, "d_vocab": 17}
    model = hooked_transformer(**sizes, attn_only=True, normalization_type=None, seed=0)
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
