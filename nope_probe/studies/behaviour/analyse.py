"""From losses and decodability to a run's tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.behaviour import (
    Losses,
    PerDocument,
    chance_distance,
    copy_cost,
    extrapolation_cost,
    in_context_gain,
    mean_interval,
    position_means,
    second_copy_loss,
    span_loss,
)
from nope_probe.analyses.jackknife import UNDEFINED
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.removal import INTACT
from nope_probe.studies.behaviour.probes import Probe
from nope_probe.studies.behaviour.settings import QUANTITIES
from nope_probe.studies.tables import TableRow, interval_columns, interval_names

BINS = 64
NO_COPY = "the intact model does not copy"
ABOVE_UNIFORM = "above a uniform guess: only the difference says something"
COLUMNS = ["measure", "condition", *interval_names("value", "difference"), "note"]
POSITION_COLUMNS = ["condition", "position", *interval_names("loss")]
DECODED = interval_names("distance", "null", "untrained", "difference")
Distances = Float[Tensor, "held_out layer fit"]


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """The measurements of every condition.

    Attributes:
        conditions: the removals by name; the intact model first.
        measures: the names of the measures.
        skipped: per measure that the model or the data cannot show, the reason.
        probes: the sequences by name.
        segment: the length of a segment that fits into a window twice, after BOS.
        trained: the length that the model was trained at, in tokens.
        uniform: the loss of a uniform guess among the tokens that are not special, in nats;
            NaN without a tokenizer.
        layers: the numbers of the layers in which position is read.
        skip_keys: how many first positions are not decoded.
        losses: per condition and probe, nats.
        distances: per condition, of predicted and true index on held-out documents, in positions;
            the last axis is the fit on true and on shuffled targets.
        untrained: distances of the model with random weights, where only sources are removed.
    """

    conditions: Mapping[str, Ablation]
    measures: tuple[str, ...]
    skipped: Mapping[str, str]
    probes: Mapping[str, Probe]
    segment: int
    trained: int
    uniform: float
    layers: tuple[int, ...]
    skip_keys: int
    losses: Mapping[tuple[str, str], Losses]
    distances: Mapping[str, Distances] = field(default_factory=dict)
    untrained: Mapping[str, Distances] = field(default_factory=dict)

    @property
    def bin_width(self) -> int:
        """How many positions share a mean of the losses in long windows: a few dozen bins."""
        return max(1, self.probes["long"].tokens.shape[1] // BINS) if "long" in self.probes else 1

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the run's tables by name; those of measures that were not taken have no rows."""
        rows = [row for name in QUANTITIES for row in self._rows(name)]
        return {
            "loss_by_position": self._position_table("text"),
            "extrapolation": self._position_table("long", self.bin_width),
            "behaviour": pd.DataFrame(rows, columns=COLUMNS),
            "decodability": self._decodability_table(),
        }

    def _rows(self, name: str) -> Iterator[TableRow]:
        """Yield the rows of one of `QUANTITIES`, a row per condition, in nats or positions.

        `difference` is to the intact model on the same documents and targets. An empty value has a
        note that says why.
        """
        about = QUANTITIES[name]
        reason = self.skipped.get(about.measure, "")
        if about.measure not in self.measures or not (reason or about.probe in self.probes):
            return
        if not reason and name in ("copy_text", "copy_random"):
            intact = mean_interval(self._per_document(name, INTACT.name))
            reason = "" if intact.high < 0 else NO_COPY
        for condition, ablation in self.conditions.items():
            value = difference = UNDEFINED
            is_unmasked = "mask" in ablation.condition
            note = reason or (about.unmasked if is_unmasked else "")
            if not note:
                values = self._per_document(name, condition, is_unmasked)
                value = mean_interval(values)
                if condition != INTACT.name:
                    intact_same = self._per_document(name, INTACT.name, is_unmasked)
                    difference = mean_interval(values - intact_same)
                if name == "copy_random_second" and value.value > self.uniform:
                    value, note = UNDEFINED, ABOVE_UNIFORM
            yield {
                "measure": name,
                "condition": condition,
                **interval_columns(value=value, difference=difference),
                "note": note,
            }

    def _per_document(self, name: str, condition: str, suffix_only: bool = False) -> PerDocument:
        """Return one of `QUANTITIES` in a condition, a number per document.

        Args:
            name: the quantity.
            condition: the condition.
            suffix_only: whether only targets after the prefix are scored.
        """
        if name == "position":
            return self.distances[condition][..., 0].mean(1)
        text = self.losses[condition, "text"]
        losses = self.losses[condition, QUANTITIES[name].probe]
        suffix = self.probes["text"].prefix
        first = suffix if suffix_only else 2  # the first token after BOS has no loss without it
        match name:
            case "loss":
                return span_loss(losses, 1)
            case "loss_suffix":
                return span_loss(losses, suffix)
            case "in_context":
                return in_context_gain(losses)
            case "copy_text" | "copy_random":
                return copy_cost(losses, self.segment)
            case "copy_text_second" | "copy_random_second":
                return second_copy_loss(losses, self.segment)
            case "order":
                return span_loss(losses, suffix) - span_loss(text, suffix)
            case "without_bos":
                return span_loss(losses, first - 1) - span_loss(text, first)
            case "other_first":
                return span_loss(losses, first) - span_loss(text, first)
            case _:
                return extrapolation_cost(losses, self.trained)

    def _position_table(self, probe: str, width: int = 1) -> pd.DataFrame:
        """Return the mean loss at each position, in nats; without the mask, of the suffix alone."""
        tables = [pd.DataFrame(columns=POSITION_COLUMNS)]
        for condition, ablation in self.conditions.items() if probe in self.probes else ():
            first = self.probes[probe].prefix if "mask" in ablation.condition else 1
            rows = losses_by_position(self.losses[condition, probe], first, width)
            tables.append(rows.assign(condition=condition)[POSITION_COLUMNS])
        return pd.concat(tables[1:] or tables, ignore_index=True)

    def _decodability_table(self) -> pd.DataFrame:
        """Return the distance of decoded and true index, per layer, in positions.

        `distance` is of the regression on the residual stream after the layer, `null` of one on
        shuffled targets, `untrained` of the model with random weights; `difference` is to the
        intact model, paired over documents; `chance` is what the middle position achieves.
        """
        chance = chance_distance(self.probes["text"].tokens.shape[1], self.skip_keys)
        rows: list[TableRow] = []
        for condition, distances in self.distances.items():
            of = {"distance": distances[..., 0], "null": distances[..., 1]}
            if condition in self.untrained:
                of["untrained"] = self.untrained[condition][..., 0]
            if condition != INTACT.name:
                of["difference"] = of["distance"] - self.distances[INTACT.name][..., 0]
            for place, layer in enumerate(self.layers):
                means = {name: mean_interval(values[:, place]) for name, values in of.items()}
                named = {"layer": layer, "condition": condition, "chance": chance}
                rows.append(named | interval_columns(**means))
        return pd.DataFrame(rows, columns=["layer", "condition", *DECODED, "chance"])


def losses_by_position(losses: Losses, first: int, width: int = 1) -> pd.DataFrame:
    """Return the mean loss at each position from a first one on, with its bounds, in nats.

    Args:
        losses: of documents, by target.
        first: the first position.
        width: how many positions a row is the mean over; `position` is the first of them.
    """
    starts = [first, *range(first + width - first % width, losses.shape[1] + 1, width)]
    stops = [*starts[1:], losses.shape[1] + 1]
    spans = [span_loss(losses, *ends) for ends in zip(starts, stops, strict=True)]
    means = position_means(torch.stack(spans, 1))
    columns = (means.value.numpy(), means.low.numpy(), means.high.numpy())
    return pd.DataFrame(
        {"position": starts, **dict(zip(interval_names("loss"), columns, strict=True))}
    )
