"""The conditions of a plan, and the scores that stop a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nope_probe.analyses.shapley import INTACT
from nope_probe.components import Substitute
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.experiments.ablation.plan import Measured, Plan, make_plan, measure_conditions
from nope_probe.experiments.engine import Engine
from nope_probe.models.parameter_free import build, nope_llama
from nope_probe.runtime.checkpoint import RunCheckpoint

LLAMA = ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp")
NOPE = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
GPT2 = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed")


def small_model(seed: int = 0):
    torch.manual_seed(seed)
    model = build(nope_llama("tiny", rope=True))
    for parameter in model.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape)
    return model


def measured(model: Any, inputs: Sequences, plan: Plan, **options: Any) -> Measured:
    engine = Engine(
        model=model,
        inputs=inputs.inputs,
        n_folds=4,
        batch_size=options.pop("batch_size", 32),
        checkpoint=options.pop("checkpoint", RunCheckpoint()),
    )
    return measure_conditions(engine, plan, **options)


def test_the_default_plan_shares_the_conditions_of_its_two_player_sets():
    plan = make_plan(LLAMA, None)
    assert [each.name for each in plan.player_sets] == ["players", "circuits"]
    assert len(plan.conditions) == 32 + 8
    assert plan.conditions[0] == INTACT
    assert plan.position == "rope"


def test_a_model_without_rope_has_half_the_conditions_and_no_position_source():
    plan = make_plan(NOPE, None)
    assert len(plan.conditions) == 16 + 4
    assert plan.position is None


def test_learned_position_embeddings_take_the_place_of_rope():
    plan = make_plan(GPT2, ["sources"])
    assert plan.position == "pos_embed"
    assert plan.player_sets == ()
    assert set(plan.conditions) == {
        INTACT,
        frozenset({"mask"}),
        frozenset({"pos_embed"}),
        frozenset({"mask", "pos_embed"}),
    }


def test_the_conditions_of_the_sources_are_run_for_all_players():
    plan = make_plan(LLAMA, ["w_q", "mlp"])
    assert {frozenset({"mask"}), frozenset({"rope"}), frozenset({"mask", "rope"})} < set(
        plan.conditions
    )
    assert plan.name(frozenset({"w_q"})) == "mask+rope+mlp"


@pytest.mark.parametrize(
    "players",
    [
        ["mask", "rope_high"],
        ["rope_low+w_q", "mask"],
        ["rope[0:3]", "rope[5:7]"],
        ["mask", "rope_high", "rope_low"],
        ["mask", "rope_high+rope_low"],
    ],
)
def test_no_two_conditions_have_one_name(players: list[str]):
    plan = make_plan(LLAMA, players)
    names = [plan.name(condition) for condition in plan.conditions]
    assert len({*names}) == len(names)
    assert frozenset({"rope"}) in plan.conditions, "one of the sources'"


def test_an_encoder_without_a_mask_is_refused():
    with pytest.raises(UserError, match="no causal mask"):
        make_plan(("w_q", "w_k", "w_o", "w_v"), None)


@pytest.mark.parametrize("scope", ["both", "own", "upstream"])
def test_keys_are_those_of_all_streams_in_the_order_of_the_run(scope: Any):
    plan = make_plan(LLAMA, ["mask", "w_k"])
    plan = replace(plan, n_layers=2, scope=scope, reparametrise=2)
    tokens = Sequences(inputs=torch.randint(2048, (13, 11)), name="random")
    checkpoint = Listing()
    measured(small_model(), tokens, plan, shuffled=tokens, checkpoint=checkpoint)
    assert checkpoint.streams == plan.keys(has_shuffled=True)
    assert len(set(checkpoint.streams)) == len(checkpoint.streams)


@pytest.mark.parametrize(("scope", "n_run"), [("own", 36), ("upstream", 52)])
def test_shared_residual_streams_change_no_map_and_save_layer_passes(scope: Any, n_run: int):
    model = small_model()
    plan = replace(make_plan(LLAMA, ["sources"]), n_layers=3, scope=scope)
    tokens, other = (
        Sequences(inputs=torch.randint(2048, (13, 11)), name="random") for _ in range(2)
    )
    found = []
    for n_bytes in (0, 10**6):
        options = {"batch_size": 7, "shuffled": other, "max_residual_bytes": n_bytes}
        found.append(measured(model, tokens, plan, **options))
    alone, shared = found
    for maps, expected in ((shared.maps, alone.maps), (shared.shuffled, alone.shuffled)):
        assert maps.keys() == expected.keys()
        for condition, each in maps.items():
            assert torch.equal(each.folds.nan_to_num(), expected[condition].folds.nan_to_num())
    # Two batches; the intact model twice, and four conditions without something, one shuffled.
    assert alone.layer_passes == {"run": 2 * (2 * 3 + 4 * 6), "needed": 60}
    assert shared.layer_passes == {"run": n_run, "needed": 60}


class Listing(RunCheckpoint):
    """Lists the streams that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[str] = []

    def stream(self, key: str) -> Any:
        self.streams.append(key)
        return super().stream(key)


def test_a_non_finite_shuffled_control_is_named():
    model, plan = small_model(), replace(make_plan(LLAMA, ["sources"]), n_layers=2)
    tokens, other = (torch.randint(1024, (13, 11)) + 1024 * i for i in range(2))
    model.embed.W_E.data[1024:] = torch.nan  # tokens of the control alone
    with pytest.raises(UserError, match=r"non-finite scores in L0, condition shuffled/mask\+rope$"):
        measured(
            model,
            Sequences(inputs=tokens, name="random"),
            plan,
            shuffled=Sequences(inputs=other, name="random shuffled"),
        )


def test_a_non_finite_score_stops_the_run_and_is_named():
    model, plan = small_model(), replace(make_plan(LLAMA, ["sources"]), n_layers=3)
    tokens = Sequences(inputs=torch.randint(2048, (13, 11)), name="random")
    model.blocks[1].attn.W_Q.data[0] = torch.inf
    with pytest.raises(UserError, match="non-finite scores in L1, the intact model"):
        measured(model, tokens, plan)


def test_only_the_condition_that_overflows_is_named():
    substitutes = (Substitute(gain="norm"),)
    plan = replace(make_plan(LLAMA, ["w_q"]), n_layers=2, substitutes=substitutes)
    model, tokens = (
        small_model(),
        Sequences(inputs=torch.randint(2048, (13, 11)), name="random"),
    )
    model.blocks[0].attn.W_Q.data[0, 0, 0] = 1e30  # finite scores, but a norm that overflows
    with pytest.raises(UserError, match=r"non-finite scores in L0, condition score/mask\+rope"):
        measured(model, tokens, plan)
