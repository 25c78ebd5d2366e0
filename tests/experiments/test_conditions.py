"""The conditions of a plan, and the scores that stop a run."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from nope_probe.conditions import INTACT
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.experiments.ablation.plan import Measured, Plan, make_plan, measure_conditions
from nope_probe.experiments.ablation.settings import Settings
from nope_probe.experiments.engine import Engine
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.reading.calibration import capture_written
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.models.parameter_free import build, nope_llama
from nope_probe.runtime.checkpoint import RunCheckpoint

pytestmark = pytest.mark.usefixtures("unenforced", "undrawn")

NOPE = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
LLAMA, GPT2 = ("mask", "rope", *NOPE[1:]), (*NOPE, "pos_embed")


def small_model(seed: int = 0):
    torch.manual_seed(seed)
    model = build(nope_llama("tiny", rope=True))
    for parameter in model.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape)
    return model


def random_tokens(first: int = 0) -> Sequences:
    return Sequences(inputs=first + torch.randint(1024, (13, 11)), name="random")


def measured(
    model: Any, inputs: Sequences, plan: Plan, checkpoint: Any = None, **options: Any
) -> Measured:
    engine = Engine(
        model=model,
        inputs=inputs.inputs,
        n_folds=4,
        batch_size=7,
        checkpoint=checkpoint,
    )
    return measure_conditions(engine, plan, **options)


def powerset(names: list[str]) -> list[tuple[str, ...]]:
    return [members for size in range(len(names) + 1) for members in combinations(names, size)]


@pytest.mark.parametrize(
    ("has", "beside", "n_default"),
    [
        (LLAMA, ["rope"], 32 + 8),
        (NOPE, [], 16 + 4),
        (GPT2, ["pos_embed"], 32 + 8),
        ((*LLAMA, "window"), ["rope", "window"], 32 + 8 + 4),
    ],
)
def test_a_plan_runs_the_conditions_of_the_sources_and_of_its_players_once(
    has: Any, beside: list[str], n_default: int
):
    plan = make_plan(has, None)
    assert [players.name for players in plan.player_sets] == ["players", "circuits"]
    assert (plan.sources, len(plan.conditions)) == (("mask", *beside), n_default)
    assert plan.conditions[0] == INTACT
    sources = make_plan(has, ["sources"])
    assert sources.player_sets == ()
    assert set(sources.conditions) == {frozenset(item) for item in powerset(["mask", *beside])}
    assert set(sources.conditions) < set(make_plan(has, ["w_q", "mlp"]).conditions)


@pytest.mark.parametrize(
    "players",
    [
        ["mask", "rope_high"],
        ["rope_low+w_q", "mask"],
        ["rope[0:3]", "rope[5:7]"],
        ["mask", "rope_high+rope_low"],
    ],
)
def test_no_two_conditions_have_one_name(players: list[str]):
    plan = make_plan(LLAMA, players)
    names = [plan.name(condition) for condition in plan.conditions]
    assert len({*names}) == len(names)
    assert frozenset({"rope"}) in plan.conditions, "one of the sources'"


def test_what_cannot_be_removed_is_no_default_player_and_no_source() -> None:
    has, why = (*LLAMA, "window"), {"window": "hides nothing", "w_k": "is no matrix"}
    plan = make_plan(has, None, left_out={**why, "sink": "the model has none"})
    members = [[player.name for player in player_set.players] for player_set in plan.player_sets]
    assert members == [["mask", "rope", "w_q", "w_o"], ["mask", "rope", "ov"]]
    assert (plan.sources, plan.left_out) == (("mask", "rope"), why)
    assert make_plan(has, ["w_q"], left_out=why).left_out == {"window": "hides nothing"}
    without = make_plan(has, None, left_out=dict.fromkeys(("w_q", "w_o"), "is no matrix"))
    assert [player_set.name for player_set in without.player_sets] == ["players"]


def test_a_condition_without_any_band_is_the_one_without_rope():
    plan = make_plan(("mask", "rope", "w_q"), ["mask", "rope_high", "rope_low"])
    names = [plan.name(condition) for condition in plan.conditions]
    of_sources = ["mask+rope", "rope", "mask", "none"]
    assert names == [*of_sources, "mask+rope_low", "mask+rope_high", "rope_low", "rope_high"]


def test_an_encoder_without_a_mask_is_refused():
    with pytest.raises(UserError, match="no causal mask"):
        make_plan(("w_q", "w_k", "w_o", "w_v"), None)


class Listing(RunCheckpoint):
    """Lists the streams that are run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.streams: list[str] = []

    def stream(self, key: str) -> Any:
        self.streams.append(key)
        return super().stream(key)


@pytest.mark.parametrize(
    "players", [["mask", "w_k"], ["mask", "w_k", "position[MLP0]", "position[L1H0]"]]
)
def test_keys_are_those_of_all_streams_in_the_order_of_the_run(players: list[str], tmp_path: Path):
    plan = replace(make_plan(LLAMA, players), layers=(0, 1))
    tokens, checkpoint = random_tokens(), Listing(tmp_path)
    measured(small_model(), tokens, plan, shuffled=tokens, checkpoint=checkpoint)
    assert checkpoint.streams == plan.keys(has_shuffled=True)
    assert len(set(checkpoint.streams)) == len(checkpoint.streams)


def test_position_is_taken_away_as_it_is_written_without_all_else():
    """Then nothing is left of it; what the intact model writes would leave its opposite."""
    model, tokens, names = small_model(), random_tokens().inputs, ["MLP0", "MLP1"]
    removed = Ablation(remove=["mask", *(f"position[{name}]" for name in names)])
    engine = Engine(model=model, inputs=tokens, n_folds=4).calibrated(None, [removed])
    assert engine.calibration is not None

    def left(stream: Any) -> dict[str, torch.Tensor]:
        result = capture_written(model, tokens, names)
        return {name: written.vectors for name, written in result.items()}

    def of_intact(stream: Any) -> dict[str, torch.Tensor]:
        with ablated(model, removed, engine.calibration):
            return left(stream)

    for name, vectors in engine.once(None, left, removed).items():
        size = engine.calibration.positions[name].vectors.norm()
        assert vectors.norm() <= 1e-3 * size
        assert of_intact(None)[name].norm() > 0.1 * size


def test_the_position_of_heads_of_a_layer_is_that_of_the_intact_model():
    """No head reads another head of its layer, so that a calibration of both serves both."""
    model, tokens = small_model(), random_tokens().inputs
    removed = Ablation(remove=["position[L1H0]", "position[L1H1]"])
    engine = Engine(model=model, inputs=tokens, n_folds=4).calibrated(None, [removed])
    with ablated(model, removed, engine.calibration):
        expected = capture_scores(model, tokens, n_folds=4).mean
    assert torch.equal(engine.scores(None, removed).mean.nan_to_num(), expected.nan_to_num())


def nan_embeddings(model: Any) -> None:
    model.embed.W_E.data[1024:] = torch.nan  # tokens of the control alone


def infinite_weight(model: Any) -> None:
    model.blocks[1].attn.W_Q.data[0] = torch.inf


def overflowing_norm(model: Any) -> None:
    model.blocks[0].attn.W_Q.data[0, 0, 0] = 1e30  # finite scores, but a norm that overflows


@pytest.mark.parametrize(
    ("spoil", "players", "message"),
    [
        (nan_embeddings, ["sources"], r"non-finite scores in L0, condition shuffled/mask\+rope$"),
        (infinite_weight, ["sources"], "non-finite scores in L1, the intact model"),
        (overflowing_norm, ["w_q"], r"non-finite scores in L0, condition score/mask\+rope"),
    ],
)
def test_a_non_finite_score_stops_the_run_and_is_named(spoil: Any, players: Any, message: str):
    settings = Settings(replacement=("identity",), gain="norm")
    plan = replace(make_plan(LLAMA, players), layers=(0, 1), settings=settings)
    model = small_model()
    spoil(model)
    with pytest.raises(UserError, match=message):
        measured(model, random_tokens(), plan, shuffled=random_tokens(1024))
