"""Maps of chosen rows are the rows of full maps, whatever a model's scores are made of."""

import pytest
import torch
from support.tiny_models import ByName

from nope_probe import capture_scores, capture_stages, load
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.maps.estimates import leave_one_out
from nope_probe.maps.rows import choose_rows

N, ROWS = 29, 11
QUERIES = choose_rows(N, ROWS)
CAUSAL = torch.arange(N) <= QUERIES[:, None]


def tokens(n_seqs: int = 13) -> torch.Tensor:
    return torch.randint(3, 60, (n_seqs, N), generator=torch.Generator().manual_seed(0))


# Grouped heads; a soft cap, whose scores are no product, and a window.
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_chosen_rows_are_those_of_the_full_map(tiny: ByName, name: str) -> None:
    model = load(str(tiny(name).folder)).model
    options = {"n_folds": 4, "batch_size": 5, "per_head": True}
    whole = capture_scores(model, tokens(), **options)
    rows = capture_scores(model, tokens(), query_rows=ROWS, **options)
    assert rows.query_positions.tolist() == QUERIES.tolist()
    assert rows.folds.shape == (4, len(whole.layers), ROWS, N)
    for got, full in ((rows.folds, whole.folds), (rows.per_head, whole.per_head)):
        expected = full[..., QUERIES, :].float().masked_fill(~CAUSAL, torch.nan)
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_mean_term_bands_and_stages_have_the_chosen_rows(tiny: ByName) -> None:
    model = load(str(tiny("llama").folder)).model
    options = {"n_folds": 4, "batch_size": 5}
    whole = capture_scores(model, tokens(), mean_term=True, **options)
    rows = capture_scores(model, tokens(), mean_term=True, query_rows=ROWS, **options)
    expected = whole.mean_term[..., QUERIES, :].float()
    torch.testing.assert_close(rows.mean_term, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
    d_head = layers_of(model)[0].d_head
    groups = [[list(range(3)), list(range(3, d_head))]] * 2
    bands = capture_bands(model, tokens(), groups, query_rows=ROWS, **options)
    torch.testing.assert_close(
        bands.sum(2), rows.folds[:, :2], equal_nan=True, rtol=1e-5, atol=1e-6
    )
    stages = capture_stages(model, tokens(), **options)
    chosen = capture_stages(model, tokens(), query_rows=ROWS, **options)
    for letter, folds in stages.folds.items():
        expected = folds[:, QUERIES].float().masked_fill(~CAUSAL, torch.nan)
        torch.testing.assert_close(chosen.folds[letter], expected, equal_nan=True)


def test_sums_of_many_batches_are_exact_to_float32(tiny: ByName) -> None:
    model = load(str(tiny("llama").folder)).model
    many = tokens(61)
    rows = capture_scores(model, many, query_rows=ROWS, n_folds=4, batch_size=1)
    whole = capture_scores(model.double(), many, n_folds=4, batch_size=1)
    model.float()
    means, expected = (leave_one_out(maps.folds.double(), maps.counts) for maps in (rows, whole))
    error = (means - expected[..., QUERIES, :]).abs()[..., CAUSAL].max()
    assert error < 1e-6 * expected[..., CAUSAL.new_ones(N, N).tril()].abs().max()
