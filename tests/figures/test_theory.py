"""Simulated maps and curves beside their theory."""

import numpy as np
import pytest

from nope_probe.figures.maps import fixed_scale_maps, score_maps
from nope_probe.figures.theory import Curves, rows_against_theory


@pytest.mark.parametrize("n_layers", [2, 5])
def test_the_papers_colour_scale_is_the_same_in_every_layer(n_layers):
    maps = np.random.default_rng(0).random((n_layers, 7, 7)).astype(np.float32)
    figure = fixed_scale_maps(maps, title="maps", high=8.0)
    axes = [figure.layout[name] for name in figure.layout if name.startswith("coloraxis")]
    assert axes
    assert {(each.cmin, each.cmax) for each in axes} == {(0.0, 8.0)}
    if n_layers > 4:
        assert figure.layout.meta["scales"] == [[0.0, 8.0]] * n_layers


def test_lines_of_theory_are_in_the_panel_of_their_layers_dots():
    x, values = np.arange(3.0), np.arange(6.0).reshape(2, 3)
    curves = Curves(x=x, values=values, errors=0.1 + values, theory=values + 1)
    figure = rows_against_theory({"alpha=0": curves})
    line, dots = figure.data[2:]
    assert (line.mode, dots.mode) == ("lines", "markers")
    assert line.xaxis == dots.xaxis == "x2"
    assert list(dots.error_y.array) == pytest.approx([3.1, 4.1, 5.1])
    assert list(line.y - dots.y) == [1, 1, 1]


@pytest.mark.parametrize("n_layers", [2, 5])
def test_noise_is_drawn_flat_and_a_pattern_is_not(n_layers):
    noise = np.random.default_rng(0).normal(0.4, 1e-7, (n_layers, 7, 7))
    noise[-1] += np.arange(7.0)
    figure = score_maps(noise, noise=[0.01] * n_layers)
    if n_layers > 4:
        scales = figure.layout.meta["scales"]
        assert figure.layout.coloraxis.cmax - figure.layout.coloraxis.cmin == pytest.approx(0.8)
    else:
        axes = [figure.layout[name] for name in ("coloraxis", "coloraxis2")]
        scales = [(each.cmin, each.cmax) for each in axes]
        titles = [each.text for each in figure.layout.annotations]
        assert titles == ["L0: flat, within noise", "L1"]
    spans = [high - low for low, high in scales]
    assert spans[0] == pytest.approx(0.8)
    assert spans[-1] > 5
    assert sum(scales[0]) / 2 == pytest.approx(0.4, abs=1e-6)


def test_curves_of_noise_are_drawn_flat_and_say_so() -> None:
    x = np.arange(5.0)
    values = np.stack([1 + 1e-8 * np.arange(5), np.arange(5.0)])
    curves = Curves(x=x, values=values, errors=np.full((2, 5), 2e-3), theory=values)
    figure = rows_against_theory({"alpha=0": curves})
    low, high = figure.layout.yaxis.range
    assert (high - low, (high + low) / 2) == pytest.approx((10 * 8 * 1e-3, 1))
    assert figure.layout.yaxis.tickvals == pytest.approx((1,))
    assert figure.layout.yaxis2.range is None
    assert [each.text for each in figure.layout.annotations] == [
        "L0: flat, within noise",
        "L1",
    ]
    assert figure.layout.xaxis2.matches == "x"
