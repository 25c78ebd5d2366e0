"""Masks, rotations and scores that are written down by hand get their names and numbers back."""

from dataclasses import astuple, replace
from math import cos, sin

import pytest
import torch

from recover import (
    fit_score_product,
    layout_of,
    mask_shape,
    power_law,
    recover_rotation,
    turning_part,
)

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
    shape = mask_shape(visible.__getitem__, len(visible))
    assert (shape.kind, shape.size, shape.n_positions) == (kind, size, N)


def turning(angles: dict[tuple[int, int], float], n: int, size: float = 1.0) -> torch.Tensor:
    """Return the matrices at three positions that turn some pairs of n coordinates."""
    matrices = torch.eye(n, dtype=torch.float64).repeat(3, 1, 1)
    for position in range(3):
        for (low, high), angle in angles.items():
            c, s = size * cos(position * angle), size * sin(position * angle)
            matrices[position, low, [low, high]] = torch.tensor([c, -s], dtype=torch.float64)
            matrices[position, high, [low, high]] = torch.tensor([s, c], dtype=torch.float64)
    return matrices


@pytest.mark.parametrize(
    ("pairs", "layout"),
    [([(0, 2), (1, 3)], "halves"), ([(0, 1), (2, 3)], "adjacent"), ([(1, 3), (2, 4)], "other")],
)
def test_the_pairs_their_angles_and_their_layout_are_recovered(pairs, layout):
    angles = dict(zip(pairs, (1.0, -0.03), strict=True))
    straight = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    turned = torch.einsum("pde,pve->pvd", turning(angles, 7, size=1.25)[:2], straight)
    turned[..., [5, 6]] = straight[..., [5, 6]]
    rotation = recover_rotation(straight, turned)
    assert rotation.pairs.tolist() == [list(pair) for pair in pairs]
    assert rotation.frequencies.tolist() == pytest.approx(list(angles.values()))
    assert (layout_of(rotation), rotation.factor) == (layout, pytest.approx(1.25))
    still = rotation.sin * torch.tensor([1, 0])  # the second pair
    first = replace(rotation, cos=torch.ones_like(rotation.cos), sin=still)
    assert turning_part(first).pairs.tolist() == [list(pairs[0])]


def test_vectors_that_turn_in_no_known_pairs_have_no_rotation():
    straight = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    turned = torch.einsum("pde,pve->pvd", turning({(0, 3): 1.0, (1, 2): 0.5}, 7)[:2], straight)
    assert recover_rotation(straight, turned) is None


SLOWED = 2_000.0 ** (-torch.arange(7).double() / 7) / torch.tensor([1, 1, 1, 1, 8, 8, 8])


@pytest.mark.parametrize(
    ("frequencies", "base", "scale", "n_following"),
    [
        (0.5 * 2_000.0 ** (-torch.arange(5).double() / 5), 2_000, 2, 5),
        (SLOWED, 2_000, 8, 4),
        (SLOWED / 3, 2_000, 24, 4),
        (torch.tensor([1.0, 0.5]), 4, 1, 2),
        (torch.tensor([1.0, 0.5, 0.1, 0.02]), None, None, 2),  # two pairs on a line are no law
        (torch.tensor([1 / 4]), None, 4, 1),
    ],
)
def test_base_and_scale_are_those_of_the_pairs_that_follow_a_power_law(
    frequencies, base, scale, n_following
):
    law = power_law(frequencies)
    assert (law.base, law.n_following) == (base and pytest.approx(base, rel=1e-4), n_following)
    assert law.scale == (scale and pytest.approx(scale, rel=1e-4))


PRODUCTS = torch.linspace(-90, 110, 211, dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.3, -0.2, 5.0])
def test_a_multiple_of_the_product_has_its_factor_and_no_cap(scale: float):
    fit = fit_score_product(PRODUCTS, scale * PRODUCTS)
    assert fit.scale == pytest.approx(scale)
    assert fit.soft_cap is None
    assert fit.error < 1e-12


@pytest.mark.parametrize("cap", [7.0, 50.0])
def test_a_soft_cap_and_the_scale_inside_it_are_recovered(cap: float):
    fit = fit_score_product(PRODUCTS, cap * torch.tanh(0.3 * PRODUCTS / cap))
    assert fit.scale == pytest.approx(0.3, rel=1e-6)
    assert fit.soft_cap == pytest.approx(cap, rel=1e-6)
    bias = torch.linspace(9, 0, 211, dtype=torch.float64)
    assert fit_score_product(PRODUCTS, 0.3 * PRODUCTS + bias).error > 0.05, "no such product"


@pytest.mark.filterwarnings("error")
def test_products_that_are_all_zero_have_no_scale():
    zeros = torch.zeros(5)
    assert astuple(fit_score_product(zeros, zeros)) == (0.0, None, 0.0)
    assert astuple(fit_score_product(zeros, torch.arange(5.0))) == (0.0, None, 1.0)
