"""Which conditions are planned, and what stops a run."""

import pytest
import torch

from nope_probe.analyses.game import INTACT
from nope_probe.data import Windows
from nope_probe.errors import UserError
from nope_probe.experiment import How, make_plan, passes, run_conditions, run_gauges
from nope_probe.models import build, nope_llama

LLAMA = ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp")
NOPE = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
GPT2 = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed")


def small_model(seed: int = 0):
    torch.manual_seed(seed)
    model = build(nope_llama("tiny", rope=True))
    for parameter in model.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape)
    return model


def test_the_default_plan_shares_the_conditions_of_its_two_games():
    plan = make_plan(LLAMA, None)
    assert [game.name for game in plan.games] == ["players", "circuits"]
    assert len(plan.conditions) == 32 + 8
    assert plan.conditions[0] == INTACT
    assert plan.position == "rope"


def test_a_model_without_rope_has_half_the_conditions_and_no_position_source():
    plan = make_plan(NOPE, None)
    assert len(plan.conditions) == 16 + 4
    assert plan.position is None


def test_learned_position_embeddings_stand_in_for_rope():
    plan = make_plan(GPT2, ["sources"])
    assert plan.position == "pos_embed"
    assert plan.games == ()
    assert set(plan.conditions) == {
        INTACT,
        frozenset({"mask"}),
        frozenset({"pos_embed"}),
        frozenset({"mask", "pos_embed"}),
    }


def test_the_sources_are_run_whoever_plays():
    plan = make_plan(LLAMA, ["w_q", "mlp"])
    assert {frozenset({"mask"}), frozenset({"rope"}), frozenset({"mask", "rope"})} < set(
        plan.conditions
    )
    assert plan.name(frozenset({"w_q"})) == "mask+rope+mlp"


def test_an_encoder_has_no_mask_to_study():
    with pytest.raises(UserError, match="no causal mask"):
        make_plan(("w_q", "w_k", "w_o", "w_v"), None)


def test_the_progress_bar_counts_every_pass():
    model, plan = small_model(), make_plan(LLAMA, ["mask", "w_k"])
    tokens = Windows(inputs=torch.randint(2048, (13, 11)), name="random")
    for scope in ("both", "own", "upstream"):
        seen: list[int] = []
        how = How(n_layers=2, batch_size=5, n_folds=4, scope=scope, on_batch=seen.append)
        run_conditions(model, tokens, plan, how, shuffled=tokens)
        list(run_gauges(model, tokens, plan, how, n_gauges=2))
        assert sum(seen) == passes(plan, how, shuffled=True, n_gauges=2) * 13


def test_a_non_finite_score_stops_the_run_and_is_named():
    model, plan = small_model(), make_plan(LLAMA, ["sources"])
    tokens = Windows(inputs=torch.randint(2048, (13, 11)), name="random")
    model.blocks[1].attn.W_Q.data[0] = torch.inf
    with pytest.raises(UserError, match="non-finite scores in layer 2, condition the intact model"):
        run_conditions(model, tokens, plan, How(n_layers=3, n_folds=4))


def test_a_sliding_window_shorter_than_the_sequence_is_named(bridge):
    tokens = Windows(inputs=torch.randint(200, (13, 11)), name="random")
    with pytest.raises(UserError, match=r"layer 1 does not see all 11 earlier keys"):
        run_conditions(bridge("mistral"), tokens, make_plan(LLAMA, ["sources"]), How(n_layers=1))


def test_only_the_condition_that_overflows_is_named():
    model, plan = small_model(), make_plan(LLAMA, ["w_q"])
    tokens = Windows(inputs=torch.randint(2048, (13, 11)), name="random")
    how = How(n_layers=2, n_folds=4, gain="norm")
    model.blocks[0].attn.W_Q.data[0, 0, 0] = 1e30  # finite scores, but a norm that overflows
    with pytest.raises(UserError, match=r"non-finite scores in layer 1, condition mask\+rope"):
        run_conditions(model, tokens, plan, how)
