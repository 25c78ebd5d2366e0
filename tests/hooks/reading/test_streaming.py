"""Sequences are counted once, however they are cut into batches, also if memory runs out."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ablations import ablations, calibration_of
from support.hooked_runs import out_of_memory_above
from support.rounding import NETWORK, assert_same
from support.tiny_models import N_POS, ByName, tokens

from nope_probe import UserError, ablated, calibrate, capture_losses, capture_scores, capture_stages
from nope_probe.hooks.reading.streaming import Stream

N_SEQS, N_FOLDS = 37, 5


class Recorded(Stream):
    """Records the sizes that batches are halved to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def batch_halved(self, batch_size: int) -> None:
        self.sizes.append(batch_size)


@pytest.mark.parametrize("fits_in_0", [37, 11])
@pytest.mark.parametrize(("fits", "n_halved"), [(8, 1), (5, 2), (3, 3), (1, 4)])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_batch_that_does_not_fit_is_halved_and_counted_once(
    layer: int, fits: int, n_halved: int, fits_in_0: int, bridge: ByName
):
    """Blocks that have counted different sequences catch up."""
    model, inputs, checkpoint = bridge("smollm3"), tokens(N_SEQS, seed=3), Recorded()
    keep: dict[str, Any] = {"batch_size": 17, "n_folds": N_FOLDS, "per_head": True}
    expected = capture_scores(model, inputs, **keep)
    with out_of_memory_above(fits_in_0, model, 0), out_of_memory_above(fits, model, layer):
        maps = capture_scores(model, inputs, checkpoint=checkpoint, **keep)
    assert checkpoint.sizes == [8, 4, 2, 1][:n_halved]
    assert_same(maps.folds, expected.folds)
    assert_same(maps.per_head, expected.per_head)


def test_stages_and_gains_are_halved_too(bridge: ByName):
    model, inputs = bridge("llama"), tokens(N_SEQS, seed=3)
    stages, gains = capture_stages(model, inputs, n_folds=N_FOLDS), calibrate(model, inputs)
    with out_of_memory_above(7, model, 0):
        halved = capture_stages(model, inputs, n_folds=N_FOLDS)
        for letter, folds in stages.folds.items():
            assert_same(halved.folds[letter], folds)
        for name, c in calibrate(model, inputs).gains["identity"].items():
            assert c == pytest.approx(gains.gains["identity"][name], rel=NETWORK)


@pytest.mark.parametrize("kind", ["bridge", "hooked"])
@pytest.mark.parametrize("wrong", [-1, 263, 2**31])
def test_a_token_that_the_model_lacks_is_refused_before_anything_is_run(
    wrong: int, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    model, inputs = request.getfixturevalue(kind)("llama"), tokens(N_SEQS, seed=3)
    inputs[0, :2] = torch.tensor([0, 262])  # the first and the last token there is
    captures = (capture_scores, capture_stages, capture_losses, calibrate)
    for capture in captures:
        capture(model, inputs)
    inputs[-1, -1] = wrong
    monkeypatch.setattr("nope_probe.hooks.reading.streaming.run_batch", None)
    for capture in captures:
        with pytest.raises(UserError, match=f"^token {wrong}: the model's tokens are from 0 to 2"):
            capture(model, inputs)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_of_no_sequences_is_an_error(batch_size: int, bridge: ByName):
    with pytest.raises(ValueError, match=f"batches of 1 sequence or more, got {batch_size}"):
        capture_scores(bridge("llama"), tokens(N_SEQS), batch_size=batch_size)


UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


class Share(Stream):
    """One of several processes, which gets the totals of those that ran before."""

    def __init__(self, rank: int, n_processes: int, before: list[list[torch.Tensor]]) -> None:
        self.rank, self.n_processes, self.before = rank, n_processes, before

    def all_reduce(self, totals: Sequence[torch.Tensor]) -> None:
        for total, *others in zip(totals, *self.before, strict=True):
            total += sum(others)
        self.before[:] = [[total.clone() for total in totals]]


@settings(max_examples=6, suppress_health_check=UNCHECKED)
@given(st.data())
def test_maps_do_not_depend_on_batch_size_folds_and_processes_whatever_is_removed(
    bridge: ByName, tiny: ByName, data: st.DataObject
):
    model, inputs = bridge("smollm3"), tokens(13, seed=3)
    n_folds, batch_size = (data.draw(st.integers(1, largest)) for largest in (6, 13 + 2))
    n_processes = data.draw(st.integers(1, min(3, -(-13 // batch_size))))
    numbers = st.lists(st.integers(0, 9), min_size=13, max_size=13)
    enough = numbers.filter(lambda item: len(set(item)) >= n_folds)
    documents = data.draw(st.none() | enough.map(torch.tensor))
    given: dict[str, Any] = {"per_head": True, "n_folds": n_folds, "documents": documents}
    drawn = ablations(model, tiny("smollm3"), n_pos=N_POS)
    ablation, totals = data.draw(drawn), list[list[torch.Tensor]]()
    with ablated(model, ablation, calibration_of(model, tiny("smollm3"), ablation.seed)):
        expected = capture_scores(model, inputs, batch_size=13, **given)
        in_one_fold = capture_scores(model, inputs, n_folds=1).mean
        for rank in range(n_processes):
            share = Share(rank, n_processes, totals)
            result = capture_scores(model, inputs, batch_size=batch_size, checkpoint=share, **given)
    assert torch.equal(result.counts, expected.counts)
    size = 1 + float(in_one_fold.nan_to_num().abs().max())
    assert_same(result.mean, in_one_fold, size=size)
    size = 1 + float(expected.per_head.nan_to_num().abs().max())
    assert_same(result.folds, expected.folds, size=size)
    assert_same(result.per_head, expected.per_head, size=size)
    assert_same(result.per_head.double().mean(2), result.folds, size=size)
