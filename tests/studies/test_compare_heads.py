"""Two models head by head: the edited heads are named, and no other."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.command_line import ended, run_command
from support.tiny_models import ByName
from transformers import AutoModelForCausalLM

from nope_probe import attention, compare, figures, read_run
from nope_probe.studies.compare import PARTS

SMALL = ("--data", "random", "--n-seqs", 34, "--seq-len", 13, "--folds", 17)
LAYER, HEADS, D_HEAD = 1, (2, 4), 10
TEXT = "at other times"


@pytest.fixture(scope="module")
def folders(tiny: ByName, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny Llama, and the same with the query weights of L1H2 and L1H4 tripled."""
    root = tmp_path_factory.mktemp("models")
    base, edited = tiny("llama").folder, root / "edited"
    shutil.copytree(base, edited)
    model = AutoModelForCausalLM.from_pretrained(edited)
    with torch.no_grad():
        for head in HEADS:
            rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
            model.model.layers[LAYER].self_attn.q_proj.weight[rows] *= 3
    model.save_pretrained(edited)
    return [base, edited]


@pytest.fixture(scope="module")
def compared(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the comparison of both models on random tokens, with a text."""
    desk = tmp_path_factory.mktemp("desk")
    for folder in folders:
        line = ["--model", folder, *SMALL, "--text", TEXT, "--out", desk / folder.name]
        run_command(attention, *line)
    runs = [str(desk / folder.name) for folder in folders]
    result = ended("compare", [*runs, "--out", str(desk / "out")], desk)
    assert result.code == 0, result.err
    (desk / "terminal").write_text(result.out)
    return desk / "out"


def test_the_edited_heads_are_named_first_and_no_other(compared: Path, folders: list[Path]) -> None:
    run = read_run(compared)
    table = run.tables["differences"]
    differs = table[table["differs"]]
    edited = [(LAYER, head) for head in HEADS]
    assert {*zip(differs["layer"], differs["head"], strict=True)} == {*edited}
    is_edited = pd.Series([*zip(table["layer"], table["head"], strict=True)]).isin(edited)
    rest = table[~is_edited].dropna(subset=["difference"])
    assert (rest["difference"] == 0).all()
    assert (rest["p_holm"] == 1).all()
    assert (table.groupby("number").size() == 2 * 6).all()
    assert {*PARTS, "first_weight", "need_rope"} <= {*table["number"]}
    counted = f"2 of 12 heads of edited and {folders[0].name} differ"
    sentence = f"{counted} beyond noise; furthest: L{LAYER}H"
    page = (compared / "report.html").read_text()
    assert sentence in page
    assert {*table["method"].dropna()} == {"paired"}
    assert sentence in " ".join((compared.parent / "terminal").read_text().split())
    assert "Which heads changed" in page
    colours = figures.of_run(run)["Which heads changed"].layout.coloraxis
    assert colours.cmin == -colours.cmax < 0
    assert table["differs"].is_monotonic_decreasing
    sizes = table["difference"].abs()
    assert sizes[table["differs"]].is_monotonic_decreasing
    assert sizes[~table["differs"] & sizes.notna()].is_monotonic_decreasing


@pytest.mark.usefixtures("undrawn")
def test_other_tokens_are_unpaired_and_the_page_names_the_flags(
    folders: list[Path], tmp_path: Path
) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for seed, run in enumerate(runs):
        small = [*SMALL[:-1], 7]
        run_command(attention, "--model", folders[0], *small, "--seed", seed, "--out", run)
    run_command(compare, *runs, "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "0 of 12 heads of seed 1 and seed 0 differ beyond noise; " in page
    assert "Run both with the same --data" in page
    assert {*read_run(tmp_path / "out").tables["differences"]["method"].dropna()} == {"unpaired"}
