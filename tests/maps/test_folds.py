"""Folds of sequences: those of one document share one, whatever the batch size; their storage."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.rounding import assert_same

from nope_probe import capture_scores, capture_stages, load
from nope_probe.maps.folds import TensorRecord, folds_of, grouped_folds


def test_the_largest_document_goes_first_to_the_fold_with_the_fewest_sequences() -> None:
    documents = torch.tensor([4, 4, 9, 9, 9, 1, 1, 0])
    # 9 to fold 0 (3), 4 to fold 1 (2), 1 to fold 2 (2), 0 to fold 1, the first with 2.
    assert grouped_folds(documents, 3).tolist() == [1, 1, 0, 0, 0, 2, 2, 1]


def test_sequences_without_documents_are_dealt_in_turn_to_eight_folds_at_most() -> None:
    assert torch.equal(folds_of(29, 7, None), torch.arange(29) % 7)
    assert torch.equal(folds_of(29, 7, torch.randperm(29)), torch.arange(29) % 7)
    assert folds_of(29, None, None).max() == 7
    assert folds_of(5, None, None).tolist() == [0, 1, 2, 3, 4]
    assert folds_of(7, None, torch.tensor([2, 2, 5, 5, 5, 3, 2])).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("n_folds", "documents", "message"),
    [
        (0, None, "from 1 to 5 folds for 5 sequences, got 0"),
        (7, None, "from 1 to 5 folds for 5 sequences, got 7"),
        (-1, [2, 2, 5, 5, 3], "from 1 to 5 folds for 5 sequences, got -1"),
        (3, [5, 5, 5, 3, 3], "5 sequences of 2 documents do not fill 3 folds"),
        (3, [0, 1, 2, 3], "the documents of 5 sequences, got 4"),
    ],
)
def test_folds_that_cannot_be_filled_are_an_error(
    n_folds: int, documents: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        folds_of(5, n_folds, documents and torch.tensor(documents))


@pytest.mark.parametrize("batch_size", [3, 64])
def test_fold_means_are_those_of_the_documents_at_any_batch_size(batch_size: int) -> None:
    model = load("parameter-free", n_layers=2).model
    generator = torch.Generator().manual_seed(2)
    inputs = torch.nn.functional.normalize(torch.randn(37, 11, 64, generator=generator), dim=-1)
    documents = torch.randint(13, (37,), generator=generator)
    options = {"batch_size": batch_size, "n_folds": 5, "documents": documents}
    maps = capture_scores(model, inputs, **options)
    stages = capture_stages(model, inputs, **options)
    fold_of = grouped_folds(documents, 5)
    assert torch.equal(maps.counts, fold_of.bincount())
    assert torch.equal(stages.counts, maps.counts)
    for fold in range(5):
        actual = inputs[fold_of == fold]
        truth = capture_scores(model, actual, n_folds=1)
        assert_same(maps.folds[fold], truth.folds[0])
        truth_a = torch.einsum("sid,sjd->ij", actual.double(), actual.double()) / len(actual)
        diagonal = stages.folds["a"][fold].diagonal().mean() / truth_a.diagonal().mean()
        assert_same(stages.folds["a"][fold], truth_a * diagonal)


@dataclass
class Part(TensorRecord):
    means: torch.Tensor
    size: float = 1.0


@dataclass
class Whole(TensorRecord):
    parts: Mapping[int, Part]
    layers: tuple[int, ...]
    has_bos: bool
    last: Part | None = None
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)


def test_a_dataclass_of_tensors_is_read_back_in_the_types_of_its_fields() -> None:
    parts = {layer: Part(torch.full((2,), layer), layer / 2) for layer in range(12)}
    whole = Whole(parts, (3, 1), True)
    tensors = dict(sorted(whole.to_tensors().items()))  # as a file orders them: 10 before 2
    again = Whole.from_tensors(tensors)
    assert [*again.parts] == [*range(12)]
    assert [part.size for part in again.parts.values()] == [part.size for part in parts.values()]
    assert all(torch.equal(again.parts[layer].means, parts[layer].means) for layer in parts)
    assert (again.layers, again.has_bos, again.last, again.named) == ((3, 1), True, None, {})
    with_all = replace(whole, last=parts[5], named={"a": torch.ones(1)})
    again = Whole.from_tensors(with_all.to_tensors())
    assert again.last is not None
    assert again.last.size == 2.5
    assert torch.equal(again.named["a"], torch.ones(1))
