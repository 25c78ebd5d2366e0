"""Why a head looks at a key, and steps back: terms that add up, the circuit, removals, refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.command_line import run_command
from support.decoders import write_decoder
from support.edited_model import plain_run
from support.finished_runs import assert_numbers_are_cells
from support.models_by_hand import N_VOCAB, induction_model
from support.plain_attention import plain_scores
from support.plain_states import calls_of
from support.rounding import NETWORK
from support.tiny_models import ByName, tokenizer
from support.tiny_models import plain as plain_model

from nope_probe import (
    Ablation,
    LoadedModel,
    Run,
    UserError,
    attention,
    load,
    read_run,
    run_attention,
    text_view,
)
from nope_probe.analyses.one_text import Look
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.maps.folds import under
from nope_probe.models.names import path_of
from nope_probe.run.manifest import ShownText
from nope_probe.studies.attention import report
from nope_probe.studies.attention_text import Question, Text
from nope_probe.studies.engine import NOTHING, Engine
from nope_probe.studies.study import run_passes

SIZES: dict[str, Any] = {"n_seqs": 17, "seq_len": 31, "folds": 5, "layers": 2}
ASKED: dict[str, Any] = {"text": "word other word", **SIZES}
TEXT, QUERY, KEY = "def area(width, height):\n    return width * height", 15, 8
STEPS: dict[str, Any] = {"why": "L3H3", "query": QUERY, "steps": 3}


@pytest.fixture(scope="module")
def stepping(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that goes three steps back."""
    out = tmp_path_factory.mktemp("runs") / "steps"
    return run_attention("rope-tiny", text=TEXT, n_seqs=17, folds=5, out=out, **STEPS)


def assert_adds_up(table: pd.DataFrame) -> None:
    """Check that the terms of each key are its score, and that scores give the weights."""
    by_key = table.groupby("key")
    scores, weights = by_key["score"].first(), by_key["weight"].first()
    np.testing.assert_allclose(by_key["nats"].sum(), scores, atol=1e-5 * scores.abs().max())
    np.testing.assert_allclose(np.exp(scores) / np.exp(scores).sum(), weights, rtol=1e-4)
    assert abs(scores.mean()) < 1e-5, "less the mean over the keys"


def test_why_a_head_looks_there_adds_up_to_its_score_for_every_key(rope_tiny: LoadedModel) -> None:
    asking = run_attention(rope_tiny, why="L1H3", query=-2, **ASKED)
    why = text_view(asking).why
    assert why is not None
    pieces = [*asking.manifest.text.pieces]
    assert (why.head, why.query) == ("L1H3", len(pieces) - 2)
    assert why.table["key"].unique().tolist() == [*range(why.query + 1)]
    shown = why.table.groupby("key")["token"].first().tolist()
    assert shown == ["<bos>", *(piece.strip() for piece in pieces[1:-1])]
    assert_adds_up(why.table)
    weights = asking.maps["text_weights"][1, 3, why.query, : why.query + 1]
    np.testing.assert_allclose(why.table.groupby("key")["weight"].first(), weights, rtol=1e-6)


def test_why_adds_up_where_a_removal_copies_shared_key_heads(tmp_path: Path) -> None:
    """From Phi-3's fused projection, each query head gets its value, and a copy of its key."""
    model = str(write_decoder("phi3", tmp_path).folder)
    asked = {"text": "ab cd", "n_seqs": 11, "seq_len": 13, "folds": 4, "data": "random"}
    run = run_attention(model, why="L2H4", remove="w_v", steps=4, **asked)
    assert_adds_up(run.tables["why"])
    moved = run.tables["why_steps"].dropna(subset=["moved_from"])
    assert moved["effect"].notna().all(), "measured with the weights of the calibration"


def test_a_model_without_exact_terms_is_refused_before_attention_is_read_and_shows_the_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_decoder("gptj", tmp_path / "model").folder
    tokenizer().save_pretrained(folder)
    asked = ["--model", folder, "--data", "random", "--n-seqs", 8, "--folds", 4, "--seq-len", 13]
    run_command(attention, *asked, "--text", "ab", "--out", tmp_path / "shown")
    assert "text_weights" in read_run(tmp_path / "shown").maps
    capfd.readouterr()
    with pytest.raises(SystemExit):
        run_command(attention, *asked, "--text", "ab", "--why", "L0H1", "--out", tmp_path / "why")
    told = capfd.readouterr().err
    assert "error: --why L0H1: RoPE's pairs of coordinates in L0" in told
    assert "attention-L0" not in told
    assert not (tmp_path / "why").exists()


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("head", "query", "said"),
    [
        ("L2H0", -1, "--why L2H0: there are L0 to L1"),
        ("L1H0", 99, "--query 99: the text has "),
        ("L1H0", 1.5, "--query 1.5 should be a valid integer or should be a valid string"),
        ("L1H0", "4", "--query 4: the text has 5 tokens, 0 to 4: take the number of one: 1 'word'"),
        (3, -1, "--why 3 should be a valid string"),
    ],
)
def test_a_head_or_a_query_that_is_none_is_refused_in_a_line(
    head: Any, query: Any, said: str, rope_tiny: LoadedModel
) -> None:
    with pytest.raises(UserError, match=said):
        run_attention(rope_tiny, **{**ASKED, "why": head, "query": query})


@pytest.mark.hooked_transformer
def test_the_steps_back_of_an_induction_head_are_its_circuit_and_nothing_else() -> None:
    tokens, query = torch.tensor([[0, 3, 5, 1, 2, 6, 4, 0, 2, 3, 5]]), 9
    inputs = (tokens + torch.arange(N_VOCAB)[:, None]) % N_VOCAB  # every token at each position
    text = Text(tokens, ShownText(pieces=("x",) * tokens.shape[1], bos=""))
    question = Question(first=Look(1, 0, query, -1), text=text, n_steps=3)
    engine = Engine(model=induction_model(tokens.shape[1]), inputs=inputs, batch_size=3)
    results = run_passes(question.passes(engine, NOTHING))
    [removed] = results["why"]["effects"].tolist()
    table = question.tables(results, torch.ones(tokens.shape[1]))["why_steps"]
    shown = table[table["nats"].abs() > 1e-4]
    place = ["step", "layer", "head", "query", "key", "writer", "side"]
    rows = [tuple(row) for row in shown[[*place, "moved_from"]].astype(object).to_numpy()]
    look, before = (1, 1, 0, query, 2), (2, 0, 0, 2, 1)  # the token after the earlier 3
    assert rows[:2] == [(*look, "L0H0", "key", pd.NA), (*look, "L0H0", "key", 1)]
    assert rows[2] == (*look, "L0H0", "mean", pd.NA)
    assert {(*row[:5], row[6]) for row in rows[3:]} == {(*before, "position")}
    assert shown["nats"].iloc[1] == pytest.approx(3), "the whole score, less nothing"
    assert removed[0] == pytest.approx(3), "without it, nothing of the score is left"
    seen = [3.0 * (tokens[0, key - 1] == 3) for key in range(1, query + 1)]
    weight = np.exp(3) / (1 + np.exp(seen).sum())
    assert removed[1] == pytest.approx(weight, abs=1e-5)


def test_the_terms_of_every_look_add_up_to_its_score_and_are_those_of_why(stepping: Run) -> None:
    table = stepping.tables["why_steps"]
    for (layer, head, query, key), rows in table.groupby([*table.columns[1:5]]):
        asked = {"n_seqs": 17, "folds": 5, "why": f"L{layer}H{head}", "query": int(query)}
        run = run_attention("rope-tiny", text=TEXT, **asked)
        why = run.tables["why"].query(f"key == {key}")
        own = rows[rows["side"].isin(["key", "query", "position"]) & rows["moved_from"].isna()]
        known = why.set_index(["side", "term"])["nats"]
        for row in own.itertuples():
            assert row.nats == pytest.approx(known[row.side, row.writer], abs=1e-5)
        others = rows[rows["writer"] == "other writers"]["nats"].sum()
        assert own["nats"].sum() + others == pytest.approx(why["score"].iloc[0], abs=1e-5)
    first = table[table["moved_from"].notna()].iloc[0]
    assert (first["writer"], first["key"], first["moved_from"]) == ("L1H3", KEY, KEY - 1)
    second = table[table["step"] == 2].iloc[0]
    assert second.iloc[1:5].tolist() == [1, 3, KEY, KEY - 1]


def test_without_a_moved_part_the_model_is_plain_transformers_without_it(stepping: Run) -> None:
    table = stepping.tables["why_steps"]
    [row] = table[table["moved_from"].notna()].to_dict("records")
    assert table["effect"].notna().equals(table["moved_from"].notna())
    plain = plain_model(path_of("rope-tiny"))
    tokens = load("rope-tiny", n_layers=1).tokenizer(TEXT, return_tensors="pt").input_ids
    attn, head = plain.model.layers[1].self_attn, 3
    before, intact, d = plain_scores(plain, tokens), plain_run(plain, tokens), attn.head_dim
    [values] = calls_of(plain, {"V": attn.v_proj}, tokens).values()
    v = values.output.unflatten(-1, (-1, d))
    group = plain.config.num_attention_heads // v.shape[2]
    share = intact.patterns[1, 0, head, KEY, KEY - 1] * v[0, KEY - 1, head // group]

    def without(module: Any, given: Any) -> Any:
        given[0][0, KEY, head * d : (head + 1) * d] -= share
        return given

    attn.o_proj.register_forward_pre_hook(without)
    for end, found in (("", intact), ("_without", plain_run(plain, tokens))):
        weight = float(found.patterns[3, 0, 3, QUERY, KEY])
        assert row[f"weight{end}"] == pytest.approx(weight, rel=NETWORK)
    assert row["weight"] > 0.9 > 0.1 > row["weight_without"]
    fall = float((before - plain_scores(plain, tokens))[3, 0, 3, QUERY, KEY])
    assert row["effect"] == pytest.approx(fall, rel=NETWORK)
    assert 0.5 * row["nats"] < fall < row["nats"]


def test_the_text_view_has_the_terms_of_each_step_and_the_way_there(stepping: Run) -> None:
    html, looked = text_view(stepping).html(), text_view(stepping).why
    assert looked is not None
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    first, second = json.loads(data)["looks"]
    table = looked.steps
    for step, look in ((1, first), (2, second)):
        rows = table[(table["step"] == step) & table["moved_from"].isna()]
        kept = ~rows["side"].isin(["mean", "other"]) | (rows["writer"] == "other writers")
        place = look["keys"].index(rows["key"].iloc[0])
        assert look["scores"][place] == pytest.approx(rows["nats"][kept].sum(), abs=1e-3)
        terms = [values[place] for _, _, values in look["terms"]]
        sides = {name.partition(", ")[2] for name, _, _ in look["terms"]}
        assert {"", "key"} <= sides <= {"", "key", "query"}, "terms of position are of no side"
        assert sum(terms) == pytest.approx(look["scores"][place], abs=1e-3)
    [move] = first["back"]
    assert (move["name"], move["query"], move["key"]) == (second["name"], KEY, KEY - 1)
    assert (second["name"], second["query"], second["key"]) == ("L1H3", KEY, KEY - 1)
    [row] = table[table["moved_from"].notna()].to_dict("records")
    assert (move["nats"], move["effect"]) == pytest.approx((row["nats"], row["effect"]))
    terms = looked.terms.set_index("term")
    assert terms.loc["L1H3, key, from 7"].tolist() == [
        f"{row['nats']:+.1f}",
        f"{row['effect']:+.1f}",
        f"{row['weight_without']:.0%}",
    ]
    assert_numbers_are_cells(report(stepping).headline)


def test_what_each_writer_moved_adds_up_to_what_it_wrote_and_the_last_step_is_not_split(
    tiny: ByName,
) -> None:
    model, tokens = load(str(tiny("llama").folder)).model, torch.tensor([[1, 7, 3, 5, 2, 7, 4, 6]])
    text = Text(tokens, ShownText(pieces=("x",) * tokens.shape[1], bos=""))
    question = Question(first=Look(1, 4, 4, -1), text=text, n_steps=2, compared=False)
    engine = Engine(model=model, inputs=tokens, batch_size=1)
    state = run_passes(question.passes(engine, Ablation()))["why"]
    look, read = question.first.with_key(state), capture_positions(model, tokens, per_head=True)
    of_head = dict(read.readers[look.layer].heads())[look.head]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return of_head.rotation.turned(x[0])[:, 0]

    moved = under(state, look.moved("key", ""))
    assert len(moved) == 3
    for writer, parts in moved.items():
        written = turned(of_head.keys[writer])[look.key] @ turned(of_head.q)[look.query]
        assert float(parts.sum()) == pytest.approx(float(written) * of_head.scale, rel=NETWORK)
    last = run_passes(replace(question, n_steps=1).passes(engine, Ablation()))["why"]
    assert {*state} - {*last} == {look.moved("key", writer) for writer in moved}
