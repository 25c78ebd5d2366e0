"""Masks written down as predicates get their names and sizes back."""

import pytest
import torch

from nope_probe.analyses.mask_shape import mask_shape

N = 11
ROW, J = torch.arange(N)[:, None], torch.arange(N)[None, :]


@pytest.mark.parametrize(
    ("visible", "kind", "size"),
    [
        (J <= ROW, "causal", None),
        ((J <= ROW) | (J > ROW), "bidirectional", None),
        ((J <= ROW) & (ROW - J < 3), "window", 3),
        ((J <= ROW) & (ROW - J < 10), "window", 10),
        ((J <= ROW) & (ROW - J < 1), "window", 1),
        ((J <= ROW) & (ROW // 4 == J // 4), "chunks", 4),
        ((J <= ROW) & (ROW // 10 == J // 10), "chunks", 10),
        ((J <= ROW) | ((ROW < 5) & (J < 5)), "prefix", 5),
        ((ROW - J).abs() < 3, "two-sided window", 3),
        ((J <= ROW) & ((ROW - J < 3) | (J == 0)), "other", None),
        (J < ROW, "other", None),
    ],
)
def test_a_mask_has_its_kind_and_size(visible: torch.Tensor, kind: str, size: int | None):
    shape = mask_shape(visible)
    assert (shape.kind, shape.size, shape.n_positions) == (kind, size, N)
