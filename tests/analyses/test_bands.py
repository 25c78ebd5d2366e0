"""Bands of RoPE's pairs against sums over coordinates that are written out."""

import pytest
import torch

from nope_probe.analyses.recover import Rotation
from nope_probe.analyses.splits import make_bands, split_bands


def turning(*frequencies: float) -> Rotation:
    """Return a rotation in halves."""
    n = len(frequencies)
    pairs = torch.tensor([[f, f + n] for f in range(n)], dtype=torch.long).reshape(n, 2)
    return Rotation(pairs=pairs, frequencies=torch.tensor(frequencies), size=1.0)


def test_octaves_hold_the_pairs_of_their_wavelengths():
    # Wavelengths 2 pi / frequency: 6.28, 7.0, 31.4, 125.7.
    [bands] = make_bands([turning(1.0, 0.9, 0.2, 0.05)], 11, "octaves")
    found = {band.name: (band.pairs, band.coordinates) for band in bands}
    assert found == {
        "4-8": ((0, 1), (0, 4, 1, 5)),
        "16-32": ((2,), (2, 6)),
        "64-128": ((3,), (3, 7)),
        "unrotated": ((), (8, 9, 10)),
    }
    assert bands[0].wavelengths == pytest.approx((6.2832, 6.9813), rel=1e-4)


def test_so_many_bands_have_consecutive_pairs_and_all_of_them():
    [bands] = make_bands([turning(*(0.5**f for f in range(7)))], 14, 3)
    assert [band.pairs for band in bands] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [band.name for band in bands] == ["0", "1", "2"]


def test_a_layer_without_rope_has_all_of_its_coordinates_in_the_rest():
    with_rope, without = make_bands([turning(1.0, 0.1), turning()], 5, 2)
    assert [band.name for band in with_rope] == [band.name for band in without]
    assert [band.coordinates for band in with_rope] == [(0, 2), (1, 3), (4,)]
    assert [band.coordinates for band in without] == [(), (), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("choice", ["octaves", 2])
def test_a_model_without_rope_has_no_bands(choice):
    with pytest.raises(ValueError, match="no layer has RoPE"):
        make_bands([turning(), turning()], 6, choice)


def test_more_bands_than_pairs_are_refused():
    with pytest.raises(ValueError, match="expected from 1 to 2 bands"):
        make_bands([turning(1.0, 0.1)], 4, 3)


def test_shares_of_bands_are_projections_and_add_to_1():
    n, position = 7, torch.arange(7.0, dtype=torch.float64)
    near = -(position[:, None] - position[None, :]).expand(n, n)
    # Two bands whose patterns are 3/4 and 1/4 of the whole, in all of five folds.
    maps = torch.stack([0.75 * near, 0.25 * near]).expand(5, 1, 2, n, n)
    bands = make_bands([turning(1.0, 0.1)], 4, 2)
    found = split_bands(maps.sum(2), maps, bands)
    assert [each.share.value for each in found] == pytest.approx([0.75, 0.25])
    rows = [near[i, :i] - near[i, :i].mean() for i in range(1, n)]
    whole = float(torch.cat(rows).square().mean().sqrt())
    assert found[0].amplitude.value == pytest.approx(0.75 * whole)
    assert found[1].amplitude.value == pytest.approx(0.25 * whole)
