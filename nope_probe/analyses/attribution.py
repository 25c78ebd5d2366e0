"""The lead and the pattern of a model under interventions, from the maps of ablated models.

The mask, a sliding window and position encodings are the sources, because nothing else breaks the
symmetry between positions. Weights only shape what the sources make: a weight is never a source.

A condition is the model with some components removed. Users name a condition by the removed
components (`()`, `"mask"`, `("mask", "rope")`); here such a name becomes a `Condition`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.contrasts import ContrastGram, Grams, contrast_grams, source_terms
from nope_probe.analyses.jackknife import UNDEFINED, ByLayer, Interval, jackknife
from nope_probe.errors import UserError, kind_of, validate_types
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import (
    LayerMaps,
    Name,
    Pattern,
    Question,
    shared_patterns,
    with_skip_keys,
)
from nope_probe.maps.maps import Layers, ScoreMaps, heads_of, maps_by_layer
from nope_probe.removal import INTACT, MASK, SOURCES, Component, Condition

Removed = TypeVar("Removed", bound=str | Iterable[str])
Named = TypeVar("Named", bound=Hashable)  # a condition, or a replacement and a condition


@dataclass(frozen=True, kw_only=True)
class Values:
    """A layer's (or head's) lead and pattern in one condition, nats.

    Attributes:
        lead: the score of the first key less the mean of the other earlier keys, a mean over
            queries. Undefined where no key is first, or no query has a lead.
        amplitude: the RMS of the pattern.
        order: how much of the intact model's pattern P is there, <P(c), P> / sqrt(<P, P>): the
            amplitude for the intact model, 0 where nothing like it is there, negative where it is
            reversed. Undefined where <P, P> does not exceed its noise.
    """

    lead: Interval
    amplitude: Interval
    order: Interval


@dataclass(frozen=True, kw_only=True)
class LayerValues:
    """The values of one layer, or of one head, in all conditions.

    Attributes:
        layer: the layer, from 0.
        conditions: the values by the name of what is removed, such as `intact`, `mask`, `w_q+w_k`.
        terms: of `lead` and `pattern`, the sizes (nats) of the exact sum: `without_sources`, each
            source alone, and their interactions such as `mask_x_rope`. Empty where some combination
            of the sources was not run.
        head: the head, from 0; None for the mean over the layer's heads.
    """

    layer: int
    conditions: Mapping[str, Values]
    terms: Mapping[Question, Mapping[str, Interval]]
    head: int | None = None

    def rows(self) -> Iterable[tuple[dict[str, str], Mapping[str, Interval]]]:
        """Yield a row of a table for each condition."""
        for removed, values in self.conditions.items():
            yield {"removed": removed}, vars(values)


def attribute(
    maps: Mapping[Removed, ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"]],
    *,
    skip_keys: int | Literal["auto"] = "auto",
) -> ByLayer[int, LayerValues]:
    """Return each layer's lead and pattern in every condition, and the order.

    `run_ablations` also captures the conditions, and returns tables.

    Args:
        maps: score maps of the intact and the ablated model on the same sequences, by the removed
            components: `{(): ..., "mask": ..., "rope": ..., ("mask", "rope"): ..., "w_q": ...}`.
            Bare fold means, in nats, are accepted, and count as folds of equal size.
        skip_keys: how many keys count as first; `auto`: 1 for captured maps of tokens, 0 for maps
            of vectors and for bare fold means, which have no lead.

    Raises:
        UserError: without maps of the intact model, for a name that does not exist, or for maps on
            other sequences or of another model.
        ValueError: for a non-finite cell below the diagonal.

    Example:
        >>> from nope_probe import Ablation, ablated, attribute, capture_scores, load, sequences
        >>> model = load("nope-tiny", n_layers=3)
        >>> tokens = sequences("random", tokenizer=model.tokenizer, n_seqs=64, seq_len=16).inputs
        >>> intact = capture_scores(model.model, tokens)
        >>> with ablated(model.model, Ablation(remove=["mask"])):
        ...     without = capture_scores(model.model, tokens)
        >>> layer = attribute({(): intact, "mask": without})[2]
        >>> layer.conditions["intact"].order.value > 10 * abs(layer.conditions["mask"].order.value)
        True
    """
    validate_types({"skip_keys": int | Literal["auto"]}, {"skip_keys": skip_keys})
    conditions = {
        condition: with_skip_keys(layers, skip_keys)
        for condition, layers in layers_by_condition(maps).items()
    }
    return ByLayer(
        {
            layer: values_of_layer(contrast_grams(patterns_of(conditions, layer)), layer)
            for layer in conditions[INTACT]
        }
    )


def attribute_heads(
    maps: Mapping[Removed, ScoreMaps | Layers],
) -> ByLayer[tuple[int, int], LayerValues]:
    """Return each head's lead and pattern, by layer and number, as `attribute` does a layer's.

    Args:
        maps: results of `capture_scores(..., per_head=True)`, by the removed components.

    Raises:
        UserError: as in `attribute`, or for maps that were captured without heads.

    Example:
        >>> from nope_probe import ablated, attribute_heads, capture_scores, load, sequences
        >>> model = load("nope-tiny", n_layers=3)
        >>> tokens = sequences("random", tokenizer=model.tokenizer, n_seqs=64, seq_len=16).inputs
        >>> intact = capture_scores(model.model, tokens, per_head=True)
        >>> with ablated(model.model, "mask"):
        ...     without = capture_scores(model.model, tokens, per_head=True)
        >>> head = attribute_heads({(): intact, "mask": without})[2, 1]
        >>> head.conditions["intact"].order.value > 10 * abs(head.conditions["mask"].order.value)
        True
    """
    conditions = layers_by_condition(maps).items()
    heads = {condition: heads_of(layers) for condition, layers in conditions}
    return ByLayer(
        {
            place: values_of_layer(contrast_grams(patterns_of(heads, place)), *place)
            for place in heads[INTACT]
        }
    )


def values_of_layer(grams: Grams[Condition], layer: int, head: int | None = None) -> LayerValues:
    """Return the values of a layer or head, from the inner products of its conditions."""
    conditions = grams["pattern"].row
    return LayerValues(
        layer=layer,
        head=head,
        conditions={name.name: values_in(grams, name, INTACT) for name in conditions},
        terms={question: sizes_of_terms(gram) for question, gram in grams.items()},
    )


def values_in(grams: Grams[Named], name: Named, intact: Named) -> Values:
    """Return the values in one condition, from the inner products of a layer's conditions."""
    lead, order = grams.get("lead"), grams["pattern"].order(name, intact)
    return Values(
        lead=UNDEFINED if lead is None else lead.size({name: 1.0}),
        amplitude=grams["pattern"].size({name: 1.0}),
        order=UNDEFINED if order is None else jackknife(order),
    )


def sizes_of_terms(gram: ContrastGram[Condition]) -> dict[str, Interval]:
    """Return the sizes of the exact sum of the sources, nats; empty without all its conditions."""
    terms = source_terms(sources_of(gram.row))
    needed = {condition for term in terms.values() for condition in term}
    return {name: gram.size(term) for name, term in terms.items()} if needed <= {*gram.row} else {}


def mean_over_layers(values: Sequence[Estimates]) -> Interval:
    """Return the mean of layers' values in a condition, nats, with its jackknife interval."""
    return jackknife(values[0].with_values(torch.stack([x.values for x in values]).mean(0)))


def patterns_of(maps: Mapping[Named, Mapping[Name, LayerMaps]], name: Name) -> dict[Named, Pattern]:
    """Return the pattern of one layer or head in each condition, on shared cells."""
    named = [by_name[name] for by_name in maps.values()]
    return dict(zip(maps, shared_patterns(named), strict=True))


def layers_by_condition(
    maps: Mapping[Removed, ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"]],
) -> dict[Condition, Layers]:
    """Return the maps of each layer, by its number, in each condition.

    Raises:
        UserError: for a name that does not exist, two names of one condition, no maps, or maps on
            other sequences or of another model.
    """
    if not isinstance(maps, Mapping):
        raise UserError(
            "expected maps by the removed components, {(): ..., 'mask': ...}, got " + kind_of(maps)
        )
    conditions = {
        Condition.parse(removed): maps_by_layer(captured) for removed, captured in maps.items()
    }
    if len(conditions) < len(maps) or not conditions:
        raise UserError(f"expected one entry per condition, got {list(maps)}")
    if INTACT not in conditions:
        raise UserError("no maps of the model with nothing removed")
    counts = [layer.counts for layers in conditions.values() for layer in layers.values()]
    if any(not torch.equal(count, counts[0]) for count in counts):
        raise UserError("maps have folds of different sizes: capture them on the same sequences")
    if any(layers.keys() != conditions[INTACT].keys() for layers in conditions.values()):
        raise UserError("maps have different layers: capture the same layers in every condition")
    _validate_same_source(maps)
    return conditions


def _validate_same_source(maps: Mapping[Removed, object]) -> None:
    """Check that all captured maps are of the same sequences and the same model.

    Raises:
        UserError: naming the maps that are not.
    """
    captured = [  # of maps that code has cut to some layers, nothing is known
        (name, x)
        for name, x in maps.items()
        if isinstance(x, ScoreMaps) and len(x.checksums) == len(x.layers) + 1
    ]
    for name, layers in captured:
        first, reference = captured[0]
        (inputs, *blocks), (expected, *others) = layers.checksums, reference.checksums
        known = dict(zip(reference.layers, others, strict=True))
        is_other = any(known.get(n, x) != x for n, x in zip(layers.layers, blocks, strict=True))
        if is_other or inputs != expected:
            what = "of another model" if is_other else "on other sequences"
            raise UserError(
                f"the maps of {name!r} were captured {what} than those of {first!r}: capture one "
                "model on the same sequences, intact and in `ablated`"
            )


def sources_of(conditions: Iterable[Condition]) -> tuple[Component, ...]:
    """Return the mask, and every other source that a condition removes without a weight.

    Example:
        >>> sources_of(map(Condition.parse, ((), "mask", "rope")))
        ('mask', 'rope')
    """
    removed = MASK.union(*(names for names in conditions if names <= {*SOURCES}))
    return tuple(name for name in SOURCES if name in removed)


def conditions_of(sources: Sequence[str], removed: Iterable[Condition] = ()) -> list[Condition]:
    """Return the conditions of a run, the intact model first.

    Args:
        sources: the sources, which are removed in all combinations.
        removed: what else is removed, one at a time.

    Example:
        >>> [condition.name for condition in conditions_of(["mask", "rope"], [Condition({"w_q"})])]
        ['intact', 'mask', 'rope', 'mask+rope', 'w_q']
    """
    terms = source_terms(sources).values()
    of_sources = {condition: None for term in terms for condition in term}
    place: dict[str, int] = {name: index for index, name in enumerate(sources)}
    ordered = sorted(of_sources, key=lambda c: (len(c), sorted(place[name] for name in c)))
    return list(dict.fromkeys([INTACT, *ordered, *removed]))
