"""Sequences of one document share a fold in every command, and few documents are pointed out."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support.rounding import assert_same

from nope_probe import UserError, load, run_ablations, sequences
from nope_probe.maps.folds import grouped_folds
from nope_probe.reports.page import run_notes

pytestmark = pytest.mark.usefixtures("undrawn")

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
