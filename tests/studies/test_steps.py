"""Why a head looks at a key, steps back: the circuit, terms that add up, and removals."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ci.chromium import needs_chromium, opened
from support.induction import N_VOCAB, induction_model
from support.plain_attention import plain_scores
from support.rounding import NETWORK
from transformers import AutoModelForCausalLM

from nope_probe import load, run_attention
from nope_probe.models.names import path_of
from nope_probe.removal import Writer
from nope_probe.studies.attention.steps import Look, LookSteps
from nope_probe.studies.attention.study import AttentionStudy
from nope_probe.studies.engine import Engine

TEXT, QUERY, KEY = "def area(width, height):\n    return width * height", 15, 8
ASKED: dict[str, Any] = {"why": "L3H3", "query": QUERY, "steps": 3}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> AttentionStudy:
    out = tmp_path_factory.mktemp("runs") / "steps"
    return run_attention("rope-tiny", text=TEXT, n_seqs=17, folds=5, out=out, **ASKED)


@pytest.mark.hooked_transformer
def test_the_steps_back_of_an_induction_head_are_its_circuit_and_nothing_else() -> None:
    text, query = torch.tensor([[0, 3, 5, 1, 2, 6, 4, 0, 2, 3, 5]]), 9
    inputs = (text + torch.arange(N_VOCAB)[:, None]) % N_VOCAB  # every token once at each position
    steps = LookSteps(first=Look(Writer("L1H0"), query), text=text, n_steps=3)
    engine = Engine(model=induction_model(text.shape[1]), inputs=inputs, batch_size=3)
    for step in (1, 2, 3):
        steps.read(engine, "why", None, step)
    [removed] = steps.read_effects(engine, "why", None)["measured"].tolist()
    shown = steps.table[steps.table["nats"].abs() > 1e-4]
    place = ["step", "layer", "head", "query", "key", "writer", "side"]
    rows = [tuple(row) for row in shown[[*place, "moved_from"]].astype(object).to_numpy()]
    look, before = (1, 1, 0, query, 2), (2, 0, 0, 2, 1)  # the token after the earlier 3
    assert rows[:2] == [(*look, "L0H0", "key", pd.NA), (*look, "L0H0", "key", 1)]
    assert rows[2] == (*look, "L0H0", "mean", pd.NA)
    assert {(*row[:5], row[6]) for row in rows[3:]} == {(*before, "position")}
    assert shown["nats"].iloc[1] == pytest.approx(3), "the whole score, less nothing"
    assert removed[0] == pytest.approx(3), "without it, nothing of the score is left"
    seen = [3.0 * (text[0, key - 1] == 3) for key in range(1, query + 1)]
    weight = np.exp(3) / (1 + np.exp(seen).sum())
    assert removed[1] == pytest.approx(weight, abs=1e-5)


def test_the_terms_of_every_look_add_up_to_its_score_and_are_those_of_why(
    study: AttentionStudy,
) -> None:
    table = study.tables["why_steps"]
    for (step, layer, head, query, key), rows in table.groupby([*table.columns[:5]]):
        why = study.why(f"L{layer}H{head}", query=query).table.query(f"key == {key}")
        own = rows[rows["side"].isin(["key", "query", "position"]) & rows["moved_from"].isna()]
        known = why.set_index(["side", "term"])["nats"]
        for row in own.itertuples():
            assert row.nats == pytest.approx(known[row.side, row.writer], abs=1e-5)
        others = rows[rows["writer"] == "other writers"]["nats"].sum()
        assert own["nats"].sum() + others == pytest.approx(why["score"].iloc[0], abs=1e-5)
        of_writers = own[own["side"] != "position"]
        sizes = of_writers["nats"].abs()
        assert (sizes > 0.1 * abs(why["score"].iloc[0]) - 1e-6).all()
        assert of_writers.groupby("side").size().max() <= 3 or of_writers.empty
        heads = of_writers[of_writers["writer"].str.contains("H") & (step < 3)]
        parts = rows[rows["moved_from"].notna() | rows["side"].isin(["mean", "other"])]
        for writer, of_writer in heads.groupby("writer"):
            moved = parts[parts["writer"] == writer]["nats"].sum()
            assert moved == pytest.approx(of_writer["nats"].sum(), abs=1e-6)
    first = table[table["moved_from"].notna()].iloc[0]
    assert (first["writer"], first["key"], first["moved_from"]) == ("L1H3", KEY, KEY - 1)
    second = table[table["step"] == 2].iloc[0]
    assert second.iloc[1:5].tolist() == [1, 3, KEY, KEY - 1]


def test_without_a_moved_part_the_model_is_plain_transformers_without_it(
    study: AttentionStudy,
) -> None:
    table = study.tables["why_steps"]
    [row] = table[table["moved_from"].notna()].to_dict("records")
    assert table["effect"].notna().equals(table["moved_from"].notna())
    plain = AutoModelForCausalLM.from_pretrained(
        path_of("rope-tiny"), attn_implementation="eager", dtype=torch.float32
    )
    tokens = load("rope-tiny", n_layers=1).tokenizer(TEXT, return_tensors="pt").input_ids
    attention, head, d = (
        plain.model.layers[1].self_attn,
        3,
        plain.model.layers[1].self_attn.head_dim,
    )
    before, values = plain_scores(plain, tokens), list[torch.Tensor]()
    hook = attention.v_proj.register_forward_hook(lambda *args: values.append(args[-1]))
    with torch.inference_mode():
        intact = plain(tokens, output_attentions=True)
        hook.remove()
        v = values[0].unflatten(-1, (-1, d))
        group = plain.config.num_attention_heads // v.shape[2]
        share = intact.attentions[1][0, head, KEY, KEY - 1] * v[0, KEY - 1, head // group]

        def without(module: Any, given: Any) -> Any:
            given[0][0, KEY, head * d : (head + 1) * d] -= share
            return given

        attention.o_proj.register_forward_pre_hook(without)
        after = plain(tokens, output_attentions=True)
    for end, found in (("", intact), ("_without", after)):
        weight = float(found.attentions[3][0, 3, QUERY, KEY])
        assert row[f"weight{end}"] == pytest.approx(weight, rel=NETWORK)
    assert row["weight"] > 0.9 > 0.1 > row["weight_without"]
    fall = float((before - plain_scores(plain, tokens))[3, 0, 3, QUERY, KEY])
    assert row["effect"] == pytest.approx(fall, rel=NETWORK)
    assert 0.5 * row["nats"] < fall < row["nats"]


def test_steps_of_a_finished_run_are_those_of_the_run_that_asks(study: AttentionStudy) -> None:
    kept = study.why("L3H3", query=QUERY, steps=3)
    assert kept.steps is study.tables["why_steps"]
    two = study.why("L3H3", query=QUERY, steps=2)
    expected = study.tables["why_steps"]
    columns = [*expected.columns]
    rows = expected.merge(two.steps, on=columns[: columns.index("nats")], how="inner")
    assert len(rows) == len(two.steps)
    np.testing.assert_allclose(rows["nats_x"], rows["nats_y"], atol=1e-5)
    with pytest.raises(ValueError, match="ask for steps=2 or more"):
        _ = study.why("L3H3", query=QUERY).graph


def test_the_graph_has_heads_at_their_queries_and_edges_in_nats(study: AttentionStudy) -> None:
    figure = study.why("L3H3", query=QUERY, steps=3).graph
    traces = {trace.name: trace for trace in figure.data}
    [heads] = [trace for trace in figure.data if trace.hovertext is not None]
    where = dict(zip(heads.hovertext, zip(heads.x, heads.y, strict=True), strict=True))
    ticks = [*figure.layout.xaxis.ticktext]
    assert ticks == [f"{name} {at}" for name, at in (("he", 7), ("ight", 8), ("he", 15))]
    looking, before = where[f"L3H3, token {QUERY}"], where[f"L1H3, token {KEY}"]
    assert (looking[0], before[0]) == (2, 1), "at their tokens"
    assert looking[1] > before[1] > 0
    edge, moved = traces["L1H3 key to L3H3"], traces["moved to L1H3"]
    assert [(edge.x[at], edge.y[at]) for at in (0, -1)] == [before, looking]
    assert [(moved.x[at], moved.y[at]) for at in (0, -1)] == [(0, 0), before]
    assert (edge.line.dash, moved.line.dash) == ("solid", "dash")
    table = study.tables["why_steps"]
    written = [text for trace in figure.data for text in (trace.text or ()) if " " in text]
    drawn = table[table["side"].isin(["key", "query"])]
    kinds = drawn["side"].where(drawn["moved_from"].isna(), "moved")
    labels = [f"{kind} {nats:+.1f}" for kind, nats in zip(kinds, drawn["nats"], strict=True)]
    position = table[table["side"] == "position"].groupby("step")["nats"].sum()
    assert sorted(written) == sorted([*labels, *(f"position {nats:+.1f}" for nats in position)])


def test_the_text_view_has_the_terms_of_each_step_and_the_way_there(study: AttentionStudy) -> None:
    html = study.on_text.html()
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    first, second = json.loads(data)["looks"]
    table = study.tables["why_steps"]
    for step, look in ((1, first), (2, second)):
        rows = table[(table["step"] == step) & table["moved_from"].isna()]
        kept = ~rows["side"].isin(["mean", "other"]) | (rows["writer"] == "other writers")
        place = look["keys"].index(rows["key"].iloc[0])
        assert look["scores"][place] == pytest.approx(rows["nats"][kept].sum(), abs=1e-3)
        terms = [values[place] for _, _, values in look["terms"]]
        assert sum(terms) == pytest.approx(look["scores"][place], abs=1e-3)
    [move] = first["back"]
    assert (move["name"], move["query"], move["key"]) == (second["name"], KEY, KEY - 1)
    assert (second["name"], second["query"], second["key"]) == ("L1H3", KEY, KEY - 1)
    [row] = table[table["moved_from"].notna()].to_dict("records")
    assert (move["nats"], move["effect"]) == pytest.approx((row["nats"], row["effect"]))
    assert study.why("L3H3", query=QUERY, steps=3).moved == (
        f"L1H3 moved {row['nats']:+.1f} nats to token ight 8 from token he 7; taken out of the "
        f"model, the score falls by {row['effect']:.1f} nats, and the weight from "
        f"{row['weight']:.0%} to {row['weight_without']:.0%}."
    )


CLICKS = """<script>setTimeout(() => {
  const view = document.querySelector(".on-text");
  const tokens = [...view.querySelectorAll(".text span")];
  const found = [];
  const keep = () => found.push([view.querySelector(".readout").textContent,
    [...view.querySelectorAll(".terms button")].map((button) => button.textContent)]);
  keep();
  tokens[8].click();
  setTimeout(() => {
    keep();
    view.querySelector(".terms button").click();
    setTimeout(() => { keep(); document.body.dataset.found = JSON.stringify(found); }, 500);
  }, 500);
}, 3000)</script></body>"""


@needs_chromium
def test_a_second_click_on_a_key_goes_a_step_back(study: AttentionStudy, tmp_path: Path) -> None:
    page = f"<!doctype html><meta charset=utf-8><body>{study.on_text.html()}{CLICKS}"
    elements = opened(page, tmp_path, draw_all=False)
    first, back, again = json.loads(unescape(re.findall(r'data-found="([^"]*)"', elements)[0]))
    assert first[0].startswith("L3H3, query 15 ")
    assert first[1][0].startswith("Why L1H3 moved +10.2")
    assert back[0].startswith("L1H3, query 8 ")
    assert back[1] == ["Back to L3H3, query 15"]
    assert again == first
