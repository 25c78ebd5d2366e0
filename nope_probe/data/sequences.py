"""Sequences of tokens (or of vectors) of equal length, never padded.

By default a sequence begins at a random place of a document, because document starts would confound
content with position. The sequences of a document do not overlap, and every document gives a first
sequence before any gives a second. By the paper's rule (`start`), a sequence is the first tokens of
a document. With packing, documents are joined end to end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from safetensors.torch import load_file
from torch import Generator, Tensor

from nope_probe.data.documents import (
    TextReader,
    documents,
    first_documents,
    is_data_set,
    long_documents,
    prose_note,
    validate_packing,
)
from nope_probe.errors import UserError, closed_choices
from nope_probe.files import reading
from nope_probe.hooks.layers.model import begins_alike

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WindowStart = Literal["random", "start"]
Bos = Literal["auto", "always", "never"]
InputKind = Literal["text", "shuffled", "random", "vectors"]
N_SEQS = 512


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The inputs of a run.

    Attributes:
        inputs: token ids, or vectors for the parameter-free models.
        name: their source.
        bos: whether all sequences begin with a token that was put there (an attention sink).
        bos_token: the text of this token.
        kind: the kind of inputs: tokens of texts, shuffled tokens, random tokens or vectors.
        documents: the number of each sequence's document; None if sequences are drawn singly. A
            document's sequences are not independent, so they share a fold.
        notes: what was done about marks and special tokens in the texts; see `TextReader`.
        draws: the state of the generator that cut them, with which `shuffled` goes on; None if
            no generator did.
    """

    inputs: Int[Tensor, "seq pos"] | Float[Tensor, "seq pos d_model"]
    name: str
    bos: bool = False
    bos_token: str = ""
    kind: InputKind = "text"
    documents: Int[Tensor, " seq"] | None = None
    notes: tuple[str, ...] = ()
    draws: UInt8[Tensor, " byte"] | None = None

    @property
    def sha256(self) -> str:
        """The checksum of the inputs' bytes."""
        return sha256(self.inputs.contiguous().numpy().tobytes()).hexdigest()

    @property
    def n_documents(self) -> int:
        """The number of independent documents; if sequences are drawn singly, of sequences."""
        return len(self) if self.documents is None else len(self.documents.unique())

    @property
    def n_distinct(self) -> int:
        """The number of different sequences."""
        return len({sha256(sequence).digest() for sequence in self.inputs.contiguous().numpy()})

    @property
    def segment(self) -> int:
        """The length of the longest segment that fits twice into a sequence, behind its BOS."""
        return (self.inputs.shape[1] - int(self.bos)) // 2

    def __len__(self) -> int:
        return len(self.inputs)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the sequences as tensors by name, for a checkpoint."""
        about = json.dumps([self.name, self.bos, self.bos_token, self.kind, *self.notes]).encode()
        tensors = {"inputs": self.inputs, "about": torch.tensor([*about], dtype=torch.uint8)}
        some = {"documents": self.documents, "draws": self.draws}
        return tensors | {name: tensor for name, tensor in some.items() if tensor is not None}

    def shuffled(self, seed: int) -> Sequences:
        """Return the sequences with their tokens, but for BOS, in random order.

        Args:
            seed: of the order, where no generator cut the sequences.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.draws is not None:
            generator.set_state(self.draws)
        tokens = permuted(self.inputs, generator, first=int(self.bos))
        return replace(self, inputs=tokens, name=f"{self.name} shuffled", kind="shuffled")

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Sequences:
        """Return the sequences that `to_tensors` turned into these tensors."""
        name, bos, bos_token, kind, *notes = json.loads(bytes(tensors["about"].tolist()))
        about = {"name": name, "bos": bos, "bos_token": bos_token, "kind": kind, "notes": (*notes,)}
        documents, draws = tensors.get("documents"), tensors.get("draws")
        return cls(inputs=tensors["inputs"], documents=documents, draws=draws, **about)


@closed_choices("start")
def sequences(
    source: str | Sequence[str] = "shipped",
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    d_vocab: int | None = None,
    n_seqs: int | None = None,
    seq_len: int = 64,
    seed: int = 0,
    shuffle: bool = False,
    start: WindowStart = "random",
    bos: str = "auto",
    pack: bool = False,
) -> Sequences:
    """Cut token sequences out of a text source.

    Args:
        source: `shipped` (held-out standard library text), `stdlib` (this Python's library),
            `random` (i.i.d. tokens), a .txt, .jsonl or .parquet file (with a `text` column),
            `fineweb-edu` (a held-out slice, streamed), another Hub data set or a folder of one; or
            a list of texts, which are documents.
        tokenizer: the model's tokenizer; None if it has none.
        d_vocab: how many tokens the model has; `random` draws from them without a tokenizer.
        n_seqs: how many sequences; by default 512, or as many as a list of texts gives.
        seq_len: tokens in each, BOS included.
        seed: the seed of all random choices.
        shuffle: permute the tokens within each sequence (not BOS). This makes positions
            exchangeable, so a positional pattern that remains does not come from the text.
        start: where a sequence begins in its document: `random`, or `start`, the paper's rule.
        bos: whether a sequence begins with the tokenizer's BOS token (`auto`: if the tokenizer adds
            it), or the text of another token for it to begin with.
        pack: join the documents in random order, with the tokenizer's EOS token after each, and
            cut sequences across documents; later documents then attend to earlier documents.

    Raises:
        UserError: for an unknown choice, a source that cannot be read, or a source with too few
            long documents (naming their number).

    Example:
        >>> from nope_probe import load, sequences
        >>> sequences(tokenizer=load("rope-tiny").tokenizer, n_seqs=8).inputs.shape
        torch.Size([8, 64])
        >>> texts = ["the first text", "another text, which is longer"]
        >>> len(sequences(texts, tokenizer=load("rope-tiny").tokenizer, seq_len=4))
        4
    """
    if tokenizer is None and (source != "random" or d_vocab is None):
        raise UserError(
            "a model without tokenizer takes no text: use --data random or --tokens FILE (in "
            "Python, sequences('random', d_vocab=...), tokens, or load(model, tokenizer)); for a "
            "parameter-free model --data gaussian"
        )
    generator = torch.Generator().manual_seed(seed)
    first = first_token(tokenizer, bos)
    begins = first is not None
    length = seq_len - int(begins)
    if not source:
        raise UserError("expected a source of text or a list of texts, got nothing")
    reader = None if tokenizer is None else TextReader(tokenizer, bos=begins)
    ids = [] if reader is None or isinstance(source, str) else list(reader.tokens(source))
    if n_seqs is None:
        n_seqs = N_SEQS if isinstance(source, str) else _n_fitting(ids, length, start, pack)
    if n_seqs < 1 or length < 2:
        raise UserError(f"expected at least 1 sequence of 3 tokens, got {n_seqs} of {seq_len}")
    source = source if isinstance(source, str) else "texts"
    if pack:
        validate_packing(source, start)
    from_documents = None
    if source == "random":
        ordinary = ordinary_tokens(tokenizer, d_vocab)
        tokens = ordinary[torch.randint(len(ordinary), (n_seqs, length), generator=generator)]
    else:
        assert reader is not None
        ids = ids or _read(source, reader, n_seqs, length, pack)
        if pack:
            windows = pack_documents(ids, n_seqs, length, separator_of(tokenizer), generator)
        else:
            windows = (cut if start == "random" else cut_at_start)(ids, n_seqs, length, generator)
        tokens, from_documents = windows.tokens, windows.documents
    bos_token = ""
    if first is not None and tokenizer is not None:
        tokens = torch.nn.functional.pad(tokens, (1, 0), value=first)
        bos_token = tokenizer.decode([first])
    made = Sequences(
        inputs=tokens,
        name=source + (" packed" if pack else ""),
        bos=begins,
        bos_token=bos_token,
        kind="random" if source == "random" else "text",
        documents=from_documents,
        notes=(*([prose_note()] * (source == "prose")), *(reader.notes if reader else ())),
        draws=generator.get_state(),
    )
    return made.shuffled(seed) if shuffle else made


def repeated(data: Sequences, length: int) -> Int[Tensor, "seq start_and_twice"]:
    """Return each sequence's first tokens twice, behind its BOS if it has one.

    Args:
        data: the sequences.
        length: of the segment that is repeated.

    Example:
        >>> tokens = torch.tensor([[0, 5, 6, 7, 8]])
        >>> repeated(Sequences(inputs=tokens, name="", bos=True), 2)
        tensor([[0, 5, 6, 5, 6]])
    """
    start, segment = data.inputs[:, : int(data.bos)], data.inputs[:, int(data.bos) :][:, :length]
    return torch.cat([start, segment, segment], 1)


def random_twice(
    data: Sequences, length: int, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> Int[Tensor, "seq start_and_twice"]:
    """Return random tokens twice, behind the BOS of sequences, one for each sequence.

    Args:
        data: the sequences.
        length: of the segment that is repeated.
        tokenizer: whose tokens are drawn, without special ones.
        seed: of the draws.
    """
    drawn = sequences(
        "random", tokenizer=tokenizer, n_seqs=len(data), seq_len=length, seed=seed, bos="never"
    )
    tokens = torch.cat([data.inputs[:, : int(data.bos)], drawn.inputs], 1)
    return repeated(replace(data, inputs=tokens), length)


def read_tokens(file: Path) -> Sequences:
    """Read sequences of token ids from a .npy or .safetensors file, of integers [seq, pos].

    A .safetensors file names them `tokens`, and may name the document of each `documents`.

    Raises:
        UserError: for a file of another kind or shape.
    """
    suffix = file.suffix.lower()
    if suffix not in (".npy", ".safetensors"):
        raise UserError(
            f"--tokens {file.name}: expected a .npy or .safetensors file; files with pickled "
            "objects (.pt) are refused"
        )
    with reading(f"{file} holds no tokens"):
        if suffix == ".npy":
            read = {"tokens": torch.from_numpy(np.load(file, allow_pickle=False))}
        else:
            read = load_file(file)
    tokens, documents = read.get("tokens"), read.get("documents")
    for name, tensor, n_dims in (("tokens", tokens, 2), ("documents", documents, 1)):
        if tensor is None and name == "documents":
            continue
        if tensor is None or tensor.ndim != n_dims or tensor.is_floating_point():
            found = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            shape = "[seq, pos]" if n_dims == 2 else "[seq]"
            raise UserError(f"{file}: expected integers {shape} as {name!r}, got {found}")
    assert tokens is not None
    if documents is not None and len(documents) != len(tokens):
        raise UserError(f"{file}: {len(tokens)} sequences have {len(documents)} documents")
    tokens = tokens.long()
    return Sequences(
        inputs=tokens,
        name=file.name,
        bos=begins_alike(tokens),
        documents=None if documents is None else documents.long(),
    )


def permuted(
    tokens: Int[Tensor, "seq pos"], generator: Generator, first: int = 0, stop: int | None = None
) -> Int[Tensor, "seq pos"]:
    """Return sequences with the tokens of the positions first to stop - 1 in random order.

    Example:
        >>> permuted(torch.arange(7)[None], torch.Generator().manual_seed(0), 1, 3)[:, [0, 3, 6]]
        tensor([[0, 3, 6]])
    """
    shuffled = tokens.clone()
    some = shuffled[:, first:stop]
    order = torch.rand(some.shape, generator=generator).argsort(-1)
    shuffled[:, first:stop] = some.gather(-1, order)
    return shuffled


def _read(
    source: str, reader: TextReader, n_seqs: int, length: int, is_packed: bool
) -> list[list[int]]:
    """Return the tokens of a source's documents; of a data set, only the part that is needed."""
    if not is_data_set(source):
        return list(reader.tokens(documents(source)))
    if is_packed:
        return first_documents(source, reader, n_seqs * length)
    return long_documents(source, reader, n_seqs, length)


def _n_fitting(ids: list[list[int]], length: int, start: WindowStart, is_packed: bool) -> int:
    """Return how many sequences some documents give."""
    if is_packed:
        return max(1, sum(len(document) + 1 for document in ids) // length)
    fitting = [len(document) // length for document in ids]
    return max(1, sum(fitting) if start == "random" else sum(map(bool, fitting)))


def gaussian(
    n_seqs: int, seq_len: int, d_model: int, alpha: float = 0.0, seed: int = 0
) -> Sequences:
    """Draw unit vectors whose expected inner products are about alpha (eq. 2).

    A vector is a Gaussian plus a Gaussian that its sequence shares, normalised. At finite
    d_model the expected inner product is a little below alpha.

    Args:
        n_seqs: how many sequences.
        seq_len: vectors in each.
        d_model: their dimension.
        alpha: the expected inner product, 0 <= alpha < 1.
        seed: the seed of the draws.

    Raises:
        UserError: if alpha is outside [0, 1).

    Example:
        >>> from nope_probe import gaussian
        >>> gaussian(n_seqs=3, seq_len=5, d_model=8, alpha=0.2).inputs.shape
        torch.Size([3, 5, 8])
    """
    if not 0 <= alpha < 1:
        raise UserError(f"expected 0 <= alpha < 1, got {alpha}")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n_seqs, seq_len, d_model, generator=generator)
    shared = torch.randn(n_seqs, 1, d_model, generator=generator)
    x = torch.nn.functional.normalize(noise + (alpha / (1 - alpha)) ** 0.5 * shared, dim=-1)
    return Sequences(inputs=x, name=f"gaussian alpha={alpha:g}", kind="vectors")


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


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Sequences cut out of documents.

    Attributes:
        tokens: their tokens.
        documents: the number of each sequence's document. A document's sequences are not
            independent.
    """

    tokens: Int[Tensor, "seq pos"]
    documents: Int[Tensor, " seq"]


def cut(ids: list[list[int]], n_seqs: int, length: int, generator: Generator) -> Windows:
    """Cut sequences that do not overlap at random places, taking documents in turn.

    Args:
        ids: the tokens of each document.
        n_seqs: how many sequences.
        length: tokens in each.
        generator: draws all random choices.

    Raises:
        UserError: for too few sequences (naming their number).
    """
    per_document = [_starts(len(document), length, generator) for document in ids]
    long_enough = [index for index, starts in enumerate(per_document) if starts]
    if not long_enough:
        raise UserError(
            f"every document is too short: the longest has {max(map(len, ids))} tokens, {length} "
            "are needed; lower --seq-len"
        )
    order = [long_enough[i] for i in torch.randperm(len(long_enough), generator=generator).tolist()]
    rounds = zip_longest(*([(index, start) for start in per_document[index]] for index in order))
    chosen = [place for turn in rounds for place in turn if place is not None]
    if len(chosen) < n_seqs:
        raise UserError(
            f"{len(long_enough)} documents of {length} tokens or more give {len(chosen)} "
            f"sequences, {n_seqs} were asked for; lower --n-seqs or --seq-len"
        )
    chosen = chosen[:n_seqs]
    return Windows(
        tokens=torch.tensor([ids[index][start : start + length] for index, start in chosen]),
        documents=torch.tensor([index for index, _ in chosen]),
    )


def cut_at_start(ids: list[list[int]], n_seqs: int, length: int, generator: Generator) -> Windows:
    """Take the first tokens of n_seqs documents that are long enough, in random order.

    Raises:
        UserError: for too few documents (naming their number).
    """
    long_enough = [document[:length] for document in ids if len(document) >= length]
    if len(long_enough) < n_seqs:
        raise UserError(
            f"{len(long_enough)} documents have {length} tokens or more, {n_seqs} were asked for; "
            "lower --n-seqs or --seq-len, or take --windows random"
        )
    order = torch.randperm(len(long_enough), generator=generator)[:n_seqs]
    return Windows(tokens=torch.tensor(long_enough)[order], documents=order)


def _starts(n_tokens: int, length: int, generator: Generator) -> list[int]:
    """Choose the starts of a document's sequences, in random order."""
    n_fit, slack = divmod(n_tokens, length)
    if n_fit == 0:
        return []
    offset = int(torch.randint(slack + 1, (), generator=generator))
    return [offset + length * k for k in torch.randperm(n_fit, generator=generator).tolist()]


def pack_documents(
    ids: Sequence[Sequence[int]],
    n_seqs: int,
    length: int,
    separator: int,
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
        separator: the token after each document.
        generator: draws the order.

    Raises:
        UserError: for too few tokens (naming their number).

    Example:
        >>> pack_documents([[5, 6, 7, 8, 9]], 2, 3, 0, torch.Generator()).tokens
        tensor([[5, 6, 7],
                [8, 9, 0]])
    """
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
    return Windows(
        tokens=torch.tensor(joined[: n_seqs * length]).view(n_seqs, length),
        documents=torch.tensor(documents),
    )


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token to put after each packed document: the tokenizer's EOS.

    Raises:
        UserError: for a tokenizer without EOS.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "--pack puts an EOS token after each document, and the model's tokenizer has none"
        )
    return tokenizer.eos_token_id
