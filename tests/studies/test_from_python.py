"""The public `run_*` functions are the commands, of a model by name or of one in memory."""

import re
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.finished_runs import Finished, show
from support.rounding import NETWORK

import nope_probe
from nope_probe import Run, Sequences, UserError, ablated, capture_losses, load, read_run, sequences
from nope_probe.reports.page import about

pytestmark = pytest.mark.usefixtures("undrawn")

SIZES: dict[str, Any] = {"n_seqs": 20, "seq_len": 24, "folds": 5}
# Of each function: its command's line and options, and the tables with shuffled tokens too, which
# given inputs have not.
RUNS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "run_ablations": ("ablate --remove w_q", {"remove": ["w_q"]}, ("pattern",)),
    "run_attention": ("attention --remove w_q", {"remove": ["w_q"]}, ()),
    "run_behaviour": (
        "behaviour --measures loss copy --remove mask",
        {"measures": ["loss", "copy"], "remove": ["mask"]},
        (),
    ),
    "run_trace": ("trace --confirm 2 --writers layers", {"confirm": 2, "writers": "layers"}, ()),
}
each_function = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load("rope-tiny")


@pytest.fixture(scope="module")
def text(loaded: Any) -> Sequences:
    return sequences(tokenizer=loaded.tokenizer, n_seqs=20, seq_len=24)


def compare(one: Run, other: Run, shuffled: Sequence[str] = ()) -> None:
    """Check that two runs have equal tables and maps, but for rows on shuffled tokens of some."""
    assert one.tables.keys() == other.tables.keys()
    for name, table in other.tables.items():
        mine = one.tables[name]
        if name in shuffled:
            mine, table = (
                rows[~rows["removed"].str.contains("shuffled")] for rows in (mine, table)
            )
        pd.testing.assert_frame_equal(mine, table)
    for name, cells in other.arrays.get("maps", {}).items():
        np.testing.assert_array_equal(one.maps[name], cells)


@each_function
def test_a_model_in_memory_gives_what_the_command_writes_of_its_name(
    name: str,
    loaded: Any,
    text: Sequences,
    finished: Callable[[str], Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, options, shuffled = RUNS[name]
    typed, function = finished(f"{line} --model rope-tiny"), getattr(nope_probe, name)
    options = options if name == "run_behaviour" else {**options, "layers": 2}
    kept = tmp_path / "kept"
    compare(function(loaded.model, text, out=kept, folds=5, **options), typed.run, shuffled)
    assert (kept / "report.html").stat().st_size > 10_000
    monkeypatch.setattr("nope_probe.hooks.reading.streaming.run_forward", None)
    monkeypatch.setattr("nope_probe.studies.study.load_model", None)
    compare(function("rope-tiny", out=typed.folder, **options, **SIZES), typed.run)


@each_function
def test_a_finished_run_is_shown_again_as_it_was_and_its_page_loads_nothing(
    name: str, finished: Callable[[str], Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{RUNS[name][0]} --model rope-tiny"
    typed = finished(line)
    manifest = (typed.folder / "manifest.json").read_bytes()
    monkeypatch.setattr("nope_probe.run.session.load_model", None)
    assert show(line, typed.folder) == typed.printed
    assert (typed.folder / "manifest.json").read_bytes() == manifest
    sentence = " ".join(typed.printed.rpartition("\nopen ")[0].split())
    assert sentence[-50:] in " ".join(unescape(typed.page).split())
    assert sentence.endswith(".")
    assert 'src="http' not in typed.page
    to_copy = ("python -m ", "open ")  # are not wrapped
    lines = [line for line in typed.printed.splitlines() if not line.startswith(to_copy)]
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_a_run_of_a_name_and_of_what_load_returns_are_the_commands_and_leave_no_folder(
    loaded: Any, finished: Callable[[str], Finished], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    line, options, _ = RUNS["run_attention"]
    typed = finished(f"{line} --model rope-tiny").run
    compare(nope_probe.run_attention("rope-tiny", layers=2, **options, **SIZES), typed)
    compare(nope_probe.run_attention(loaded, layers=2, **options, **SIZES), typed)
    assert not [*tmp_path.iterdir()]


def test_a_folder_belongs_to_weights_tokens_and_documents(
    loaded: Any, text: Sequences, tmp_path: Path
) -> None:
    def run(model: Any, inputs: Any) -> Any:
        out = tmp_path / "run"
        return nope_probe.run_ablations(model, inputs, out=out, remove=["sources"], layers=1)

    table = run(loaded, text).tables["pattern"]
    model = deepcopy(loaded.model)
    next(model.parameters()).data.view(-1)[5] += 1
    assert text.documents is not None
    other = Sequences(inputs=text.inputs, name=text.name, bos=text.bos, documents=-text.documents)
    tokens = text.inputs.clone()
    tokens[3, 4] += 1
    for case in ((model, text), (loaded, tokens), (loaded, text.inputs), (loaded, other)):
        with pytest.raises(UserError, match="run holds a run with other settings; choose another"):
            run(*case)
    pd.testing.assert_frame_equal(read_run(tmp_path / "run").tables["pattern"], table)


def test_a_finished_folder_of_a_model_in_memory_is_refused_and_that_of_a_name_read(
    loaded: Any, text: Sequences, tmp_path: Path
) -> None:
    def run(model: Any) -> Any:
        return nope_probe.run_trace(model, text, out=tmp_path / "run", confirm=0, layers=1)

    terms = run(loaded).tables["terms"]
    for model in (loaded, loaded.model):
        with pytest.raises(UserError, match="run holds a finished run, and a model in memory"):
            run(model)
    pd.testing.assert_frame_equal(nope_probe.read_run(tmp_path / "run").tables["terms"], terms)
    named = {"out": tmp_path / "named", "confirm": 0, "layers": 1}
    first, again = (nope_probe.run_trace("rope-tiny", text, **named) for _ in range(2))
    pd.testing.assert_frame_equal(first.tables["terms"], again.tables["terms"])


@pytest.mark.parametrize("name", ["run_ablations", "run_behaviour", "run_trace"])
def test_inside_ablated_a_run_that_removes_is_refused_before_it_runs(
    name: str, loaded: Any, text: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.hooks.reading.streaming.run_forward", None)
    instead = " or take confirm=0" if name == "run_trace" else ""
    message = f"this run removes components itself: leave `ablated` first{instead}$"
    for model in (loaded, loaded.model):
        with pytest.raises(UserError, match=message), ablated(loaded.model, "mask"):
            getattr(nope_probe, name)(model, text)


@pytest.mark.parametrize(("n_cut", "first"), [(0, None), (1, None), (1, 7)])
def test_losses_of_given_tokens_are_the_models_and_random_segments_begin_as_the_tokens_do(
    n_cut: int, first: int | None, loaded: Any, text: Sequences, tmp_path: Path
) -> None:
    tokens = text.inputs[:, n_cut:].clone()
    if first is not None:  # all begin with a token that is no BOS
        tokens[:, 0] = first
    options = {"measures": ["loss", "copy"], "remove": ["mlp"], "prefix": 5}
    run = nope_probe.run_behaviour(loaded, tokens, **options)
    table = run.tables["behaviour"].set_index(["measure", "removed"])["value"]
    expected = capture_losses(loaded.model, tokens).double().mean()
    assert table["loss", "intact"] == pytest.approx(float(expected), rel=NETWORK)
    n_first = int(n_cut == 0 or first is not None)
    assert run.manifest.data.bos == bool(n_first)
    repeated = torch.from_numpy(run.arrays["tokens"]["copy_random"])
    segment = (tokens.shape[1] - n_first) // 2
    assert torch.equal(repeated[:, :n_first], tokens[:, :n_first])
    halves = repeated[:, n_first:].split(segment, dim=1)
    assert torch.equal(*halves)
    assert loaded.tokenizer.bos_token_id not in halves[0]


def test_extrapolation_of_a_model_in_memory_takes_its_positions_and_sequences_of_its_own(
    loaded: Any, text: Sequences
) -> None:
    options = {"measures": ["loss", "extrapolation"], "remove": ["mlp"], "n_seqs": 16}
    run = nope_probe.run_behaviour(loaded, seq_len=23, max_len=512, **options)
    skipped = run.manifest.results["skipped"].get("extrapolation", "")
    if hasattr(loaded.model, "original_model"):  # a bridge without learned positions has no end
        assert skipped == ""
    else:
        assert skipped == "the model has 256 positions: load it with n_ctx=512, or lower --max-len"
    del options["n_seqs"]
    run = nope_probe.run_behaviour(loaded, text, **options)
    assert run.manifest.results["skipped"]["extrapolation"].startswith(
        "it takes windows of 512 tokens"
    )


@each_function
def test_mistakes_are_one_line_before_anything_is_run(
    name: str, loaded: Any, text: Sequences, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nope_probe.hooks.reading.streaming.run_forward", None)
    function = getattr(nope_probe, name)
    (tmp_path / "text").write_text("mine")
    for message, given, options in (
        (r"^unknown option 'nseqs'; did you mean n_seqs\?$", ["rope-tiny"], {"nseqs": 4}),
        (r"unknown option 'zzz'; there are .*, folds, .*, windows", ["rope-tiny"], {"zzz": 4}),
        ("n_seqs has no effect next to given inputs", ["rope-tiny", text], {"n_seqs": 17}),
        ("dtype has no effect next to a model in memory", [loaded], {"dtype": "float32"}),
        ("has 4 layers, 5 were asked for; try --layers all", [loaded, text], {"layers": 5}),
        (r"expected a transformers model .*, got Linear", [torch.nn.Linear(2, 3), text], {}),
        ("holds other files; choose another --out", [loaded, text], {"out": str(tmp_path)}),
    ):
        with pytest.raises(UserError, match=message):
            function(*given, **options)
    with pytest.raises(UserError, match=r"^unknown option 'layer'; did you mean layers='2:3'\?$"):
        nope_probe.run_ablations("nope-tiny", layer=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several processes share the folder of a run: name it"):
        function(loaded, text)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("run_ablations", {"remove": 5}, "--remove 5 should be a valid string"),
        ("run_ablations", {"seed": None}, "--seed None should be a valid integer"),
        ("run_behaviour", {"alpha": "0"}, "--alpha '0' should be a valid number"),
        ("run_behaviour", {"data": Path("x")}, r"--data .*Path\('x'\) should be a valid string"),
        ("run_trace", {"out": 5}, "--out 5 is not a valid path for <class 'pathlib.Path'>"),
        ("run_trace", {"confirm": None}, "--confirm None should be a valid integer"),
        ("run_trace", {"per_head": "yes"}, "--per-head 'yes' should be a valid boolean"),
    ],
)
def test_a_value_of_another_type_is_one_line_before_anything_is_run(
    name: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.models.load.load", None)
    with pytest.raises(UserError, match=f"^{message}$"):
        getattr(nope_probe, name)("rope-tiny", **options)


def test_a_model_without_a_tokenizer_has_all_measures_but_those_of_random_tokens(
    loaded: Any, text: Sequences
) -> None:
    model = deepcopy(loaded.model)
    model.tokenizer = None
    few = {"remove": ["rope"], "folds": 4}
    study = nope_probe.run_behaviour(model, text.inputs, measures=["loss"], **few)
    intact = (
        study.tables["behaviour"].set_index(["measure", "removed"]).loc[("loss", "intact"), "value"]
    )
    logits = loaded.model(text.inputs)[:, :-1].flatten(0, 1)
    truth = torch.nn.functional.cross_entropy(logits, text.inputs[:, 1:].flatten())
    assert intact == pytest.approx(truth.item(), rel=1e-5)
    all_measures = nope_probe.run_behaviour(model, text.inputs, **few)
    why = "random tokens need a tokenizer, and the model has none"
    assert all_measures.manifest.results["skipped"].items() >= {"copy": why, "bos": why}.items()
    taken = all_measures.tables["behaviour"].dropna(subset=["value"])["measure"]
    assert {*taken} == {"loss", "loss_suffix", "in_context", "order", "position"}
    with pytest.raises(UserError, match=rf"^nothing to measure \(copy: {why}\)$"):
        nope_probe.run_behaviour(model, text.inputs, measures=["copy"])


def test_a_run_of_a_model_in_memory_is_described(
    loaded: Any, text: Sequences, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = nope_probe.run_ablations(loaded, text.inputs, out=out, remove=["sources"], layers=1)
    call = f"run_ablations(model, inputs, layers=1, out={str(out)!r}, remove=('sources',))"
    assert escape(call) in run._repr_html_()
    footer = (out / "report.html").read_text().partition("What was run")[2]
    rows = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", footer))
    assert rows["model"].startswith("SmolLM3ForCausalLM as ")
    assert rows["weights"] == run.manifest.model.weights
    assert {"texts", "versions", "machine", "seconds", "finished"} <= {*rows}
    facts = about(run.manifest)
    assert facts["Model"].endswith(", L0 of 4")
    assert facts["Data"] == "20 sequences of 24 tokens given in Python, each after BOS"
