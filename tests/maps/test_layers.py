"""The leads and patterns of layers, against loops over rows."""

from dataclasses import replace

import pytest
import torch
from support.fold_products import fold_products
from torch import Tensor

from nope_probe.analyses.contrasts import ContrastGram
from nope_probe.errors import UserError
from nope_probe.maps.estimates import fold_weights
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


def by_row(maps: Tensor, queries: Tensor, skip: int, window: int = N) -> Tensor:
    """Return the pattern over the visible other keys, [fold, row, key_pos], 0 elsewhere."""
    pattern = torch.zeros(FOLDS, len(queries), N).double()
    for row, query in enumerate(queries.tolist()):
        keys = slice(max(skip, query - window + 1), query)
        seen = maps[:, query, keys]
        pattern[:, row, keys] = seen - seen.mean(-1, keepdim=True) if seen.numel() else 0
    return pattern


def leads_by_row(maps: Tensor, queries: Tensor, skip: int, window: int = N) -> dict[int, Tensor]:
    """Return the lead of each query that sees key 0 and 8 other keys, [fold], nats."""
    return {
        query: maps[:, query, :skip].mean(-1) - maps[:, query, skip:query].mean(-1)
        for query in queries.tolist()
        if query < window and query - skip >= 8
    }


def dense(pattern: Pattern) -> Tensor:
    return pattern.dense().nan_to_num()


@pytest.mark.parametrize("queries", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [N, 17])
@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_a_row_is_its_lead_and_its_pattern_up_to_a_constant(
    skip: int, window: int, queries: Tensor
) -> None:
    x, y = scores(0, window), scores(1, window)
    one, other = shared_patterns([layer(maps, queries, skip) for maps in (x, y)])
    expected, of_other = (by_row(maps, queries, skip, window) for maps in (x, y))
    torch.testing.assert_close(dense(one), expected)
    n_cells = sum(max(0, min(query - skip, window - 1)) for query in queries.tolist())
    cells = (maps.flatten(1)[None] for maps in (expected, of_other))
    product = fold_products(*cells, WEIGHTS)[:, 0, 0] * expected[0].numel() / n_cells
    gram = ContrastGram.of({"one": one, "other": other})
    result = gram.product({"one": 1.0}, {"other": 1.0}).values
    torch.testing.assert_close(result, product, rtol=1e-12, atol=1e-12)
    leads = leads_by_row(x, queries, skip, window)
    if skip == 0:
        assert one.lead is None, "without a first key there is no lead"
        return
    assert one.lead is not None
    assert one.lead.queries.tolist() == [*leads]
    torch.testing.assert_close(one.lead.folds, torch.stack([*leads.values()], 1))
    for row, query in enumerate(one.lead.queries.tolist()):
        rebuilt = dense(one)[:, queries.tolist().index(query), :query]
        rebuilt[:, :skip] += one.lead.folds[:, row, None]
        truth = x[:, query, :query]
        if skip == 1:  # differences among several first keys are in neither part
            rest = rebuilt - truth
            assert (rest - rest.mean(-1, keepdim=True)).abs().max() <= 1e-12 * truth.abs().max()


@pytest.mark.parametrize("n", [7, 9])
def test_sequences_in_which_no_query_sees_eight_other_keys_have_no_lead(n: int) -> None:
    maps = torch.randn(FOLDS, n, n, generator=torch.Generator().manual_seed(0))
    assert LayerMaps.of(maps, skip_keys=1).lead is None
    longer = torch.randn(FOLDS, 10, 10, generator=torch.Generator().manual_seed(0))
    lead = LayerMaps.of(longer, skip_keys=1).lead
    assert lead is not None
    assert lead.queries.tolist() == [9]


@pytest.mark.parametrize("n_bytes", [1, 8 * FOLDS * N * 7, 1 << 20])
def test_any_block_size_gives_the_rows_of_the_pattern_from_memory_or_packed(n_bytes: int) -> None:
    queries = ROWS["chosen rows"]
    maps = scores(3)[:, queries]
    rows = MapRows.of(maps, queries)
    packed = PackedFolds(rows.pack(maps), rows)
    in_memory = LayerMaps.of(maps, COUNTS, queries, 2)
    for kept in (in_memory, replace(in_memory, folds=packed)):
        pattern = kept.pattern
        whole, rows = dense(pattern), []
        for block in pattern.blocks(n_bytes):
            block_rows = torch.zeros(FOLDS, block.rows.shape[1], N).double()
            block_rows[..., : block.rows.shape[-1]] = block.rows
            rows.append(block_rows)
        torch.testing.assert_close(torch.cat(rows, 1), whole)


def test_patterns_of_unlike_maps_are_refused() -> None:
    whole, rows = (layer(scores(0), queries) for queries in ROWS.values())
    with pytest.raises(UserError, match="rows of unlike queries"):
        shared_patterns([whole, rows])
    with pytest.raises(UserError, match="of 11 and 29 positions"):
        shared_patterns([whole, LayerMaps.of(torch.randn(FOLDS, 11, 11), COUNTS)])
    with pytest.raises(ValueError, match="from 0 to 26 skipped keys at 29 positions"):
        shared_patterns([layer(scores(0), ROWS["all rows"], 27)])
