"""What a run of `behaviour` shows: its figures, tables and sentences; no model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd

from nope_probe.components import phrase
from nope_probe.experiments.sections import Report
from nope_probe.experiments.wording import NOISE
from nope_probe.figures import behaviour as figures
from nope_probe.figures.behaviour import heads_and_behaviour, pattern_and_behaviour, removed
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.reports import notes
from nope_probe.reports.page import Section
from nope_probe.runtime.folder import Run

Tables = Mapping[str, pd.DataFrame]
INTACT = "intact"
HEADING = 13  # characters in a line of a column's heading on the terminal
LEADING = {"loss_suffix": "suffix's loss", "loss": "loss"}  # what the heading is about, if measured
EFFECTS = {
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


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number of `behaviour.csv`.

    Attributes:
        label: in tables and figures.
        unit: nats or positions.
        caption: what it is, in one sentence.
    """

    label: str
    unit: str = "nats"
    caption: str


QUANTITIES: dict[str, Quantity] = {
    "loss": Quantity(label="loss", caption="mean loss per token of the text."),
    "loss_suffix": Quantity(
        label="loss, suffix",
        caption="mean loss of the tokens after the prefix (bidirectional without the mask).",
    ),
    "in_context": Quantity(
        label="in-context gain",
        caption="loss early in the window (its second tenth) less loss late (its last tenth).",
    ),
    "copy_text": Quantity(
        label="copy, text",
        caption="a text segment twice: loss of the second copy less the first; below 0, it copies.",
    ),
    "copy_text_second": Quantity(
        label="second copy, text", caption="loss of the second copy of a text segment."
    ),
    "copy_random": Quantity(
        label="copy, random",
        caption="random tokens twice: loss of the second copy less the first; below 0, it copies.",
    ),
    "copy_random_second": Quantity(
        label="second copy, random", caption="loss of the second copy of random tokens."
    ),
    "order": Quantity(
        label="order",
        caption="rise of the suffix's loss when the tokens of the prefix are shuffled.",
    ),
    "without_bos": Quantity(
        label="without BOS", caption="rise of the loss when the BOS token is left out."
    ),
    "other_first": Quantity(
        label="another first token",
        caption="rise of the loss when a random token takes the place of BOS.",
    ),
    "extrapolation": Quantity(
        label="extrapolation",
        caption="loss beyond the trained context less loss in its last quarter.",
    ),
    "position": Quantity(
        label="position error",
        unit="positions",
        caption="how far the index that a ridge regression reads from the residual stream is from "
        "the true one, mean over layers and held-out documents.",
    ),
}


def report(run: Run) -> Report:
    """Return what a run shows.

    Args:
        run: tables `behaviour`, `loss_by_position`, `extrapolation`, `decodability`, `bridge` and
            `correlations`, where those of measures that were not taken are empty, and `heads` where
            single heads were removed.
    """
    manifest, tables = run.manifest, run.tables
    name, behaviour = manifest["model"]["name"], tables["behaviour"]
    taken = set(behaviour["measure"])
    measures = [_sentence(each) for each in QUANTITIES if each in taken]
    # The differences and the losses answer the question; all else is folded.
    answer = [*_difference_sections(behaviour), *_loss_sections(tables, manifest)]
    details = [replace(each, folded=bool(answer)) for each in _details(tables, manifest)]
    return Report(
        title=f"What {name} can do without its mask, RoPE or weights",
        headline=headline(manifest, tables),
        sections=[*answer, *details],
        how_to_read=(*HOW_TO_READ, WITHOUT_MASK.format(prefix=manifest["prefix"]), *measures),
        terminal={f"{name}: behaviour, less the intact model's": behaviour_as_text(behaviour)},
        closing="\n".join(
            [
                *_not_shown(behaviour),
                f"Brackets, ± : 95% intervals over {manifest['documents']} documents. Without the "
                f"mask the first {manifest['prefix']} tokens see each other, and those after them "
                "are scored.",
            ]
        ),
    )


def _details(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    yield from _extrapolation_sections(tables, manifest)
    if len(tables["decodability"]):
        chance = tables["decodability"]["chance"].iloc[0]
        yield Section(
            title=decodability_finding(tables["decodability"]),
            figure=partial(figures.decodability, tables["decodability"]),
            caption="A ridge regression of the index on the residual stream after each layer, on "
            f"held-out documents: the mean distance from the true index. Chance is {chance:.1f} "
            "positions; open markers are the model with random weights. A removed mask is gone at "
            "all positions here: no token is predicted, so none has to be hidden.",
            table=tables["decodability"].drop(columns="chance"),
        )
    yield from _bridge_sections(tables)
    yield from _head_sections(tables)
    if manifest["skipped"]:
        words = [f"{measure}: {reason}." for measure, reason in manifest["skipped"].items()]
        yield Section(title="What was not measured", caption=" ".join(words))


def _difference_sections(behaviour: pd.DataFrame) -> Iterator[Section]:
    known = behaviour.dropna(subset=["difference"])
    if behaviour.empty:
        return
    titles = {name: each.label for name, each in QUANTITIES.items()}
    shown = [name for name in QUANTITIES if name in set(behaviour["measure"])]
    if known.empty:
        words = " ".join(_sentence(name) for name in shown)
        yield Section(title="Behaviour", caption=words, table=_readable(behaviour))
        return
    yield Section(
        title=difference_finding(behaviour),
        figure=partial(figures.differences, known, titles),
        caption="Each dot is a condition less the intact model on the same tokens, in nats per "
        "token (the position error in positions). What each measure is stands under “How to read "
        "the figures”.",
        table=_readable(behaviour),
    )


def _sentence(name: str) -> str:
    about = QUANTITIES[name]
    return f"{about.label[0].upper()}{about.label[1:]}: {about.caption}"


def _readable(behaviour: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the reason in the place of a value that is not shown."""
    labels = behaviour["measure"].map(lambda name: QUANTITIES[name].label)
    return behaviour.assign(measure=labels, note=behaviour["note"].astype(object).fillna(""))


def _loss_sections(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    if "loss" in manifest["measures"] or "in-context" in manifest["measures"]:
        title = "Loss by position"
        yield Section(
            title=window_finding(tables["behaviour"], "in_context", title, "along the window"),
            figure=partial(figures.loss_by_position, tables["loss_by_position"], title=title),
            caption="The mean loss of the token at each position, with 95% bands over documents. "
            + WITHOUT_MASK.format(prefix=manifest["prefix"]),
        )


def _extrapolation_sections(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    if len(tables["extrapolation"]):
        title = "Loss by position, beyond the trained context"
        trained = manifest["trained_len"]
        yield Section(
            title=window_finding(tables["behaviour"], "extrapolation", title, "from its end on"),
            figure=partial(
                figures.loss_by_position, tables["extrapolation"], title=title, trained=trained
            ),
            caption=f"The same in longer windows, as means over {manifest['bin_width']} positions. "
            f"Dotted: the trained context, {trained} tokens.",
        )


def _head_sections(tables: Tables) -> Iterator[Section]:
    if "heads" in tables:
        yield Section(
            title=head_finding(tables["heads"]),
            figure=partial(heads_and_behaviour, tables["heads"]),
            caption="To the right: the RMS of the head's own positional part. Up: the rise of the "
            "loss when this head's W_Q alone is removed.",
            table=tables["heads"],
        )


def _bridge_sections(tables: Tables) -> Iterator[Section]:
    bridge = tables["bridge"]
    effects = {name: title for name, title in EFFECTS.items() if bridge[name].notna().any()}
    if len(bridge) and not effects:
        yield Section(
            title="What each removal takes from the positional pattern",
            caption="In nats, per layer. No effect on behaviour stands beside it: run with "
            "--measures pattern loss, copy or position too.",
            table=bridge.dropna(axis="columns", how="all"),
        )
    elif effects:
        yield Section(
            title=bridge_finding(tables["correlations"]),
            figure=partial(pattern_and_behaviour, bridge, effects),
            caption="To the right: what the removal takes from the positional part of the scores. "
            "Up: what behaviour loses. A removal may do one without the other.",
            table=bridge,
        )
        yield Section(
            title=correlation_finding(tables["correlations"]),
            caption="Spearman's rho, over conditions, of the pattern lost in each layer (and in "
            "all, summed) with the rise of each loss. Few conditions, which overlap: a description "
            "of these removals, not a test.",
            table=tables["correlations"],
        )


def behaviour_as_text(behaviour: pd.DataFrame) -> pd.DataFrame:
    """Return a row per condition: the intact model's values, the others' differences to them."""
    conditions = [str(condition) for condition in dict.fromkeys(behaviour["condition"])]
    names = ["(intact)" if name == INTACT else name for name in conditions]
    table = pd.DataFrame({"without": names})
    for measure in (name for name in QUANTITIES if name in set(behaviour["measure"])):
        rows = behaviour[behaviour["measure"] == measure].to_dict("records")
        cells = {str(row["condition"]): _cell(row, row["condition"] == INTACT) for row in rows}
        table[_heading(QUANTITIES[measure].label)] = [cells[name] for name in conditions]
    return table


def _heading(label: str) -> str:
    return "\n".join(wrap(label, HEADING, break_long_words=False, break_on_hyphens=False))


def _cell(row: Mapping[Any, Any] | pd.Series, is_intact: bool) -> str:
    value, _, high = interval_of(row, "value" if is_intact else "difference")
    if np.isnan(value):
        return "-"
    return f"{value:{'' if is_intact else '+'}z.2f} ±{high - value:.2f}"


def _not_shown(behaviour: pd.DataFrame) -> Iterator[str]:
    """Yield which numbers are not shown and why, once per measure and reason."""
    rows = behaviour.dropna(subset=["note"])
    for (note, measure), ours in rows[rows["note"] != ""].groupby(["note", "measure"], sort=False):
        conditions = ", ".join(ours["condition"])
        yield f"{QUANTITIES[str(measure)].label} ({conditions}): {note}"


def headline(manifest: Mapping[str, Any], tables: Tables) -> list[str]:
    """Return what each removal costs, whether text is copied, and if position is decodable."""
    name, behaviour = manifest["model"]["name"], tables["behaviour"]
    sentences = [
        _loss_sentence(name, behaviour),
        _copy_sentence(name, behaviour),
        _position_sentence(name, tables["decodability"]),
    ]
    found = [sentence for sentence in sentences if sentence]
    return found or [f"The behaviour of {name}, condition by condition."]


def _loss_sentence(name: str, behaviour: pd.DataFrame) -> str:
    rows = behaviour[behaviour["measure"] == "loss_suffix"].dropna(subset=["difference"])
    if rows.empty:
        return ""
    rows = rows.sort_values("difference", ascending=False)
    parts = [
        f"{_signed(row, '.2f')} without {_phrase(str(row['condition']))}"
        for _, row in rows.iterrows()
    ]
    changes = "; ".join(parts)
    return f"The loss of {name} on the second part of a window changes by, in nats: {changes}."


def _phrase(condition: str) -> str:
    components, _, replacement = condition.partition(":")
    return f"{phrase(components)} ({replacement})" if replacement else phrase(components)


def _copy_sentence(name: str, behaviour: pd.DataFrame) -> str:
    rows = behaviour[(behaviour["measure"] == "copy_text") & (behaviour["condition"] == INTACT)]
    if rows.empty:
        return ""
    row = rows.iloc[0]
    if np.isnan(row["value"]):
        return f"{name} does not copy text: its second copy costs no less than the first."
    value, low, high = interval_of(row, "value")
    less = interval_text((-value, -high, -low), "z.2f", " nats")
    return f"A segment of text costs {name} {less} less per token when it comes a second time."


def _position_sentence(name: str, table: pd.DataFrame) -> str:
    rows = table[table["condition"] == INTACT]
    if rows.empty:
        return ""
    best = rows.sort_values("distance").iloc[0]
    if not best["distance_high"] < best["chance"]:
        return (
            f"Position cannot be read from the residual stream of {name} beyond chance "
            f"({best['chance']:.1f} positions)."
        )
    text = (
        f"Position can be read from the residual stream of {name} to within "
        f"{interval_text(interval_of(best, 'distance'), '.1f')} positions (L{best['layer']:.0f}; "
        f"chance is {best['chance']:.1f})"
    )
    without = table[(table["condition"] == "mask") & (table["layer"] == best["layer"])]
    if not without.empty:
        gone = interval_text(interval_of(without.iloc[0], "distance"), ".1f")
        text += f", without the mask to within {gone}"
    return f"{text}."


def _signed(row: Mapping[Any, Any] | pd.Series, style: str) -> str:
    value, low, high = interval_of(row, "difference")
    return f"{value:+z{style}} [{low:z{style}}, {high:z{style}}]"


def difference_finding(behaviour: pd.DataFrame) -> str:
    """Return which removal raises the loss most; the first other measure if none was taken."""
    known = behaviour.dropna(subset=["difference"])
    measured = set(known["measure"])
    name = next(each for each in (*LEADING, *QUANTITIES) if each in measured)
    about, rows = QUANTITIES[name], known[known["measure"] == name]
    label = LEADING.get(name, about.label)
    clear = rows[rows["difference_low"] > 0]
    if clear.empty:
        return f"No removal raises the {label} beyond the noise"
    top = clear.sort_values("difference").iloc[-1]
    subject = _removal(str(top["condition"]))
    return f"Without {subject} the {label} rises most: {top['difference']:+.2g} {about.unit}"


def window_finding(behaviour: pd.DataFrame, measure: str, title: str, along: str) -> str:
    """Return how much the intact model's loss rises or falls.

    Args:
        behaviour: `behaviour.csv`.
        measure: `in_context`, a loss early in the window less the loss late, or `extrapolation`,
            the loss beyond the trained context less that at its end.
        title: what the section is about, which is returned alone if the measure was not taken.
        along: from where to where.
    """
    rows = behaviour[(behaviour["measure"] == measure) & (behaviour["condition"] == INTACT)]
    rows = rows.dropna(subset=["value"])
    if rows.empty:
        return title
    row = rows.iloc[0]
    if row["value_low"] <= 0 <= row["value_high"]:
        return f"{title}: the intact model's change {along} is {NOISE}"
    falls = (row["value"] > 0) == (measure == "in_context")
    verb = "falls" if falls else "rises"
    return f"{title}: the intact model's {verb} by {abs(row['value']):.2g} nats {along}"


def decodability_finding(table: pd.DataFrame) -> str:
    """Return how well the index can be read from the residual stream, with and without the mask."""
    rows = table[table["condition"] == INTACT].sort_values("distance")
    best = rows.iloc[0]
    if not best["distance_high"] < best["chance"]:
        return "Position cannot be read from the residual stream beyond chance"
    text = (
        f"Position can be read from the residual stream to {best['distance']:.1f} positions "
        f"(chance {best['chance']:.1f})"
    )
    without = table[(table["condition"] == "mask") & (table["layer"] == best["layer"])]
    if without.empty:
        return text
    return f"{text}, without the causal mask to {without.iloc[0]['distance']:.1f}"


def bridge_finding(correlations: pd.DataFrame) -> str:
    """Return how the pattern and the behaviour that removals take go together, over all layers."""
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
    top = rows.iloc[int(rows["rho"].abs().to_numpy(float).argmax())]
    return f"{title}: largest between L{top['layer']} and {top['effect']}, {top['rho']:+.2f}"


def head_finding(heads: pd.DataFrame) -> str:
    """Return which head's W_Q the loss needs most."""
    clear = heads[heads["loss_low"] > 0]
    if clear.empty:
        return f"Heads: what the loss rises by without one head's W_Q is {NOISE}"
    top = clear.sort_values("loss").iloc[-1]
    name = f"L{top['layer']:.0f}H{top['head']:.0f}"
    return f"Heads: without the W_Q of {name} the loss rises most, {top['loss']:+.2g} nats"


def _removal(condition: str) -> str:
    return removed(condition) if "+" in condition or ":" in condition else phrase(condition)
