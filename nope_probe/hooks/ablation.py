"""Remove the mask, RoPE, a projection, the MLP or learned positions from some blocks of a model.

Removing a projection means: the same model with that weight set to `c * P`, where row r of P reads
coordinate r % d_model (for W_O: its transpose), one key and value head per query head, no bias;
q/k-norm, RoPE and scale stay. The model's parameters are never changed: every removal is written
through hook points, and equals the model edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

from nope_probe.hooks.base_layer import Layer
from nope_probe.hooks.block_ablation import BlockAblation, mean_over_positions
from nope_probe.hooks.components import components, has_component
from nope_probe.hooks.forward import hooks_attached
from nope_probe.hooks.gains import Gains, calibrate, norm_gain
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs, position_point
from nope_probe.hooks.names import COMPONENTS, GAINS, WEIGHTS, Component, Gain, Projection
from nope_probe.hooks.protocols import Attachment, HookedModel, Model

_ABLATED: WeakSet[HookedModel] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What to remove, and where.

    Attributes:
        remove: components.
        layers: block numbers from 0; None for all.
        gain: the size of a removed projection's replacement. `output`: the RMS of the projection's
            output over the run's tokens in the intact model, which `calibrate` measures; `norm`:
            its Frobenius norm over the root of its rows; `identity`: 1.
        prefix: how many first positions lose the mask among themselves, a bidirectional prefix;
            later queries keep theirs (causal, or a sliding window). None: the mask is off for all.

    Raises:
        ValueError: for a component or gain that does not exist, or a prefix without the mask.

    Example:
        >>> from nope_probe import Ablation
        >>> Ablation(remove=["mask", "w_q"], layers=[0, 1], gain="norm").remove
        ['mask', 'w_q']
    """

    remove: Sequence[Component] = ()
    layers: Sequence[int] | None = None
    gain: Gain = "output"
    prefix: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.remove if name not in COMPONENTS]
        if unknown:
            raise ValueError(f"unknown component {unknown[0]!r}; there are {', '.join(COMPONENTS)}")
        if self.gain not in GAINS:
            raise ValueError(f"unknown gain {self.gain!r}; there are {', '.join(GAINS)}")
        if self.prefix is not None:
            self._validate_prefix(self.prefix)

    def _validate_prefix(self, prefix: int) -> None:
        if prefix < 1:
            raise ValueError(f"expected a prefix of 1 position or more, got {prefix}")
        if "mask" not in self.remove:
            removed = ", ".join(self.remove) or "nothing"
            raise ValueError(f"a prefix is for removing the mask; this removes {removed}")

    @property
    def weights(self) -> tuple[Projection, ...]:
        """The projections among the components to remove."""
        return tuple(name for name in WEIGHTS if name in self.remove)

    @property
    def needs_gains(self) -> bool:
        """Whether gains have to be measured first."""
        return self.gain == "output" and bool(self.weights)


@contextmanager
def ablated(
    model: Model, ablation: Ablation, gains: Gains | None = None, *, tokens: Inputs | None = None
) -> Iterator[Model]:
    """Run a model without some of its components for as long as the context lasts.

    Args:
        model: a HookedTransformer or TransformerBridge; its outputs are bit-identical afterwards.
        ablation: what to remove, and where.
        gains: what `calibrate` returned; needed for the gain `output` when a weight is removed.
        tokens: instead of gains, the tokens (or vectors) on which to `calibrate` first.

    Raises:
        ValueError: if the model lacks a component or layer, if neither or both of gains and tokens
            are given where gains are needed, or for a prefix longer than the model's context; in a
            forward pass, for a prefix longer than the sequences.
        RuntimeError: inside another `ablated` on this model: two writers of the attention scores
            do not commute. Name all components in one Ablation.

    Example:
        >>> from nope_probe import Ablation, ablated, load
        >>> model, tokens = load("nope-tiny").model, torch.tensor([[0, 5, 9]])
        >>> with ablated(model, Ablation(remove=["mask", "w_k"]), tokens=tokens):
        ...     logits = model(tokens)
    """
    blocks = _chosen(model, ablation)
    if model in _ABLATED:
        raise RuntimeError("the model is ablated already: name all components in one Ablation")
    gains = _gains(model, ablation, gains, tokens)
    _ABLATED.add(model)
    try:
        with hooks_attached(_hooks(model, blocks, ablation, gains)):
            yield model
    finally:
        _ABLATED.discard(model)


def _chosen(model: HookedModel, ablation: Ablation) -> list[Layer]:
    blocks = layers_of(model)
    indices = range(len(blocks)) if ablation.layers is None else ablation.layers
    if not set(indices) <= set(range(len(blocks))):
        raise ValueError(f"expected layers from 0 to {len(blocks) - 1}, got {list(indices)}")
    lacking = [name for name in ablation.remove if not has_component(model, name)]
    if lacking:
        has = ", ".join(components(model))
        raise ValueError(f"the model has no {lacking[0]} to remove; it has {has}")
    if ablation.prefix is not None and ablation.prefix > model.cfg.n_ctx:
        raise ValueError(
            f"a prefix of {ablation.prefix} positions, but the model's context is {model.cfg.n_ctx}"
        )
    return [blocks[index] for index in indices]


def _gains(
    model: HookedModel, ablation: Ablation, gains: Gains | None, tokens: Inputs | None
) -> Gains | None:
    if not ablation.needs_gains:
        return None
    if gains is not None and tokens is not None:
        raise ValueError("expected gains or tokens to measure them on, not both")
    if tokens is not None:
        return calibrate(model, tokens)
    if gains is None:
        raise ValueError(
            f"the gain 'output' of {ablation.weights[0]} has to be measured first: pass "
            "tokens=tokens or gains=calibrate(model, tokens), or choose the gain 'norm' or "
            "'identity' in Ablation"
        )
    return gains


def _hooks(
    model: HookedModel, blocks: Sequence[Layer], ablation: Ablation, gains: Gains | None
) -> Iterator[Attachment]:
    for layer in blocks:
        c = {name: _gain(layer, name, ablation.gain, gains) for name in ablation.weights}
        yield from BlockAblation(layer, ablation.remove, c, ablation.prefix).hooks()
    point = position_point(model) if "pos_embed" in ablation.remove else None
    if point is not None:
        yield point, mean_over_positions


def _gain(layer: Layer, name: Projection, gain: Gain, gains: Gains | None) -> float:
    if gains is not None:
        return gains.of(name, layer.index)
    return norm_gain(layer, name) if gain == "norm" else 1.0
