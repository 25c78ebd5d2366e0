"""A text of the user's own in `attention`: its weights, its pieces, and its view on the page."""

import json
import re
import zlib
from base64 import b64decode
from html import unescape
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from support.command_line import run_command
from support.edited_model import plain_run
from support.finished_runs import assert_numbers_are_cells
from support.plain_attention import plain_attention
from support.tiny_models import ByName
from support.tiny_models import plain as plain_model

from nope_probe import (
    LoadedModel,
    Run,
    TextView,
    UserError,
    attention,
    load,
    read_run,
    run_attention,
    text_view,
)
from nope_probe.data.tokenizing import pieces_of
from nope_probe.figures.attention import STEPS, percent
from nope_probe.models.names import path_of
from nope_probe.studies.attention import report

SIZES: dict[str, Any] = {"n_seqs": 17, "seq_len": 61, "folds": 5, "layers": 2}
HEADS = [f"L{place // 4}H{place % 4}" for place in range(8)]
TEXT = 'a "<b>" & b\n</script><script>x\u200b =\t\U0001f642 שלום 世\r'


@pytest.fixture(scope="module")
def compared(rope_tiny: LoadedModel) -> Run:
    return run_attention(rope_tiny, text=TEXT, **SIZES)


@pytest.fixture(scope="module")
def view(compared: Run) -> TextView:
    return text_view(compared)


@pytest.fixture(scope="module")
def alone(rope_tiny: LoadedModel) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nope_probe.run.session.make_sequences", None)  # no corpus is made
        return run_attention(rope_tiny, layers=2, text=TEXT, why="L1H0", query=-2)


def packed(html: str) -> dict[str, Any]:
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return dict(json.loads(data))


def test_the_texts_weights_are_plain_transformers_and_bars_their_entropy_relative_to_the_mean(
    compared: Run, view: TextView, rope_tiny: LoadedModel
) -> None:
    tokens = rope_tiny.tokenizer(TEXT, return_tensors="pt").input_ids
    expected = plain_run(plain_model(path_of("rope-tiny")), tokens).patterns[:2, 0]
    np.testing.assert_allclose(view.weights, expected, rtol=0, atol=1e-5)
    n = tokens.shape[1]
    assert len(view.pieces) == n
    np.testing.assert_array_equal(view.position, compared.maps["weights"][..., :n, :n])
    entropy = rel_entr(view.weights.astype(float), view.position).sum(-1)
    np.testing.assert_allclose(view.content, entropy, rtol=0, atol=1e-5)


def test_each_head_has_its_strongest_look_and_five_are_shown(
    compared: Run, view: TextView, alone: Run
) -> None:
    content, weights = view.content.reshape(8, -1), view.weights.reshape(8, *view.weights.shape[2:])
    queries = content.argmax(-1)
    strongest = {
        HEADS[place]: (queries[place], weights[place, queries[place]].argmax())
        for place in np.argsort(-content.max(-1), kind="stable")
    }
    assert [*view.strongest_looks().items()] == [*strongest.items()]
    lead = report(compared).headline
    assert_numbers_are_cells(lead)
    assert lead.table["head"].tolist() == [*strongest][:5]
    name, (query, key) = next(iter(strongest.items()))
    look = *divmod(HEADS.index(name), 4), query, key
    shown = lead.table.iloc[0].tolist()[1:]
    assert [text.partition(" “")[0] for text in shown[:2]] == [str(query), str(key)]
    assert shown[2:] == [percent(float(of[look])) for of in (view.weights, view.position)]
    asked = report(alone).headline
    assert asked.table["head"][0] == "L1H0", "which --why asks about"
    assert "in other texts" not in asked.table
    assert asked.then.table["term"][0] == "score"
    assert_numbers_are_cells(asked)


def test_a_weight_is_one_number_in_the_sentence_and_in_the_view() -> None:
    for weight in np.linspace(0, 1, 1009):
        shown = np.rint(STEPS * weight) / STEPS  # what the page stores
        rounded = floor(100 * shown + 0.5)  # as JavaScript's Math.round
        assert percent(weight) == ("<1%" if 0 < shown < 0.01 else f"{rounded}%")
        assert abs(100 * weight - rounded) < 0.5 + 50 / STEPS + 1e-9


def test_a_text_alone_is_read_without_other_texts(
    alone: Run, compared: Run, view: TextView
) -> None:
    of_alone = text_view(alone)
    np.testing.assert_allclose(of_alone.weights, view.weights, rtol=0, atol=1e-6)
    assert of_alone.position is None
    assert "weights" not in alone.maps
    n = len(view.pieces)
    uniform = np.tri(n) / np.arange(1, n + 1)[:, None]
    entropy = rel_entr(view.weights.astype(float), uniform).sum(-1)
    np.testing.assert_allclose(of_alone.content, entropy, rtol=0, atol=1e-5)
    table = alone.tables["attention"]
    row = table.set_index(["layer", "head"]).loc[(1, 2)]
    assert row["information"] == pytest.approx(of_alone.content[1, 2, 7:].mean(), rel=1e-5)
    assert row["first_weight"] == pytest.approx(view.weights[1, 2, 7:, 0].mean())
    assert [*table.dropna(axis=1).columns] == ["layer", "head", "information", "first_weight"]
    of_others = compared.tables["attention"].filter(regex="^(?!need)")
    assert [*table.columns] == [*of_others.columns]
    _, (name, look), *rest = of_alone.strongest_looks().items()  # L1H0 is asked about
    assert all(0 < key < query for _, (query, key) in rest), "neither the first key nor itself"
    weights = np.tril(view.weights, -1)[..., 1:]
    weights[1, 0] = 0.0
    assert view.weights[(*divmod(HEADS.index(name), 4), *look)] == weights.max()
    data = packed(of_alone.html())
    assert not data["compared"]
    assert len(zlib.decompress(b64decode(data["heads"][0]["maps"]))) == n * n


def test_why_of_a_text_alone_is_what_writers_wrote_into_its_keys(
    alone: Run, rope_tiny: LoadedModel
) -> None:
    table = alone.tables["why"]
    asked = run_attention(rope_tiny, text=TEXT, why="L1H0", query=-2, **SIZES)
    of_others = asked.tables["why"]
    assert {*table["side"]} == {"key"}
    assert {"embed", "L0H2", "MLP0"} <= {*table["term"]}
    added, scores = (table.groupby("key")[name] for name in ("nats", "score"))
    largest = table["score"].abs().max()
    np.testing.assert_allclose(added.sum(), scores.first(), rtol=0, atol=1e-5 * largest)
    expected = of_others.groupby("key")["score"].first()
    np.testing.assert_allclose(scores.first(), expected, rtol=0, atol=1e-5 * largest)


def test_a_text_has_bos_as_the_sequences_have_and_is_read_in_the_ablated_model(
    tiny: ByName,
) -> None:
    model = str(tiny("llama").folder)
    run = run_attention(model, text="ab\ncd", remove="rope", data="random", **SIZES)
    tokenizer = load(model).tokenizer
    tokens = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("ab\ncd")[1:]]])
    plain, view = plain_attention(tiny("llama").hf, tokens, without="rope"), text_view(run)
    for layer in (0, 1):
        scores = plain[layer].scores[0].double().nan_to_num(-torch.inf)
        np.testing.assert_allclose(view.weights[layer], scores.softmax(-1), atol=1e-5)
    assert view.names == {0: "<bos>"}
    assert view.pieces[0] == ""
    assert "".join(view.pieces) == "ab\ncd"
    assert 'data-mark="&lt;bos&gt;"' in view.html()


def test_pieces_join_to_the_text_and_cut_no_character(rope_tiny: LoadedModel) -> None:
    tokenizer = rope_tiny.tokenizer
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = pieces_of(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TEXT
    emoji = next(place for place, piece in enumerate(pieces) if "\U0001f642" in piece)
    assert pieces[emoji - 1] == "", "a character of several tokens stands at the last of them"
    assert "\ufffd" not in "".join(pieces)


def test_the_page_holds_every_heads_weights_by_position_among_the_others(
    compared: Run, view: TextView
) -> None:
    by_share = ["others_share", "information"]
    table = compared.tables["attention"].sort_values(by_share, ascending=False)
    data, n = packed(view.html()), len(view.pieces)
    assert [head["name"] for head in data["heads"]] == [HEADS[place] for place in table.index]
    assert data["causal"]
    for stored, place in zip(data["heads"], table.index, strict=True):
        codes = np.frombuffer(zlib.decompress(b64decode(stored["maps"])), np.uint8)
        attended, mean = codes.reshape(2, n, n).swapaxes(1, 2) / 255
        assert np.abs(attended - view.weights.reshape(-1, n, n)[place]).max() <= 0.501 / 255
        assert np.abs(mean - view.position.reshape(-1, n, n)[place]).max() <= 0.501 / 255
        nats = np.frombuffer(b64decode(stored["content"]), "<f4")
        np.testing.assert_array_equal(nats, view.content.reshape(-1, n)[place])


def test_heads_beyond_the_size_are_left_out_with_a_word_but_for_the_asked_one(
    compared: Run, view: TextView, alone: Run
) -> None:
    whole = packed(view.html())["heads"]
    assert "The 8 heads" not in view.html()
    table = compared.tables["attention"].nlargest(3, "information")
    kept = [head for head in whole if HEADS.index(head["name"]) in table.index]
    smaller = view.html(max_bytes=sum(len(x["maps"]) + len(x["content"]) for x in kept))
    assert packed(smaller)["heads"] == kept
    assert "<p>The 3 heads with the most information, of 8.</p>" in smaller
    asked = text_view(alone)
    assert asked.heads["information"].idxmax() != 4, "which is L1H0"
    data = packed(asked.html(max_bytes=1))
    assert [head["name"] for head in data["heads"]] == ["L1H0"]
    assert data["first"] == [0, len(asked.pieces) - 2]
    added = np.sum([values for _, _, values in data["looks"][0]["terms"]], 0)
    np.testing.assert_allclose(added, data["looks"][0]["scores"], atol=0.001)


def test_without_the_mask_later_keys_are_shown_too(rope_tiny: LoadedModel) -> None:
    tokenizer = rope_tiny.tokenizer
    text = tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)[:12])
    sizes = {**SIZES, "seq_len": len(tokenizer.encode(text))}
    view = text_view(run_attention(rope_tiny, text=text, remove="mask", **sizes))
    assert not packed(view.html())["causal"]
    for weights in (view.weights, view.position):
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        assert (weights[1, :, 0, 1:] > 0).any()


def test_a_text_is_no_html_and_is_there_without_scripts(view: TextView) -> None:
    html = view._repr_html_()
    [tokens] = re.findall(r'<p class="text"[^>]*>(.*?)</p>', html, re.DOTALL)
    assert unescape(re.sub(r"<[^>]*>", "", tokens)) == TEXT
    assert html.count("<script") == html.count("</script") == 2
    data = packed(html)
    head, query = data["first"]
    n = len(view.pieces)
    codes = np.frombuffer(zlib.decompress(b64decode(data["heads"][head]["maps"])), np.uint8)
    shades = [float(shade) for shade in re.findall(r"rgba\(\d+,\d+,\d+,([0-9.]+)\)", html)]
    stored = np.sqrt(codes.reshape(2, n, n)[0, :, query] / 255)
    assert np.abs(np.array(shades) - stored).max() <= 0.07


def test_a_mark_and_a_bos_token_of_a_text_are_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = "word other word"
    sizes = ["--n-seqs", 8, "--folds", 4, "--layers", 1, "--seq-len", 32]
    text = ["--text", f"\ufeff<bos>{plain}"]
    run_command(attention, *sizes, *text, "--out", tmp_path / "run")
    told = " ".join(capfd.readouterr().out.split())
    notes = [
        "Texts that begin with a byte order mark, which is left out: 1 of 1.",
        "Texts that begin with the BOS token <bos> already, so that no second was added: 1 of 1.",
    ]
    run = read_run(tmp_path / "run")
    assert [*run.manifest.text.notes] == notes
    page = unescape((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert all(note in told and note in page for note in notes)
    assert "In the text L" in told
    pieces = text_view(run).pieces
    assert (pieces[0], "".join(pieces)) == ("", plain)


def test_a_run_without_a_text_says_how_to_give_one() -> None:
    with pytest.raises(UserError, match="the run has no text: run_attention"):
        text_view(Run())
