"""Folds of the sequences: the fold of each sequence, sums per fold, and their pooled mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.errors import UserError

State = dict[str, Tensor]
DEFAULT_FOLDS = 8
Read = TypeVar("Read")
FoldSum = tuple[int | slice, Tensor]  # folds of a total, and the tensor to add to them


def tensors_of(value: object, name: str = "") -> State:
    """Return the tensors and numbers in a value by name, its fields and keys joined by `/`.

    Numbers become tensors, floats in float64. None is left out.

    Example:
        >>> tensors_of({"seed": 3, "gain": {"w_q": (0.5, 2.0)}, "bias": None})
        {'seed': tensor(3), 'gain/w_q': tensor([0.5000, 2.0000], dtype=torch.float64)}
    """
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {name: value}
    if is_dataclass(value):
        value = {attribute.name: getattr(value, attribute.name) for attribute in fields(value)}
    if not isinstance(value, Mapping):
        return {name: torch.tensor(np.asarray(value))}
    tensors: State = {}
    for key, part in value.items():
        tensors |= tensors_of(part, f"{name}/{key}" if name else str(key))
    return tensors


class TensorRecord:
    """A dataclass of tensors, numbers and other such dataclasses, which tensors by name store.

    Its fields are tensors, numbers, tuples of numbers, mappings by name or number, and records.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Sums(TensorRecord):
        ...     means: dict[int, Tensor]
        ...     scale: float = 1.0
        >>> Sums.from_tensors(Sums(means={2: torch.zeros(1)}, scale=0.5).to_tensors())
        Sums(means={2: tensor([0.])}, scale=0.5)
    """

    def to_tensors(self) -> State:
        """Return the tensors and numbers by name, for `from_tensors`."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls: type[Read], tensors: State) -> Read:
        """Return what `to_tensors` turned into these tensors; other fields have their defaults."""
        hints = get_type_hints(cls)
        return cls(**{name: _value(hints[name], part) for name, part in _parts(tensors).items()})


def _parts(tensors: State) -> dict[str, State]:
    """Return the tensors by the first part of their names, under the rest of their names."""
    parts: dict[str, State] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition("/")
        parts.setdefault(first, {})[rest] = tensor
    return parts


def _value(kind: Any, tensors: State) -> Any:
    """Return a field's value of some type from its tensors."""
    if isinstance(kind, UnionType):  # or None
        kind = get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, TensorRecord):
        return kind.from_tensors(tensors)
    if "" not in tensors:
        key, value = get_args(kind)
        values = {key(n) if key is int else n: _value(value, x) for n, x in _parts(tensors).items()}
        return dict(sorted(values.items())) if key is int else values
    tensor = tensors[""]
    if get_origin(kind) is tuple:
        return tuple(tensor.tolist())
    return kind(tensor) if kind in (bool, int, float) else tensor


def under(state: State, prefix: str) -> State:
    """Return the tensors whose names begin with a prefix, by the rest of their names.

    Example:
        >>> under({"gain/w_q": torch.tensor(2.0), "seed": torch.tensor(3)}, "gain/")
        {'w_q': tensor(2.)}
    """
    return {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}


def fold_products(
    x: Float[Tensor, "batch row_pos width"],
    y: Float[Tensor, "batch col_pos width"],
    fold_of: Int[Tensor, " batch"],
    n_folds: int,
) -> Float[Tensor, "fold row_pos col_pos"]:
    """Return the sum of x_i.y_j over the sequences of each fold, 0 for an empty fold."""
    parts = product_parts(x, y, fold_of, n_folds)
    sums = parts[0][1].new_zeros(n_folds, x.shape[1], y.shape[1])
    for fold, product in parts:
        sums[fold] = product
    return sums


def product_parts(
    x: Float[Tensor, "batch row_pos width"],
    y: Float[Tensor, "batch col_pos width"],
    fold_of: Int[Tensor, " batch"],
    n_folds: int,
) -> list[FoldSum]:
    """Return the sums of x_i.y_j over the sequences of each fold in the batch.

    Every fold takes a matrix product; for whole rounds of folds, a single batched product suffices.
    """
    # Positions stay in front in both factors: a transposing copy takes longer than the product.
    at_least_float32 = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(at_least_float32), y.to(at_least_float32)
    if dealt_in_rounds(fold_of, n_folds):
        left = rearrange(x, "(seq fold) pos width -> fold pos (seq width)", fold=n_folds)
        right = rearrange(y, "(seq fold) pos width -> fold pos (seq width)", fold=n_folds)
        return [(slice(None), left @ right.mT)]
    order = fold_of.argsort(stable=True).to(x.device)
    left, right = (
        rearrange(factor.transpose(0, 1).index_select(1, order), "pos seq width -> pos (seq width)")
        for factor in (x, y)
    )
    folds, sizes = fold_of.unique(return_counts=True)
    widths = (sizes * x.shape[2]).tolist()
    pairs = zip(left.split(widths, 1), right.split(widths, 1), strict=True)
    return [(fold, a @ b.mT) for fold, (a, b) in zip(folds.tolist(), pairs, strict=True)]


def head_products(
    totals: Float[Tensor, "fold head row_pos col_pos"],
    x: Float[Tensor, "batch row_pos head width"],
    y: Float[Tensor, "batch col_pos head width"],
    fold_of: Int[Tensor, " batch"],
) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Return views of totals, and the factors of the product to add to each view.

    A product sums x_i.y_j over the sequences of each fold. It is batched over heads, and over folds
    too if the batch holds whole rounds of folds.
    """
    n_folds = len(totals)
    if dealt_in_rounds(fold_of, n_folds):
        left = rearrange(x, "(seq fold) pos h width -> (fold h) pos (seq width)", fold=n_folds)
        right = rearrange(y, "(seq fold) pos h width -> (fold h) pos (seq width)", fold=n_folds)
        return [(totals.flatten(0, 1), (left, right.mT))]
    products: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []
    for fold in fold_of.unique().tolist():
        members = (fold_of == fold).nonzero().flatten().to(x.device)
        left = rearrange(x[members], "seq pos head width -> head pos (seq width)")
        right = rearrange(y[members], "seq pos head width -> head pos (seq width)")
        products.append((totals[fold], (left, right.mT)))
    return products


def dealt_in_rounds(fold_of: Int[Tensor, " batch"], n_folds: int) -> bool:
    """Return whether a batch holds whole rounds of the folds 0, 1, 2, ..., in order."""
    whole = len(fold_of) % n_folds == 0
    return whole and torch.equal(fold_of, torch.arange(len(fold_of)) % n_folds)


def sum_parts(
    x: Float[Tensor, "batch *rest"], fold_of: Int[Tensor, " batch"], n_folds: int
) -> list[FoldSum]:
    """Return the sums of x over the sequences of each fold in the batch."""
    at_least_float32 = torch.promote_types(x.dtype, torch.float32)
    if dealt_in_rounds(fold_of, n_folds):
        rounds = rearrange(x, "(seq fold) ... -> seq fold ...", fold=n_folds)
        return [(slice(None), rounds.sum(0, dtype=at_least_float32))]
    return [
        (fold, x[(fold_of == fold).to(x.device)].sum(0, dtype=at_least_float32))
        for fold in fold_of.unique().tolist()
    ]


def pooled(
    folds: Float[Tensor, "fold *map"], counts: Int[Tensor, " fold"]
) -> Float[Tensor, "*map"]:
    """Return the mean over all sequences from the means of folds and their sizes."""
    weights = counts.to(folds.dtype) / counts.sum()
    return torch.einsum("f,f...->...", weights, folds)


def pooled_by_half(
    folds: Float[Tensor, "fold *rest"], counts: Int[Tensor, " fold"]
) -> Float[Tensor, "fold *rest"]:
    """Return for each fold the mean over all sequences of its half."""
    half = halves_of(torch.arange(len(folds)))
    weights = counts.to(folds.dtype) * (half[:, None] == half)
    return torch.einsum("fg,g...->f...", weights / weights.sum(1, keepdim=True), folds)


def interleaved_folds(n_seqs: int, n_folds: int, first: int = 0) -> Int[Tensor, " seq"]:
    """Return the fold s % n_folds of each sequence s, counted from `first`.

    A sequence's fold depends on its number alone, so no result depends on the batch size.
    """
    return torch.arange(first, first + n_seqs) % n_folds


def grouped_folds(documents: Int[Tensor, " seq"], n_folds: int) -> Int[Tensor, " seq"]:
    """Return the fold of each sequence, so that a document's sequences share a fold.

    Documents go, the largest first, to the fold with the fewest sequences so far. Ties go to the
    earlier document and the earlier fold. If every sequence is a document, s goes to s % n_folds.

    Args:
        documents: the number of each sequence's document.
        n_folds: how many folds.

    Raises:
        UserError: if there are fewer documents than folds.

    Example:
        >>> grouped_folds(torch.tensor([7, 7, 7, 2, 2, 9]), 2)
        tensor([0, 0, 0, 1, 1, 1])
    """
    sizes = Counter(documents.tolist())
    if len(sizes) < n_folds:
        raise UserError(
            f"{len(documents)} sequences of {len(sizes)} documents do not fill {n_folds} folds: "
            "a document's sequences are not independent, so they share a fold"
        )
    filled, fold_of = [0] * n_folds, dict[int, int]()
    for document, size in sizes.most_common():  # of equal sizes, the first in the text comes first
        fold_of[document] = filled.index(min(filled))
        filled[fold_of[document]] += size
    return torch.tensor([fold_of[document] for document in documents.tolist()])


def folds_of(
    n_seqs: int, n_folds: int | None, documents: Int[Tensor, " seq"] | None
) -> Int[Tensor, " seq"]:
    """Return the fold of each sequence, by its document if given, else by its number.

    Args:
        n_seqs: how many sequences.
        n_folds: how many folds; by default 8, or as many as there are sequences (documents).
        documents: the document of each sequence; by default all sequences are independent.

    Raises:
        UserError: if a fold would be empty, or the documents are not as many as the sequences.
    """
    if documents is not None and len(documents) != n_seqs:
        raise UserError(f"expected the documents of {n_seqs} sequences, got {len(documents)}")
    if n_folds is None:
        n_folds = default_folds(n_seqs if documents is None else len(documents.unique()))
    if documents is None or n_folds < 1:
        fold_counts(n_seqs, n_folds)
        return interleaved_folds(n_seqs, n_folds)
    return grouped_folds(documents, n_folds)


def halves_of(fold_of: Int[Tensor, " seq"]) -> Int[Tensor, " seq"]:
    """Return the half of each sequence: 0 for even folds, 1 for odd folds.

    What is estimated on the other texts of a half has an error that the other half does not share.
    """
    return fold_of % 2


def default_folds(n_documents: int) -> int:
    """Return the default number of folds: 8, or the number of documents if it is lower."""
    return min(DEFAULT_FOLDS, n_documents)


def fold_counts(n_seqs: int, n_folds: int) -> Int[Tensor, " fold"]:
    """Return for each fold f the number of sequences s < n_seqs with s % n_folds == f.

    Raises:
        UserError: if a fold would be empty.
    """
    if not 1 <= n_folds <= n_seqs:
        raise UserError(f"expected from 1 to {n_seqs} folds for {n_seqs} sequences, got {n_folds}")
    return torch.bincount(torch.arange(n_seqs) % n_folds, minlength=n_folds)
