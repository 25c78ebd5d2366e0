"""Sequences of tokens (or of vectors) of equal length, never padded.

By default a sequence begins at a random place of a document: document starts would confound content
with position. The sequences of one document do not overlap, and every document gives one before any
gives two. By the paper's rule (`start`) a sequence is the first tokens of a document; with packing,
documents are joined end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from nope_probe.data.cutting import Windows, cut, cut_at_start, separator_of
from nope_probe.data.cutting import pack as pack_documents
from nope_probe.data.data_sets import first_documents, is_data_set, long_documents, tokenised
from nope_probe.data.documents import documents, validate_packing
from nope_probe.errors import UserError, closed_choices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WindowStart = Literal["random", "start"]
Bos = Literal["auto", "always", "never"]
Kind = Literal["text", "shuffled", "random", "vectors"]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The inputs of a run.

    Attributes:
        inputs: token ids, or vectors for the parameter-free models.
        name: their source.
        bos: whether each sequence begins with a BOS token (an attention sink).
        kind: what the inputs are: tokens of texts, those tokens shuffled, random tokens or vectors.
        documents: the number of the document that each sequence is from; None where each is drawn
            by itself. The sequences of one document are not independent and share a fold.
    """

    inputs: Int[Tensor, "seq pos"] | Float[Tensor, "seq pos d_model"]
    name: str
    bos: bool = False
    kind: Kind = "text"
    documents: Int[Tensor, " seq"] | None = None

    @property
    def sha256(self) -> str:
        """The checksum of the inputs' bytes."""
        return sha256(self.inputs.contiguous().numpy().tobytes()).hexdigest()

    @property
    def n_documents(self) -> int:
        """How many independent documents the sequences are from; their number if drawn singly."""
        return len(self) if self.documents is None else len(self.documents.unique())

    def __len__(self) -> int:
        return len(self.inputs)


@closed_choices("start", "bos")
def sequences(
    source: str = "shipped",
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    n_seqs: int = 512,
    seq_len: int = 64,
    seed: int = 0,
    shuffle: bool = False,
    start: WindowStart = "random",
    bos: Bos = "auto",
    pack: bool = False,
) -> Sequences:
    """Cut token sequences out of a text source.

    Args:
        source: `shipped` (held-out standard library text), `stdlib` (this Python's library),
            `random` (i.i.d. tokens), a .txt, .jsonl or .parquet file (with a `text` column),
            `fineweb-edu` (a held-out slice, streamed), another Hub data set or a folder of one.
        tokenizer: the model's.
        n_seqs: how many sequences.
        seq_len: tokens in each, BOS included.
        seed: of every random choice.
        shuffle: permute the tokens within each sequence (not BOS), which makes positions
            exchangeable: a positional pattern that remains is not the text's.
        start: where a sequence begins in its document: `random`, or `start`, the paper's rule.
        bos: whether a sequence begins with a BOS token; `auto`: if the tokenizer adds one.
        pack: join the documents in random order, each followed by the tokenizer's EOS token, and
            cut sequences across documents, which attend to the ones before them.

    Raises:
        UserError: for an unknown choice, and if the source cannot be read or holds too few long
            documents (it says how many).

    Example:
        >>> from nope_probe import load, sequences
        >>> sequences(tokenizer=load("rope-tiny").tokenizer, n_seqs=8).inputs.shape
        torch.Size([8, 64])
    """
    if tokenizer is None:
        raise UserError("a model without tokenizer takes no text: use --data gaussian")
    generator = torch.Generator().manual_seed(seed)
    begins = begins_with_bos(tokenizer, bos)
    length = seq_len - int(begins)
    if n_seqs < 1 or length < 2:
        raise UserError(f"expected at least 1 sequence of 3 tokens, got {n_seqs} of {seq_len}")
    documents = None
    if pack:
        validate_packing(source, start)
        windows = _packed_windows(source, tokenizer, n_seqs, length, generator)
        tokens, documents = windows.tokens, windows.documents
    elif source == "random":
        tokens = _random_tokens(tokenizer, n_seqs, length, generator)
    else:
        ids = _long_documents(source, tokenizer, n_seqs, length)
        windows = (cut if start == "random" else cut_at_start)(ids, n_seqs, length, generator)
        tokens, documents = windows.tokens, windows.documents
    if shuffle:
        order = torch.rand(tokens.shape, generator=generator).argsort(-1)
        tokens = tokens.gather(-1, order)
    if begins:
        tokens = torch.nn.functional.pad(tokens, (1, 0), value=tokenizer.bos_token_id)
    name = source + (" packed" if pack else "") + (" shuffled" if shuffle else "")
    kind: Kind = "shuffled" if shuffle else "random" if source == "random" else "text"
    return Sequences(inputs=tokens, name=name, bos=begins, kind=kind, documents=documents)


def gaussian(
    n_seqs: int, seq_len: int, d_model: int, alpha: float = 0.0, seed: int = 0
) -> Sequences:
    """Draw unit vectors whose expected inner products are about alpha (eq. 2).

    Each is a Gaussian plus one that its sequence shares, normalised; at finite d_model the expected
    inner product is a little below alpha.

    Args:
        n_seqs: how many sequences.
        seq_len: vectors in each.
        d_model: their dimension.
        alpha: the expected inner product, 0 <= alpha < 1.
        seed: of the draws.

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
    own = torch.randn(n_seqs, seq_len, d_model, generator=generator)
    shared = torch.randn(n_seqs, 1, d_model, generator=generator)
    x = torch.nn.functional.normalize(own + (alpha / (1 - alpha)) ** 0.5 * shared, dim=-1)
    return Sequences(inputs=x, name=f"gaussian alpha={alpha:g}", kind="vectors")


def _long_documents(
    source: str, tokenizer: PreTrainedTokenizerBase, n_seqs: int, length: int
) -> list[list[int]]:
    """Return the tokens of a source's documents, of a data set no more than are needed."""
    if is_data_set(source):
        return long_documents(source, tokenizer, n_seqs, length)
    return _local_documents(source, tokenizer)


def _local_documents(source: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return list(tokenised(documents(source), tokenizer))


def _packed_windows(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    n_seqs: int,
    length: int,
    generator: Generator,
) -> Windows:
    separator = separator_of(tokenizer)
    if is_data_set(source):
        ids = first_documents(source, tokenizer, n_seqs * length)
    else:
        ids = _local_documents(source, tokenizer)
    return pack_documents(ids, n_seqs, length, separator, generator)


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, bos: Bos) -> bool:
    """Return whether sequences begin with a BOS token.

    Raises:
        UserError: if they always should and the tokenizer has none.
    """
    if bos == "always" and tokenizer.bos_token_id is None:
        raise UserError("--bos always: the model's tokenizer has no BOS token")
    return forces_bos(tokenizer) if bos == "auto" else bos == "always"


def forces_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer puts a BOS token before any text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _random_tokens(
    tokenizer: PreTrainedTokenizerBase, n_seqs: int, length: int, generator: Generator
) -> Int[Tensor, "seq pos"]:
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([t for t in range(len(tokenizer)) if t not in special])
    if len(ordinary) == 0:
        raise UserError(
            "--data random draws tokens, and the model's tokenizer has special ones only"
        )
    return ordinary[torch.randint(len(ordinary), (n_seqs, length), generator=generator)]
