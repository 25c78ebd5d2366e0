"""The report of a run of `trace`: who writes position, who reads it, and confirmed effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from nope_probe.experiments.sections import (
    MOST_ROWS,
    Report,
    fold_sizes_of,
    listed,
    strongest,
)
from nope_probe.experiments.verdicts import EIGHT_FOLDS, main_writers, most_of, summed
from nope_probe.figures.intervals import (
    ValueAndBounds,
    excludes_zero,
    interval_of,
    interval_text,
    percent,
)
from nope_probe.figures.position_figure import (
    LEAST,
    MOST_EDGES,
    TERMS,
    WRITTEN,
    position_circuit,
)
from nope_probe.figures.words import shown_readers, with_readers
from nope_probe.reports import notes
from nope_probe.reports.page import Lead, Section, positions
from nope_probe.runtime.folder import Run

NAMED = 3  # writers in a sentence
NO_PATTERN = "No layer or head shows a positional pattern that exceeds the noise."
ANSWERS = {  # by the term that surely is most of a reader's pattern
    "written": "{reader}'s position is written by {writers}: {share} of its pattern.",
    "rotation": "RoPE's rotation of constant vectors makes {reader}'s pattern: {share} of it.",
    "alibi": "ALiBi's bias makes {reader}'s pattern: {share} of it.",
    "covariance": "No mean vector carries {reader}'s pattern: {share} of it is covariance.",
    "none": "No single term is surely most of {reader}'s pattern.",
    "noisy": "Position written by no single writer makes {reader}'s pattern: {share} of it.",
}
OF_WRITERS = (
    "A share is the writer's direct path; shares of all writers add up to the written part. Lost "
    "without it: on all paths, also through other writers. Below 0, the pattern grows."
)
OF_TERMS = (
    "Exact terms of the pattern, which add up to 100%. Rotation: RoPE on vectors that know nothing "
    "of position. Written: position in the residual stream. Covariance: outside the means."
)


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: tables `terms`, `writers`, `effects` and `clocks`; maps such as `L1/rotation`, nats.
    """
    tables, name, reader = run.tables, notes.model_name(run.manifest), run.manifest["reader"]
    return Report(
        title=f"Who writes position in {name}",
        lead=lead(tables, reader, fold_sizes_of(run.manifest)),
        sections=list(_sections(run)),
        how_to_read=notes.how_to_read("trace"),
    )


def _sections(run: Run) -> Iterator[Section]:
    tables, reader = run.tables, run.manifest["reader"]
    yield Section(
        title="Who writes position, and who reads it",
        figure=partial(
            position_circuit,
            tables["terms"],
            tables["writers"],
            tables["effects"],
            maps=run.maps,
            clocks=_without_rope(tables["clocks"], run.manifest["model"]),
            reader=reader,
            max_positions=positions(len(TERMS), len(shown_readers(tables["terms"]))),
        ),
        caption="An edge is as wide as the writer's share of the reader's pattern; choose a reader "
        "to see weaker edges. Below: the terms of its pattern; without RoPE also its mean keys "
        "along two axes.",
        table=strongest_writers(tables, MOST_EDGES).drop(columns="reader"),
    )
    yield Section(
        title="The exact terms of each pattern",
        caption="The four terms of the mean and the covariance term add up to the whole pattern; "
        "the norm is a part of the written terms. A relative R² of 100% means that a term depends "
        "on distance alone.",
        table=tables["terms"],
    )
    if len(tables["effects"]):
        yield Section(
            title="What is lost without a writer's position",
            caption="Held, direct: lost on the direct path with the norm's scale held, and as it "
            "follows; norm is their difference. Held differs from the share where a writer "
            "writes into queries and keys. Total: on all paths.",
            table=tables["effects"].filter(regex="^(?!predicted)"),
        )


def _without_rope(clocks: pd.DataFrame, model: Mapping[str, Any]) -> pd.DataFrame:
    """Return the clocks of layers without RoPE, which turns mean keys before they are read."""
    turned = [layer for layer, has_rope in enumerate(model["rope_layers"]) if has_rope]
    return clocks[~clocks["layer"].isin(turned)]


def lead(
    tables: Mapping[str, pd.DataFrame],
    reader: str | None = None,
    fold_sizes: Sequence[int] = EIGHT_FOLDS,
) -> Lead:
    """Return the origin of a reader's pattern, and its writers, or else its terms, by share.

    Args:
        tables: `terms`, `writers` and `effects`.
        reader: a layer or head; by default the reader with the strongest pattern.
        fold_sizes: sequences per fold.
    """
    terms = with_readers(tables["terms"])
    best = strongest(terms[terms["term"] == "all"], fold_sizes, "rms")
    if reader is None and best is None:
        return Lead(sentence=NO_PATTERN)
    name = reader if reader is not None or best is None else str(best["reader"])
    rows = terms[terms["reader"] == name]
    if not rows.loc[rows["term"] == "all", "rms_low"].item() > 0:
        return Lead(sentence=f"{name} shows no positional pattern that exceeds the noise.")
    shares = term_shares(rows)
    most, of_name = most_of(shares) or "none", f"share of {name}'s pattern"
    if most != "written":
        share = _text(shares.get(most, shares["rotation"]))
        table = {"term": [*shares], of_name: [_text(share) for share in shares.values()]}
        return Lead(
            sentence=ANSWERS[most].format(reader=name, share=share),
            table=pd.DataFrame(table),
            caption=OF_TERMS,
        )
    written = writer_shares(tables["writers"], str(name))
    clear = {
        writer: abs(value)
        for writer, (value, low, high) in written.items()
        if low * high > 0 and abs(value) >= LEAST
    }
    top = sorted(clear, key=lambda writer: -clear[writer])[:MOST_ROWS]
    table = {"writer": top, of_name: [_text(written[writer]) for writer in top]}
    if len(tables.get("effects", ())):
        own = {row["writer"]: row for row in _rows_of(tables["effects"], str(name))}
        table["lost without it"] = [
            _text(interval_of(own[writer], "total")) if writer in own else "" for writer in top
        ]
    main = main_writers(written)[:NAMED]
    parts = [f"{percent(written[writer])[0]:.0f}%" for writer in main]
    return Lead(
        sentence=ANSWERS["written" if main else "noisy"].format(
            reader=name,
            writers=listed(main) if main else "",
            share=listed(parts) if main else _text(shares["written"]),
        ),
        table=pd.DataFrame(table),
        caption=OF_WRITERS,
    )


def _text(share: ValueAndBounds) -> str:
    return interval_text(percent(share), "z.0f", "%")


def _rows_of(table: pd.DataFrame, reader: str) -> list[dict[Any, Any]]:
    """Return the rows of one reader."""
    return with_readers(table).query("reader == @reader").to_dict("records")


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
    for row in _rows_of(writers, reader):
        sides.setdefault(row["writer"], []).append(interval_of(row, "share"))
    return {writer: summed(shares) for writer, shares in sides.items()}


def strongest_writers(tables: Mapping[str, pd.DataFrame], most: int) -> pd.DataFrame:
    """Return the rows of the strongest writers of the shown readers, if they differ from zero."""
    rows = with_readers(tables["writers"])
    rows = rows[rows["reader"].isin(shown_readers(tables["terms"]))]
    rows = rows[excludes_zero(rows, "share")]
    order = rows["share"].abs().sort_values(ascending=False).index
    rows = rows.loc[order].groupby("reader", sort=False).head(most)
    return rows.sort_values("layer", kind="stable")
