"""What `compare` computes: every number that runs share, less the first run's, fold by fold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from nope_probe.analyses.differences import LEVEL, compare_numbers, holm
from nope_probe.analyses.jackknife import Interval
from nope_probe.errors import UserError, kind_of
from nope_probe.figures.intervals import bound_columns, interval_of
from nope_probe.figures.words import PLACES, Columns
from nope_probe.maps.estimates import Estimates
from nope_probe.run.flags import refuse
from nope_probe.run.folder import Run, read_run
from nope_probe.run.processes import status
from nope_probe.run.session import Session
from nope_probe.studies.compare import Settings, report, unlike
from nope_probe.studies.page import with_page
from nope_probe.studies.tables import TableRow
from nope_probe.studies.tidy import declared

# A profile holds hundreds of numbers, one per distance, which would hide all other numbers.
PROFILES = ("offsets",)


def run(settings: Settings) -> Path:
    """Compare runs unless the comparison is finished, and return its folder.

    Raises:
        UserError: for runs that cannot be compared, or that share no number.
    """
    with Session(settings).opened() as session:
        if not session.finished:
            with status("comparing and writing"):
                session.write(analyse(session))
    return session.folder


def analyse(session: Session[Settings]) -> Run:
    """Compare the runs' tables, and return the run."""
    runs = [read_run(folder) for folder in session.settings.runs]
    table = difference(*runs)
    labels = [of["label"] for of in session.recorded["runs"]]
    results = {"folders": dict(zip(labels, map(str, session.settings.runs), strict=True))}
    manifest = replace(session.manifest(), sources=None, seconds=0, results=results)
    return with_page(session, Run(manifest=manifest, tables={"differences": table}), report)


def difference(base: Run, other: Run) -> pd.DataFrame:
    """Return every number that two runs share, and its difference with a 95% interval.

    A number is a declared column with bounds, but for profiles. Layers are those of both runs.
    Differences are `other` less `base`: fold by fold (paired) where both runs had the same
    sequences in the same folds, so that the sequences' common noise cancels. Numbers without
    replicates have no interval.

    Args:
        base: the run to compare with, as `run_ablations` and its like or `read_run` return it.
        other: another run of the same command.

    Returns:
        The table of `compare`'s differences.csv, a row for each number: its `table`, the columns
        that name its row, such as `layer` and `removed`, `number`, `value` and `base_value`,
        `difference` with its bounds, `p_holm` over the numbers of the table, `differs`, and
        `method`; first the numbers that differ, the largest difference before the others.

    Raises:
        UserError: for what are no runs, or for runs of different commands, lengths, rows or skipped
            keys, or without a number in common.

    Example:
        >>> from nope_probe import difference, run_ablations
        >>> settings = {"layers": 3, "n_seqs": 64, "seq_len": 24, "remove": "none"}
        >>> runs = [run_ablations(model, **settings) for model in ("nope-tiny", "rope-tiny")]
        >>> numbers = difference(*runs).query("layer == 2").set_index("number")
        >>> bool(numbers.loc["locality", "differs"]), numbers.loc["locality", "method"]
        (True, 'paired')
    """
    for run in (base, other):
        if not isinstance(run, Run):
            raise UserError(f"expected runs, as `read_run` returns them, got {kind_of(run)}")
    refuse(unlike(base.manifest, other.manifest))
    columns = declared(base.manifest.kind)
    one, two = ((of.manifest.data.sha256, of.manifest.fold_sizes) for of in (base, other))
    shared = [name for name in base.tables if name in other.tables and name not in PROFILES]
    rows = [row for name in shared for row in _rows(base, other, name, columns, one == two)]
    if not rows:
        raise UserError("the runs have no numbers in common")
    names, numbers = map(pd.DataFrame, zip(*rows, strict=True))
    table = names.join(numbers)
    p = table.groupby("table", sort=False)["p_holm"].transform(holm)
    table = table.assign(p_holm=p, differs=p <= LEVEL, size=table["difference"].abs())
    by_size = table.sort_values(["differs", "size"], ascending=False, kind="stable")
    return by_size.drop(columns="size").reset_index(drop=True)


def _rows(
    base: Run, other: Run, table: str, columns: Columns, paired: bool
) -> Iterator[tuple[TableRow, TableRow]]:
    """Yield what names the row of each number that two tables share, and its difference."""
    of_runs = [run.tables[table] for run in (base, other)]
    shared = [str(name) for name in of_runs[0] if name in of_runs[1] and name in columns]
    names = [name for name in shared if name in PLACES or columns[name].names_rows]
    if not names:
        return
    numbers = [name for name in shared if {*bound_columns(name)} <= {*of_runs[0]} & {*of_runs[1]}]
    places = [of_run[names].assign(place=range(len(of_run))) for of_run in of_runs]
    pairs = places[0].merge(places[1], on=names, suffixes=("", " of the other"))
    for *named, one, two in pairs.itertuples(index=False):
        for number in numbers:
            before, after = _number(base, table, number, one), _number(other, table, number, two)
            is_rms = bool(columns[number].noise)
            change, p, method = compare_numbers(before, after, paired=paired, is_rms=is_rms)
            row = {"table": table, **dict(zip(names, named, strict=True))}
            values = {"number": number, "value": after.value, "base_value": before.value}
            tested = {"p_holm": p, "differs": False, "method": method}
            yield row, {**values, **change.columns("difference"), **tested}


def _number(run: Run, table: str, column: str, row: int) -> Interval:
    """Return a number of a run with its interval, and its replicates if the run keeps them."""
    value, low, high = interval_of(run.tables[table].iloc[row], column)
    kept, key, replicates = run.arrays.get("estimates", {}), f"{table}/{column}", None
    if key in kept:
        of_table = kept.get(f"weights/{key}", kept[f"weights/{table}"])
        weights = of_table if of_table.ndim == 1 else of_table[row]
        n_folds = int((weights > 0).sum())
        values, weights = kept[key][row, : 1 + n_folds], weights[:n_folds]
        replicates = Estimates(values=torch.from_numpy(values), weights=torch.from_numpy(weights))
    return Interval(value=value, low=low, high=high, replicates=replicates)
