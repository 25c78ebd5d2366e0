"""A pass that ends early, for want of memory or on request, loses and counts nothing twice."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from plain_states import agree
from tiny_models import tokens

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.capture import capture_scores, capture_stages
from nope_probe.hooks.gain import calibrate
from nope_probe.hooks.layer import layers_of
from nope_probe.hooks.stream import Keeper, State
from nope_probe.hooks.tap import installed

BridgeOf = Callable[[str], Any]
N_SEQS, N_FOLDS = 37, 5


class Hearing(Keeper):
    """Hears what sizes a stream went down to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def halve(self, batch_size: int) -> None:
        self.sizes.append(batch_size)


def out_of_memory_above(size: int, model: Any, layer: int) -> Any:
    """Run a model on a device that has no memory for more than `size` sequences in one layer."""

    def refuse(tensor: torch.Tensor, hook: object) -> None:
        if len(tensor) > size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return installed([(layers_of(model)[layer].point("hook_resid_post"), refuse)])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("fits", "sizes"), [(16, [8]), (5, [8, 4]), (1, [8, 4, 2, 1])])
def test_a_batch_that_does_not_fit_is_halved_and_counted_once(
    layer: int, fits: int, sizes: list[int], bridge: BridgeOf
):
    model, windows, keeper = bridge("smollm3"), tokens(N_SEQS, seed=3), Hearing()
    keep: dict[str, Any] = {"batch_size": 17, "n_folds": N_FOLDS, "per_head": True}
    truth = capture_scores(model, windows, **keep)
    with out_of_memory_above(fits, model, layer):
        maps = capture_scores(model, windows, keeper=keeper, **keep)
    assert keeper.sizes == sizes
    assert agree(maps.folds, truth.folds)
    assert maps.per_head is not None
    assert truth.per_head is not None
    assert agree(maps.per_head, truth.per_head)


def test_routes_stages_and_gains_are_halved_too(bridge: BridgeOf):
    model, windows = bridge("llama"), tokens(N_SEQS, seed=3)
    routes, stages, gains = (
        capture_scores(model, windows, n_folds=N_FOLDS, routes=True),
        capture_stages(model, windows, n_folds=N_FOLDS),
        calibrate(model, windows),
    )
    with out_of_memory_above(7, model, 0):
        again = capture_scores(model, windows, n_folds=N_FOLDS, routes=True)
        assert again.mean_route is not None
        assert routes.mean_route is not None
        assert agree(again.mean_route, routes.mean_route)
        halved = capture_stages(model, windows, n_folds=N_FOLDS)
        for letter, folds in stages.folds.items():
            assert agree(halved.folds[letter], folds)
        for name, c in calibrate(model, windows).c.items():
            assert c == pytest.approx(gains.c[name], rel=1e-6)


def test_a_single_sequence_that_does_not_fit_is_an_error(bridge: BridgeOf):
    model = bridge("llama")
    with out_of_memory_above(0, model, 0), pytest.raises(torch.OutOfMemoryError):
        capture_scores(model, tokens(7), n_folds=4)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


class Stopped(Exception):  # noqa: N818
    pass


class Stopping(Keeper):
    """Ends a stream at the nth place where it may end, and gives the state to the next."""

    def __init__(self, place: int) -> None:
        self.places, self.state = place, State()

    def restore(self) -> State:
        return self.state

    def wants_to_stop(self) -> bool:
        self.places -= 1
        return self.places == 0

    def keep(self, state: Callable[[], State], *, finished: bool) -> None:
        if self.places <= 0 and not finished:
            self.state = {name: tensor.clone() for name, tensor in state().items()}
            self.places = 10_000
            raise Stopped


@pytest.mark.parametrize("place", range(1, 9))
def test_ended_between_any_two_blocks_a_stream_goes_on_to_the_same_bytes(
    place: int, bridge: BridgeOf
):
    model, windows, keeper = bridge("smollm3"), tokens(N_SEQS, seed=3), Stopping(place)
    how: dict[str, Any] = {"batch_size": 10, "n_folds": N_FOLDS, "routes": True, "per_head": True}
    truth = capture_scores(model, windows, **how)
    with pytest.raises(Stopped):
        capture_scores(model, windows, keeper=keeper, **how)
    absorbed = [int(each) for name, each in keeper.state.items() if name.endswith("absorbed")]
    assert min(absorbed) < N_SEQS
    heard: list[int] = []
    maps = capture_scores(model, windows, keeper=keeper, on_batch=heard.append, **how)
    assert heard == [10, 10, 10, 7]
    for name in ("folds", "mean_route", "key_means", "per_head"):
        seen, true = getattr(maps, name), getattr(truth, name)
        assert torch.equal(seen.nan_to_num(), true.nan_to_num())


def test_a_stream_ended_while_layers_stood_at_three_places_goes_on_right(bridge: BridgeOf):
    model, windows, keeper = bridge("smollm3"), tokens(N_SEQS, seed=3), Stopping(2)
    truth = capture_scores(model, windows, batch_size=17, n_folds=N_FOLDS)
    with out_of_memory_above(8, model, 0), pytest.raises(Stopped):
        capture_scores(model, windows, batch_size=17, n_folds=N_FOLDS, keeper=keeper)
    absorbed = [int(keeper.state[f"{layer}.absorbed"]) for layer in range(3)]
    assert absorbed == [17, 8, 0]
    maps = capture_scores(model, windows, batch_size=17, n_folds=N_FOLDS, keeper=keeper)
    assert agree(maps.folds, truth.folds)


class Pair(Keeper):
    """One of two processes whose totals are added up by hand."""

    n_processes = 2

    def __init__(self, rank: int) -> None:
        self.rank, self.totals = rank, list[torch.Tensor]()

    def add_up(self, totals: Sequence[torch.Tensor]) -> None:
        self.totals = [total.clone() for total in totals]


def test_shares_add_up_to_the_whole(bridge: BridgeOf):
    model, windows = bridge("llama"), tokens(N_SEQS, seed=3)
    pair = [Pair(0), Pair(1)]
    for keeper in pair:
        capture_scores(model, windows, batch_size=8, n_folds=N_FOLDS, keeper=keeper)
    alone = Pair(0)
    alone.n_processes = 1
    capture_scores(model, windows, batch_size=8, n_folds=N_FOLDS, keeper=alone)
    for whole, *parts in zip(alone.totals, *(each.totals for each in pair), strict=True):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
        assert not torch.equal(parts[0], whole)


@pytest.mark.parametrize("remove", [["w_v"], ["mask", "w_q", "w_k", "w_v", "w_o"]])
def test_what_an_ablation_read_of_a_block_does_not_outlive_the_block(
    remove: list[Any], bridge: BridgeOf
):
    import gc

    model, windows = bridge("llama"), tokens(7, n_pos=29)

    def living() -> list[torch.Size]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return sorted(each.shape for each in tensors if each.shape[:1] == (7,))

    before = living()
    with ablated(model, Ablation(remove=remove, gain="norm")), torch.inference_mode():
        model(windows)
        assert living() == before
