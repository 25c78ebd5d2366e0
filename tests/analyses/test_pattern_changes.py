"""What is kept, lost or different between two patterns, against plain arithmetic."""

import math

import pytest
import torch
from support.dense_patterns import estimates as estimates_of
from torch import Tensor

from nope_probe.analyses.differences import compare_numbers
from nope_probe.analyses.jackknife import Interval, jackknife
from nope_probe.analyses.pattern import measure, measure_pattern
from nope_probe.analyses.pattern_changes import pattern_difference
from nope_probe.figures.words import MEASURES
from nope_probe.maps.centred import row_centred
from nope_probe.maps.layers import LayerMaps, Pattern, shared_patterns

N, FOLDS = 13, 5


def rms_of_the_part(p: Tensor, skip: int = 0) -> float:
    """Return the RMS over the cells skip <= j < i, each row centred, by a loop."""
    rows = [p[i, skip:i] for i in range(skip + 1, N)]
    cells = torch.cat([row - row.mean() for row in rows])
    return float(cells.square().mean().sqrt())


def folds(seed: int, slope: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = slope * torch.arange(N, dtype=torch.float64)
    return columns + torch.randn(FOLDS, N, N, generator=generator, dtype=torch.float64)


def patterns(one: Tensor, other: Tensor, counts: Tensor | None = None) -> list[Pattern]:
    return shared_patterns([LayerMaps.of(maps, counts) for maps in (one, other)])


def test_a_constant_added_to_the_other_models_pattern_is_found_exactly_if_paired() -> None:
    base, added = folds(0), torch.linspace(0, 3, N, dtype=torch.float64).expand(N, N)
    change = pattern_difference(*patterns(base + added, base), paired=True)
    assert change.value == pytest.approx(rms_of_the_part(added))
    assert change.high - change.low < 1e-9


def measure_differences(one: Pattern, other: Pattern, *, paired: bool) -> dict[str, Interval]:
    """Return the measures of a model's pattern less those of another's, as `difference` does."""
    after, before = (vars(measure_pattern(pattern)) for pattern in (one, other))
    return {
        name: compare_numbers(
            before[name], after[name], paired=paired, is_rms=MEASURES[name].is_rms
        ).interval
        for name in after
    }


def test_differences_have_the_value_of_the_measures_difference() -> None:
    one, other = folds(1, slope=0.5), folds(2, slope=0.1)
    values = [measure(item[:, None])[0] for item in (one, other)]
    for paired in (True, False):
        differences = measure_differences(*patterns(one, other), paired=paired)
        for name in ("amplitude", "locality", "monotonicity", "relative_r2"):
            expected = getattr(values[0], name).value - getattr(values[1], name).value
            assert differences[name].value == pytest.approx(expected), name
    leads = [
        measure_differences(
            *shared_patterns([LayerMaps.of(maps, skip_keys=1) for maps in (one, other)]),
            paired=pair,
        )["lead"]
        for pair in (True, False)
    ]
    of_first = [measure(item[:, None], 1)[0].lead.value for item in (one, other)]
    assert [lead.value for lead in leads] == pytest.approx([of_first[0] - of_first[1]] * 2)
    undefined = measure_differences(*patterns(one, folds(9)), paired=True)
    assert math.isnan(undefined["relative_r2"].value), "the other model has no pattern"
    assert undefined["locality"].low > 0


def without(fold: int | None) -> list[int]:
    return [member for member in range(FOLDS) if member != fold]


@pytest.mark.parametrize("counts", [[1] * FOLDS, [2, 3, 5, 7, 11]], ids=["even", "uneven"])
def test_an_unpaired_square_has_no_product_within_a_fold_and_the_arms_of_each_models_jackknife(
    counts: list[int],
) -> None:
    sizes = torch.tensor(counts)
    cells = torch.ones(N, N).tril(-1).bool()
    one, other = folds(6, slope=2.0), folds(7)
    x, y = (row_centred(item)[:, cells] for item in (one, other))

    def mean(maps: Tensor, kept: list[int]) -> Tensor:
        return sum(counts[f] * maps[f] for f in kept) / sum(counts[f] for f in kept)

    def square(maps: Tensor, kept: list[int]) -> float:
        pairs = [(a, b) for a in kept for b in kept if a != b]
        total = sum(counts[a] * counts[b] * float((maps[a] * maps[b]).mean()) for a, b in pairs)
        return total / sum(counts[a] * counts[b] for a, b in pairs)

    half = 0.0
    for maps, constant in ((x, mean(y, without(None))), (y, mean(x, without(None)))):
        estimates = [
            square(maps, kept) - 2 * float((mean(maps, kept) * constant).mean())
            for kept in (without(None), *map(without, range(FOLDS)))
        ]
        interval = jackknife(estimates_of(torch.tensor(estimates).double(), sizes))
        half += (interval.high - interval.value) ** 2
    change = pattern_difference(*patterns(one, other, sizes), paired=False)
    low, value, high = (item * abs(item) for item in (change.low, change.value, change.high))
    everything = without(None)
    between = float((mean(x, everything) * mean(y, everything)).mean())
    assert value == pytest.approx(square(x, everything) + square(y, everything) - 2 * between)
    assert high - value == pytest.approx(half**0.5)
    assert value - low == pytest.approx(half**0.5)
