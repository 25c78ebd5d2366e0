"""Two models head by head: the edited head is named, and no other."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.command_line import ended, run_command
from transformers import AutoModelForCausalLM

from nope_probe import attention, capture_attention, compare, difference, load, read_run

SMALL = ("--data", "random", "--n-seqs", 34, "--seq-len", 13, "--folds", 17)
LAYER, HEAD, D_HEAD = 1, 4, 10
TEXT = "at other times"


@pytest.fixture(scope="module")
def folders(tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny Llama, and the same with the query weights of L1H4, in its last layer, tripled."""
    root = tmp_path_factory.mktemp("models")
    base, edited = tiny("llama").folder, root / "edited"
    shutil.copytree(base, edited)
    model = AutoModelForCausalLM.from_pretrained(edited)
    rows = slice(HEAD * D_HEAD, (HEAD + 1) * D_HEAD)
    with torch.no_grad():
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


def tokens_of(compared: Path) -> torch.Tensor:
    """Return the sequences of the compared runs."""
    first = compared.parent / read_run(compared).manifest.results["folders"][0]
    return torch.from_numpy(read_run(first).arrays["tokens"]["tokens"])


def test_the_edited_head_is_named_and_no_other(compared: Path) -> None:
    run = read_run(compared)
    changes = run.tables["changes"]
    changed = changes[changes["changed"]]
    assert {*zip(changed["layer"], changed["head"], strict=True)} == {(LAYER, HEAD)}
    rest = changes[(changes["layer"] != LAYER) | (changes["head"] != HEAD)]
    assert (rest["change"] == 0).all()
    assert (rest["p_holm"] == 1).all()
    assert len(changes) == 2 * 6 * 5
    sentence, method = run.manifest.results["headline"]
    assert sentence.startswith(f"1 of 12 heads of edited changed: L{LAYER}H{HEAD} most")
    assert "changes are paired" in method
    printed = (compared.parent / "terminal").read_text()
    assert f"1 of 12 heads of edited changed: L{LAYER}H{HEAD} most" in " ".join(printed.split())


def test_the_page_has_the_grid_and_both_texts(compared: Path) -> None:
    page = (compared / "report.html").read_text()
    assert "Which heads changed" in page
    assert page.count('<div class="on-text">') == 2
    differences = read_run(compared).tables["differences"]
    rows = differences[differences["measure"] == "information"].set_index("item")
    changes = read_run(compared).tables["changes"].set_index(["layer", "head", "quantity"])
    one = changes.loc[(LAYER, HEAD, "information")]
    other = rows.loc[f"L{LAYER}H{HEAD}"]
    assert list(one[["change", "change_low", "change_high"]]) == pytest.approx(
        list(other[["difference", "difference_low", "difference_high"]])
    )
    assert set(rows["method"]) == {"paired"}


def test_captures_in_python_give_the_same_changes(compared: Path, folders: list[Path]) -> None:
    tokens = tokens_of(compared)
    maps = [capture_attention(load(str(folder)).model, tokens, n_folds=17) for folder in folders]
    changes = difference(*maps)
    stored = read_run(compared).tables["changes"].drop(columns="run")
    assert list(changes.columns) == list(stored.columns)
    for column in ("change", "change_low", "change_high"):
        assert changes[column].to_numpy() == pytest.approx(stored[column].to_numpy(), abs=1e-6)
    assert (changes["changed"] == stored["changed"]).all()


@pytest.mark.usefixtures("undrawn")
def test_other_tokens_are_unpaired_and_the_page_names_the_flag(
    folders: list[Path], tmp_path: Path
) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for seed, run in enumerate(runs):
        small = [*SMALL[:-1], 7]
        run_command(attention, "--model", folders[0], *small, "--seed", seed, "--out", run)
    run_command(compare, *runs, "--labels", "one", "two", "--out", tmp_path / "out")
    read = read_run(tmp_path / "out")
    sentence, method = read.manifest.results["headline"]
    assert sentence == "None of 12 heads of two changed beyond noise."
    assert "unpaired and wider: run both with the same --seed." in method
    assert "take --folds 16" in method


@pytest.mark.usefixtures("undrawn")
def test_an_adapter_of_one_layer_names_heads_from_that_layer_on(
    folders: list[Path], tmp_path: Path
) -> None:
    hf = AutoModelForCausalLM.from_pretrained(folders[0])
    config = LoraConfig(target_modules=["q_proj", "k_proj"], layers_to_transform=[LAYER], r=4)
    adapted = get_peft_model(hf, config)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    runs = [tmp_path / "base", tmp_path / "adapted"]
    for run, flags in zip(runs, ([], ["--adapter", tmp_path / "adapter"]), strict=True):
        run_command(attention, "--model", folders[0], *SMALL, *flags, "--out", run)
    run_command(compare, *runs, "--labels", "base", "adapted", "--out", tmp_path / "out")
    changes = read_run(tmp_path / "out").tables["changes"]
    changed = changes[changes["changed"]]
    assert {*changed["layer"]} == {LAYER}
    assert (changes[changes["layer"] < LAYER]["change"] == 0).all()
