"""Score maps and term maps: what they are drawn from, which cells they show, on which scale."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.maps import N_LAYERS, text_of, triangle

from nope_probe import (
    LoadedModel,
    ablated,
    capture_attention,
    capture_scores,
    capture_stages,
    figures,
    load,
    sequences,
)
from nope_probe.analyses.simulation import Estimate
from nope_probe.figures.maps import score_maps, term_maps, unfold_layers
from nope_probe.figures.panels import RowMaps
from nope_probe.maps.rows import diagonal_normalised

TOKENS = torch.randint(1, 2048, (13, 11), generator=torch.Generator().manual_seed(0))


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


def test_attention_is_drawn_as_weights_of_the_mean_over_heads_or_of_a_named_head() -> None:
    loaded = load("rope-tiny")
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=23, seq_len=11)
    attention = capture_attention(loaded, data)
    figure = score_maps(attention)
    assert text_of(figure) == ["L0", "L1", "L2", "L3"]
    assert "attention weight" in figure.layout.title.text
    head = score_maps(attention.head(2, 3))
    assert text_of(head) == ["L2H3"]
    below = np.tril(np.ones((11, 11), bool))
    means = attention.mean.numpy()
    drawn = (figure.data[2].z, means[2].mean(0)), (head.data[0].z, means[2, 3])
    for (cells, weights), of in zip(drawn, (figure, head), strict=True):
        np.testing.assert_allclose(cells[below], weights[below], rtol=1e-6)
        assert np.isnan(cells[~below]).all()
        assert of.layout.coloraxis.colorbar.title.text == "attention weight"
        assert "attention weight" in of.data[0].hovertemplate
    five = replace(
        attention,
        **{
            name: torch.cat([(x := getattr(attention, name)), x[:, :1]], 1)
            for name in ("weights", "information", "others", "scores")
        },
        visible=torch.cat([attention.visible, attention.visible[:1]]),
        layers=(0, 1, 2, 3, 7),
    )
    with_slider = score_maps(five)
    assert with_slider.layout.coloraxis.colorbar.title.text == "attention weight"
    assert [step.label for step in with_slider.layout.sliders[0].steps] == [*"01237"]


def test_maps_by_name_are_side_by_side_on_the_scale_of_their_layer(rope_tiny: LoadedModel) -> None:
    data = sequences(tokenizer=rope_tiny.tokenizer, n_seqs=23, seq_len=11)
    maps = capture_scores(rope_tiny, data, per_head=True)
    with ablated(rope_tiny, "mask") as model:
        without = capture_scores(model, data, per_head=True)
    heads = {"intact": maps.head(1, 3), "mask": without.head(1, 3)}
    figure = score_maps(heads)
    assert text_of(figure) == ["L1H3, intact", "L1H3, mask"]
    limits = [figure.layout[name] for name in ("coloraxis", "coloraxis2")]
    assert limits[0].cmin == limits[1].cmin
    assert limits[0].cmax == limits[1].cmax
    assert [bool(axis.showscale) for axis in limits] == [True, False]
    for trace, of_head in zip(figure.data, heads.values(), strict=True):
        np.testing.assert_allclose(trace.z, of_head.mean[0].numpy(), rtol=1e-6)
    layers = score_maps({"intact": maps, "mask": without})
    assert text_of(layers) == [f"L{n}, {name}" for n in (0, 1) for name in ("intact", "mask")]


def test_maps_name_query_down_key_right_and_nats() -> None:
    for figure in (score_maps(triangle()), term_maps({"all": triangle()}, title="a title")):
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


def test_leads_are_a_strip_with_a_colour_bar_of_its_own() -> None:
    maps = triangle(2, 11)
    maps[:, :, 0] *= 100  # the first column holds leads
    figure = term_maps({"intact": RowMaps(values=maps, skip_keys=1)}, title="t")
    for layer, (trace, column) in enumerate(zip(figure.data[::2], figure.data[1::2], strict=True)):
        top = figure.layout.meta["scales"][layer][1]
        assert top == pytest.approx(np.nanmax(np.abs(maps[layer, :, 1:])), rel=0.1)
        np.testing.assert_array_equal(column.z[:, 0], maps[layer, :, 0])
        assert np.isnan(trace.z[:, 0]).all(), "the first key has no cells in the map"
        np.testing.assert_array_equal(trace.z[:, 1:], maps[layer, :, 1:])
        assert column.x0 + column.dx / 2 < 0.5, "a gap sets the strip apart"
        assert (trace.coloraxis, column.coloraxis) == ("coloraxis", "coloraxis2")
        largest = np.nanmax(np.abs(maps[layer, :, 0]))
        limits = figure.layout.sliders[0].steps[layer].args[1]
        assert limits["coloraxis2.cmax"] == -limits["coloraxis2.cmin"] == pytest.approx(largest)
        assert figure.layout.meta["leads"][layer] == pytest.approx(largest)
        visible = figure.layout.sliders[0].steps[layer].args[0]["visible"]
        assert visible == [shown == layer for shown in (0, 1) for _ in "ab"]
    assert figure.layout.coloraxis2.colorbar.title.text == "first key's lead, nats"
    unfolded = unfold_layers(figure)
    assert [unfolded.layout[trace.coloraxis].cmax for trace in unfolded.data[1::2]] == list(
        figure.layout.meta["leads"]
    )
    assert "first key's lead to ±" in unfolded.layout.coloraxis.colorbar.title.text
    [plain, _] = term_maps({"intact": maps}, title="t").data
    np.testing.assert_array_equal(plain.z, maps[0])


def test_colours_of_terms_span_three_standard_errors() -> None:
    terms = {"intact": RowMaps(values=triangle(2, 11), skip_keys=1)}
    shown = term_maps(terms, title="t").layout.meta["scales"]
    scales = term_maps(terms, title="t", noise=[2.0, 0.02]).layout.meta["scales"]
    assert [*scales] == [(-6, 6), shown[1]]


def test_the_papers_colour_scale_is_the_same_in_every_layer_and_others_are_quantiles() -> None:
    maps = np.random.default_rng(0).random((5, 7, 7)).astype(np.float32)
    figure = score_maps(maps[:2], title="maps", high=8.0)
    axes = [figure.layout[name] for name in ("coloraxis", "coloraxis2")]
    assert [(axis.cmin, axis.cmax, axis.showscale) for axis in axes] == [
        (0.0, 8.0, True),
        (0.0, 8.0, False),
    ]
    figure = score_maps(maps, title="maps", high=8.0)
    assert figure.layout.meta["scales"] == [(0.0, 8.0)] * 5
    figure = score_maps(maps, multiples=1, clipped=1.0)
    limits = [np.percentile(layer, [1, 99]) for layer in maps]
    np.testing.assert_allclose(figure.layout.meta["scales"], limits, rtol=1e-5)
    assert len(figure.layout.sliders[0].steps) == 5


def test_noise_is_drawn_flat_and_a_pattern_is_not() -> None:
    noise = np.random.default_rng(0).normal(0.4, 1e-7, (2, 7, 7))
    noise[1] += np.arange(7.0)
    figure = score_maps(noise, noise=[0.01] * 2)
    flat, clear = figure.layout.coloraxis, figure.layout.coloraxis2
    assert text_of(figure) == ["L0: flat, within noise", "L1"]
    assert (flat.cmin, flat.cmax) == pytest.approx((0.0, 0.8), abs=1e-6)
    assert clear.cmax - clear.cmin > 5
    behind_a_slider = score_maps(noise, noise=[0.01] * 2, multiples=0).layout.meta["scales"]
    assert behind_a_slider == [(flat.cmin, flat.cmax), (clear.cmin, clear.cmax)]


def drawn(figure) -> list[np.ndarray]:
    return [np.asarray(trace.z) for trace in figure.data]


def test_score_maps_are_drawn_from_a_capture_a_tensor_or_an_array(rope_tiny: LoadedModel) -> None:
    scores = capture_scores(rope_tiny, TOKENS)
    for draw in (figures.score_maps, lambda maps: figures.score_maps(maps, high=1.0)):
        truth = drawn(draw(scores.mean.float().numpy()))
        for maps in (scores, scores.mean, scores.mean.numpy()):
            for actual, theirs in zip(drawn(draw(maps)), truth, strict=True):
                np.testing.assert_array_equal(actual, theirs)
    rows = figures.RowMaps(values=scores.mean.numpy(), skip_keys=1)
    both = figures.term_maps({"all": scores, "mask": rows}, title="terms")
    for one, other in zip(both.data[:2], both.data[2:4], strict=True):  # a map, and its lead
        np.testing.assert_array_equal(one.z, other.z)


def test_a_simulations_estimate_is_drawn_as_its_mean() -> None:
    folds = torch.from_numpy(np.stack([triangle(2), 3 * triangle(2)]))
    estimate = Estimate(folds=folds, counts=torch.tensor([3, 1]))
    np.testing.assert_allclose(score_maps(estimate).data[1].z, 1.5 * triangle(2)[1], rtol=1e-6)


def test_a_circuit_is_drawn_from_what_capture_stages_returns(rope_tiny: LoadedModel) -> None:
    stages = capture_stages(rope_tiny, TOKENS)
    arrays = {letter: stages.mean(letter).numpy() for letter in stages.folds}
    normalised = {letter: diagonal_normalised(stages.mean(letter)) for letter in stages.folds}
    settings = {"layer": 0, "removed": ["rope"]}
    actual = figures.circuit(stages, reference=stages, **settings)
    assert actual == figures.circuit(arrays, reference=arrays, skip_keys=1, **settings)
    assert sum("RoPE" in (mark.text or "") for mark in actual.layout.annotations) == 2
    of_rest = figures.circuit(stages, kind="less diagonal means", **settings)
    settings |= {"kind": "less diagonal means", "skip_keys": 1}
    assert of_rest == figures.circuit(normalised, **settings)
