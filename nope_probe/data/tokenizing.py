"""Texts to tokens, by the same rules everywhere, and tokens to sequences of equal length.

The rules are of byte order marks, BOS and other special tokens. Sequences are cut out of documents,
or out of all documents joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Generator, Tensor

from nope_probe.data.documents import BYTE_ORDER_MARK, documents, is_data_set, stream_texts, text_of
from nope_probe.errors import UserError, validate_unicode
from nope_probe.files import reading

if TYPE_CHECKING:  # importing this class takes seconds
    from transformers import PreTrainedTokenizerBase

Bos = Literal["auto", "always", "never"]
_BATCH = 64
MOST_DOCUMENTS = 1_000_000  # of a data set
MOST_NAMED = 4  # special tokens in a note


@dataclass(eq=False)
class TextReader:
    """Turns texts into tokens, all by the same rules, and counts what the texts bring with them.

    A byte order mark is no part of a text and is left out. A text may spell special tokens, as the
    templates of chats do, and the tokenizer reads them as these tokens. Where sequences begin with
    a BOS token, a text that spells one at its beginning gives it up, so that there are not two.

    Args:
        tokenizer: the model's.
        bos: whether sequences begin with a BOS token.

    Attributes:
        n_texts: how many texts were read.
        n_marks: how many of them begin with a byte order mark.
        n_bos: how many begin with a BOS token.
        n_special: how many spell a special token elsewhere.
        special: these special tokens.

    Example:
        >>> from nope_probe import load
        >>> reader = TextReader(load("rope-tiny").tokenizer, bos=True)
        >>> [len(ids) for ids in reader.tokens(["<bos>a", "b"])]
        [1, 1]
        >>> reader.notes
        ('Texts that begin with the BOS token <bos> already, so that no second was added: 1 of 2.',)
    """

    tokenizer: PreTrainedTokenizerBase
    bos: bool = False
    n_texts: int = 0
    n_marks: int = 0
    n_bos: int = 0
    n_special: int = 0
    special: set[int] = field(default_factory=set)

    def tokens(self, texts: Iterable[object]) -> Iterator[list[int]]:
        """Yield the tokens of each text, a batch at a time: tokenizers keep much besides ids.

        Args:
            texts: texts, or rows with a column `text`.

        Raises:
            UserError: for what is no text, or a text that the tokenizer cannot encode.
        """
        remaining, tokenizer = iter(texts), self.tokenizer
        while rows := list(islice(remaining, _BATCH)):
            batch = [text_of(f"texts[{n}]", row) for n, row in enumerate(rows, self.n_texts)]
            self.n_texts += len(batch)
            self.n_marks += sum(text.startswith(BYTE_ORDER_MARK) for text in batch)
            batch = [text.removeprefix(BYTE_ORDER_MARK) for text in batch]
            with reading(f"the tokenizer of {tokenizer.name_or_path} cannot take the text"):
                ids = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            yield from map(self._without_second_bos, ids)

    def _without_second_bos(self, ids: list[int]) -> list[int]:
        begins = ids[:1] == [self.tokenizer.bos_token_id]
        rest = ids[1:] if begins else ids
        special = self._spelled.intersection(rest)
        self.n_bos += begins
        self.n_special += bool(special)
        self.special |= special
        return rest if self.bos else ids

    @cached_property
    def _spelled(self) -> frozenset[int]:
        """The special tokens that a text can spell: not the one for what the tokenizer lacks."""
        tokenizer = self.tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(token for token, a in added if a.special)}
        if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            special.discard(tokenizer.unk_token_id)
        return frozenset(special)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done about marks and special tokens, a sentence each."""
        bos, names = self.tokenizer.bos_token, sorted(map(self.tokenizer.decode, self.special))
        named = ", ".join([*names[:MOST_NAMED], *["..."] * (len(names) > MOST_NAMED)])
        kept = "so that no second was added" if self.bos else "which was kept"
        counts = {
            "begin with a byte order mark, which is left out": self.n_marks,
            f"begin with the BOS token {bos} already, {kept}": self.n_bos,
            f"spell special tokens ({named}), which are read as these tokens": self.n_special,
        }
        of = f"of {self.n_texts:,}."
        return tuple(f"Texts that {what}: {n:,} {of}" for what, n in counts.items() if n)


def read_documents(
    source: str | Iterable[object], reader: TextReader, n_seqs: int, length: int, is_packed: bool
) -> list[list[int]]:
    """Return the tokens of a source's documents; of a data set, only the part that is needed.

    That part is the first n_seqs documents of `length` tokens or more; if documents are packed, the
    first documents with tokens for all sequences, separators included. Where there are fewer, it is
    all of these documents that there are.

    Args:
        source: a text source, or texts without a known number, which are read as a data set is.
        reader: of the model's tokenizer.
        n_seqs: how many sequences are wanted.
        length: tokens in each.
        is_packed: whether documents are packed.

    Raises:
        UserError: for a source that cannot be read, or has no document that is long enough.
    """
    if isinstance(source, str) and not is_data_set(source):
        return list(reader.tokens(documents(source)))
    texts = stream_texts(source) if isinstance(source, str) else source
    kept, n_read, missing = list[list[int]](), 0, n_seqs * length if is_packed else n_seqs
    for document in reader.tokens(islice(texts, MOST_DOCUMENTS)):
        n_read += 1
        if is_packed or len(document) >= length:
            kept.append(document)
            missing -= len(document) + 1 if is_packed else 1
        if missing <= 0:
            break
    if not kept:
        named = source if isinstance(source, str) else "the texts"
        raise UserError(
            f"none of the {n_read} documents read from {named} has {length} tokens or more; lower "
            "--seq-len"
        )
    return kept


def first_token(tokenizer: PreTrainedTokenizerBase | None, bos: str) -> int | None:
    """Return the token that is put before every sequence, or None for no token.

    Args:
        tokenizer: the model's.
        bos: `always`, `never` or `auto` (as the tokenizer does) for its BOS token; else the text of
            a token.

    Raises:
        UserError: for `always` with a tokenizer that has no BOS token, or a text that is not
            exactly one token.
    """
    if bos == "never" or (bos == "auto" and (tokenizer is None or not forces_bos(tokenizer))):
        return None
    if tokenizer is None:
        raise UserError(f"--bos {bos}: the model has no tokenizer")
    if bos in get_args(Bos):
        if tokenizer.bos_token_id is None:
            raise UserError("--bos always: the model's tokenizer has no BOS token")
        return tokenizer.bos_token_id
    validate_unicode("--bos", bos)
    ids = tokenizer(bos, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise UserError(
            f"--bos {bos!r}: expected auto, always, never or the text of one token; the model's "
            f"tokenizer makes {len(ids)} of it"
        )
    return ids[0]


def forces_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer puts a BOS token before any text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def ordinary_tokens(
    tokenizer: PreTrainedTokenizerBase | None, d_vocab: int | None
) -> Int[Tensor, " token"]:
    """Return the tokens that are not special; without a tokenizer, all d_vocab tokens.

    Raises:
        UserError: for a tokenizer of special tokens alone.
    """
    if tokenizer is None:
        return torch.arange(d_vocab or 0)
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([t for t in range(len(tokenizer)) if t not in special])
    if len(ordinary) == 0:
        raise UserError(
            "--data random draws tokens, and the model's tokenizer has only special tokens"
        )
    return ordinary


WindowStart = Literal["random", "start"]
# Tokens of sequences, and the numbers of their documents: those of one are not independent.
Windows: TypeAlias = tuple[Int[Tensor, "seq pos"], Int[Tensor, " seq"]]


def cut(
    ids: Sequence[Sequence[int]],
    n_seqs: int,
    length: int,
    generator: Generator,
    start: WindowStart = "random",
) -> Windows:
    """Cut sequences that do not overlap out of documents, taking documents in turn.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        generator: draws all random choices.
        start: where sequences begin: anywhere, or at the document's first token, one for each.

    Raises:
        UserError: for too few sequences (naming their number).
    """
    per_document = [_starts(len(document), length, generator, start) for document in ids]
    long_enough = [index for index, starts in enumerate(per_document) if starts]
    if not long_enough:
        raise UserError(
            f"every document is too short: the longest has {max(map(len, ids))} tokens, {length} "
            "are needed; lower --seq-len"
        )
    order = [long_enough[i] for i in torch.randperm(len(long_enough), generator=generator).tolist()]
    rounds = zip_longest(*([(index, first) for first in per_document[index]] for index in order))
    chosen = [place for turn in rounds for place in turn if place is not None]
    if len(chosen) < n_seqs:
        instead = "" if start == "random" else ", or take --windows random"
        raise UserError(
            f"{len(long_enough)} documents of {length} tokens or more give {len(chosen)} "
            f"sequences, {n_seqs} were asked for; lower --n-seqs or --seq-len{instead}"
        )
    tokens = [ids[index][first : first + length] for index, first in chosen[:n_seqs]]
    return torch.tensor(tokens), torch.tensor([index for index, _ in chosen[:n_seqs]])


def _starts(n_tokens: int, length: int, generator: Generator, start: WindowStart) -> list[int]:
    """Choose the starts of a document's sequences, in random order."""
    n_fit, slack = divmod(n_tokens, length)
    if n_fit == 0 or start == "start":
        return [0] * min(n_fit, 1)
    offset = int(torch.randint(slack + 1, (), generator=generator))
    return [offset + length * k for k in torch.randperm(n_fit, generator=generator).tolist()]


def pack_documents(
    ids: Sequence[Sequence[int]],
    n_seqs: int,
    length: int,
    separator: int | None,
    generator: Generator,
) -> Windows:
    """Join documents in random order, each followed by a separator, and cut them into sequences.

    A sequence may begin and end anywhere in a document, and may hold several documents: later
    documents attend to earlier documents, as in most models' training. A sequence belongs to the
    document with most of its tokens, and in a tie to the first.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        separator: the token after each document, the tokenizer's EOS.
        generator: draws the order.

    Raises:
        UserError: for a tokenizer without EOS, or too few tokens (naming their number).

    Example:
        >>> pack_documents([[5, 6, 7, 8, 9]], 2, 3, 0, torch.Generator())[0]
        tensor([[5, 6, 7],
                [8, 9, 0]])
    """
    if separator is None:
        raise UserError(
            "--pack puts an EOS token after each document, and the model's tokenizer has none"
        )
    n_tokens = sum(map(len, ids)) + len(ids)
    if n_tokens < n_seqs * length:
        raise UserError(
            f"{len(ids)} documents hold {n_tokens} tokens with their separators, which give "
            f"{n_tokens // length} sequences of {length}, {n_seqs} were asked for; lower --n-seqs "
            "or --seq-len"
        )
    order = torch.randperm(len(ids), generator=generator).tolist()
    joined = [token for index in order for token in (*ids[index], separator)]
    owners = [index for index in order for _ in range(len(ids[index]) + 1)]
    begins = range(0, n_seqs * length, length)
    documents = [Counter(owners[first : first + length]).most_common(1)[0][0] for first in begins]
    return torch.tensor(joined[: n_seqs * length]).view(n_seqs, length), torch.tensor(documents)


def permuted(
    tokens: Shaped[Tensor, "seq pos"], generator: Generator, first: int = 0, stop: int | None = None
) -> Shaped[Tensor, "seq pos"]:
    """Return sequences with the tokens (or numbers) of positions first to stop - 1 in random order.

    Example:
        >>> permuted(torch.arange(7)[None], torch.Generator().manual_seed(0), 1, 3)[:, [0, 3, 6]]
        tensor([[0, 3, 6]])
    """
    shuffled = tokens.clone()
    some = shuffled[:, first:stop]
    order = torch.rand(some.shape, generator=generator).argsort(-1)
    shuffled[:, first:stop] = some.gather(-1, order)
    return shuffled


def padding_note(
    tokens: Int[Tensor, "seq pos"] | Float[Tensor, "seq pos d_model"],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    bos: bool = False,
) -> str:
    """Return how many rows begin or end with the tokenizer's pad token; empty if none does.

    A pad token that is also BOS, EOS or the unknown token counts in runs of two or more.

    Args:
        tokens: the rows; vectors have no padding.
        tokenizer: the model's.
        bos: whether all rows begin with a BOS token, which is no padding.
    """
    pad = None if tokenizer is None else tokenizer.pad_token_id
    if tokenizer is None or pad is None:
        return ""
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    is_pad = (tokens == pad)[:, int(bos and pad == tokenizer.bos_token_id) :].long()
    runs = torch.stack([rows.cumprod(1).sum(1) for rows in (is_pad, is_pad.flip(1))])
    n_pads = runs.masked_fill(runs < 1 + (pad in others), 0).sum(0).clamp_max(is_pad.shape[1])
    if not n_pads.any():
        return ""
    return (
        f"{int(n_pads.count_nonzero()):,} of {len(tokens):,} rows begin or end with the pad token "
        f"{tokenizer.pad_token}, {int(n_pads.sum()):,} tokens in all, which are measured as tokens "
        "of the text: take rows without padding."
    )


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
