"""Models with dead weights run through every command; what cannot be measured is an empty cell."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import run_command
from support.models_by_hand import bos_reader
from support.tiny_models import randomised, smollm3_config, write

from nope_probe import ablate, calibrate, circuit, load, read_run, run_ablations
from nope_probe.reports.page import captions
from nope_probe.studies.ablate_page import headline

SMALL = ["--n-seqs", "12", "--seq-len", "13", "--data", "random", "--folds", "4"]
pytestmark = [pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning:nope_probe")]


def write_dead(folder: Path, *dead: str) -> Path:
    """Write a model of two layers, RoPE then none, whose named weights are zero."""
    model = randomised(smollm3_config([1, 0]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in dead):
                parameter.zero_()
    return write(folder, model)


def test_a_model_of_zeros_has_no_pattern_no_shares_and_no_trend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = ["--model", write_dead(tmp_path / "dead", ""), *SMALL]
    run_command(
        ablate, *line, "--layers", 2, "--remove", "w_q", "--per-head", "--out", tmp_path / "a"
    )
    assert captions("ablate")["nothing"] in " ".join((printed := capsys.readouterr().out).split())
    tables = read_run(tmp_path / "a").tables
    assert tables["terms"]["size"].eq(0).all()
    assert tables["pattern"][["locality", "monotonicity", "relative_r2"]].isna().all(axis=None)
    run_command(circuit, *line, "--remove", "w_k", "--out", tmp_path / "c")
    stages = read_run(tmp_path / "c").tables["stages"]
    assert stages["amplitude"].eq(0).all()
    assert stages[["locality", "relative_r2"]].isna().all(axis=None)
    assert "nan" not in printed + capsys.readouterr().out


def test_every_replacement_of_a_dead_weight_is_zero_and_gives_finite_or_empty_cells(tmp_path: Path):
    folder = write_dead(tmp_path / "model", "k_proj", "v_proj")
    removed = {"remove": ["w_k", "w_o"], "replacement": ["identity", "random", "mean"]}
    sizes = {"n_seqs": 12, "seq_len": 13, "data": "random", "folds": 4, "layers": 2}
    for name, table in run_ablations(str(folder), **removed, **sizes).tables.items():
        numbers = table.select_dtypes("number")
        assert not np.isinf(numbers).any(axis=None), name
    tokens = torch.randint(1, 263, (5, 7), generator=torch.Generator().manual_seed(0))
    gains = calibrate(load(str(folder)).model, tokens, seed=3).gains
    for replacement in ("identity", "random"):
        assert gains[replacement]["w_o"] == gains[replacement]["w_v"] == (0, 0)
    assert min(gains["identity"]["w_q"]) > 0


@pytest.mark.hooked_transformer
def test_heads_whose_patterns_cancel_in_their_mean_have_numbers_of_their_own() -> None:
    model = bos_reader((3.0, 2.0))  # L1's scores are 5 / (i + 1) times the scale, in both heads
    model.blocks[1].attn.W_K.data[1] *= -1
    tokens = torch.randint(1, 17, (40, 11), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 0
    study = run_ablations(model, tokens, remove=["sources"], folds=4, per_head=True)
    assert study.tables["pattern"]["amplitude"].abs().max() < 1e-6
    keys = [5 / (key + 1) / 3**0.5 for key in range(11)]
    rows = [np.array(keys[1:query]) for query in range(2, 11)]
    expected = np.concatenate([row - row.mean() for row in rows])
    heads = study.tables["head_pattern"].query("removed == 'intact'")
    heads = heads.set_index(["layer", "head"])["amplitude"]
    np.testing.assert_allclose(heads, [0, 0, *[np.sqrt((expected**2).mean())] * 2], rtol=1e-5)
    assert headline(study).sentence == captions("ablate")["nothing"]
