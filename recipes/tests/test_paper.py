"""The paper's figures: their settings, and the claims about their maps."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from math import ceil, log
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ci.forks import forks
from support.command_line import refused, run_command

import reproduce
from nope_probe.analyses.theory import theory_scores
from nope_probe.maps.layers import LayerMaps
from nope_probe.run.folder import Run, read_run
from nope_probe.run.manifest import Manifest, read_manifest, record_of
from nope_probe.stages import ParameterFreeSpec
from nope_probe.studies.ablate import Settings as AblateSettings
from paper_claims import (
    Claim,
    Reproduction,
    edge_contrast,
    figure3,
    figure6,
    figure7,
    figure9,
    figure10,
    layer_values,
    score_claims,
)
from reproduce_settings import Settings, experiments_of

THREE = ("llama-3.1-8b", "phi-4", "qwen3-8b")
ORDER = (*(f"figure{number}" for number in range(1, 17)), "all")


def test_without_flags_a_figure_has_the_papers_settings() -> None:
    figures = {f"figure{n}": (THREE[(n - 11) % 3],) for n in range(11, 17)} | {"figure5": THREE}
    for figure, models in figures.items():
        chosen = experiments_of(Settings(figure=figure))
        assert tuple(chosen) == models
        for settings in chosen.values():
            assert isinstance(settings, AblateSettings)
            assert (settings.n_seqs, settings.seq_len) == (1000, 1024)
            assert (settings.data, settings.windows, settings.seed) == ("fineweb-edu", "start", 0)
            assert settings.layers == ("auto" if figure == "figure5" else "all")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    texts = [f"{i} " + " ".join(words[i * j % 9] for j in range(9)) for i in range(41)]
    pd.DataFrame({"text": texts}).to_json(path, orient="records", lines=True)
    return path


def test_processes_share_one_model_after_the_other_and_one_prints(
    text: Path, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    models = [tiny(name).folder for name in ("llama", "smollm3")]
    command = ["reproduce", "figure5", "--n-seqs", "41", "--seq-len", "13"]
    # 41 windows are two batches of at most 32: one for each process.
    command += ["--data", str(text), "--layers", "2", "--verbose"]
    command += [flag for model in models for flag in ("--model", str(model))]
    codes, printed = forks("share", "2", tmp_path, command)
    assert codes == {"2": [0, 0]}, printed
    assert printed.count("experiment: ") == 2
    assert printed.count("open ") == 1
    said = [line for line in printed.splitlines() if line.startswith("figure5")]
    assert "the paper used llama-3.1-8b, phi-4 and qwen3-8b" in said[0]
    folders = read_manifest(tmp_path / "2").results["experiments"]
    for model in models:
        assert sum(f"figure5, {model}, the paper: " in line for line in said) == 6
        folder = tmp_path / "2" / folders[str(model)]
        assert re.fullmatch(rf"ablate-{model.name}-\w{{8}}", folder.name)
        assert "The positional pattern" in (folder / "report.html").read_text()
        chosen = read_manifest(folder).settings
        assert (chosen["windows"], chosen["layers"], chosen["data"]) == ("start", 2, str(text))


def test_figures_of_the_appendix_name_the_error_in_the_published_scale(
    text: Path, tiny: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", tiny("smollm3").folder, "--n-seqs", 13, "--seq-len", 13, "--data", text]
    for figure, n_claims in (("figure11", 1), ("figure14", 5)):
        run_command(reproduce, figure, *model, "--out", tmp_path / figure, "--verbose")
        said = capsys.readouterr().out
        assert "Figures 11 to 16 are 50 times too small in scale" in said
        assert sum(line.startswith(f"{figure}, ") for line in said.splitlines()) == n_claims
        (folder,) = read_manifest(tmp_path / figure).results["experiments"].values()
        assert read_manifest(tmp_path / figure / folder).model.n_layers == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["figure2", "--data", "shipped"], "figure2 takes no --data"),
        (["figure3", "--model", "a", "--model", "b"], "figure3 takes one --model, got 2"),
        (["figure17"], f"invalid choice 'figure17' for argument 'figure'. Expected one of {ORDER}"),
        (["figure5"], "meta-llama/Llama-3.1-8B is not in the local cache"),
    ],
)
def test_a_flag_that_a_figure_does_not_have_is_one_line(
    given: list[Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(capfd, tmp_path, reproduce, *given).startswith(message)


def claims(
    *, contrast: float = 0.5, first: float = 0.01, later: float = 0.2, top: float = 9
) -> list[Claim]:
    """Check the claims on a run of three layers written by hand, every interval ±0.05 wide."""
    rows = pd.DataFrame({"layer": [0, 1, 2]})
    for name, values in {
        "not_by_distance": [first, later, later],
        "edge_contrast": [-9.0, contrast, contrast],
    }.items():
        rows[name] = values
        rows[f"{name}_low"], rows[f"{name}_high"] = rows[name] - 0.05, rows[name] + 0.05
    square = np.full((3, 101, 101), np.nan, np.float32)
    square[:, *np.tril_indices(101)] = 0.5
    score = square.copy()
    score[1, 50:, :30] = top  # 1,530 of 5,151 cells, in L1
    maps = {"score/intact": score, "normalised/intact": square, "se/intact": square * 0.01}
    run = Run(arrays={"maps": maps}, tables={"pattern": rows})
    return list(score_claims(run, ("score", "normalised")))


@pytest.mark.parametrize(("skip", "n_first"), [(0, 2), (3, 2), (13, 1)])
def test_the_edge_contrast_is_of_the_first_twentieth_of_the_keys_less_the_diagonals_means(
    skip: int, n_first: int
) -> None:
    n, folds = 41, np.random.default_rng(3).normal(size=(2, 41, 41))
    pattern = LayerMaps.of(torch.from_numpy(folds), skip_keys=skip).pattern
    for scores, contrast in zip(folds, edge_contrast(pattern).tolist(), strict=True):
        means = [np.diagonal(scores, -distance).mean() for distance in range(n)]
        rest = {(i, j): scores[i, j] - means[i - j] for i in range(n) for j in range(skip, i)}
        first = [value for (_, j), value in rest.items() if j < skip + n_first]
        others = [value for (_, j), value in rest.items() if j >= skip + n_first]
        assert contrast == pytest.approx(np.mean(first) - np.mean(others), abs=1e-12)


def test_evidence_names_the_layers_with_their_numbers_and_intervals() -> None:
    result = [str(claim) for claim in claims()]
    assert "between 0.5 (L0) and 9 nats (L1), with a standard error of 0.005" in result[0]
    assert "+0.2 [+0.15, +0.25] (L1), +0.2 [+0.15, +0.25] (L2)" in result[2]
    assert "+0.5 [+0.45, +0.55] (L1)" in result[4]
    rows = pd.DataFrame({"layer": range(2, 33), "rms": [(i * 7) % 31 / 10 for i in range(31)]})
    rows["rms_low"], rows["rms_high"] = rows["rms"] - 1, rows["rms"] + 1
    assert (
        layer_values(rows, "rms") == "+0 [-1, +1] (L2) to +3 [+2, +4] (L24)"
    )  # smallest and largest


@pytest.mark.parametrize(
    ("changed", "reproduced"),
    [
        ({}, "yyyyyn"),  # as the paper's, but for figure 4's sign
        ({"top": 11.0}, "nyyyyn"),
        ({"top": -11.0}, "nyyyyn"),
        ({"later": 0.04}, "yynnyn"),
        ({"first": 0.2}, "yyynyn"),
        ({"contrast": 0.04}, "yyyynn"),
        ({"contrast": -0.5}, "yyyyny"),
    ],
)
def test_each_claim_depends_on_its_own_measure(changed: dict[str, float], reproduced: str) -> None:
    assert "".join("ny"[claim.reproduced] for claim in claims(**changed)) == reproduced


def test_reproducing_figure_3_checks_each_claim_of_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(reproduce, "figure3", "--n-seqs", 29, "--out", tmp_path / "run", "--verbose")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("figure3")]
    assert lines[0].startswith("figure3: run on nope-tiny; the paper used a 1.5B model")
    claims = [line for line in lines if line.startswith("figure3, nope-tiny, the paper: (")]
    assert [re.findall(r"\((\w)\)", claim)[0] for claim in claims] == list("acfghi")
    (experiment,) = read_manifest(tmp_path / "run").results["experiments"].values()
    finished = read_run(tmp_path / "run" / experiment)
    assert finished.arrays["maps"]["gram/a"].shape == (50, 50)
    near = finished.tables["stages"].set_index("stage").loc["f", "locality_low"] > 0
    assert claims[2].split(". ")[1].startswith("Reproduced" if near else "Not reproduced")
    assert ". Reproduced: rank correlation" in claims[5]


@pytest.mark.parametrize(
    ("trends", "reproduced"),
    [
        ({}, "yyyyyy"),
        ({"f": 0.05}, "yynnyy"),
        ({"g": -0.05}, "yyynyy"),
        ({"h": -0.5}, "yyyyny"),
        ({"i": 0.05}, "yyyyyn"),
    ],
)
def test_claims_of_figure_3_depend_on_the_trends_of_their_stages(
    trends: dict[str, float], reproduced: str
) -> None:
    """A run is written by hand, every interval ±0.1 wide."""
    localities = {"f": 0.5, "g": -0.5, "h": 0.5, "i": 0.5} | trends
    rows = pd.DataFrame({"stage": list(localities), "locality": list(localities.values())})
    rows["locality_low"], rows["locality_high"] = rows["locality"] - 0.1, rows["locality"] + 0.1
    falling = np.diag(np.arange(41.0, 0, -1)).astype(np.float32)
    maps = {"gram/a": np.eye(41, dtype=np.float32), "gram/c": falling}
    result = figure3(Run(arrays={"maps": maps}, tables={"stages": rows}))
    assert "".join("ny"[claim.reproduced] for claim in result) == reproduced


def run_of_maps(maps: dict[str, np.ndarray]) -> Run:
    return Run(arrays={"maps": {f"score/alpha={alpha}": cells for alpha, cells in maps.items()}})


@pytest.mark.parametrize("causal", [True, False])
def test_the_mask_decides_the_claims_of_figures_9_and_10(causal: bool) -> None:
    spec = ParameterFreeSpec(d_model=64, rope=True, causal=causal)
    maps = theory_scores(torch.tensor([0.0, 0.5]), 50, 4, spec).numpy()
    (claim,) = figure10(run_of_maps({"0": maps[0]}))
    assert claim.reproduced == (not causal)  # a relative map
    claim, _ = figure9(run_of_maps({"0.5": maps[1]}))
    assert claim.reproduced == causal


@pytest.mark.parametrize(("lengths", "reproduced"), [((7.0, 5.0, 2.0), True), ((5.0, 7.0), False)])
def test_saturation_sooner_with_every_alpha_reproduces_figure_6(
    lengths: tuple[float, ...], reproduced: bool
) -> None:
    """Rows of 1 - exp(-j / length) have made 90% of their rise after 2.3 lengths."""
    rows = [1 - np.exp(-np.arange(50) / length) for length in lengths]
    maps = {f"0.{tenth}": np.tile(row, (4, 50, 1)) for tenth, row in enumerate(rows)}
    (claim,) = figure6(run_of_maps(maps))
    assert claim.reproduced == reproduced
    for tenth, length in enumerate(lengths):
        assert f"{ceil(log(10) * length)} keys at alpha = {tenth / 10:g}" in claim.evidence


@pytest.mark.parametrize(
    ("factor", "verdict", "reproduced"),
    [(2.0, "increasing", "yy"), (0.5, "increasing", "ny"), (2.0, "not", "yn")],
)
def test_figure_7_depends_on_the_size_and_the_verdict_of_the_pattern_over_d(
    factor: float, verdict: str, reproduced: str
) -> None:
    rising = np.tile(np.arange(50.0), (4, 50, 1))
    over_root, over_d = (run_of_maps({"0.2": x * rising}) for x in (1.0, factor))
    of_layer = {"alpha": 0.0, "verdict": verdict, "monotonicity": 1.0, "distances": 40}
    of_layer |= dict.fromkeys(("falling_cells", "theory_fall", "fall", "fall_low", "fall_high"), 1)
    over_d.tables["layers"] = pd.DataFrame([{"layer": layer, **of_layer} for layer in range(4)])
    claims = [*figure7(over_root, over_d)]
    assert "".join("ny"[claim.reproduced] for claim in claims) == reproduced
    rms = np.concatenate([np.arange(i) - np.arange(i).mean() for i in range(1, 50)]).std()
    assert f"is {rms:.3f} nats against {factor * rms:.3f} over d" in claims[0].evidence


def test_what_a_figures_run_found_is_read_back_from_its_manifest() -> None:
    claim = Claim(paper="it rises", reproduced=True, evidence="1 < 2")
    found = Reproduction(claims=(claim, replace(claim, reproduced=False)), notes=("a note",))
    entries = json.loads(json.dumps(Manifest(results=asdict(found)).to_json()))
    assert record_of(Reproduction, Manifest.of_json(entries).results) == found
