"""The types of TransformerLens that this package uses: models, hook points and hooks.

HookedTransformer and TransformerBridge are a `HookedModel` as they are. This file does not import
TransformerLens, because that import takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@runtime_checkable
class Hook(Protocol):
    """A function of a hook point's tensor; a returned tensor replaces the hook point's."""

    def __call__(self, tensor: Tensor, /, *, hook: HookPoint) -> Tensor | None: ...


@runtime_checkable
class LensHandle(Protocol):
    """A hook point's handle of a hook."""

    @property
    def hook(self) -> RemovableHandle: ...


@runtime_checkable
class HookPoint(Protocol):
    """A named place in a model's forward pass, at which hooks read or replace the tensor."""

    @property
    def fwd_hooks(self) -> list[LensHandle]: ...

    def __call__(self, tensor: Tensor, /) -> Tensor:
        """Return a tensor as hooks change it."""

    def add_hook(self, hook: Hook, *, prepend: bool = False) -> object:
        """Add a hook after the present hooks, or before them."""


Attachment: TypeAlias = tuple[HookPoint, Hook]


@runtime_checkable
class ModelConfig(Protocol):
    """The fields that every model's configuration has, by TransformerLens's names."""

    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    n_ctx: int
    d_vocab: int
    attn_scale: float
    attention_dir: str
    normalization_type: str | None
    positional_embedding_type: str


@runtime_checkable
class HookedModel(Protocol):
    """A HookedTransformer or TransformerBridge.

    Only `hooks.layers` knows the differences between the two.
    """

    @property
    def cfg(self) -> ModelConfig: ...

    def __call__(self, inputs: Tensor, /, **options: object) -> Tensor:
        """Return the logits of a batch of tokens."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


Model = TypeVar("Model", bound=HookedModel)
