"""Windows of tokens (or of vectors) of equal length, never padded.

A window is a random place in a document: document starts would confound content with position. The
windows of one document do not overlap, and the first round takes one window from each document.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.corpus import SHIPPED, stdlib_documents
from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCES = ("shipped", "stdlib", "random", "gaussian")


@dataclass(frozen=True, kw_only=True)
class Windows:
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


def windows(
    source: str = "shipped",
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    n_seqs: int = 512,
    seq_len: int = 64,
    seed: int = 0,
    shuffle: bool = False,
) -> Windows:
    """Cut token windows out of a text source.

    Args:
        source: `shipped` (held-out standard library text), `stdlib` (this Python's library),
            `random` (i.i.d. tokens), or a .txt, .jsonl or .parquet file (with a `text` column).
        tokenizer: the model's; it decides whether a BOS token is forced at position 0.
        n_seqs: how many windows.
        seq_len: their length, BOS included.
        seed: of every random choice.
        shuffle: permute the tokens within each window (a forced BOS stays), which makes positions
            exchangeable: what pattern remains, the model puts there.

    Raises:
        UserError: if the source cannot be read or holds too few long documents (it says how many).

    Example:
        >>> from nope_probe import load, windows
        >>> windows(tokenizer=load("rope-tiny").tokenizer, n_seqs=8).inputs.shape
        torch.Size([8, 64])
    """
    if tokenizer is None:
        raise UserError("a model without tokenizer takes no text: use --data gaussian")
    generator = torch.Generator().manual_seed(seed)
    bos = forces_bos(tokenizer)
    length = seq_len - int(bos)
    if n_seqs < 1 or length < 2:
        raise UserError(f"expected at least 1 window of 3 tokens, got {n_seqs} of {seq_len}")
    if source == "random":
        tokens = _random_tokens(tokenizer, n_seqs, length, generator)
    else:
        ids = tokenizer(documents(source), add_special_tokens=False, verbose=False)["input_ids"]
        tokens = cut(ids, n_seqs, length, generator)
    if shuffle:
        order = torch.rand(tokens.shape, generator=generator).argsort(-1)
        tokens = tokens.gather(-1, order)
    if bos:
        first = torch.full((n_seqs, 1), tokenizer.bos_token_id)
        tokens = torch.cat([first, tokens], -1)
    return Windows(inputs=tokens, name=source + (" shuffled" if shuffle else ""), bos=bos)


def gaussian(n_seqs: int, seq_len: int, d_model: int, alpha: float = 0.0, seed: int = 0) -> Windows:
    """Draw unit vectors whose expected inner products are about alpha (eq. 2).

    Each is a Gaussian plus a part that its window shares, normalised; at finite d_model the
    expected inner product is a little below alpha.

    Raises:
        UserError: if alpha is outside [0, 1).
    """
    if not 0 <= alpha < 1:
        raise UserError(f"expected 0 <= alpha < 1, got {alpha}")
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(n_seqs, seq_len, d_model, generator=generator)
    shared = torch.randn(n_seqs, 1, d_model, generator=generator)
    x = torch.nn.functional.normalize(own + (alpha / (1 - alpha)) ** 0.5 * shared, dim=-1)
    return Windows(inputs=x, name=f"gaussian alpha={alpha:g}")


def forces_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer puts a BOS token before any text by itself."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def documents(source: str) -> list[str]:
    """Read the documents of a text source.

    Raises:
        UserError: for a source that does not exist or a file that is empty, binary or has no text.
    """
    if source == "shipped":
        return _column(SHIPPED)
    if source == "stdlib":
        return stdlib_documents()
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"no data {source!r}: expected {', '.join(SOURCES)} or a file that exists")
    if path.suffix not in (".txt", ".jsonl", ".parquet"):
        raise UserError(f"cannot read {source}: expected a .txt, .jsonl or .parquet file")
    try:
        texts = [path.read_text(encoding="utf-8")] if path.suffix == ".txt" else _column(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not text: byte {error.start} is not UTF-8") from error
    if any("\0" in text for text in texts):
        raise UserError(f"{source} is not text: it holds NUL bytes")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"{source} is empty")
    return texts


def _column(path: Path) -> list[str]:
    import pandas as pd
    from pyarrow import ArrowInvalid

    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
        else:
            table = pd.read_json(path, lines=True, dtype=False)
    except (ValueError, ArrowInvalid) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise UserError(f"{path} is no valid {path.suffix[1:]} file: {error}") from error
    if "text" not in table:
        columns = ", ".join(map(str, table.columns)) or "none"
        raise UserError(f"{path} has no column 'text'; its columns: {columns}")
    if not all(isinstance(text, str) for text in table["text"]):
        raise UserError(f"{path}: the column 'text' holds something else than text")
    return table["text"].tolist()


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
