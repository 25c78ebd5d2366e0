"""A text of the user's own in `attention`: its weights, its pieces, and its view on the page."""

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.command_line import refused, run_command
from support.decoders import write_decoder
from support.plain_attention import plain_attention
from support.tiny_models import ByName, tokenizer
from transformers import AutoModelForCausalLM

from nope_probe import (
    Ablation,
    ablated,
    attention,
    capture_attention,
    load,
    read_run,
    run_attention,
)
from nope_probe.errors import UserError
from nope_probe.figures.attention import why_bars
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import path_of
from nope_probe.studies.attention.settings import Settings
from nope_probe.studies.attention.study import AttentionStudy
from nope_probe.studies.attention.text import pieces_of

SIZES: dict[str, Any] = {"n_seqs": 17, "seq_len": 61, "folds": 5, "layers": 2}
SMALL = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", value)]
TEXT = 'a "<b>" & b\n</script><script>x\u200b =\t\U0001f642 שלום 世\r'


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("rope-tiny", n_layers=2)


@pytest.fixture(scope="module")
def study(loaded: LoadedModel) -> AttentionStudy:
    return run_attention(loaded, text=TEXT, **SIZES)


def test_the_texts_weights_are_plain_transformers_eager_weights(
    study: AttentionStudy, loaded: LoadedModel
) -> None:
    tokens = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    plain = AutoModelForCausalLM.from_pretrained(
        path_of("rope-tiny"), attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        expected = plain(tokens, output_attentions=True).attentions[:2]
    found = study.on_text.weights
    np.testing.assert_allclose(found, torch.cat(expected).numpy(), rtol=0, atol=1e-5)
    n = tokens.shape[1]
    assert len(study.on_text.pieces) == n
    np.testing.assert_array_equal(study.on_text.position, study.maps["weights"][..., :n, :n])


def test_a_bar_is_the_relative_entropy_to_the_mean_at_the_same_position(
    study: AttentionStudy,
) -> None:
    view = study.on_text
    for layer, head, query in ((0, 1, 7), (1, 2, 19), (1, 3, 0)):
        pairs = zip(
            view.weights[layer, head, query], view.position[layer, head, query], strict=True
        )
        expected = sum(float(a) * log(a / m) for a, m in pairs if a > 0)
        assert view.content[layer, head, query] == pytest.approx(expected, abs=1e-5)
    name, query, key = view.strongest_look()
    place = (*map(int, re.findall(r"\d+", name)), query)
    assert view.content[place] == view.content.max()
    assert view.weights[place][key] == view.weights[place].max()


@pytest.fixture(scope="module")
def text_alone(loaded: LoadedModel) -> AttentionStudy:
    return run_attention(loaded, layers=2, text=TEXT, why="L1H3", query=-2)


def test_a_text_alone_is_read_without_other_texts(
    text_alone: AttentionStudy,
    study: AttentionStudy,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view, others = text_alone.on_text, study.on_text
    np.testing.assert_allclose(view.weights, others.weights, rtol=0, atol=1e-6)
    assert view.position is None
    assert "weights" not in text_alone.maps
    n = len(view.pieces)
    for layer, head, query in ((0, 1, 7), (1, 2, 19), (1, 3, 0)):
        weights = view.weights[layer, head, query, : query + 1]
        expected = sum(float(a) * log(a * (query + 1)) for a in weights if a > 0)
        assert view.content[layer, head, query] == pytest.approx(expected, abs=1e-5)
    table = text_alone.tables["attention"]
    rows = table.set_index(["layer", "head"])
    assert rows.loc[(1, 2), "information"] == pytest.approx(view.content[1, 2, 7:].mean(), rel=1e-5)
    assert rows.loc[(1, 2), "first_weight"] == pytest.approx(view.weights[1, 2, 7:, 0].mean())
    assert [*table.dropna(axis=1).columns] == ["layer", "head", "information", "first_weight"]
    assert [*table.columns] == [*study.tables["attention"].columns]
    name, query, key = view.strongest_look()
    weights = np.tril(view.weights, -1)[..., 1:]
    assert view.weights[(*map(int, re.findall(r"\d+", name)), query, key)] == weights.max()
    data = packed(view.html())
    assert not data["compared"]
    assert len(zlib.decompress(b64decode(data["heads"][0]["maps"]))) == n * n
    monkeypatch.setattr("nope_probe.run.session.make_sequences", None)  # no corpus is made
    run_attention(loaded, layers=1, text="ab")


def test_why_of_a_text_alone_is_what_writers_wrote_into_its_keys(
    text_alone: AttentionStudy, study: AttentionStudy
) -> None:
    table = text_alone.tables["why"]
    compared = study.why("L1H3", query=-2).table
    assert {*table["side"]} == {"key"}
    assert {"embed", "L0H2", "MLP0"} <= {*table["term"]}
    added, scores = (table.groupby("key")[name] for name in ("nats", "score"))
    largest = table["score"].abs().max()
    np.testing.assert_allclose(added.sum(), scores.first(), rtol=0, atol=1e-5 * largest)
    expected = compared.groupby("key")["score"].first()
    np.testing.assert_allclose(scores.first(), expected, rtol=0, atol=1e-5 * largest)
    again = text_alone.why("L1H2", query=3)
    assert {*again.table["side"]} == {"key"}


def test_the_terminal_speaks_of_the_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", 2, "--text", "word other word"]
    for asked, said in (
        ([], "In the text L"),
        (["--why", "L1H3", "--query", 3], "In the text L1H3 gives "),
        (["--n-seqs", 8, "--folds", 4, "--seq-len", 16], "% in other texts)."),
    ):
        run_command(attention, *flags, *asked, "--out", tmp_path / f"{len(asked)}")
        printed = " ".join(capfd.readouterr().out.split())
        page = (tmp_path / f"{len(asked)}" / "report.html").read_text(encoding="utf-8")
        assert said in printed
        for shown in (printed, page):
            assert ("Only the text was read" in shown) == ("--n-seqs" not in asked)


def test_a_text_has_bos_as_the_sequences_have_and_is_read_in_the_ablated_model(
    tiny: ByName,
) -> None:
    model = str(tiny("llama").folder)
    run = run_attention(model, text="ab\ncd", remove="rope", data="random", **SIZES)
    tokenizer = load(model).tokenizer
    tokens = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("ab\ncd")[1:]]])
    plain = plain_attention(tiny("llama").hf, tokens, without="rope")
    for layer in (0, 1):
        scores = plain[layer].scores[0].double().nan_to_num(-torch.inf)
        np.testing.assert_allclose(run.on_text.weights[layer], scores.softmax(-1), atol=1e-5)
    assert run.on_text.names == {0: "<bos>"}
    assert run.on_text.pieces[0] == ""
    assert "".join(run.on_text.pieces) == "ab\ncd"
    assert 'data-mark="&lt;bos&gt;"' in run.on_text.html()


def test_pieces_join_to_the_text_and_cut_no_character(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = pieces_of(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TEXT
    emoji = next(place for place, piece in enumerate(pieces) if "\U0001f642" in piece)
    assert pieces[emoji - 1] == "", "a character of several tokens stands at the last of them"
    assert "\ufffd" not in "".join(pieces)


def packed(html: str) -> dict[str, Any]:
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return dict(json.loads(data))


def by_share(table: pd.DataFrame) -> pd.DataFrame:
    """Return heads by position among the other keys; then, and without a share, by information."""
    return table.sort_values(["others_share", "information"], ascending=False)


def test_the_page_holds_every_heads_weights_by_position_among_the_others(
    study: AttentionStudy,
) -> None:
    view, table = study.on_text, by_share(study.tables["attention"])
    data, n = packed(view.html()), len(view.pieces)
    names = [f"L{layer}H{head}" for layer, head in zip(table["layer"], table["head"], strict=True)]
    assert [head["name"] for head in data["heads"]] == names
    assert data["causal"]
    for stored, place in zip(data["heads"], table.index, strict=True):
        codes = np.frombuffer(zlib.decompress(b64decode(stored["maps"])), np.uint8)
        attended, mean = codes.reshape(2, n, n).swapaxes(1, 2) / 127
        assert np.abs(attended - view.weights.reshape(-1, n, n)[place]).max() <= 0.501 / 127
        assert np.abs(mean - view.position.reshape(-1, n, n)[place]).max() <= 0.501 / 127
        nats = np.frombuffer(b64decode(stored["content"]), "<f4")
        np.testing.assert_array_equal(nats, view.content.reshape(-1, n)[place])


def test_heads_beyond_the_size_are_left_out_with_a_word(study: AttentionStudy) -> None:
    whole = packed(study.on_text.html())["heads"]
    assert "The 8 heads" not in study.on_text.html()
    table = study.tables["attention"].nlargest(3, "information")
    most = [f"L{layer}H{head}" for layer, head in zip(table["layer"], table["head"], strict=True)]
    kept = [head for head in whole if head["name"] in most]
    size = sum(len(head["maps"]) + len(head["content"]) for head in kept)
    smaller = study.on_text.html(max_bytes=size)
    assert packed(smaller)["heads"] == kept
    assert "<p>The 3 heads with the most information, of 8.</p>" in smaller


def test_without_the_mask_later_keys_are_shown_too(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    text = tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)[:12])
    sizes = {**SIZES, "seq_len": len(tokenizer.encode(text))}
    view = run_attention(loaded, text=text, remove="mask", **sizes).on_text
    assert not packed(view.html())["causal"]
    for weights in (view.weights, view.position):
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        assert (weights[1, :, 0, 1:] > 0).any()


def text_of(html: str) -> str:
    [tokens] = re.findall(r'<p class="text"[^>]*>(.*?)</p>', html, re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", "", tokens))


def test_a_text_is_no_html_and_is_there_without_scripts(study: AttentionStudy) -> None:
    html = study.on_text._repr_html_()
    assert text_of(html) == TEXT
    assert html.count("<script") == html.count("</script") == 2
    data = packed(html)
    head, query = data["first"]
    n = len(study.on_text.pieces)
    codes = np.frombuffer(zlib.decompress(b64decode(data["heads"][head]["maps"])), np.uint8)
    shades = [float(shade) for shade in re.findall(r"rgba\(\d+,\d+,\d+,([0-9.]+)\)", html)]
    stored = np.sqrt(codes.reshape(2, n, n)[0, :, query] / 127)
    assert np.abs(np.array(shades) - stored).max() <= 0.07


def test_the_asked_head_is_on_the_page_even_where_few_heads_are(loaded: LoadedModel) -> None:
    run = run_attention(loaded, why="L0H3", **ASKED)
    view = run.on_text
    assert view.heads["information"].idxmax() != 3
    data = packed(view.html(max_bytes=1))
    assert [head["name"] for head in data["heads"]] == ["L0H3"]
    assert data["first"] == [0, len(view.pieces) - 1]
    added = np.sum([values for _, _, values in data["looks"][0]["terms"]], 0)
    np.testing.assert_allclose(added, data["looks"][0]["scores"], atol=0.001)


def test_a_file_and_a_text_are_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    for text in (TEXT, "\ufeff" + TEXT):
        file.write_bytes(text.encode())
        assert Settings(text_file=file).recorded() == Settings(text=text).recorded()


def test_a_mark_and_a_bos_token_of_a_text_are_read_as_in_data_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, plain = tmp_path / "text.txt", "word other word"
    file.write_bytes(f"\ufeff<bos>{plain}".encode())
    run_command(attention, *SMALL, "--text-file", file, "--out", tmp_path / "file")
    told = " ".join(capfd.readouterr().out.split())
    notes = [
        "The text begins with a byte order mark, left out.",
        "The text begins with the BOS token <bos> already: no second was added.",
    ]
    run = read_run(tmp_path / "file")
    assert [*run.manifest.text.notes] == notes
    page = unescape((tmp_path / "file" / "report.html").read_text(encoding="utf-8"))
    assert all(note in told and note in page for note in notes)
    expected = run_attention("rope-tiny", text=plain, **SIZES)
    assert expected.manifest.text.notes == ()
    np.testing.assert_array_equal(run.maps["text_weights"], expected.maps["text_weights"])
    rows = [{"text": f"\ufeff<bos>{i} {plain * 90}"} for i in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_command(attention, *SMALL, "--data", data, "--out", tmp_path / "data")
    told = " ".join(capfd.readouterr().out.split())
    assert "6 of 6 texts begin with a byte order mark, left out." in told
    assert "6 of 6 texts begin with the BOS token <bos> already: no second was added." in told
    assert (read_run(tmp_path / "data").arrays["tokens"]["tokens"][:, 1:] != 0).all()


@pytest.mark.parametrize("text", ["\ufeff", "<bos>", "\ufeff<bos>"])
def test_a_text_of_no_tokens_is_a_line_and_leaves_no_folder(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--n-seqs", 8, "--folds", 4, "--layers", 1, "--text", text]
    for more in ([], ["--why", "L0H1"]):
        line = refused(capfd, tmp_path / "here", attention, *sizes, *more)
        assert line.endswith("the text has no tokens: the model's tokenizer leaves nothing of it")
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="the text has no tokens"):
        run_attention("rope-tiny", text_file=file, out=tmp_path / "out", **SIZES)
    assert [*tmp_path.glob("out*")] == []


def test_why_a_head_looks_there_adds_up_to_its_score_for_every_key(loaded: LoadedModel) -> None:
    run = run_attention(loaded, text="word other word", why="L1H3", query=-2, **SIZES)
    table = run.why("L1H3", query=-2).table
    assert table is run.tables["why"]
    pieces = [*run.manifest.text.pieces]
    query = len(pieces) - 2
    assert run.manifest.results["why"] == {"head": "L1H3", "query": query}
    assert table["key"].unique().tolist() == [*range(query + 1)]
    shown = table.groupby("key")["token"].first().tolist()
    assert shown == ["<bos>", *(piece.strip() for piece in pieces[1:-1])]
    added = table.groupby("key")["nats"].sum()
    scores = table.groupby("key")["score"].first()
    np.testing.assert_allclose(added, scores, rtol=0, atol=1e-5 * scores.abs().max())
    assert abs(scores.mean()) < 1e-5, "less the mean over the keys"
    weights = run.maps["text_weights"][1, 3, query, : query + 1]
    np.testing.assert_allclose(table.groupby("key")["weight"].first(), weights, rtol=1e-6)
    softmax = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(softmax, weights, rtol=1e-4)
    figure = why_bars(table, "t")
    assert figure.data[-1].y[0] == "&lt;bos&gt; 0"
    np.testing.assert_allclose(figure.data[-1].x, scores)


def test_why_is_refused_with_the_reason_where_trace_is_and_the_text_still_shown(
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
    assert "running" not in told, "refused before the captures"
    assert not (tmp_path / "why").exists()


@pytest.mark.parametrize("remove", [["w_k"], ["w_q"], ["qk"], ["mask", "w_k"]])
def test_why_without_the_weights_of_queries_or_keys_is_refused_before_the_model_is_loaded(
    remove: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.models.load.load", None)
    names = "w_q and w_k" if remove == ["qk"] else remove[-1]
    for model in ("rope-tiny", "nope-tiny"):
        with pytest.raises(UserError, match=f"^--why splits .* it has no terms without {names}$"):
            run_attention(model, why="L1H3", remove=remove, **ASKED)


def test_why_adds_up_where_a_removal_copies_shared_key_heads(tmp_path: Path) -> None:
    """From Phi-3's fused projection, each query head gets its value, and a copy of its key."""
    model = str(write_decoder("phi3", tmp_path).folder)
    asked = {"text": "ab cd", "n_seqs": 11, "seq_len": 13, "folds": 4, "data": "random"}
    table = run_attention(model, why="L1H4", remove="w_v", **asked).tables["why"]
    added, scores = table.groupby("key")["nats"].sum(), table.groupby("key")["score"].first()
    np.testing.assert_allclose(added, scores, rtol=0, atol=1e-5 * scores.abs().max())
    weights = table.groupby("key")["weight"].first()
    np.testing.assert_allclose(np.exp(scores) / np.exp(scores).sum(), weights, rtol=1e-4)


def test_a_run_without_a_text_says_how_to_give_one(loaded: LoadedModel) -> None:
    run = run_attention(loaded, n_seqs=5, seq_len=11, folds=4, layers=1)
    with pytest.raises(UserError, match="the run has no text"):
        _ = run.on_text
    with pytest.raises(UserError, match="the run has no text"):
        run.why("L0H1")


ASKED: dict[str, Any] = {"text": "word other word", **SIZES}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("remove", [(), ("rope",), ("w_v",)])
def test_why_of_a_finished_run_is_that_of_the_run_that_asks(
    remove: tuple[str, ...], loaded: LoadedModel, tmp_path: Path
) -> None:
    asking = run_attention(loaded, why="L1H3", query=2, remove=remove, **ASKED)
    expected = asking.tables["why"]
    run_attention("rope-tiny", remove=remove, out=tmp_path / "kept", **ASKED)
    runs = [
        run_attention(loaded, remove=remove, **ASKED),
        AttentionStudy(**vars(read_run(tmp_path / "kept"))),
    ]
    for run in runs:
        why = run.why("L1H3", query=2)
        assert (why.head, why.query) == ("L1H3", 2)
        pd.testing.assert_frame_equal(why.table, expected, rtol=1e-5, atol=1e-5)
        assert why.figure == why_bars(why.table, "Why L1H3 looks there from token 2")
        assert why._repr_mimebundle_() == why.figure._repr_mimebundle_()


def test_why_is_refused_where_the_model_is_not_that_of_the_run(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    with ablated(loaded.model, Ablation(remove=["rope"])):
        run = run_attention(loaded, out=tmp_path / "kept", **ASKED)
        assert run.why("L1H3").head == "L1H3"
    with pytest.raises(UserError, match=r"^ablation of the model differ from those of "):
        run.why("L1H3")
    with pytest.raises(UserError, match="was given in memory and is not kept in its folder"):
        AttentionStudy(**vars(read_run(tmp_path / "kept"))).why("L1H3")
    for head, query, said in (
        ("MLP1", -1, "--why MLP1: expected a head"),
        ("L2H0", -1, "--why L2H0: there are L0 to L1"),
        ("L1H0", 99, "--query 99: the text has "),
    ):
        with pytest.raises(UserError, match=said):
            run.why(head, query=query)


def test_a_head_and_a_query_of_another_kind_are_refused_in_a_line(loaded: LoadedModel) -> None:
    run = run_attention(loaded, **ASKED)
    wrong: list[tuple[Any, Any, str]] = [
        ("L1H0", 1.5, "query 1.5: expected a whole number or a text"),
        ("L1H0", "4", "--query 4: the text has 5 tokens, 0 to 4: take the number of one: 1 'word'"),
        (3, -1, "why 3: expected a text or None"),
    ]
    for head, query, said in wrong:
        with pytest.raises(UserError, match=said):
            run.why(head, query=query)


def shifted(model: Any) -> None:
    """Change a weight by so little that attention weights differ by less than 0.001."""
    next(
        p for name, p in model.named_parameters() if "W_Q" in name or "q_proj" in name
    ).data += 1e-6


@contextmanager
def with_a_hook(model: Any) -> Iterator[None]:
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda tensor, hook: 1.01 * tensor)]):
        yield


@pytest.mark.parametrize("without", [(), ("mask",)])
def test_why_is_refused_after_any_edit_of_the_models_weights(without: tuple[str, ...]) -> None:
    model = load("rope-tiny", n_layers=2).model
    with ablated(model, without):
        run = run_attention(model, **ASKED)
        shown = run.why("L1H3", query=2).table
    shifted(model)
    tokens = torch.from_numpy(run.arrays["tokens"]["tokens"])
    with ablated(model, without):
        maps = capture_attention(model, tokens, layers=[1])
        assert np.abs(maps.mean[0].numpy() - run.maps["weights"][1]).max() < 1e-3
        refused = "^weights or configuration of the model differ from those of the run: give the"
        with pytest.raises(UserError, match=refused):
            run.why("L1H3", query=2)
    next(p for n, p in model.named_parameters() if "W_Q" in n or "q_proj" in n).data -= 1e-6
    assert shown["nats"].abs().max() > 0.01


def test_why_is_refused_where_hooks_or_removals_differ_from_the_runs(loaded: LoadedModel) -> None:
    model = loaded.model
    run = run_attention(model, **ASKED)
    expected = run.why("L1H3", query=2).table
    without = ablated(model, Ablation(remove="w_v", gain="norm"))
    for inside, said in ((with_a_hook(model), "hooks"), (without, "ablation")):
        with inside, pytest.raises(UserError, match=f"^{said}.* differ from those of the run"):
            run.why("L1H3", query=2)
    pd.testing.assert_frame_equal(run.why("L1H3", query=2).table, expected)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_why_loads_a_model_that_was_named_whose_sequences_were_given(
    dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(write_decoder("llama", tmp_path / "model", max_position_embeddings=19).folder)
    tokenizer().save_pretrained(model)
    tokens = torch.randint(1, 60, (11, 17), generator=torch.Generator().manual_seed(0))
    options = {"text": "ab cd", "layers": 2, "folds": 4, "dtype": dtype}
    run = run_attention(model, tokens, out=tmp_path / "run", **options)
    whole = run_attention(model, tokens, why="L1H0", **options).tables["why"]
    assert "model" in run.manifest.sources
    assert run.manifest.given.keys() == {"inputs", "kind"}
    for asked in (run, AttentionStudy(**vars(read_run(tmp_path / "run")))):
        pd.testing.assert_frame_equal(asked.why("L1H0").table, whole, rtol=1e-4, atol=1e-5)
    run_attention(model, tokens, out=tmp_path / "run", **options)
    assert "finished before" in capfd.readouterr().err
    weights = next(Path(model).glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match="the model has changed since the run in"):
        run_attention(model, tokens, out=tmp_path / "run", **options)
    with pytest.raises(
        UserError, match=r"^weights or configuration of the model differ from those"
    ):
        AttentionStudy(**vars(read_run(tmp_path / "run"))).why("L1H0")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "a", "--text-file", "a.txt"], "cannot read --text-file"),
        (["--text", ""], "the text is empty"),
        (["--text", "x" * 1_000_001], "the text has 1,000,001 characters: expected one of up to"),
        (["--text", "a", "--query-rows", 7], "leave out --query-rows"),
        (["--text", "a", "--seq-len", 513], "take --seq-len 512 or less"),
        (["--text", "word " * 30, "--seq-len", 16], "and the sequences have 16: take --seq-len "),
        (
            ["--text", "a", "--remove", "mask", "--seq-len", 16],
            "all seen without the mask: take --",
        ),
        (["--why", "L0H1"], "--why asks about a text"),
        (["--query", 3], "--query asks about a head"),
        (["--steps", 2], "--steps asks about a head: name it with --why"),
        (["--text", "a", "--why", "MLP1"], "--why MLP1: expected a head, such as L1H3"),
        (["--text", "a", "--why", "L0H4"], "--why L0H4: there are L0 to L0, with the heads H0"),
        (["--text", "a", "--why", "L0H1", "--query", 9], "the text has 2 tokens, 0 to 1"),
        (["--text", "a", "--model", "parameter-free", "--data", "gaussian"], "no tokenizer"),
    ],
)
def test_texts_that_cannot_be_shown_are_refused(
    flags: list[object], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--n-seqs", 8, "--folds", 4, "--layers", 1]
    assert said in refused(capfd, tmp_path / "here", attention, *sizes, *flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seq-len", 32], "--seq-len has no effect on a text alone: --n-seqs reads other texts"),
        (["--text", "word " * 300], "the text has 601 tokens: expected up to 256"),
        (["--model", "parameter-free"], "the model has no tokenizer, so it takes no --text"),
    ],
)
def test_texts_alone_are_refused_with_what_to_do(
    flags: list[object], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = [] if "--text" in flags else ["--text", "a"]
    assert said in refused(capfd, tmp_path / "here", attention, "--layers", 1, *text, *flags)


def test_two_texts_and_broken_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"cannot read --text-file .*utf-8"):
        Settings(text_file=file).validate()
    file.write_bytes(b"a\0b")
    with pytest.raises(UserError, match=r"text.txt is not text: it holds NUL bytes"):
        Settings(text_file=file).validate()
    file.write_text("a")
    with pytest.raises(UserError, match="two texts: take one"):
        Settings(text="a", text_file=file).validate()
