"""A text that the user gives: its tokens, the pieces that a person reads, and its view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nope_probe.data.documents import TextReader
from nope_probe.data.sequences import Sequences, first_token
from nope_probe.errors import UserError
from nope_probe.figures.attention import Why
from nope_probe.figures.text_view import TextView, mark_of
from nope_probe.hooks.layers.model import validate_inputs
from nope_probe.models.info import LoadedModel
from nope_probe.run.folder import Run
from nope_probe.run.manifest import ShownText
from nope_probe.studies.attention.settings import ALONE, TEXT_TOKENS, Settings


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The look that a run explains.

    Attributes:
        head: the head, such as `L1H3`.
        query: the position of the token in the text.
    """

    head: str
    query: int


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What a run says of its `why`.

    Attributes:
        why: what it was asked; None if nothing.
    """

    why: Asked | None = None


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


def shown_pieces(record: ShownText) -> list[str]:
    """Return each token as readable text, with symbols for whitespace.

    Args:
        record: the result of `text_record`.
    """
    pieces = [mark_of(piece) or piece.strip() for piece in record.pieces]
    return [record.bos or pieces[0], *pieces[1:]]


def stored_why(run: Run) -> Why | None:
    """Return the terms that a run was asked for and keeps; None if it was asked nothing."""
    asked = run.manifest.results_as(Explained).why
    return None if asked is None else why_of(asked, run.tables)


def why_of(asked: Asked, tables: Mapping[str, pd.DataFrame]) -> Why:
    """Return the terms of a look.

    Args:
        asked: the look.
        tables: `why`, and `why_steps` and `why_confirm` if there are any.
    """
    return Why(
        head=asked.head,
        query=asked.query,
        table=tables["why"],
        steps=tables.get("why_steps"),
        removals=tables.get("why_confirm"),
    )


def has_other_texts(run: Run) -> bool:
    """Return whether a run read other texts than the one that it shows."""
    return "weights" in run.maps


def text_view(run: Run) -> TextView | None:
    """Return the view of a run's text; None for a run without a text.

    Args:
        run: the table `attention`, and the maps `text_weights`, `text_content` and, if other texts
            were read, `weights`.
    """
    record = run.manifest.text
    if record is None:
        return None
    weights = run.maps["text_weights"]
    n = weights.shape[-1]
    return TextView(
        title=f"Attention of {run.manifest.name} in one text",
        pieces=record.pieces,
        names={0: record.bos} if record.bos else {},
        heads=run.tables["attention"],
        weights=weights,
        position=run.maps["weights"][..., :n, :n] if has_other_texts(run) else None,
        content=run.maps["text_content"],
        why=stored_why(run),
    )
