"""Residual streams kept between passes: a pass starts where it first differs from an earlier."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn

from nope_probe.hooks.layers.attached_hooks import methods_replaced, restores_places
from nope_probe.hooks.layers.model import Inputs, blocks_of
from nope_probe.hooks.layers.protocols import HookedModel, HookPoint
from nope_probe.hooks.removing.block_ablation import has_foreign_hooks, removed_before

GIGABYTE = 10**9


class ResidualCache:
    """Outputs of blocks, kept for later passes that are equal up to these blocks.

    Passes over the same batch have the same residual stream up to the first block where their
    removals differ. Outputs that do not fit are computed again, so results never depend on the
    cache's size. The weights must not change while a cache is in use.

    Attributes:
        max_bytes: bytes that may be kept, on the model's device; 0 keeps nothing.
        n_bytes: bytes that are kept.
        n_needed: layer passes (one block, one batch) without the cache.
        n_run: layer passes that were run.
    """

    def __init__(self, max_bytes: int = GIGABYTE) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self.n_needed = self.n_run = 0
        # The batch is kept beside a block's output, so that no other tensor gets its address.
        self._outputs: dict[Hashable, tuple[Inputs, Any]] = {}

    def clear(self) -> None:
        """Drop all residual streams: no later pass can begin with them."""
        self._outputs.clear()
        self.n_bytes = 0

    @contextmanager
    def shared(
        self, model: HookedModel, batch: Inputs, layers: Sequence[int], may_share: bool
    ) -> Iterator[None]:
        """Start the pass inside as late as possible, and keep the inputs of the layers it reads.

        Args:
            model: a HookedTransformer or TransformerBridge, ablated or not.
            batch: the tokens or vectors of the pass, a part of tensors that stay as they are.
            layers: the blocks that are read, in order; the pass ends in the last.
            may_share: whether the pass may skip the blocks before them, whose hooks then stay idle.
        """
        shares = may_share and self.max_bytes > 0
        start = self._deepest(model, batch, layers[0]) if shares else 0
        self.n_needed += layers[-1] + 1
        self.n_run += layers[-1] + 1 - start
        blocks = blocks_of(model)[: layers[-1]]
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        if start:
            _, output = self._outputs[_key(model, batch, start)]
            forwards = dict.fromkeys(blocks[:start], lambda *_, **__: output)
        for depth in layers if shares else ():
            if depth > start:
                forwards[blocks[depth - 1]] = self._keeping(model, batch, depth, blocks[depth - 1])
        with ExitStack() as stack:
            for block, forward in forwards.items():
                stack.enter_context(methods_replaced(block, forward=forward))
            yield

    def _deepest(self, model: HookedModel, batch: Inputs, layer: int) -> int:
        """Return the last block up to a layer whose input is kept; 0 without such a block."""
        kept = (d for d in range(layer, 0, -1) if _key(model, batch, d) in self._outputs)
        return next(kept, 0)

    def _keeping(
        self, model: HookedModel, batch: Inputs, depth: int, block: nn.Module
    ) -> Callable[..., Any]:
        """Return a block's forward pass, which keeps its output if there is room."""
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            residual = cast(Tensor, output[0] if isinstance(output, tuple) else output)
            size = residual.numel() * residual.element_size()
            key = _key(model, batch, depth)
            if key not in self._outputs and self.n_bytes + size <= self.max_bytes:
                self._outputs[key] = batch, output
                self.n_bytes += size
            return output

        return run


def may_skip_blocks(model: HookedModel) -> bool:
    """Return whether a model has no hooks, of any kind, but those of an ablation in effect."""
    modules = list(cast(nn.Module, model).modules())
    if has_foreign_hooks(model, [module for module in modules if isinstance(module, HookPoint)]):
        return False
    others = [module for module in modules if not isinstance(module, HookPoint)]
    hooks = [hook for module in others for hook in module._forward_pre_hooks.values()]
    hooks += [hook for module in others for hook in module._forward_hooks.values()]
    return all(restores_places(hook) or _is_of_the_libraries(hook) for hook in hooks)


def _is_of_the_libraries(hook: object) -> bool:
    # After a call that asked for attentions or hidden states, transformers leaves hooks in place.
    # They record nothing until such a call comes again.
    known = ("transformer_lens.", "transformers.utils.output_capturing")
    return str(getattr(hook, "__module__", "")).startswith(known)


def _key(model: HookedModel, batch: Inputs, depth: int) -> Hashable:
    return batch.data_ptr(), batch.shape, batch.dtype, depth, removed_before(model, depth)
