"""The lead and the pattern of a model under interventions, from the maps of ablated models.

The mask, a sliding window and position encodings are the sources, because nothing else breaks the
symmetry between positions. Weights only shape what the sources make: a weight is never a source.

A condition is the model with some components removed. Users name a condition by the removed
components (`()`, `"mask"`, `("mask", "rope")`); here such a name becomes a `Condition`. A contrast
is a linear combination of the maps of conditions. It holds only coefficients, so every size, and
all that is kept of a pattern, is an inner product in one Gram matrix, of the leads or of the
patterns of one layer.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.jackknife import (
    UNDEFINED,
    ByLayer,
    Interval,
    Place,
    along,
    jackknife,
    rms,
)
from nope_probe.analyses.pattern_rows import beyond_rounding, mean_squares
from nope_probe.errors import UserError, kind_of, validate_types
from nope_probe.maps.estimates import Estimates, cross_products, fold_gram, leave_one_out
from nope_probe.maps.layers import (
    LayerMaps,
    Name,
    Pattern,
    Question,
    shared_patterns,
    with_skip_keys,
)
from nope_probe.maps.maps import Layers, ScoreMaps, heads_of, maps_by_layer
from nope_probe.removal import INTACT, INTERACTION, MASK, SOURCES, Component, Condition

GRAM_BYTES = 1 << 26  # memory for the patterns of all conditions at once
Removed = TypeVar("Removed", bound=str | Iterable[str])
Named = TypeVar("Named", bound=Hashable)  # a map: a condition, a replacement and one, a term
Contrast = Mapping[Condition, float]
Products = Mapping[bool, Float[Tensor, "one_plus_folds condition condition"]]


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
    return _values_by_place(conditions)


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
    return _values_by_place({condition: heads_of(layers) for condition, layers in conditions})


def _values_by_place(
    conditions: Mapping[Condition, Mapping[Place, LayerMaps]],
) -> ByLayer[Place, LayerValues]:
    """Return the values of each layer or head, from the inner products of its conditions."""
    values: ByLayer[Place, LayerValues] = ByLayer()
    for place in conditions[INTACT]:
        grams = contrast_grams(patterns_of(conditions, place))
        layer, head = place if isinstance(place, tuple) else (place, None)
        values[place] = LayerValues(
            layer=layer,
            head=head,
            conditions={name.name: values_in(grams, name, INTACT) for name in conditions},
            terms={question: sizes_of_terms(gram) for question, gram in grams.items()},
        )
    return values


def values_in(grams: Grams[Named], name: Named, intact: Named) -> Values:
    """Return the values in one condition, from the inner products of a layer's conditions."""
    lead, pattern = grams.get("lead"), grams["pattern"]
    return Values(
        lead=UNDEFINED if lead is None else lead.size({name: 1.0}),
        amplitude=pattern.size({name: 1.0}),
        order=pattern.part({name: 1.0}, {intact: 1.0}),
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


def conditions_of(sources: Sequence[str]) -> list[Condition]:
    """Return the conditions that remove the sources in all combinations, the intact model first.

    Example:
        >>> [condition.name for condition in conditions_of(["mask", "rope"])]
        ['intact', 'mask', 'rope', 'mask+rope']
    """
    sizes = range(len(sources) + 1)
    return [Condition(names) for size in sizes for names in combinations(sources, size)]


def source_terms(sources: Sequence[str]) -> dict[str, Contrast]:
    """Return the terms of the exact sum of the sources; without sources there are none.

    They add up to the intact map. The trained weights are kept. The term of a source is what this
    source adds to a model without any source. An interaction is what sources add only together
    (the paper's section 5). `without_sources` is what is left without any source.

    Args:
        sources: the sources that the model has: the mask, and a window or position encodings.

    Example:
        >>> list(source_terms(["mask", "rope"]))
        ['mask', 'rope', 'mask_x_rope', 'without_sources']
    """
    terms: dict[str, Contrast] = {
        INTERACTION.join(term): {
            Condition({*sources} - {*kept}): (-1.0) ** (size - len(kept))
            for n_kept in range(size, -1, -1)
            for kept in combinations(term, n_kept)
        }
        for size in range(1, len(sources) + 1)
        for term in combinations(sources, size)
    }
    return {**terms, "without_sources": {Condition(sources): 1.0}} if sources else {}


def contrast_map(
    contrast: Contrast, maps: Mapping[Condition, Float[Tensor, "*batch row key_pos"]]
) -> Float[Tensor, "*batch row key_pos"]:
    """Return the map of a contrast, nats: the weighted sum of the conditions' maps."""
    total = torch.zeros_like(next(iter(maps.values())))
    for condition, weight in contrast.items():
        total += weight * maps[condition]
    return total


@dataclass(frozen=True, kw_only=True, eq=False)
class ContrastGram(Generic[Named]):
    """Inner products of contrasts, on all folds and without each fold, from one Gram matrix.

    Products of leads are means over queries, and products of patterns are means over cells.

    Attributes:
        row: the row of each condition in the Gram matrices.
        products: the inner products of the conditions' leads or patterns, squared nats: over all
            pairs of folds (False), and over pairs of an even and an odd fold (True) if some
            condition needs them.
        across_halves: the conditions of which only an even and an odd fold are independent.
        weights: the share of all sequences that each fold holds.
        score_squares: the mean square of each condition's scores, squared nats. A contrast within
            their rounding is 0, and shares of it are undefined.
        means: the mean lead over queries in each condition, nats; None for patterns.
    """

    row: Mapping[Named, int]
    products: Products
    weights: Float[Tensor, " fold"]
    score_squares: Float[Tensor, " condition"]
    means: Float[Tensor, "one_plus_folds condition"] | None = None
    across_halves: Collection[Named] = ()

    def product(self, one: Mapping[Named, float], other: Mapping[Named, float]) -> Estimates:
        """Return <one, other>, in squared nats.

        Raises:
            KeyError: for a condition without a map.
        """
        left, right = self._coefficients(one), self._coefficients(other)
        products = self.products[not {*one, *other}.isdisjoint(self.across_halves)]
        values = torch.einsum("x,fxy,y->f", left, products, right)
        return Estimates(values=values, weights=self.weights)

    def size(self, contrast: Mapping[Named, float]) -> Interval:
        """Return a contrast's mean lead, or the RMS of its pattern, nats; 0 within rounding."""
        square = self._square(contrast)
        if self.means is None:
            return rms(square)
        means = self.means @ self._coefficients(contrast)
        return jackknife(square.with_values(means * bool(square.values.any())))

    def part(self, term: Mapping[Named, float], whole: Mapping[Named, float]) -> Interval:
        """Return how much of a whole lead or pattern V a term T has, nats.

        Of a lead it is the term's mean lead, and of a pattern <T, V> / sqrt(<V, V>): the amplitude
        of V for V itself, 0 where nothing like it is there, and negative where it is reversed. It
        is undefined where the whole is within its noise.
        """
        square = self._square(whole)
        part = along(self.product(term, whole), square)
        if part is None:
            return UNDEFINED
        return jackknife(part) if self.means is None else self.size(term)

    def _square(self, contrast: Mapping[Named, float]) -> Estimates:
        """Return the mean square of a contrast, 0 within the rounding of its conditions' scores."""
        score_square = self._coefficients(contrast).square() @ self.score_squares
        return beyond_rounding(self.product(contrast, contrast), score_square)

    def _coefficients(self, contrast: Mapping[Named, float]) -> Float[Tensor, " condition"]:
        vector = torch.zeros(len(self.score_squares), dtype=torch.float64)
        for condition, weight in contrast.items():
            vector[self.row[condition]] += weight
        return vector


Grams = Mapping[Question, ContrastGram[Named]]  # of the pattern, and of the lead if there is one


def contrast_grams(patterns: Mapping[Named, Pattern]) -> dict[Question, ContrastGram[Named]]:
    """Return the inner products of patterns and of their leads, from one reading of the maps.

    There is no entry for the lead where no key is first, or no query has a lead.

    Args:
        patterns: the patterns of one layer in each condition, or of other maps of it, on shared
            cells.
    """
    of_conditions = list(patterns.values())
    maps, cells = of_conditions[0].maps, of_conditions[0].cells
    n_maps = len(patterns) * maps.folds.n_folds
    sums, squares = torch.zeros(()), torch.zeros(len(patterns), dtype=torch.float64)
    leads: list[list[Float[Tensor, "fold query"]]] = [[] for _ in patterns]
    for start, stop in maps.folds.where.blocks(n_maps, GRAM_BYTES):
        shape = (len(patterns), maps.folds.n_folds, stop - start, stop)
        rows = torch.empty(shape, dtype=torch.float64)
        for index, pattern in enumerate(of_conditions):
            scores = pattern.maps.folds.rows(start, stop).double()
            squares[index] += mean_squares(scores, start, cells).mean()
            rows[index] = pattern.centred(scores, start)
            if pattern.lead is not None:
                leads[index].append(pattern.lead.rows(scores, start))
        sums = sums + fold_gram(rows)
    in_halves = [name for name, pattern in patterns.items() if pattern.maps.across_halves]

    def products(sums: Float[Tensor, "x fold y fold2"], n_cells: int) -> Products:
        kinds = {False, bool(in_halves)}
        return {across: cross_products(sums, n_cells, maps.weights, across) for across in kinds}

    gram = ContrastGram(
        row={name: index for index, name in enumerate(patterns)},
        products=products(sums, cells.count),
        across_halves=in_halves,
        weights=maps.weights,
        score_squares=squares,
    )
    if not leads[0]:
        return {"pattern": gram}
    folds = torch.stack([torch.cat(of_condition, -1) for of_condition in leads])
    of_leads = replace(
        gram,
        products=products(fold_gram(folds), folds.shape[-1]),
        score_squares=squares + folds.square().mean((1, 2)),
        means=leave_one_out(folds.mean(-1).T, maps.weights),
    )
    return {"pattern": gram, "lead": of_leads}
