"""The report of a run of `attention`: all heads on one map, their parts, and each head's map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.attention import UNIFORM, attention_heads, term_styles
from nope_probe.figures.explorer import HEADS_BYTES, head_maps
from nope_probe.figures.intervals import estimate_text
from nope_probe.figures.names import phrase
from nope_probe.figures.panels import RowMaps
from nope_probe.figures.text_view import TextView
from nope_probe.figures.words import listed, reader_of
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section
from nope_probe.run.folder import Run
from nope_probe.studies.attention.on_text import has_other_texts, stored_why, text_view
from nope_probe.studies.page import MOST_ROWS, Report

MOSTLY, HARDLY = 0.5, 0.2  # of a head's information among the other keys
AT_AN_END = MOST_ROWS // 2  # heads in the lead's table: the most and the least positional
MAPS_BYTES = 1_600_000  # of the heads' mean maps next to a text


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: the table `attention`, and the map `weights`, [layer, head, row, key_pos].
    """
    table, name = run.tables["attention"], run.manifest.model_name
    removed = [phrase(part) for part in run.manifest.removed or ()]
    full = f"{name} without {listed(removed)}" if removed else name
    subject = f"ablated {name}" if removed else name
    lead = alone(run)
    if has_other_texts(run):
        lead = headline(subject, table, run.manifest.skip_keys, text_line(run))
    return Report(
        title=f"Position and content in the attention of {full}",
        headline=replace(lead, caption=f"{lead.caption} {sinks_line(table)}".strip()),
        sections=[*_head_sections(run), *text_sections(run), *why_sections(run), *_maps(run)],
        how_to_read=notes.how_to_read("attention"),
    )


def _head_sections(run: Run) -> Iterator[Section]:
    """Yield the map of all heads; of a text alone, if a query sees 8 keys."""
    table, compared = run.tables["attention"], has_other_texts(run)
    if not compared and table["information"].isna().all():
        return
    colour = "Colour: position among the other keys. " if compared else ""
    yield Section(
        title="All heads: first key and " + ("position among others" * compared or "nats"),
        figure=partial(attention_heads, table),
        caption=f"Ring: the first key's weight. {colour}Area: all information. Grey: no share is "
        f"given. A click on a head opens its map below. {sinks_line(table)}".strip(),
        table=table.dropna(axis=1, how="all"),
    )


def sinks_line(table: pd.DataFrame) -> str:
    """Return a sentence on what learned sinks take, which the weights leave out; "" if none do.

    Args:
        table: `attention.csv`.
    """
    if not table.get("sink_weight", pd.Series(dtype=float)).any():
        return ""
    heads = table.dropna(subset=["sink_weight"])
    most = max(heads.to_dict("records"), key=lambda row: row["sink_weight"])
    return (
        "Attention weights are renormalised without the learned sinks, which take "
        f"{heads['sink_weight'].mean():.0%} of a head's attention on average, and at most "
        f"{most['sink_weight']:.0%} ({reader_of(most)})."
    )


def headline(subject: str, table: pd.DataFrame, skip_keys: int = 1, text: str = "") -> Headline:
    """Return what the first key gets, and how much is position among the other keys.

    Args:
        subject: the model.
        table: `attention.csv`.
        skip_keys: how many keys count as first.
        text: a line on the run's text.
    """
    known = table.dropna(subset=["information"])
    if known.empty:
        return Headline(
            sentence=f"No query of {subject} sees 8 keys, so no head is measured.", also=text
        )
    informed = known[known["information"] >= UNIFORM]
    if informed.empty:
        most = known["information"].max()
        return Headline(
            sentence=f"All {len(known)} heads of {subject} attend uniformly: their weights are at "
            f"most {most:.1g} nats above uniform, and no head is classed.",
            also=text,
        )
    share = informed["others_share"]
    if share.isna().all():
        return Headline(
            sentence=f"These sequences are too few to say how much of {subject}'s attention is "
            "position.",
            also=text,
        )
    others, uniform = nats_of(known, "others"), len(known) - len(informed)
    first = ""
    if skip_keys:
        keys = "first key gets" if skip_keys == 1 else f"first {skip_keys} keys get"
        first = (
            f"The {keys} {known['first_weight'].mean():.0%} of the attention of {subject}'s heads, "
            f"and {nats_of(known, 'first').mean():.2f} of its {known['information'].mean():.2f} "
            "nats above uniform. "
        )
    return Headline(
        sentence=f"{first}Among the other keys, "
        f"{known['others_position'].sum() / others.sum():z.0%} of the information "
        f"({known['others_position'].mean():z.2f} of {others.mean():.2f} nats) is position: "
        f"{(share >= MOSTLY).sum()} of {len(known)} heads at {MOSTLY:.0%} or more, "
        f"{(share < HARDLY).sum()} below {HARDLY:.0%}{f', {uniform} uniform' * (uniform > 0)}.",
        table=_most_and_least(informed.dropna(subset=["others_share"])),
        caption="The heads whose attention among the other keys is most and least position, the "
        "same in every text. Weight and nats above uniform of the first key; nats of the other "
        "keys, and how much of them is position.",
        also=text,
    )


def nats_of(heads: pd.DataFrame, keys: Literal["first", "others"]) -> pd.Series[float]:
    """Return each head's information about the first key, or among the other keys, nats."""
    return heads[f"{keys}_position"] + heads[f"{keys}_content"]


def _most_and_least(heads: pd.DataFrame) -> pd.DataFrame:
    """Return the heads with the most and the least position among the other keys, as text."""
    ordered = heads.sort_values("others_share", ascending=False, kind="stable")
    ends = pd.concat((ordered.iloc[:AT_AN_END], ordered.iloc[AT_AN_END:][-AT_AN_END:]))
    rows = ends.to_dict("records")

    def estimates(column: str) -> list[str]:
        return [estimate_text(row, column, "z.0f") for row in rows]

    return pd.DataFrame(
        {
            "head": [reader_of(row) for row in rows],
            "first key": estimates("first_weight"),
            "first, nats": [f"{nats:.2f}" for nats in nats_of(ends, "first")],
            "others, nats": [f"{nats:.2f}" for nats in nats_of(ends, "others")],
            "position": estimates("others_share"),
        }
    )


def alone(run: Run) -> Headline:
    """Return where heads look in a text that was read without other texts.

    Args:
        run: a run of a text alone.
    """
    return Headline(
        sentence=text_line(run),
        caption="Only the text was read, which cannot separate position from content: --n-seqs or "
        "--data reads other texts too.",
    )


def text_line(run: Run) -> str:
    """Return a sentence on the run's text: the answer to its `why`, or where a head looks.

    The head is the one that differs most from other texts; without other texts it is the one that
    gives the most weight to a key after the first and before the query.
    """
    view = text_view(run)
    if view is None:
        return ""
    why = stored_why(run)
    if why is not None:
        rows = why.table.to_dict("records")
        term = max(rows, key=lambda row: (row["weight"], row["nats"]))  # of the key attended most
        name = term_styles(why.table)[term["side"], term["term"]][0]
        nats = f"{term['nats']:+.1f} of {term['score']:+.1f} nats"
        looks_at = looks(view, why.head, why.query, term["key"])
        said = f"In the text {looks_at}: the largest term is {name} ({nats})."
        return f"{said} {why.moved}".strip()
    head, query, key = view.strongest_look()
    compared = ""
    if view.position is not None:
        layer, number = view.place_of(head)
        compared = f" ({view.position[layer, number, query, key]:.0%} in other texts)"
    return f"In the text {looks(view, head, query, key)}{compared}."


def looks(view: TextView, head: str, query: int, key: int) -> str:
    """Return a sentence on how much weight a head gives a key of a text."""
    layer, number = view.place_of(head)
    weight = view.weights[layer, number, query, key]
    return f"{head} gives {weight:.0%} of token {query}, {view.named(query)}, to {view.named(key)}"


def text_sections(run: Run) -> Iterator[Section]:
    """Yield the section with the run's text, if it has one."""
    view = text_view(run)
    if view is not None:
        compared = view.position is not None
        bar = "from other texts' mean" if compared else "above uniform weights"
        yield Section(
            title="Attention on your text",
            html=view.html(),
            caption="Click a token to shade the keys it attends to. The bar under it: how far "
            f"these weights are {bar}, in nats.",
        )


def why_sections(run: Run) -> Iterator[Section]:
    """Yield the section with the terms of the scores that the run asks about, if it asks."""
    why = stored_why(run)
    if why is not None:
        terms = (
            "They are position, and what earlier components wrote into this text's key or query."
            if has_other_texts(run)
            else "They are what earlier components wrote into the key, in this text alone."
        )
        yield Section(
            title="Why the head looks there",
            figure=lambda: why.figure,
            caption="Terms of the scores of the most attended keys, less their mean. "
            f"{terms} The dot is their sum.",
            table=why.table,
        )
        if why.steps is not None:
            yield Section(
                title="Why, steps back",
                figure=lambda: why.graph,
                caption="Nats of the score of the most attended key, and of the looks by which "
                f"heads moved what they wrote (squares). Dashed: what a head moved. {why.moved} "
                "The term is direct; with its effect, all later blocks respond.",
                table=why.steps,
            )


def _maps(run: Run) -> Iterator[Section]:
    if has_other_texts(run):
        yield Section(
            title="Each head's mean weights",
            html=weight_maps(run),
            caption="Means over texts, as the logarithm of their ratio to uniform weights: red "
            "keys get more attention than uniform, blue keys less. A click or Enter enlarges a "
            "map, arrow keys go on.",
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
        HEADS_BYTES if run.manifest.text is None else MAPS_BYTES,
        what="attention",
        measure="above uniform",
    )
