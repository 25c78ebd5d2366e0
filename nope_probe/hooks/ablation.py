"""Remove the mask, RoPE, a projection, the MLP or learned positions from some blocks of a model.

Removing a projection means: the same model with that weight replaced, one key and value head per
query head, its bias too; q/k-norm, RoPE and scale stay. The model's parameters are never changed:
every removal is written through hook points, and equals the model edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nope_probe.hooks.ablation_settings import Ablation
from nope_probe.hooks.active import ABLATED, BlockAblations
from nope_probe.hooks.base_layer import Layer
from nope_probe.hooks.block_ablation import BlockAblation, mean_over_positions
from nope_probe.hooks.calibration import Calibration, calibrate
from nope_probe.hooks.components import components, has_component
from nope_probe.hooks.forward import hooks_attached
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.model import Inputs, position_point
from nope_probe.hooks.protocols import Attachment, HookedModel, Model
from nope_probe.hooks.replaced_weight import replaced_weight


@contextmanager
def ablated(
    model: Model,
    ablation: Ablation,
    calibration: Calibration | None = None,
    *,
    tokens: Inputs | None = None,
) -> Iterator[Model]:
    """Run a model without some of its components for as long as the context lasts.

    Args:
        model: a HookedTransformer or TransformerBridge; its outputs are bit-identical afterwards.
        ablation: what to remove, and where.
        calibration: what `calibrate` returned; needed for the gain `output` and the replacement
            `mean` when a weight is removed.
        tokens: instead of a calibration, the tokens (or vectors) on which to `calibrate` first.

    Raises:
        ValueError: if the model lacks a component or layer, if neither or both of calibration and
            tokens are given where one is needed, or for a prefix longer than the model's context;
            in a forward pass, for a prefix longer than the sequences.
        RuntimeError: inside another `ablated` on this model: two writers of the attention scores
            do not commute. Name all components in one Ablation.

    Example:
        >>> from nope_probe import Ablation, ablated, load
        >>> model, tokens = load("nope-tiny").model, torch.tensor([[0, 5, 9]])
        >>> with ablated(model, Ablation(remove=["mask", "w_k"]), tokens=tokens):
        ...     logits = model(tokens)
    """
    blocks = _chosen(model, ablation)
    if model in ABLATED:
        raise RuntimeError("the model is ablated already: name all components in one Ablation")
    calibration = _calibration(model, ablation, calibration, tokens)
    ABLATED[model] = _block_ablations(blocks, ablation, calibration)
    try:
        with hooks_attached(_hooks(model, ablation, ABLATED[model])):
            yield model
    finally:
        ABLATED.pop(model, None)


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


def _calibration(
    model: HookedModel,
    ablation: Ablation,
    calibration: Calibration | None,
    tokens: Inputs | None,
) -> Calibration | None:
    if not ablation.needs_calibration:
        return None
    if calibration is not None and tokens is not None:
        raise ValueError("expected a calibration or tokens to calibrate on, not both")
    is_random = ablation.replacement == "random"
    if tokens is not None:
        return calibrate(model, tokens, seed=ablation.seed if is_random else None)
    if calibration is None:
        raise ValueError(_how_to_calibrate(ablation))
    if is_random and calibration.seed != ablation.seed:
        raise ValueError(
            f"the random replacement of seed {ablation.seed} is not calibrated: pass "
            f"calibrate(model, tokens, seed={ablation.seed})"
        )
    return calibration


def _how_to_calibrate(ablation: Ablation) -> str:
    name, ways = ablation.weights[0], "pass tokens=tokens or calibration=calibrate(model, tokens)"
    if ablation.replacement == "mean":
        return f"the mean output of {name} has to be measured first: {ways}"
    return (
        f"the gain 'output' of {name} has to be measured first: {ways}, or choose the gain 'norm' "
        "or 'identity' in Ablation"
    )


def _block_ablations(
    blocks: Sequence[Layer], ablation: Ablation, calibration: Calibration | None
) -> BlockAblations:
    found = {}
    for layer in blocks:
        replaced = {
            name: replaced_weight(layer, name, ablation, calibration) for name in ablation.weights
        }
        found[layer.index] = BlockAblation(layer, ablation.remove, replaced, ablation.prefix)
    return found


def _hooks(model: HookedModel, ablation: Ablation, blocks: BlockAblations) -> Iterator[Attachment]:
    for each in blocks.values():
        yield from each.hooks()
    point = position_point(model) if "pos_embed" in ablation.remove else None
    if point is not None:
        yield point, mean_over_positions
