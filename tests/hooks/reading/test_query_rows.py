"""Maps of chosen rows are the rows of full maps, whatever a model's scores are made of."""

import torch
from support.rounding import NETWORK, assert_same
from support.tiny_models import ByName

from nope_probe import capture_scores, load
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.capture import capture_bands
from nope_probe.maps.estimates import fold_weights, leave_one_out
from nope_probe.maps.rows import choose_rows

N, ROWS = 29, 11
QUERIES = choose_rows(N, ROWS)
CAUSAL = torch.arange(N) <= QUERIES[:, None]


def tokens(n_seqs: int = 13) -> torch.Tensor:
    return torch.randint(3, 60, (n_seqs, N), generator=torch.Generator().manual_seed(0))


def test_bands_have_the_chosen_rows(tiny: ByName) -> None:
    model = load(str(tiny("llama").folder)).model
    options = {"n_folds": 4, "batch_size": 5, "query_rows": ROWS}
    rows, d_head = capture_scores(model, tokens(), **options), layers_of(model)[0].d_head
    groups = [[list(range(3)), list(range(3, d_head))]] * 2
    bands = capture_bands(model, tokens(), groups, **options)
    assert_same(bands.sum(2), rows.folds[:, :2])


def test_sums_of_many_batches_are_exact_to_float32(tiny: ByName) -> None:
    model = load(str(tiny("llama").folder)).model
    many = tokens(61)
    rows = capture_scores(model, many, query_rows=ROWS, n_folds=4, batch_size=1)
    whole = capture_scores(model.double(), many, n_folds=4, batch_size=1)
    model.float()
    weights = fold_weights(len(rows.counts), rows.counts)
    means, expected = (leave_one_out(maps.folds.double(), weights) for maps in (rows, whole))
    error = (means - expected[..., QUERIES, :]).abs()[..., CAUSAL].max()
    assert error < NETWORK * expected[..., CAUSAL.new_ones(N, N).tril()].abs().max()
