"""Cohere: parallel blocks, adjacent rotary pairs."""

from collections.abc import Callable
from typing import Any

import torch
from support.edited_model import SEVEN, edited, output_sizes, plain_run, subsets
from support.hooked_runs import hooked_run, largest_error
from support.plain_scores import plain_scores
from support.plain_states import agree
from support.tiny_models import tokens

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.model import traits_of
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.hooks.removing.edited_weights import reparametrised
from nope_probe.hooks.removing.targets import components

BridgeOf = Callable[[str], Any]


def test_score_maps_are_the_mean_of_transformers_softmax_inputs(
    bridge: BridgeOf, tiny: Callable[[str], Any]
) -> None:
    inputs = tokens(23, 13, seed=3)
    maps = capture_scores(bridge("cohere"), inputs, n_folds=5, per_head=True)
    true = plain_scores(tiny("cohere").hf, inputs)
    assert agree(maps.mean, true.mean((1, 2)), 1e-5)
    assert maps.per_head is not None
    assert agree(maps.per_head[:, 1, 3].mean(0), _fold_mean(true[1, :, 3]), 1e-5)


def _fold_mean(scores: torch.Tensor) -> torch.Tensor:
    return torch.stack([scores[fold::5].mean(0) for fold in range(5)]).mean(0)


def test_all_128_combinations_equal_an_edited_model(
    bridge: BridgeOf, tiny: Callable[[str], Any]
) -> None:
    model, hf, inputs = bridge("cohere"), tiny("cohere").hf, tiny("cohere").tokens
    assert components(model) == SEVEN
    gains, sizes = calibrate(model, inputs), output_sizes(hf, inputs)
    for remove in subsets(SEVEN):
        expected = plain_run(edited(hf, remove, sizes), inputs)
        with ablated(model, Ablation(remove=remove), gains):
            assert largest_error(hooked_run(model, inputs), expected) <= 1e-5, remove


def test_a_reparametrisation_turns_adjacent_pairs(bridge: BridgeOf) -> None:
    model, inputs = bridge("cohere"), tokens(7, 13, seed=3)
    for traits in traits_of(model).values():
        assert traits.rotary is not None
        assert traits.rotary.pairs is not None
        assert traits.rotary.pairs[:2].tolist() == [[0, 1], [2, 3]]
    scores = capture_scores(model, inputs, n_folds=5).mean.nan_to_num()
    with reparametrised(model, torch.Generator().manual_seed(7)):
        again = capture_scores(model, inputs, n_folds=5).mean.nan_to_num()
    assert (again - scores).abs().max() <= 1e-5 * scores.abs().max()


def test_a_parallel_block_has_no_stages_between_attention_and_mlp(bridge: BridgeOf) -> None:
    grams = capture_stages(bridge("cohere"), tokens(7, 13, seed=3), n_folds=5)
    assert list(grams.folds) == ["a", "b", "c", "d", "g", "h", "i"]
