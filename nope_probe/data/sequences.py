"""Sequences of tokens (or of vectors) of equal length, never padded.

By default a sequence begins at a random place of a document, because document starts would confound
content with position. The sequences of a document do not overlap, and every document gives a first
sequence before any gives a second. By the paper's rule (windows that `start`), a sequence is the
first tokens of a document. With packing, documents are joined end to end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from safetensors.torch import load_file
from torch import Tensor

from nope_probe.data.documents import column_of, prose_note, validate_packing
from nope_probe.data.tokenizing import (
    TextReader,
    WindowStart,
    cut,
    first_token,
    ordinary_tokens,
    pack_documents,
    permuted,
    read_documents,
)
from nope_probe.errors import UserError, validate_types
from nope_probe.files import reading
from nope_probe.hooks.layers.model import begins_alike

if TYPE_CHECKING:  # importing this class takes seconds
    from transformers import PreTrainedTokenizerBase

InputKind = Literal["text", "shuffled", "random", "vectors"]
N_SEQS = 512


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def __repr__(self) -> str:
        """Return the number, length and source of the sequences."""
        what = "vectors" if self.kind == "vectors" else "tokens"
        size = f"{len(self)} of {self.inputs.shape[1]} {what}"
        documents = "" if self.documents is None else f", of {self.n_documents} documents"
        begin = f"; all begin with {self.bos_token or 'BOS'}" if self.bos else ""
        return f"Sequences: {size}, {self.name}{documents}{begin}"

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


def sequences(
    source: str | Path | Iterable[object] = "shipped",
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    d_vocab: int | None = None,
    n_seqs: int | None = None,
    seq_len: int = 64,
    seed: int = 0,
    shuffle: bool = False,
    windows: WindowStart = "random",
    bos: str = "auto",
    pack: bool = False,
) -> Sequences:
    """Cut token sequences out of a text source.

    Args:
        source: `shipped` (held-out standard library text), `stdlib` (this Python's library),
            `random` (i.i.d. tokens), a .txt, .jsonl or .parquet file (with a `text` column),
            `fineweb-edu` (a held-out slice, streamed), another Hub data set or a folder of one; or
            what holds texts, which are documents: a list, a pandas column, an array, or a table or
            `datasets.Dataset` with a column `text`.
        tokenizer: the model's tokenizer; None if it has none.
        d_vocab: how many tokens the model has; `random` draws from them without a tokenizer.
        n_seqs: how many sequences; by default 512, or as many as a list of texts gives. Texts
            without a known number, such as a streamed data set, are read only as far as needed.
        seq_len: tokens in each, BOS included.
        seed: the seed of all random choices.
        shuffle: permute the tokens within each sequence (not BOS). This makes positions
            exchangeable, so a positional pattern that remains does not come from the text.
        windows: where a sequence begins in its document: `random`, or `start`, the paper's rule.
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
    validate_types({"windows": WindowStart}, {"windows": windows})
    if isinstance(source, Path):  # no name, but a path
        source = os.path.join(".", source)
    given = source if isinstance(source, str) else column_of(source)
    name = given if isinstance(given, str) else "texts"
    if isinstance(given, Sized) and len(given) == 0:
        raise UserError("expected a source of text or a list of texts, got nothing")
    if tokenizer is None and (name != "random" or d_vocab is None):
        raise UserError(
            "a model without tokenizer takes no text: use --data random or --tokens FILE (in "
            "Python, sequences('random', d_vocab=...), tokens, or load(model, tokenizer)); for a "
            "parameter-free model --data gaussian"
        )
    generator, first = torch.Generator().manual_seed(seed), first_token(tokenizer, bos)
    begins, is_random = first is not None, name == "random"
    length = seq_len - int(begins)
    is_listed = isinstance(given, Sized) and not isinstance(given, str)
    if pack:
        validate_packing(name, windows)
    reader = None if tokenizer is None else TextReader(tokenizer, bos=begins)
    ids = list(reader.tokens(given)) if reader is not None and is_listed else []
    if n_seqs is None:
        n_seqs = _n_fitting(ids, length, windows, pack) if is_listed else N_SEQS
    if n_seqs < 1 or length < 2:
        raise UserError(f"expected at least 1 sequence of 3 tokens, got {n_seqs} of {seq_len}")
    if reader is None or is_random:
        ordinary, documents = ordinary_tokens(tokenizer, d_vocab), None
        tokens = ordinary[torch.randint(len(ordinary), (n_seqs, length), generator=generator)]
    else:
        ids = ids or read_documents(given, reader, n_seqs, length, pack)
        if pack:
            separator = reader.tokenizer.eos_token_id
            tokens, documents = pack_documents(ids, n_seqs, length, separator, generator)
        else:
            tokens, documents = cut(ids, n_seqs, length, generator, windows)
    if first is not None:
        tokens = torch.nn.functional.pad(tokens, (1, 0), value=first)
    made = Sequences(
        inputs=tokens,
        name=name + (" packed" if pack else ""),
        bos=begins,
        bos_token="" if first is None or tokenizer is None else tokenizer.decode([first]),
        kind="random" if is_random else "text",
        documents=documents,
        notes=(*([prose_note()] * (name == "prose")), *(reader.notes if reader else ())),
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
    with reading(f"{file} holds no tokens"):
        if file.suffix.lower() == ".npy":
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


def _n_fitting(ids: list[list[int]], length: int, windows: WindowStart, is_packed: bool) -> int:
    """Return how many sequences some documents give."""
    if is_packed:
        return max(1, sum(len(document) + 1 for document in ids) // length)
    fitting = [len(document) // length for document in ids]
    return max(1, sum(fitting) if windows == "random" else sum(map(bool, fitting)))


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
