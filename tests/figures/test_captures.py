"""Figures take what captures return, tensors and arrays alike."""

import numpy as np
import pytest
import torch

from nope_probe import figures, load
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.maps.centred import diagonal_normalised
from nope_probe.maps.maps import ScoreMaps, StageMaps

TOKENS = torch.randint(1, 2048, (13, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def scores() -> ScoreMaps:
    return capture_scores(load("rope-tiny", n_layers=2).model, TOKENS)


@pytest.fixture(scope="module")
def stages() -> StageMaps:
    return capture_stages(load("rope-tiny", n_layers=2).model, TOKENS)


def drawn(figure) -> list[np.ndarray]:
    return [np.asarray(trace.z) for trace in figure.data]


def test_score_maps_are_drawn_from_a_capture_a_tensor_or_an_array(scores: ScoreMaps) -> None:
    for draw in (figures.score_maps, lambda maps: figures.fixed_scale_maps(maps, title="scores")):
        truth = drawn(draw(scores.mean.float().numpy()))
        for maps in (scores, scores.mean, scores.mean.numpy()):
            for ours, theirs in zip(drawn(draw(maps)), truth, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_term_maps_are_drawn_from_tensors_and_captures(scores: ScoreMaps) -> None:
    both = figures.term_maps({"all": scores, "mask": scores.mean}, title="terms")
    assert len(both.data) == 4
    np.testing.assert_array_equal(both.data[0].z, both.data[1].z)


def test_a_circuit_is_drawn_from_what_capture_stages_returns(stages: StageMaps) -> None:
    arrays = {letter: stages.mean(letter).numpy() for letter in stages.folds}
    normalised = {letter: diagonal_normalised(stages.mean(letter)) for letter in stages.folds}
    settings = {"layer": 0, "removed": ["rope"], "reference": stages}
    ours = figures.circuit(stages, **settings)
    assert ours == figures.circuit(arrays, normalised=normalised, **settings)
    assert {trace.name for trace in ours.data} == set("abcdefghi")
    assert sum("RoPE" in (mark.text or "") for mark in ours.layout.annotations) == 2


def test_given_maps_have_no_view_without_diagonal_means(stages: StageMaps) -> None:
    arrays = {letter: stages.mean(letter).numpy() for letter in stages.folds}
    assert len(figures.circuit(arrays).data) == 9 + 7
    assert len(figures.circuit(stages).data) == 9 + 7 + 9
