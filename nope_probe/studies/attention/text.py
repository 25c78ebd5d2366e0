"""A text that the user gives: its tokens, and the pieces that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nope_probe.data.sequences import Sequences
from nope_probe.data.tokenizing import TextReader, first_token
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import validate_inputs
from nope_probe.models.info import LoadedModel
from nope_probe.run.manifest import ShownText
from nope_probe.studies.attention.settings import ALONE, TEXT_TOKENS, Settings


@dataclass(frozen=True, kw_only=True, eq=False)
class RunText:
    """The text of a run.

    Attributes:
        tokens: its tokens, BOS included.
        bos: whether they begin with a BOS token that is no part of the text.
        notes: what was done about marks and special tokens in the text; see `TextReader`.
    """

    tokens: Int[Tensor, "1 pos"]
    bos: bool
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.tokens.shape[1]

    @property
    def alone(self) -> Sequences:
        """The text as the only sequence of a run."""
        return Sequences(inputs=self.tokens, name=ALONE, bos=self.bos)


def text_of(settings: Settings, loaded: LoadedModel) -> RunText | None:
    """Return the tokens of the run's text, with BOS as in the sequences; None without a text.

    Raises:
        UserError: for a model without tokenizer, or a text that has no tokens, is longer than the
            sequences, or without the mask shorter; for a text alone, one beyond the context or 512
            tokens.
    """
    text, tokenizer = settings.shown_text, loaded.tokenizer
    if text is None:
        return None
    if tokenizer is None:
        raise UserError("the model has no tokenizer, so it takes no --text")
    first = first_token(tokenizer, settings.bos)
    bos = first is not None
    reader = TextReader(tokenizer, bos=bos)
    [ids] = reader.tokens([text])
    if not ids:
        raise UserError("the text has no tokens: the model's tokenizer leaves nothing of it")
    if first is not None:
        ids = [first, *ids]
    _validate_length(len(ids), settings, loaded)
    tokens = torch.tensor([ids])
    validate_inputs(loaded.model, tokens)
    return RunText(tokens=tokens, bos=bos, notes=reader.notes)


def _validate_length(n: int, settings: Settings, loaded: LoadedModel) -> None:
    """Check the number of a text's tokens, against the sequences if other texts are read."""
    if not settings.reads_corpus:
        most = min(TEXT_TOKENS, loaded.info.n_ctx)
        if n > most:
            raise UserError(f"the text has {n} tokens: expected up to {most}")
        return
    lengths = f"the text has {n} tokens and the sequences have {settings.seq_len}"
    if n > settings.seq_len:
        raise UserError(f"{lengths}: take {settings.length_of(n)} or a shorter text")
    if "mask" in settings.removed and n < settings.seq_len:
        length = settings.length_of(n)
        raise UserError(f"{lengths}, all seen without the mask: take {length}")


def pieces_of(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the part of the text that each token adds; joined, the parts are the text.

    A token that ends within a character adds nothing: the last of its tokens adds the character.
    """
    decoded = [
        tokenizer.decode(tokens[:stop], clean_up_tokenization_spaces=False)
        for stop in range(1, len(tokens) + 1)
    ]
    whole = decoded[-1]
    ends = [len(text.rstrip("\ufffd")) for text in decoded[:-1]] + [len(whole)]
    return [whole[start:stop] for start, stop in pairwise([0, *accumulate(ends, max)])]


def text_record(text: RunText, tokenizer: PreTrainedTokenizerBase) -> ShownText:
    """Return the pieces of a text for the manifest, and the name of its BOS token, if it has one.

    Args:
        text: the text.
        tokenizer: the model's.
    """
    ids, bos = text.tokens[0].tolist(), text.bos
    return ShownText(
        pieces=("",) * bos + tuple(pieces_of(ids[bos:], tokenizer)),
        bos=tokenizer.decode(ids[:1]) if bos else "",
        notes=tuple(text.notes),
    )
