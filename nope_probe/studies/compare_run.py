"""What `compare` computes: the numbers that runs share, and their differences, fold by fold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from nope_probe.analyses.differences import LEVEL, Numbers, compare_numbers, holm
from nope_probe.errors import UserError, kind_of
from nope_probe.figures.words import PLACES, Columns, bound_columns
from nope_probe.run.flags import folder_of, refuse
from nope_probe.run.folder import READ, Run, is_finished, read_run, write_run
from nope_probe.run.manifest import Manifest, versions, what_differs
from nope_probe.run.processes import checkpoint_dir, locked, status
from nope_probe.studies.compare import VALUES, Settings, cells_of, declared, report, unlike

# A profile holds hundreds of numbers, one per distance, which would hide all other numbers.
PROFILES = ("offsets",)
CELLS = "position"  # names rows that mean the same at one length alone
Named: TypeAlias = tuple[pd.DataFrame, Numbers]  # what names each number, and the numbers
NOTHING_SHARED = "the runs have no numbers in common"


def run(settings: Settings) -> Path:
    """Compare runs unless the comparison is finished, and return its folder.

    Raises:
        UserError: for runs that cannot be compared, or that share no number.
    """
    settings.validate()
    recorded = settings.recorded()
    folder = folder_of(settings, recorded)
    with locked(checkpoint_dir(folder)):
        if not is_finished(folder, recorded, {}):
            with status("comparing and writing"):
                write_run(folder, analyse(settings, folder))
    return folder


def analyse(settings: Settings, folder: Path) -> Run:
    """Compare the runs' tables, and return the run with its page.

    Args:
        settings: name the runs.
        folder: where the run will be, which links to the pages of the runs.
    """
    # Of two runs, maps are shown side by side.
    files = READ if len(settings.runs) == 2 else READ[:1]
    runs = [read_run(of, files) for of in settings.runs]
    differing, lines = settings.differing()
    pages = [os.path.relpath(of / "report.html", folder) for of in settings.runs]
    results = {
        "of": settings.subject,
        "lines": lines,
        "folders": dict(zip(differing.index, map(str, settings.runs), strict=True)),
        "pages": dict(zip(differing.index, pages, strict=True)),
    }
    manifest = Manifest(
        kind=settings.command,
        command=settings.typed(),
        settings=settings.recorded(),
        versions=versions(),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        results=results,
    )
    compared = Run(manifest=manifest, tables={"differences": _differences(runs, differing, lines)})
    return replace(compared, page=report(compared).html(manifest))


def difference(*runs: Run) -> pd.DataFrame:
    """Return every number that runs share, and its differences with 95% intervals.

    A number is a declared column with bounds, but for profiles; where lengths, rows or skipped keys
    differ, rows of single positions are left out. Of two runs, the difference is that of the second
    less the first. Of three or more, a series, it is less that of the run before, along the setting
    that differs; where another setting differs too, of the run before with the same. Differences
    are taken fold by fold (paired) where both runs had the same sequences in the same folds, so
    that the sequences' common noise cancels. Numbers without replicates have no interval.

    Args:
        runs: two or more of one command, as `run_ablations` and its like or `read_run` return
            them; of two, the first is the one to compare with.

    Returns:
        The table of `compare`'s differences.csv, a row for each number: its `table`, the columns
        that name its row, such as `layer` and `removed`, `number`, `value`, `difference` with its
        bounds, `p_holm` over the numbers of the table, `differs`, and `method`. Of two runs it has
        `base_value`, and first the numbers that differ, the largest difference before the others;
        of a series the bounds of `value` and, in front, `run` and the settings that differ.

    Raises:
        UserError: for what are no runs, or for runs of different commands, or without a number in
            common.

    Example:
        >>> from nope_probe import difference, run_ablations
        >>> settings = {"layers": 3, "n_seqs": 64, "seq_len": 24, "remove": "none"}
        >>> runs = [run_ablations(model, **settings) for model in ("nope-tiny", "rope-tiny")]
        >>> numbers = difference(*runs).query("layer == 2").set_index("number")
        >>> bool(numbers.loc["locality", "differs"]), numbers.loc["locality", "method"]
        (True, 'paired')
    """
    for run in runs:
        if not isinstance(run, Run):
            raise UserError(f"expected runs, as `read_run` returns them, got {kind_of(run)}")
    manifests = [run.manifest for run in runs]
    refuse(unlike(manifests))
    names, taken = [f"run {n}" for n in range(len(runs))], declared(manifests[0].kind)
    return _differences(runs, *what_differs(manifests, names, taken))


def _differences(
    runs: Sequence[Run], differing: pd.DataFrame, lines: Sequence[str]
) -> pd.DataFrame:
    """Return the table of `difference`, given what differs among the runs; see `what_differs`."""
    columns, axis = declared(runs[0].manifest.kind), differing.iloc[:, 0]
    sides, parts = [_numbers_of(run, runs, columns) for run in runs], list[pd.DataFrame]()
    data = [(run.manifest.data.sha256, run.manifest.fold_sizes) for run in runs]
    line = [*differing[[*lines]].itertuples(index=False, name=None)]
    order = axis if len(runs) > 2 and axis.dtype.kind in "if" else range(len(runs))
    by_line = sorted(zip(map(line.index, line), order, range(len(runs)), strict=True))
    last = -1
    for _, _, run in by_line:
        names, numbers = sides[run]
        part = names.assign(**dict(zip(VALUES, numbers.ends.T, strict=True)))
        if last >= 0 and line[last] == line[run]:
            same_folds = data[last] == data[run]
            part = part.join(_changes(sides[last], sides[run], columns, same_folds))
        about = {"run": differing.index[run], **differing.iloc[run]}
        parts.append(pd.concat([pd.DataFrame(about, part.index), part], axis=1))
        last = run
    table = pd.concat(parts, ignore_index=True)
    shared = table.pop("before").notna() if "before" in table else table["number"].isna()
    if not shared.any():
        raise UserError(f"{NOTHING_SHARED} along {axis.name}")
    p = table.groupby("table", sort=False)["p_holm"].transform(holm)
    table = table.assign(p_holm=p, differs=p <= LEVEL, method=table.pop("method"))
    if len(runs) > 2:
        return table
    by_size = table[shared].drop(columns=["run", *differing, *VALUES[1:]])
    by_size = by_size.assign(size=by_size["difference"].abs())
    by_size = by_size.sort_values(["differs", "size"], ascending=False, kind="stable")
    return by_size.drop(columns="size").reset_index(drop=True)


def _numbers_of(run: Run, runs: Sequence[Run], columns: Columns) -> Named:
    """Return the numbers of a run that are declared with bounds, of the tables of all runs."""
    alike = len({cells_of(of.manifest) for of in runs}) == 1
    kept, names, ends, replicates, weights = run.arrays.get("estimates", {}), [], [], [], []
    for name, table in run.tables.items():
        known = [x for x in map(str, table) if x in columns]
        places = [x for x in known if x in PLACES or columns[x].names_rows]
        is_shared = all(name in of.tables for of in runs) and (alike or CELLS not in places)
        is_shown = bool(places) and is_shared and name not in PROFILES
        for number in [x for x in known if is_shown and {*bound_columns(x)} <= {*table}]:
            of_number = kept.get(f"{name}/{number}", np.full((len(table), 1), np.nan))
            shares = kept.get(f"weights/{name}/{number}", kept.get(f"weights/{name}", np.zeros(0)))
            shares = shares[..., : of_number.shape[1] - 1]
            replicates.append(pd.DataFrame(of_number))
            weights.append(pd.DataFrame(np.broadcast_to(shares, of_number[:, 1:].shape)))
            ends.append(table[[number, *bound_columns(number)]].to_numpy(float))
            names.append(table[places].assign(table=name, number=number))
    if not names:
        raise UserError(NOTHING_SHARED)
    rows = pd.concat(names, ignore_index=True)
    order = ["table", *rows.columns.drop(["table", "number"]), "number"]
    return rows[order], Numbers(
        ends=np.concatenate(ends),
        replicates=pd.concat(replicates).to_numpy(),
        weights=pd.concat(weights).fillna(0.0).to_numpy(),
    )


def _changes(base: Named, other: Named, columns: Columns, paired: bool) -> pd.DataFrame:
    """Return the changes of the numbers that two runs share, by their rows in the other run."""
    (names, numbers), (others, changed) = base, other
    one, two = (of.assign(row=range(len(of))) for of in (names, others))
    pairs = one.merge(two, on=[*names.columns.intersection(others.columns)])
    before, after = pairs["row_x"].to_numpy(), pairs["row_y"].to_numpy()
    is_rms = pairs["number"].map(lambda name: bool(columns[name].noise))
    if "of" in pairs:  # the size of a lead is a mean
        is_rms &= pairs["of"] != "lead"
    changes = compare_numbers(
        numbers.take(before), changed.take(after), paired=paired, is_rms=is_rms.to_numpy(bool)
    )
    changes = changes.rename(columns={"p": "p_holm"}).set_index(after)
    changes.insert(0, "base_value", numbers.ends[before, 0])
    return changes.assign(before=before)
