"""`--tokens FILE` runs the tokens of a file, of a model with a tokenizer or without."""

from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from support.command_line import run_command
from support.tiny_models import ByName, tokenizer, tokens

from nope_probe import Sequences, UserError, ablate, attention, run_ablations, run_attention

pytestmark = pytest.mark.usefixtures("undrawn")

TOKENS = tokens(9, 11)
DOCUMENTS = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5, 5])


@pytest.fixture
def bare(tiny: ByName, tmp_path: Path) -> str:
    """A model's folder without a tokenizer."""
    ignored = ignore_patterns("tokenizer*")
    return str(copytree(tiny("llama").folder, tmp_path / "bare", ignore=ignored))


def test_the_tokens_of_a_file_are_run_as_those_of_python_and_shown_again_while_it_is_the_same(
    bare: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, expected = tmp_path / "tokens.npy", run_attention(bare, TOKENS).tables["attention"]
    asked = [attention, "--model", bare, "--tokens", file, "--out", tmp_path / "run"]
    np.save(file, TOKENS.numpy())
    for told in ("", "finished before, in "):
        run_command(*asked)
        assert told in capfd.readouterr().err
        run = run_attention(bare, tokens=file, out=tmp_path / "run")
        pd.testing.assert_frame_equal(run.tables["attention"], expected)
        assert run.manifest.data.name == "tokens.npy"
    np.save(file, TOKENS.flip(1).numpy())
    with pytest.raises(SystemExit):
        run_command(*asked)
    assert "holds a run with other settings" in capfd.readouterr().err


def test_padding_in_the_file_is_said_in_the_terminal_and_under_what_was_run(
    tiny: ByName, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(copytree(tiny("llama").folder, tmp_path / "padding"))
    words = tokenizer()
    words.pad_token = words.convert_ids_to_tokens(5)
    words.save_pretrained(folder)
    padded = TOKENS.clamp_min(6)
    padded[:2, :4], padded[2, 9:] = 5, 5
    np.save(tmp_path / "tokens.npy", padded.numpy())
    run_command(
        ablate, "--model", folder, "--tokens", tmp_path / "tokens.npy", "--out", tmp_path / "run"
    )
    note = "3 of 9 rows begin or end with the pad token"
    assert note in " ".join(capfd.readouterr().out.split())
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"<dt>padding</dt><dd>{note}" in page
    assert ", 10 tokens in all" in page
    run_attention(str(folder), padded)
    assert note in capfd.readouterr().err


def test_documents_in_the_file_share_folds(bare: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.safetensors"
    save_file({"tokens": TOKENS.to(torch.int32), "documents": DOCUMENTS}, file)
    given = Sequences(inputs=TOKENS, name="any", documents=DOCUMENTS)
    expected, singly = (run_ablations(bare, inputs, remove=[]) for inputs in (given, TOKENS))
    table = run_ablations(bare, tokens=file, remove=[]).tables["pattern"]
    assert table.equals(expected.tables["pattern"])
    assert not table.equals(singly.tables["pattern"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((9, 11)), r"expected integers \[seq, pos\] as 'tokens', got"),
        (np.zeros((2, 11), int), "expected 4 sequences or more for intervals"),
        (np.full((9, 11), 263), "token 263: the model's tokens are from 0 to 26"),
    ],
)
def test_a_mistake_is_one_line(
    content: np.ndarray, message: str, bare: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", content)
    with pytest.raises(UserError, match=message):
        run_ablations(bare, tokens=tmp_path / "tokens.npy", remove=[])
