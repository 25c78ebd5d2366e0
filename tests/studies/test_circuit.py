"""The circuit command as a user types it: the run's files, its output, its refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from support.command_line import run_command
from support.finished_runs import assert_numbers_are_cells
from support.rounding import NETWORK, assert_same

from nope_probe import Ablation, Run, ablated, capture_stages, circuit, load, read_run, run_circuit
from nope_probe.analyses.jackknife import standard_error
from nope_probe.maps.estimates import fold_weights
from nope_probe.studies.circuit import report

N = 19
SMALL = ["--n-seqs", "23", "--seq-len", str(N), "--folds", "5", "--batch-size", "7"]


def run_of(out: Path, *flags: object) -> Run:
    run_command(circuit, *SMALL, *flags, "--out", out)
    return read_run(out)


@pytest.fixture(scope="module")
def without_mlp(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("runs") / "mlp", "--remove", "mlp")


@pytest.mark.parametrize(("layer", "n_layers"), [(1, 3), (3, 4)])
def test_blocks_after_the_next_one_are_not_loaded(layer: int, n_layers: int) -> None:
    tokens = torch.randint(7, 97, (5, 13), generator=torch.Generator().manual_seed(0))
    for inputs, sizes in ((None, {"n_seqs": 5, "seq_len": 13, "folds": 5}), (tokens, {})):
        run = run_circuit("rope-tiny", inputs, layer=layer, **sizes)
        assert run.manifest.model.n_layers == n_layers


def test_maps_on_disk_are_those_of_capture_stages(without_mlp: Run) -> None:
    maps, saved, model = without_mlp.maps, without_mlp.arrays["tokens"], load("nope-tiny").model
    tokens, documents = (torch.from_numpy(saved[name]) for name in ("tokens", "documents"))
    intact = capture_stages(model, tokens, n_folds=5, documents=documents)
    with ablated(model, Ablation(remove=["mlp"])):
        shown = capture_stages(model, tokens, n_folds=5, documents=documents)
    kinds = ("gram", "normalised", "se", "reference")
    assert maps.keys() == {f"{kind}/{letter}" for kind in kinds for letter in "abcdefghi"}
    weights = fold_weights(len(shown.counts), shown.counts)
    for letter, folds in shown.folds.items():
        truths = shown.mean(letter), shown.normalised(letter), standard_error(folds, weights)
        for kind, truth in zip(kinds, (*truths, intact.mean(letter)), strict=True):
            seen, expected = maps[f"{kind}/{letter}"], truth.numpy()
            assert (seen.shape, seen.dtype) == ((N, N), np.float32)
            size = max(float(m.mean(letter).nan_to_num().abs().max()) for m in (shown, intact))
            assert_same(seen, expected, size=size)
    assert np.abs(maps["reference/g"] - maps["gram/g"]).max() > 10


def test_a_run_holds_the_stages_of_both_models_as_a_table(without_mlp: Run) -> None:
    table = without_mlp.tables["stages"]
    assert list(table["stage"]) == list("abcdefghi") * 2
    assert list(table["layer"]) == [0, 0, 0, 0, 0, 0, 0, 1, 1] * 2
    assert list(table["model"].unique()) == ["intact", "ablated"]
    maps, cosines, normalised, section = report(without_mlp).sections
    counts = [len(of.drawn().data) for of in (maps, cosines, normalised)]
    assert counts == [3 * 9, 3 * 7, 9]
    figure = section.drawn()
    assert figure is not None
    for dots, rows in zip(figure.data[:2], (table[:9], table[9:]), strict=True):
        assert list(dots.y) == list(rows["locality"])
        np.testing.assert_allclose(dots.error_y.array, rows["locality_high"] - rows["locality"])
    assert [line.y0 for line in figure.layout.shapes] == [0.0, 0.5], "no trend is dotted"


def test_the_first_line_is_the_order_before_and_after_the_mlp(without_mlp: Run) -> None:
    lead = report(without_mlp).headline
    table = without_mlp.tables["stages"].set_index(["model", "stage"])
    assert_numbers_are_cells(lead)
    f, g = lead.table.set_index("stage")["ablated prefers"].iloc[5:7]
    for cell, letter in ((f, "f"), (g, "g")):
        assert f"({table['locality']['ablated', letter]:+.2f}±" in cell
    assert lead.sentence == (
        f"In L0, keys preferred by the MLP's input (f): {f}; by the block's output (g): {g}."
    )


def test_orders_of_stages_are_those_of_their_maps(without_mlp: Run) -> None:
    """Among the keys after BOS: rows of 8 keys or more, and pairs of keys 8 apart."""
    maps = without_mlp.maps
    for row in without_mlp.tables["stages"].itertuples():
        kind = {"intact": "reference", "ablated": "gram"}[row.model]
        rows = [maps[f"{kind}/{row.stage}"][i, 1:i].astype(float) for i in range(9, N)]
        ranks = [stats.spearmanr(values, range(len(values))).statistic for values in rows]
        assert row.locality == pytest.approx(np.mean(ranks), abs=1e-3)
        signs = np.concatenate([np.sign(values[8:] - values[:-8]) for values in rows])
        assert row.monotonicity == pytest.approx((signs.mean() + 1) / 2, abs=1e-3)


def test_a_layers_h_and_i_are_the_next_layers_a_and_b_and_the_last_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second, third = (run_of(tmp_path / layer, "--layer", layer).maps for layer in ("2", "3"))
    for later, first in (("h", "a"), ("i", "b")):
        assert_same(second[f"gram/{later}"], third[f"gram/{first}"])
    assert {name[-1] for name in third if name.startswith("gram/")} == set("abcdefg")
    for text in (capsys.readouterr().out, (tmp_path / "3" / "report.html").read_text()):
        assert "L3 is the last" in text


@pytest.mark.usefixtures("undrawn")
def test_without_the_mask_there_are_scores_of_later_keys_and_circuits_are_their_weights(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run", "--remove", "qk", "mask")
    assert np.isfinite(run.maps["gram/b"]).all()
    assert np.array_equal(np.isfinite(run.maps["reference/b"]), np.tri(N, dtype=bool))
    assert run.manifest.removed == ("mask", "w_q", "w_k")


def test_a_parameter_free_model_takes_gaussian_vectors_and_has_no_ffn(tmp_path: Path) -> None:
    chosen = ["--model", "parameter-free", "--data", "gaussian", "--alpha", "0.2"]
    run = run_of(tmp_path / "run", *chosen)
    maps, absent = run.maps, run.manifest.results["absent"]
    assert {name[-1] for name in maps} == set("abcdghi")
    assert absent.keys() == {"e", "f"}
    lead = report(run).headline
    assert_numbers_are_cells(lead)
    assert "keys preferred by scores (b): " in lead.sentence
    assert [*lead.table] == ["stage", "intact prefers"], "nothing is removed"
    assert lead.table.iloc[5].tolist()[1] == f"none: {absent['f']}"
    assert np.diagonal(maps["gram/b"]) == pytest.approx(1, rel=NETWORK)  # unit vectors
