"""A rotation turns pairs of coordinates as complex numbers, and knows its angles."""

import pytest
import torch

from nope_probe.maps.positions import Rotation

N_POS, D_HEAD = 5, 7
FREQUENCIES = torch.tensor([1.0, -0.3, 0.0], dtype=torch.float64)
PAIRS = torch.tensor([[0, 3], [1, 4], [2, 5]])


def rotation_of(frequencies: torch.Tensor, factor: float = 1.0) -> Rotation:
    columns = torch.arange(len(frequencies)).repeat(2)
    angles = torch.arange(N_POS)[None, :, None] * frequencies[columns]
    blank = torch.zeros(2, len(frequencies))
    rotation = Rotation(pairs=PAIRS, cos=blank, sin=blank, columns=columns)
    return rotation.at((factor * angles.cos(), factor * angles.sin()))


def test_some_pairs_or_positions_turn_as_in_the_whole_rotation() -> None:
    rotation = rotation_of(FREQUENCIES)
    x = torch.randn(2, N_POS, 3, D_HEAD, generator=torch.Generator().manual_seed(0)).double()
    whole = rotation.turned(x)
    assert torch.equal(rotation.among(slice(1, 4)).turned(x[:, 1:4]), whole[:, 1:4])
    first = rotation.of(torch.tensor([True, False, False])).turned(x)
    assert torch.equal(first[..., [0, 3]], whole[..., [0, 3]])
    assert torch.equal(first[..., [1, 2, 4, 5, 6]], x[..., [1, 2, 4, 5, 6]])


def test_unknown_pairs_turn_nothing() -> None:
    unknown = Rotation(pairs=None, cos=torch.ones(2, 1), sin=torch.zeros(2, 1))
    with pytest.raises(NotImplementedError, match="were not recognised"):
        unknown.turned(torch.randn(1, 2, 1, 2))
