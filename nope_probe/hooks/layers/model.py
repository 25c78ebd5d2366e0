"""A model as a whole: its blocks, their inputs, and a forward pass for its hooks.

This file holds the differences between HookedTransformer and TransformerBridge as models.
`block_kinds.py` holds the differences between their blocks, `linear_maps.py` those of the modules
in a block. No other file asks for a model's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import signature
from threading import Lock
from typing import Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.errors import UserError, validate_layer_numbers, validate_unicode
from nope_probe.files import JsonObject
from nope_probe.hooks.layers.attention import Attention, HeadVectors
from nope_probe.hooks.layers.base_layer import Layer, Traits, find_point
from nope_probe.hooks.layers.block_kinds import BridgeLayer, HookedLayer
from nope_probe.hooks.layers.hook_points import (
    INSTALLING,
    HookedModel,
    HookGroup,
    HookPoint,
    OfThread,
    first,
    hooks_attached,
    hooks_detached,
    hooks_in_place,
    replaced_in_this_thread,
)
from nope_probe.hooks.layers.tap import (
    Edits,
    StopForward,
    current,
    edited,
    positions_far_apart,
    taps_read,
)
from nope_probe.maps.positions import Angles

Reading = TypeVar("Reading")
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
    """Return a model's blocks that attend: all of them, except in hybrid models.

    Raises:
        UserError: for anything but a HookedTransformer or TransformerBridge.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None or not hasattr(model, "cfg"):
        hint = "; load it first: load(name)" if isinstance(model, str) else ""
        given = type(model).__name__
        raise UserError(f"expected a HookedTransformer or TransformerBridge, got {given}{hint}")
    kind = BridgeLayer if is_bridge(model) else HookedLayer
    return [
        kind(block, index, model.cfg)
        for index, block in enumerate(blocks)
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


@contextmanager
def tapped(model: HookedModel) -> Iterator[list[Layer]]:
    """Let all blocks attend through their taps, in all threads, and yield the blocks."""
    layers = layers_of(model)
    _keep_positions_by_thread(model)
    with ExitStack() as stack:
        for layer in layers:
            layer.attach_tap()
            stack.callback(layer.detach_tap)
        yield layers


def _keep_positions_by_thread(model: HookedModel) -> None:
    """Let threads embed the positions of batches of unequal sizes at once.

    TransformerLens leaves the number of a pass's sequences on the module of position embeddings.
    """
    positions = cast(Any, model)._modules.get("pos_embed")
    kind = type(positions)
    if kind.__name__ == "PosEmbedBridge" and not hasattr(kind, _N_SEQS):
        setattr(kind, _N_SEQS, property(lambda _: current.n_seqs, _set_n_seqs))


_N_SEQS = "_current_batch_size"


def _set_n_seqs(module: nn.Module, n_seqs: int | None) -> None:
    current.n_seqs = n_seqs


@contextmanager
def attention_read(
    model: HookedModel, read: Callable[[Layer, Attention], Reading], *, n_layers: int | None = None
) -> Iterator[list[Reading]]:
    """Show the attention of each pass to a reader, and yield the list of the reader's results.

    A pass ends after the first `n_layers` that attend.
    """
    readings: list[Reading] = []

    def keep(layer: Layer, attention: Attention) -> None:
        readings.append(read(layer, attention))

    with tapped(model) as layers:
        readers = [(layer.tap, partial(keep, layer)) for layer in layers[:n_layers]]
        with taps_read(readers, [] if n_layers is None else [readers[-1][0]]):
            yield readings


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


def modules_of(model: HookedModel) -> dict[str, nn.Module]:
    """Return all modules of a model by their names, each once.

    The modules of a bridge leave out a few of transformers' model, such as GPT-2's first dropout.
    """
    hooked: Any = model
    known: set[nn.Module] = set()
    modules = dict(hooked.named_modules(known))
    if is_bridge(model):
        modules |= hooked.original_model.named_modules(known, "original_model")
    return modules


def is_bridge(model: HookedModel) -> bool:
    """Return whether a model is a TransformerBridge, not a HookedTransformer."""
    return hasattr(model, "original_model")


def begins_alike(inputs: Inputs) -> bool:
    """Return whether all sequences, two or more, begin with the same token, such as BOS.

    Example:
        >>> begins_alike(torch.tensor([[1, 5, 2], [1, 3, 3]])), begins_alike(torch.zeros(2, 3, 4))
        (True, False)
    """
    if inputs.is_floating_point() or len(inputs) < 2:
        return False
    return bool((inputs[:, 0] == inputs[0, 0]).all())


def kept_positions_of(inputs: Inputs) -> int:
    """Return how many first positions keep what is written there when a writer's position goes.

    It is 1 where all sequences begin with the same token: what is written there marks the token,
    and no position.
    """
    return int(begins_alike(inputs))


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
        UserError: for a model that is not TransformerLens's, or for inputs of another kind, or for
            sequences of unequal lengths, no token, tokens that the model does not have, more
            positions than it has, or vectors of another size.

    Example:
        >>> from nope_probe import load
        >>> as_inputs(load("rope-tiny").model, "def f(x):").shape
        torch.Size([1, 6])
    """
    layers_of(model)  # raises for what is no model
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
    named = (
        {"the text": given}
        if isinstance(given, str)
        else {f"texts[{number}]": row for number, row in enumerate(given)}
    )
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


def logits_of(
    model: HookedModel, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch logit_pos d_vocab"]:
    """Return the logits of a batch of tokens, on the model's device."""
    with as_evaluated(model):
        return model(tokens.to(next(model.parameters()).device))


@contextmanager
def as_evaluated(model: HookedModel) -> Iterator[None]:
    """Run a model on whole sequences: without dropout, with the mask and RoPE that they get.

    Modules in training mode are in evaluation mode for as long as the context lasts, in all
    threads. In this thread, nothing is padded, whatever a HookedTransformer's tokenizer pads with,
    and where, and dynamic RoPE knows no sequence but a pass's.
    """
    with evaluated(modules_of(model).values()), _unpadded(model):
        yield


@contextmanager
def _unpadded(model: HookedModel) -> Iterator[None]:
    """Run a HookedTransformer on whole sequences, though its tokenizer pads on the left.

    TransformerLens takes every leading pad token for padding then, BOS too where both are the same.
    """
    hooked: Any = model
    tokenizer = None if is_bridge(model) else getattr(hooked, "tokenizer", None)
    if tokenizer is None or tokenizer.padding_side != "left":
        yield
        return

    def embedding_all(embed: Callable[..., Any]) -> Callable[..., Any]:
        def embed_all(
            tokens: Int[Tensor, "batch pos"],
            attention_mask: Tensor | None = None,
            **options: object,
        ) -> tuple[Any, ...]:
            seen = torch.ones_like(tokens) if attention_mask is None else attention_mask
            *embedded, _ = embed(tokens, attention_mask=seen, **options)
            return *embedded, attention_mask

        return embed_all

    with replaced_in_this_thread(model, "input_to_embed", embedding_all):
        yield


_EVALUATED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by how many contexts


@contextmanager
def evaluated(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules without dropout, and RoPE in this thread as if no pass had been before."""
    modules = [*modules]
    with INSTALLING:
        training = [module for module in modules if module.training or module in _EVALUATED]
        for module in training:
            _EVALUATED[module] = _EVALUATED.get(module, 0) + 1
            vars(module)["training"] = False  # past a bridge's __setattr__
    try:
        with ExitStack() as stack:
            for module in modules:
                if _ORIGINAL in vars(module):
                    make = partial(_as_first_pass, module)
                    stack.enter_context(replaced_in_this_thread(module, "forward", make))
            yield
    finally:
        with INSTALLING:
            for module in training:
                _EVALUATED[module] -= 1
                if not _EVALUATED[module]:  # no other thread reads the model
                    del _EVALUATED[module]
                    vars(module)["training"] = True


# The longest sequence that dynamic RoPE has met, and the length for which it was made.
_LONGEST, _ORIGINAL = "max_seq_len_cached", "original_max_seq_len"
_ROTATING = Lock()  # for the moment in which a module has the frequencies of one pass


def _as_first_pass(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass of RoPE with the frequencies of its sequences alone.

    transformers keeps those of the longest sequence so far on the module. It forgets them for
    sequences shorter than the original context, not for equally long ones. It
    writes those of LongRoPE into the buffer.
    """

    def forward(*args: object, **options: object) -> object:
        with _ROTATING:
            attributes, buffers = vars(module), module._buffers
            longest = {name: attributes[name] for name in [*attributes] if name.endswith(_LONGEST)}
            before = {**buffers}
            buffers |= {name: x.clone() for name, x in before.items() if x is not None}
            for name in longest:
                prefix = name.removesuffix(_LONGEST)  # the type of a layer, or nothing
                if attributes[name] > attributes[_ORIGINAL]:
                    buffers[f"{prefix}inv_freq"] = buffers[f"{prefix}original_inv_freq"]
                    attributes[name] = attributes[_ORIGINAL]
            try:
                return run(*args, **options)
            finally:
                attributes.update(longest)
                buffers.update(before)

    return forward


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


def position_module(model: HookedModel) -> nn.Module:
    """Return the module whose forward pass makes learned position embeddings."""
    hooked: Any = model
    return hooked.pos_embed


def hugging_face_config(model: HookedModel | nn.Module) -> JsonObject | None:
    """Return the Hugging Face configuration of a bridge's model; a HookedTransformer has none."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    return None if config is None else config.to_dict()


def takes_position_ids(model: HookedModel) -> bool:
    """Return whether a forward pass takes the position of each token."""
    original = getattr(model, "original_model", None)
    return original is not None and "position_ids" in signature(original.forward).parameters


def run_forward(model: HookedModel, inputs: Inputs) -> None:
    """Run a batch of tokens or vectors through a model's blocks, for its hooks alone.

    Vectors enter the first block as they are, on every kind of model. A bridge takes vectors as
    input embeddings, to which GPT-2 adds positions, so a hook writes them after that sum.
    (`start_at_layer` would do, but TransformerLens 3.9 has it for HookedTransformers only.)
    """
    inputs = inputs.to(next(model.parameters()).device)
    options: dict[str, int] = {} if is_bridge(model) else {"stop_at_layer": model.cfg.n_layers}
    entries: list[HookGroup] = []
    if inputs.is_floating_point() and is_bridge(model):
        here = OfThread(lambda tensor, hook: inputs)
        enter = first(block_point(model, 0, "hook_resid_pre"), here)
        entries.append(HookGroup(blocks_of(model)[0], [enter]))
    elif inputs.is_floating_point():
        options["start_at_layer"] = 0
    # The first of all hooks, so that even an ablation's hooks read the vectors.
    with as_evaluated(model), suppress(StopForward), hooks_in_place(entries):
        model(inputs, **options)


def run_blocks(model: HookedModel, inputs: Inputs) -> Float[Tensor, "batch pos d_model"]:
    """Run a batch of tokens or vectors, and return the output of the last block.

    Example:
        >>> from nope_probe import load
        >>> from nope_probe.hooks.layers.model import run_blocks
        >>> run_blocks(load("parameter-free", n_layers=2).model, torch.randn(3, 5, 64)).shape
        torch.Size([3, 5, 64])
    """
    outputs: list[Tensor] = []

    def keep(tensor: Tensor, hook: HookPoint) -> None:
        outputs.append(tensor)
        raise StopForward

    with hooks_attached([(block_point(model, -1, "hook_resid_post"), keep)]):
        run_forward(model, inputs)
    return outputs[0]


def block_point(model: HookedModel, number: int, name: str) -> HookPoint:
    """Return a hook point of any block, attending or not."""
    point = find_point(blocks_of(model)[number], name)
    assert point is not None
    return point


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
        traits[layer.index] = Traits.of(attention, layer.attending)

    def copy_first(tensor: Tensor, hook: HookPoint) -> Tensor:
        return tensor[:1].expand(2, *tensor.shape[1:])

    entries = [(layer.point("hook_resid_pre"), copy_first) for layer in layers]
    with (
        torch.inference_mode(),
        hooks_detached(model),
        hooks_attached(entries),
        positions_far_apart(),
        attention_read(model, compare, n_layers=len(layers)),
        edited({layer.tap: Edits(rope=_SecondStraight()) for layer in layers}),
    ):
        # Token 0 may be padding, whose embedding is 0.
        run_forward(model, torch.tensor([[1, 2], [1, 2]]).clamp_max(model.cfg.d_vocab - 1))
    return traits


class _SecondStraight:
    """Gives the second sequence of a batch the angles of position 0."""

    def turned_back(self, x: HeadVectors, angles: Angles) -> HeadVectors:
        raise NotImplementedError  # a HookedTransformer's configuration suffices

    def straightened(self, angles: Angles) -> Angles:
        if not isinstance(angles, Tensor):
            cos, sin = angles
            return self._second(cos), self._second(sin)
        return self._second(angles)

    @staticmethod
    def _second(angles: Tensor) -> Tensor:
        if angles.dtype == torch.long:  # positions
            return torch.cat((angles[:1], torch.zeros_like(angles[:1])))
        one = angles[..., :1, :, :]
        return torch.cat((one, one[..., :1, :].expand_as(one)), -3)
