"""Each head without each source and band of RoPE: `ablate --per-head`."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.command_line import run_command
from support.plain_attention import plain_attention
from support.tiny_models import ByName
from torch import Tensor

from nope_probe import ablate
from nope_probe.run.folder import read_run
from nope_probe.studies.ablate_page import largest_heads

N, N_SEQS, FOLDS, N_HEADS, N_PAIRS = 13, 803, 5, 6, 5
SMALL = f"--n-seqs {N_SEQS} --seq-len {N} --folds {FOLDS} --batch-size 97 --data random --layers 2"
BANDS = {"rope[0:2]": [0, 1], "rope[2:5]": [2, 3, 4]}
PLACES = ["layer", "head"]


@pytest.fixture(scope="module")
def run(tiny: ByName, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "heads"
    run_command(ablate, *of_llama(tiny), "--per-head", "--bands", 2, "--out", out)
    return out


@pytest.fixture(scope="module")
def plain(run: Path, tiny: ByName) -> dict[str, Tensor]:
    """Fold means [fold, layer, head, query, key] of plain transformers, by what is removed."""
    hf, tokens = tiny("llama").hf, load_file(run / "tokens.safetensors")["tokens"]
    captured = {
        removed: plain_attention(hf, tokens, without=removed.replace("+", " and ") or None)
        for removed in ("", "mask", "rope", "mask+rope")
    }
    for band, pairs in BANDS.items():
        with unrotated_pairs(hf.model.rotary_emb, pairs):
            captured[band] = plain_attention(hf, tokens)
    scores = {
        removed: torch.stack([layer.scores.double() for layer in layers.values()], 1)
        for removed, layers in captured.items()
    }
    return {
        removed: torch.stack([of_all[fold::FOLDS].mean(0) for fold in range(FOLDS)])
        for removed, of_all in scores.items()
    }


def of_llama(tiny: ByName) -> list[Any]:
    return ["--model", tiny("llama").folder, *SMALL.split()]


def unrotated_pairs(rotary: torch.nn.Module, pairs: list[int]) -> Any:
    """Turn no coordinate of some rotary pairs, by hand: coordinate i goes with i + N_PAIRS."""

    def edit(_: Any, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        chosen = [coordinate for pair in pairs for coordinate in (pair, pair + N_PAIRS)]
        cos, sin = (part.clone() for part in output)
        cos[..., chosen], sin[..., chosen] = 1, 0
        return cos, sin

    return rotary.register_forward_hook(edit)


def leads(maps: Tensor) -> Tensor:
    """Return [fold, query]: the first key's score less the mean of 8 other keys or more."""
    rows = [maps[:, i, 0] - maps[:, i, 1:i].mean(-1) for i in range(9, N)]
    return torch.stack(rows, -1)


def patterns(maps: Tensor) -> Tensor:
    """Return [fold, cell]: the other keys' scores less their mean."""
    rows = [maps[:, i, 1:i] - maps[:, i, 1:i].mean(-1, keepdim=True) for i in range(2, N)]
    return torch.cat(rows, -1)


def product(x: Tensor, y: Tensor, sizes: Tensor) -> float:
    """Return the mean of <x_a, y_b> over folds a != b, folds weighed by their sequences."""
    weights = sizes[:, None] * sizes * (1 - torch.eye(FOLDS))
    return float((weights * (x @ y.T)).sum() / weights.sum() / x.shape[1])


def test_the_values_of_a_head_are_those_of_plain_transformers(
    run: Path, plain: dict[str, Tensor]
) -> None:
    table = pd.read_csv(run / "head_pattern.csv")
    removed = ["intact", "mask", "rope", "mask+rope", *BANDS]
    assert table["removed"].tolist() == removed * 2 * N_HEADS
    sizes = torch.tensor([len(range(fold, N_SEQS, FOLDS)) for fold in range(FOLDS)]).double()
    for row in table.to_dict("records"):
        maps = plain["" if row["removed"] == "intact" else row["removed"]]
        maps, whole = (x[:, row["layer"], row["head"]] for x in (maps, plain[""]))
        mean = float(sizes @ leads(maps).mean(-1) / sizes.sum())
        assert row["lead"] == pytest.approx(mean, rel=1e-3, abs=1e-4)
        square = product(patterns(maps), patterns(maps), sizes)
        assert row["amplitude"] ** 2 * np.sign(row["amplitude"]) == pytest.approx(
            square, rel=1e-3, abs=1e-4
        )
        if row["kept"] == row["kept"]:
            intact = product(patterns(whole), patterns(whole), sizes)
            kept = product(patterns(maps), patterns(whole), sizes) / intact**0.5
            assert row["kept"] == pytest.approx(kept, rel=1e-3, abs=1e-4)
    assert table["kept"].notna().sum() > 5 * len(removed), "most heads exceed their noise"
    by_band = table[table["removed"].isin(BANDS)].set_index(PLACES)["kept"]
    intact = table[table["removed"] == "intact"].set_index(PLACES)["kept"].loc[by_band.index]
    assert (by_band / intact).between(0.2, 0.8).any(), "a part of RoPE is kept"


def test_the_page_names_heads_and_bands_by_their_wavelengths(run: Path) -> None:
    finished = read_run(run)
    tables, wavelengths = finished.tables, finished.manifest.results["wavelengths"]
    page = (run / "report.html").read_text()
    assert "Heads without each source" in page
    assert "Heads without each band of RoPE" in page
    assert [*wavelengths] == [*BANDS]
    turns = [2 * np.pi * 10_000 ** (pair / N_PAIRS) for pair in range(N_PAIRS)]
    assert wavelengths["rope[2:5]"] == pytest.approx([turns[2], turns[4]], rel=1e-5)
    largest = largest_heads(tables["head_pattern"])
    assert largest["head"].str.fullmatch("L[01]H[0-5]").all()
    leads = tables["head_pattern"].query("removed == 'intact'")["lead"].abs()
    first = largest["intact, nats"].iloc[0].split()[0]
    assert abs(float(first)) == pytest.approx(leads.max(), abs=0.006)
