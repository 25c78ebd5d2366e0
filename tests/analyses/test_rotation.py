"""RoPE recovered from rotation matrices that are written down by hand."""

from math import cos, pi, sin

import pytest
import torch

from nope_probe.analyses.rotation import power_law, recover_rotation


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
    [
        ([(0, 2), (1, 3)], "halves"),
        ([(0, 1), (2, 3)], "adjacent"),
        ([(0, 3), (1, 2)], "other"),
        ([], None),
    ],
)
def test_the_pairs_their_angles_and_their_layout_are_recovered(pairs, layout):
    angles = dict(zip(pairs, (1.0, 0.03), strict=False))
    found = recover_rotation(turning(angles, 7))
    assert found.pairs.tolist() == [list(pair) for pair in pairs]
    assert found.frequencies.tolist() == pytest.approx(list(angles.values()))
    assert found.layout == layout


def test_a_scaled_rotation_has_its_size_and_the_same_angles():
    found = recover_rotation(turning({(0, 1): 0.7}, 3, size=1.25))
    assert found.size == pytest.approx(1.25)
    assert found.frequencies.item() == pytest.approx(0.7)


def test_the_slowest_pair_of_a_large_base_turns_and_one_that_stands_still_does_not():
    found = recover_rotation(turning({(0, 1): 2e-9, (2, 3): 1e-15}, 5))
    assert found.pairs.tolist() == [[0, 1]]
    assert found.frequencies.item() == pytest.approx(2e-9)


def test_the_base_of_a_power_law_is_recovered():
    law = power_law(0.5 * 2_000.0 ** (-torch.arange(5) / 5))
    assert law.base == pytest.approx(2_000, rel=1e-4)
    assert law.fastest == pytest.approx(0.5)
    assert law.n_following == 5


def test_pairs_that_are_slowed_down_do_not_count_for_the_base():
    frequencies = 2_000.0 ** (-torch.arange(7).double() / 7)
    frequencies[4:] /= 8
    law = power_law(frequencies)
    assert law.base == pytest.approx(2_000)
    assert law.n_following == 4


def test_one_pair_has_no_base():
    assert power_law(torch.tensor([pi / 4])).base is None


def test_two_pairs_on_a_line_are_no_law_where_the_third_is_off():
    law = power_law(torch.tensor([1.0, 0.5, 0.1, 0.02]))
    assert (law.base, law.n_following) == (None, 2)
    assert power_law(torch.tensor([1.0, 0.5])).base == pytest.approx(4)
