"""Every command on a hybrid model, in which L1 and L3 attend and L0 and L2 are convolutions."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from safetensors.numpy import load_file
from support.command_line import refused, run_command
from support.decoder_errors import zero_mlps
from support.decoders import write_decoder
from support.plain_attention import plain_attention
from support.rounding import NETWORK, assert_same
from support.tiny_models import Tiny, write_texts
from support.tiny_models import tokens as random_tokens

from nope_probe import (
    Run,
    ablate,
    behaviour,
    capture_scores,
    figures,
    load,
    read_run,
    run_ablations,
    trace,
)
from nope_probe.maps.maps import packed_tensors, stored_layers
from nope_probe.reports.page import Report
from nope_probe.studies.ablate import report
from nope_probe.studies.behaviour import report as behaviour_report

N_SEQS, N_POS = 16, 29
ATTENDING = [1, 3]
NOTE = "layers without attention: L0, L2"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    kinds = ["conv", "full_attention"] * 2
    root = tmp_path_factory.mktemp("models")
    return write_decoder("lfm2", root, num_hidden_layers=4, layer_types=kinds)


@pytest.fixture(scope="module")
def run_of(
    hybrid: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[ModuleType, str, list[object]], Path]:
    root = tmp_path_factory.mktemp("runs")
    write_texts(root / "texts.jsonl", n_texts=N_SEQS, n_words=60)
    asked = ["--model", hybrid.folder, "--data", root / "texts.jsonl", "--folds", 4]
    asked += ["--n-seqs", N_SEQS, "--seq-len", N_POS]

    def run(command: ModuleType, name: str, more: list[object]) -> Path:
        run_command(command, *asked, *more, "--out", root / name)
        return root / name

    return run


def tokens_of(out: Path) -> torch.Tensor:
    return torch.from_numpy(load_file(out / "tokens.safetensors")["tokens"])


def assert_layers_are_numbered(
    out: Path, report_of: Callable[[Run], Report] = behaviour_report
) -> None:
    run, page = read_run(out), (out / "report.html").read_text()
    for name, table in run.tables.items():
        if "layer" in table:
            numbers = {int(item) for item in table["layer"] if str(item).isdigit()}
            assert numbers == {*ATTENDING}, name
    assert NOTE in page
    assert not re.search(r"\bL[02] of|\bL[02]'s|in L[02]\b", page)
    for section in report_of(run).sections:
        figure = section.drawn()
        if figure is not None:
            assert {*layers_named(figure)} <= {*ATTENDING}, section.title


def layers_named(figure: go.Figure) -> list[int]:
    names = [step.label for slider in figure.layout.sliders for step in slider.steps]
    texts = [f"{trace.name}" for trace in figure.data]
    texts += [f"{note.text}" for note in figure.layout.annotations]
    return [int(name) for name in (*names, *re.findall(r"\bL(\d+)", " ".join(texts)))]


def assert_plain(
    maps: Any, hybrid: Tiny, tokens: torch.Tensor, *, without: str | None = None
) -> None:
    plain = plain_attention(hybrid.hf, tokens, without=without)
    assert [*plain] == ATTENDING
    for measured, attention in zip(maps, plain.values(), strict=True):
        assert_same(measured, attention.map)


def test_maps_are_those_of_plain_and_of_edited_models(run_of: Any, hybrid: Tiny) -> None:
    out = run_of(ablate, "ablate", ["--remove", "mlp", "--per-head"])
    run, tokens = read_run(out), tokens_of(out)
    assert_plain(run.maps["score/intact"], hybrid, tokens)
    assert_plain(run.maps["score/mask"], hybrid, tokens, without="mask")
    assert_plain(run.maps["score/mask+rope"], hybrid, tokens, without="mask and rope")
    with zero_mlps(hybrid):  # what a layer's own MLP does comes after its scores
        assert_plain(run.maps["score/mlp"], hybrid, tokens)
    assert [*run.manifest.layers] == ATTENDING
    assert_layers_are_numbered(out, report)


def test_losses_are_those_of_an_edited_model(run_of: Any, hybrid: Tiny) -> None:
    measures = ["loss", "position"]
    more = ["--measures", *measures, "--remove", "rope", "mlp"]
    out = run_of(behaviour, "behaviour", more)
    assert_layers_are_numbered(out)
    tokens = tokens_of(out)
    table = read_run(out).tables["behaviour"].set_index(["measure", "removed"])
    with zero_mlps(hybrid), torch.inference_mode():
        expected = float(hybrid.hf(tokens, labels=tokens).loss)
    assert table.loc[("loss", "mlp"), "value"] == pytest.approx(expected, rel=NETWORK)


def test_the_functions_of_notebooks_number_layers_too(hybrid: Tiny) -> None:
    model, tokens = load(str(hybrid.folder)).model, random_tokens(5)
    maps = capture_scores(model, tokens, n_folds=4)
    assert [*maps.by_layer] == [*stored_layers(packed_tensors(maps))] == [1, 3]
    assert re.findall(r"\bL\d", repr(maps)) == ["L1", "L3"]
    assert [panel.name for panel in figures.score_maps(maps).data] == ["L1", "L3"]
    slider = figures.term_maps({"all": maps}, title="t", layer=3).layout.sliders[0]
    assert (slider.active, [step.label for step in slider.steps]) == (1, ["1", "3"])
    study = run_ablations(model, tokens, remove=["mlp"], layers=2, folds=4)
    assert study.manifest.layers == (1,)
    with pytest.raises(ValueError, match="do not attend: L1 is the first that does"):
        run_ablations(model, tokens, layers=1)


def test_layers_that_do_not_attend_are_named_where_no_other_is_read(
    hybrid: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", hybrid.folder, "--layers", 1]
    line = refused(capfd, tmp_path, ablate, *asked, "--data", "random")
    assert line.endswith("a hybrid model may attend in later layers")
    line = refused(capfd, tmp_path, behaviour, *asked, "--n-seqs", 16, "--seq-len", 20)
    assert line.endswith("do not attend: L1 is the first that does, try --layers 2")


def test_a_hybrid_is_read_where_it_attends_and_its_other_blocks_write_as_a_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_decoder("jamba", tmp_path)
    sizes = ["--n-seqs", 43, "--seq-len", 23, "--folds", 5, "--batch-size", 7]
    flags = ["--model", model.folder, "--data", "random", "--layers", "all", "--confirm", 1]
    run_command(trace, *sizes, *flags, "--out", tmp_path / "run")
    run = read_run(tmp_path / "run")
    readers = sorted(run.tables["terms"]["layer"].unique())
    others = run.manifest.model.not_attending
    assert not {*readers} & {*others}
    last = run.tables["writers"].query("layer == @readers[-1]")
    assert {f"BLOCK{layer}" for layer in others if layer < readers[-1]} <= {*last["writer"]}
    elsewhere = tmp_path / "elsewhere"
    line = refused(capfd, elsewhere, trace, *flags, "--reader", f"L{others[0]}")
    assert line.startswith(f"--reader L{others[0]}: there are L{readers[0]}")
