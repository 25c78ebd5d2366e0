"""What `compare` computes: every number that runs share, less the first run's, fold by fold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import nan
from pathlib import Path

import pandas as pd
import torch

from nope_probe.analyses.attention import split_attention
from nope_probe.analyses.differences import LEVEL, compare_numbers, holm
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern import measure
from nope_probe.errors import UserError, kind_of
from nope_probe.figures.intervals import bound_columns, interval_of
from nope_probe.figures.words import INFORMATION, MEASURES, PLACES, Columns
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import shared_patterns
from nope_probe.maps.maps import AttentionMaps, ScoreMaps
from nope_probe.run.folder import Run, read_run
from nope_probe.run.processes import status
from nope_probe.run.session import Session
from nope_probe.studies.compare import PARTS, Settings, columns_of, report
from nope_probe.studies.page import with_page
from nope_probe.studies.tables import TableRow, attention_table, interval_names, measures_table

# A profile holds hundreds of numbers, one per distance, which would hide all other numbers.
PROFILES = ("offsets",)
ENDS = (  # after the columns that name a row
    *("number", "value", "base_value", *interval_names("difference")),
    *("p_holm", "differs", "method"),
)


def run(settings: Settings) -> Path:
    """Compare runs unless the comparison is finished, and return its folder.

    Raises:
        UserError: for runs that cannot be compared, or that share no number.
    """
    session = Session(settings)
    with session:
        if not session.finished:
            with status("comparing and writing"):
                session.write(analyse(session))
    return session.folder


def analyse(session: Session[Settings]) -> Run:
    """Compare the runs' tables, and return the run."""
    folders = session.settings.runs
    base, other = runs = [read_run(folder) for folder in folders]
    one, two = (
        (of.data.sha256, of.settings.get("folds"), of.fold_sizes)
        for of in (base.manifest, other.manifest)
    )
    columns = columns_of(base.manifest.kind)
    table = differences(base, other, columns, paired=one == two)
    if table.empty:
        raise UserError("the runs have no numbers in common")
    names = [name for name in table if name not in ("table", *ENDS)]
    table = table[["table", *names, *ENDS]].reset_index(drop=True)
    labels = session.settings.names([of.manifest for of in runs])
    results = {"folders": dict(zip(labels, map(str, folders), strict=True))}
    manifest = replace(session.manifest(), sources=None, results=results)
    return with_page(session, Run(manifest=manifest, tables={"differences": table}), report)


def differences(base: Run, other: Run, columns: Columns, *, paired: bool) -> pd.DataFrame:
    """Return every number that two runs share, and its difference with a 95% interval.

    A number is a declared column with bounds, but for profiles. Numbers without replicates have no
    interval. Layers are those of both runs.

    Args:
        base: the run that is taken away.
        other: the run it is taken from.
        columns: the declared columns of the runs' tables.
        paired: whether differences are taken fold by fold, where both runs have the same folds.

    Returns:
        A row for each table, row and column: the columns that name the row, `number`, the number in
        both runs, `difference` with its bounds, `p_holm` over the numbers of the table, `differs`,
        and `method`; first those that differ, by the difference in widths of its interval.
    """
    shared = [name for name in base.tables if name in other.tables and name not in PROFILES]
    rows = [row for name in shared for row in _rows(base, other, name, columns, paired)]
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    p = table.groupby("table", sort=False)["p_holm"].transform(lambda of: holm(of.tolist()))
    widths = (table["difference_high"] - table["difference_low"]).replace(0, nan)
    table = table.assign(p_holm=p, differs=p <= LEVEL, far=table["difference"].abs() / widths)
    table = table.sort_values(["differs", "far"], ascending=False, kind="stable")
    return table.drop(columns="far")


def _rows(base: Run, other: Run, table: str, columns: Columns, paired: bool) -> Iterator[TableRow]:
    """Yield the rows of a table that both runs have, before Holm's rule."""
    of_runs = [run.tables[table] for run in (base, other)]
    shared = [str(name) for name in of_runs[0] if name in of_runs[1] and name in columns]
    numbers = [name for name in shared if {*bound_columns(name)} <= {*of_runs[0]} & {*of_runs[1]}]
    names = [
        name
        for name in shared
        if name not in numbers and (name in PLACES or columns[name].names_rows)
    ]
    if not names or not numbers:
        return
    places = [of_run[names].assign(place=range(len(of_run))) for of_run in of_runs]
    pairs = places[0].merge(places[1], on=names, suffixes=("", " of the other"))
    for *named, one, two in pairs.itertuples(index=False):
        for number in numbers:
            before, after = _number(base, table, number, one), _number(other, table, number, two)
            is_rms = bool(columns[number].noise)
            difference, p, method = compare_numbers(before, after, paired=paired, is_rms=is_rms)
            yield {
                **{"table": table, **dict(zip(names, named, strict=True)), "number": number},
                **{"value": after.value, "base_value": before.value},
                **difference.columns("difference"),
                **{"p_holm": p, "method": method},
            }


def _number(run: Run, table: str, column: str, row: int) -> Interval:
    """Return a number of a run with its interval, and its replicates if the run keeps them."""
    value, low, high = interval_of(run.tables[table].iloc[row], column)
    kept, key = run.arrays.get("estimates", {}), f"{table}/{column}"
    if key not in kept or f"weights/{table}" not in kept:
        return Interval(value=value, low=low, high=high)
    of_table = kept[f"weights/{table}"]
    weights = of_table if of_table.ndim == 1 else of_table[row]
    n_folds = int((weights > 0).sum())
    replicates = Estimates(
        values=torch.from_numpy(kept[key][row, : 1 + n_folds]),
        weights=torch.from_numpy(weights[:n_folds]),
    )
    return Interval(value=value, low=low, high=high, replicates=replicates)


def difference(
    base: ScoreMaps | AttentionMaps, other: ScoreMaps | AttentionMaps, *, paired: bool = True
) -> pd.DataFrame:
    """Compare the positional patterns of two models, or two states of a model, as `compare` does.

    Differences are `other` less `base`. Paired differences are taken fold by fold, so that the
    sequences' common noise cancels.

    Args:
        base: the maps to compare with, as `capture_scores` or `capture_attention` returns them.
        other: the maps of the other model, of as many positions and with rows of the same queries.
        paired: whether both were captured on the same sequences, dealt to the same folds.

    Returns:
        The columns of `compare`'s differences.csv, those that differ most first: `layer`, of
        attention `head`, `number`, `value` and `base_value`, `difference` with its bounds,
        `method`, `p_holm` and `differs`. Of attention there is a row for each head, its information
        and the four parts (nats); of scores, for each common layer and each measure of `measure`.

    Raises:
        UserError: for what are no maps of `capture_scores` or, both, of `capture_attention`, or for
            maps without a common layer, of unlike positions, rows or first keys, or, if paired, of
            different folds.

    Example:
        >>> from nope_probe import Ablation, ablated, capture_scores, difference, load, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=24)
        >>> intact = capture_scores(loaded.model, data)
        >>> with ablated(loaded.model, Ablation(remove=["mask"])):
        ...     table = difference(intact, capture_scores(loaded.model, data))
        >>> amplitudes = table[table["number"] == "amplitude"].set_index("layer")
        >>> bool(amplitudes.loc[2, "difference_high"] < 0)
        True
    """
    if isinstance(base, AttentionMaps) and isinstance(other, AttentionMaps):
        tables = [attention_table(split_attention(maps), PARTS) for maps in (base, other)]
    else:
        for maps in (base, other):
            if not isinstance(maps, ScoreMaps):
                raise UserError(f"expected maps of `capture_scores`, got {kind_of(maps)}")
        assert isinstance(base, ScoreMaps)
        assert isinstance(other, ScoreMaps)
        for layer in {*base.layers} & {*other.layers}:
            shared_patterns([other.by_layer[layer], base.by_layer[layer]])  # refuses unlike rows
        measured = [(maps.layers, [*measure(maps).values()]) for maps in (base, other)]
        tables = [measures_table([({}, of_layers)], layers, ()) for layers, of_layers in measured]
    if base.skip_keys != other.skip_keys:
        counts = f"{base.skip_keys} and {other.skip_keys}"
        raise UserError(f"the maps count {counts} keys as first: capture both on like inputs")
    if paired and not base.counts.equal(other.counts):
        raise UserError("the maps have unlike folds: pass paired=False for other sequences")
    one, two = (Run(tables={"maps": table}) for table in tables)
    found = differences(one, two, {**PLACES, **MEASURES, **INFORMATION}, paired=paired)
    if found.empty:
        layers = " and ".join(str(table["layer"].unique().tolist()) for table in tables)
        raise UserError(f"no layer in common: {layers}")
    return found.drop(columns="table")
