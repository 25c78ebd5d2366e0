"""Values, terms and exact splits: every number of a table, with its interval."""

import numpy as np
import pandas as pd
from support.maps import text_of

from nope_probe.figures.values import head_values
from nope_probe.run.folder import Run
from nope_probe.studies.ablate import WITHOUT_BANDS, removal_sections
from tests.support.manifests import manifest_of


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
    ends = {"rope[0:2]": (6.283, 9.004), "rope[2:5]": (1234.0, 1234.0)}
    manifest = manifest_of(**{"positional_sources": ["mask", "rope"], "wavelengths": ends})
    run = Run(manifest=manifest, tables={"head_pattern": table, "pattern": table})
    bands = next(of for of in removal_sections(run) if of.title == WITHOUT_BANDS.title)
    lead, order = bands.drawn().data
    assert list(lead.x) == ["6.3–9", "1,200"]
    assert list(lead.y) == ["L1H0", "L1H2", "L3H0"]
    np.testing.assert_array_equal(lead.z, [[5.0, 2.5], [np.nan] * 2, [15.0, 7.5]])
    np.testing.assert_array_equal(order.z, [[0.5, 0.25], [1.0, 0.5], [1.5, 0.75]])
    np.testing.assert_allclose(order.customdata[1, 0], [0.5, 2.0])
