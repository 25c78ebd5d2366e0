"""A model as a whole: its blocks, its modules, and the inputs that it takes.

This file and `passes.py` hold the differences between HookedTransformer and TransformerBridge as
models. `block_kinds.py` holds the differences between their blocks, `linear_maps.py` those of the
modules in a block. No other file asks for a model's kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from threading import get_ident
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.errors import UserError, validate_layer_numbers, validate_unicode
from nope_probe.files import JsonObject
from nope_probe.hooks.layers.base_layer import Layer, find_point
from nope_probe.hooks.layers.block_kinds import BridgeLayer, HookedLayer
from nope_probe.hooks.layers.hook_points import HookedModel, HookPoint

Inputs: TypeAlias = Int[Tensor, "seq pos"] | Float[Tensor, "seq pos d_model"]


@runtime_checkable
class HasInputs(Protocol):
    """Sequences and their documents, as `nope_probe.sequences` returns them."""

    @property
    def inputs(self) -> Inputs: ...
    @property
    def documents(self) -> Int[Tensor, " seq"] | None: ...


OneSequence: TypeAlias = Int[Tensor, " pos"] | Float[Tensor, "pos d_model"]
# A text, texts of equally many tokens, lists of token ids, or tensors.
Given: TypeAlias = Inputs | OneSequence | HasInputs | str | Sequence[Any]


def layers_of(model: HookedModel) -> list[Layer]:
    """Return a model's blocks that attend: all of them, except in hybrid models."""
    kind = BridgeLayer if is_bridge(model) else HookedLayer
    return [
        kind(block, index, model.cfg)
        for index, block in enumerate(blocks_of(model))
        if find_point(block, "attn.hook_attn_scores") is not None
    ]


def blocks_of(model: HookedModel) -> list[nn.Module]:
    """Return all of a model's blocks, including blocks that do not attend."""
    hooked: Any = model
    return list(hooked.blocks)


def numbered_layers(model: HookedModel, numbers: Iterable[int] | None = None) -> list[Layer]:
    """Return the layers with the given numbers; by default all layers that attend.

    Raises:
        UserError: for a block that does not exist, or does not attend, or for what are no numbers
            of layers.
    """
    if numbers is not None:
        numbers = [*numbers] if isinstance(numbers, Iterator) else numbers
        validate_layer_numbers(numbers)
    layers = {layer.index: layer for layer in layers_of(model)}
    chosen = list(layers if numbers is None else numbers)
    unknown = [number for number in chosen if number not in layers]
    if unknown and unknown[0] in range(len(blocks_of(model))):
        raise UserError(f"L{unknown[0]} does not attend; the layers that do are {[*layers]}")
    if unknown or not chosen:
        raise UserError(f"expected layers from 0 to {len(blocks_of(model)) - 1}, got {chosen}")
    return [layers[number] for number in chosen]


ANOTHER_THREAD = (
    "another thread reads or ablates this model, and a model is used by one thread at a time: "
    "enter `ablated` in the thread that runs the model, or share a lock between the threads"
)
# The thread of each context that keeps a model.
_KEEPING: WeakKeyDictionary[HookedModel, list[int]] = WeakKeyDictionary()


@contextmanager
def kept_to_this_thread(model: HookedModel) -> Iterator[None]:
    """Keep a model to this thread for as long as the context lasts.

    Raises:
        UserError: if another thread keeps it; in a pass of another thread, as it begins or at its
            next block.
    """
    thread, threads = get_ident(), _KEEPING.setdefault(model, [])

    def refuse_others(*_: object) -> None:
        if get_ident() != thread:
            raise UserError(ANOTHER_THREAD)

    with ExitStack() as stack:
        threads.append(thread)
        stack.callback(threads.remove, thread)
        if {*threads} != {thread}:
            raise UserError(ANOTHER_THREAD)
        for module in (original_of(model) or cast(nn.Module, model), *blocks_of(model)):
            stack.enter_context(module.register_forward_pre_hook(refuse_others, prepend=True))
        yield


@contextmanager
def tapped(model: HookedModel) -> Iterator[list[Layer]]:
    """Let all blocks attend through their taps, in this thread alone, and yield the blocks."""
    layers = layers_of(model)
    with kept_to_this_thread(model), ExitStack() as stack:
        for layer in layers:
            if not layer.is_attached:
                layer.attach_tap()
                stack.callback(layer.detach_tap)
        yield layers


def modules_of(model: HookedModel | nn.Module) -> dict[str, nn.Module]:
    """Return all modules of a model, hooked or plain, by their names, each once.

    The modules of a bridge leave out a few of transformers' model, such as GPT-2's first dropout.
    """
    hooked: Any = model
    known: set[nn.Module] = set()
    modules = dict(hooked.named_modules(known))
    if is_bridge(model):
        modules |= hooked.original_model.named_modules(known, "original_model")
    return modules


def is_bridge(model: HookedModel | nn.Module) -> bool:
    """Return whether a model is a TransformerBridge, not a HookedTransformer."""
    return hasattr(model, "original_model")


def original_of(model: HookedModel | nn.Module) -> nn.Module | None:
    """Return the transformers model in a bridge; a HookedTransformer has none."""
    return getattr(model, "original_model", None)


def begins_alike(inputs: Inputs) -> bool:
    """Return whether all sequences, two or more, begin with the same token, such as BOS.

    Example:
        >>> begins_alike(torch.tensor([[1, 5, 2], [1, 3, 3]])), begins_alike(torch.zeros(2, 3, 4))
        (True, False)
    """
    if inputs.is_floating_point() or len(inputs) < 2:
        return False
    return bool((inputs[:, 0] == inputs[0, 0]).all())


def skip_keys_of(inputs: Inputs) -> int:
    """Return how many keys count as first in patterns: 1 for tokens, 0 for vectors.

    Under a causal mask the first position sees itself alone, and models make it a sink, whether or
    not it holds a BOS token. The positions of random vectors differ in nothing but the mask.
    """
    return int(not inputs.is_floating_point())


def as_inputs(model: HookedModel, given: object) -> Inputs:
    """Return the inputs that a caller gave to a public function, as a tensor of sequences.

    A text becomes the tokens of `model.tokenizer`, with BOS if the tokenizer adds it. A single
    sequence becomes a batch of 1.

    Raises:
        UserError: for inputs of another kind, sequences of unequal lengths, no token, tokens that
            the model does not have, more positions than it has, or vectors of another size.

    Example:
        >>> from nope_probe import load
        >>> as_inputs(load("rope-tiny").model, "def f(x):").shape
        torch.Size([1, 6])
    """
    given = given.inputs if isinstance(given, HasInputs) else given
    inputs = given if isinstance(given, Tensor) else _stacked(model, given)
    if inputs.is_meta:
        raise UserError("expected tokens or vectors, got a meta tensor, which holds no numbers")
    if inputs.dim() == 1 + inputs.is_floating_point():
        inputs = inputs[None]
    if inputs.dim() != 2 + inputs.is_floating_point() or inputs.dtype == torch.bool:
        raise UserError(
            "expected tokens [seq, pos] or vectors [seq, pos, d_model], got "
            f"{str(inputs.dtype).removeprefix('torch.')} {list(inputs.shape)}"
        )
    if not inputs.numel():
        raise UserError(f"expected 1 sequence of 1 token or more, got {list(inputs.shape)}")
    if not inputs.is_floating_point():
        inputs = inputs.long()
    validate_inputs(model, inputs)
    return inputs


def documents_of(
    given: object, documents: Int[Tensor, " seq"] | None
) -> Int[Tensor, " seq"] | None:
    """Return the given documents, or by default the documents of the `Sequences`.

    Raises:
        UserError: for documents that are no tensor.
    """
    if documents is None:
        return given.documents if isinstance(given, HasInputs) else None
    if not isinstance(documents, Tensor):
        raise UserError(f"expected documents as a tensor, got {documents!r:.60}")
    return documents


def _stacked(model: HookedModel, given: object) -> Tensor:
    """Return the tokens of a text, of texts or of lists of ids, whose lengths are equal."""
    if not isinstance(given, Sequence) or not given:
        raise UserError(f"expected texts, tokens or vectors, got {given!r:.60}")
    texts = {"the text": given} if isinstance(given, str) else {}
    named = texts or {f"texts[{number}]": row for number, row in enumerate(given)}
    rows = [
        _tokens_of(model, where, row) if isinstance(row, str) else _as_tensor(row)
        for where, row in named.items()
    ]
    lengths = [row.shape[0] for row in rows if row.dim()]
    if len({*lengths}) > 1:
        raise UserError(
            f"the sequences have {min(lengths)} to {max(lengths)} tokens, and a batch needs equal "
            "lengths: sequences(texts, tokenizer=..., seq_len=...) cuts them"
        )
    return torch.stack(rows)


def _as_tensor(row: object) -> Tensor:
    try:
        return torch.as_tensor(row)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"expected texts, tokens or vectors, got {row!r:.60}") from error


def _tokens_of(model: HookedModel, where: str, text: str) -> Int[Tensor, " pos"]:
    hooked: Any = model
    validate_unicode(where, text)
    if getattr(hooked, "tokenizer", None) is None:
        raise UserError(
            "the model has no tokenizer, so it takes tokens or vectors, and no text; "
            "load(model, tokenizer) gives it one"
        )
    return torch.tensor(hooked.tokenizer(text, verbose=False)["input_ids"])


def validate_inputs(model: HookedModel, inputs: Inputs) -> None:
    """Check that a model has the inputs' tokens (PyTorch reads -1 as the last) and positions.

    Raises:
        UserError: naming the token and the vocabulary, or both lengths or sizes.
    """
    hooked: Any = model
    n_pos, n_ctx = inputs.shape[1], positions_of(model)
    if n_ctx is not None and n_pos > n_ctx:
        raise UserError(f"the sequences have {n_pos} tokens, and the model's context is {n_ctx}")
    if inputs.is_floating_point():
        if inputs.shape[2] != model.cfg.d_model:
            raise UserError(
                f"the vectors have {inputs.shape[2]} dimensions, and the model's d_model is "
                f"{model.cfg.d_model}"
            )
        return
    low, high, n_tokens = int(inputs.min()), int(inputs.max()), len(hooked.embed.W_E)
    if low < 0 or high >= n_tokens:
        wrong = low if low < 0 else high
        raise UserError(f"token {wrong}: the model's tokens are from 0 to {n_tokens - 1}")


def positions_of(model: HookedModel) -> int | None:
    """Return how many positions a model has; None for a bridge without learned positions.

    A HookedTransformer has a table of its context's length for every kind of position.
    """
    hooked: Any = model
    has_learned = "pos_embed" in hooked._modules and [*hooked.pos_embed.parameters()]
    return None if is_bridge(model) and not has_learned else int(model.cfg.n_ctx)


def position_point(model: HookedModel) -> HookPoint | None:
    """Return the hook point of learned position embeddings; None if a model lacks them.

    A HookedTransformer with position embeddings of 0 counts as a model without them, because
    TransformerLens has no position embedding type "none".
    """
    hooked: Any = model
    if is_bridge(model):
        return hooked.pos_embed.hook_out if "pos_embed" in hooked._modules else None
    learned = model.cfg.positional_embedding_type == "standard"
    return hooked.hook_pos_embed if learned and bool(hooked.pos_embed.W_pos.any()) else None


def hugging_face_config(model: HookedModel | nn.Module) -> JsonObject | None:
    """Return the Hugging Face configuration of a bridge's model; a HookedTransformer has none."""
    config = getattr(original_of(model), "config", None)
    return None if config is None else config.to_dict()


def takes_position_ids(model: HookedModel) -> bool:
    """Return whether a forward pass takes the position of each token."""
    original = original_of(model)
    return original is not None and "position_ids" in signature(original.forward).parameters


def block_point(model: HookedModel, number: int, name: str) -> HookPoint:
    """Return a hook point of any block, attending or not."""
    point = find_point(blocks_of(model)[number], name)
    assert point is not None
    return point
