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
from nope_probe.figures.words import listed, shown_readers, with_readers
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
LEAST = 0.05  # of a lead or pattern, which a writer in the first table writes or takes away
INDENT = "· "  # before a head, whose nats its attention's row counts
NO_PATTERN = "No layer or head shows a lead or pattern that exceeds the noise."
MADE_BY = {  # by the term that surely is most of a lead or pattern
    "rotation": "RoPE's rotation makes {part} of {whole}",
    "alibi": "ALiBi makes {part} of {whole}",
    "covariance": "covariance, which no mean vector carries, makes {part} of {whole}",
    "written": "{writers} of {whole}",
    "noisy": "no single writer makes {whole}, of which {part} were written",
    "none": "no single term makes {whole}",
}
ENCODINGS = {"rotation": "RoPE's rotation", "alibi": "ALiBi"}  # rows of the first table
LOST = "Lost: on all paths, without its position{kept}."
OF_HEADS = "A head's nats are counted in the row of its attention, above it."


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
        caption="Part, nats: what a term makes of the whole. The mean's four terms and the "
        "covariance term add up to it; the norm is a part of the written terms. Size: the "
        "term alone. Non-relative: what of it does not depend on distance alone.",
        table=tables["terms"].filter(regex="^(?!relative_r2)"),
    )
    yield Section(
        title="Who writes position, and who reads it",
        caption="Part, nats: what each reader's strongest writers make of its lead or pattern, on "
        "the direct path into its keys or queries.",
        table=rows_of_strongest_writers(tables, MOST_WRITERS).drop(columns="reader"),
    )
    if len(tables["effects"]):
        kept = " The first token keeps its position: no rows of the lead."
        yield Section(
            title="What is lost without a writer's position",
            caption="Nats. Held, direct: lost on the direct path with the norm's scale kept, and "
            "as it follows; norm is their difference. Total: on all paths."
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
class Answer:
    """What makes a reader's lead or pattern, and what it loses, nats.

    Attributes:
        size: the mean lead, or the RMS of the pattern.
        terms: of rotation, written position, covariance and ALiBi, where it is.
        writers: of each writer, in keys and queries together.
        attentions: of each attention whose heads write one by one, the sum of their parts.
        lost: without the position of each writer that was measured, on all paths.
    """

    size: float
    terms: Mapping[str, ValueAndBounds]
    writers: Mapping[str, ValueAndBounds]
    attentions: Mapping[str, ValueAndBounds]
    lost: Mapping[str, ValueAndBounds]

    @classmethod
    def of(cls, tables: Mapping[str, pd.DataFrame], reader: str, question: str) -> Answer | None:
        """Return the parts of a lead or pattern; None where it does not exceed its noise."""
        terms, of_writers, effects = (
            _rows_of(tables[name], reader, question) for name in ("terms", "writers", "effects")
        )
        whole = [row for row in terms if row["term"] == "all" and row["part"] == row["part"]]
        if not whole:
            return None
        sides: dict[str, list[ValueAndBounds]] = {}
        for row in of_writers:
            sides.setdefault(row["writer"], []).append(interval_of(row, "part"))
        writers = {writer: summed(parts) for writer, parts in sides.items()}
        return cls(
            size=whole[0]["size"],
            terms=term_parts(terms),
            writers=writers,
            attentions={
                name: summed(part for head, part in writers.items() if Writer(head).whole == name)
                for name in {str(Writer(head).whole) for head in writers} - {*writers}
            },
            lost={str(row["writer"]): interval_of(row, "total") for row in effects},
        )

    @property
    def direct(self) -> dict[str, ValueAndBounds]:
        """The parts of all writers, and of attentions."""
        return {**self.writers, **self.attentions}

    def over_size(self, parts: Mapping[str, ValueAndBounds]) -> dict[str, ValueAndBounds]:
        """Return parts over the size of the whole, which is below 0 where other keys lead."""
        return {
            name: (value / self.size, min(ends), max(ends))
            for name, (value, low, high) in parts.items()
            for ends in [(low / self.size, high / self.size)]
        }

    def strength(self, writer: str) -> float:
        """Return the larger of a writer's part and of what is lost, over the size of the whole.

        Only what has a clear sign counts.
        """
        found = (parts[writer] for parts in (self.direct, self.lost) if writer in parts)
        clear = (abs(value) for value, low, high in found if low * high > 0)
        return max(clear, default=0.0) / abs(self.size)


def headline(run: Run) -> Headline:
    """Return the main terms and writers of a reader's lead and pattern, and what it loses.

    Args:
        run: its tables `terms`, `writers` and `effects`, and its manifest with the `reader`.
    """
    tables, manifest, traced = run.tables, run.manifest, run.manifest.results_as(Traced)
    if traced.reader is None:
        return Headline(sentence=NO_PATTERN)
    reader = traced.reader
    answers = {
        question: found
        for question in QUESTIONS
        if (found := Answer.of(tables, reader, question)) is not None
    }
    if not answers:
        return Headline(sentence=f"{reader} shows no lead or pattern that exceeds the noise.")
    kept = ", which the first token keeps" if traced.kept_positions else ""
    length = f"{manifest.seq_len:,} tokens"
    clauses = [_clause(name, answers, reader) for name in ("pattern", "lead") if name in answers]
    table, n_left_out = _table(f"{reader} at {length}, nats", answers)
    rule = f"{reader} has the largest lead and pattern of {notes.layers_of_run(manifest)}."
    parts = [
        "" if manifest.settings.get("reader") else rule,
        OF_HEADS if any(name.startswith(INDENT) for name in table.iloc[:, 0]) else "",
        LOST.format(kept=kept) if any(answer.lost for answer in answers.values()) else "",
        f"Weaker writers left out: {n_left_out}." if n_left_out else "",
    ]
    return Headline(
        sentence=f"At {length}, {'. '.join(clauses)}.",
        table=table,
        caption=" ".join(filter(None, parts)),
    )


def _clause(question: str, answers: Mapping[str, Answer], reader: str) -> str:
    """Return a clause on the main term of a lead or a pattern."""
    answer, what = answers[question], f"in the order of {reader}'s other keys"
    if question == "lead":
        what = "of the first key's lead" if len(answers) > 1 else f"of {reader}'s lead"
    style = "z.1f" if abs(answer.size) >= 1 else "z.2f"
    most = most_of(answer.over_size(answer.terms)) or "none"
    main = main_writers(answer.over_size(answer.writers))
    verbs = ["writes ", *[""] * len(main)]
    named = [
        f"{name} {verb}{answer.writers[name][0]:{style}}"
        for name, verb in zip(main[:NAMED], verbs, strict=False)
    ]
    named += ["others the rest"] if len(main) > NAMED else []
    return MADE_BY["noisy" if most == "written" and not main else most].format(
        whole=f"the {answer.size:{style}} nats {what}",
        part=f"{answer.terms.get(most, (0.0,))[0]:{style}}",
        writers=listed(named) if named else "",
    )


def _table(name: str, answers: Mapping[str, Answer]) -> tuple[pd.DataFrame, int]:
    """Return the first table, and how many writers it leaves out.

    Its rows but those of heads under their attention add up to the whole.
    """
    encodings = [
        term
        for term in ENCODINGS
        if any(
            abs(answer.terms.get(term, (0.0,))[0]) >= LEAST / 10 * abs(answer.size)
            for answer in answers.values()
        )
    ]
    top, n_left_out = _shown_writers(answers, MOST_ROWS - 3 - len(encodings))
    wholes = [writer for writer in top if Writer(writer).whole == writer]
    columns = {}
    for question, answer in answers.items():
        label, others = QUESTIONS[question], answer.terms["written"][0]
        parts = {ENCODINGS[term]: answer.terms.get(term) for term in encodings}
        parts |= {writer: answer.direct.get(writer) for writer in top}
        parts["covariance"] = answer.terms["covariance"]
        others -= sum(answer.direct[whole][0] for whole in wholes if whole in answer.direct)
        numbers = {name: part[0] for name, part in parts.items() if part is not None}
        columns[label] = {"whole": answer.size, **numbers, OTHERS: others}
        if answer.lost:
            columns[f"{label}, lost"] = {
                writer: answer.lost[writer][0] for writer in top if writer in answer.lost
            }
    rows = ["whole", *(ENCODINGS[term] for term in encodings), *top, OTHERS, "covariance"]
    labels = [INDENT + row if row in top and row not in wholes else row for row in rows]
    table = {name: labels} | {
        label: [f"{cells[row]:z.2f}" if row in cells else "" for row in rows]
        for label, cells in columns.items()
    }
    return pd.DataFrame(table), n_left_out


def _shown_writers(answers: Mapping[str, Answer], n_rows: int) -> tuple[list[str], int]:
    """Return the strongest writers, heads after their attention, and how many others there are."""
    named = (name for answer in answers.values() for name in (*answer.direct, *answer.lost))
    writers = dict.fromkeys(name for name in named if name != "bias")
    strengths = {
        writer: max(answer.strength(writer) for answer in answers.values()) for writer in writers
    }
    heads: dict[str, list[str]] = {}
    n_shown = 0
    for writer in sorted(strengths, key=lambda name: (-strengths[name], Writer(name).order)):
        whole = str(Writer(writer).whole)
        n_new = 1 + (writer != whole and whole not in heads)
        if strengths[writer] < LEAST or n_shown + n_new > n_rows or writer in heads:
            continue
        of_whole = heads.setdefault(whole, [])
        of_whole += [writer] if writer != whole else []
        n_shown += n_new
    top = [name for whole, of_whole in heads.items() for name in (whole, *of_whole)]
    return top, len(writers) - len(top)


def _rows_of(table: pd.DataFrame, reader: str, question: str) -> list[dict[Any, Any]]:
    """Return the rows of one reader's lead or pattern."""
    if table.empty:
        return []
    rows = with_readers(table)
    return rows[(rows["reader"] == reader) & (rows["of"] == question)].to_dict("records")


def term_parts(terms: Sequence[Mapping[Any, Any]]) -> dict[str, ValueAndBounds]:
    """Return the parts of rotation, written position, covariance and ALiBi, where it is, nats.

    Args:
        terms: the rows of `terms.csv` of one lead or pattern.
    """
    rows = {row["term"]: interval_of(row, "part") for row in terms}
    parts = {
        "rotation": rows["rotation"],
        "written": summed(rows[name] for name in WRITTEN),
        "covariance": rows["covariance"],
    }
    return parts | ({"alibi": rows["alibi"]} if "alibi" in rows else {})


def strongest_reader(terms: pd.DataFrame, fold_sizes: Sequence[int]) -> str | None:
    """Return the reader with the largest lead and pattern together, by the rule of all pages.

    Args:
        terms: `terms.csv`.
        fold_sizes: sequences per fold.

    Returns:
        None if no pattern exceeds the noise.
    """
    whole = with_readers(terms[terms["term"] == "all"]).set_index("reader")
    rows = whole[whole["of"] == "pattern"].rename(
        columns=lambda name: name.replace("size", "amplitude")
    )
    rows = rows.assign(lead=whole[whole["of"] == "lead"]["size"])
    row = strongest_row(rows, fold_sizes)
    return None if row is None else str(row.name)


def rows_of_strongest_writers(tables: Mapping[str, pd.DataFrame], most: int) -> pd.DataFrame:
    """Return the rows of the strongest writers of the shown readers, if they differ from zero."""
    rows = with_readers(tables["writers"])
    rows = rows[rows["reader"].isin(shown_readers(tables["terms"]))]
    rows = rows[excludes_zero(rows, "part")]
    order = rows["part"].abs().sort_values(ascending=False).index
    rows = rows.loc[order].groupby(["reader", "of"], sort=False).head(most)
    return rows.sort_values(["layer", "of"], kind="stable")
