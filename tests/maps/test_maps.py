"""Captured maps: what they say of themselves, and that saving them loses nothing."""

from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import torch

from nope_probe import gaussian, load
from nope_probe.analyses.attribution import attribute
from nope_probe.analyses.pattern import measure
from nope_probe.figures.maps import score_maps
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.maps.centred import pattern_rms
from nope_probe.maps.maps import ScoreMaps, StageMaps


@pytest.fixture(scope="module")
def loaded() -> Any:
    from nope_probe.models.load import load

    return load("nope-tiny", n_layers=2)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 99, (23, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def begun(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tokens[:, 1:], (1, 0), value=1)


def test_captures_know_whether_their_sequences_begin_alike(
    loaded: Any, tokens: torch.Tensor, begun: torch.Tensor
) -> None:
    for capture in (capture_scores, capture_stages):
        assert not capture(loaded.model, tokens, n_folds=4).bos
        assert capture(loaded.model, begun, n_folds=4).bos
        assert not capture(loaded.model, begun[:1], n_folds=1).bos


def test_what_is_saved_is_what_is_read(loaded: Any, begun: torch.Tensor) -> None:
    scores = capture_scores(loaded.model, begun, n_folds=4, per_head=True)
    read = ScoreMaps.from_tensors(scores.to_tensors())
    assert read.bos
    assert torch.equal(read.per_head.nan_to_num(), scores.per_head.nan_to_num())
    stages = capture_stages(loaded.model, begun, n_folds=4)
    assert StageMaps.from_tensors(stages.to_tensors()).bos


def test_one_key_counts_as_first_in_maps_of_tokens_and_none_in_maps_of_vectors(
    loaded: Any, tokens: torch.Tensor, begun: torch.Tensor
) -> None:
    with_bos, without = (capture_scores(loaded.model, item, n_folds=4) for item in (begun, tokens))
    for maps in (with_bos, without):
        assert repr(measure(maps)) == repr(measure(maps, 1)) != repr(measure(maps, 0))
        assert not isnan(measure(maps)[1].lead.value)
    folds, counts = with_bos.folds, with_bos.counts
    assert repr(measure(folds, counts=counts)) == repr(measure(with_bos, 0))
    inputs = gaussian(n_seqs=8, seq_len=11, d_model=64, alpha=0.3)
    vectors = capture_scores(load("parameter-free").model, inputs, n_folds=4)
    assert repr(measure(vectors)) == repr(measure(vectors, 0))
    assert all(isnan(layer.lead.value) for layer in measure(vectors))
    for maps, skip in ((with_bos, 1), (without, 1), (vectors, 0)):
        both = {(): maps, "mask": maps}
        assert repr(attribute(both)) == repr(attribute(both, skip_keys=skip))


def test_colours_of_score_maps_leave_out_the_bos_key(loaded: Any, begun: torch.Tensor) -> None:
    maps = capture_scores(loaded.model, begun, n_folds=4)
    for skip in (1, 0, 3):
        cells = maps.mean[1, :, skip:]
        cells = cells[cells.isfinite()]
        limits = score_maps(replace(maps, skip_keys=skip), clipped=0.0).layout.coloraxis2
        assert (limits.cmin, limits.cmax) == pytest.approx((float(cells.min()), float(cells.max())))


def test_the_rms_of_a_pattern_is_that_of_its_rows_less_their_means() -> None:
    maps = torch.randn(2, 7, 7, dtype=torch.float64)
    rows = [maps[:, i, 2:i] - maps[:, i, 2:i].mean(-1, keepdim=True) for i in range(3, 7)]
    expected = torch.cat(rows, -1).square().mean(-1).sqrt()
    torch.testing.assert_close(pattern_rms(maps, 2), expected)
