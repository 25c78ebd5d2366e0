"""Stream token sequences through a whole model for the loss of every token; no logits are kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from nope_probe.hooks.accumulators import Accumulator
from nope_probe.hooks.protocols import Attachment, HookedModel
from nope_probe.hooks.streaming import StreamCheckpoint, stream


def token_losses(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch target"]:
    """Return the loss of every token but the first, in nats: -log p(token | the tokens before it).

    Column i is the loss of token i + 1, as the logits at position i predict it. Logits are taken to
    float32 one sequence at a time, so that no second tensor of the batch's size is made.
    """
    tokens = tokens.to(logits.device)
    rows = [
        cross_entropy(each[:-1].float(), ids[1:], reduction="none")
        for each, ids in zip(logits, tokens, strict=True)
    ]
    return torch.stack(rows)


def capture_losses(
    model: HookedModel,
    tokens: Int[Tensor, "seq pos"],
    *,
    batch_size: int = 32,
    checkpoint: StreamCheckpoint | None = None,
) -> Float[Tensor, "seq target"]:
    """Return the loss of every token but the first of each sequence, in nats, float64 on the CPU.

    Args:
        model: a HookedTransformer or TransformerBridge, ablated or not.
        tokens: sequences of equal length.
        batch_size: sequences per forward pass; the logits of one batch are held.
        checkpoint: deals out batches to processes and saves what is done; see `stream`.

    Example:
        >>> from nope_probe import capture_losses, load, sequences
        >>> loaded = load("rope-tiny")
        >>> tokens = sequences(tokenizer=loaded.tokenizer, n_seqs=3, seq_len=16).inputs
        >>> capture_losses(loaded.model, tokens).shape
        torch.Size([3, 15])
    """
    losses = LossAccumulator(len(tokens))
    stream(
        model,
        tokens,
        [losses],
        fold_of=torch.arange(len(tokens)),
        end=None,
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    return losses.totals["losses"].cpu()


class LossAccumulator(Accumulator):
    """Keeps the loss of every token: each sequence is a fold of its own."""

    reads = "nothing"

    def hooks(self) -> Iterator[Attachment]:
        yield from ()

    def reset(self) -> None:
        """Do nothing: losses are added as they are read."""

    def read_logits(
        self, logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"]
    ) -> None:
        """Add the losses of a batch."""
        if self.already_counted:
            return
        losses = token_losses(logits, tokens)
        self.add(losses=list(zip(self.fold_of.tolist(), losses, strict=True)))
