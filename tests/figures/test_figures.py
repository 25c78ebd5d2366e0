"""Figures: what they show, on which scale, and what they call it. Nothing is said about pixels."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from nope_probe.figures import maps as figures
from nope_probe.figures import measures, shares
from nope_probe.figures import style as figure_style
from nope_probe.figures.downsample import pool, row_centred
from nope_probe.figures.grid import Grid

LAYERS, N = 3, 7


def triangle(layers: int = LAYERS, n: int = N, seed: int = 0) -> np.ndarray:
    maps = np.random.default_rng(seed).standard_normal((layers, n, n)).astype(np.float32)
    return np.where(np.tri(n, dtype=bool), maps, np.nan).astype(np.float32)


def text_of(figure: go.Figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations]


def test_pooling_averages_blocks_and_leaves_the_masked_triangle_out() -> None:
    n = np.nan
    maps = np.array([[[1, n, n, n, n], [3, 5, n, n, n], [2, 4, 6, n, n], [4, 6, 8, 10, n]]])
    maps = np.concatenate([maps, np.full((1, 1, 5), 7.0)], axis=1).astype(np.float32)
    pooled = pool(maps, 3)
    assert pooled.block == 2
    # (1+3+5)/3 on the diagonal, (2+4+4+6)/4 below it; the last block has one row, then one cell.
    expected = [[[3, n, n], [4, 8, n], [7, 7, 7]]]
    np.testing.assert_allclose(pooled.values, expected)


def test_pooling_leaves_small_maps_as_they_are() -> None:
    maps = triangle()
    pooled = pool(maps, N)
    assert pooled.block == 1
    np.testing.assert_array_equal(pooled.values, maps)


def test_pooling_to_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 position, got 0"):
        pool(triangle(), 0)


def test_row_centring_equals_the_analysis() -> None:
    torch = pytest.importorskip("torch")
    from nope_probe.analyses import pattern

    maps = triangle(n=11)
    theirs = pattern.row_centred(torch.from_numpy(maps), 2)
    np.testing.assert_allclose(row_centred(maps, 2), theirs.numpy(), atol=1e-6)


def test_few_layers_stand_side_by_side_each_on_its_own_scale() -> None:
    maps = triangle() + np.arange(LAYERS, dtype=np.float32)[:, None, None] * 100
    figure = figures.score_maps(maps)
    assert text_of(figure) == ["L0", "L1", "L2"]
    assert [trace.coloraxis for trace in figure.data] == ["coloraxis", "coloraxis2", "coloraxis3"]
    assert figure.layout.coloraxis.cmax < 10 < 90 < figure.layout.coloraxis2.cmin
    np.testing.assert_array_equal(figure.data[1].z, maps[1])


@pytest.mark.parametrize("layers", [1, 5, 32])
def test_any_number_of_layers_can_be_drawn(layers: int) -> None:
    figure = figures.score_maps(triangle(layers))
    assert len(figure.data) == layers
    assert len(figure.layout.sliders) == (layers > 4)


def test_a_slider_shows_one_layer_with_its_own_limits() -> None:
    maps = triangle(5) * np.array([1, 2, 3, 4, 50], dtype=np.float32)[:, None, None]
    figure = figures.term_maps({"all": maps, "mask": maps / 2}, title="t", layer=1)
    assert [trace.visible for trace in figure.data] == [False] * 2 + [True] * 2 + [False] * 6
    visible, scale = figure.layout.sliders[0].steps[4].args
    assert visible["visible"] == [False] * 8 + [True] * 2
    assert scale["coloraxis.cmax"] == figure.layout.meta["scales"][4][1]
    assert scale["coloraxis.cmax"] > 5 * figure.layout.coloraxis.cmax


def test_terms_share_one_scale_centred_on_zero() -> None:
    maps = triangle()
    figure = figures.term_maps({"content": maps - 3, "mask": maps * 2}, title="t", layer=0)
    assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis"}
    red = figure.layout.coloraxis.colorscale[-1][1]
    assert red == "rgb(103,0,31)", "the largest value is red"


def test_maps_say_query_down_key_right_and_nats() -> None:
    for figure in (
        figures.score_maps(triangle()),
        figures.term_maps({"all": triangle()}, title="what is seen"),
    ):
        assert figure.layout.xaxis.title.text == "key position"
        assert figure.layout.yaxis.title.text == "query position"
        assert figure.layout.yaxis.autorange == "reversed"
        bar = figure.layout.coloraxis.colorbar
        assert "nat" in f"{bar.title.text}{bar.ticksuffix}"
        assert figure.layout.title.text
        for word in ("query", "key", "nat"):
            assert word in figure.data[0].hovertemplate


def test_positions_count_from_zero_and_pooled_cells_stand_at_their_blocks_middle() -> None:
    plain = figures.score_maps(triangle()).data[0]
    pooled = figures.score_maps(triangle(), max_positions=3).data[0]
    assert (plain.x0, plain.dx) == (0, 1)
    assert (pooled.x0, pooled.dx, pooled.y0, pooled.dy) == (1, 3, 1, 3)
    assert "mean of 3 × 3" in pooled.hovertemplate


def test_cells_above_the_diagonal_stay_blank() -> None:
    figure = figures.term_maps({"all": triangle()}, title="t", max_positions=3)
    above = np.triu_indices(3, k=1)
    assert np.isnan(figure.data[0].z[above]).all()
    assert figure.layout.plot_bgcolor == figure_style.BLANK


def test_no_term_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one term"):
        figures.term_maps({}, title="t")


def test_panels_fill_the_width_and_never_overlap() -> None:
    domains = Grid(columns=3, panel=100).domains(5)
    assert domains[0][0][0] == 0
    assert domains[2][0][1] == pytest.approx(1)
    assert domains[0][0][1] < domains[1][0][0]
    assert domains[3][1][1] < domains[0][1][0], "the second row stands below the first"


def test_a_phone_gets_two_panels_in_a_row() -> None:
    figure = figures.term_maps({name: triangle() for name in ("all", "mask", "rope")}, title="t")
    narrow = figure.layout.meta["narrow"]
    assert figure.layout.yaxis3.domain[1] == 1
    assert narrow["yaxis3.domain"][1] < narrow["yaxis.domain"][0]
    assert narrow["xaxis3.domain"] == narrow["xaxis.domain"]


def sources() -> pd.DataFrame:
    nan = np.nan
    rows = [
        (1, "content", 0.1, 0.0, 0.2, nan, nan, nan),
        (1, "mask", 0.3, 0.2, 0.4, nan, nan, nan),
        (2, "content", 0.2, 0.1, 0.3, 0.25, 0.15, 0.45),
        (2, "mask", 0.9, 0.8, 1.1, 0.75, 0.55, 0.85),
    ]
    columns = ["layer", "term", "rms", "rms_low", "rms_high", "share", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def test_shares_are_dots_with_their_intervals() -> None:
    figure = shares.source_shares(sources())
    content = figure.data[0]
    assert content.name == "content"
    assert content.y[1] == 0.25
    assert content.error_y.array[1] == pytest.approx(0.2)
    assert content.error_y.arrayminus[1] == pytest.approx(0.1)
    assert np.round(content.x).tolist() == [1, 2]


def test_a_layer_without_pattern_is_said_and_not_dropped() -> None:
    figure = shares.source_shares(sources())
    said = [each for each in figure.layout.annotations if each.text == "no pattern"]
    assert [(each.x, each.xref) for each in said] == [(1, "x")], "the RMS panel has numbers"
    assert tuple(figure.layout.xaxis.range) == (0.5, 2.5)


def test_a_deep_model_gets_wide_panels_and_a_tick_for_some_layers() -> None:
    table = pd.concat([sources().query("layer == 2").assign(layer=i) for i in range(1, 38)])
    figure = shares.source_shares(table)
    assert figure.layout.xaxis.domain == figure.layout.xaxis2.domain == (0, 1)
    assert figure.layout.xaxis.dtick == 4
    assert len(figure.data[0].y) == 37


def test_a_component_has_one_colour_and_one_marker_in_every_figure() -> None:
    columns = ["share", "low", "high", "sufficiency", "necessity"]
    players = sources().rename(columns={"term": "player"}).assign(sufficiency=0.1, necessity=0.2)
    table = players[["layer", "player", *columns]]
    masks = [
        next(trace for trace in figure.data if trace.name == "causal mask")
        for figure in (shares.source_shares(sources()), shares.player_shares(table))
    ]
    assert {trace.marker.color for trace in masks} == {figure_style.COLOURS["mask"]}
    assert {trace.marker.symbol for trace in masks} == {figure_style.SYMBOLS["mask"]}


TOGETHER = (
    ("content", "mask", "rope", "interaction"),
    ("content", "mask", "pos_embed", "interaction"),
    ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp"),
    ("mask", "pos_embed", "w_q", "w_k", "w_o", "w_v", "mlp"),
    ("mask", "rope", "qk", "ov", "mlp"),
    ("mean_term", "covariance_term"),
)
# Machado, Oliveira, Fernandes 2009, full severity, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    ),
    "deutan": np.array(
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    ),
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.clip(to_xyz @ rgb, 1e-4, None) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("names", TOGETHER)
@pytest.mark.parametrize("sight", SIGHT)
def test_components_shown_together_differ_for_colour_blind_readers(
    names: tuple[str, ...], sight: str
) -> None:
    seen = {name: lab(SIGHT[sight] @ linear(figure_style.COLOURS[name])) for name in names}
    for index, one in enumerate(names):
        for other in names[:index]:
            same_marker = figure_style.SYMBOLS[one] == figure_style.SYMBOLS[other]
            assert not same_marker, (one, other)
            assert np.linalg.norm(seen[one] - seen[other]) > 10, (one, other)


@pytest.mark.parametrize("paper", ["#ffffff", "#14161a"])
def test_every_component_stands_out_on_light_and_dark_paper(paper: str) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    for name, colour in figure_style.COLOURS.items():
        if name != "intact":
            light, dark = sorted([weights @ linear(colour), weights @ linear(paper)])[::-1]
            assert (light + 0.05) / (dark + 0.05) >= 3, name


def test_interactions_are_read_in_short_with_the_largest_first() -> None:
    rows = [(0, "mask+w_q", 0.1), (0, "mask+rope", -0.5), (1, "mask+w_q", 0.2), (1, "mask+rope", 0)]
    table = pd.DataFrame(rows, columns=["layer", "players", "share"])
    figure = shares.interactions(table.assign(low=-1.0, high=1.0), layer=1)
    assert list(figure.data[1].y) == ["mask + W_Q", "mask + RoPE"], "plotly's axis points up"
    assert [trace.visible for trace in figure.data] == [False, True]


def pattern_table(kept: list[str]) -> pd.DataFrame:
    rows = []
    for layer in (1, 2):
        for index, name in enumerate(kept):
            row = {"layer": layer, "kept": name, "tokens": "text", "skip_keys": index % 2}
            for measure in measures.MEASURES:
                row |= {measure: layer + index, f"{measure}_low": 0.0, f"{measure}_high": 9.0}
            rows.append(row)
    return pd.DataFrame(rows)


def test_measures_are_drawn_with_and_without_each_source() -> None:
    kept = ["mask+rope+w_q", "rope+w_q", "mask+w_q", "w_q", "mask+rope"]
    figure = measures.pattern_measures(pattern_table(kept), "mask+rope+w_q")
    first = [trace for trace in figure.data if trace.xaxis == "x"]
    assert [trace.name for trace in first] == [
        "intact model",
        "without causal mask",
        "without RoPE",
        "without either",
    ]
    assert [trace.y[0] for trace in first] == [1, 2, 3, 4]
    assert len(figure.data) == 4 * len(measures.MEASURES)


def test_shuffled_tokens_have_open_markers() -> None:
    table = pattern_table(["mask", "none"])
    table.loc[table["kept"] == "none", "tokens"] = "shuffled"
    figure = measures.controls(table, "mask")
    assert figure.data[0].name == "intact model, text, all keys"
    assert figure.data[1].name == "without causal mask, shuffled, keys from 1"
    assert not figure.data[0].marker.symbol.endswith("-open")
    assert figure.data[1].marker.symbol.endswith("-open")


def test_training_dynamics_draws_a_line_per_layer_and_model_on_a_log_axis() -> None:
    rows = [(step, layer, step * layer) for step in (0, 2, 20) for layer in (1, 2)]
    table = pd.DataFrame(rows, columns=["step", "layer", "amplitude"])
    figure = measures.training_dynamics({"nope-tiny": table, "rope-tiny": table})
    assert text_of(figure) == ["nope-tiny", "rope-tiny"]
    assert len(figure.data) == 4
    assert figure.layout.xaxis.type == figure.layout.xaxis2.type == "log"
    assert list(figure.data[1].x) == [1, 2, 20], "step 0 stands left of the first step"
    assert list(figure.data[1].y) == [0, 4, 40]
    assert figure.layout.yaxis2.matches == "y"
