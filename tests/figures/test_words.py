"""Estimates with intervals: as columns, as text, as error bars; noise is drawn as flat."""

import numpy as np
import pandas as pd
from support.maps import text_of

from nope_probe.figures.maps import term_maps
from nope_probe.figures.style import FLAT, axis_range, is_noise
from nope_probe.figures.views import draw
from nope_probe.figures.words import (
    Column,
    View,
    bound_columns,
    column_text,
    interval_of,
    interval_text,
)


def test_bounds_have_the_name_of_their_estimate_and_text_its_unit() -> None:
    row = {"share": 0.5, "share_low": 0.4, "share_high": 0.6}
    assert interval_of(pd.Series(row), "share") == (0.5, 0.4, 0.6)
    assert bound_columns("lost") == ("lost_low", "lost_high")
    assert interval_text((-0.0001, -0.2, 0.3), "z.3f") == "0.000 [-0.200, 0.300]", (
        "no negative zero"
    )
    percent = Column("share", unit="share")
    assert column_text(row | {"share_low": -0.125}, "share", percent) == "50.0% [-12.5, 60.0]"
    assert column_text({"share": -0.0001}, "share", percent, "z.0f") == "0%", "without an interval"
    assert interval_text((np.nan, np.nan, np.nan), "+.2f", "%") == "no pattern"


def test_numbers_are_noise_if_no_interval_leaves_zero_out_and_axes_show_it_flat() -> None:
    assert is_noise([0.1, -0.1, np.nan], [-0.1, -0.3, np.nan], [0.3, 0.1, np.nan])
    assert not is_noise([0.1, 0.5], [-0.1, 0.4], [0.3, 0.6])
    assert not is_noise([-0.5], [-0.6], [-0.4])
    assert not is_noise([np.nan], [np.nan], [np.nan])
    assert axis_range([3e-7], [2e-7], [4e-7]) == (0.0, 0.01), "it never spans less"
    assert axis_range([-3e-7], [-4e-7], [-2e-7]) == (-0.01, 0.01)
    assert axis_range([np.nan], [np.nan], [np.nan]) is None


def test_a_panel_of_noise_is_flat_and_noted_and_its_neighbour_is_not() -> None:
    rows, numbers = pd.DataFrame({"layer": [0, 1]}), {"noise": Column("a"), "clear": Column("b")}
    for name, values, half in (("noise", [2e-7, -2e-7], 3e-7), ("clear", [0.5, 0.7], 0.1)):
        rows[name] = values
        rows[f"{name}_low"], rows[f"{name}_high"] = rows[name] - half, rows[name] + half
    figure = draw(View(table="t", title="t", y=tuple(numbers), by=()), rows, numbers)
    assert figure.layout.yaxis.range == (-0.01, 0.01)
    assert figure.layout.yaxis2.range is None
    assert [title.text for title in figure.layout.annotations] == [f"a{FLAT}", "b"]
    assert figure.layout.xaxis2.matches == "x"


def test_a_layer_within_noise_has_the_scale_of_the_strongest_and_says_so() -> None:
    maps = np.stack([1e-7 * np.ones((5, 5)), 3.0 * np.ones((5, 5))])
    noise = {"all": [0], "mask": [0, 1]}
    figure = term_maps({"all": maps, "mask": maps}, title="t", flat=noise)
    np.testing.assert_array_equal(figure.layout.meta["scales"], [[-3, 3], [-3, 3]])
    assert text_of(figure) == [
        "whole pattern<br><i>within noise</i>",
        "causal mask<br><i>within noise</i>",
    ]
    for patch in (figure.layout.meta["patches"][1], figure.layout.sliders[0].steps[1].args[1]):
        assert patch["annotations[0].text"] == "whole pattern"
        assert patch["annotations[1].text"] == "causal mask<br><i>within noise</i>"


def test_an_rms_within_its_noise_is_drawn_as_zero_and_a_lead_below_zero_is_not() -> None:
    rows = pd.DataFrame({"layer": [0, 1, 2], "of": ["pattern", "lead", "pattern"]})
    rows = rows.assign(size=[-0.1, -0.2, 0.3], size_low=[-0.2, -0.3, 0.1])
    rows = rows.assign(size_high=[0.05, -0.1, 0.4])
    view = View(table="", title="", y=("size",), by=())
    figure = draw(view, rows, {"size": Column("size", noise="within noise")})
    [dots] = figure.data
    np.testing.assert_allclose(dots.y, [0.0, -0.2, 0.3])
    np.testing.assert_allclose(np.array(dots.customdata)[0], [0.0, 0.05])
    about = Column("size", noise="within noise")
    texts = [column_text(row, "size", about) for row in rows.to_dict("records")]
    assert texts == ["within noise", "-0.2 [-0.3, -0.1]", "0.3 [0.1, 0.4]"]
