"""Figures of behaviour hold the numbers of their tables."""

import numpy as np
import pandas as pd

from nope_probe import figures
from nope_probe.figures.intervals import FLAT

CONDITIONS = ("intact", "mask", "qk", "w_q:mean")


def interval(name: str, value: float) -> dict[str, float]:
    return {name: value, f"{name}_low": value - 0.5, f"{name}_high": value + 1}


def named(figure: object, name: str) -> list:
    return [trace for trace in figure.data if trace.name == name]


def test_sources_and_weights_have_panels_of_their_own_and_the_intact_model_is_in_both() -> None:
    rows = [
        {"condition": condition, "position": position, **interval("loss", 10 * index + position)}
        for index, condition in enumerate(CONDITIONS)
        for position in range(3 if condition == "mask" else 1, 6)
    ]
    figure = figures.loss_by_position(pd.DataFrame(rows), title="Loss", trained=4)
    assert [trace.xaxis for trace in named(figure, "intact model")] == ["x", "x2"]
    (mask,) = named(figure, "without causal mask")
    assert (mask.xaxis, list(mask.x), list(mask.y)) == ("x", [3, 4, 5], [13, 14, 15])
    (mean,) = named(figure, "without W_Q (mean)")
    assert (mean.xaxis, list(mean.customdata[0])) == ("x2", [30.5, 32.0])
    band = next(each for each in figure.data if each.legendgroup == mask.name and each.fill)
    assert list(band.x) == [3, 4, 5, 5, 4, 3]
    assert list(band.y) == [14, 15, 16, 14.5, 13.5, 12.5]
    assert [shape.x0 for shape in figure.layout.shapes] == [4, 4]


def test_differences_leave_out_what_has_no_number() -> None:
    rows = [
        {"measure": "loss", "condition": "qk", **interval("difference", 2.0)},
        {"measure": "loss", "condition": "mask", **interval("difference", np.nan)},
        {"measure": "order", "condition": "mask", **interval("difference", -1.0)},
    ]
    units = {"order": "positions", "loss": "nats"}
    figure = figures.differences(pd.DataFrame(rows), {"order": "order", "loss": "loss"}, units)
    assert [note.text for note in figure.layout.annotations] == ["order", "loss", FLAT]
    shown = {(each.xaxis, each.y[0]): each for each in figure.data if len(each.x)}
    assert set(shown) == {("x", "without causal mask"), ("x2", "without QK circuit")}
    qk = shown["x2", "without QK circuit"]
    assert (figure.layout.xaxis.title.text, figure.layout.xaxis2.title.text) == (*units.values(),)
    assert list(qk.x) == [2.0]
    assert list(qk.error_x.array) == [1.0]
    assert list(qk.error_x.arrayminus) == [0.5]


def test_panels_of_a_unit_have_one_scale_and_name_which_way_is_worse() -> None:
    sizes = {"loss": 5.0, "order": 2.0, "position": 40.0}
    rows = [
        {"measure": name, "condition": "rope", **interval("difference", size)}
        for name, size in sizes.items()
    ]
    units = {"loss": "nats; higher is worse", "order": "nats; lower", "position": "positions"}
    figure = figures.differences(pd.DataFrame(rows), dict(zip(units, units, strict=True)), units)
    titles = [figure.layout[f"xaxis{i}"].title.text for i in ("", 2, 3)]
    assert titles == [*units.values()]
    assert (figure.layout.xaxis2.matches, figure.layout.xaxis3.matches) == ("x", None)
    np.testing.assert_allclose(figure.layout.xaxis.range, [0, 6.0 * 1.05])


def test_decodability_draws_untrained_models_where_there_are_any_and_each_name_once() -> None:
    rows = [
        {
            "layer": layer,
            "condition": condition,
            **interval("distance", layer + index),
            **interval("null", 30),
            **interval("untrained", np.nan if condition == "qk" else 20),
        }
        for index, condition in enumerate(("intact", "mask", "qk"))
        for layer in (0, 1)
    ]
    figure = figures.decodability(pd.DataFrame(rows))
    names = [trace.name for trace in figure.data if trace.showlegend]
    assert len(names) == len({*names})
    assert named(figure, "untrained, without causal mask")
    assert not named(figure, "untrained, without QK circuit")
    assert [list(each.y) for each in named(figure, "without QK circuit")] == [[2, 3]]
