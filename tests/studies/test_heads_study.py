"""The heads command: orders, draws, costs against plain passes, files of one's own, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.finished_runs import assert_numbers_are_cells
from support.rounding import NETWORK, assert_same
from support.tiny_models import ModelOf

from nope_probe import (
    Ablation,
    UserError,
    ablated,
    calibrate,
    capture_losses,
    capture_need,
    load,
    run_attention,
    run_heads,
    sequences,
)
from nope_probe.hooks.layers.passes import entered, logits_from, logits_of, run_to_enter
from nope_probe.reports.page import sections
from nope_probe.studies.heads import (
    COLUMNS,
    MEASURES,
    VIEWS,
    Settings,
    against_chance,
    headline,
    report,
)
from nope_probe.studies.heads_run import HeadCondition, by_layer, read_order

SMALL: dict[str, Any] = {"n_seqs": 24, "seq_len": 20, "folds": 5, "draws": 3, "k": [1, 5]}
HEADS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs") / "heads"
    removed = {"by": "others", "remove": ["rope", "content"]}
    return run_heads("rope-tiny", mean_seqs=32, out=out, singles=True, **removed, **SMALL)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load("rope-tiny")


@pytest.fixture(scope="module")
def data(loaded: Any) -> Any:
    return sequences("shipped", tokenizer=loaded.tokenizer, n_seqs=24, seq_len=20)


def first_heads(run: Any, k: int, order: str = "others") -> dict[int, list[int]]:
    rows = run.tables["order"]
    chosen = rows[(rows["order"] == order) & (rows["rank"] < k)]
    return {int(layer): [*map(int, of)] for layer, of in chosen.groupby("layer")["head"]}


def cost_of(ablation: Ablation, model: Any, data: Any, calibration: Any = None) -> float:
    """Return how much more an ablated model loses than the intact one, over documents, nats."""
    intact = capture_losses(model, data).mean(1)
    with ablated(model, ablation, calibration):
        changed = capture_losses(model, data).mean(1) - intact
    return pd.Series(changed.numpy()).groupby(data.documents.numpy()).mean().mean()


def test_costs_are_those_of_plain_passes(run: Any, loaded: Any, data: Any) -> None:
    model = loaded.model
    others = sequences("shipped", tokenizer=loaded.tokenizer, n_seqs=32, seq_len=20, seed=1)
    every = {layer: range(4) for layer in range(4)}
    calibration = calibrate(model, others, heads=every)
    costs = run.tables["cost"][run.tables["cost"]["draw"].isna()].set_index(
        ["removed", "k", "measure"]
    )["cost"]
    for removed in ("rope", "content"):
        for k in (1, 5):
            ablation = Ablation(remove=removed, heads=first_heads(run, k))
            expected = cost_of(ablation, model, data, calibration)
            assert costs[removed, k, "text"] == pytest.approx(expected, abs=2e-5)


def test_costs_are_drawn_against_the_number_of_heads(run: Any) -> None:
    costs, single, _ = sections(VIEWS, run.tables, COLUMNS)
    figure = costs.drawn()
    assert len({trace.xaxis for trace in figure.data}) == len(MEASURES)
    assert figure.layout.xaxis.tickvals == (1, 5)  # no 1.5 heads
    lines = {trace.name: trace for trace in figure.data if trace.xaxis == "x" and trace.name}
    tests = run.tables["tests"].query("removed == 'rope' and measure == 'text'")
    for name in ("cost", "chance"):
        [line] = [lines[label] for label in lines if "RoPE" in label and label.endswith(name)]
        assert [[*line.x], [*line.y]] == [SMALL["k"], [*tests[name]]]
    assert len(single.drawn().data) == 2  # a map of all 16 heads for each removal


def test_heads_lose_rope_or_in_a_model_without_it_the_mask_unless_something_is_named() -> None:
    run = run_heads("nope-tiny", by="others", **{**SMALL, "k": [1], "draws": 2}, mean_seqs=16)
    assert run.manifest.removed == ("mask",)
    assert {*run.tables["tests"]["removed"]} == {"mask"}
    assert Settings().removed_of(("mask", "rope", "w_q")) == ("rope",)
    assert Settings(remove=("content",), by=("others",)).removed_of(("mask",)) == ("content",)


def test_orders_are_those_of_attention_on_other_sequences(loaded: Any) -> None:
    kept = {"seq_len": 20, "folds": 5}
    ordered = run_heads(
        loaded, remove="mask", by=["others", "positional"], k=1, n_seqs=11, mean_seqs=24, **kept
    ).tables["order"]
    table = run_attention(loaded, n_seqs=24, seed=1, **kept).tables["attention"]
    table = table.set_index(["layer", "head"])
    position = table["first_position"] + table["others_position"]
    others = table["others_position"] + table["others_content"]
    expected = {
        "others": table["others_position"] / others,
        "positional": position / table["information"],
    }
    for order, values in expected.items():
        rows = ordered[ordered["order"] == order]
        assert [*zip(rows["layer"], rows["head"], strict=True)] == [
            *values.sort_values(ascending=False).index
        ]
        assert rows["value"].to_numpy() == pytest.approx(np.sort(values)[::-1], abs=1e-6)


def test_the_least_needy_heads_lose_rope_next_to_draws_of_all_heads(loaded: Any, data: Any) -> None:
    options = {**SMALL, "k": [3, 7, 12]}
    run = run_heads(loaded, least=True, mean_seqs=40, **options)
    texts = sequences("shipped", tokenizer=loaded.tokenizer, n_seqs=40, seq_len=20, seed=1)
    need = capture_need(loaded.model, texts.inputs[:24], "rope").mean.flatten()
    order = run.tables["order"]
    assert [*order["value"]] == pytest.approx(need.sort(descending=True).values.tolist(), abs=1e-6)
    least = [f"L{at // 4}H{at % 4}" for at in need.argsort().tolist()]
    drawn = dict[int, set[str]]()
    for row in run.tables["cost"].query("measure == 'text'").to_dict("records"):
        names = {*row["heads"].split()}
        assert len(names) == row["k"]
        if pd.isna(row["draw"]):
            assert names == {*least[: row["k"]]}
            lost = {layer: [] for layer in range(4)} | by_layer(
                [(int(name[1]), int(name[3])) for name in names]
            )
            cost = cost_of(Ablation(remove="rope", heads=lost), loaded.model, data)
            assert row["cost"] == pytest.approx(cost, abs=2e-5)
        else:  # as many of all heads, and more of the same
            assert names >= drawn.get(row["draw"], set())
            drawn[row["draw"]] = names
    tests = run.tables["tests"].query("measure == 'text'")
    assert (tests["cost"] < tests["chance_low"]).all(), "they need it least"
    assert headline(run).sentence.startswith("Without RoPE in the last ")
    assert " by need, text costs " in headline(run).sentence


def test_draws_are_as_many_other_heads_of_the_same_layers_while_these_have_any() -> None:
    places = [(layer, head) for layer in range(4) for head in range(3)]
    ranked = [(2, 1), (0, 2), (2, 0), (2, 2)]
    for k, of_layers in ((2, [0, 2]), (3, [0, 2])):
        drawn = [
            HeadCondition(removed="rope", order="x", k=k, draw=draw).heads(ranked, places, seed=0)
            for draw in range(40)
        ]
        for heads_of_draw in drawn:
            assert len({*heads_of_draw}) == k
            assert not {*heads_of_draw} & {*ranked[:k]}
            assert {layer for layer, _ in heads_of_draw} >= {*of_layers}
        seen = {head for heads_of_draw in drawn for head in heads_of_draw}
        assert seen >= {(0, 0), (0, 1), (2, 2)}
        if k == 3:  # L2 has one other head in place of two
            assert (1, 0) in seen
            assert all((2, 2) in heads_of_draw for heads_of_draw in drawn)
    first = HeadCondition(removed="rope", order="x", k=3)
    assert first.heads(ranked, places, seed=0) == ranked[:3]
    assert HeadCondition(removed="rope", draw=10).heads([], places, seed=0) == [(3, 1)]


def test_a_cost_is_ranked_among_distinct_draws_or_among_other_heads_alone() -> None:
    half, columns = 0.25, ["k", "draw", "heads", "cost"]
    rows: list[tuple[int, Any, str, float]] = [
        *((1, pd.NA, "L1H0", 2.0), (2, pd.NA, "L0H0 L1H0", 0.5)),
        *((2, 0, "L0H1 L1H1", 0.1), (2, 1, "L0H1 L1H1", 0.1), (2, 2, "L0H1 L1H2", 0.4)),
    ]
    labels = {"removed": "rope", "order": "x", "measure": "text"}
    costs = pd.DataFrame(rows, columns=columns).astype({"draw": "Int64"}).assign(**labels)
    single = pd.DataFrame(
        [(0, 0, -1.0), (0, 1, 1.5), (1, 0, 2.0)], columns=["layer", "head", "cost"]
    ).assign(removed="rope", measure="text")
    bounds = {"cost_low": costs["cost"] - half, "cost_high": costs["cost"] + half}
    table = against_chance(costs.assign(**bounds), single)
    names = ["k", "cost", "chance", "chance_low", "chance_high", "rank", "of", "beyond"]
    assert table[names].to_numpy().tolist() == [
        [1, 2.0, 0.25, -1.0, 1.5, 1, 3, True],
        [2, 0.5, 0.25, 0.1, 0.4, 1, 3, False],
    ]
    lower = costs.assign(cost=[-3.0, *costs["cost"][1:]])
    bounds = {"cost_low": lower["cost"] - half, "cost_high": lower["cost"] + half}
    first = against_chance(lower.assign(**bounds), single).iloc[0]
    assert (first["rank"], bool(first["beyond"])) == (3, True)


def test_the_first_line_is_the_cost_furthest_from_other_heads(run: Any) -> None:
    tests = run.tables["tests"]
    far = (tests["cost"] - tests["chance"]).abs()
    row = tests.loc[far[tests["beyond"] & (tests["measure"] != "induction")].idxmax()]
    assert row["removed"] == "rope", "L1H3's rotation carries copying"
    heads = {1: "L1H3, first", 5: "the first 5"}[row["k"]]
    name = f"RoPE in {heads} by position among the other keys"
    others = f"{row['chance_low']:.2f} to {row['chance_high']:.2f}"
    lead = headline(run)
    assert all(part in lead.sentence for part in (name, MEASURES[row["measure"]].label, others))
    assert_numbers_are_cells(lead)
    assert f"{row['cost']:+.2f}*\n{others}" in [*lead.table.set_index("without").loc[name]]
    assert max(len(line) for text in lead.table for line in text.split("\n")) <= 13
    none = headline(replace(run, tables={**run.tables, "tests": tests.assign(beyond=False)}))
    assert "*" not in none.sentence
    assert_numbers_are_cells(none)


@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:gpt2", "bridge:gemma2", "hooked:smollm3-rope"]
)
def test_passes_that_begin_at_a_block_are_those_of_the_whole_model(
    spec: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    inputs = tiny.tokens
    with torch.inference_mode():
        logits, entry = logits_of(model, inputs), run_to_enter(model, inputs, [1])
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


def test_a_file_of_ones_own_is_an_order_whose_first_head_is_ranked_among_a_few_others(
    loaded: Any, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    pd.DataFrame({"layer": [1, 0], "head": [3, 2], "score": [9.0, 5.0]}).to_csv(path, index=False)
    run = run_heads(loaded, by=str(path), **{**SMALL, "k": [1, 2]})
    order = run.tables["order"]
    assert order[["order", "layer", "head", "value"]].to_numpy().tolist() == [
        ["mine", 1, 3, 9.0],
        ["mine", 0, 2, 5.0],
    ]
    alone = run.tables["single"][["layer", "head"]].drop_duplicates().to_numpy().tolist()
    assert len(alone) == SMALL["draws"] + 1
    tests = run.tables["tests"].set_index(["k", "measure"])
    assert tests.loc[(1, "text"), "of"] == len([head for head in alone if head != [1, 3]]) + 1
    assert [section.title for section in report(run).sections][1] == "The orders", "no map"


def test_a_single_head_costs_what_it_costs_as_the_first_of_an_order(run: Any) -> None:
    single = run.tables["single"]
    assert len(single) == 2 * HEADS * len(MEASURES)
    alone = single.query("removed == 'rope' and layer == 1 and head == 3 and measure == 'text'")
    first = run.tables["cost"].query("removed == 'rope' and k == 1 and measure == 'text'")
    assert alone["cost"].item() == pytest.approx(first["cost"].item(), abs=1e-6)


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
