"""The report of a run of `trace`: who writes position, who reads it, and confirmed effects."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import isnan
from typing import Any

import pandas as pd

from nope_probe.experiments.sections import (
    NO_PATTERN,
    NOISE,
    Report,
    closing_of,
    fold_sizes_of,
    largest,
    listed,
    percents,
    strongest,
    with_intervals,
)
from nope_probe.experiments.verdicts import EIGHT_FOLDS, main_writers, most_of, summed
from nope_probe.figures.intervals import NO_PATTERN as NO_SHARE
from nope_probe.figures.intervals import (
    ValueAndBounds,
    excludes_zero,
    interval_of,
    interval_text,
    percent,
)
from nope_probe.figures.names import short
from nope_probe.figures.position_figure import (
    LEAST,
    LEAST_BESIDE,
    MOST_EDGES,
    SIDES,
    TERMS,
    WRITTEN,
    position_circuit,
)
from nope_probe.figures.words import shown_readers, with_readers
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

IN_TERMINAL = 4  # writers of a reader on the terminal
DIRECTLY = 0.5  # of a total effect: with less on its direct path, it acts through other writers
MOST_IS = {  # where that term is most of a pattern
    "rotation": "rotation: RoPE at work on vectors that know nothing of position",
    "alibi": "ALiBi's bias",
    "covariance": "covariance: no mean vector carries it",
}
HOW_TO_READ = (
    notes.PATTERN_COLOURS,
    "A reader is a layer, or a head, whose queries and keys are made from the residual stream. A "
    "writer is a component that adds to that stream before it: an embedding, a head, an MLP.",
    "Rotation: RoPE at work on the mean query and key, which know nothing of position. It depends "
    "on the distance alone. Written position: the position in queries and keys themselves, which "
    "some writer must have put into the residual stream. Covariance: the part outside the means, "
    "such as tokens that resemble their neighbours.",
    "A writer's share is its direct path into the reader's queries and keys, with the norm's scale "
    "of each token as it was. Shares of a reader's writers add up to its written position. A share "
    "below 0 works against the pattern. Headline and edges use these shares.",
    "Norm, a part of the written terms: the norm at work on the mean residual stream, which knows "
    "nothing of position. It writes position because its scale depends on the position: the scale "
    "is small where a token has a large residual, such as an attention sink.",
    "How shares mislead: a writer may pass on another writer's position, and its direct share does "
    "not show this; several readers can share a writer; the mean over heads hides opposite signs; "
    "texts that begin alike count as position (--shuffle tells).",
    "First key: how much of a head's positional part comes from the first key, such as BOS, whose "
    "attention fades as more keys come.",
    "A removal replaces the writer's mean output at each position by its mean over positions. "
    "Held: the share of the pattern that is lost on the direct path with the norm's scale of each "
    "token as it was; the writer's share predicts it. In the model: the same where the scale "
    "follows. The difference is the norm's. On all paths: all blocks behind the writer lose the "
    "position.",
    "A clock: the mean keys of all positions along their two principal axes; positions that lie in "
    "order on a line can be told apart by a query.",
    notes.INTERVALS,
    notes.LAYERS_AND_HEADS,
)


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: tables `terms`, `writers`, `effects` and `clocks`; maps such as `L1/rotation`, nats.
    """
    tables, name, reader = run.tables, run.manifest["model"]["name"], run.manifest["reader"]
    writers = strongest_writers(tables, IN_TERMINAL)
    names = {"reader": writers["reader"], "writer": writers["writer"]}
    names["into"] = writers["side"].map(SIDES)
    written = with_intervals(
        names, writers, {"share": ("share", "z.1%"), "from the first key": ("first_key", "z.1%")}
    )
    written = written.replace({"from the first key": {NO_SHARE: ""}})  # of heads alone
    terminal = {
        f"{name}: the exact terms of each pattern, % of it": _terms_as_text(tables["terms"]),
        "The strongest writers, % of the reader's pattern": written,
        "Lost without the writer's position, %": _effects_as_text(tables["effects"]),
    }
    return Report(
        title=f"Who writes position in {name}",
        headline=headline(tables, reader, fold_sizes_of(run.manifest)),
        sections=list(_sections(run)),
        how_to_read=HOW_TO_READ,
        terminal={title: table for title, table in terminal.items() if len(table)},
        closing=closing_of(run.manifest),
    )


def _sections(run: Run) -> Iterator[Section]:
    tables, reader = run.tables, run.manifest["reader"]
    about = (reader, fold_sizes_of(run.manifest))
    yield Section(
        title=answer(tables, *about),
        figure=partial(
            position_circuit,
            tables["terms"],
            tables["writers"],
            tables["effects"],
            maps=run.maps,
            clocks=tables["clocks"],
            reader=reader,
            max_positions=positions(len(TERMS), len(shown_readers(tables["terms"]))),
        ),
        caption="An edge is as wide as the writer's share of the reader's pattern, with the norm's "
        "scale held; choose a reader to see its weaker edges. Below: the terms of one reader's "
        "pattern, and its mean keys along two axes, as all writers and the strongest make them.",
        table=strongest_writers(tables, MOST_EDGES).drop(columns="reader"),
    )
    yield Section(
        title=terms_finding(tables["terms"], *about),
        caption="The four terms of the mean and the covariance term add up to the whole pattern; "
        "the norm is a part of the written terms. A relative R² of 1 means that a term depends on "
        "the distance alone.",
        table=tables["terms"],
    )
    if len(tables["effects"]):
        yield Section(
            title=effect_findings(tables, _reader(tables["terms"], *about))[0],
            caption="A reader's loss without a writer's position: predicted by the exact share; on "
            "the direct path with the norm's scale held, and in the model; the difference, which "
            "is the norm's; and on all paths.",
            table=tables["effects"],
        )


def headline(
    tables: Mapping[str, pd.DataFrame],
    reader: str | None = None,
    fold_sizes: Sequence[int] = EIGHT_FOLDS,
) -> list[str]:
    """Return sentences on the writers of a reader and of all readers, and on confirmed effects."""
    about = (reader, fold_sizes)
    sentences = [answer(tables, *about), terms_finding(tables["terms"], *about)]
    name = _reader(tables["terms"], *about)
    sentences += norm_findings(tables, name)
    if len(tables["effects"]):
        sentences += effect_findings(tables, name)
    return [f"{sentence}." for sentence in dict.fromkeys(sentences)]


def _reader(terms: pd.DataFrame, reader: str | None, fold_sizes: Sequence[int]) -> str | None:
    """Return the layer or head that the headline is about, if any pattern exceeds the noise."""
    best = strongest(with_readers(terms[terms["term"] == "all"]), fold_sizes, "rms")
    return reader or (None if best is None else str(best["reader"]))


def answer(
    tables: Mapping[str, pd.DataFrame],
    reader: str | None = None,
    fold_sizes: Sequence[int] = EIGHT_FOLDS,
) -> str:
    """Return a sentence on the origin of a reader's pattern; by default of the strongest."""
    name = _reader(tables["terms"], reader, fold_sizes)
    if name is None:
        return NO_PATTERN
    rows = _rows_of(tables["terms"], name)
    if not rows.loc[rows["term"] == "all", "rms_low"].item() > 0:
        return f"The positional pattern of {name} is {NOISE}"
    shares = term_shares(rows)
    most = most_of(shares)
    if most is None:
        return f"No single term is surely most of {name}'s pattern"
    if most == "written":
        main = main_writers(writer_shares(tables["writers"], name))
        if not main:
            return f"No writer's share of {name}'s pattern exceeds the noise"
        return f"{name}'s position is written by {listed(main)}"
    share = f"{100 * shares[most][0]:.1f}%" if most == "rotation" else percents(shares[most][0])
    return f"{share} of {name}'s pattern is {MOST_IS[most]}"


def _rows_of(table: pd.DataFrame, reader: str) -> pd.DataFrame:
    """Return the rows of one reader."""
    rows = with_readers(table)
    return rows[rows["reader"] == reader]


def term_shares(terms: pd.DataFrame) -> dict[str, ValueAndBounds]:
    """Return the shares of rotation, written position, covariance and ALiBi, where it is.

    Args:
        terms: one reader's rows of `terms.csv`.
    """
    rows = {row["term"]: interval_of(row, "share") for row in terms.to_dict("records")}
    shares = {
        "rotation": rows["rotation"],
        "written": summed(rows[name] for name in WRITTEN),
        "covariance": rows["covariance"],
    }
    return shares | ({"alibi": rows["alibi"]} if "alibi" in rows else {})


def writer_shares(writers: pd.DataFrame, reader: str) -> dict[str, ValueAndBounds]:
    """Return each writer's share of a reader's pattern, in keys and queries together."""
    sides: dict[str, list[ValueAndBounds]] = {}
    for row in _rows_of(writers, reader).to_dict("records"):
        sides.setdefault(row["writer"], []).append(interval_of(row, "share"))
    return {writer: summed(shares) for writer, shares in sides.items()}


def terms_finding(
    terms: pd.DataFrame,
    reader: str | None = None,
    fold_sizes: Sequence[int] = EIGHT_FOLDS,
) -> str:
    """Return a sentence on the shares of rotation, written position and covariance.

    The shares have their intervals unless one of them surely is most of the pattern.
    """
    name = _reader(terms, reader, fold_sizes)
    if name is None:
        return NO_PATTERN
    shares = term_shares(_rows_of(terms, name))
    if all(isnan(value) for value, _, _ in shares.values()):
        return f"The positional pattern of {name} is {NOISE}"
    is_settled = most_of(shares) is not None
    parts = [
        f"{percents(share[0]) if is_settled else interval_text(percent(share), 'z.0f', '%')} "
        f"{'ALiBi' if part == 'alibi' else part}"
        for part, share in shares.items()
    ]
    return f"The pattern of {name} is {listed(parts)}"


def norm_findings(tables: Mapping[str, pd.DataFrame], reader: str | None) -> list[str]:
    """Return a sentence on what the norm's scale adds to a reader's pattern or takes from it.

    Args:
        tables: `terms`, and `clocks` with the scale at each position.
        reader: a layer or head; None for no sentence.
    """
    rows = with_readers(tables["terms"])
    rows = rows[(rows["reader"] == reader) & (rows["term"] == "norm")]
    rows = rows[excludes_zero(rows, "share") & (rows["share"].abs() >= LEAST_BESIDE)]
    if rows.empty:
        return []
    [row] = rows.to_dict("records")
    clocks = _rows_of(tables["clocks"], str(reader))
    scale = dict(zip(clocks["position"], clocks["norm_scale"], strict=True))
    position = max(scale, key=lambda position: abs(scale[position] - 1))
    does = (
        f"adds {_size(row, 'share')} to"
        if row["share"] > 0
        else f"takes {_size(row, 'share')} from"
    )
    return [
        f"The norm's scale, {scale[position]:.2f} times its mean at position {position}, {does} "
        f"the pattern of {reader}"
    ]


def effect_findings(tables: Mapping[str, pd.DataFrame], reader: str | None = None) -> list[str]:
    """Return sentences on a reader's loss without its main writer, and on indirect writers.

    Args:
        tables: `effects` and `writers`.
        reader: a layer or head; the first sentence is about it, if its main writer was measured.
    """
    rows = with_readers(tables["effects"])
    clear = rows[excludes_zero(rows, "total")]
    if clear.empty:
        return ["Without any writer's position, no pattern changes by more than the noise"]
    main = [] if reader is None else main_writers(writer_shares(tables["writers"], reader))
    own = clear[(clear["reader"] == reader) & clear["writer"].isin(main)]
    top = largest(clear if own.empty else own, "total")
    sentences = [
        f"Without the position of {top['writer']}, {top['reader']} {_change(top)} of its pattern; "
        f"its direct share is {percents(top['predicted'])}"
    ]
    norm, low, high = interval_of(top, "norm")
    if low * high > 0 and abs(norm) >= LEAST_BESIDE:
        does = "adds" if norm * top["held"] > 0 else "takes back"
        sentences.append(
            f"On the direct path alone, {top['reader']} {_change(top, 'held')} with the norm's "
            f"scale held, and {percents(top['direct'])} in the model: the norm {does} "
            f"{percents(abs(norm))}"
        )
    most_direct = clear[["direct_low", "direct_high"]].abs().max(axis=1)
    least_total = clear[["total_low", "total_high"]].abs().min(axis=1)
    indirect = clear[most_direct < DIRECTLY * least_total]
    indirect = indirect[indirect["total"].abs() >= LEAST_BESIDE]
    if len(indirect):
        top = largest(indirect, "total")
        sentences.append(
            f"{top['writer']} acts through other writers: without its position, {top['reader']} "
            f"{_change(top)}, and {percents(top['direct'])} on the direct path"
        )
    return sentences


def _change(row: Mapping[Hashable, Any] | pd.Series, column: str = "total") -> str:
    """Return what a reader loses or gains: a share without its sign, and its interval."""
    return f"{'loses' if row[column] > 0 else 'gains'} {_size(row, column)}"


def _size(row: Mapping[Hashable, Any] | pd.Series, column: str) -> str:
    """Return a share without its sign, and its interval."""
    low, high = sorted(100 * abs(bound) for bound in interval_of(row, column)[1:])
    return f"{100 * abs(row[column]):.0f}% [{low:.0f}, {high:.0f}]"


def strongest_writers(tables: Mapping[str, pd.DataFrame], most: int) -> pd.DataFrame:
    """Return the rows of the strongest writers of the shown readers, if they differ from zero."""
    rows = with_readers(tables["writers"])
    rows = rows[rows["reader"].isin(shown_readers(tables["terms"]))]
    rows = rows[excludes_zero(rows, "share")]
    order = rows["share"].abs().sort_values(ascending=False).index
    rows = rows.loc[order].groupby("reader", sort=False).head(most)
    return rows.sort_values("layer", kind="stable")


def _terms_as_text(terms: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each reader: the RMS of its pattern, and the shares of the terms."""
    rows = with_readers(terms)
    rows = rows[rows["reader"].isin(shown_readers(terms))]
    whole = rows[rows["term"] == "all"]
    texts = with_intervals({"reader": whole["reader"]}, whole, {"RMS, nats": ("rms", "z.2f")})
    for term in (*TERMS, "norm"):
        heading, own = short(term), rows[rows["term"] == term]
        if term != "all" and (own["share"].abs() > LEAST).any():
            texts[heading] = with_intervals({}, own, {heading: ("share", "z.0%")})[heading]
    return texts


def _effects_as_text(effects: pd.DataFrame) -> pd.DataFrame:
    """Return each reader's loss without a writer's position, on the direct path and in total."""
    rows = with_readers(effects)
    columns = {
        "share": ("predicted", "z.0%"),
        "scale held": ("held", "z.0%"),
        "in the model": ("direct", "z.0%"),
        "norm": ("norm", "z.0%"),
        "on all paths": ("total", "z.0%"),
    }
    return with_intervals({"reader": rows["reader"], "writer": rows["writer"]}, rows, columns)
