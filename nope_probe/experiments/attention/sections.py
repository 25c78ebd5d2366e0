"""The report of a run of `attention`: all heads on one map, their parts, and each head's map."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.attention.on_text import stored_why, text_view
from nope_probe.experiments.sections import MOST_ROWS, Report
from nope_probe.figures.attention import attention_heads
from nope_probe.figures.explorer import HEADS_BYTES, head_maps
from nope_probe.figures.intervals import estimate_text
from nope_probe.figures.names import phrase
from nope_probe.figures.panels import RowMaps
from nope_probe.figures.words import listed, reader_of
from nope_probe.reports import notes
from nope_probe.reports.page import Lead, Section
from nope_probe.runtime.folder import Run

MOSTLY, HARDLY = 0.8, 0.2  # of the information among the other keys
MAPS_BYTES = 1_600_000  # of the heads' mean maps beside a text
LEAST_NATS = 0.01  # of position: with less, a head has no positional attention worth a row


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: the table `attention`, and the map `weights`, [layer, head, row, key_pos].
    """
    table, name = run.tables["attention"], notes.model_name(run.manifest)
    removed = [phrase(part) for part in run.manifest["removed"]]
    subject = f"{name} without {listed(removed)}" if removed else name
    return Report(
        title=f"Position and content in the attention of {subject}",
        lead=lead(f"ablated {name}" if removed else name, table),
        sections=[
            Section(
                title="All heads: position, information, first key",
                figure=partial(attention_heads, table),
                caption="Colour: the positional share among the other keys. Area: the information. "
                "Ring: the first key's weight. A click on a head opens its map below.",
                table=table,
            ),
            *text_sections(run),
            *why_sections(run),
            Section(
                title="Each head's mean weights",
                html=weight_maps(run),
                caption="Means over texts, as the logarithm of their ratio to uniform weights: red "
                "keys get more attention than uniform, blue keys less. A click or Enter enlarges a "
                "map, arrow keys go on.",
            ),
        ],
        how_to_read=notes.how_to_read("attention"),
    )


def lead(subject: str, table: pd.DataFrame) -> Lead:
    """Return how many heads are positional, and a table of the most positional attention.

    Args:
        subject: the model.
        table: `attention.csv`.
    """
    known = table.dropna(subset=["information"])
    if known.empty:
        return Lead(sentence=f"No query of {subject} sees 8 keys, so no head is measured.")
    share, first = known["positional_share"], known["first_weight"].median()
    clear = known[(known["others_position"] >= LEAST_NATS) & (known["others_position_low"] > 0)]
    rows = clear.nlargest(MOST_ROWS, "others_position").to_dict("records")
    columns = {
        "positional": "positional_share",
        "on first key": "first_weight",
        "missed": "pattern_missed",
    }
    cells = {"head": [reader_of(row) for row in rows]}
    cells["by position, nats"] = [estimate_text(row, "others_position", "z.2f") for row in rows]
    for heading, column in columns.items():
        cells[heading] = [estimate_text(row, column, "z.0f") for row in rows]
    return Lead(
        sentence=f"{(share >= MOSTLY).sum()} of {len(known)} heads of {subject} attend mostly by "
        f"position, {(share < HARDLY).sum()} mostly by content; the first key gets "
        f"{100 * first:.0f}% of the weight (median).",
        table=pd.DataFrame(cells) if rows else pd.DataFrame(),
        caption="The most positional attention among the keys after the first; positional is its "
        "share of the head's information. Mostly: over 80%, or under 20%. Missed: by the softmax "
        "of mean scores.",
    )


def text_sections(run: Run) -> Iterator[Section]:
    """Yield the section with the run's text, if it has one."""
    view = text_view(run)
    if view is not None:
        head, query, nats = view.strongest()
        yield Section(
            title="Attention on your text",
            html=view.html(),
            caption=f"{head} differs most from other texts: {nats:.1f} nats at token {query}. "
            "Click a token to shade the keys it attends to. The bar under it: how far these "
            "weights are from other texts' mean.",
        )


def why_sections(run: Run) -> Iterator[Section]:
    """Yield the section with the terms of the scores that the run asks about, if it asks."""
    why = stored_why(run)
    if why is not None:
        yield Section(
            title="Why the head looks there",
            figure=lambda: why.figure,
            caption="Terms of the scores of the most attended keys, less their mean. They "
            "are position, and what earlier components wrote into this text's key or query. The "
            "dot is their sum.",
            table=why.table,
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
        HEADS_BYTES if run.manifest.get("text") is None else MAPS_BYTES,
        what="attention",
        measure="above uniform",
    )
