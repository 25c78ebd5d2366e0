"""Values, terms and exact splits: every number of a table, with its interval."""

import numpy as np
import pandas as pd
from support.maps import text_of

from nope_probe.figures.curves import band_amplitudes, offset_profiles
from nope_probe.figures.intervals import FLAT
from nope_probe.figures.values import head_bands, head_values, term_sizes, values_by_layer


def rows_of(places: list[dict[str, int]], *removed: str, **labels: str) -> pd.DataFrame:
    """Return values of some layers or heads; the second has no lead, the others 1, 2, ... nats."""
    rows = []
    for index, place in enumerate(places):
        for number, name in enumerate(removed):
            row = {**place, "removed": name, **labels}
            for column, times in (("lead", 10.0), ("kept", 1.0)):
                value = times * (index + 1) * (1 - 0.25 * number)
                value = np.nan if (column, index) == ("lead", 1) else value
                row |= {column: value, f"{column}_low": value - 0.5, f"{column}_high": value + 1}
            rows.append(row)
    return pd.DataFrame(rows)


def test_each_condition_is_a_line_over_layers_of_leads_and_of_order() -> None:
    layers = [{"layer": layer} for layer in (1, 2, 5)]
    tables = [
        rows_of(layers, "intact", "mask", replacement="none"),
        rows_of(layers, "w_q", replacement="mean"),
        rows_of(layers, "w_q", replacement="identity"),
    ]
    figure = values_by_layer(pd.concat(tables))
    assert text_of(figure)[:2] == ["first key's lead, nats", "order of other keys, nats"]
    lead, order = ([t for t in figure.data if t.yaxis == at] for at in ("y", "y2"))
    names = ["intact", "without the causal mask", "with constant queries (W_Q)"]
    names += ["with W_Q replaced by identity"]
    assert [trace.name for trace in lead] == [trace.name for trace in order] == names
    assert list(order[1].x) == [1, 2, 5]
    assert list(order[1].y) == [0.75, 1.5, 2.25]
    assert list(order[1].customdata[0]) == [0.25, 1.75]
    assert [trace.line.dash for trace in order] == ["solid", "solid", "solid", "dash"]
    without_leads = pd.concat(tables).assign(lead=np.nan)
    assert text_of(values_by_layer(without_leads))[0] == "order of other keys, nats"


def test_terms_have_their_sizes_in_a_panel_for_each_question() -> None:
    rows = [
        {"layer": 0, "of": of, "term": term} | dict.fromkeys(("size", "size_low", "size_high"), 2.0)
        for of in ("lead", "pattern")
        for term in ("mask", "rope", "without_sources")
    ]
    figure = term_sizes(pd.DataFrame(rows))
    assert text_of(figure)[:2] == ["first key, nats", "other keys, nats"]
    names = [trace.name for trace in figure.data if trace.yaxis == "y2"]
    assert names == ["causal mask", "RoPE", "without any source"]


def test_each_band_is_a_bar_with_its_interval_in_its_layers_panel_on_one_scale():
    table = pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "band": ["4-8", "unrotated", "4-8", "unrotated"],
            "amplitude": [1.0, 2.0, 1e-4, 1e-4],
            "amplitude_low": [0.5, 1.5, -1e-4, -2e-4],
            "amplitude_high": [1.5, 4.0, 2e-4, 3e-4],
            "share": [0.25, 0.75, 0.5, 0.5],
        }
    )
    figure = band_amplitudes(table)
    first, second = figure.data
    assert (list(first.x), list(first.y)) == (["4-8", "unrotated"], [1.0, 2.0])
    assert list(first.error_y.array) == [0.5, 2.0]
    assert list(first.error_y.arrayminus) == [0.5, 0.5]
    assert list(first.customdata) == [25.0, 75.0]
    assert (first.xaxis, second.xaxis) == ("x", "x2")
    assert figure.layout.yaxis2.matches == "y"
    assert [note.xref for note in figure.layout.annotations if note.text == FLAT] == ["x2 domain"]


def test_each_term_is_a_line_within_its_bounds_and_is_named_once():
    offsets = [1, 2, 3]
    parts = [
        pd.DataFrame({"layer": layer, "term": term, "offset": offsets, "mean": np.arange(3.0)})
        for layer in (0, 1)
        for term in ("score", "pattern", "rope")
    ]
    table = pd.concat(parts).assign(
        mean_low=lambda t: t["mean"] - 1, mean_high=lambda t: t["mean"] + 2
    )
    figure = offset_profiles(table)
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    areas = [trace for trace in figure.data if trace.fill == "toself"]
    assert len(lines) == len(areas) == 6
    assert [line.name for line in lines if line.showlegend] == [
        "scores",
        "positional pattern",
        "RoPE",
    ]
    for line, area in zip(lines, areas, strict=True):
        assert list(line.y) == [0.0, 1.0, 2.0]
        assert list(area.x) == [1, 2, 3, 3, 2, 1]
        assert list(area.y) == [2.0, 3.0, 4.0, 1.0, 0.0, -1.0]
        assert (line.xaxis, line.legendgroup) == (area.xaxis, area.legendgroup)


HEADS = [{"layer": layer, "head": head} for layer, head in ((1, 0), (1, 2), (3, 0))]


def test_each_head_is_a_point_of_its_value_without_a_source_by_that_in_the_intact_model() -> None:
    table = rows_of(HEADS, "intact", "mask", "rope", "mask+rope", "rope[0:2]")
    figure = head_values(table)
    assert text_of(figure)[:6] == [
        f"{title}, without {name}"
        for title in ("first key's lead", "order of other keys")
        for name in ("the causal mask", "RoPE", "both")
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
    assert len(figure.layout.shapes) == len(figure.data) == 6
    assert len(head_values(rows_of(HEADS, "intact", "mask")).data) == 2


def test_each_head_has_a_row_of_its_values_by_band() -> None:
    table = rows_of(HEADS, "intact", "mask", "rope[0:2]", "rope[2:5]")
    wavelengths = {"rope[0:2]": (6.283, 9.004), "rope[2:5]": (1234.0, 1234.0)}
    lead, order = head_bands(table, wavelengths).data
    assert list(lead.x) == ["6.3–9", "1,200"]
    np.testing.assert_array_equal(lead.z, [[5.0, 2.5], [np.nan] * 2, [15.0, 7.5]])
    np.testing.assert_array_equal(order.z, [[0.5, 0.25], [1.0, 0.5], [1.5, 0.75]])
    np.testing.assert_allclose(order.customdata[1, 0], [0.5, 2.0])
    assert [row[0] for row in order.text] == ["L1H0", "L1H2", "L3H0"]
    assert head_bands(table).layout.yaxis.ticktext == ("L1H0", "L3H0")
    assert list(head_bands(table).data[0].x) == ["rope[0:2]", "rope[2:5]"]
