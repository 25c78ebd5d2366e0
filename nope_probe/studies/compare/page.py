"""The report of a comparison: the runs' values side by side, and their differences."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from nope_probe.figures.attention import attention_changes
from nope_probe.figures.intervals import excludes_zero, interval_of, interval_text
from nope_probe.figures.words import reader_of
from nope_probe.removal import INTACT
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Link, Listing, Section
from nope_probe.run.folder import Run
from nope_probe.studies.ablate import Answer
from nope_probe.studies.attention import text_view
from nope_probe.studies.compare.heads import changed_heads_sentence, method_of_heads, ordered_heads
from nope_probe.studies.compare.members import Member, share_sequences
from nope_probe.studies.page import MOST_ROWS, Report, shown_layer

OF_SIDES = "Order: how much of the intact model's pattern among the other keys is there."
LESS = "A difference is a run's number less that of {base}."
OF_HEADS = "Changes are in nats."
TEXT_BYTES = 2_500_000  # of each run's text
METHODS = {
    "others": "The runs had different sequences, so differences are unpaired.",
    "paired": "The runs had the same sequences: differences are paired over folds.",
}
TOPICS = {  # of the tables whose names are no words
    "pattern": "Positional pattern",
    "non_relative": "Non-relative part",
    "bands": "RoPE bands",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison says of its runs.

    Attributes:
        compared: the command that wrote them.
        labels: their names; the first is the base.
        folders: their folders.
        same_sequences: whether all had the same sequences, in the same folds.
        headline: the result in two sentences, and how differences were taken.
    """

    compared: str
    labels: tuple[str, ...]
    folders: tuple[str, ...]
    same_sequences: bool
    headline: tuple[str, ...]


def report(run: Run, folder: Path, members: Sequence[Member]) -> Report:
    """Return the report of a comparison.

    Args:
        run: its `differences`, of attention `changes`, and the `headline` and `labels` of its
            manifest.
        folder: the comparison's folder, from which the page links to the runs.
        members: the runs; the first is the base.
    """
    table, compared = run.tables["differences"], run.manifest.results_as(Comparison)
    labels, (sentence, *method) = compared.labels, compared.headline
    sides, heads = side_by_side(members), _heads(run.tables)
    less = LESS.format(base=labels[0])
    brief, caption = (_brief(table), less) if sides.empty else (sides, OF_SIDES)
    if heads:
        brief, caption = _most_changed(heads), f"{less} {OF_HEADS}"
    return Report(
        title=f"{', '.join(labels[1:])} against {labels[0]}",
        headline=Headline(sentence=sentence, table=brief, caption=caption),
        sections=[
            *_changes(run.tables, labels[0]),
            *_texts(members),
            _runs(members, folder),
            *_tables(table),
        ],
        how_to_read=[*notes.how_to_read("attention" if heads else "compare"), *method, less],
    )


def _heads(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the heads of each run but the first, those that changed most first."""
    if "changes" not in tables:
        return {}
    by_run = tables["changes"].groupby("run", sort=False)
    return {str(label): ordered_heads(rows) for label, rows in by_run}


def _most_changed(heads: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the heads of each run that changed most, as text."""
    rows = [
        {"run": label, "head": reader_of(row)}
        | {name: f"{row[name]:+.2f}" for name in ("information", "position", "content")}
        | {"changed": "yes" if row["changed"] else "no"}
        for label, table in heads.items()
        for row in table[: max(2, MOST_ROWS // len(heads))].to_dict("records")
    ]
    return pd.DataFrame(rows)


def _changes(tables: Mapping[str, pd.DataFrame], base: str) -> Iterator[Section]:
    """Yield a grid of the heads' changes for each run but the first."""
    if "changes" not in tables:
        return
    for label, rows in tables["changes"].groupby("run", sort=False):
        yield Section(
            title="Which heads changed",
            figure=partial(attention_changes, rows, f"Change from {base} to {label}"),
            caption="Red: more nats than before, blue: fewer. A dot marks a change that survives "
            "Holm's rule. Heads behind a changed head change as well: look at the first layer "
            "with dots.",
            table=rows,
        )


def _texts(members: Sequence[Member]) -> Iterator[Section]:
    """Yield the view of each run's text, if all runs have one."""
    if all(member.manifest.text is not None for member in members):
        for member in members:
            yield Section(
                title=f"Attention of {member.label} on your text",
                html=text_view(member).html(TEXT_BYTES),
                caption="Click a token to shade the keys it attends to. The bar under it: how far "
                "these weights are from other texts' mean, in nats.",
            )


def headline(members: Sequence[Member], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return the result in two sentences, and how differences were taken.

    Args:
        members: the runs.
        tables: `differences`, and of attention `changes`.
    """
    table, heads = tables["differences"], _heads(tables)
    if heads:
        sentences = [changed_heads_sentence(label, of_run) for label, of_run in heads.items()]
        return [" ".join(sentences), method_of_heads(members)]
    answers = {member.label: _answer(member) for member in members}
    sentences = []
    if all(answers.values()):
        sentences = [f"{label}: {of.sentence()}" for label, of in answers.items() if of]
    n, known = excludes_zero(table, "difference").sum(), table["difference_low"].notna().sum()
    sentences.append(
        f"{n} of {known} numbers differ beyond their 95% interval; by chance 1 in 20 would."
    )
    method = "paired" if share_sequences(members) else "others"
    return [" ".join(sentences), METHODS[method]]


def _answer(member: Member) -> Answer | None:
    """Return the values of a run of `ablate`, of its shown layer; None without a pattern."""
    if member.manifest.kind != "ablate" or not member.manifest.results.get("positional_sources"):
        return None
    pattern = member.tables["pattern"]
    intact = pattern[pattern["removed"] == INTACT.name]
    layer = shown_layer(intact, member.manifest.fold_sizes)
    return None if layer is None else Answer.of(member.tables, member.manifest, layer)


def side_by_side(members: Sequence[Member]) -> pd.DataFrame:
    """Return the values of each run, of its shown layer; empty for other runs than `ablate`'s."""
    answers = {member.label: _answer(member) for member in members}
    tables = []
    for label, of in answers.items():
        if of is None:
            return pd.DataFrame()
        rows = of.table()
        name, *numbers = rows.columns
        headings = {column: f"{label} {of.place}, {column}" for column in numbers}
        tables.append(
            rows.rename(columns=headings).set_index(rows[name].rename("")).drop(columns=name)
        )
    return pd.concat(tables, axis=1).fillna("").reset_index()


def _brief(table: pd.DataFrame) -> pd.DataFrame:
    """Return the first differences beyond their interval, as text."""
    rows = table[excludes_zero(table, "difference")][:MOST_ROWS]
    return pd.DataFrame(
        {
            "what": [f"{row['item']}: {row['measure']}" for row in rows.to_dict("records")],
            "run": rows["run"].tolist(),
            "difference": [
                interval_text(interval_of(row, "difference"), "+z.3g", "")
                for row in rows.to_dict("records")
            ],
        }
    )


def _tables(differences: pd.DataFrame) -> Iterator[Section]:
    for name, rows in differences.groupby("table", sort=False):
        yield Section(
            title=TOPICS.get(str(name), str(name).replace("_", " ").capitalize()),
            caption="",
            table=rows.drop(columns="table"),
        )


def _runs(members: Sequence[Member], folder: Path) -> Section:
    pages = [Path(os.path.relpath(member.folder / "report.html", folder)) for member in members]
    rows = [
        (Link(text=member.label, href=page.as_posix()), member.manifest.command, page.parent.name)
        for member, page in zip(members, pages, strict=True)
    ]
    return Section(
        title="The pages of the runs",
        caption="The first run is the one that the others are compared with.",
        listing=Listing(columns=("run", "command", "folder"), rows=rows),
    )
