"""Views and figures of hand-made tables: what is shown is read back from traces and from text."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support.maps import text_of

from nope_probe.figures.attention import head_values
from nope_probe.figures.maps import term_maps
from nope_probe.figures.names import brief, in_words
from nope_probe.figures.style import DIVERGING, FLAT, axis_range, is_noise
from nope_probe.figures.views import draw
from nope_probe.figures.words import (
    NO_PATTERN,
    SHARE,
    WITHIN,
    Column,
    View,
    bound_columns,
    column_text,
    interval_of,
    interval_text,
    numbers_as_text,
)
from nope_probe.reports.page import sections

COLUMNS = {
    "lead": Column("lead of the first key", "", "nats", signed=True),
    "kept": Column("kept", "", "nats", blank=NO_PATTERN),
    "total_nats": Column("total", "", "nats"),
    "weight": Column("weight", "", SHARE, blank="no share"),
    "rms": Column("RMS", "", "nats", noise=WITHIN),
    "loss": Column("mean loss", "", "nats"),
    "copied": Column("copied", "", SHARE),
}


def table(numbers: dict[str, list[float]], **places: list[Any]) -> pd.DataFrame:
    """Return a table whose intervals reach 1/4 below and 1/2 above each number."""
    ends = {
        name: column
        for number, values in numbers.items()
        for name, column in zip(
            (number, *bound_columns(number)),
            (np.array(values), np.array(values) - 0.25, np.array(values) + 0.5),
            strict=True,
        )
    }
    return pd.DataFrame({**places, **ends})


def titles(figure: go.Figure) -> list[str]:
    return [a.text for a in figure.layout.annotations if a.yanchor == "bottom"]


def by_name(figure: go.Figure) -> dict[tuple[str, str], Any]:
    return {(trace.name, trace.yaxis): trace for trace in figure.data if trace.name}


def test_dots_have_a_panel_for_each_number_and_a_series_for_each_condition():
    rows = table(
        {"lead": [2.0, -1.0, 3.0, -2.0], "kept": [0.5, 0.25, np.nan, np.nan]},
        layer=[2, 2, 3, 3],
        removed=["intact", "mask+rope"] * 2,
    )
    figure = draw(View(table="pattern", title="Kept", y=("lead", "kept")), rows, COLUMNS)
    assert titles(figure) == ["lead of the first key, nats", "kept, nats"]
    assert figure.layout.xaxis.domain[1] < figure.layout.xaxis2.domain[0]  # side by side
    dots = by_name(figure)
    assert {name for name, _ in dots} == {"intact", "without mask + RoPE"}
    without = dots["without mask + RoPE", "y"]
    assert without.y.tolist() == [-1.0, -2.0]
    assert without.error_y.array.tolist() == [0.5, 0.5]
    assert without.error_y.arrayminus.tolist() == [0.25, 0.25]
    assert np.round(without.x).tolist() == [2, 3]
    assert (without.x > dots["intact", "y"].x).all()  # side by side
    # Only L3 has no number in the second panel.
    notes = [(a.x, a.xref) for a in figure.layout.annotations if a.text == NO_PATTERN]
    assert notes == [(3, "x2")]


def test_a_second_number_in_a_panel_and_a_second_label_have_open_markers():
    rows = table({"lead": [1.0, 2.0], "kept": [3.0, 4.0]}, layer=[0, 0], tokens=["text", "random"])
    both = View(table="", title="", y=(("lead", "kept"),), by=("tokens",))
    symbols = {trace.name: trace.marker.symbol for trace in draw(both, rows, COLUMNS).data}
    assert symbols["text, lead"] == symbols["text, kept"].removesuffix("-open")
    rows["removed"] = "rope"
    labelled = View(table="", title="", y=("lead",), by=("removed", "tokens"))
    symbols = {trace.name: trace.marker.symbol for trace in draw(labelled, rows, COLUMNS).data}
    assert symbols == {"without RoPE, text": "diamond", "without RoPE, random": "diamond-open"}


def test_lines_name_a_removed_weight_by_what_replaces_it():
    rows = table(
        {"lead": [1.0, 2.0, 3.0]},
        layer=[0, 0, 0],
        removed=["mask", "w_q", "w_q"],
        replacement=["none", "mean", "zero"],
    )
    view = View(table="", title="", y=("lead",), by=("removed", "replacement"), kind="lines")
    dashes = {trace.name: trace.line.dash for trace in draw(view, rows, COLUMNS).data}
    assert dashes == {
        "without the causal mask": "solid",
        "with constant queries (W_Q)": "dot",
        "with W_Q replaced by zero": "dash",
    }
    one = draw(view, rows[:2], COLUMNS)
    assert [trace.name for trace in one.data] == [
        "without the causal mask",
        "with constant queries (W_Q)",
    ]


def test_lines_have_intervals_and_are_hollow_within_noise_and_a_button_shows_the_rest():
    rows = table(
        {
            "lead": [1.0, 0.2, -1.0, -0.4],
            "rms": [1.0, 0.2, 0.5, -0.3],
        },  # from 1/4 below to 1/2 above
        layer=[4, 5, 4, 5],
        removed=["intact", "intact", "w_q", "w_q"],
        replacement=["none", "none", "mean", "mean"],
    )
    of_weights = {"later": "removed != 'intact'", "button": "weights"}
    by = ("removed", "replacement")
    view = View(table="", title="", y=("lead", "rms"), by=by, kind="lines", **of_weights)
    figure = draw(view, rows, COLUMNS)
    lines = by_name(figure)
    constant = "with constant queries (W_Q)"
    assert lines["intact", "y"].marker.symbol == ("circle", "circle-open")
    assert lines[constant, "y"].marker.symbol == ("triangle-up", "triangle-up-open")
    assert lines[constant, "y"].error_y.arrayminus.tolist() == pytest.approx([0.25, 0.25])
    assert lines[constant, "y2"].marker.symbol == ("triangle-up", "triangle-up-open")
    assert lines[constant, "y2"].y.tolist() == [0.5, 0.0], "no size is below 0"
    assert [name for (name, _), line in lines.items() if line.visible is False] == [constant] * 2
    [button] = figure.layout.updatemenus[0].buttons
    later = [place for place, trace in enumerate(figure.data) if trace.visible is False]
    assert (button.label, *button.args) == ("weights", {"visible": True}, tuple(later))
    assert button.args2 == ({"visible": False}, tuple(later))
    assert not draw(replace(view, later="", button=""), rows, COLUMNS).layout.updatemenus


def test_tables_of_a_page_are_in_its_words():
    rows = table(
        {"lead": [1.0, 2.0]},
        layer=[3, 3],
        of=["lead", "pattern"],
        term=["mask_x_rope", "without_sources"],
        removed=["mask+rope", "w_k"],
        replacement=["none", "mean"],
    )
    assert in_words(rows, {}).to_dict("list") == {
        "layer": ["L3", "L3"],
        "of": ["first key's lead", "order of other keys"],
        "term": ["mask × RoPE", "without any source"],
        "removed": ["without mask + RoPE", "with constant keys (W_K)"],
        "lead": ["1 [0.75, 1.5]", "2 [1.75, 2.5]"],
    }


def test_rows_of_a_long_table_take_title_and_unit_from_the_measure():
    rows = table(
        {"difference": [1.0, 0.5, 0.25, np.nan, np.nan]},
        measure=["loss", "loss", "copied", "loss", "copied"],
        removed=["mask", "rope", "rope", "intact", "intact"],
    )
    view = View(
        table="", title="", y=("difference",), x="removed", panels="measure", kind="rows",
        same_scale=True,
    )  # fmt: skip
    figure = draw(view, rows, COLUMNS)
    assert titles(figure) == ["mean loss, nats", f"copied{FLAT}"], "its interval has 0"
    assert (figure.layout.xaxis.tickformat, figure.layout.xaxis2.tickformat) == (None, ".0%")
    assert figure.layout.xaxis2.matches is None  # of another unit
    # From above: the last category of the axis is at its top; intact has no difference, and no row.
    assert figure.layout.yaxis.categoryarray == ("without RoPE", "without the causal mask")
    masked = by_name(figure)["without the causal mask", "y"]
    assert (masked.x.tolist(), masked.y) == ([1.0], ("without the causal mask",))
    alike = draw(view, rows.assign(measure=["loss", "loss", "rms", "loss", "rms"]), COLUMNS)
    assert alike.layout.xaxis2.matches == "x"


def test_curves_stand_at_the_middle_of_bins_between_their_bounds():
    rows = table({"rms": [1.0, 2.0]}, layer=[1, 1], query=[2, 4], last_query=[3, 9])
    view = View(
        table="", title="", y=("rms",), x="query", by=(), panels="layer", kind="curves",
        scale="log",
    )  # fmt: skip
    figure = draw(view, rows, COLUMNS, marks={"context": 4, "window": 77})
    band, curve, line = figure.data
    assert (curve.x.tolist(), curve.y.tolist()) == ([2.5, 6.5], [1.0, 2.0])
    assert band.y.tolist() == [1.5, 2.5, 1.75, 0.75]
    assert (line.name, line.x, line.y) == ("context (4)", (4, 4), (0.0, 2.5))
    assert titles(figure) == ["L1, nats"]
    assert figure.layout.xaxis.type == "log"
    dot = draw(view, rows[:1], COLUMNS).data[0]
    assert (dot.mode, dot.y.tolist(), dot.error_y.array.tolist()) == ("markers", [1.0], [0.5])


def test_cells_are_blank_without_a_row_and_in_colours_around_zero():
    rows = table(
        {"lead": [1.0, -3.0, 2.0]}, layer=[0, 0, 5], head=[0, 1, 1], clear=[False, True, False]
    )
    view = View(
        table="", title="", y=("lead",), x="head", by=("layer",), kind="cells", marked="clear"
    )
    cells, dots = (figure := draw(view, rows, COLUMNS)).data
    np.testing.assert_array_equal(cells.z, [[1.0, -3.0], [np.nan, 2.0]])
    assert cells.customdata[1, 1].tolist() == [1.75, 2.5]
    assert (cells.x, cells.y) == ((0, 1), (0, 5))
    assert (dots.x, dots.y) == ((1,), (0,))
    titles_of_axes = figure.layout.xaxis.title.text, figure.layout.yaxis.title.text
    assert titles_of_axes == ("head", "layer")
    colours = figure.layout.coloraxis
    assert (colours.cmin, colours.cmax) == (-3.0, 3.0)
    assert colours.colorscale == tuple(DIVERGING)
    weights = table({"weight": [0.5, 0.25]}, layer=[0, 0], head=[0, 1])
    bounded = draw(replace(view, y=("weight",), marked=""), weights, COLUMNS).layout.coloraxis
    assert (bounded.cmin, bounded.cmax, bounded.colorbar.tickformat) == (0.0, 1.0, ".0%")
    assert bounded.colorscale[0] != colours.colorscale[0]


def test_a_number_is_shown_as_its_column_is_declared_whatever_its_name():
    numbers = table(
        {"total_nats": [1.5], "weight": [0.5], "rms": [0.125], "kept": [np.nan], "share": [2.0]},
        layer=[3],
    )
    assert numbers_as_text(numbers, COLUMNS).iloc[0].tolist() == [
        "3", "1.5 [1.25, 2]", "50.0% [25.0, 100.0]", WITHIN, NO_PATTERN, "2 [1.75, 2.5]",
    ]  # fmt: skip


def test_sections_leave_out_missing_tables_and_show_all_rows_of_others():
    rows = table({"lead": [1.0, 2.0]}, layer=[0, 1], removed=["intact", "rope"])
    views = [
        View(table="pattern", title="Lead", y=("lead",), rows="removed != 'intact'", folded=True),
        View(table="pattern", title="Numbers"),
        View(table="absent", title="Nothing", y=("lead",)),
        View(table="empty", title="Nothing", y=("lead",)),
    ]
    found = list(sections(views, {"pattern": rows, "empty": rows[:0]}, COLUMNS))
    assert [(s.title, s.folded, s.drawn() is None) for s in found] == [
        ("Lead", True, False),
        ("Numbers", False, True),
    ]
    figure = found[0].drawn()
    assert figure is not None
    assert [trace.name for trace in figure.data] == ["without RoPE"]
    assert found[0].table is not None
    assert len(found[0].table) == 2


@pytest.mark.parametrize("by", ["", "measure"])
def test_a_small_table_has_a_row_for_each_value_and_a_cell_for_each_number(by: str):
    wide = table({"loss": [1.0, 2.0], "copied": [0.5, 0.25]}, removed=["intact", "rope"])
    long = table(
        {"value": [1.0, 0.5, 2.0, 0.25]},
        removed=["intact", "intact", "rope", "rope"],
        measure=["loss", "copied"] * 2,
    )
    shown, numbers = (long, ["value"]) if by else (wide, ["loss", "copied"])
    found = brief(shown, "removed", numbers, COLUMNS, by=by)
    assert found.to_dict("records") == [
        {"removed": "intact", "mean loss, nats": "1.00 [0.75, 1.50]", "copied": "50% [25, 100]"},
        {
            "removed": "without RoPE",
            "mean loss, nats": "2.00 [1.75, 2.50]",
            "copied": "25% [0, 75]",
        },
    ]


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


def rows_of(places: list[dict[str, int]], *removed: str, **labels: str) -> pd.DataFrame:
    """Return values of some layers or heads; the second has no lead, the others 1, 2, ... nats."""
    rows = []
    for index, place in enumerate(places):
        for number, name in enumerate(removed):
            row = {**place, "removed": name, **labels}
            for column, times in (("lead", 10.0), ("order", 1.0)):
                value = times * (index + 1) * (1 - 0.25 * number)
                value = np.nan if (column, index) == ("lead", 1) else value
                row |= {column: value, f"{column}_low": value - 0.5, f"{column}_high": value + 1}
            rows.append(row)
    return pd.DataFrame(rows)


HEADS = [{"layer": layer, "head": head} for layer, head in ((1, 0), (1, 2), (3, 0))]


def test_each_head_is_a_point_of_its_value_without_a_source_by_that_in_the_intact_model() -> None:
    table = rows_of(HEADS, "intact", "mask", "rope", "mask+rope", "rope[0:2]")
    figure = head_values(table)
    assert text_of(figure)[:8] == [
        f"{title}, without {name}"
        for title in ("first key's lead", "order of other keys")
        for name in ("the causal mask", "RoPE", "rope[0:2]", "mask + RoPE")
    ]
    lead, *_, order = figure.data
    assert (list(lead.x), list(lead.y)) == ([10.0, 30.0], [7.5, 22.5]), "L1H2 has no lead"
    assert (list(order.x), list(order.y)) == ([1.0, 2.0, 3.0], [0.25, 0.5, 0.75])
    assert list(order.marker.color) == [1, 1, 3]
    assert order.text[2].split("<br>") == [
        "L3H0",
        "intact: 3.00 nats [2.50, 4.00]",
        "without it: 0.75 nats [0.25, 1.75]",
    ]
    assert all((line.x0, line.x1) == (line.y0, line.y1) for line in figure.layout.shapes)
    assert len(figure.layout.shapes) == len(figure.data) == 8
    assert len(head_values(rows_of(HEADS, "intact", "mask")).data) == 2
