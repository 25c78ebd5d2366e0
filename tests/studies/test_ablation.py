"""The ablate command as a user types it: the run's files, its output, its refusals."""

import json
import re
from base64 import b64decode
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support.command_line import refused, run_command
from support.rounding import MEASURE, NETWORK, assert_same

from nope_probe import ablate, load
from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.maps.centred import row_centred

N = 13
SMALL = ["--n-seqs", "16", "--seq-len", str(N), "--folds", "5", "--batch-size", "11"]
INTACT = "score/intact"
KEPT = np.tril(np.ones((N, N), bool), -1) & (np.arange(N) > 0)  # the BOS key is left out


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "default"
    run_command(ablate, *SMALL, "--layers", "2", "--out", str(out))
    return out


@pytest.fixture(scope="module")
def maps(default_run: Path) -> dict[str, np.ndarray]:
    return load_file(default_run / "maps.safetensors")


def manifest_of(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def test_a_run_holds_every_file_whose_checksum_is_in_its_manifest(default_run: Path):
    manifest = manifest_of(default_run)
    names = {path.name for path in default_run.iterdir()} - {"manifest.json"}
    assert set(manifest["checksums"]) == names
    assert {"maps.safetensors", "folds.safetensors", "tokens.safetensors"} < names
    assert {"sources.csv", "terms.csv", "weights.csv", "pattern.csv"} < names
    assert manifest["complete"]
    assert manifest["model"]["rope_layers"] == [True] * 2
    assert manifest["model"]["parity"]["logits"] < 1e-4
    weights = pd.read_csv(default_run / "weights.csv")
    assert weights.groupby("replacement")["removed"].unique().map(list).to_dict() == {
        name: ["w_q", "w_k", "w_o", "w_q+w_k", "w_o+w_v"] for name in ("mean", "identity")
    }
    page = (default_run / "report.html").read_text()
    assert "L1 loses " in page
    assert '<th scope="row">lost with constant queries (W_Q)</th>' in page
    assert 'src="http' not in page
    assert len(page) < 15e6


def test_every_condition_has_a_map_named_by_what_it_removes(maps: dict[str, np.ndarray]):
    names = [name.split("/")[1] for name in maps if name.startswith("score/")]
    assert sorted(names) == ["intact", "mask", "mask+rope", "rope"]
    for replacement in ("mean", "identity"):
        replaced = {name for name in maps if name.startswith(f"score_{replacement}/")}
        weights = ("w_q", "w_k", "w_o", "w_q+w_k", "w_o+w_v")
        expected = {f"{sources}{name}" for sources in ("", "mask+rope+") for name in weights}
        assert replaced == {f"score_{replacement}/{name}" for name in expected}
    assert {(array.shape, array.dtype.name) for array in maps.values()} == {((2, N, N), "float32")}
    below = np.tri(N, dtype=bool)
    assert np.array_equal(np.isfinite(maps[INTACT]), [below] * 2)
    assert np.isfinite(maps["score/mask"]).all()


def test_behind_a_constant_output_w_v_does_not_matter(maps: dict[str, np.ndarray]):
    both = [maps[f"score_mean/mask+rope+{name}"] for name in ("w_o", "w_o+w_v")]
    np.testing.assert_array_equal(*both)
    of_identity = [maps[f"score_identity/mask+rope+{name}"] for name in ("w_o", "w_o+w_v")]
    assert not np.array_equal(*of_identity)


def centred(score: np.ndarray) -> np.ndarray:
    means = np.where(KEPT, score, 0).sum(-1, keepdims=True) / np.maximum(KEPT.sum(-1)[:, None], 1)
    return score - means


def test_patterns_and_terms_add_up_on_disk(maps: dict[str, np.ndarray]):
    pattern, neither = (centred(maps[name])[:, KEPT] for name in (INTACT, "score/mask+rope"))
    means = [centred(maps[f"mean_covariance/{term}"])[:, KEPT] for term in ("mean", "covariance")]
    terms = [f"term/{name}" for name in ("mask", "rope", "mask_x_rope")]
    for names, total in (
        (["pattern/intact"], pattern),
        (["pattern/mean_term"], means[0]),
        (["pattern/covariance_term"], means[1]),
        (["term/without_sources"], neither),
        (terms, pattern - neither),
    ):
        added = sum(maps[name] for name in names)[:, KEPT]
        assert_same(added, total, MEASURE)


def test_the_first_column_of_a_pattern_is_the_lead_of_the_first_key(
    default_run: Path, maps: dict[str, np.ndarray]
):
    scores, column = maps[INTACT].astype(float), maps["pattern/intact"][..., 0]
    for query in range(2, N):
        lead = scores[:, query, 0] - scores[:, query, 1:query].mean(-1)
        assert_same(column[:, query], lead, MEASURE)
    assert np.isnan(column[:, :2]).all(), "without another earlier key there is no lead"
    table = pd.read_csv(default_run / "pattern.csv").query("removed == 'intact'")
    assert_same(table["lead"].to_numpy(), column[:, 9:].mean(-1), MEASURE)  # 8 other keys or more


def test_losses_in_the_tables_are_those_of_the_maps(default_run: Path, maps: dict[str, np.ndarray]):
    """Of noiseless losses of the lead: the inner products between folds differ by their noise."""
    folds = load_file(default_run / "folds.safetensors")
    counts = np.array(manifest_of(default_run)["fold_sizes"], float)
    below = np.tri(N, dtype=bool)

    def leads(name: str) -> np.ndarray:
        cells = folds[name]
        scores = np.full((*cells.shape[:2], N, N), np.nan)
        scores[..., below] = cells
        rows = [scores[..., i, 0] - scores[..., i, 1:i].mean(-1) for i in range(9, N)]
        return np.stack(rows, -1)  # [fold, layer, query]

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        total, weight = 0.0, 0.0
        for a in range(len(counts)):
            for b in range(len(counts)):
                if a != b:
                    total = total + counts[a] * counts[b] * (x[a] * y[b]).mean(-1)
                    weight += counts[a] * counts[b]
        return total / weight

    nothing = leads("score/mask+rope")
    part = leads(INTACT) - nothing
    left = {
        "mask": leads("score/mask") - nothing,
        "rope": leads("score/rope") - nothing,
        "w_k": leads("score_mean/w_k") - leads("score_mean/mask+rope+w_k"),
    }
    sources, weights = (pd.read_csv(default_run / f"{x}.csv") for x in ("sources", "weights"))
    rows = [*sources.rename(columns={"source": "removed"}).to_dict("records")]
    rows += weights.query("replacement == 'mean'").to_dict("records")
    for row in rows:
        if row["of"] == "lead" and row["removed"] in left and row["lost"] == row["lost"]:
            lost = product(part - left[row["removed"]], part) / product(part, part)
            assert row["lost"] == pytest.approx(lost[row["layer"]], rel=1e-4, abs=1e-4)
    assert sources.query("of == 'lead'")["lost"].notna().any()


def test_the_mean_term_is_the_sum_of_rotation_and_what_was_written(default_run: Path):
    table = pd.read_csv(default_run / "mean_covariance.csv")
    table = table[table["of"] == "pattern"]
    shares = table.pivot(index="layer", columns="term", values="share").dropna()
    assert 1 in shares.index
    parts = shares[["rotation", "written_key", "written_query", "written_both"]].sum(axis=1)
    assert_same(parts, shares["mean"])
    assert (shares["mean"] + shares["covariance"]).to_numpy() == pytest.approx(1, abs=NETWORK)
    assert shares.loc[1, "rotation"] > 0.9


def test_a_finished_run_is_shown_again_and_not_recomputed(
    default_run: Path, capsys: pytest.CaptureFixture[str]
):
    before = (default_run / "manifest.json").read_bytes()
    run_command(ablate, *SMALL, "--layers", "2", "--out", str(default_run))
    assert "L1 loses " in capsys.readouterr().out
    assert (default_run / "manifest.json").read_bytes() == before


@pytest.mark.usefixtures("undrawn")
def test_sources_alone_run_no_condition_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    nope = ["--model", "nope-tiny", "--remove", "sources", "--layers", "2"]
    run_command(ablate, *SMALL, *nope, "--out", str(tmp_path / "run"))
    # Two conditions, on text and on shuffled tokens, and the positions.
    said = capsys.readouterr().err.splitlines()
    assert any(line.startswith("running 5 passes;") for line in said)
    maps = load_file(tmp_path / "run" / "maps.safetensors")
    scores = {name for name in maps if name.startswith("score")}
    assert scores == {"score/intact", "score/mask"}
    assert {"term/without_sources", "term/mask"} < set(maps)
    table = pd.read_csv(tmp_path / "run" / "weights.csv")
    assert len(table) == 0
    assert {"layer", "of", "removed", "replacement", "lost", "lost_low", "lost_high"} < set(table)


@pytest.mark.usefixtures("undrawn")
def test_a_files_name_does_not_say_what_its_tokens_are(tmp_path: Path):
    words = np.random.default_rng(0).choice(["def", "return", "while", "x", "="], (11, 200))
    file = tmp_path / "random.jsonl"
    file.write_text("\n".join(json.dumps({"text": " ".join(row)}) for row in words))
    chosen = ["--remove", "sources", "--layers", "1", "--data", file]
    run_command(ablate, *SMALL, *chosen, "--out", tmp_path / "run")
    rows = pd.read_csv(tmp_path / "run" / "non_relative.csv")
    assert rows["tokens"].tolist() == ["text", "shuffled"]


REMOVED = {
    "one half": ["--remove", "rope_high"],
    "pairs by number": ["--remove", "rope[0:3]", "rope[3:8]+w_q"],
    "bands": ["--bands", "2", "--remove", "qk", "--replacement", "zero", "mean"],
    "a union": ["--remove", "w_q+mlp"],
    "sources": ["--remove", "sources"],
}


@pytest.mark.parametrize("case", REMOVED)
def test_the_pages_explorer_shows_the_model_without_what_is_chosen(case: str, tmp_path: Path):
    small = ["--n-seqs", "8", "--seq-len", "11", "--folds", "4", "--layers", "2"]
    run_command(ablate, *small, "--data", "random", *REMOVED[case], "--out", tmp_path / "run")
    manifest, explorer = manifest_of(tmp_path / "run"), explorer_on(tmp_path / "run")
    shown = patterns_in(explorer, n_layers=2)
    choices = [choice["name"] for choice in explorer["choices"]]
    assert choices == ["intact", "mask", "rope", "mask+rope", *manifest["removed"]]
    tokens = torch.from_numpy(load_file(tmp_path / "run/tokens.safetensors")["tokens"])
    model = load("rope-tiny", n_layers=2).model
    gains = calibrate(model, tokens)
    leads = np.frombuffer(b64decode(explorer["view"]["leads"]), "<f4").reshape(*shown.shape[:3])
    replacement = next(iter(manifest["replacements"]), "identity")
    for place, removed in enumerate(choices):
        names = [] if removed == "intact" else removed.split("+")
        ablation = Ablation(remove=names, replacement=replacement)
        with ablated(model, ablation, gains if ablation.needs_calibration else None):
            scores = capture_scores(model, tokens, n_folds=4).mean.double()
        expected = row_centred(scores, manifest["skip_keys"]).numpy()
        for layer in range(2):
            step = np.nanmax(np.abs(expected[layer])) / 32767
            np.testing.assert_allclose(
                shown[place, layer],
                expected[layer],
                atol=step + MEASURE * np.nanmax(np.abs(expected[layer])),
            )
        for query in range(2, 11):
            lead = scores[:, query, 0] - scores[:, query, 1:query].mean(-1)
            np.testing.assert_allclose(
                leads[place, :, query],
                lead,
                atol=MEASURE * float(scores[:, query, :query].abs().max()),
            )


def test_the_pages_explorer_has_the_numbers_of_the_first_table(default_run: Path):
    explorer = explorer_on(default_run)
    view, choices = explorer["view"], [choice["name"] for choice in explorer["choices"]]
    measures = np.frombuffer(b64decode(view["measures"]), "<f4").reshape(len(choices), 2, 4, 3)
    sources, weights = (pd.read_csv(default_run / f"{x}.csv") for x in ("sources", "weights"))
    rows = sources.rename(columns={"source": "removed"}).to_dict("records")
    rows += weights.query("replacement == 'mean'").to_dict("records")
    for row in rows:
        place = 1 if row["of"] == "lead" else 3
        shown = measures[choices.index(row["removed"]), row["layer"], place]
        expected = [row["lost"], row["lost_low"], row["lost_high"]]
        np.testing.assert_allclose(shown, expected, rtol=1e-5, atol=1e-5)
    intact = pd.read_csv(default_run / "pattern.csv").query("removed == 'intact'")
    for place, name in ((0, "lead"), (2, "amplitude")):
        np.testing.assert_allclose(measures[0, :, place, 0], intact[name], rtol=1e-5)


def explorer_on(out: Path) -> dict[str, Any]:
    [frame] = re.findall(r'srcdoc="([^"]*)"', (out / "report.html").read_text("utf-8"))
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    [content] = re.findall(pattern, unescape(frame), re.S)
    return json.loads(content)


def patterns_in(explorer: dict[str, Any], n_layers: int) -> np.ndarray:
    """Return the patterns [condition, layer, query_pos, key_pos] that an explorer draws."""
    view = explorer["view"]
    codes = np.frombuffer(b64decode(view["cells"]), "<i2").astype(float)
    codes[codes == -32768] = np.nan
    offsets = np.frombuffer(b64decode(view["offsets"]), "<u4").astype(int)
    scales = np.frombuffer(b64decode(view["scales"]), "<f4")
    below = np.tri(view["n"], k=-1, dtype=bool)
    maps = np.full((len(offsets), *below.shape), np.nan)
    for place, (offset, scale) in enumerate(zip(offsets, scales, strict=True)):
        maps[place][below] = codes[offset : offset + below.sum()] * scale
    return maps.reshape(-1, n_layers, *below.shape)


def test_a_parameter_free_model_takes_gaussian_vectors(tmp_path: Path):
    model = ["--model", "parameter-free", "--data", "gaussian", "--alpha", "0.2", "--layers", "3"]
    run_command(ablate, *SMALL, *model, "--out", str(tmp_path / "run"))
    pattern = pd.read_csv(tmp_path / "run" / "pattern.csv").query("removed == 'intact'")
    assert pattern["pattern_from_sources"].iloc[2] > 0.9
    assert pattern["lead"].isna().all(), "vectors have no first key"
    vectors = load_file(tmp_path / "run" / "tokens.safetensors")["vectors"]
    assert vectors.shape == (16, N, 64)


BAD = {
    "a component the model lacks": (
        ["--model", "nope-tiny", "--remove", "w_q", "rope"],
        "the model has no rope; it has mask, w_q, w_k, w_o, w_v, mlp",
    ),
    "too few windows": (
        ["--n-seqs", "99999"],
        r"documents of 63 tokens or more give \d+ sequences",
    ),
    "weights of a parameter-free model": (
        ["--model", "parameter-free", "--data", "gaussian", "--remove", "w_q"],
        "identities already",
    ),
    "a folder without a config": (["--model", "."], "has no config.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    arguments, message = BAD[case]
    assert re.search(message, refused(capfd, tmp_path, ablate, *arguments))
