"""The behaviour command's report, drawn from a run folder: it needs no model and no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from nope_probe.experiments.behaviour import findings
from nope_probe.experiments.behaviour.measures import QUANTITIES
from nope_probe.figures import behaviour as figures
from nope_probe.figures.behaviour import heads_and_behaviour, pattern_and_behaviour
from nope_probe.reports import notes
from nope_probe.reports.page import Section, page

Tables = Mapping[str, pd.DataFrame]
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


def behaviour_page(tables: Tables, manifest: Mapping[str, Any], headline: Sequence[str]) -> str:
    """Return the report of a behaviour run.

    Args:
        tables: `behaviour`, `loss_by_position`, `extrapolation`, `decodability`, `bridge` and
            `correlations`; those of measures that were not taken may be empty.
        manifest: what was run.
        headline: the result, a sentence each.
    """
    title = f"What {manifest['model']['name']} can do without its mask, RoPE or weights"
    taken = set(tables["behaviour"]["measure"])
    measures = [_sentence(name) for name in QUANTITIES if name in taken]
    how_to_read = (*HOW_TO_READ, WITHOUT_MASK.format(prefix=manifest["prefix"]), *measures)
    # The differences and the losses answer the question; all else is folded.
    answer = [*_difference_sections(tables["behaviour"]), *_loss_sections(tables, manifest)]
    details = [replace(each, folded=bool(answer)) for each in _details(tables, manifest)]
    return page(title, headline, [*answer, *details], manifest, how_to_read)


def _details(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    yield from _extrapolation_sections(tables, manifest)
    if len(tables["decodability"]):
        chance = tables["decodability"]["chance"].iloc[0]
        yield Section(
            title=findings.decodability_finding(tables["decodability"]),
            figure=figures.decodability(tables["decodability"]),
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
        title=findings.difference_finding(behaviour),
        figure=figures.differences(known, titles),
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
    return behaviour.assign(measure=labels, note=behaviour["note"].fillna(""))


def _loss_sections(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    if "loss" in manifest["measures"] or "in-context" in manifest["measures"]:
        title = "Loss by position"
        yield Section(
            title=findings.window_finding(
                tables["behaviour"], "in_context", title, "along the window"
            ),
            figure=figures.loss_by_position(tables["loss_by_position"], title=title),
            caption="The mean loss of the token at each position, with 95% bands over documents. "
            + WITHOUT_MASK.format(prefix=manifest["prefix"]),
        )


def _extrapolation_sections(tables: Tables, manifest: Mapping[str, Any]) -> Iterator[Section]:
    if len(tables["extrapolation"]):
        title = "Loss by position, beyond the trained context"
        trained = manifest["trained_len"]
        yield Section(
            title=findings.window_finding(
                tables["behaviour"], "extrapolation", title, "from its end on"
            ),
            figure=figures.loss_by_position(tables["extrapolation"], title=title, trained=trained),
            caption=f"The same in longer windows, as means over {manifest['bin_width']} positions. "
            f"Dotted: the trained context, {trained} tokens.",
        )


def _head_sections(tables: Tables) -> Iterator[Section]:
    if "heads" in tables:
        yield Section(
            title=findings.head_finding(tables["heads"]),
            figure=heads_and_behaviour(tables["heads"]),
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
            title=findings.bridge_finding(tables["correlations"]),
            figure=pattern_and_behaviour(bridge, effects),
            caption="To the right: what the removal takes from the positional part of the scores. "
            "Up: what behaviour loses. A removal may do one without the other.",
            table=bridge,
        )
        yield Section(
            title=findings.correlation_finding(tables["correlations"]),
            caption="Spearman's rho, over conditions, of the pattern lost in each layer (and in "
            "all, summed) with the rise of each loss. Few conditions, which overlap: a description "
            "of these removals, not a test.",
            table=tables["correlations"],
        )
