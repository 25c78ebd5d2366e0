"""Runs whose maps have the rows of chosen queries, to their ends."""

from typing import Any

import numpy as np
import pytest
from support.rounding import assert_same

from nope_probe import run_ablations, run_circuit, run_trace
from nope_probe.maps.rows import choose_rows
from nope_probe.studies import circuit as circuit_page

N, ROWS = 41, 13
SMALL = {"n_seqs": 11, "seq_len": N, "folds": 5}
QUERIES = choose_rows(N, ROWS).tolist()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("function", "more", "name"),
    [
        (run_ablations, {"layers": 1, "remove": "qk"}, "pattern/intact"),
        (run_circuit, {"layer": 1}, "gram/i"),
        (run_trace, {"layers": 2, "confirm": 0}, "L1/all"),
    ],
)
def test_the_maps_of_a_run_are_rows_of_those_with_all(
    function: Any, more: dict[str, Any], name: str
) -> None:
    whole, some = (function("rope-tiny", query_rows=n, **SMALL, **more) for n in (None, ROWS))
    assert some.query_positions.tolist() == QUERIES
    assert whole.query_positions is None
    expected = np.where(
        np.arange(N) <= np.array(QUERIES)[:, None], whole.maps[name][..., QUERIES, :], np.nan
    )
    assert_same(some.maps[name], expected)


def test_stages_of_chosen_rows_are_drawn_at_their_queries() -> None:
    run = run_circuit("rope-tiny", layer=1, remove="w_q", query_rows=ROWS, **SMALL)
    [drawn] = [
        section.drawn()
        for section in circuit_page.report(run).sections
        if section.title.startswith("The block")
    ]
    stages = sorted(name for name in run.maps if name.startswith("reference/"))
    for stage, heat in zip(stages, drawn.data[::3], strict=True):
        rows = np.array(heat.z)
        assert rows.shape == (N, N)
        np.testing.assert_allclose(rows[QUERIES], run.maps[stage], rtol=1e-3, atol=1e-3)
