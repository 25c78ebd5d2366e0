"""The report of a run of `trace`: who writes position, who reads it, and what is lost without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.intervals import ValueAndBounds, excludes_zero, interval_of
from nope_probe.figures.maps import term_maps
from nope_probe.figures.names import OTHERS
from nope_probe.figures.panels import RowMaps
from nope_probe.figures.words import listed, shown_readers, whole_sizes, with_readers
from nope_probe.removal import Writer
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section
from nope_probe.run.folder import Run
from nope_probe.studies.page import MOST_ROWS, Report, strongest_row
from nope_probe.studies.trace.settings import numbers_of
from nope_probe.studies.verdicts import main_writers, most_of, summed

QUESTIONS = {"lead": "first key", "pattern": "other keys"}
WRITTEN = ("written_key", "written_query", "written_both")
TERMS = ("all", "rotation", "alibi", *WRITTEN, "covariance")  # in the order of their panels
DRAWN = 0.01  # of the largest cell of a reader's map: smaller terms have no panel
MOST_WRITERS = 12  # of a reader, in the table of writers
NAMED = 2  # writers of a lead or a pattern in the sentence
LEAST = 0.05  # of a lead or pattern, which a writer in the first table has or takes away
NO_PATTERN = "No layer or head shows a lead or pattern that exceeds the noise."
MADE_BY = {  # by the term that surely is most of a lead or pattern
    "rotation": "RoPE's rotation makes {what} ({share})",
    "alibi": "ALiBi makes {what} ({share})",
    "covariance": "covariance, which no mean vector carries, makes {what} ({share})",
    "written": "{writers} {write} {what}",
    "noisy": "no single writer makes {what}, which was written ({share})",
    "none": "no single term makes {what}",
}
ENCODINGS = {"rotation": "RoPE's rotation", "alibi": "ALiBi"}  # rows of the first table
LOST = "Lost: on all paths, without its position{kept}."


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What a run says of its readers.

    Attributes:
        reader: the layer or head that the headline is about; None if no layer reads position.
        kept_positions: how many first positions keep what removed writers write there.
    """

    reader: str | None = None
    kept_positions: int = 0


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: tables `terms`, `writers` and `effects`; maps such as `L1/rotation`, nats.
    """
    return Report(
        title=f"Who writes position in {run.manifest.model_name}",
        headline=headline(run),
        sections=list(_sections(run)),
        how_to_read=notes.how_to_read("trace"),
    )


def _sections(run: Run) -> Iterator[Section]:
    tables, traced = run.tables, run.manifest.results_as(Traced)
    yield Section(
        title="The exact terms of lead and pattern",
        figure=partial(draw_terms, run, traced.reader) if traced.reader else None,
        caption="The four terms of the mean and the covariance term add up to the whole; the norm "
        "is a part of the written terms. A relative R² of 100% means that a term depends on "
        "distance alone. Terms that are 0 have no map.",
        table=tables["terms"],
    )
    yield Section(
        title="Who writes position, and who reads it",
        caption="Each reader's strongest writers: what they add to its lead or pattern on the "
        "direct path into its keys or queries.",
        table=rows_of_strongest_writers(tables, MOST_WRITERS).drop(columns="reader"),
    )
    if len(tables["effects"]):
        kept = " The first token keeps its position: no rows of the lead."
        yield Section(
            title="What is lost without a writer's position",
            caption="Held, direct: lost on the direct path with the norm's scale kept, and as it "
            "follows; norm is their difference. Total: on all paths."
            + (kept if traced.kept_positions else ""),
            table=tables["effects"].filter(regex="^(?!predicted)"),
        )


def draw_terms(run: Run, reader: str) -> go.Figure:
    """Draw the terms of a reader's lead and pattern that are not 0, on one scale."""
    maps = {
        term: np.asarray(run.maps[key], float)[None]
        for term in TERMS
        if (key := f"{reader}/{term}") in run.maps
    }
    largest = {term: np.nanmax(np.abs(values), initial=0.0) for term, values in maps.items()}
    return term_maps(
        {
            term: RowMaps(
                values=values, queries=run.query_positions, skip_keys=run.manifest.skip_keys
            )
            for term, values in maps.items()
            if largest[term] > DRAWN * largest["all"]
        },
        title=f"The terms of {reader}",
        layers=[numbers_of(reader)[0]],
    )


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What makes a reader's lead or pattern, and what it loses, as fractions of it.

    Attributes:
        size: the mean lead, or the RMS of the pattern, nats.
        terms: of rotation, written position, covariance and ALiBi, where it is.
        writers: of each writer, in keys and queries together.
        attentions: of each attention whose heads write one by one, the sum of their shares.
        lost: without the position of each writer that was measured, on all paths.
    """

    size: float
    terms: Mapping[str, ValueAndBounds]
    writers: Mapping[str, ValueAndBounds]
    attentions: Mapping[str, ValueAndBounds]
    lost: Mapping[str, ValueAndBounds]

    @classmethod
    def of(cls, tables: Mapping[str, pd.DataFrame], reader: str, question: str) -> Shares | None:
        """Return the shares of a lead or pattern; None where it does not exceed its noise."""
        terms, of_writers, effects = (
            _rows_of(tables[name], reader, question) for name in ("terms", "writers", "effects")
        )
        whole = [row for row in terms if row["term"] == "all" and row["share"] == row["share"]]
        if not whole:
            return None
        writers = writer_shares(of_writers)
        lost = {str(row["writer"]): interval_of(row, "total") for row in effects}
        attentions = {
            name: summed(share for head, share in writers.items() if Writer(head).whole == name)
            for name in {str(Writer(head).whole) for head in writers} - {*writers}
        }
        return cls(
            size=whole[0]["size"],
            terms=term_shares(terms),
            writers=writers,
            attentions=attentions,
            lost=lost,
        )

    @property
    def direct(self) -> dict[str, ValueAndBounds]:
        """The shares of all writers, and of attentions."""
        return {**self.writers, **self.attentions}

    def strength(self, writer: str) -> float:
        """Return the larger of a writer's share and of what is lost, where its sign is clear."""
        found = (shares[writer] for shares in (self.direct, self.lost) if writer in shares)
        return max((abs(value) for value, low, high in found if low * high > 0), default=0.0)

    def share_of_others(self, writers: Sequence[str]) -> float:
        """Return the share of all writers but some, of which an attention includes its heads."""
        counted = [name for name in writers if Writer(name).whole not in {*writers} - {name}]
        return self.terms["written"][0] - sum(self.direct[name][0] for name in counted)


def headline(run: Run) -> Headline:
    """Return the main terms and writers of a reader's lead and pattern, and what it loses.

    Args:
        run: its tables `terms`, `writers` and `effects`, and its manifest with the `reader`.
    """
    tables, manifest, traced = run.tables, run.manifest, run.manifest.results_as(Traced)
    chosen = manifest.settings.get("reader")
    sizes = whole_sizes(tables["terms"])
    if not chosen and strongest_row(sizes, manifest.fold_sizes, "size") is None:
        return Headline(sentence=NO_PATTERN)
    reader = str(traced.reader)
    shares = {
        question: found
        for question in QUESTIONS
        if (found := Shares.of(tables, reader, question)) is not None
    }
    if not shares:
        return Headline(sentence=f"{reader} shows no lead or pattern that exceeds the noise.")
    kept = ", which the first token keeps" if traced.kept_positions else ""
    length = f"{manifest.seq_len:,} tokens"
    clauses = [_clause(name, shares, reader) for name in ("pattern", "lead") if name in shares]
    table, n_left_out = _table(f"{reader} at {length}", shares)
    parts = [
        "" if chosen else f"{reader} is the strongest of {notes.layers_of_run(manifest)}.",
        LOST.format(kept=kept) if any(answer.lost for answer in shares.values()) else "",
        f"Left out: {n_left_out} weaker writers." if n_left_out else "",
    ]
    return Headline(
        sentence=f"At {length}, {'; '.join(clauses)}.",
        table=table,
        caption=" ".join(filter(None, parts)),
    )


def _clause(question: str, shares: Mapping[str, Shares], reader: str) -> str:
    """Return a clause on the main term of a lead or a pattern."""
    answer, what = shares[question], f"the order of {reader}'s other keys"
    if question == "lead":
        what = "the first key's lead" if len(shares) > 1 else f"{reader}'s lead of the first key"
    most = most_of(answer.terms) or "none"
    main = main_writers(answer.writers)
    named = [f"{name} ({percent_text(answer.writers[name])})" for name in main[:NAMED]]
    named += ["others"] if len(main) > NAMED else []
    return MADE_BY["noisy" if most == "written" and not main else most].format(
        what=what,
        share=percent_text(answer.terms.get(most, (0.0, 0.0, 0.0))),
        writers=listed(named) if named else "",
        write="writes" if len(main) == 1 else "write",
    )


def _table(name: str, shares: Mapping[str, Shares]) -> tuple[pd.DataFrame, int]:
    """Return the first table, and how many writers it leaves out."""
    named = (name for answer in shares.values() for name in (*answer.writers, *answer.lost))
    writers = dict.fromkeys(name for name in named if name != "bias")
    strengths = {
        writer: max(answer.strength(writer) for answer in shares.values()) for writer in writers
    }
    encodings = [
        term
        for term in ENCODINGS
        if any(abs(answer.terms.get(term, (0.0,))[0]) >= LEAST / 10 for answer in shares.values())
    ]
    order = sorted(
        (-strength, Writer(writer).order, writer) for writer, strength in strengths.items()
    )
    n_rows = MOST_ROWS - 3 - len(encodings)
    top = [writer for strength, _, writer in order if -strength >= LEAST][:n_rows]
    columns = {}
    for question, answer in shares.items():
        label = QUESTIONS[question]
        parts = {ENCODINGS[term]: answer.terms.get(term) for term in encodings}
        parts |= {writer: answer.direct.get(writer) for writer in top}
        parts["covariance"] = answer.terms["covariance"]
        columns[label] = {
            "size": f"{answer.size:z.2g} nats",
            OTHERS: f"{100 * answer.share_of_others(top):z.0f}%",
            **{name: percent_text(part) for name, part in parts.items() if part is not None},
        }
        if answer.lost:
            columns[f"{label}, lost"] = {
                writer: percent_text(answer.lost[writer]) for writer in top if writer in answer.lost
            }
    rows = [*("size", *(ENCODINGS[term] for term in encodings), *top, OTHERS, "covariance")]
    table = {name: rows} | {
        label: [cells.get(row, "") for row in rows] for label, cells in columns.items()
    }
    return pd.DataFrame(table), len(writers) - len(top)


def _rows_of(table: pd.DataFrame, reader: str, question: str) -> list[dict[Any, Any]]:
    """Return the rows of one reader's lead or pattern."""
    if table.empty:
        return []
    rows = with_readers(table)
    return rows[(rows["reader"] == reader) & (rows["of"] == question)].to_dict("records")


def term_shares(terms: Sequence[Mapping[Any, Any]]) -> dict[str, ValueAndBounds]:
    """Return the shares of rotation, written position, covariance and ALiBi, where it is.

    Args:
        terms: the rows of `terms.csv` of one lead or pattern.
    """
    rows = {row["term"]: interval_of(row, "share") for row in terms}
    shares = {
        "rotation": rows["rotation"],
        "written": summed(rows[name] for name in WRITTEN),
        "covariance": rows["covariance"],
    }
    return shares | ({"alibi": rows["alibi"]} if "alibi" in rows else {})


def writer_shares(writers: Sequence[Mapping[Any, Any]]) -> dict[str, ValueAndBounds]:
    """Return each writer's share, in keys and queries together.

    Args:
        writers: the rows of `writers.csv` of one lead or pattern.
    """
    sides: dict[str, list[ValueAndBounds]] = {}
    for row in writers:
        sides.setdefault(row["writer"], []).append(interval_of(row, "share"))
    return {writer: summed(shares) for writer, shares in sides.items()}


def rows_of_strongest_writers(tables: Mapping[str, pd.DataFrame], most: int) -> pd.DataFrame:
    """Return the rows of the strongest writers of the shown readers, if they differ from zero."""
    rows = with_readers(tables["writers"])
    rows = rows[rows["reader"].isin(shown_readers(tables["terms"]))]
    rows = rows[excludes_zero(rows, "share")]
    order = rows["share"].abs().sort_values(ascending=False).index
    rows = rows.loc[order].groupby(["reader", "of"], sort=False).head(most)
    return rows.sort_values(["layer", "of"], kind="stable")


def percent_text(share: ValueAndBounds) -> str:
    """Return a fraction in percent, without decimals."""
    return f"{100 * share[0]:z.0f}%"
