"""What a run of `ablate` removes and reads: its plan, its passes, and the intact model's heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from typing import Any, Literal, NamedTuple

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit, split_attention
from nope_probe.analyses.attribution import conditions_of
from nope_probe.analyses.pattern import measure_heads
from nope_probe.analyses.splits import Band, BandChoice, make_bands, split_bands
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.figures.words import HEAD_MEASURES
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs, numbered_layers
from nope_probe.hooks.reading.accumulators import Cut
from nope_probe.hooks.reading.attention import AttentionAccumulator, attention_maps
from nope_probe.hooks.reading.batch_readings import read_rotations
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.maps.folds import State
from nope_probe.maps.maps import Layers
from nope_probe.maps.rows import choose_rows
from nope_probe.models.info import LoadedModel
from nope_probe.removal import (
    INTACT,
    MASK,
    NO_REPLACEMENT,
    SOURCES,
    UNION,
    Component,
    Condition,
)
from nope_probe.studies.engine import Engine, idle_sources, irreplaceable, validate_removable
from nope_probe.studies.head_scores import HeadScores, head_columns, head_sums, means_of
from nope_probe.studies.removing import parse_removed
from nope_probe.studies.study import Pass, Results, calibration
from nope_probe.studies.tables import WEIGHTS, attention_table, columns_of, interval_columns

ADDS_UP = 1e-3  # relative error, for scores in half precision
DEFAULT_WEIGHTS = ("w_q", "w_k", "w_q+w_k", "w_o")  # constant queries, keys, both, and output
Row = tuple[Condition, str]  # what is removed, and what the weights among it are replaced by
INTACT_ROW: Row = (INTACT, NO_REPLACEMENT)
Maps = dict[Row, Layers]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is removed from a model, and how.

    Attributes:
        sources: the mask, and the window and position encodings that the model has as well. They
            are removed in all combinations.
        removed: what else is removed, one at a time.
        ablations: for each replacement of removed weights, an ablation that removes nothing yet.
        layers: the numbers of the layers to map.
        left_out: components that by default are no sources or not removed here, and why.
        heads: where the maps of each head are kept: where sources alone are removed, or everywhere.
    """

    sources: tuple[Component, ...]
    removed: tuple[Condition, ...] = ()
    ablations: tuple[Ablation, ...] = (Ablation(),)
    layers: tuple[int, ...] = (0,)
    left_out: Mapping[str, str] = field(default_factory=dict)
    heads: Literal["nowhere", "sources", "everywhere"] = "nowhere"

    @property
    def plain(self) -> list[Condition]:
        """The conditions that replace no weight, the intact model first."""
        others = [condition for condition in self.removed if not condition.weights]
        return conditions_of(self.sources, others)

    @property
    def replacing(self) -> list[Condition]:
        """The conditions that replace a weight."""
        return [condition for condition in self.removed if condition.weights]

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """The names of the replacements; none where no weight is removed."""
        named = [by.replacement for by in self.ablations if isinstance(by.replacement, str)]
        return tuple(named) if self.replacing else ()

    @property
    def calibrated(self) -> list[Ablation]:
        """The removals that may need a calibration, by each replacement."""
        return [by.without(condition) for by in self.ablations for condition in self.removed]

    def passes(self, engine: Engine, shuffled: Sequences | None = None) -> Iterator[Pass]:
        """Yield all passes, in the order in which they are run.

        Args:
            engine: the model on the run's sequences.
            shuffled: the same sequences with their tokens permuted, if they are a control.
        """
        of_sources, by = conditions_of(self.sources), self.ablations[0]
        yield from self._passes("score", engine, of_sources, by)
        yield from calibration(engine, self.calibrated)
        yield from self._passes("score", engine, self.plain[len(of_sources) :], by)
        for by in self.ablations:
            run = dict.fromkeys(equivalent(condition, by) for condition in self.replacing)
            yield from self._passes(f"score-{by.replacement}", engine, run, by)
        if shuffled is not None:
            of_tokens = engine.with_sequences(shuffled)
            yield from self._passes("shuffled", of_tokens, (INTACT, MASK), by)

    def _passes(
        self, prefix: str, engine: Engine, conditions: Iterable[Condition], by: Ablation
    ) -> Iterator[Pass]:
        for condition in conditions:
            per_head = prefix != "shuffled" and self.keeps_heads(condition)
            yield Pass(
                key=f"{prefix}/{condition.name}",
                engine=engine,
                read=partial(Engine.scores, layers=self.layers, per_head=per_head),
                ablation=by.without(condition) if condition else None,
                kind="scores of heads" if per_head else "scores",
            )

    def keeps_heads(self, condition: Condition) -> bool:
        """Return whether the maps of each head are kept in a condition."""
        return self.heads == "everywhere" or (self.heads == "sources" and condition.are_sources)

    def maps(self, results: Results) -> Maps:
        """Return the score maps of every condition from the results of the passes, by key."""
        maps: Maps = {(c, NO_REPLACEMENT): results[f"score/{c.name}"] for c in self.plain}
        for by in self.ablations:
            for condition in self.replacing:
                key = f"score-{by.replacement}/{equivalent(condition, by).name}"
                maps[condition, str(by.replacement)] = results[key]
        return maps


def named(row: Row) -> dict[str, str]:
    """Return the columns that name a row of a table."""
    condition, replacement = row
    return {"removed": condition.name, "replacement": replacement}


def equivalent(condition: Condition, by: Ablation) -> Condition:
    """Return the condition that is run for another: W_V does not matter behind a constant W_O.

    Example:
        >>> equivalent(Condition.parse("ov"), Ablation(replacement="mean")).name
        'w_o'
    """
    has_constant = "w_o" in condition and not by.stand_in.gain
    return Condition(condition - {"w_v"}) if has_constant else condition


def make_plan(
    has: Sequence[str],
    remove: Sequence[str] | None = None,
    *,
    bands: Sequence[str] = (),
    left_out: Mapping[str, str] | None = None,
    **options: Any,
) -> Plan:
    """Return the plan for a model.

    Args:
        has: the components that the model has.
        remove: what to remove besides the sources, one at a time: components, circuits, bands of
            RoPE, positions of writers and unions of these; None for W_Q, W_K, both, and W_O;
            `["sources"]` for the sources alone; `[]` for the intact model alone.
        bands: bands of RoPE that are removed in turn as well.
        left_out: components that are no source, and removed only where they are named, and why.
        options: further attributes of the plan.

    Raises:
        UserError: for a name that does not exist.
    """
    is_intact = remove is not None and not remove
    if "mask" not in has and not is_intact:
        raise UserError("the model has no causal mask: its attention is bidirectional")
    left_out = {name: why for name, why in (left_out or {}).items() if name in has}
    sources = tuple(name for name in SOURCES if name in has and name not in left_out)
    if remove is None:
        there = {*has} - {*left_out}
        remove = [name for name in DEFAULT_WEIGHTS if {*name.split(UNION)} <= there]
    else:  # weights are named
        left_out = {name: why for name, why in left_out.items() if name in SOURCES}
    named = [parse_removed(name) for name in (*remove, *bands) if name != "sources"]
    return Plan(
        sources=() if is_intact else sources,
        removed=tuple(c for c in dict.fromkeys(named) if not c <= {*sources}),
        left_out=left_out,
        **options,
    )


def plan_of(
    loaded: LoadedModel,
    inputs: Inputs,
    remove: Sequence[str] | None,
    *,
    layers: Sequence[int],
    **options: Any,
) -> Plan:
    """Return the plan for a loaded model.

    Args:
        loaded: the model.
        inputs: the sequences, on which a source may do nothing.
        remove: as of `make_plan`.
        layers: the numbers of the layers to map.
        options: further arguments of `make_plan`.

    Raises:
        UserError: as `make_plan` does, and for what the model does not have.
    """
    model = loaded.model
    left_out = irreplaceable(model) | idle_sources(model, inputs, len(layers))
    options |= {"left_out": left_out, "layers": tuple(layers)}
    plan = make_plan(components(model), remove, **options)
    validate_removable(model, plan.calibrated)
    return plan


class Reading(NamedTuple):
    """What the pass of an intact model reads: score maps and, of each layer, sums over its heads.

    Attributes:
        maps: the score maps of each layer.
        heads: the measures of its heads' attention, where heads are kept.
        attention: the attention weights of its heads.
    """

    maps: Layers
    heads: list[HeadScores]
    attention: list[AttentionAccumulator]


def read_intact(
    engine: Engine, key: str, ablation: Ablation | None, *, layers: Sequence[int], per_head: bool
) -> Reading:
    """Return the maps of the intact model and its heads' attention, from one pass."""
    cut = Cut(
        counts=engine.fold_of.bincount(),
        queries=choose_rows(engine.inputs.shape[1], engine.query_rows),
        skip_keys=engine.skip_keys or 0,
    )
    heads = head_sums(engine, layers) if per_head else []
    attention = [AttentionAccumulator(of.layer, cut, keeps_scores=False) for of in heads]
    also = [*heads, *attention]
    maps = engine.scores(key, ablation, layers=layers, per_head=per_head, also=also)
    return Reading(maps, heads, attention)


def capture_band_folds(
    engine: Engine, stream: StreamCheckpoint | None, *, bands: Sequence[Sequence[Band]]
) -> State:
    """Return the fold maps of bands of RoPE, `folds` [fold, layer, band, row, key_pos], nats."""
    groups = [[band.coordinates for band in of_layer] for of_layer in bands]
    return {"folds": engine.by_fold(capture_bands, stream, groups=groups)}


def bands_of_layers(
    model: HookedModel, inputs: Inputs, layers: Sequence[int], choice: BandChoice
) -> list[list[Band]]:
    """Return the bands of the first layers that attend, from their rotations.

    Raises:
        UserError: if no layer has RoPE, if scores are soft-capped, or for too many bands.
    """
    blocks = numbered_layers(model, layers)
    capped = [f"L{layer.index}" for layer in blocks if layer.soft_cap is not None]
    if capped:
        raise UserError(f"--bands: the scores of {capped[0]} are soft-capped, so they are no sum")
    try:
        rotations = read_rotations(model, inputs[:1], len(blocks))
        return make_bands(rotations, blocks[0].d_head, choice, layers)
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"--bands: {error}") from error


def bands_table(
    layers: Layers,
    band_maps: Float[Tensor, "fold layer band row key_pos"],
    bands: Sequence[Sequence[Band]],
) -> pd.DataFrame:
    """Return each band's pairs and wavelengths (positions), amplitude (nats), and share.

    `first_pair` and `last_pair` count from 0. The unrotated rest has no pairs and no wavelengths.

    Raises:
        UserError: naming the first layer whose scores are not q.k, the sum of its bands.
    """
    for (number, layer), of_layer in zip(layers.items(), band_maps.unbind(1), strict=True):
        scores, added = layer.folds.maps, of_layer.sum(1)
        visible = ~scores[0].isnan()
        if not relative_error(added[:, visible], scores[:, visible]) < ADDS_UP:
            raise UserError(f"--bands: the scores of L{number} are not q.k, so they have no bands")
    patterns = (maps.pattern for maps in layers.values())
    parts = starmap(split_bands, zip(patterns, band_maps.unbind(1), bands, strict=True))
    rows = [
        {
            "layer": part.band.layer,
            "band": part.band.name,
            "n_pairs": len(part.band.pairs),
            "first_pair": min(part.band.pairs, default=None),
            "last_pair": max(part.band.pairs, default=None),
            "shortest_wavelength": min(part.band.wavelengths, default=None),
            "longest_wavelength": max(part.band.wavelengths, default=None),
            **interval_columns(amplitude=part.amplitude, share=part.share),
        }
        for part in chain.from_iterable(parts)
    ]
    return pd.DataFrame(rows).astype({"first_pair": "Int64", "last_pair": "Int64"})


def heads_table(
    reading: Reading, induction: State, fold_of: Tensor, fold_of_copies: Tensor
) -> pd.DataFrame:
    """Return each head's lead and three measures of its pattern, and its attention's measures.

    Args:
        reading: of the intact model.
        induction: fold means of induction attention.
        fold_of: the fold of each sequence.
        fold_of_copies: the fold of each sequence of repeated tokens.
    """
    rows = pd.DataFrame(
        {"layer": layer, "head": head, **columns_of(measures, HEAD_MEASURES)}
        for (layer, head), measures in measure_heads(reading.maps).items()
    )
    means = means_of(reading.heads, fold_of)
    attended = head_columns((means, fold_of), (induction, fold_of_copies))
    splits: dict[tuple[int, int], AttentionSplit] = {}
    for sums in reading.attention:  # a layer at a time: the fold means are in memory once
        splits |= split_attention(attention_maps([sums]))
    split = attention_table(splits, WEIGHTS).drop(columns=["layer", "head"])
    return pd.concat([rows, attended, split], axis=1)
