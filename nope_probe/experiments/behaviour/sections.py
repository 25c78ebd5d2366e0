"""The report of `behaviour`: its figures, tables and sentences; no model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.conditions import INTACT
from nope_probe.experiments.behaviour.settings import QUANTITIES
from nope_probe.experiments.sections import NOISE, Report, capitalised, largest, listed
from nope_probe.figures import behaviour as figures
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.figures.names import phrase
from nope_probe.figures.words import reader_of
from nope_probe.reports import notes
from nope_probe.reports.page import Section
from nope_probe.runtime.folder import Run

Tables = Mapping[str, pd.DataFrame]
HEADING = 13  # characters in a line of a column's heading on the terminal
LEADING = {"loss_suffix": "suffix's loss", "loss": "loss"}  # what the heading is about, if measured
RISES = {
    "loss": "rise of the suffix's loss, nats",
    "copy": "rise of the second copy's loss, nats",
    "position": "rise of the position error, positions",
}
WITHOUT_MASK = (
    "Without the mask the next token is in sight, and a loss on plain text would mean nothing. "
    "There the first {prefix} tokens of a window see each other (a bidirectional prefix), the rest "
    "is causal, and only that suffix is scored; the intact model is compared on the same suffix."
)
HOW_TO_READ = (
    "A loss is -log p(next token), in nats: 0.69 nats more is half the probability.",
    "Brackets and bars are 95% jackknife intervals over documents; differences to the intact model "
    "are paired, document by document.",
    "A condition is named by what is removed from all layers at once.",
    notes.PATTERN,
    notes.LAYERS_AND_HEADS,
)


def report(run: Run, waiting: str = "") -> Report:
    """Return a run's report.

    Args:
        run: tables `behaviour`, `loss_by_position`, `extrapolation`, `decodability`, `bridge` and
            `correlations`, where those of measures that were not taken are empty, and `heads` where
            single heads were removed.
        waiting: the headline's first words, while other measurements are still made.
    """
    manifest, tables = run.manifest, run.tables
    name, behaviour = manifest["model"]["name"], tables["behaviour"]
    taken = [about for key, about in QUANTITIES.items() if key in set(behaviour["measure"])]
    # The differences and the losses answer the question; all else is folded.
    answer, details = list(_answer(tables, manifest)), _details(tables, manifest)
    intervals = (
        f"Brackets, ± : 95% intervals over {manifest['documents']} documents. Without the mask the "
        f"first {manifest['prefix']} tokens see each other, and those after them are scored."
    )
    return Report(
        title=f"What {name} can do without its mask, RoPE or weights",
        headline=[*filter(None, [waiting]), *headline(name, tables)],
        sections=[*answer, *(replace(section, folded=bool(answer)) for section in details)],
        how_to_read=(
            *HOW_TO_READ,
            WITHOUT_MASK.format(prefix=manifest["prefix"]),
            *(f"{capitalised(about.label)}: {about.caption}" for about in taken),
        ),
        terminal={f"{name}: behaviour, less the intact model's": behaviour_as_text(behaviour)},
        closing="\n".join([*_not_shown(behaviour), intervals]),
    )


def headline(name: str, tables: Tables) -> list[str]:
    """Return which removal costs most, whether text is copied, and if position is decodable."""
    findings = [
        difference_finding(tables["behaviour"]),
        copy_finding(tables["behaviour"]),
        decodability_finding(tables["decodability"]),
    ]
    sentences = [f"{finding}." for finding in findings if finding]
    return sentences or [f"The behaviour of {name}, condition by condition."]


def _answer(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections that the page shows open: differences of conditions, and losses."""
    behaviour = tables["behaviour"]
    known = behaviour.dropna(subset=["difference"])
    titles = {name: about.label for name, about in QUANTITIES.items()}
    units = {name: about.unit for name, about in QUANTITIES.items()}
    meaning = (
        "A dot is the model without a component less the intact model, on the same tokens; losses "
        "are in nats per token. “How to read the figures” says what the measures are."
    )
    if len(behaviour):
        yield Section(
            title=difference_finding(behaviour) or "Behaviour",
            figure=partial(figures.differences, known, titles, units) if len(known) else None,
            caption=" ".join([meaning, *_empty_rows(behaviour)]),
            table=behaviour.assign(
                measure=behaviour["measure"].map(titles),
                note=behaviour["note"].astype(object).fillna(""),
            ),
        )
    if {"loss", "in-context"} & {*manifest["measures"]}:
        title = "Loss by position"
        yield Section(
            title=window_finding(behaviour, "in_context", title, "along the window"),
            figure=partial(figures.loss_by_position, tables["loss_by_position"], title=title),
            caption="The mean loss of the token at each position, with 95% bands over documents; "
            "without the mask, of the suffix alone.",
        )


def _empty_rows(behaviour: pd.DataFrame) -> Iterator[str]:
    """Yield why conditions have no number, a sentence for each reason."""
    empty = behaviour[behaviour["difference"].isna() & (behaviour["condition"] != INTACT.name)]
    for note, rows in empty.dropna(subset=["note"]).groupby("note", sort=False):
        measures = listed([f"“{QUANTITIES[name].label}”" for name in rows["measure"].unique()])
        removals = listed([figures.label(name) for name in rows["condition"].unique()])
        yield f"The rows {removals} are empty at {measures}: {note}."


def _details(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections that the page folds, beside an answer."""
    losses, decoded, trained = (
        tables["extrapolation"],
        tables["decodability"],
        manifest["trained_len"],
    )
    if len(losses):
        title = "Loss by position, beyond the trained context"
        yield Section(
            title=window_finding(tables["behaviour"], "extrapolation", title, "from its end on"),
            figure=partial(figures.loss_by_position, losses, title=title, trained=trained),
            caption=f"The same in longer windows, as means over {manifest['bin_width']} positions. "
            f"Dotted: the trained context, {trained} tokens.",
        )
    if len(decoded):
        yield Section(
            title=decodability_finding(decoded),
            figure=partial(figures.decodability, decoded),
            caption="A ridge regression of the index on the residual stream after each layer, on "
            "held-out documents: the mean distance from the true index, in positions. Open markers "
            "are the model with random weights. A removed mask is gone at all positions here: no "
            "token is predicted, so none has to be hidden.",
            table=decoded.drop(columns="chance"),
        )
    if len(tables["bridge"]):
        yield from _bridge(tables["bridge"], tables["correlations"])
    if "heads" in tables:
        yield Section(
            title=head_finding(tables["heads"]),
            figure=partial(figures.heads_and_behaviour, tables["heads"]),
            caption="To the right: the RMS of the head's own positional part. Up: the rise of the "
            "loss when this head's W_Q alone is removed.",
            table=tables["heads"],
        )
    if manifest["skipped"]:
        words = [f"{measure}: {reason}." for measure, reason in manifest["skipped"].items()]
        yield Section(title="What was not measured", caption=" ".join(words))


def _bridge(bridge: pd.DataFrame, correlations: pd.DataFrame) -> Iterator[Section]:
    """Yield the sections that compare what removals take from the pattern and from behaviour."""
    effects = {name: title for name, title in RISES.items() if bridge[name].notna().any()}
    if not effects:
        yield Section(
            title="What each removal takes from the positional pattern",
            caption="In nats, per layer. No effect on behaviour stands beside it: run with "
            "--measures pattern loss, copy or position too.",
            table=bridge.dropna(axis="columns", how="all"),
        )
        return
    yield Section(
        title=bridge_finding(correlations),
        figure=partial(figures.pattern_and_behaviour, bridge, effects),
        caption="To the right: what the removal takes from the positional part of the scores. "
        "Up: what behaviour loses. A removal may do one without the other.",
        table=bridge,
    )
    yield Section(
        title=correlation_finding(correlations),
        caption="Spearman's rho, over conditions, of the pattern lost in each layer (and in all, "
        "summed) with the rise of each loss. Few conditions, which overlap: a description of these "
        "removals, not a test.",
        table=correlations,
    )


def behaviour_as_text(behaviour: pd.DataFrame) -> pd.DataFrame:
    """Return a row per condition: the intact model's values, the others' differences to them."""
    rows = {(row["measure"], row["condition"]): row for row in behaviour.to_dict("records")}
    conditions = list(dict.fromkeys(behaviour["condition"]))
    names = ["(intact)" if condition == INTACT.name else condition for condition in conditions]
    table = pd.DataFrame({"without": names})
    for measure, about in QUANTITIES.items():
        if measure in set(behaviour["measure"]):
            heading = wrap(about.label, HEADING, break_long_words=False, break_on_hyphens=False)
            cells = [_cell(rows[measure, condition]) for condition in conditions]
            table["\n".join(heading)] = cells
    return table


def _cell(row: Mapping[Any, Any]) -> str:
    is_intact = row["condition"] == INTACT.name
    value, _, high = interval_of(row, "value" if is_intact else "difference")
    if np.isnan(value):
        return "-"
    return f"{value:{'' if is_intact else '+'}z.2f} ±{high - value:.2f}"


def _not_shown(behaviour: pd.DataFrame) -> Iterator[str]:
    """Yield which numbers are not shown and why, once per measure and reason."""
    rows = behaviour.dropna(subset=["note"])
    groups = rows[rows["note"] != ""].groupby(["note", "measure"], sort=False)
    for (note, measure), group in groups:
        yield f"{QUANTITIES[str(measure)].label} ({', '.join(group['condition'])}): {note}"


def difference_finding(behaviour: pd.DataFrame) -> str:
    """Return which removal raises the loss most, or the first other measure, if any."""
    known = behaviour.dropna(subset=["difference"])
    measured = [name for name in (*LEADING, *QUANTITIES) if name in set(known["measure"])]
    if not measured:
        return ""
    about, rows = QUANTITIES[measured[0]], known[known["measure"] == measured[0]]
    label = LEADING.get(measured[0], f"measure “{about.label}”")
    clear = rows[rows["difference_low"] > 0]
    if clear.empty:
        return f"No removal raises the {label} beyond the noise"
    top = clear.sort_values("difference").iloc[-1]
    rise = interval_text(interval_of(top, "difference"), "+.2g", f" {about.unit}")
    components, _, replacement = str(top["condition"]).partition(":")
    removed = f"{phrase(components)} ({replacement})" if replacement else phrase(components)
    return f"Without {removed} the {label} rises most: {rise}"


def _intact_row(behaviour: pd.DataFrame, measure: str) -> pd.Series | None:
    rows = behaviour[(behaviour["measure"] == measure) & (behaviour["condition"] == INTACT.name)]
    return None if rows.empty else rows.iloc[0]


def copy_finding(behaviour: pd.DataFrame) -> str:
    """Return the loss that a text segment's second copy saves; empty if not measured."""
    row = _intact_row(behaviour, "copy_text")
    if row is None:
        return ""
    value, low, high = interval_of(row, "value")
    if np.isnan(value):
        return "Text is not copied: the second copy of a segment costs no less than the first"
    less = interval_text((-value, -high, -low), "z.2f", " nats")
    return f"A segment of text costs {less} less per token when it comes a second time"


def window_finding(behaviour: pd.DataFrame, measure: str, title: str, along: str) -> str:
    """Return how much the intact model's loss rises or falls.

    Args:
        behaviour: `behaviour.csv`.
        measure: `in_context`, a loss early in the window less the loss late, or `extrapolation`,
            the loss beyond the trained context less that at its end.
        title: the section's subject, which is returned alone if the measure was not taken.
        along: from where to where.
    """
    row = _intact_row(behaviour, measure)
    if row is None or np.isnan(row["value"]):
        return title
    value, low, high = interval_of(row, "value")
    if low <= 0 <= high:
        return f"{title}: the intact model's change {along} is {NOISE}"
    verb = "falls" if (value > 0) == (measure == "in_context") else "rises"
    return f"{title}: the intact model's {verb} by {abs(value):.2g} nats {along}"


def decodability_finding(table: pd.DataFrame) -> str:
    """Return how well the index can be read from the residual stream, with and without the mask."""
    rows = table[table["condition"] == INTACT.name].sort_values("distance")
    if rows.empty:
        return ""
    best = rows.iloc[0]
    if not best["distance_high"] < best["chance"]:
        return (
            "Position cannot be read from the residual stream beyond chance "
            f"({best['chance']:.1f} positions)"
        )
    text = (
        "Position can be read from the residual stream to within "
        f"{interval_text(interval_of(best, 'distance'), '.1f')} positions (L{best['layer']:.0f}; "
        f"chance is {best['chance']:.1f})"
    )
    without = table[(table["condition"] == "mask") & (table["layer"] == best["layer"])]
    if without.empty:
        return text
    gone = interval_text(interval_of(without.iloc[0], "distance"), ".1f")
    return f"{text}, without the causal mask to within {gone}"


def bridge_finding(correlations: pd.DataFrame) -> str:
    """Return how the losses of pattern and behaviour correlate, over all layers."""
    removals = correlations[correlations["over"] == "conditions"]
    rows = removals[removals["layer"].astype(str) == "all"].dropna(subset=["rho"])
    title = "Pattern and behaviour"
    if rows.empty:
        return f"{title}: too few conditions for a rank correlation"
    parts = [f"{row['effect']} {row['rho']:+.2f}" for _, row in rows.iterrows()]
    n = int(rows["n"].max())
    return f"{title}: rank correlation over {n} removals, {', '.join(parts)}"


def correlation_finding(correlations: pd.DataFrame) -> str:
    """Return the layer and effect with the largest rank correlation."""
    title = "Rank correlations by layer"
    rows = correlations[correlations["layer"].astype(str) != "all"].dropna(subset=["rho"])
    if rows.empty:
        return f"{title}: too few conditions"
    top = largest(rows, "rho")
    return f"{title}: largest between L{top['layer']} and {top['effect']}, {top['rho']:+.2f}"


def head_finding(heads: pd.DataFrame) -> str:
    """Return which head's W_Q the loss needs most."""
    clear = heads[heads["loss_low"] > 0]
    if clear.empty:
        return f"Heads: what the loss rises by without one head's W_Q is {NOISE}"
    top = clear.sort_values("loss").iloc[-1]
    name = reader_of(top)
    return f"Heads: without the W_Q of {name} the loss rises most, {top['loss']:+.2g} nats"
