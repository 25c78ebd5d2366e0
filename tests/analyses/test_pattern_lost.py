"""What a removal takes from the positional part of a layer's scores."""

import pytest
import torch

from nope_probe.analyses.pattern_lost import pattern_lost
from nope_probe.analyses.shapley import INTACT

N, N_FOLDS = 13, 5
MASK, W_Q, BOTH = frozenset({"mask"}), frozenset({"w_q"}), frozenset({"mask", "w_q"})


def folds(pattern: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    return (pattern + content).expand(N_FOLDS, N, N).clone()


def example(kept: float) -> dict[frozenset, torch.Tensor]:
    """Return maps whose positional part a removal of W_Q scales, with contents of their own."""
    generator = torch.Generator().manual_seed(0)
    p, one, other = (torch.randn(N, N, generator=generator).double() for _ in range(3))
    zero = torch.zeros(N, N)
    return {
        INTACT: folds(p, one),
        MASK: folds(zero, one),
        W_Q: folds(kept * p, other),
        BOTH: folds(zero, other),
    }


def rms_of_the_part(maps: dict[frozenset, torch.Tensor]) -> float:
    """Return the RMS of p over the cells j < i, each row centred, by a loop."""
    p = (maps[INTACT] - maps[MASK])[0]
    cells = torch.cat([p[i, :i] - p[i, :i].mean() for i in range(1, N)])
    return float(cells.square().mean().sqrt())


@pytest.mark.parametrize("kept", [1.0, 0.25, 0.0, -0.5])
def test_it_is_the_share_that_is_gone_in_nats_whatever_the_contents(kept: float) -> None:
    maps = example(kept)
    lost = pattern_lost(maps, W_Q, MASK)
    assert lost.value == pytest.approx((1 - kept) * rms_of_the_part(maps), abs=1e-9)


def test_without_its_source_the_whole_part_is_lost() -> None:
    maps = example(0.5)
    assert pattern_lost(maps, MASK, MASK).value == pytest.approx(rms_of_the_part(maps))


def test_it_is_undefined_where_there_is_no_positional_part() -> None:
    maps = example(0.5)
    maps[MASK] = maps[INTACT]
    assert pattern_lost(maps, W_Q, MASK).value != pattern_lost(maps, W_Q, MASK).value


def test_the_maps_of_every_condition_are_needed() -> None:
    maps = example(0.5)
    del maps[BOTH]
    with pytest.raises(KeyError):
        pattern_lost(maps, W_Q, MASK)
