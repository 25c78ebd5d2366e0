"""Forward passes: for their hooks and readers, as evaluated, or begun at a later block.

What comes before a block is computed once for many ablations of later blocks. One short pass shows
the positional parts of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import Attention
from nope_probe.hooks.layers.base_layer import Layer, Traits, Vectors, fit_rotary
from nope_probe.hooks.layers.block_kinds import HookedLayer
from nope_probe.hooks.layers.hook_points import (
    HookedModel,
    HookPoint,
    PlacedHook,
    first,
    hooks_attached,
    hooks_detached,
    hooks_in_place,
    methods_replaced,
)
from nope_probe.hooks.layers.model import (
    Inputs,
    block_point,
    blocks_of,
    is_bridge,
    layers_of,
    modules_of,
    tapped,
)
from nope_probe.hooks.layers.tap import (
    Edits,
    RemovedPairs,
    StopForward,
    edited,
    positions_far_apart,
    taps_read,
)
from nope_probe.maps.positions import NO_ROTATION, Angles

Reading = TypeVar("Reading")
Key = TypeVar("Key", bound=Hashable)


@contextmanager
def attention_read(
    model: HookedModel, read: Callable[[Layer, Attention], Reading], *, n_layers: int | None = None
) -> Iterator[list[Reading]]:
    """Show the attention of each pass to a reader, and yield the list of the reader's results.

    A pass ends after the first `n_layers` that attend.

    Raises:
        UserError: naming a layer that has shown no attention.
    """
    readings, unread = list[Reading](), set[int]()

    def keep(layer: Layer, attention: Attention) -> None:
        unread.discard(layer.index)
        readings.append(read(layer, attention))

    with tapped(model) as layers:
        read_layers = layers[:n_layers]
        unread |= {layer.index for layer in read_layers}
        readers = [(layer.tap, partial(keep, layer)) for layer in read_layers]
        with taps_read(readers, [] if n_layers is None else [readers[-1][0]]):
            yield readings
    for layer in read_layers:
        if layer.index in unread:
            raise UserError(
                f"L{layer.index}, a {type(layer.attending).__name__}, does not attend through "
                "transformers' AttentionInterface: write a subclass with ALL_ATTENTION_FUNCTIONS"
            )


def read_attention(
    model: HookedModel,
    inputs: Inputs,
    read: Callable[[Layer, Attention], Reading],
    *,
    n_layers: int | None = None,
) -> list[Reading]:
    """Run a batch, and return what a reader makes of the attention of the first blocks."""
    with torch.inference_mode(), attention_read(model, read, n_layers=n_layers) as readings:
        run_forward(model, inputs)
    return readings


def window_hides(model: HookedModel, inputs: Inputs, n_layers: int) -> bool:
    """Return whether one of the first blocks hides an earlier key of the first sequence."""

    def hides(layer: Layer, attention: Attention) -> bool:
        return bool((~attention.visible_to_all).tril().any())

    return any(read_attention(model, inputs, hides, n_layers=n_layers))


def logits_of(
    model: HookedModel, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch logit_pos d_vocab"]:
    """Return the logits of a batch of tokens, on the model's device."""
    with evaluated(model):
        return model(tokens.to(next(model.parameters()).device))


@contextmanager
def evaluated(model: HookedModel | nn.Module) -> Iterator[None]:
    """Run a model on whole sequences: without dropout, with the mask and RoPE that they get.

    The model may be one of plain transformers. Modules in training mode are in evaluation mode for
    as long as the context lasts. Nothing is padded, whatever a HookedTransformer's tokenizer pads
    with, and where, and dynamic RoPE knows no sequence but a pass's.
    """
    modules = [*modules_of(model).values()]
    is_hooked = hasattr(model, "input_to_embed") and not is_bridge(model)  # a HookedTransformer
    tokenizer = getattr(model, "tokenizer", None) if is_hooked else None
    training = [module for module in modules if module.training]
    with ExitStack() as stack:
        for module in training:  # past a bridge's __setattr__
            vars(module)["training"] = False
            stack.callback(vars(module).update, training=True)
        for module in modules:
            if _ORIGINAL in vars(module):
                stack.enter_context(_as_first_pass(module))
        if tokenizer is not None:
            # On the left, TransformerLens takes leading pad tokens for padding, BOS too.
            stack.callback(setattr, tokenizer, "padding_side", tokenizer.padding_side)
            tokenizer.padding_side = "right"
        yield


# The longest sequence that dynamic RoPE has met, and the length for which it was made.
_LONGEST, _ORIGINAL = "max_seq_len_cached", "original_max_seq_len"


@contextmanager
def _as_first_pass(module: nn.Module) -> Iterator[None]:
    """Run a module of RoPE with the frequencies of a pass's sequences alone.

    transformers keeps those of the longest sequence so far on the module. It forgets them for
    sequences shorter than the original context, not for equally long ones. It
    writes those of LongRoPE into the buffer.
    """
    attributes, buffers = vars(module), module._buffers
    longest = {name: attributes[name] for name in attributes if name.endswith(_LONGEST)}
    before = {**buffers}
    buffers |= {name: x.clone() for name, x in before.items() if x is not None}
    for name in longest:
        prefix = name.removesuffix(_LONGEST)  # the type of a layer, or nothing
        if attributes[name] > attributes[_ORIGINAL]:
            buffers[f"{prefix}inv_freq"] = buffers[f"{prefix}original_inv_freq"]
            attributes[name] = attributes[_ORIGINAL]
    try:
        yield
    finally:
        attributes.update(longest)
        buffers.update(before)


def run_forward(model: HookedModel, inputs: Inputs) -> None:
    """Run a batch of tokens or vectors through a model's blocks, for its hooks alone.

    Vectors enter the first block as they are, on every kind of model. A bridge takes vectors as
    input embeddings, to which GPT-2 adds positions, so a hook writes them after that sum.
    (`start_at_layer` would do, but TransformerLens 3.9 has it for HookedTransformers only.)
    """
    inputs = inputs.to(next(model.parameters()).device)
    options: dict[str, int] = {} if is_bridge(model) else {"stop_at_layer": model.cfg.n_layers}
    entries: list[PlacedHook] = []
    if inputs.is_floating_point() and is_bridge(model):
        entries = [first(block_point(model, 0, "hook_resid_pre"), lambda tensor, hook: inputs)]
    elif inputs.is_floating_point():
        options["start_at_layer"] = 0
    # The first of all hooks, so that even an ablation's hooks read the vectors.
    with evaluated(model), suppress(StopForward), hooks_in_place(entries):
        model(inputs, **options)


def run_blocks(model: HookedModel, inputs: Inputs) -> Float[Tensor, "batch pos d_model"]:
    """Run a batch of tokens or vectors, and return the output of the last block.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.layers.passes import run_blocks
        >>> run_blocks(load("parameter-free", n_layers=2).model, torch.randn(3, 5, 64)).shape
        torch.Size([3, 5, 64])
    """
    point = block_point(model, -1, "hook_resid_post")
    return tensors_at(model, inputs, {"output": point})["output"]


def tensors_at(
    model: HookedModel, inputs: Inputs, points: Mapping[Key, HookPoint]
) -> dict[Key, Tensor]:
    """Return the tensors at some hook points, by key, in a pass that ends behind all of them."""
    kept: dict[Key, Tensor] = {}

    def keep(key: Key, tensor: Tensor, hook: HookPoint) -> None:
        kept[key] = tensor.detach()
        if len(kept) == len(points):
            raise StopForward

    hooks = [(point, partial(keep, key)) for key, point in points.items()]
    with torch.inference_mode(), hooks_attached(hooks):
        run_forward(model, inputs)
    return kept


TRAITS: WeakKeyDictionary[HookedModel, dict[int, Traits]] = WeakKeyDictionary()


def traits_of(model: HookedModel) -> dict[int, Traits]:
    """Return the traits of every block's attention, by the block's number.

    The traits come from one short pass, run once for each model, because a bridge's configuration
    may be wrong. The pass holds a sequence twice. The second copy gets the angles of position 0 in
    every block, and enters every block with the first copy's residual stream. Masks are made as if
    the two positions were further from each other than any window.
    """
    if model not in TRAITS:
        TRAITS[model] = _traits(model)
    return TRAITS[model]


def _traits(model: HookedModel) -> dict[int, Traits]:
    layers = layers_of(model)
    if not is_bridge(model):
        return {layer.index: layer.traits() for layer in layers if isinstance(layer, HookedLayer)}
    traits: dict[int, Traits] = {}

    def compare(layer: Layer, attention: Attention) -> None:
        is_hidden = not bool(attention.mask.rows(slice(1, 2))[0, 0, 0, 0])
        is_local = getattr(layer.attending, "attention_type", "") == "local"  # of GPT-Neo
        traits[layer.index] = Traits(
            rotary=fit_rotary(attention.angles, *attention.q[:, 1]),
            window=is_hidden or is_local,
            sinks=attention.sinks is not None,
            alibi=attention.bias is not None,
        )

    def copy_first(tensor: Tensor, hook: HookPoint) -> Tensor:
        return tensor[:1].expand(2, *tensor.shape[1:])

    entries = [(layer.point("hook_resid_pre"), copy_first) for layer in layers]
    straight = _SecondStraight(bands=(), rotary=NO_ROTATION)
    with (
        torch.inference_mode(),
        hooks_detached(model),
        hooks_attached(entries),
        positions_far_apart(),
        edited({layer.tap: Edits(rope=straight) for layer in layers}),
        attention_read(model, compare),
    ):
        # Token 0 may be padding, whose embedding is 0.
        logits_of(model, torch.tensor([[1, 2], [1, 2]]).clamp_max(model.cfg.d_vocab - 1))
    return traits


class _SecondStraight(RemovedPairs):
    """Gives the second sequence of a batch the angles of position 0."""

    def straightened(self, angles: Angles) -> Angles:
        def second(of_batch: Tensor) -> Tensor:
            one = of_batch[:1]
            return torch.cat((one, one[:, :1].expand_as(one)))

        return tree_map(second, angles)


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """The residual stream of sequences before some blocks, for passes that begin there.

    Attributes:
        residuals: [seq, pos, d_model] by the number of the block.
        n_outputs: how many values a block returns; 0 for the residual stream alone.
    """

    residuals: Mapping[int, Vectors]
    n_outputs: int

    @classmethod
    def joined(cls, batches: Sequence[Entry]) -> Entry:
        """Return the residual streams of several batches as those of one."""
        first, *_ = batches
        numbers = first.residuals
        joined = {n: torch.cat([batch.residuals[n] for batch in batches]) for n in numbers}
        return cls(residuals=joined, n_outputs=first.n_outputs)


def run_to_enter(
    model: HookedModel, tokens: Int[Tensor, "batch pos"], numbers: Iterable[int]
) -> Entry:
    """Run a batch, and return what `entered` needs to begin passes at some blocks.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: the batch.
        numbers: of the blocks; at block 0, a pass begins as ever. A later block that attends to the
            keys of an earlier one is left for the latest block that all keys come after.
    """
    latest = latest_entry(model)
    later = {min(number, latest) for number in numbers} - {0}
    points = {number: block_point(model, number, "hook_resid_pre") for number in later}
    residuals = tensors_at(model, tokens, points) if points else {}
    return Entry(residuals=residuals, n_outputs=n_outputs_of(model, tokens[:1]))


def latest_entry(model: HookedModel) -> int:
    """Return the latest block at which a pass can begin: that which all shared keys come after."""
    sharing = [layer.index for layer in layers_of(model) if layer.shares_keys]
    return min(sharing, default=len(blocks_of(model)))


def n_outputs_of(model: HookedModel, inputs: Inputs) -> int:
    """Return how many values the first block of a model returns; 0 for a single tensor."""
    counts = list[int]()

    def count(module: nn.Module, args: object, output: object) -> None:
        counts.append(len(output) if isinstance(output, tuple) else 0)
        raise StopForward

    with blocks_of(model)[0].register_forward_hook(count):
        run_forward(model, inputs)
    return counts[0]


@contextmanager
def entered(
    model: HookedModel,
    entry: Entry,
    number: int,
    rows: Callable[[], Tensor | slice] = lambda: slice(None),
) -> Iterator[None]:
    """Begin passes at a block: earlier blocks do not run, and their hooks see nothing.

    Args:
        model: the model, with no other change than in this block and later ones.
        entry: of the same sequences.
        number: of the block. A pass begins at the latest block up to it whose residual stream was
            kept.
        rows: returns the sequences of the batch that is run; by default all of the entry.
    """
    number = max((kept for kept in entry.residuals if kept <= number), default=0)

    def skip(*_: object, **__: object) -> object:
        residual = entry.residuals[number][rows()]
        return (residual, *[None] * (entry.n_outputs - 1)) if entry.n_outputs else residual

    with ExitStack() as stack:
        for block in blocks_of(model)[:number]:
            stack.enter_context(methods_replaced(block, forward=skip))
        yield


@contextmanager
def logits_from(model: HookedModel, position: int) -> Iterator[None]:
    """Compute logits from a position on: the unembedding is a quarter of a small model's work."""

    def cut(
        module: nn.Module, inputs: tuple[Float[Tensor, "batch pos d_model"]]
    ) -> tuple[Float[Tensor, "batch later d_model"]]:
        return (inputs[0][:, position:],)

    with modules_of(model)["unembed"].register_forward_pre_hook(cut):
        yield
