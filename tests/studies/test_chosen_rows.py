"""Runs whose maps have the rows of chosen queries, to their ends."""

from pathlib import Path

import numpy as np
import pytest
from support.command_line import run_command
from support.rounding import assert_same

from nope_probe import (
    ablate,
    circuit,
    read_run,
    run_circuit,
    trace,
)
from nope_probe.maps.rows import choose_rows
from nope_probe.studies import circuit as circuit_page

N, ROWS = 41, 13
SMALL = ["--n-seqs", "11", "--seq-len", str(N), "--folds", "5"]
QUERIES = choose_rows(N, ROWS).tolist()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("command", "more", "name"),
    [
        (ablate, ["--layers", "1", "--remove", "qk"], "pattern/intact"),
        (circuit, ["--layer", "1"], "gram/i"),
        (trace, ["--layers", "2", "--confirm", "0"], "L1/all"),
    ],
)
def test_the_maps_of_a_run_are_rows_of_those_with_all(
    command, more: list[str], name: str, tmp_path: Path
) -> None:
    for folder, rows in (("some", ["--query-rows", str(ROWS)]), ("all", [])):
        run_command(command, *SMALL, *more, *rows, "--out", str(tmp_path / folder))
    some, whole = (read_run(tmp_path / folder) for folder in ("some", "all"))
    assert some.query_positions.tolist() == QUERIES
    assert whole.query_positions is None
    expected = np.where(
        np.arange(N) <= np.array(QUERIES)[:, None], whole.maps[name][..., QUERIES, :], np.nan
    )
    assert_same(some.maps[name], expected)


def test_stages_of_chosen_rows_are_drawn_at_their_queries() -> None:
    sizes = {"n_seqs": 11, "seq_len": N, "folds": 5, "query_rows": ROWS}
    run = run_circuit("rope-tiny", layer=1, remove="w_q", **sizes)
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
