"""The `attention` command: its table, groups of layers, ablations, sentences and page."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.decoders import write_decoder
from support.edited_model import plain_run
from support.finished_runs import assert_numbers_are_cells
from support.rounding import NETWORK, assert_same

from nope_probe import (
    Ablation,
    LoadedModel,
    Sequences,
    ablated,
    capture_attention,
    capture_need,
    run_attention,
    sequences,
    split_attention,
)
from nope_probe.analyses.verdicts import kinds_of
from nope_probe.figures.attention import KINDS, REST, attention_heads
from nope_probe.figures.words import bound_columns
from nope_probe.studies import attention as page
from nope_probe.studies import attention_run

SIZES = {"n_seqs": 23, "seq_len": 19, "folds": 5, "layers": 2}
PARTS = ("first_position", "first_content", "others_position", "others_content")
SHARES = ("positional_share", "others_share")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return run_attention("rope-tiny", **SIZES).tables["attention"]


@pytest.fixture(scope="module")
def data(rope_tiny: LoadedModel) -> Sequences:
    return sequences(tokenizer=rope_tiny.tokenizer, n_seqs=23, seq_len=19)


def test_the_table_has_the_split_of_every_head(
    table: pd.DataFrame, rope_tiny: LoadedModel, data: Sequences
) -> None:
    heads = split_attention(capture_attention(rope_tiny.model, data, n_folds=5))
    assert [*zip(table["layer"], table["head"], strict=True)] == [*heads]
    for row, split in zip(table.to_dict("records"), heads.values(), strict=True):
        for name in ("information", *PARTS, "first_weight", *SHARES, "pattern_missed"):
            found = [row[column] for column in (name, *bound_columns(name))]
            assert found == pytest.approx(getattr(split, name).ends, nan_ok=True)
        for name in SHARES:
            assert row[f"{name}_gap"] == pytest.approx(getattr(split, f"{name}_gap"))
    frame = heads.to_frame()
    np.testing.assert_allclose(frame, table[[*frame]], rtol=1e-6, atol=1e-7)
    assert {"layer", "head", *PARTS, *SHARES, "information", "others_share_low"} <= {*frame}
    assert 8 <= len(repr(heads).splitlines()) <= 42
    added = table[list(PARTS)].sum(axis=1)
    np.testing.assert_allclose(added, table["information"], rtol=0, atol=3e-7)  # 8 digits


def test_the_needs_of_rope_and_mask_are_those_of_the_intact_model(
    table: pd.DataFrame, rope_tiny: LoadedModel, data: Sequences
) -> None:
    for name in ("rope", "mask"):
        need = capture_need(rope_tiny.model, data, name, n_folds=5)
        np.testing.assert_allclose(table[f"need_{name}"], need.mean.flatten(), rtol=1e-6)
        assert (table[f"need_{name}_low"] < table[f"need_{name}"]).all()
    assert "need_rope" not in run_attention("nope-tiny", **SIZES).tables["attention"]


def test_layers_read_one_at_a_time_give_the_same_table(
    table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MAP_BYTES", 1)
    one_by_one = run_attention("rope-tiny", **SIZES).tables["attention"]
    pd.testing.assert_frame_equal(one_by_one, table)


def test_a_removal_is_that_of_ablated(table: pd.DataFrame, rope_tiny: LoadedModel) -> None:
    removed = run_attention("rope-tiny", remove="rope", **SIZES).tables["attention"]
    assert "need_rope" not in removed
    assert not np.allclose(removed["information"], table["information"], rtol=0.01)
    with ablated(rope_tiny.model, Ablation(remove=["rope"])):
        inside = run_attention(rope_tiny, n_seqs=23, seq_len=19, folds=5).tables["attention"]
    pd.testing.assert_frame_equal(inside, removed)


def test_weights_of_the_run_are_the_mean_weights(rope_tiny: LoadedModel, data: Sequences) -> None:
    run = run_attention("rope-tiny", query_rows=7, **SIZES)
    maps = capture_attention(rope_tiny.model, data, n_folds=5, query_rows=7)
    np.testing.assert_allclose(run.maps["weights"], maps.mean, rtol=0, atol=1e-6)
    assert run.query_positions.tolist() == maps.query_positions.tolist()


def made(**columns: list[float]) -> pd.DataFrame:
    """Return a table of heads in L1, with bounds 0.01 below and above."""
    table = pd.DataFrame({"layer": 1, "head": range(len(next(iter(columns.values()))))})
    for name, values in columns.items():
        low, high = bound_columns(name)
        table = table.assign(**{name: values})
        table = table.assign(**{low: table[name] - 0.01, high: table[name] + 0.01})
    return table


HEADS = {
    "information": [2.0, 1.0, 1.0, 0.002],
    "first_position": [0.3, 0.4, 0.1, 0.001],
    "first_content": [0.1, 0.1, 0.7, 0.0],
    "others_position": [1.2, 0.1, 0.0, 0.001],
    "others_content": [0.4, 0.4, 0.2, 0.0],
    "positional_share": [0.9, 0.5, 0.1, 1.0],
    "others_share": [0.75, 0.1, float("nan"), 1.0],
    "first_weight": [0.2, 0.6, 0.4, 0.08],
    "pattern_missed": [0.1, 0.7, 0.9, 0.5],
}


def test_the_first_line_is_of_the_mean_head_in_the_first_row() -> None:
    lead = page.headline("m", made(**HEADS))
    assert_numbers_are_cells(lead)
    vectors = page.headline("m", made(**HEADS), skip_keys=0)
    assert [*vectors.table] == ["head", "others, nats", "position"]
    assert lead.table.to_dict("list") == {
        "head": ["mean", "L1H0", "L1H1"],
        "first key": ["32%", "20% [19, 21]", "60% [59, 61]"],
        "first, nats": ["0.43", "0.40", "0.50"],
        "others, nats": ["0.58", "1.60", "0.50"],
        "position": ["57%", "75% [74, 76]", "10% [9, 11]"],
    }


def test_the_table_has_both_ends_of_the_shares_among_the_other_keys() -> None:
    shares = [0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.4, 0.6, 0.5, 0.55]
    heads = made(**{name: [values[0]] * 10 for name, values in HEADS.items()})
    ends = page.headline("m", heads.assign(others_share=shares)).table["head"]
    assert ends.tolist()[1:] == [f"L1H{head}" for head in (1, 3, 5, 7, 6, 2, 4, 0)]


def test_uniform_heads_are_not_classed() -> None:
    """With W_Q at 0 all scores are 0, and softmax is uniform up to rounding."""
    run = run_attention("rope-tiny", remove="w_q", replacement="zero", **SIZES)
    assert (run.tables["attention"]["information"] < 1e-6).all()
    lead = page.report(run).headline
    assert lead.sentence.startswith("Mean head of rope-tiny without W_Q: ")
    assert lead.table["head"].tolist() == ["mean"]
    assert lead.table.iloc[0].tolist()[2:] == ["0.00", "0.00", "no share"]
    assert not any("No share" in note for note in run.manifest.data.notes)
    heads = run.tables["attention"]
    [heads] = attention_heads(heads, kinds_of(heads)).data
    assert heads.marker.color == REST, "grey"


def test_few_sequences_give_no_shares_and_the_note_says_how_many_would_do() -> None:
    table = made(**HEADS).assign(others_share_gap=[0.4, 0.55, 1.2, 9.0])
    assert not [*attention_run.too_few_sequences(table[:1], 32)]
    [note] = attention_run.too_few_sequences(table, 32)
    assert "2 heads" in note
    assert "--n-seqs 200" in note
    unknown = made(**HEADS).assign(others_share=float("nan"))
    assert page.headline("m", unknown).sentence.endswith("the other keys no share.")


def test_the_map_draws_the_kind_of_each_head_and_its_need() -> None:
    unknown = float("nan")
    heads = made(
        information=[4.0, 1.0, 1.0, 1.0, 1.0, 0.002],
        first_position=[0.1, 0.4, 0.1, 0.4, 0.1, 0.001],
        others_position=[0.9, 0.3, 0.3, 0.3, 0.3, 0.0],
        others_share=[0.5, 0.9, 0.0, unknown, unknown, 1.0],
        first_weight=[0.0, 0.5, 0.5, 0.5, 0.5, 0.5],
    )
    assert kinds_of(heads).tolist() == ["order", "sink", "content", "sink", "", ""]
    alone = heads.assign(first_position=unknown, others_position=unknown, others_share=unknown)
    assert {*kinds_of(alone)} == {""}
    for table, area in ((heads, "information"), (heads.assign(need_rope=range(6)), "need_rope")):
        kinds = kinds_of(table)
        traces = {
            trace.name.partition(":")[0]: trace for trace in attention_heads(table, kinds).data
        }
        assert {name: trace.x.tolist() for name, trace in traces.items()} == {
            **{"sink": [1, 3], "order": [0], "content": [2], "not classed": [4, 5]}
        }
        assert {trace.marker.color for trace in traces.values()} == {
            ink for ink, _ in KINDS.values()
        }
        sizes = np.array([*traces["sink"].marker.size, *traces["order"].marker.size]) - 5
        areas = table[area].to_numpy()[[1, 3, 0]] / table[area].max()
        np.testing.assert_allclose(sizes, 17 * np.sqrt(areas))
        assert ("need of RoPE" in traces["sink"].hovertemplate) == (area == "need_rope")


def test_heads_that_never_see_8_keys_are_left_out() -> None:
    heads = made(**{name: [float("nan"), 0.5] for name in HEADS})
    [drawn] = attention_heads(heads, kinds_of(heads)).data
    assert drawn.x.tolist() == [1]
    none = heads[:1]
    assert not attention_heads(none, kinds_of(none)).data
    known = none.dropna(subset=["information"])
    assert "no head is measured" in page.headline("m", known).sentence


def test_what_learned_sinks_take_is_a_column(table: pd.DataFrame, tmp_path: Path) -> None:
    tiny = write_decoder("gpt_oss", tmp_path)
    run = run_attention(str(tiny.folder), data="random", **SIZES)
    tokens = torch.from_numpy(run.arrays["tokens"]["tokens"])
    of_keys = plain_run(tiny.hf, tokens).patterns[:2]
    taken = torch.stack([1 - weights.sum(-1).mean((0, 2)) for weights in of_keys]).double()
    measured = run.tables["attention"]
    assert_same(torch.tensor(measured["sink_weight"]), taken.flatten(), NETWORK)
    assert (measured["sink_weight_low"] < measured["sink_weight"]).all()
    lead = page.report(run).headline
    assert lead.table["learned sink"][0] == f"{float(taken[1].mean()):.0%}", "L0 sees few keys"
    assert "sink_weight" not in table
