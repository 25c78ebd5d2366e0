"""Attribution of the lead and the pattern, from the maps of ablated models.

The mask, a sliding window and position encodings are the sources, because nothing else breaks the
symmetry between positions. Weights only shape what the sources make: a weight is never a source.

A condition is the model with some components removed. Users name a condition by the removed
components (`()`, `"mask"`, `("mask", "rope")`); here such a name becomes a `Condition`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.contrasts import (
    ContrastGram,
    Grams,
    contrast_grams,
    lost,
    positional,
    source_terms,
    without_sources,
)
from nope_probe.analyses.jackknife import Interval
from nope_probe.errors import UserError, as_tuple, closed_choices, kind_of
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
class Term:
    """One term of position's part p, such as mask, rope or mask_x_rope.

    Attributes:
        size: its mean over queries (of a lead) or its RMS over cells (of a pattern), nats.
        share: <term, p> / <p, p>; the shares of all terms add to 1.
    """

    size: Interval
    share: Interval


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What position's part p loses without some components.

    Attributes:
        lost: <p - p(less c), p> / <p, p>: 1 where all of p is gone, more where it is reversed.
        amplification: RMS p / RMS p(less c); undefined where either does not exceed its noise.
        from_sources: <p', v'> / <v', v'> of what is left, p' = p(less c) and v' = v(less c).
        size: the mean lead v', or the RMS of the pattern v', nats.
    """

    lost: Interval
    amplification: Interval
    from_sources: Interval
    size: Interval


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Where the lead or the pattern v of one layer comes from.

    Shares are undefined where position's part p = v - v(less all sources) does not exceed its
    noise.

    Attributes:
        size: the mean lead, or the RMS of the pattern, nats.
        without_sources: the same of the model without any source, nats: not position.
        from_sources: <p, v> / <v, v>: how much of v the sources make.
        terms: the terms of p by name; their shares add to 1.
        losses: by the name of what is removed, such as `mask`, `rope` or `w_q+w_k`.
    """

    size: Interval
    without_sources: Interval
    from_sources: Interval
    terms: Mapping[str, Term]
    losses: Mapping[str, Loss]


@dataclass(frozen=True, kw_only=True)
class LayerAttribution:
    """The attribution of one layer, or of one head.

    Attributes:
        layer: the layer, from 0.
        lead: of the first key's lead; None where no key is first, or no query has a lead.
        pattern: of the pattern among the other keys.
        head: the head, from 0; None for the mean over the layer's heads.
    """

    layer: int
    lead: Attribution | None
    pattern: Attribution
    head: int | None = None

    @property
    def by_question(self) -> dict[Question, Attribution]:
        """The attributions by `lead`, where there is one, and `pattern`."""
        lead: dict[Question, Attribution] = {} if self.lead is None else {"lead": self.lead}
        return {**lead, "pattern": self.pattern}


@closed_choices("skip_keys")
def attribute(
    maps: Mapping[Removed, ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"]],
    *,
    sources: Sequence[str] | str = "auto",
    skip_keys: int | Literal["auto"] = "auto",
) -> list[LayerAttribution]:
    """Attribute each layer's lead and pattern to the sources, and find the weights they need.

    `run_ablations` also captures the conditions, and returns tables.

    Args:
        maps: score maps of the intact and the ablated model on the same sequences, by the removed
            components: `{(): ..., "mask": ..., "rope": ..., ("mask", "rope"): ...}`. The loss
            without a weight needs two: `"w_q": ...` and `("mask", "rope", "w_q"): ...`. Bare fold
            means, in nats, are accepted, and count as folds of equal size.
        sources: the mask, and the window and position encodings that are sources as well. `auto`
            takes the sources that a condition removes without a weight; a source that is never
            removed counts among what is left without sources.
        skip_keys: how many keys count as first; `auto`: 1 for captured maps of tokens, 0 for maps
            of vectors and for bare fold means, which have no lead.

    Raises:
        KeyError: if a condition of the sources is missing, or a weight's without the sources.
        ValueError: for a name that does not exist, or a non-finite cell below the diagonal.

    Example:
        >>> from nope_probe import Ablation, ablated, attribute, capture_scores, load, sequences
        >>> model = load("nope-tiny", n_layers=3)
        >>> tokens = sequences("random", tokenizer=model.tokenizer, n_seqs=64, seq_len=16).inputs
        >>> intact = capture_scores(model.model, tokens)
        >>> with ablated(model.model, Ablation(remove=["mask"])):
        ...     without = capture_scores(model.model, tokens)
        >>> layer = attribute({(): intact, "mask": without})[2]
        >>> layer.pattern.from_sources.value > 0.9
        True
    """
    conditions = {
        condition: with_skip_keys(layers, skip_keys)
        for condition, layers in layers_by_condition(maps).items()
    }
    return list(attribute_layers(*_complete(conditions, sources)))


def attribute_heads(
    maps: Mapping[Removed, ScoreMaps | Layers], *, sources: Sequence[str] | str = "auto"
) -> dict[tuple[int, int], LayerAttribution]:
    """Attribute each head's lead and pattern, by layer and number, as `attribute` does a layer's.

    Args:
        maps: results of `capture_scores(..., per_head=True)`, by the removed components.
        sources: as in `attribute`.

    Raises:
        KeyError: as in `attribute`.
        ValueError: as in `attribute`, or for maps that were captured without heads.

    Example:
        >>> from nope_probe import ablated, attribute_heads, capture_scores, load, sequences
        >>> model = load("nope-tiny", n_layers=3)
        >>> tokens = sequences("random", tokenizer=model.tokenizer, n_seqs=64, seq_len=16).inputs
        >>> intact = capture_scores(model.model, tokens, per_head=True)
        >>> with ablated(model.model, "mask"):
        ...     without = capture_scores(model.model, tokens, per_head=True)
        >>> head = attribute_heads({(): intact, "mask": without})[2, 1]
        >>> head.pattern.from_sources.value > 0.9
        True
    """
    heads = attribute_each_head(*_complete(layers_by_condition(maps), sources))
    return {(head.layer, head.head or 0): head for head in heads}


def _complete(
    conditions: Mapping[Condition, Layers], sources: Sequence[str] | str
) -> tuple[Mapping[Condition, Layers], Sequence[str]]:
    """Return the maps by condition, checked to be all that are needed, and the sources."""
    named = [Component(str(name)) for name in as_tuple(sources) if name != "auto"]
    sources = named or sources_of(conditions)
    validate_complete(conditions, sources)
    return conditions, sources


def attribute_layers(
    maps: Mapping[Condition, Layers], sources: Sequence[str]
) -> Iterator[LayerAttribution]:
    """Yield the attribution of each layer, as `attribute` returns it.

    Args:
        maps: of all conditions that `validate_complete` wants.
        sources: the sources.
    """
    for layer in maps[INTACT]:
        yield attributed(contrast_grams(patterns_of(maps, layer)), sources, layer)


def attribute_each_head(
    maps: Mapping[Condition, Layers], sources: Sequence[str]
) -> Iterator[LayerAttribution]:
    """Yield the attribution of each head, from maps with heads as `attribute_layers` takes them."""
    heads = {condition: heads_of(layers) for condition, layers in maps.items()}
    for layer, head in heads[INTACT]:
        yield attributed(contrast_grams(patterns_of(heads, (layer, head))), sources, layer, head)


def attributed(
    grams: Grams[Condition], sources: Sequence[str], layer: int, head: int | None = None
) -> LayerAttribution:
    """Return the attribution of a layer or head, from the inner products of its conditions."""
    of_questions = {question: attribution_of(gram, sources) for question, gram in grams.items()}
    return LayerAttribution(
        layer=layer, head=head, lead=of_questions.get("lead"), pattern=of_questions["pattern"]
    )


def attribution_of(gram: ContrastGram[Condition], sources: Sequence[str]) -> Attribution:
    """Return the attribution of a lead or a pattern, from the inner products of its conditions."""
    intact, position = {INTACT: 1.0}, positional(INTACT, sources)
    return Attribution(
        size=gram.size(intact),
        without_sources=gram.size({Condition(sources): 1.0}),
        from_sources=gram.share(position, intact),
        terms={
            name: Term(size=gram.size(term), share=gram.share(term, position))
            for name, term in source_terms(sources).items()
        },
        losses={
            removed.name: Loss(
                lost=gram.share(lost(removed, sources), position),
                amplification=gram.rms_ratio(position, positional(removed, sources)),
                from_sources=gram.share(positional(removed, sources), {removed: 1.0}),
                size=gram.size({removed: 1.0}),
            )
            for removed in removals_in(gram.row, sources)
        },
    )


def removals_in(conditions: Iterable[Condition], sources: Sequence[str]) -> list[Condition]:
    """Return the conditions that have a loss, in order.

    Conditions that remove all of several sources only complete others: all is lost without them.

    Example:
        >>> conditions = map(Condition.parse, ((), "mask", "rope", ("mask", "rope"), "w_q",
        ...     ("mask", "rope", "w_q")))
        >>> [condition.name for condition in removals_in(conditions, ["mask", "rope"])]
        ['mask', 'rope', 'w_q']
    """
    return [
        removed
        for removed in conditions
        if len(removed) == 1 or (removed and not removed >= {*sources})
    ]


def patterns_of(maps: Mapping[Named, Mapping[Name, LayerMaps]], name: Name) -> dict[Named, Pattern]:
    """Return the pattern of one layer or head in each condition, on shared cells."""
    named = [by_name[name] for by_name in maps.values()]
    return dict(zip(maps, shared_patterns(named), strict=True))


def layers_by_condition(
    maps: Mapping[Removed, ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"]],
) -> dict[Condition, Layers]:
    """Return the maps of each layer, by its number, in each condition.

    Raises:
        ValueError: for a name that does not exist, two names of one condition, no maps, or maps on
            other sequences.
    """
    if not isinstance(maps, Mapping):
        raise UserError(
            "expected maps by the removed components, {(): ..., 'mask': ...}, got " + kind_of(maps)
        )
    conditions = {
        Condition.parse(removed): maps_by_layer(captured) for removed, captured in maps.items()
    }
    if len(conditions) < len(maps) or not conditions:
        raise ValueError(f"expected one entry per condition, got {list(maps)}")
    counts = [layer.counts for layers in conditions.values() for layer in layers.values()]
    if any(not torch.equal(count, counts[0]) for count in counts):
        raise ValueError("maps have folds of different sizes: capture them on the same sequences")
    return conditions


def sources_of(conditions: Iterable[Condition]) -> tuple[Component, ...]:
    """Return the mask, and every other source that a condition removes without a weight.

    Example:
        >>> sources_of(map(Condition.parse, ((), "mask", "rope")))
        ('mask', 'rope')
    """
    removed = MASK.union(*(names for names in conditions if names <= {*SOURCES}))
    return tuple(name for name in SOURCES if name in removed)


def conditions_of(sources: Sequence[str], removed: Iterable[Condition] = ()) -> list[Condition]:
    """Return the conditions that an attribution needs, the intact model first.

    Args:
        sources: the sources, which are removed in all combinations.
        removed: what else is removed, one at a time, with the sources and without them.

    Example:
        >>> [condition.name for condition in conditions_of(["mask", "rope"], [Condition({"w_q"})])]
        ['intact', 'mask', 'rope', 'mask+rope', 'w_q', 'mask+rope+w_q']
    """
    terms = source_terms(sources).values()
    of_sources = {condition: None for term in terms for condition in term}
    place: dict[str, int] = {name: index for index, name in enumerate(sources)}
    ordered = sorted(of_sources, key=lambda c: (len(c), sorted(place[name] for name in c)))
    beyond = [pair for c in removed for pair in (c, without_sources(c, sources))]
    return list(dict.fromkeys([INTACT, *ordered, *beyond]))


def validate_complete(conditions: Collection[Condition], sources: Sequence[str]) -> None:
    """Check that there are maps of all conditions of the sources, and of what else is removed.

    Raises:
        KeyError: naming a missing condition.
    """
    needed = {*conditions_of(sources, removals_in(conditions, sources)), MASK}
    missing = needed - {*conditions}
    if missing:
        names = " + ".join(min(missing, key=sorted).ordered) or "nothing"
        raise KeyError(f"no maps of the model with {names} removed")
