"""A model with weights by hand whose only circuit is induction."""

from typing import Any

import pytest
import torch
from support.tiny_models import hooked_transformer

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
