"""The methods paragraph of a run says what its manifest and its command line say."""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.command_line import run_command

from nope_probe import (
    ablate,
    attention,
    behaviour,
    circuit,
    load,
    read_run,
    run_ablations,
    scores,
    simulate,
    trace,
)
from nope_probe.run.folder import read_manifest
from nope_probe.studies.methods import methods_paragraph

pytestmark = pytest.mark.usefixtures("unenforced", "undrawn")

# 11 sequences of 17 tokens, of a model without RoPE, with it, and with both mask and RoPE removed.
SMALL = ["--n-seqs", 11, "--seq-len", 17, "--folds", 5, "--seed", 7]
RUNS: dict[str, tuple[ModuleType, list[object], list[str]]] = {
    "ablate": (
        ablate,
        ["--layers", 2, "--remove", "w_q", "--replacement", "random", "mean"],
        [
            "We ran L0, L1 of ",
            "conditions that removed the causal mask, RoPE and W_Q in every block, with the "
            "sources and without them.",
            "To remove the causal mask, every query attended to all keys.",
            "A removed weight was replaced by orthonormal rows drawn from the run's seed (scaled "
            "so that its output keeps the RMS of the weight's output), and again by its mean "
            "output",
            "the same sequences were run with their tokens permuted",
            "5 folds",
        ],
    ),
    "scores": (
        scores,
        ["--layers", 1, "--per-head", "--windows", "start", "--shuffle", "--skip-keys", 3],
        [
            "tokens from the start of",
            "with the tokens of each sequence permuted",
            "this map less each row's mean over the earlier keys but the first",
            "for each head and over heads",
        ],
    ),
    "circuit": (
        circuit,
        ["--layer", 0, "--remove", "rope", "qk", "norms", "--gain", "norm"],
        [
            "from the input of block L0 to the scores of the next block",
            "To remove RoPE, all queries and keys were rotated as at position 0.",
            "replaced by a rectangular identity (scaled to the weight's Frobenius norm).",
        ],
    ),
    "trace": (
        trace,
        ["--layers", 2, "--confirm", 1, "--writers", "layers"],
        [
            "the attention of each block",
            "for every earlier attention and MLP and up to 1 heads: the writer's mean output",
            "lead of the first key (its mean attention score before softmax less the mean of the",
        ],
    ),
    "attention": (
        attention,
        ["--layers", 1, "--remove", "rope", "w_q", "--text", "ab"],
        [
            "The model was measured without RoPE and W_Q, removed in every block.",
            "A removed weight was replaced by a rectangular identity",
            "relative entropy of each head's attention weights to uniform weights",
            "The first key counted separately from the other keys.",
            "One more text of 2 tokens was read and compared.",
        ],
    ),
    "behaviour": (
        behaviour,
        ["--measures", "loss", "--remove", "mask", "rope+mlp", "--prefix", 9],
        [
            "We measured losses of the model, intact, without the causal mask and without RoPE + ",
            "the first 9 tokens saw each other",
            "To remove the MLPs, their output was set to 0.",
            "a jackknife over documents",
        ],
    ),
}


@pytest.mark.parametrize("command", RUNS)
def test_the_paragraph_states_what_the_command_line_asked_for_and_what_was_run(
    command: str, tmp_path: Path, tiny: Callable[[str], Any]
) -> None:
    module, flags, claims = RUNS[command]
    run, model = tmp_path / "run", tiny("smollm3-rope").folder
    run_command(module, "--model", model, *SMALL, *flags, "--out", run)
    (paragraph,) = read_run(run).methods.splitlines()
    manifest = json.loads((run / "manifest.json").read_text())
    assert methods_paragraph(read_manifest(run)) == paragraph
    assert f"<p>{escape(paragraph)}</p>" in (run / "report.html").read_text("utf-8")
    for claim in (
        *claims,
        "11 sequences of 17 tokens",
        f"{manifest['documents']} documents (data: {manifest['data']['name']})",
        "drawn with seed 7",
        f"fingerprint {manifest['model']['weights']}",
        f"{manifest['model']['parity']['logits']:.1g} for logits",
        f"TransformerLens {manifest['versions']['transformer-lens']}",
    ):
        assert claim in paragraph
    assert ("A removed weight" in paragraph) == (command in ("ablate", "circuit", "attention"))
    assert "{" not in paragraph


@pytest.mark.parametrize("command", [attention, circuit])
def test_a_run_that_removes_nothing_says_nothing_of_removals(
    command: ModuleType, tmp_path: Path
) -> None:
    run, explore = tmp_path / "run", [] if command is circuit else ["--layers", 1]
    run_command(command, *SMALL, *explore, "--data", "random", "--out", run)
    paragraph = read_run(run).methods
    assert "11 sequences of 17 random tokens" in paragraph
    assert "without" not in paragraph
    assert "remove" not in paragraph.replace("removed by the jackknife", "")


def test_vectors_and_tokens_in_memory_are_described_by_their_kind(tmp_path: Path) -> None:
    tokens = torch.randint(8, 300, (11, 17), generator=torch.Generator().manual_seed(0))
    vectors = torch.randn(11, 17, 64, generator=torch.Generator().manual_seed(0))
    for name, data, kind in (
        ("nope-tiny", tokens, "tokens"),
        ("parameter-free", vectors, "vectors"),
    ):
        run = run_ablations(name, data, layers=1, folds=5, remove=["sources"])
        assert f"The inputs were 11 sequences of 17 {kind} (data: " in run.methods
    made = run_ablations(load("nope-tiny", n_layers=1), n_seqs=11, seq_len=17, remove=["sources"])
    assert "11 sequences of 17 tokens from random places" in made.methods, "of a model in memory"


def test_sequences_without_documents_are_described_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_command(scores, *SMALL, "--layers", 1, "--data", "random", "--out", run)
    paragraph = read_run(run).methods
    assert "the inputs were 11 sequences of 17 random tokens" in paragraph.lower()
    assert "share a fold" not in paragraph


def test_a_command_without_a_paragraph_has_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_command(simulate, "--n-samples", 64, "--seq-len", 7, "--n-layers", 2, "--out", run)
    assert read_run(run).methods == ""
    assert "Methods, for a paper" not in (run / "report.html").read_text("utf-8")
