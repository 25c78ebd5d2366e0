"""Windows of tokens (or of vectors) of equal length, never padded.

A window is a random place in a document: document starts would confound content with position. The
windows of one document do not overlap, and the first round takes one window from each document.
Where the paper's rule is asked for, a window is the first tokens of a document that has them; where
packing is, documents are joined end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.data.documents import (
    documents,
    first_documents,
    is_data_set,
    long_documents,
    validate_packing,
)
from nope_probe.data.packing import packed, separator_of
from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WindowStart = Literal["random", "start"]
Bos = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What a model is run on.

    Attributes:
        inputs: token ids, or vectors for the parameter-free models.
        name: where they come from.
        bos: whether each window begins with a forced BOS token (an attention sink).
    """

    inputs: Int[Tensor, "seq pos"] | Float[Tensor, "seq pos d_model"]
    name: str
    bos: bool = False

    @property
    def sha256(self) -> str:
        """The checksum of the inputs' bytes."""
        return sha256(self.inputs.contiguous().numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.inputs)


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
    """Cut token windows out of a text source.

    Args:
        source: `shipped` (held-out standard library text), `stdlib` (this Python's library),
            `random` (i.i.d. tokens), a .txt, .jsonl or .parquet file (with a `text` column),
            `fineweb-edu` (a held-out slice, streamed), another Hub data set or a folder of one.
        tokenizer: the model's; it decides whether a BOS token is forced at position 0.
        n_seqs: how many windows.
        seq_len: their length, BOS included.
        seed: of every random choice.
        shuffle: permute the tokens within each window (a forced BOS stays), which makes positions
            exchangeable: what pattern remains, the model puts there.
        start: where a window stands in its document: `random`, or `start`, the paper's rule.
        bos: whether a window begins with a BOS token; `auto`: where the tokenizer forces it.
        pack: join the documents in random order, each followed by the tokenizer's EOS token, and
            cut windows one after the other, across documents; what a window sees is not masked.

    Raises:
        UserError: if the source cannot be read or holds too few long documents (it says how many).

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
        raise UserError(f"expected at least 1 window of 3 tokens, got {n_seqs} of {seq_len}")
    if pack:
        tokens = _packed(source, tokenizer, n_seqs, length, generator, start)
    elif source == "random":
        tokens = _random_tokens(tokenizer, n_seqs, length, generator)
    else:
        ids = _encoded(source, tokenizer, n_seqs, length)
        tokens = (cut if start == "random" else starts)(ids, n_seqs, length, generator)
    if shuffle:
        order = torch.rand(tokens.shape, generator=generator).argsort(-1)
        tokens = tokens.gather(-1, order)
    if begins:
        first = torch.full((n_seqs, 1), tokenizer.bos_token_id)
        tokens = torch.cat([first, tokens], -1)
    name = source + (" packed" if pack else "") + (" shuffled" if shuffle else "")
    return Sequences(inputs=tokens, name=name, bos=begins)


def gaussian(
    n_seqs: int, seq_len: int, d_model: int, alpha: float = 0.0, seed: int = 0
) -> Sequences:
    """Draw unit vectors whose expected inner products are about alpha (eq. 2).

    Each is a Gaussian plus a part that its window shares, normalised; at finite d_model the
    expected inner product is a little below alpha.

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
    return Sequences(inputs=x, name=f"gaussian alpha={alpha:g}")


def _encoded(
    source: str, tokenizer: PreTrainedTokenizerBase, n_seqs: int, length: int
) -> list[list[int]]:
    """Give the tokens of a source's documents, of a data set no more than are needed."""
    if is_data_set(source):
        return long_documents(source, tokenizer, n_seqs, length)
    return _local(source, tokenizer)


def _local(source: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return tokenizer(documents(source), add_special_tokens=False, verbose=False)["input_ids"]


def _packed(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    n_seqs: int,
    length: int,
    generator: torch.Generator,
    start: WindowStart,
) -> Int[Tensor, "seq pos"]:
    validate_packing(source, start)
    separator = separator_of(tokenizer)
    if is_data_set(source):
        ids = first_documents(source, tokenizer, n_seqs * length)
    else:
        ids = _local(source, tokenizer)
    return packed(ids, n_seqs, length, separator, generator)


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, bos: Bos) -> bool:
    """Tell whether windows begin with a BOS token.

    Raises:
        UserError: if they always should and the tokenizer has none.
    """
    if bos == "always" and tokenizer.bos_token_id is None:
        raise UserError("--bos always: the model's tokenizer has no BOS token")
    return forces_bos(tokenizer) if bos == "auto" else bos == "always"


def forces_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer puts a BOS token before any text by itself."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def cut(
    ids: list[list[int]], n_seqs: int, length: int, generator: torch.Generator
) -> Int[Tensor, "seq pos"]:
    """Cut non-overlapping windows at random places, taking documents in turn.

    Raises:
        UserError: if there are too few (it says how many there are).
    """
    per_document = [_places(len(document), length, generator) for document in ids]
    long_enough = [index for index, places in enumerate(per_document) if places]
    if not long_enough:
        longest = max(map(len, ids))
        raise UserError(
            f"every document is shorter than a window: the longest has {longest} tokens, "
            f"{length} are needed; lower --seq-len"
        )
    order = [long_enough[i] for i in torch.randperm(len(long_enough), generator=generator).tolist()]
    rounds = zip_longest(*([(index, start) for start in per_document[index]] for index in order))
    chosen = [place for turn in rounds for place in turn if place is not None]
    if len(chosen) < n_seqs:
        raise UserError(
            f"{len(long_enough)} documents of {length} tokens or more give {len(chosen)} windows, "
            f"{n_seqs} were asked for; lower --n-seqs or --seq-len"
        )
    return torch.tensor([ids[index][start : start + length] for index, start in chosen[:n_seqs]])


def starts(
    ids: list[list[int]], n_seqs: int, length: int, generator: torch.Generator
) -> Int[Tensor, "seq pos"]:
    """Take the first tokens of documents that have them, one window each, in random order.

    Raises:
        UserError: if there are too few (it says how many there are).
    """
    long_enough = [document[:length] for document in ids if len(document) >= length]
    if len(long_enough) < n_seqs:
        raise UserError(
            f"{len(long_enough)} documents have {length} tokens or more, {n_seqs} were asked for; "
            "lower --n-seqs or --seq-len, or take --windows random"
        )
    order = torch.randperm(len(long_enough), generator=generator)[:n_seqs]
    return torch.tensor(long_enough)[order]


def _places(n_tokens: int, length: int, generator: torch.Generator) -> list[int]:
    """Choose where the windows of one document start, in random order."""
    n_fit, slack = divmod(n_tokens, length)
    if n_fit == 0:
        return []
    offset = int(torch.randint(slack + 1, (), generator=generator))
    return [offset + length * k for k in torch.randperm(n_fit, generator=generator).tolist()]


def _random_tokens(
    tokenizer: PreTrainedTokenizerBase, n_seqs: int, length: int, generator: torch.Generator
) -> Int[Tensor, "seq pos"]:
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([t for t in range(len(tokenizer)) if t not in special])
    return ordinary[torch.randint(len(ordinary), (n_seqs, length), generator=generator)]
