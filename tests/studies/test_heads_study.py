"""The heads command: orders, draws, costs against plain passes, files of one's own, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm, t
from support.command_line import refused
from support.rounding import NETWORK, assert_same
from support.tiny_models import ModelOf

from nope_probe import (
    Ablation,
    ablated,
    calibrate,
    capture_losses,
    head_scores,
    heads,
    load,
    run_attention,
    run_heads,
    sequences,
)
from nope_probe.errors import UserError
from nope_probe.figures.heads import COSTS, cost_by_k
from nope_probe.hooks.layers.entry import entered, logits_from, run_to_enter
from nope_probe.hooks.layers.model import logits_of
from nope_probe.studies.heads.orders import HeadCondition, read_order
from nope_probe.studies.heads.study import against_chance

SMALL: dict[str, Any] = {"n_seqs": 24, "seq_len": 20, "folds": 5, "draws": 3, "k": [1, 5]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs") / "heads"
    return run_heads("rope-tiny", mean_seqs=32, single=True, out=out, **SMALL)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load("rope-tiny")


@pytest.fixture(scope="module")
def data(loaded: Any) -> Any:
    return sequences("shipped", tokenizer=loaded.tokenizer, n_seqs=24, seq_len=20)


def first_heads(run: Any, k: int, order: str = "positional") -> dict[int, list[int]]:
    rows = run.tables["order"]
    chosen = rows[(rows["order"] == order) & (rows["rank"] < k)]
    return {int(layer): [*map(int, of)] for layer, of in chosen.groupby("layer")["head"]}


def test_costs_are_those_of_plain_passes(run: Any, loaded: Any, data: Any) -> None:
    model = loaded.model
    others = sequences("shipped", tokenizer=loaded.tokenizer, n_seqs=32, seq_len=20, seed=1)
    every = {layer: range(4) for layer in range(4)}
    calibration = calibrate(model, others, heads=every)
    intact = capture_losses(model, data).mean(1)
    documents = pd.Series(data.documents.numpy())
    costs = run.tables["cost"][run.tables["cost"]["draw"].isna()].set_index(
        ["removed", "k", "measure"]
    )["cost"]
    for removed in ("rope", "content"):
        for k in (1, 5):
            with ablated(model, Ablation(remove=removed, heads=first_heads(run, k)), calibration):
                changed = capture_losses(model, data).mean(1) - intact
            expected = pd.Series(changed.numpy()).groupby(documents).mean().mean()
            assert costs[removed, k, "text"] == pytest.approx(expected, abs=2e-5)


def test_costs_are_drawn_against_the_number_of_heads(run: Any) -> None:
    figure = cost_by_k(run.tables["cost"], run.tables["tests"])
    n_panels = 2 * len(COSTS)  # of two removals, in two columns
    lowest = [figure.layout[f"xaxis{panel}"] for panel in (n_panels - 1, n_panels)]
    assert [axis.title.text for axis in lowest] == ["first heads, k"] * 2
    assert [*lowest[0].tickvals] == SMALL["k"]
    costs = run.tables["cost"][run.tables["cost"]["draw"].isna()]
    costs = costs.set_index(["removed", "order", "measure", "k"]).sort_index()
    [line] = [
        trace
        for trace in figure.data
        if trace.xaxis == "x" and trace.name == "first heads by positional"
    ]
    removed, measure = run.tables["cost"]["removed"].iloc[0], next(iter(COSTS))
    expected = costs.loc[removed, "positional", measure]["cost"]
    assert [*line.y] == [*expected.loc[SMALL["k"]]]


def test_the_order_is_that_of_the_positional_share(loaded: Any) -> None:
    kept = {"n_seqs": 24, "seq_len": 20, "folds": 5}
    ordered = run_heads(loaded, remove="mask", by=["positional", "lowest-information"], k=1,
                        draws=2, **kept).tables["order"]  # fmt: skip
    table = run_attention(loaded, **kept).tables["attention"].set_index(["layer", "head"])
    position = (table["first_position"] + table["others_position"]) / table["information"]
    rows = ordered[ordered["order"] == "positional"]
    assert [*zip(rows["layer"], rows["head"], strict=True)] == [
        *position.sort_values(ascending=False).index
    ]
    assert rows["value"].to_numpy() == pytest.approx(np.sort(position)[::-1], abs=1e-6)
    lowest = ordered[ordered["order"] == "lowest-information"].iloc[0]
    assert (lowest["layer"], lowest["head"]) == table["information"].idxmin()


def test_measures_of_single_heads_are_those_of_head_scores(loaded: Any, data: Any) -> None:
    orders = run_heads(
        loaded, remove="rope", by=["first_key", "previous_token"], **{**SMALL, "k": [1]}
    ).tables["order"]
    expected = head_scores(loaded.model, data).set_index(["layer", "head"])
    for name in ("first_key", "previous_token"):
        rows = orders[orders["order"] == name].set_index(["layer", "head"])["value"]
        assert rows.sort_index().to_numpy() == pytest.approx(expected[name].to_numpy(), abs=1e-5)


def test_draws_are_as_many_heads_of_the_same_layers() -> None:
    ranked = [(2, 1), (0, 3), (2, 0), (1, 1), (0, 0)]
    drawn = [
        HeadCondition(removed="rope", order="x", k=3, draw=draw).heads(ranked, 5, seed=0)
        for draw in range(40)
    ]
    for heads_of_draw in drawn:
        assert sorted(layer for layer, _ in heads_of_draw) == [0, 2, 2]
        assert len({*heads_of_draw}) == 3
    assert {head for one in drawn for _, head in one} == {0, 1, 2, 3, 4}
    assert HeadCondition(removed="rope", order="x", k=3).heads(ranked, 5, seed=0) == ranked[:3]


def test_an_order_is_tested_as_one_more_draw() -> None:
    draws = [0.1, 0.3, 0.2]
    rows = [
        {
            "removed": "rope",
            "order": "x",
            "k": 1,
            "measure": "text",
            "draw": draw,
            "cost": cost,
            "cost_low": cost - 0.2,
            "cost_high": cost + 0.2,
        }
        for draw, cost in [(pd.NA, 2.0), *enumerate(draws)]
    ]
    table = against_chance(pd.DataFrame(rows).astype({"draw": "Int64"})).iloc[0]
    spread = np.std(draws, ddof=1) * (4 / 3) ** 0.5
    error = np.hypot(spread, 0.2 / norm.ppf(0.975))
    assert table["p_holm"] == pytest.approx(2 * t.sf((2.0 - 0.2) / error, 2))
    assert table["chance_high"] == pytest.approx(0.2 + t.ppf(0.975, 2) * spread)
    assert table["differs"]


def test_heads_like_all_others_are_named_in_at_most_one_family_of_twenty() -> None:
    generator = np.random.default_rng(0)
    named = 0
    for _ in range(60):
        rows = [
            {"removed": removed, "order": "x", "k": 5, "measure": measure, "draw": draw,
             "cost": norm.rvs(random_state=generator), "cost_low": 0.0, "cost_high": 0.0}
            for removed in ("rope", "content")
            for measure in ("text", "copy_random", "copy_text", "induction")
            for draw in (pd.NA, 0, 1, 2, 3, 4, 5, 6, 7)
        ]  # fmt: skip
        named += against_chance(pd.DataFrame(rows).astype({"draw": "Int64"}))["differs"].any()
    assert named <= 9  # 3 expected; 10 or more have a probability below 0.001


@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:gpt2", "bridge:gemma2", "hooked:smollm3-rope"]
)
def test_passes_that_begin_at_a_block_are_those_of_the_whole_model(
    spec: str, model_of: ModelOf, tiny: Any
) -> None:
    model, name = model_of(spec)
    inputs = tiny(name).tokens
    with torch.inference_mode():
        entry, logits = run_to_enter(model, inputs, [1])
        assert torch.equal(logits, logits_of(model, inputs))
        seen: list[int] = []
        ablation = Ablation(remove="mask", heads={1: [3]})
        with ablated(model, ablation):
            expected = logits_of(model, inputs)
            with entered(model, entry, 1):
                block = model.blocks[0]
                hook = block.attn.register_forward_hook(lambda *_: seen.append(0))
                assert_same(logits_of(model, inputs), expected, NETWORK)
                hook.remove()
        assert not seen
        with logits_from(model, 2):
            assert_same(logits_of(model, inputs), logits[:, 2:], NETWORK)
        assert torch.equal(logits_of(model, inputs), logits)


def test_a_file_of_ones_own_is_an_order(loaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    pd.DataFrame({"layer": [1, 0], "head": [3, 2], "score": [9.0, 5.0]}).to_csv(path, index=False)
    run = run_heads(loaded, remove="rope", by=str(path), **{**SMALL, "k": [1, 2]})
    order = run.tables["order"]
    assert order[["order", "layer", "head", "value"]].to_numpy().tolist() == [
        ["mine", 1, 3, 9.0],
        ["mine", 0, 2, 5.0],
    ]


def test_the_run_names_its_means_single_heads_and_method(run: Any) -> None:
    single = run.tables["single"]
    assert len(single) == 2 * 5 * 4
    assert len(run.manifest.results["cost_of_means"]) == 2
    assert "draws=3" in run.manifest.command


def test_more_heads_than_there_are_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = refused(capfd, tmp_path, heads, "--n-seqs", 16, "--k", 17)
    assert "--k 17: there are 16 heads" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer,h\n0,1\n", "expected the columns layer and head"),
        ("layer,head\n0,9\n", "L0H9 is no head"),
        ("layer,head\n0,1\n0,1\n", "a head comes twice"),
    ],
)
def test_a_file_without_heads_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        read_order(tmp_path / "x.csv", [(0, 0), (0, 1)])
