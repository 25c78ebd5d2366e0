"""Eq. (1), and its variants of appendix B and section 5.1, written out in float64."""

import torch
from torch import Tensor


def plain_layers(
    x: Tensor, n_layers: int, norm: str, rope: bool, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the scores of every layer [batch, layer, query, key], and the output of the last."""
    x, (n, d) = x.double(), x.shape[1:]
    theta = 10_000.0 ** (-2 * torch.arange(d // 2).double() / d)
    turn = torch.polar(torch.ones(n, d // 2).double(), torch.arange(n)[:, None] * theta)
    maps = []
    for _ in range(n_layers):
        if norm == "l2":
            y = x / x.norm(dim=-1, keepdim=True)
        else:
            y = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0)
        q = y
        if rope:
            z = torch.complex(y[..., : d // 2], y[..., d // 2 :]) * turn
            q = torch.cat([z.real, z.imag], -1)
        scores = q @ q.mT / {"l2": 1, "layernorm-sqrt-d": d**0.5, "layernorm-d": d}[norm]
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        maps.append(scores.masked_fill(scores.isinf(), torch.nan))
        x = scores.softmax(-1) @ y + x
    return torch.stack(maps, 1), x
