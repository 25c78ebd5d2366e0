"""The report of `behaviour`: its figures, tables and captions; no model is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.figures import behaviour as figures
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.figures.names import phrase, words
from nope_probe.figures.words import capitalised
from nope_probe.removal import INTACT, POSITION_ENCODINGS, Condition, replaced_by
from nope_probe.reports import notes
from nope_probe.reports.page import Headline, Section
from nope_probe.run.folder import Run
from nope_probe.studies.behaviour.settings import QUANTITIES
from nope_probe.studies.page import MOST_ROWS, Report

Tables = Mapping[str, pd.DataFrame]
HEADING = 13  # characters in a line of a column's heading on the terminal
LEADING = {  # measures of the first table, the most telling first, and their names in a sentence
    "loss_suffix": "suffix loss",
    "copy_text_second": "loss of a text's second copy",
    "position": "error of a decoded position",
    "order": "sensitivity to the prefix's order",
    "without_bos": "loss without BOS",
    "loss": "loss",
}
SOURCES: tuple[str, ...] = ("mask", *POSITION_ENCODINGS)
COLUMNS = 4  # of the first table, next to the conditions


@dataclass(frozen=True, kw_only=True)
class MeasuresTaken:
    """What a run measured.

    Attributes:
        measures: the names of the measures.
        skipped: why others were not taken, by name.
        prefix: how many first tokens see each other without the mask.
        trained_len: the length from which on windows are longer than in training.
        bin_width: how many positions share a mean of the losses in longer windows.
    """

    measures: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    prefix: int = 0
    trained_len: int | None = None
    bin_width: int = 1


def report(run: Run) -> Report:
    """Return a run's report.

    Args:
        run: tables `behaviour`, `loss_by_position`, `extrapolation`, `decodability`,
            where those of measures that were not taken are empty.
    """
    taken, tables = run.manifest.results_as(MeasuresTaken), run.tables
    name, behaviour = run.manifest.model_name, tables["behaviour"]
    known = [about for key, about in QUANTITIES.items() if key in set(behaviour["measure"])]
    # The differences and the losses answer the question; all else is folded.
    answer, details = list(_answer(tables, taken)), _details(tables, taken)
    return Report(
        title=f"What {name} can do without its mask, RoPE or weights",
        headline=headline(name, behaviour),
        sections=[*answer, *(replace(section, folded=bool(answer)) for section in details)],
        how_to_read=(
            *notes.how_to_read("behaviour", prefix=taken.prefix),
            *(f"{capitalised(about.label)}: {about.caption}" for about in known),
            *_not_shown(behaviour),
        ),
    )


def headline(name: str, behaviour: pd.DataFrame) -> Headline:
    """Return what position costs: the first measure without each source, and a table of more."""
    known = behaviour.dropna(subset=["difference"])
    order = dict.fromkeys((*LEADING, *QUANTITIES))
    measures = [measure for measure in order if measure in set(known["measure"])]
    if not measures:
        return Headline(sentence=f"No removal from {name} was measured: see its losses below.")
    first = known[known["measure"] == measures[0]]
    by_condition = {str(row["condition"]): row for row in first.to_dict("records")}
    sources = [source for source in SOURCES if source in by_condition]
    shown = sources or [max(by_condition, key=lambda name: by_condition[name]["difference"])]
    label = LEADING.get(measures[0], QUANTITIES[measures[0]].label)
    unit, changes = QUANTITIES[measures[0]].unit, list[str]()
    for removed in sorted(shown[:2], key=lambda name: -abs(by_condition[name]["difference"])):
        change = interval_of(by_condition[removed], "difference")
        whose = "" if changes else f" the {label} of {name} changes"
        without = f"without {phrase(replaced_by(removed)[0])},{whose}"
        changes.append(f"{without} by {interval_text(change, '+z.2f', f' {unit}')}")
    rows = behaviour[behaviour["measure"].isin(measures[:COLUMNS])]
    if sources:  # what position costs; the figure has the weights
        of_position = rows["condition"].map(
            lambda name: Condition.parse(replaced_by(name)[0]) <= {*SOURCES}
        )
        rows = rows[of_position]
    table = behaviour_as_text(rows, measures[:COLUMNS])
    table["without"] = [
        words(name) + (f", {replacement}" if replacement else "")
        for name, replacement in map(replaced_by, table["without"])
    ]
    return Headline(
        sentence=f"{capitalised('; '.join(changes))}.",
        table=table[:MOST_ROWS],
        caption="The first row is the intact model, the others are differences to it: nats per "
        "token, or positions. A rise of a loss is worse.",
    )


def _answer(tables: Tables, taken: MeasuresTaken) -> Iterator[Section]:
    """Yield the sections that the page shows open: differences of conditions, and losses."""
    behaviour = tables["behaviour"]
    known = behaviour.dropna(subset=["difference"])
    shown = {name: QUANTITIES[name] for name in LEADING}
    titles = {name: about.label for name, about in shown.items()}
    units = {name: f"{about.unit}; {about.direction}" for name, about in shown.items()}
    if len(behaviour):
        yield Section(
            title="What each removal changes",
            figure=partial(figures.differences, known, titles, units)
            if known["measure"].isin(shown).any()
            else None,
            caption="A dot is the model without a component less the intact model, on the same "
            "tokens; all panels in nats have one scale. An empty row means nothing without the "
            "mask. The table has further measures.",
            table=behaviour.assign(
                measure=behaviour["measure"].map(lambda name: QUANTITIES[name].label),
                note=behaviour["note"].astype(object).fillna(""),
            ),
        )
    if {"loss", "in-context"} & {*taken.measures}:
        yield Section(
            title="Loss by position",
            figure=partial(
                figures.loss_by_position, tables["loss_by_position"], title="Loss by position"
            ),
            caption="The mean loss of the token at each position, with 95% bands over documents; "
            "without the mask, of the suffix alone.",
        )


def _details(tables: Tables, taken: MeasuresTaken) -> Iterator[Section]:
    """Yield the sections that the page folds, next to an answer."""
    losses, decoded, trained = (tables["extrapolation"], tables["decodability"], taken.trained_len)
    if len(losses):
        title = "Loss by position, beyond the trained context"
        yield Section(
            title=title,
            figure=partial(figures.loss_by_position, losses, title=title, trained=trained),
            caption=f"The same in longer windows, as means over {taken.bin_width} positions. "
            f"Dotted: the trained context, {trained} tokens.",
        )
    if len(decoded):
        yield Section(
            title="How well position can be read",
            figure=partial(figures.decodability, decoded),
            caption="A ridge regression of the index on the residual stream, on held-out "
            "documents: the mean distance from the true index. Open markers: random weights. A "
            "removed mask is gone at all positions here.",
            table=decoded.drop(columns="chance"),
        )
    if taken.skipped:
        skipped = pd.DataFrame(taken.skipped.items(), columns=["measure", "why"])
        yield Section(
            title="What was not measured",
            caption="Measures that these sequences or this model do not allow.",
            table=skipped,
        )


def behaviour_as_text(
    behaviour: pd.DataFrame, measures: Collection[str] = tuple(QUANTITIES)
) -> pd.DataFrame:
    """Return a row per condition: the intact model's values, the others' differences to them."""
    rows = {(row["measure"], row["condition"]): row for row in behaviour.to_dict("records")}
    conditions = list(dict.fromkeys(behaviour["condition"]))
    names = ["(intact)" if condition == INTACT.name else condition for condition in conditions]
    table = pd.DataFrame({"without": names})
    for measure in measures:
        about = QUANTITIES[measure]
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
