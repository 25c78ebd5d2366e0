"""Values, terms and exact splits: every number of a table, with its interval."""

import numpy as np
import pandas as pd
from support.maps import text_of

from nope_probe.figures.attention import head_values


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
