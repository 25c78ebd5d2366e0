"""The positional parts of each layer, found by intervening on one short batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from block_readings import (
    ConfiguredRope,
    LayerReading,
    configured_ropes,
    hooks_scaling,
    hooks_without_learned_positions,
    read_layers,
    rotation_of,
    scaled_point,
)
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.attention import Attention, query_blocks
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import Inputs, layers_of
from nope_probe.hooks.layers.passes import read_attention, traits_of
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.positions import NO_ROTATION, Rotation
from recover import (
    FOLLOWS,
    SLOWEST,
    MaskShape,
    ScoreProduct,
    fit_score_product,
    layout_of,
    mask_shape,
    power_law,
    recover_rotation,
    turning_part,
)

N_SHORT = 48  # positions of the batch for all findings but the mask
UPSCALED = 64.0  # factor of q and k: a norm undoes it, and a soft cap shows
ACTS = 1e-5  # share of the largest score: a smaller change is rounding
TOLERANCE = 1e-3  # relative error of the lengths of queries
RESCALED = 1e-5  # relative error of frequencies, whose angles are float32
LongInputs = Int[Tensor, "one long_pos"] | Float[Tensor, "one long_pos d_model"]


@dataclass(frozen=True, kw_only=True)
class LayerFindings:
    """The positional parts of one layer.

    Attributes:
        layer: the layer, from 0.
        rope: whether RoPE acts, so that its removal changes some score.
        rope_change: the largest change of a score when RoPE is removed, nats.
        rope_pairs: how many rotary pairs turn.
        rope_pairs_acting: how many pairs change some score when a single pair is not turned.
        rope_base: the base, recovered from the angles; None if they follow no base. Of a scaled
            RoPE whose frequencies are those that transformers computes, the base that it takes.
        rope_pairs_following: how many of the first pairs follow the base; others are slowed down.
        rope_first: the first pair's frequency, radians per position, 1 as a rule; negative where
            pairs turn the other way; None without recognised pairs.
        rope_scale: how many times slower the last pair turns than by the base, 1 without scaling
            (a configuration's `factor`); None if the frequencies follow no base.
        rope_as_configured: whether the frequencies are those that transformers computes for the
            layer from its configuration; None where it computes none, or the pairs are not known.
        rotary_fraction: the share of each head's coordinates that turns.
        rope_layout: the coordinates that turn together: `halves` or `adjacent`.
        rope_factor: RoPE's factor on queries and keys, 1 as a rule (not in YaRN).
        learned_positions_change: the largest change of a score when learned position embeddings are
            replaced by their mean, nats; 0 without them.
        mask: the shape of the mask.
        mask_same_in_all_heads: whether all heads have this mask.
        q_norm, k_norm: whether a norm undoes a scaling of q, or k.
        norm_over: the extent of that norm: each `head`, or `all heads` at once; None without a
            norm.
        mla: whether heads share the rotary coordinates of their keys but not the other coordinates,
            as in multi-head latent attention.
        sinks: whether a learned sink takes a share of each row's attention.
        score_bias: the largest difference, in nats, that a bias such as ALiBi makes between two
            keys of a query; 0 without a bias.
        soft_cap: the soft cap, nats, or None.
        scale: the factor of q.k.
        product_error: the relative error of q.k, scale and soft cap against scores less the bias.
        rope_rescaled_from: the shortest sequence length at which RoPE has other frequencies or
            another factor than in a short sequence; None if the long sequence has the same.
        rope_rescaled_by: the factor of the frequency that changes most in the long sequence; 1
            without a change.
        queries_grow_from: the first position from which queries of the same token are longer or
            shorter than at position 0 (a temperature); None without such a position.
        queries_grow_by: the length of the last such query, in lengths of the first.
    """

    layer: int
    rope: bool
    rope_change: float
    rope_pairs: int
    rope_pairs_acting: int
    rope_base: float | None
    rope_pairs_following: int
    rope_first: float | None
    rope_scale: float | None
    rope_as_configured: bool | None
    rotary_fraction: float
    rope_layout: str | None
    rope_factor: float
    learned_positions_change: float
    mask: MaskShape
    mask_same_in_all_heads: bool
    q_norm: bool
    k_norm: bool
    norm_over: Literal["head", "all heads"] | None
    mla: bool
    sinks: bool
    score_bias: float
    soft_cap: float | None
    scale: float
    product_error: float
    rope_rescaled_from: int | None = None
    rope_rescaled_by: float = 1.0
    queries_grow_from: int | None = None
    queries_grow_by: float = 1.0


def probe_layers(
    model: HookedModel, short: Inputs, long: LongInputs | None = None
) -> list[LayerFindings]:
    """Find the positional parts of each layer.

    Args:
        model: a HookedTransformer or TransformerBridge.
        short: a batch of tokens or vectors, for all findings that need no length.
        long: a sequence for the mask, and for changes with length; the short batch by default.

    Example:
        >>> from nope_probe import load
        >>> model = load("rope-tiny").model
        >>> round(probe_layers(model, torch.arange(48)[None])[1].rope_base)
        10000
    """
    intact = read_layers(model, short)
    entering = [reading.residual for reading in intact]
    rope = [name for name in components(model) if name == "rope"]
    with ablated(model, Ablation(remove=rope)):
        unrotated = read_layers(model, short, residuals=entering)
    first_head = [
        *hooks_scaling(model, "q", UPSCALED, first_head=True),
        *hooks_scaling(model, "k", UPSCALED, first_head=True),
    ]
    changed = {
        "rope": unrotated,
        "q": read_layers(model, short, hooks_scaling(model, "q", UPSCALED), entering),
        "k": read_layers(model, short, hooks_scaling(model, "k", UPSCALED), entering),
        "first head": read_layers(model, short, first_head, entering),
        "learned": read_layers(model, short, hooks_without_learned_positions(model)),
    }
    long = short[:1] if long is None else long
    masks, findings = read_masks(model, long), []
    for place, layer in enumerate(layers_of(model)):
        of_layer = {name: readings[place] for name, readings in changed.items()}
        rope_law = _rope_law(intact[place], unrotated[place], configured_ropes(model, layer.index))
        findings.append(_findings(layer, intact[place], of_layer, masks[place], rope_law))
    return list(with_lengths(model, findings, long, short.shape[1]))


def read_masks(model: HookedModel, inputs: LongInputs) -> list[tuple[MaskShape, bool]]:
    """Run one sequence, without maps; return each layer's mask, and whether all heads share it."""

    def read(layer: Layer, attention: Attention) -> tuple[MaskShape, bool]:
        n_positions = attention.mask.n_queries

        def cells(rows: slice) -> Bool[Tensor, "query_pos key_pos"]:
            return attention.mask.rows(rows)[0, 0]

        blocks = query_blocks(n_positions, n_positions)
        same = all(bool((attention.mask.rows(b)[0] == cells(b)).all()) for b in blocks)
        return mask_shape(cells, n_positions), same

    return read_attention(model, inputs, read)


@dataclass(frozen=True, kw_only=True)
class ModelFindings:
    """The findings on a model.

    Attributes:
        model: its name.
        bos: `forced` if the tokenizer puts a BOS token before any text, else `none`.
        layers: the findings of each layer.
        not_attending: the numbers of layers that do not attend, in a hybrid model.
    """

    model: str
    bos: Literal["forced", "none"]
    layers: list[LayerFindings]
    not_attending: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LengthReading:
    """The queries of one layer in a sequence of some length.

    Attributes:
        rotation: the rotation by RoPE.
        query_lengths: the root mean square over heads of the length of each query.
    """

    rotation: Rotation
    query_lengths: Float[Tensor, " pos"]


def read_queries(
    model: HookedModel, inputs: LongInputs, n_layers: int | None = None
) -> list[LengthReading]:
    """Run one sequence, and read the first layers that attend (all by default)."""
    traits = traits_of(model)

    def read(layer: Layer, attention: Attention) -> LengthReading:
        return LengthReading(
            rotation=rotation_of(attention, traits[layer.index].rotary).among(slice(2)),
            query_lengths=attention.q[0].float().square().sum(-1).mean(-1).sqrt().cpu(),
        )

    depth = len(layers_of(model)) if n_layers is None else n_layers
    return read_attention(model, inputs, read, n_layers=depth)


def with_lengths(
    model: HookedModel, findings: Sequence[LayerFindings], long: LongInputs, n_short: int
) -> Iterator[LayerFindings]:
    """Yield findings with the changes by length: of frequencies, and by a temperature.

    Queries of a repeated token are equal at all positions, except for RoPE, which keeps their
    length, and factors that depend on position. Bisection finds the first length at which
    frequencies change.
    """
    repeated = long[:, :1].expand(-1, long.shape[1], *long.shape[2:]).contiguous()
    n_long = long.shape[1]
    if n_long <= n_short:
        yield from findings
        return
    before, after = read_queries(model, repeated[:, :n_short]), read_queries(model, repeated)
    begins: dict[float, int] = {}
    for place, finding in enumerate(findings):
        ratio = _rescaling(before[place].rotation, after[place].rotation)
        if ratio != 1 and ratio not in begins:

            def changes(length: int, place: int = place) -> bool:
                rotation = read_queries(model, repeated[:, :length], place + 1)[place].rotation
                return _rescaling(before[place].rotation, rotation) != 1

            longer = range(n_short + 1, n_long)
            begins[ratio] = longer.start + bisect_left(longer, True, key=changes)
        lengths = after[place].query_lengths / after[place].query_lengths[0]
        grown = ((lengths - 1).abs() > TOLERANCE).nonzero().flatten()
        # Learned positions, convolutions and states change queries from the first positions on.
        grows = len(grown) > 0 and int(grown[0]) >= n_short
        yield replace(
            finding,
            rope_rescaled_from=begins.get(ratio),
            rope_rescaled_by=ratio,
            queries_grow_from=int(grown[0]) if grows else None,
            queries_grow_by=float(lengths[-1]) if grows else 1.0,
        )


def _rescaling(before: Rotation, after: Rotation) -> float:
    """Return the ratio of the most changed frequency (or factor); 1 within rounding."""
    if before.pairs is None or after.pairs is None:
        return 1.0
    before, after = turning_part(before), turning_part(after)
    if len(before.known_pairs) != len(after.known_pairs) or not len(before.known_pairs):
        return 1.0
    sizes = torch.tensor([after.factor / before.factor], dtype=torch.float64)
    ratios = torch.cat([after.frequencies / before.frequencies, sizes])
    furthest = ratios[ratios.log().abs().argmax()]
    return float(furthest) if abs(furthest - 1) > RESCALED else 1.0


def _findings(
    layer: Layer,
    intact: LayerReading,
    changed: dict[str, LayerReading],
    mask: tuple[MaskShape, bool],
    rope_law: RopeLaw,
) -> LayerFindings:
    cells = intact.visible.expand_as(intact.scores)
    largest = float(intact.scores[cells].abs().max())
    change = {
        name: float((reading.scores - intact.scores)[cells].abs().max())
        for name, reading in changed.items()
    }
    product = _score_product([intact, changed["q"]], cells)
    rotation = turning_part(_rotation(intact, changed["rope"]))
    q_norm, k_norm = (  # a norm undoes the scaling, up to its epsilon
        scaled_point(layer, name) is not None and change[name] < 0.01 * largest
        for name in ("q", "k")
    )
    pairs = rotation.known_pairs
    smallest, unrotated = ACTS * largest, changed["rope"]
    acting = _pairs_acting(intact, unrotated, rotation, cells, smallest / abs(product.scale))
    return LayerFindings(
        layer=layer.index,
        rope=change["rope"] > smallest,
        rope_change=change["rope"],
        rope_pairs=len(pairs),
        rope_pairs_acting=acting,
        rope_base=rope_law.base,
        rope_pairs_following=rope_law.n_following,
        rope_first=float(rotation.frequencies[0]) if len(pairs) else None,
        rope_scale=rope_law.scale,
        rope_as_configured=rope_law.as_configured,
        rotary_fraction=2 * len(pairs) / intact.q.shape[-1],
        rope_layout=layout_of(rotation),
        rope_factor=rotation.factor,
        learned_positions_change=change["learned"],
        mask=mask[0],
        mask_same_in_all_heads=mask[1],
        q_norm=q_norm,
        k_norm=k_norm,
        norm_over=_norm_over(intact, changed["first head"]) if q_norm or k_norm else None,
        mla=_shares_rotary_keys(intact, rotation),
        sinks=intact.sinks,
        score_bias=_bias_within_rows(intact, cells),
        soft_cap=product.soft_cap,
        scale=product.scale,
        product_error=product.error,
    )


def _rotation(intact: LayerReading, unrotated: LayerReading) -> Rotation:
    """Return RoPE's rotation of queries, from the block's angles or from the queries."""
    rotation: Rotation | None = intact.rotation
    if intact.rotation.pairs is None:
        straight, turned = (
            rearrange(reading.q[:, :2].double(), "batch pos head d_head -> pos (batch head) d_head")
            for reading in (unrotated, intact)
        )
        rotation = recover_rotation(straight, turned)
    return NO_ROTATION if rotation is None else rotation


@dataclass(frozen=True, kw_only=True)
class RopeLaw:
    """What the frequencies of a layer's pairs follow; the numbers are those of `LayerFindings`."""

    base: float | None = None
    scale: float | None = None
    n_following: int = 0
    as_configured: bool | None = None


def _rope_law(
    intact: LayerReading, unrotated: LayerReading, configured: Sequence[ConfiguredRope]
) -> RopeLaw:
    """Return the base and the scaling of a layer's frequencies.

    A scaled RoPE (YaRN, LongRoPE, proportional, ...) follows no power law. Its frequencies are
    compared with those that transformers computes, scaled and not.
    """
    frequencies = _rotation(intact, unrotated).frequencies.abs()
    turns = frequencies > SLOWEST
    if not turns.any():
        return RopeLaw()
    alike = [
        rope
        for rope in configured
        if rope.frequencies.shape == frequencies.shape
        and torch.allclose(rope.frequencies, frequencies, rtol=FOLLOWS, atol=SLOWEST)
    ]
    as_configured = None if intact.rotation.pairs is None or not configured else bool(alike)
    if not alike or alike[0].kind == "default":
        law = power_law(frequencies[turns])
        return RopeLaw(
            base=law.base,
            scale=law.scale,
            n_following=law.n_following,
            as_configured=as_configured,
        )
    slowed = (alike[0].unscaled / frequencies)[turns]
    following = (slowed / slowed[0] - 1).abs() < FOLLOWS
    return RopeLaw(
        base=alike[0].base,
        scale=float(slowed[-1]),
        n_following=int(following.long().cumprod(0).sum()),
        as_configured=as_configured,
    )


def _norm_over(
    intact: LayerReading, first_head_scaled: LayerReading
) -> Literal["head", "all heads"]:
    """Return a norm's extent: `head` if scaling the first head keeps the last head's scores."""
    visible = intact.visible[-1].expand(len(intact.scores), -1, -1)
    before, after = (reading.scores[:, -1][visible] for reading in (intact, first_head_scaled))
    alike = (after - before).abs().max() < 0.01 * before.abs().max()
    return "head" if bool(alike) or intact.scores.shape[1] == 1 else "all heads"


def _shares_rotary_keys(intact: LayerReading, rotation: Rotation) -> bool:
    shared = (intact.k == intact.k[:, :, :1]).all(0).all(0).all(0)
    pairs = rotation.known_pairs
    return bool(len(pairs) and shared[pairs].all() and not shared.all())


def _bias_within_rows(
    intact: LayerReading, cells: Bool[Tensor, "batch head query_pos key_pos"]
) -> float:
    if intact.bias is None:
        return 0.0
    bias = intact.bias.float().expand(len(cells), -1, -1, -1)
    highest = bias.masked_fill(~cells, -torch.inf).amax(-1)
    return float((highest - bias.masked_fill(~cells, torch.inf).amin(-1)).max())


def _score_product(
    readings: Sequence[LayerReading], cells: Bool[Tensor, "batch head query_pos key_pos"]
) -> ScoreProduct:
    products = torch.cat([reading.products[cells] for reading in readings])
    scores = [
        reading.scores if reading.bias is None else reading.scores - reading.bias.to(reading.scores)
        for reading in readings
    ]
    return fit_score_product(products, torch.cat([score[cells] for score in scores]))


def _pairs_acting(
    intact: LayerReading,
    unrotated: LayerReading,
    rotation: Rotation,
    cells: Bool[Tensor, "batch head query_pos key_pos"],
    smallest: float,
) -> int:
    """Return how many pairs change q.k by more than `smallest` if not turned."""
    count = 0
    for pair in rotation.known_pairs:
        turned, straight = (
            torch.einsum("bqhd,bkhd->bhqk", reading.q[..., pair], reading.k[..., pair])
            for reading in (intact, unrotated)
        )
        count += bool((turned - straight)[cells].abs().max() > smallest)
    return count
