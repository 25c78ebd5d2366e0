"""Patterns of layers and their two parts, against loops over rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.maps.estimates import cross_products, fold_weights
from nope_probe.maps.fold_rows import PackedFolds
from nope_probe.maps.layers import LayerMaps, Pattern, shared_patterns
from nope_probe.maps.rows import MapRows, choose_rows

N, FOLDS = 29, 5
COUNTS = torch.tensor([3, 7, 2, 5, 11])
WEIGHTS = fold_weights(len(COUNTS), COUNTS)
ROWS = {"all rows": torch.arange(N), "chosen rows": choose_rows(N, 13)}


def scores(seed: int, window: int = N) -> Tensor:
    """Return fold means of scores of all queries, with a sink at key 0, in a sliding window."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(FOLDS, N, N, generator=generator, dtype=torch.float64)
    maps += torch.linspace(0, 3, N).double()
    maps[..., 0] += 7
    distance = torch.arange(N)[:, None] - torch.arange(N)
    return maps.masked_fill((distance < 0) | (distance >= window), torch.nan)


def layer(maps: Tensor, queries: Tensor, skip: int = 0) -> LayerMaps:
    return LayerMaps.of(maps[:, queries], COUNTS, queries, skip)


def by_row(maps: Tensor, queries: Tensor, skip: int, window: int = N) -> dict[str, Tensor]:
    """Return the pattern over all visible keys, and its parts, [fold, row, key_pos] with 0."""
    parts = {name: torch.zeros(FOLDS, len(queries), N).double() for name in ("whole", "others")}
    for row, query in enumerate(queries.tolist()):
        for name, first in (("whole", 0), ("others", skip)):
            keys = slice(max(first, query - window + 1), query)
            seen = maps[:, query, keys]
            parts[name][:, row, keys] = seen - seen.mean(-1, keepdim=True) if seen.numel() else 0
    return parts | {"first": parts["whole"] - parts["others"]}


def dense(pattern: Pattern) -> Tensor:
    return pattern.dense().nan_to_num()


@pytest.mark.parametrize("queries", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [N, 11])
@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_a_pattern_is_the_sum_of_two_orthogonal_parts(
    skip: int, window: int, queries: Tensor
) -> None:
    x, y = scores(0, window), scores(1, window)
    one, other = shared_patterns([layer(maps, queries, skip) for maps in (x, y)])
    expected, of_other = (by_row(maps, queries, skip, window) for maps in (x, y))
    torch.testing.assert_close(dense(one), expected["whole"])
    torch.testing.assert_close(dense(one.first), expected["first"])
    torch.testing.assert_close(dense(one.others), expected["others"])
    n_cells = sum(min(query, window - 1) for query in queries.tolist())

    def product(part: str) -> Tensor:
        cells = (maps[part].flatten(1)[None] for maps in (expected, of_other))
        return cross_products(*cells, WEIGHTS)[:, 0, 0] * expected[part][0].numel() / n_cells

    parts = {
        "whole": one.product(other),
        "first": one.first.product(other.first),
        "others": one.others.product(other.others),
    }
    for name, estimates in parts.items():
        torch.testing.assert_close(estimates.values, product(name), rtol=1e-12, atol=1e-12)
    total = parts["first"] + parts["others"]
    torch.testing.assert_close(total.values, parts["whole"].values, rtol=1e-12, atol=1e-12)
    crossed = one.first.product(other.others).values
    assert crossed.abs().max() < 1e-13 * parts["whole"].values.abs().max()
    if skip == 0:
        assert parts["first"].values.eq(0).all(), "without first keys there is no part at them"
    elif window == N:
        assert parts["first"].values[0] > parts["others"].values[0], "the sink is at key 0"


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_the_square_is_the_product_of_a_pattern_with_itself(seed: int, skip: int) -> None:
    pattern = layer(scores(seed), ROWS["chosen rows"], skip).pattern
    for part in (pattern, pattern.first, pattern.others):
        torch.testing.assert_close(part.squares().values, part.product(part).values)


@pytest.mark.parametrize("n_bytes", [1, 8 * FOLDS * N * 7, 1 << 20])
def test_any_block_size_gives_the_rows_of_the_pattern_from_memory_or_packed(n_bytes: int) -> None:
    queries = ROWS["chosen rows"]
    maps = scores(3)[:, queries]
    rows = MapRows.of(maps, queries)
    packed = PackedFolds(rows.pack(maps), rows)
    in_memory = LayerMaps.of(maps, COUNTS, queries, 2)
    for kept in (in_memory, replace(in_memory, folds=packed)):
        pattern = kept.pattern.first
        whole, rows = dense(pattern), []
        for block in pattern.blocks(n_bytes):
            block_rows = torch.zeros(FOLDS, block.rows.shape[1], N).double()
            block_rows[..., : block.rows.shape[-1]] = block.rows
            rows.append(block_rows)
        torch.testing.assert_close(torch.cat(rows, 1), whole)


def test_the_pattern_among_other_keys_alone_has_its_mean_over_them() -> None:
    pattern = layer(scores(5), ROWS["all rows"], 1).pattern
    n_all, n_others = N * (N - 1) / 2, (N - 1) * (N - 2) / 2
    alone = pattern.among_others.squares().values
    torch.testing.assert_close(alone * n_others, pattern.others.squares().values * n_all)


def test_patterns_of_unlike_maps_are_refused() -> None:
    whole, rows = (layer(scores(0), queries) for queries in ROWS.values())
    with pytest.raises(UserError, match="rows of unlike queries"):
        shared_patterns([whole, rows])
    with pytest.raises(UserError, match="of 11 and 29 positions"):
        shared_patterns([whole, LayerMaps.of(torch.randn(FOLDS, 11, 11), COUNTS)])
    with pytest.raises(ValueError, match="from 0 to 26 skipped keys at 29 positions"):
        shared_patterns([layer(scores(0), ROWS["all rows"], 27)])
