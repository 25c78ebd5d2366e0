"""Measures of heads and differences of runs in Python are those of the commands."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.command_line import run_command
from support.rounding import MEASURE, assert_same, assert_same_table
from support.tiny_models import ByName
from support.tiny_models import tokens as make_tokens

from nope_probe import (
    LoadedModel,
    ScoreMaps,
    Sequences,
    UserError,
    ablate,
    ablated,
    attribute,
    attribute_heads,
    capture_scores,
    compare,
    difference,
    head_scores,
    load,
    measure,
    measure_heads,
    read_run,
    run_ablations,
)

SMALL = "--layers 2 --n-seqs 23 --seq-len 13 --folds 5"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The scores of both shipped models on the same text."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("rope", "nope"):
        line = f"--remove none --model {name}-tiny --per-head {SMALL} --out {root / name}"
        run_command(ablate, *line.split())
    return {name: root / name for name in ("rope", "nope")}


@pytest.fixture(scope="module")
def data(runs: dict[str, Path]) -> Sequences:
    """The sequences of these runs."""
    stored = read_run(runs["rope"]).arrays["tokens"]
    tokens, documents = (torch.from_numpy(stored[name]) for name in ("tokens", "documents"))
    return Sequences(inputs=tokens, name="run", bos=True, documents=documents)


@pytest.fixture(scope="module")
def intact(rope_tiny: LoadedModel, data: Sequences) -> ScoreMaps:
    return capture_scores(rope_tiny.model, data, n_folds=5, per_head=True)


def test_the_frames_of_measures_are_the_tables_of_the_command(
    intact: ScoreMaps, runs: dict[str, Path]
) -> None:
    names = ("pattern", "head_pattern")
    tables = {name: pd.read_csv(runs["rope"] / f"{name}.csv") for name in names}
    frame = measure(intact).to_frame()
    assert len(frame.columns) == 1 + 3 * 6
    assert_same_table(frame, tables["pattern"][frame.columns])
    of_heads = measure_heads(intact).to_frame()
    shared = [column for column in of_heads if column in tables["head_pattern"]]
    assert {"layer", "head", "lead", "amplitude_low", "relative_r2_high"} <= {*shared}
    assert_same_table(of_heads[shared], tables["head_pattern"][shared])


def test_attributed_values_are_found_by_layer_and_head_and_make_a_row_a_condition(
    intact: ScoreMaps, rope_tiny: LoadedModel, data: Sequences
) -> None:
    with ablated(rope_tiny, "mask"):
        without = capture_scores(rope_tiny, data, layers=[1], n_folds=5, per_head=True)
    of_last = {"folds": intact.folds[:, 1:], "per_head": intact.per_head[:, 1:]}
    last = replace(intact, **of_last, visible=intact.visible[1:], layers=(1,))
    maps = {(): last, "mask": without}
    assert [*attribute(maps)] == [1]
    heads = attribute_heads(maps)
    assert [*heads] == [(1, head) for head in range(4)]
    frame = heads.to_frame().set_index(["layer", "head", "removed"])
    assert len(frame) == 2 * 4
    for (layer, head, removed), row in frame.iterrows():
        kept = heads[layer, head].conditions[removed].order
        found = (row["order"], row["order_low"], row["order_high"])
        assert found == pytest.approx(kept.ends, nan_ok=True)
    with pytest.raises(UserError, match=r"^no layer or head \(1, 4\); there are \(1, 0\) to"):
        heads[1, 4]
    assert "order, nats" in repr(heads).splitlines()[0]
    assert "<th>order, nats</th>" in heads._repr_html_()
    assert "locality, -1 to 1" in repr(measure(last)).splitlines()[0]


def test_head_scores_are_those_of_the_command(
    rope_tiny: LoadedModel, data: Sequences, runs: dict[str, Path]
) -> None:
    table = head_scores(rope_tiny.model, data, n_folds=5)
    assert len(table) == 2 * 4
    assert_same_table(table, pd.read_csv(runs["rope"] / "head_pattern.csv")[table.columns])


def test_head_scores_are_the_attention_of_a_plain_pass(bridge: ByName, tiny: ByName) -> None:
    tokens = make_tokens(7, 11)
    heads = head_scores(bridge("llama"), tokens)
    with torch.no_grad():
        attention = tiny("llama").hf(tokens, output_attentions=True).attentions
    previous = [layer.diagonal(-1, 2, 3)[..., 1:].mean((0, 2)) for layer in attention]
    assert_same(heads["previous_token"], torch.cat(previous), MEASURE)
    first = [layer[:, :, 1:, 0].mean((0, 2)) for layer in attention]
    assert_same(heads["first_key"], torch.cat(first), MEASURE)


@pytest.mark.usefixtures("undrawn")
def test_differences_of_runs_from_python_are_those_of_the_command(
    rope_tiny: LoadedModel, data: Sequences, runs: dict[str, Path], tmp_path: Path
) -> None:
    run_command(compare, runs["rope"], runs["nope"], "--out", tmp_path / "run")
    written = pd.read_csv(tmp_path / "run" / "differences.csv")
    models = [rope_tiny, load("nope-tiny", n_layers=2)]
    settings = {"remove": "none", "per_head": True, "folds": 5}
    table = difference(*(run_ablations(model, data, **settings) for model in models))
    assert {*table["method"].dropna()} == {"paired"}
    names = ["table", "layer", "head", "removed", "number"]
    one, two = (of.sort_values(names, ignore_index=True) for of in (table, written))
    assert_same_table(one, two)


def chosen_rows(maps: ScoreMaps, rows: list[int]) -> ScoreMaps:
    queries = torch.tensor(rows)
    folds, visible = maps.folds[:, :, queries], maps.visible[:, queries]
    return replace(maps, folds=folds, visible=visible, query_positions=queries, per_head=None)


def test_runs_that_no_difference_can_be_taken_of_are_refused(runs: dict[str, Path]) -> None:
    run = read_run(runs["rope"])
    for change, message in (
        ({"kind": "trace"}, "unlike commands: ablate, trace; take those of one"),
        ({"kind": "heads"}, "a run is of heads: runs of ablate, attention, .* can be compared"),
    ):
        with pytest.raises(UserError, match=message):
            difference(run, replace(run, manifest=replace(run.manifest, **change)))
    with pytest.raises(UserError, match="the runs have no numbers in common"):
        difference(run, replace(run, tables={}))


def test_maps_that_cannot_be_measured_together_are_refused(
    rope_tiny: LoadedModel, intact: ScoreMaps, data: Sequences
) -> None:
    chosen = chosen_rows(intact, [4, 9, 11, 12])
    for fewer_or_others in ([4, 9, 11], [4, 9, 10, 12]):
        rows = chosen_rows(intact, fewer_or_others)
        with pytest.raises(UserError, match="rows of unlike queries"):
            attribute({(): chosen, "mask": rows})
    no_heads = capture_scores(rope_tiny.model, data, layers=[0])
    with pytest.raises(UserError, match=r"no heads: capture_scores\(..., per_head=True\)"):
        measure_heads(no_heads)
    with pytest.raises(ValueError, match="from 1 to 2 layers, got 3"):
        head_scores(rope_tiny.model, data, n_layers=3)
