"""Remove the mask, RoPE, a projection, the MLP or learned positions from some blocks of a model.

Removing a projection means: the same model with that weight replaced, one key and value head per
query head, its bias too; q/k-norm, RoPE and scale stay. The model's parameters are not changed (by
`untrained` alone): every removal is written through hook points, and equals the model edited by
hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from typing import Any

from torch import nn

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import (
    HookedModel,
    HookPoint,
    OfThread,
    PlacedHook,
    hooks_in_place,
    methods_replaced,
)
from nope_probe.hooks.layers.model import (
    Inputs,
    layers_of,
    modules_of,
    numbered_layers,
    original_of,
    tapped,
)
from nope_probe.hooks.layers.objects import Model, model_of, refused
from nope_probe.hooks.layers.reference import is_of_a_library
from nope_probe.hooks.layers.tap import Edits, edited
from nope_probe.hooks.reading.calibration import calibrate, weights_checksum
from nope_probe.hooks.reading.streaming import dealt
from nope_probe.hooks.reading.written import capture_written
from nope_probe.hooks.removing.components import Removal, components, mlp_outputs, removals_of
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.hooks.removing.weights import Calibration
from nope_probe.hooks.removing.written import (
    ABLATED,
    ActiveAblation,
    WrittenPositions,
    without_position,
)
from nope_probe.removal import BY_TOKEN, WRITTEN_NULL, Condition, Writer, validate_components


@contextmanager
def ablated(
    model: Model,
    ablation: Ablation | Sequence[str] | str,
    calibration: Calibration | None = None,
    *,
    tokens: Inputs | None = None,
) -> Iterator[Any]:
    """Run a model without some of its components for as long as the context lasts.

    Other hooks, added before or inside the context, see the ablation's outputs and may change
    them; the ablation reads their outputs too. `reset_hooks` keeps it. Padding stays hidden
    without the mask. Text is generated without a cache, with a warning, where a new token changes
    the keys and values of earlier positions. A model is used by one thread at a time: the one that
    enters the context.

    Args:
        model: a HookedTransformer or TransformerBridge, or what `load` returns; its outputs are
            bit-identical afterwards.
        ablation: what is removed, and where; or the names of components, short for
            `Ablation(remove=...)`.
        calibration: the result of `calibrate` for this model; needed for the gain `output` and the
            replacement `mean` when a weight is removed, and for the position of a component.
        tokens: instead of a calibration, the tokens (or vectors) on which to `calibrate` first.

    Raises:
        UserError: if the model lacks a component, layer, head or band, if neither or both of
            calibration and tokens are given where means or gains are needed, for another model's or
            one of other weights, or for a prefix longer than the model's context. In a forward
            pass, for a prefix longer than the sequences, for keys and values from a cache that the
            ablation makes wrong, or for padding that looks like tokens or changes the removal.
            Inside another `ablated` on this model: two writers of the attention scores do not
            commute. Name all components in one Ablation. If another thread reads or ablates the
            model, and in the passes of other threads.

    Example:
        >>> from nope_probe import Ablation, ablated, load
        >>> model, tokens = load("nope-tiny").model, torch.tensor([[0, 5, 9]])
        >>> with ablated(model, Ablation(remove=["mask", "w_k"]), tokens=tokens):
        ...     logits = model(tokens)
    """
    ablation = Ablation.of(ablation)
    with ExitStack() as stack:
        model = model_of(model)
        blocks = ablations_of(model, ablation)
        if model in ABLATED:
            raise UserError("the model is ablated already: name all components in one Ablation")
        calibration = _calibration(model, ablation, calibration, tokens)
        hooks = [hook for block in blocks for hook in block.hooks(calibration)]
        for removal in removals_of(ablation.condition):
            hooks += removal.hooks_outside(model, ablation)
        positions = calibration.positions_for(ablation.condition)
        if positions is not None:
            writers = ablation.condition.writers or map(Writer, positions.outputs)
            hooks += without_position(model, writers, positions)
        stack.enter_context(_in_place(model, hooks, ActiveAblation(ablation, positions)))
        stack.enter_context(_whole_sequences(model, ablation))
        stack.enter_context(refused(model))
        edits = {of.layer.tap: Edits(rope=of.straightens, change=of.edit) for of in blocks}
        stack.enter_context(edited(edits))
        yield model


@contextmanager
def directly_ablated(
    model: HookedModel, writer: Writer, positions: WrittenPositions, reader: int
) -> Iterator[HookedModel]:
    """Take a component's position out of the input of one block alone, as in `ablated`.

    Args:
        model: a HookedTransformer or TransformerBridge.
        writer: the component, such as `L1H0`.
        positions: what components write.
        reader: the number of the block.
    """
    hooks = without_position(model, [writer], positions, reader)
    active = ActiveAblation(Ablation(remove=[writer.removal]), positions)
    with _in_place(model, hooks, active):
        yield model


@contextmanager
def _in_place(
    model: HookedModel, hooks: Iterable[PlacedHook], active: ActiveAblation
) -> Iterator[None]:
    """Run a model with the hooks of an ablation, which `ABLATED` names meanwhile."""
    with tapped(model), hooks_in_place(hooks):
        ABLATED[model] = active
        try:
            yield
        finally:
            del ABLATED[model]


class BlockAblation(Removal):
    """All removals from one block, for as long as their hooks are attached."""

    def __post_init__(self) -> None:
        block = self.model, self.layer, self.heads, self.ablation
        self.parts = [removal(*block) for removal in removals_of(self.ablation.condition)]
        self.straightens = next((part.straightens for part in self.parts if part.straightens), None)

    def hooks(self, calibration: Calibration) -> Iterator[PlacedHook]:
        for part in self.parts:
            yield from part.hooks(calibration)

    def edit(self, attention: Attention) -> Attention:
        """Return attention as every removal leaves it, the mask last: it needs the window's.

        Raises:
            UserError: if keys come from a cache, or for padding that the removal would count.
        """
        if not all(name.kind in BY_TOKEN for name in self.ablation.condition):
            check_sequences(attention, self.ablation.condition)
        for part in reversed(self.parts):
            attention = part.edit(attention)
        return attention


def ablations_of(model: HookedModel, ablation: Ablation) -> list[BlockAblation]:
    """Return the ablations of the blocks that an ablation acts on.

    Raises:
        UserError: for a component, layer, head or band that the model does not have or cannot lose,
            or a prefix longer than its context; the message lists what the model has.
    """
    validate_components(ablation.condition, components(model))
    if ablation.prefix is not None and ablation.prefix > model.cfg.n_ctx:
        raise UserError(
            f"a prefix of {ablation.prefix} positions, but the model's context is {model.cfg.n_ctx}"
        )
    heads, numbers = ablation.heads, ablation.layers
    if heads is not None:
        numbers = [index for index, named in heads.items() if len(named)]
    elif numbers is not None and "mlp" in ablation.condition:  # which other blocks may lose too
        others = {*mlp_outputs(model)} - {layer.index for layer in layers_of(model)}
        numbers = [number for number in numbers if number not in others]
    layers = [] if numbers is not None and not len(numbers) else numbered_layers(model, numbers)
    lost = [None if heads is None else _heads(layer, heads[layer.index]) for layer in layers]
    return [BlockAblation(model, *block, ablation) for block in zip(layers, lost, strict=True)]


def content_heads(model: HookedModel, ablations: Iterable[Ablation]) -> dict[int, list[int]]:
    """Return the heads that lose their content in some ablation, by layer, for `calibrate`."""
    heads: dict[int, set[int]] = {}
    for ablation in ablations:
        if "content" in ablation.condition:
            for block in ablations_of(model, ablation):
                lost = range(block.layer.n_heads) if block.heads is None else block.heads
                heads.setdefault(block.layer.index, set()).update(lost)
    return {layer: sorted(heads[layer]) for layer in sorted(heads)}


def _heads(layer: Layer, named: Sequence[int]) -> list[int] | None:
    """Return the named heads in order; None if these are all heads."""
    unknown = [head for head in named if head not in range(layer.n_heads)]
    if unknown:
        raise UserError(
            f"L{layer.index} has the query heads 0 to {layer.n_heads - 1}, not {unknown[0]}"
        )
    heads = sorted(set(named))
    return None if len(heads) == layer.n_heads else heads


def check_sequences(attention: Attention, remove: Condition) -> None:
    """Check that a pass is over whole sequences, unpadded where their length matters.

    Raises:
        UserError: if keys come from a cache, or for padding that the removal would count.
    """
    n_queries, n_keys = attention.mask.n_queries, attention.mask.n_keys
    if n_queries != n_keys:
        raise UserError(
            f"{n_keys} keys for {n_queries} queries: in this ablation a position depends on all "
            "others, and no cache of keys and values holds: pass whole sequences (use_cache=False)"
        )
    names = sorted(name for name in remove if name.of_length)
    if names and not attention.mask.real.all():
        raise UserError(
            f"removing {' and '.join(names)} depends on the length of the sequences, which "
            "padding changes: pass sequences of one length, without padding"
        )


def _calibration(
    model: HookedModel, ablation: Ablation, calibration: Calibration | None, tokens: Inputs | None
) -> Calibration:
    """Return the measurements of the intact model that an ablation needs, given or taken now."""
    if not ablation.needs_calibration:
        return Calibration()
    if calibration is not None and tokens is not None:
        raise UserError("expected a calibration or tokens to calibrate on, not both")
    seed, heads = ablation.calibration_seed, content_heads(model, [ablation])
    if tokens is not None:
        needs = ablation.needs_intact
        measured = calibrate(model, tokens, seed=seed, heads=heads) if needs else Calibration()
        _, inputs, fold_of = dealt(model, tokens)
        measure = partial(capture_written, model, inputs, fold_of=fold_of)
        return with_written(model, ablation, replace(measured, checksum=""), measure)
    measured = calibration or Calibration()
    if measured.checksum and measured.checksum != weights_checksum(model):
        raise UserError(
            "the calibration belongs to another model, or to other weights: pass "
            "calibrate(model, tokens) of this one"
        )
    for what, options in _not_measured(ablation, measured, heads):
        way = "" if options is None else f" or calibration=calibrate(model, tokens{options})"
        raise UserError(f"{what} has to be measured first: pass tokens=tokens{way}")
    return measured


def _not_measured(
    ablation: Ablation, calibration: Calibration, heads: Mapping[int, Sequence[int]]
) -> Iterator[tuple[str, str | None]]:
    """Yield what a calibration lacks, and the options of `calibrate` that measure it, if any do."""
    condition, seed = ablation.condition, ablation.calibration_seed
    for layer, named in heads.items():
        known = calibration.patterns.get(layer)
        if known is None or not {*named} <= {*known.heads.tolist()}:
            yield f"the mean attention of L{layer}", f", heads={heads}"
    if condition.of_written and calibration.positions_for(condition) is None:
        options = f", writers={[*condition.writers]}" if condition.writes_as_intact else None
        yield condition.of_written[0], options
    for name in condition.weights:
        if ablation.kind == "mean" and not calibration.means:
            yield f"the mean output of {name}", ""
        is_drawn = seed in (None, calibration.seed)
        if ablation.has_measured_gain and not (is_drawn and ablation.kind in calibration.gains):
            yield f"the gain 'output' of {name}", "" if seed is None else f", seed={seed}"


def with_written(
    model: HookedModel,
    ablation: Ablation,
    calibration: Calibration,
    measure: Callable[..., WrittenPositions],
) -> Calibration:
    """Return a calibration with the position that an ablation removes, as written without all else.

    Without the mask, or behind another writer, a component writes another position than in the
    intact model, and taking away that of the intact model would leave its opposite.

    Args:
        model: a HookedTransformer or TransformerBridge.
        ablation: the ablation.
        calibration: what was measured in the intact model.
        measure: returns the position, given the options of `capture_written`.
    """
    condition = ablation.condition
    if not condition.of_written or calibration.positions_for(condition):
        return calibration
    options: dict[str, object] = {"writers": condition.writers}
    if condition.of_blocks:
        seed = ablation.seed + 1 if WRITTEN_NULL in condition else None
        options = {"null_seed": seed, "kept_positions": ablation.kept_positions}
    with ablated(model, ablation.without(condition - {*condition.of_written}), calibration):
        positions = measure(**options)
    return replace(calibration, positions={condition.name: positions})


@contextmanager
def _whole_sequences(model: HookedModel, ablation: Ablation) -> Iterator[None]:
    """Generate without a cache, and refuse hidden padding, where the ablation makes them wrong."""
    removed = [name for name in ablation.condition.ordered if name.kind not in BY_TOKEN]
    seen = [name for name in removed if name == "mask" or name.of_length]
    shares = any(layer.shares_keys for layer in layers_of(model))

    @cache
    def warn() -> None:
        text = f"generating without a KV cache: it is wrong without {removed[0]}"
        warnings.warn(text, stacklevel=3)

    # transformers would leave out all queries but the last where blocks attend to others' keys.
    methods: tuple[tuple[Any, str, str, dict[str, int]], ...] = (
        (original_of(model), "generate", "use_cache", {"logits_to_keep": 0} if shares else {}),
        (model, "generate", "use_past_kv_cache", {}),
        (model, "generate_stream", "use_past_kv_cache", {}),
    )
    with ExitStack() as stack:
        for owner, name, switch, others in methods:
            if removed and hasattr(owner, name):
                method = _without_cache(getattr(owner, name), warn, switch, others)
                stack.enter_context(methods_replaced(owner, **{name: method}))
        if seen:
            forward = _without_unseen_padding(model, seen[0])
            stack.enter_context(methods_replaced(model, forward=forward))
        yield


def _without_cache(
    method: Callable[..., Any], warn: Callable[[], None], switch: str, others: Mapping[str, int]
) -> Callable[..., Any]:
    """Return a method that generates from whole sequences, and warns callers who want a cache.

    Args:
        method: generates text.
        warn: called where the caller wants a cache.
        switch: the name of the option that turns the cache off.
        others: further options.
    """
    parameters = signature(method)

    def generate(*args: object, **options: object) -> object:
        call = parameters.bind(*args, **options)
        is_named = switch in parameters.parameters
        taken = call.arguments if is_named else call.arguments.setdefault("kwargs", {})
        if taken.get(switch, True):
            warn()
        taken |= {switch: False, **others}
        return method(*call.args, **call.kwargs)

    return generate


def _without_unseen_padding(model: Any, removed: str) -> Callable[..., Any]:
    """Return a forward pass that refuses texts which TransformerLens pads without a mask.

    TransformerLens passes no mask for padding on the right: the causal mask hides it from tokens.
    """
    run = model.forward

    def forward(*args: object, **options: object) -> object:
        call = signature(run).bind(*args, **options).arguments
        texts = call["input"] if isinstance(call["input"], list) else []
        lengths = {model.to_tokens(text).shape[1] for text in texts}
        if len(lengths) > 1 and call.get("attention_mask") is None:
            raise UserError(
                f"texts of different lengths are padded, and without {removed} padding has an "
                "effect: pass texts one by one, or tokens with their attention_mask"
            )
        return run(*args, **options)

    return forward


def foreign_hooks(model: HookedModel) -> list[str]:
    """Return the names of modules with hooks that are neither this package's nor a library's."""

    def has_others(module: nn.Module) -> bool:
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if isinstance(module, HookPoint):
            return len(hooks) != sum(isinstance(of.user_hook, OfThread) for of in module.fwd_hooks)
        # Such as transformers leaves in place after a call that asked for attentions: they record
        # nothing until such a call comes again.
        return not all(is_of_a_library(hook) for hook in hooks)

    return [name for name, module in modules_of(model).items() if has_others(module)]
