"""The report of a run of `attention`: all heads on one map, their parts, and each head's map."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.attention.on_text import text_view
from nope_probe.experiments.sections import Report, listed, percents, with_intervals
from nope_probe.figures.attention import attention_heads, why_bars
from nope_probe.figures.explorer import head_maps
from nope_probe.figures.intervals import interval_of, interval_text, percent
from nope_probe.figures.panels import RowMaps
from nope_probe.figures.words import reader_of, with_readers
from nope_probe.reports import notes
from nope_probe.reports.page import Section
from nope_probe.runtime.folder import Run

MOSTLY, HARDLY = 0.8, 0.2  # of the information among the other keys
IN_TERMINAL, NAMED = 12, 3  # heads
LEAST_NATS = 0.01  # of position: with less, a head has no positional attention worth a sentence
NOTHING = "No query sees 8 keys or more, so no head is measured"
HOW_TO_READ = (
    "A head's information says how far its attention weights are from uniform ones, in nats: the "
    "relative entropy, a mean over texts and over queries of 8 keys or more.",
    "It has four parts, exactly. A head decides whether to look at the first key, and where to "
    "look among the other keys. Position is the part of each that is the same in every text. "
    "Content is the part that differs: what the text tells about the attended key.",
    "The positional share is position's part of the information among the other keys. At 100% the "
    "text tells nothing about where the head looks, at 0% position tells nothing.",
    "How it misleads: a head that gives the first key nearly all of its weight has little "
    "information about the other keys, whatever its share; texts that begin alike count as "
    "position (--shuffle tells); short sequences have few positions; and the share says nothing of "
    "what a head writes.",
    "Missed by the scores: how much of the positional attention among the other keys the softmax "
    "of the mean scores leaves out. Where this is small, the positional pattern in nats is what to "
    "attribute (`ablate`, `trace`).",
    "Bars and brackets are 95% intervals, from folds of the data; sequences of one document share "
    "a fold. A mean of few texts looks more positional than it is; this bias is removed, so a part "
    "that is 0 may come out slightly below 0.",
    notes.LAYERS_AND_HEADS,
)


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: the table `attention`, and the map `weights`, [layer, head, row, key_pos].
    """
    table, name = run.tables["attention"], run.manifest["model"]["name"]
    known = table.dropna(subset=["information"])
    removed = run.manifest["removed"]
    subject = f"{name} without {listed(removed)}" if removed else name
    strong = known.sort_values("others_position", ascending=False)[:IN_TERMINAL]
    columns = {
        "nats": ("information", "z.2f"),
        "positional, %": ("positional_share", "z.0%"),
        "first key, %": ("first_weight", "z.0%"),
        "missed by the scores, %": ("pattern_missed", "z.0%"),
    }
    heads = with_intervals({"head": with_readers(strong)["reader"]}, strong, columns)
    folds, documents = run.manifest["settings"]["folds"], run.manifest.get("documents")
    of_documents = "" if documents is None else f" of {documents} documents"
    return Report(
        title=f"Position and content in the attention of {subject}",
        headline=headline(known),
        sections=[
            Section(
                title=share_finding(known),
                figure=partial(attention_heads, table),
                caption="Every head of the model: its colour is the positional share among the "
                "other keys, its area the information of its attention, and the width of its ring "
                "the first key's weight. A click on a head opens its map below.",
                table=table,
            ),
            *text_sections(run),
            *why_sections(run),
            Section(
                title=first_finding(known),
                html=weight_maps(run),
                caption="Each head's mean weights over texts, as the logarithm of their ratio to "
                "uniform weights: red keys get more attention than uniform, blue keys less. A "
                "click or Enter enlarges a map, arrow keys go to the next head, Esc closes.",
            ),
        ],
        how_to_read=HOW_TO_READ,
        terminal={f"{subject}: the heads with the most positional attention": heads},
        closing=f"Brackets are 95% intervals from {folds} folds{of_documents}.",
    )


def text_sections(run: Run) -> Iterator[Section]:
    """Yield the section with the run's text, if it has one."""
    view = text_view(run)
    if view is not None:
        head, query, nats = view.strongest()
        yield Section(
            title=f"On your text, {head} differs most from other texts: {nats:.1f} nats at token "
            f"{query}",
            html=view.html(),
            caption="Choose a head, and click a token to ask where the head looks from there: its "
            "keys are shaded, by the square root of their weight. The bar under a token is how far "
            "the head's weights there are from their mean over other texts, as a relative entropy "
            "in nats: where the head uses what the text says.",
        )


def why_sections(run: Run) -> Iterator[Section]:
    """Yield the section with the terms of the scores that the run asks about, if it asks."""
    asked = run.manifest.get("why")
    if asked is not None:
        title = f"Why {asked['head']} looks there from token {asked['query']}"
        yield Section(
            title=title,
            figure=partial(why_bars, run.tables["why"], title),
            caption="The keys with the most attention. A bar is a term of the key's score, less "
            "its mean over the keys: position, the same in every text, and what each earlier "
            "component wrote into this text's key or query. The dot is their sum.",
            table=run.tables["why"],
        )


def headline(table: pd.DataFrame) -> list[str]:
    """Return sentences on positional heads, on the first key, and on what mean scores miss.

    Args:
        table: `attention.csv`, a row for each head whose queries see 8 keys.
    """
    if table.empty:
        return [f"{NOTHING}."]
    findings = [share_finding(table), strongest_finding(table), first_finding(table)]
    return [f"{finding}." for finding in [*findings, missed_finding(table)]]


def share_finding(table: pd.DataFrame) -> str:
    """Return a sentence on how many heads are positional, and how many are not."""
    share = table["positional_share"]
    return (
        f"Positional share of {percents(MOSTLY)} or more: {(share >= MOSTLY).sum()} of "
        f"{len(table)} heads; below {percents(HARDLY)}: {(share < HARDLY).sum()}"
    )


def strongest_finding(table: pd.DataFrame) -> str:
    """Return a sentence on the heads with the most positional attention among the other keys."""
    clear = table[(table["others_position"] >= LEAST_NATS) & (table["others_position_low"] > 0)]
    if clear.empty:
        return "No head has positional attention among the other keys that exceeds the noise"
    top = clear.sort_values("others_position", ascending=False)[:NAMED]
    parts = []
    for _, row in top.iterrows():
        nats = interval_text(interval_of(row, "others_position"), "z.2f", " nats")
        share = interval_text(percent(interval_of(row, "positional_share")), "z.0f", "%")
        parts.append(f"{reader_of(row)} ({nats}, {share} of its information there)")
    return f"The most positional attention is in {listed(parts)}"


def first_finding(table: pd.DataFrame) -> str:
    """Return a sentence on the first key's weight in the heads of the model."""
    if table.empty:
        return NOTHING
    weight = table["first_weight"]
    top = table.iloc[int(weight.argmax())]
    return (
        f"The first key gets {percents(weight.median())} of a head's weight (median; "
        f"{percents(top['first_weight'])} in {reader_of(top)})"
    )


def missed_finding(table: pd.DataFrame) -> str:
    """Return a sentence on the heads whose positional attention the mean scores do not show."""
    clear = table[(table["others_position_low"] > 0) & (table["others_position"] >= LEAST_NATS)]
    missed = clear["pattern_missed"]
    if clear.empty:
        return "Mean scores are compared with no head, since none has positional attention"
    much = clear[missed > 0.5]
    median = f"The mean scores miss {percents(missed.median())} of the positional attention (median"
    if much.empty:
        return f"{median} over {len(clear)} heads), so the pattern in nats is what to attribute"
    names = [reader_of(row) for _, row in much[:NAMED].iterrows()]
    more = f" and {len(much) - NAMED} more" if len(much) > NAMED else ""
    return (
        f"{median} over {len(clear)} heads), but more than half of it in {', '.join(names)}{more}: "
        "do not read their patterns in nats as their attention"
    )


def weight_maps(run: Run) -> str:
    """Return every head's mean weights, as log ratios to uniform weights, for the page."""
    weights: Float[np.ndarray, "layer head row key_pos"] = run.maps["weights"]
    seen = weights > 0
    n_keys = seen.sum(-1, keepdims=True).clip(1)
    with np.errstate(divide="ignore"):
        ratios = np.where(seen, np.log(weights * n_keys), np.nan)
    table = run.tables["attention"]
    amplitudes = {end: table[f"information{end}"] for end in ("", "_low")}
    heads = table[["layer", "head"]].assign(
        amplitude=amplitudes[""], amplitude_low=amplitudes["_low"]
    )
    return head_maps(
        RowMaps(values=ratios, queries=run.query_positions),
        heads,
        what="attention",
        measure="above uniform",
    )
