"""What runs read: documents, of which each is in one fold, and tokens of a file."""

from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from support.command_line import run_command
from support.rounding import assert_same
from support.tiny_models import ByName, tokenizer, tokens

from nope_probe import (
    Sequences,
    UserError,
    ablate,
    attention,
    load,
    run_ablations,
    run_attention,
    sequences,
)
from nope_probe.maps.folds import grouped_folds
from nope_probe.reports.page import run_notes

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


SMALL = {"n_seqs": 23, "seq_len": 13, "folds": 4, "layers": 1}


def write(path: Path, n_documents: int) -> Path:
    """Write documents of 4 to 7 sequences each."""
    texts = [f"def f{d}(x):\n    return x + {d}\n" * (5 + d % 4) for d in range(n_documents)]
    pd.DataFrame({"text": texts}).to_json(path, orient="records", lines=True)
    return path


def test_folds_are_of_documents_and_few_documents_are_pointed_out(tmp_path: Path) -> None:
    data, out = str(write(tmp_path / "text.jsonl", 6)), tmp_path / "run"
    run = run_ablations("nope-tiny", remove="sources", data=data, out=out, **SMALL)
    documents = torch.from_numpy(run.arrays["tokens"]["documents"])
    sizes = grouped_folds(documents, 4).bincount()
    assert run.manifest.documents == len(documents.unique()) == 6
    assert run.manifest.fold_sizes == tuple(sizes.tolist())
    note = "The intervals come from only 6 documents, so they are rough."
    assert note in (out / "report.html").read_text()
    folds = load_file(out / "folds.safetensors")["score/mask"]
    row, column = np.tril_indices(13)
    pooled = np.einsum("f,flc->lc", sizes.numpy() / 23, folds)
    assert_same(pooled, run.maps["score/mask"][:, row, column])


@pytest.mark.parametrize(
    ("n_documents", "message"),
    [
        (3, "intervals need sequences of 4 documents or more, and --data .* gives 3"),
        (6, "6 documents do not fill 8 folds, .*: lower --folds to 6, or take more documents"),
    ],
)
def test_too_few_documents_for_folds_are_refused_in_one_line(
    n_documents: int, message: str, tmp_path: Path
) -> None:
    data = str(write(tmp_path / "text.jsonl", n_documents))
    with pytest.raises(UserError, match=message):
        run_ablations("nope-tiny", data=data, n_seqs=11, seq_len=13)


def test_in_memory_folds_are_of_documents_too(tmp_path: Path) -> None:
    loaded = load("nope-tiny", n_layers=1)
    data = sequences(
        str(write(tmp_path / "text.jsonl", 6)), tokenizer=loaded.tokenizer, n_seqs=23, seq_len=13
    )
    with pytest.raises(ValueError, match="from 4 to 6 folds for 6 documents, got 8"):
        run_ablations(loaded.model, data, remove=["sources"], folds=8)
    rows = run_ablations(loaded.model, data, remove=["sources"]).tables["pattern"]
    assert [*rows["removed"]] == ["intact", "mask", "shuffled", "mask+shuffled"]


TEXT = "def f(x):\n    return x\n" * 3


@pytest.mark.parametrize(
    ("texts", "note"),
    [
        ([TEXT] * 23, "All 23 sequences are the same, so the intervals have no width."),
        ([TEXT] * 16 + ["x = 1\n" * 9] * 7, "The 23 sequences repeat 2 different ones, so the"),
        ([f"x{index} = {TEXT}" for index in range(23)], None),
    ],
    ids=["the same", "repeated", "different"],
)
def test_repeated_sequences_are_pointed_out(
    texts: list[str], note: str | None, tmp_path: Path
) -> None:
    data = tmp_path / "text.jsonl"
    pd.DataFrame({"text": texts}).to_json(data, orient="records", lines=True)
    chosen = {"windows": "start", "data": str(data), **SMALL}
    run = run_ablations("nope-tiny", remove="none", **chosen)
    said = " ".join(run_notes(run.manifest))
    assert note in said if note else "sequences are the same" not in said
    rows = run.tables["pattern"]
    width = (rows["amplitude_high"] - rows["amplitude_low"]) / rows["amplitude"]
    assert (width.item() < 1e-5) == (len({*texts}) == 1)
