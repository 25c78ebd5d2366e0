"""From a Hugging Face model to its TransformerBridge, or to one line that says why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def bridge(
    source: str,
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: str | None,
) -> TransformerBridge:
    """Bridge a model, raw weights, of an architecture that TransformerLens may not know in full.

    Args:
        source: what the model was loaded from.
        hf: the model, which is rewired in place.
        tokenizer: its tokenizer.
        dtype: its dtype.
        device: the device it is on; None if its parts were placed on several.

    Raises:
        UserError: if TransformerLens cannot read it, or it has a block without attention.
    """
    from transformer_lens.model_bridge import TransformerBridge

    try:
        model = TransformerBridge.boot_transformers(
            source, hf_model=hf, tokenizer=tokenizer, dtype=dtype, device=device
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"TransformerLens cannot read {source}, a {type(hf).__name__}: {reason}"
        ) from error
    _refuse_blocks_without_attention(source, model)
    return model


def _refuse_blocks_without_attention(source: str, model: Any) -> None:
    for number, block in enumerate(model.blocks, 1):
        if not hasattr(block, "attn"):
            raise UserError(
                f"{source} has no attention in layer {number} (a state-space, recurrent or linear "
                "one): it has no scores to map"
            )
