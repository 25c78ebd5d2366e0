"""The report of a run of `trace`: who writes position, who reads it, and confirmed effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import pandas as pd

from nope_probe.components import short
from nope_probe.experiments.sections import (
    NO_PATTERN,
    NOISE,
    Report,
    closing_of,
    largest,
    listed,
    percents,
    with_intervals,
)
from nope_probe.figures.intervals import excludes_zero, interval_of
from nope_probe.figures.position_figure import (
    LEAST,
    LEAST_BESIDE,
    MOST_EDGES,
    SIDES,
    TERMS,
    WRITTEN,
    position_circuit,
)
from nope_probe.figures.words import shown_readers, strongest_reader, with_readers
from nope_probe.reports import notes
from nope_probe.reports.page import Section, positions
from nope_probe.runtime.folder import Run

IN_TERMINAL = 4  # writers of a reader on the terminal
MOST = 0.5  # share of a pattern that makes a term its answer; share of the top writer's share, too
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
    "below 0 works against the pattern.",
    "How shares mislead: a writer may pass on another writer's position, and its direct share does "
    "not show this; several readers can share a writer; the mean over heads hides opposite signs; "
    "texts that begin alike count as position (--shuffle tells).",
    "First key: how much of a head's positional part comes from the first key, such as BOS, whose "
    "attention fades as more keys come.",
    "On all paths: the share of the reader's pattern that is lost when the writer's mean output at "
    "each position is replaced by its mean over positions, for everything behind it.",
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
    terminal = {
        f"{name}: the exact terms of each pattern, % of it": _terms_as_text(tables["terms"]),
        "The strongest writers, % of the reader's pattern": with_intervals(
            names, writers, {"share": ("share", "z.1%")}
        ),
        "Lost without the writer's position, %": _effects_as_text(tables["effects"]),
    }
    return Report(
        title=f"Who writes position in {name}",
        headline=headline(tables, reader),
        sections=list(_sections(run)),
        how_to_read=HOW_TO_READ,
        terminal={title: table for title, table in terminal.items() if len(table)},
        closing=closing_of(run.manifest),
    )


def _sections(run: Run) -> Iterator[Section]:
    tables, reader = run.tables, run.manifest["reader"]
    yield Section(
        title=answer(tables, reader),
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
        caption="An edge is as wide as the writer's share of the reader's pattern; choose a reader "
        "to see its weaker edges too. Below: the terms of one reader's pattern, on one scale, and "
        "its mean keys along their two principal axes, as all writers and the strongest make them.",
        table=strongest_writers(tables, MOST_EDGES).drop(columns="reader"),
    )
    yield Section(
        title=terms_finding(tables["terms"], reader),
        caption="The four terms of the mean and the covariance term add up to the whole pattern. A "
        "relative R² of 1 means that a term depends on the distance alone.",
        table=tables["terms"],
    )
    if len(tables["effects"]):
        yield Section(
            title=effect_findings(tables, _reader(tables, reader))[0],
            caption="A reader's loss without a writer's position: on the writer's direct path into "
            "the reader's queries and keys, which the exact share predicts, and on all paths.",
            table=tables["effects"],
        )


def headline(tables: Mapping[str, pd.DataFrame], reader: str | None = None) -> list[str]:
    """Return sentences on the writers of a reader and of all readers, and on confirmed effects."""
    sentences = [answer(tables, reader), terms_finding(tables["terms"], reader)]
    if len(tables["effects"]):
        sentences += effect_findings(tables, _reader(tables, reader))
    return [f"{sentence}." for sentence in dict.fromkeys(sentences)]


def _reader(tables: Mapping[str, pd.DataFrame], reader: str | None) -> str | None:
    """Return the layer or head that the headline is about, if any pattern exceeds its noise."""
    return reader or strongest_reader(tables["terms"])


def answer(tables: Mapping[str, pd.DataFrame], reader: str | None = None) -> str:
    """Return a sentence on the origin of a reader's pattern; by default of the strongest."""
    name = _reader(tables, reader)
    if name is None:
        return NO_PATTERN
    terms = with_readers(tables["terms"])
    terms = terms[terms["reader"] == name].set_index("term")
    if not terms["rms_low"]["all"] > 0:
        return f"The positional pattern of {name} is {NOISE}"
    shares = terms["share"]
    if shares.get("rotation", 0.0) >= MOST:
        return (
            f"{100 * shares['rotation']:.1f}% of {name}'s pattern is rotation: RoPE at work on "
            "vectors that know nothing of position"
        )
    if shares.get("alibi", 0.0) >= MOST:
        return f"{percents(shares['alibi'])} of {name}'s pattern is ALiBi's bias"
    if shares["covariance"] >= MOST:
        share = percents(shares["covariance"])
        return f"{share} of {name}'s pattern is covariance: no mean vector carries it"
    main, first_key = main_writers(tables["writers"], name), first_key_clause(tables["writers"])
    if not main:
        return f"No writer's share of {name}'s pattern exceeds the noise"
    return f"{name}'s position is written by {listed(main)}{first_key}"


def main_writers(writers: pd.DataFrame, reader: str) -> list[str]:
    """Return the writers whose share is at least half the strongest writer's share."""
    rows = with_readers(writers)
    rows = rows[(rows["reader"] == reader) & (rows["share_low"] > 0)]
    rows = rows[rows["share"] >= MOST * rows["share"].max()].sort_values("share", ascending=False)
    return list(dict.fromkeys(str(name) for name in rows["writer"]))


def first_key_clause(writers: pd.DataFrame) -> str:
    """Return a clause on the first token's share in the position that a first-layer head writes.

    Without position embeddings, position begins there: attention to the first key fades.
    """
    heads = writers[writers["writer"].str.fullmatch(r"L\d+H\d+")]
    if "pos_embed" in set(writers["writer"]) or not (heads["first_key_low"] > 0).any():
        return ""
    heads = heads[heads["first_key_low"] > 0]
    layer = heads["writer"].str.extract(r"L(\d+)H")[0].astype(int)
    heads = heads[layer == layer.min()]
    top = largest(heads, "share")
    share = percents(top["first_key"] / top["share"])
    return f"; {share} of {top['writer']}'s comes from the first token"


def terms_finding(terms: pd.DataFrame, reader: str | None = None) -> str:
    """Return a sentence on the shares of rotation, written position and covariance."""
    name = reader or strongest_reader(terms)
    if name is None:
        return NO_PATTERN
    rows = with_readers(terms)
    shares = rows[rows["reader"] == name].set_index("term")["share"]
    if shares.isna().all():
        return f"The positional pattern of {name} is {NOISE}"
    written = shares[[*WRITTEN]].sum()
    parts = {"rotation": shares["rotation"], "written": written, "covariance": shares["covariance"]}
    if "alibi" in shares:
        parts["ALiBi"] = shares["alibi"]
    words = [f"{percents(share)} {part}" for part, share in parts.items()]
    return f"The pattern of {name} is {listed(words)}"


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
    main = [] if reader is None else main_writers(tables["writers"], reader)
    own = clear[(clear["reader"] == reader) & clear["writer"].isin(main)]
    top = largest(clear if own.empty else own, "total")
    sentences = [
        f"Without the position of {top['writer']}, {top['reader']} {_change(top)} of its pattern; "
        f"its direct share is {percents(top['predicted'])}"
    ]
    indirect = clear[clear["direct"].abs() < MOST * clear["total"].abs()]
    indirect = indirect[indirect["total"].abs() >= LEAST_BESIDE]
    if len(indirect):
        top = largest(indirect, "total")
        sentences.append(
            f"{top['writer']} acts through other writers: without its position, {top['reader']} "
            f"{_change(top)}, and {percents(top['direct'])} on the direct path"
        )
    return sentences


def _change(row: pd.Series) -> str:
    """Return what a reader loses or gains in total: a share without its sign, and its interval."""
    does, (_, *bounds) = "loses" if row["total"] > 0 else "gains", interval_of(row, "total")
    low, high = sorted(100 * abs(bound) for bound in bounds)
    return f"{does} {100 * abs(row['total']):.0f}% [{low:.0f}, {high:.0f}]"


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
    for term in TERMS:
        heading, own = short(term), rows[rows["term"] == term]
        if term != "all" and (own["share"].abs() > LEAST).any():
            texts[heading] = with_intervals({}, own, {heading: ("share", "z.0%")})[heading]
    return texts


def _effects_as_text(effects: pd.DataFrame) -> pd.DataFrame:
    """Return each reader's loss without a writer's position: predicted, directly, in total."""
    rows = with_readers(effects)
    columns = {
        "predicted": ("predicted", "z.0%"),
        "on the direct path": ("direct", "z.0%"),
        "on all paths": ("total", "z.0%"),
    }
    return with_intervals({"reader": rows["reader"], "writer": rows["writer"]}, rows, columns)
