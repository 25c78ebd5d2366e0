"""Score maps and term maps: what they are drawn from, which cells they show, on which scale."""

import numpy as np
import pytest
import torch
from support.maps import N_LAYERS, text_of, triangle

from nope_probe import figures, load
from nope_probe.figures.maps import score_maps, term_maps
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.maps.centred import diagonal_normalised
from nope_probe.maps.maps import ScoreMaps, StageMaps


def test_few_layers_are_side_by_side_each_on_its_own_scale() -> None:
    maps = triangle() + np.arange(N_LAYERS, dtype=np.float32)[:, None, None] * 100
    figure = score_maps(maps)
    assert text_of(figure) == ["L0", "L1", "L2"]
    assert [trace.coloraxis for trace in figure.data] == ["coloraxis", "coloraxis2", "coloraxis3"]
    assert figure.layout.coloraxis.cmax < 10 < 90 < figure.layout.coloraxis2.cmin
    np.testing.assert_array_equal(figure.data[1].z, maps[1])
    assert [figure.layout[name].matches for name in ("xaxis2", "yaxis2")] == ["x", "y"]


def test_a_slider_shows_one_layer_with_its_own_limits() -> None:
    maps = triangle(5) * np.array([1, 2, 3, 4, 50], dtype=np.float32)[:, None, None]
    figure = term_maps({"all": maps, "mask": maps / 2}, title="t", layer=1)
    assert [trace.visible for trace in figure.data] == [False] * 2 + [True] * 2 + [False] * 6
    visible, scale = figure.layout.sliders[0].steps[4].args
    assert visible["visible"] == [False] * 8 + [True] * 2
    assert scale["coloraxis.cmax"] == figure.layout.meta["scales"][4][1]
    assert scale["coloraxis.cmax"] > 5 * figure.layout.coloraxis.cmax
    assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax
    assert figure.layout.coloraxis.colorscale[-1][1] == "#67001f", "the largest value is red"


def test_maps_name_query_down_key_right_and_nats() -> None:
    for figure in (
        score_maps(triangle()),
        term_maps({"all": triangle()}, title="a title"),
    ):
        assert figure.layout.xaxis.title.text == "key position"
        assert figure.layout.yaxis.title.text == "query position"
        assert figure.layout.yaxis.autorange == "reversed"
        bar = figure.layout.coloraxis.colorbar
        assert "nat" in f"{bar.title.text}{bar.ticksuffix}"
        assert figure.layout.title.text
        for word in ("query", "key", "nat"):
            assert word in figure.data[0].hovertemplate
    assert (bar.x, bar.xanchor) == (0.5, "center")  # of the terms: below all of them


def test_positions_count_from_zero_and_pooled_cells_are_at_their_blocks_middle() -> None:
    plain = score_maps(triangle()).data[0]
    pooled = score_maps(triangle(), max_positions=3).data[0]
    assert (plain.x0, plain.dx) == (0, 1)
    assert (pooled.x0, pooled.dx, pooled.y0, pooled.dy) == (1, 3, 1, 3)
    assert "mean of 3 × 3" in pooled.hovertemplate
    assert np.isnan(pooled.z[np.triu_indices(3, k=1)]).all(), "above the diagonal it stays blank"


def test_a_phone_gets_two_panels_in_a_row() -> None:
    figure = term_maps({name: triangle() for name in ("all", "mask", "rope")}, title="t")
    narrow = figure.layout.meta["narrow"]
    assert figure.layout.yaxis3.domain[1] == 1
    assert narrow["yaxis3.domain"][1] < narrow["yaxis.domain"][0]
    assert narrow["xaxis3.domain"] == narrow["xaxis.domain"]


def test_a_layers_colours_run_from_its_1_percent_to_its_99_percent_quantile():
    generator = np.random.default_rng(0)
    maps = generator.normal(size=(3, 23, 23))
    maps[:, ~np.tril(np.ones((23, 23), bool))] = np.nan
    figure = score_maps(maps, multiples=1, clipped=1.0)
    limits = [np.nanpercentile(each, [1, 99]) for each in maps]
    np.testing.assert_allclose(figure.layout.meta["scales"], limits, rtol=1e-5)
    assert len(figure.layout.sliders[0].steps) == 3


def with_sink(layers: int = 2) -> np.ndarray:
    """Small values below the diagonal, and a first column a hundred times as large."""
    maps = np.random.default_rng(0).normal(size=(layers, 11, 11)).astype(np.float32)
    maps[:, :, 0] *= 100
    return np.where(np.tri(11, k=-1, dtype=bool), maps, np.nan)


def test_colours_of_terms_leave_the_skipped_keys_out() -> None:
    maps = with_sink()
    hidden = term_maps({"all": maps}, title="t").layout.meta["scales"]
    shown = term_maps({"all": maps}, title="t", skip_keys=1).layout.meta["scales"]
    for layer in range(2):
        assert hidden[layer][1] > 50
        assert shown[layer][1] == pytest.approx(np.nanmax(np.abs(maps[layer, :, 1:])), rel=0.1)
    pooled = term_maps({"all": maps}, title="t", skip_keys=1, max_positions=6)
    assert pooled.layout.meta["scales"][0][1] < 5, "the block that holds a skipped key is left out"


def test_colours_of_noise_span_three_standard_errors_and_of_a_pattern_its_cells() -> None:
    maps = np.array([0.01, 5])[:, None, None] * triangle(2)
    noisy, clear = term_maps({"all": maps}, title="t", noise=[2.0, 0.02]).layout.meta["scales"]
    assert noisy == [-6, 6]
    assert clear == term_maps({"all": maps}, title="t").layout.meta["scales"][1]


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
