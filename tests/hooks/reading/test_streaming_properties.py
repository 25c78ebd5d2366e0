"""Sums over sequences do not depend on how the sequences are split into batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ablations import ablations, calibration_of
from support.rounding import assert_same
from support.tiny_models import N_POS, ByName
from torch import Tensor

from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.maps.folds import (
    fold_products,
    grouped_folds,
    head_products,
    interleaved_folds,
    pooled,
    sum_parts,
)

SEEDS = st.integers(0, 2**32 - 1)
BATCHES = st.lists(st.integers(1, 12), min_size=1, max_size=5)
N_FOLDS = st.integers(1, 5)
N_SEQS = 13
FEW = settings(
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@given(SEEDS, BATCHES, N_FOLDS)
def test_sums_over_any_batches_are_those_over_all_sequences(
    seed: int, sizes: list[int], n_folds: int
):
    n = sum(sizes)
    x, y, fold_of = randn(seed, n, 2, 3), randn(seed + 1, n, 5, 3), interleaved_folds(n, n_folds)
    products, sums = torch.zeros(n_folds, 2, 5).double(), torch.zeros(n_folds, 2, 3).double()
    heads = torch.zeros(n_folds, 1, 2, 5).double()
    start = 0
    for size in sizes:
        batch = slice(start, start + size)
        folds = interleaved_folds(size, n_folds, first=start)
        assert torch.equal(folds, fold_of[batch])
        products += fold_products(x[batch], y[batch], folds, n_folds)
        for where, part in sum_parts(x[batch], folds, n_folds):
            sums[where] += part
        with_head = x[batch][:, :, None], y[batch][:, :, None]
        for total, factors in head_products(heads, *with_head, folds):
            total.baddbmm_(*factors)
        start += size
    for fold in range(n_folds):
        actual = fold_of == fold
        truth = torch.einsum("sqw,skw->qk", x[actual], y[actual])
        torch.testing.assert_close(products[fold], truth)
        torch.testing.assert_close(heads[fold, 0], truth)
        torch.testing.assert_close(sums[fold], x[actual].sum(0))


@given(SEEDS, st.lists(st.integers(0, 6), min_size=5, max_size=30))
def test_documents_are_whole_in_folds_and_none_is_empty(seed: int, documents: list[int]):
    n_folds = min(3, len(set(documents)))
    fold_of = grouped_folds(torch.tensor(documents), n_folds)
    assert len(set(zip(documents, fold_of.tolist(), strict=True))) == len(set(documents))
    sizes = fold_of.bincount(minlength=n_folds)
    largest = max(documents.count(document) for document in documents)
    assert sizes.min() > 0
    assert sizes.max() - sizes.min() <= largest
    values = randn(seed, len(documents), 2)
    folds = torch.stack([values[fold_of == fold].mean(0) for fold in range(n_folds)])
    torch.testing.assert_close(pooled(folds, sizes), values.mean(0))


@pytest.fixture(scope="module")
def model(bridge: ByName) -> Any:
    return bridge("smollm3")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(1, 263, (N_SEQS, N_POS), generator=torch.Generator().manual_seed(3))


class Share(Stream):
    """One of several processes, which gets the totals of those that ran before."""

    def __init__(self, rank: int, n_processes: int, before: list[list[Tensor]]) -> None:
        self.rank, self.n_processes, self.before = rank, n_processes, before

    def all_reduce(self, totals: Sequence[Tensor]) -> None:
        for total, *others in zip(totals, *self.before, strict=True):
            total += sum(others)
        self.before[:] = [[total.clone() for total in totals]]


@FEW
@given(st.data())
def test_maps_do_not_depend_on_batch_size_folds_and_processes_whatever_is_removed(
    model: Any, tokens: Tensor, tiny: ByName, data: st.DataObject
):
    n_folds, batch_size = (data.draw(st.integers(1, largest)) for largest in (6, N_SEQS + 2))
    n_processes = data.draw(st.integers(1, min(3, -(-N_SEQS // batch_size))))
    numbers = st.lists(st.integers(0, 9), min_size=N_SEQS, max_size=N_SEQS)
    enough = numbers.filter(lambda item: len(set(item)) >= n_folds)
    documents = data.draw(st.none() | enough.map(torch.tensor))
    given: dict[str, Any] = {"per_head": True, "n_folds": n_folds, "documents": documents}
    drawn = ablations(model, tiny("smollm3"), n_pos=tokens.shape[1])
    ablation, totals = data.draw(drawn), list[list[Tensor]]()
    with ablated(model, ablation, calibration_of(model, tiny("smollm3"), ablation.seed)):
        expected = capture_scores(model, tokens, batch_size=N_SEQS, **given)
        in_one_fold = capture_scores(model, tokens, n_folds=1).mean
        for rank in range(n_processes):
            share = Share(rank, n_processes, totals)
            result = capture_scores(model, tokens, batch_size=batch_size, checkpoint=share, **given)
    assert torch.equal(result.counts, expected.counts)
    size = 1 + float(in_one_fold.nan_to_num().abs().max())
    assert_same(result.mean, in_one_fold, size=size)
    size = 1 + float(expected.per_head.nan_to_num().abs().max())
    assert_same(result.folds, expected.folds, size=size)
    assert_same(result.per_head, expected.per_head, size=size)
    assert_same(result.per_head.double().mean(2), result.folds, size=size)


def test_stages_are_those_of_the_first_block_by_default(model: Any, tokens: Tensor):
    by_default, first, second = (
        capture_stages(model, tokens[:4], n_folds=1, stages=["a", "g"], **layer)
        for layer in ({}, {"layer": 0}, {"layer": 1})
    )
    for letter in ("a", "g"):
        assert torch.equal(by_default.folds[letter], first.folds[letter])
        assert not torch.allclose(by_default.folds[letter], second.folds[letter])
    assert {"h", "i"} <= set(capture_stages(model, tokens[:4], n_folds=1).folds)
