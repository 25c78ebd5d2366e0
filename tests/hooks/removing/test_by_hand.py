"""A model small enough to work out by hand: one layer, one head, weights from 1 to 4.

    W_Q = 1 2    W_K = 2 1    W_V = 1 3    W_O = 4 1    scores = q.k / 2
          3 4          1 3          2 4          2 3

Its inputs have RMS 1, so that the RMS norm leaves them alone (Y = X), and come as two sequences:

    A: x = ( 1, 1) ( 1,-1) (-1, 1)    B: x = ( 1, 1) ( 1, 1) (-1, 1)
       q = ( 4, 6) (-2,-2) ( 2, 2)       q = ( 4, 6) ( 4, 6) ( 2, 2)
       k = ( 3, 4) ( 1,-2) (-1, 2)       k = ( 3, 4) ( 3, 4) (-1, 2)

    scores of A: 18  -4   4    of B: 18  18   4    their mean: 18   7   4
                 -7   1  -1          18  18   4               5.5 9.5 1.5
                  7  -1   1           7   7   1                7   3   1

Row 1 attends to itself alone: z = v = (3, 7), z W_O = (26, 24), X1 = X + z W_O = (27, 25).

"""

from typing import Any

import pytest
import torch
from support.hooked_runs import hooks_left
from support.plain_states import agree
from support.rounding import rounding
from support.tiny_models import ByName

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.attention import AttentionMask
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.capture import capture_scores, capture_stages

NAN = float("nan")
W_Q, W_K = [[1.0, 2.0], [3.0, 4.0]], [[2.0, 1.0], [1.0, 3.0]]
W_V, W_O = [[1.0, 3.0], [2.0, 4.0]], [[4.0, 1.0], [2.0, 3.0]]
A = [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]]
B = [[1.0, 1.0], [1.0, 1.0], [-1.0, 1.0]]
N_TERMS = 2**3  # of a score: products of two coordinates in the norm, the weights and q.k


@pytest.fixture(scope="module")
def micro() -> Any:
    from nope_probe.models.parameter_free import build, parameter_free

    config = parameter_free(n_layers=1, d_model=2)
    config.attn_scale = 2.0
    model = build(config)
    layer = layers_of(model)[0]
    for name, weight in (("w_q", W_Q), ("w_k", W_K), ("w_v", W_V), ("w_o", W_O)):
        layer.weight_per_head(name).copy_(torch.tensor([weight]))
    return model


def scores(model: Any, *sequences: list[list[float]], **options: Any) -> torch.Tensor:
    return capture_scores(model, torch.tensor(sequences), n_folds=1, **options).mean[0]


def same(values: torch.Tensor, by_hand: list[list[float]]) -> bool:
    return agree(values, torch.tensor(by_hand).double(), rounding(N_TERMS))


def test_scores_of_one_sequence(micro: Any) -> None:
    assert same(scores(micro, A), [[18, NAN, NAN], [-7, 1, NAN], [7, -1, 1]])


def test_mean_scores_of_two_sequences(micro: Any) -> None:
    assert same(scores(micro, A, B), [[18, NAN, NAN], [5.5, 9.5, NAN], [7, 3, 1]])


def test_the_mean_term_is_the_score_of_one_sequences_query_with_the_others_key(micro: Any) -> None:
    # (2, 1): q of A with k of B is -7, q of B with k of A is 18; (2, 2): -7 and -4; (3, 2): 7, -1.
    maps = capture_scores(micro, torch.tensor([A, B]), n_folds=1, mean_term=True)
    assert maps.mean_term is not None
    assert same(maps.mean_term[0, 0], [[18, NAN, NAN], [5.5, -5.5, NAN], [7, 3, 1]])


def test_without_the_mask_every_query_is_scored_with_every_key(micro: Any) -> None:
    with ablated(micro, Ablation(remove=["mask"])):
        assert same(scores(micro, A), [[18, -4, 4], [-7, 1, -1], [7, -1, 1]])


def test_without_w_q_the_query_is_the_input(micro: Any) -> None:
    with ablated(micro, Ablation(remove=["w_q"], gain="identity")):
        assert same(scores(micro, A), [[3.5, NAN, NAN], [-0.5, 1.5, NAN], [0.5, -1.5, 1.5]])


def test_without_w_k_the_key_is_the_input(micro: Any) -> None:
    with ablated(micro, Ablation(remove=["w_k"], gain="identity")):
        assert same(scores(micro, A), [[5, NAN, NAN], [-2, 0, NAN], [2, 0, 0]])


def test_the_gain_norm_is_the_root_mean_square_of_the_weights_per_row(micro: Any) -> None:
    # ||W_Q||_F^2 = 1 + 4 + 9 + 16 = 30 over 2 rows: c = sqrt(15).
    with ablated(micro, Ablation(remove=["w_q"], gain="norm")):
        first = float(scores(micro, A)[0, 0])
        assert first == pytest.approx(3.5 * 15**0.5, rel=rounding(N_TERMS))


@pytest.mark.parametrize(
    ("remove", "z", "written", "output"),
    [
        ([], 9 + 49, 26**2 + 24**2, 27**2 + 25**2),
        (["w_v"], 1 + 1, 6**2 + 4**2, 7**2 + 5**2),  # z = x = (1, 1)
        (["w_o"], 9 + 49, 9 + 49, 4**2 + 8**2),  # what is written is z = (3, 7)
        (["w_v", "w_o"], 1 + 1, 1 + 1, 2**2 + 2**2),
    ],
)
def test_gram_of_the_first_position(
    remove: Any, z: float, written: float, output: float, micro: Any
) -> None:
    with ablated(micro, Ablation(remove=remove, gain="identity")):
        maps = capture_stages(micro, torch.tensor([A]), n_folds=1)
    first = {letter: float(maps.mean(letter)[0, 0]) for letter in maps.folds}
    expected = {"a": 2, "b": 18, "c": z, "d": written, "g": output}
    assert first == pytest.approx(expected, rel=rounding(2 * N_TERMS))


def test_later_queries_do_not_see_what_follows_them(bridge: ByName, tiny: ByName) -> None:
    model, tokens = bridge("llama"), tiny("llama").tokens
    other = tokens.clone()
    other[:, 8] += 1
    with torch.inference_mode(), ablated(model, Ablation(remove=["mask"], prefix=5)):
        before, after = model(tokens), model(other)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_a_sliding_window_stays_one_for_later_queries() -> None:
    causal, position = torch.ones(5, 5, dtype=torch.bool).tril(), torch.arange(5)
    window = causal & (position[:, None] - position < 2)
    expected = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    removed = AttentionMask.of(window[None, None]).both_ways(3)
    assert removed.rows()[0, 0].int().tolist() == expected


def test_a_prefix_beyond_the_context_or_the_sequence_is_an_error(
    bridge: ByName, tiny: ByName
) -> None:
    model = bridge("llama")
    context = pytest.raises(ValueError, match=r"prefix of 65 positions, but .* context is 64")
    with context, ablated(model, Ablation(remove=["mask"], prefix=65)):
        pass
    sequence = pytest.raises(ValueError, match="prefix of 12 positions, but the sequences have 11")
    with sequence, ablated(model, Ablation(remove=["mask"], prefix=12)):
        model(tiny("llama").tokens)
    assert not hooks_left(model)
