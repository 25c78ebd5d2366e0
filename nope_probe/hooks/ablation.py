"""Remove the mask, RoPE, a projection, the MLP or learned positions from some blocks of a model.

Removing a projection means: the same model with that weight replaced, one key and value head per
query head, its bias too; q/k-norm, RoPE and scale stay. The model's parameters are never changed:
every removal is written through hook points, and equals the model edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nope_probe.hooks.ablation_settings import Ablation
from nope_probe.hooks.active import ABLATED, ActiveAblation
from nope_probe.hooks.block_ablation import BlockAblation, mean_over_positions
from nope_probe.hooks.block_removal import BlockRemoval
from nope_probe.hooks.calibration import Calibration, calibrate
from nope_probe.hooks.model import Inputs, position_module, position_point
from nope_probe.hooks.placed import HookGroup, first, hooks_in_place
from nope_probe.hooks.protocols import HookedModel, Model
from nope_probe.hooks.replaced_weight import replaced_weight
from nope_probe.hooks.targets import Target, resolve_targets


@contextmanager
def ablated(
    model: Model,
    ablation: Ablation,
    calibration: Calibration | None = None,
    *,
    tokens: Inputs | None = None,
) -> Iterator[Model]:
    """Run a model without some of its components for as long as the context lasts.

    Other hooks see what is written here and may change it, whether they were added before or
    inside the context; what they write is read here.

    Args:
        model: a HookedTransformer or TransformerBridge; its outputs are bit-identical afterwards.
        ablation: what to remove, and where.
        calibration: what `calibrate` returned; needed for the gain `output` and the replacement
            `mean` when a weight is removed.
        tokens: instead of a calibration, the tokens (or vectors) on which to `calibrate` first.

    Raises:
        ValueError: if the model lacks a component, layer, head or band, if neither or both of
            calibration and tokens are given where one is needed, or for a prefix longer than the
            model's context. In a forward pass, for a prefix longer than the sequences, scores that
            are not q.k times the scale where they have to be rebuilt, or another hook that changes
            a tensor which the removal leaves without effect.
        RuntimeError: inside another `ablated` on this model: two writers of the attention scores
            do not commute. Name all components in one Ablation. In a forward pass, if
            `reset_hooks` removed the ablation.

    Example:
        >>> from nope_probe import Ablation, ablated, load
        >>> model, tokens = load("nope-tiny").model, torch.tensor([[0, 5, 9]])
        >>> with ablated(model, Ablation(remove=["mask", "w_k"]), tokens=tokens):
        ...     logits = model(tokens)
    """
    targets = resolve_targets(model, ablation)
    if model in ABLATED:
        raise RuntimeError("the model is ablated already: name all components in one Ablation")
    calibration = _calibration(model, ablation, calibration, tokens)
    blocks = [_block_ablation(ablation, calibration, each) for each in targets]
    groups = [*(each.group() for each in blocks), *_position_groups(model, ablation)]
    ABLATED[model] = ActiveAblation(
        ablation=ablation,
        calibration=calibration,
        blocks={each.layer.index: each for each in blocks},
        groups=groups,
    )
    try:
        with hooks_in_place(groups):
            yield model
    finally:
        ABLATED.pop(model, None)


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


def _block_ablation(
    ablation: Ablation,
    calibration: Calibration | None,
    target: Target,
) -> BlockAblation:
    layer, names = target.layer, ablation.components
    replaced = {
        name: replaced_weight(layer, name, ablation, calibration, target.heads)
        for name in ablation.weights
    }
    removal = BlockRemoval(
        components=frozenset(names),
        replaced=replaced,
        rope=target.rope,
        heads=target.heads,
        prefix=ablation.prefix,
    )
    return BlockAblation(layer, removal)


def _position_groups(model: HookedModel, ablation: Ablation) -> Iterator[HookGroup]:
    point = position_point(model) if "pos_embed" in ablation.components else None
    if point is not None:
        yield HookGroup(
            module=position_module(model),
            hooks=[first(point, mean_over_positions)],
            start=lambda: None,
        )
