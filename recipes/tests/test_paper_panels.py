"""Published panels against reproduced maps: numbers, differences in colour steps, pages."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.command_line import refused, run_command
from support.manifests import manifest_of

import reproduce
from nope_probe import read_run
from nope_probe.reports.page import Report
from nope_probe.run.folder import Run, write_run
from nope_probe.run.manifest import read_manifest
from paper_claims import Claim
from published_panels import (
    Pair,
    Published,
    agreements,
    pairs_of,
    published,
    resampled,
    verdict,
)
from reproduce_analysis import print_index, verdicts
from reproduce_page import report
from reproduce_settings import FIGURES, LANGUAGE_MODELS, Settings, experiments_of
from reproduce_study import run_all


def test_the_packed_panels_are_all_that_the_paper_published_at_the_right_scale() -> None:
    counts = {figure: len(published(figure)) for figure in FIGURES}
    expected = {2: 8, 3: 9, 4: 8, 5: 12, 6: 12, 7: 16, 8: 22, 9: 8, 10: 8}
    assert counts == {f"figure{n}": expected.get(n, 0) for n in range(1, 17)}
    assert list(published("figure8"))[8:11] == ["layer9", "layer10", "layer11"]
    for figure in FIGURES:
        for panel in published(figure).values():
            known = panel.values[np.isfinite(panel.values)]
            assert panel.low - 1e-3 <= known.min() <= known.max() <= panel.high + 1e-3
    upper = np.triu_indices(50, 1)
    assert np.isnan(published("figure2")["alpha=0/layer2"].values[upper]).all()
    assert np.isfinite(published("figure10")["alpha=0/layer2/score"].values).all()  # no mask


def test_a_panels_cells_lie_in_the_middle_of_its_colours() -> None:
    panel = published("figure2")["alpha=0.2/layer1"]
    colours = panel.values[np.isfinite(panel.values)] * 256 - 0.5
    np.testing.assert_allclose(colours, colours.round(), atol=1e-9)
    # In the first layer inner products are 1 on the diagonal and alpha below it.
    assert np.diagonal(panel.values) == pytest.approx(np.full(50, 1), abs=1 / 256)
    assert panel.values[np.tril_indices(50, -1)] == pytest.approx(0.2, abs=1.5 / 256)


def pair(
    published: Any, reproduced: Any, *, noise: float = float("nan"), same: bool = True
) -> Pair:
    panel = Published(
        key="figure2/here", values=np.array(published), low=0.0, high=256.0, kind="score"
    )
    about = {"group": "group", "name": "layer 1", "comparable": same, "noise": noise}
    return Pair(published=panel, reproduced=np.array(reproduced), **about)


def shown(*pairs: Pair) -> Report:
    about = {"settings": {"figure": "figure2"}, "headline": [], "notes": [], "claims": []}
    return report(Run(manifest=manifest_of(**about)), pairs)


def test_a_panel_agrees_within_one_colour_step_or_within_its_noise() -> None:
    clipped = pair([[10.0, np.nan], [255.5, 0.5]], [[12.0, 7.0], [300.0, -9.0]]).steps
    np.testing.assert_allclose(clipped, [[2.0, np.nan], [0.5, -0.5]])
    agreement = agreements(
        [
            pair([[1.0, 2.0]] * 2, [[2.0, 1.5]] * 2),
            pair([[10.0, 20.0]] * 2, [[13.0, 17.0]] * 2),
            pair([[10.0, 20.0]] * 2, [[13.0, 17.0]] * 2, noise=3.0),
        ]
    )
    assert agreement["agrees"].tolist() == [True, False, True]
    assert agreement["within_one"].tolist() == [1.0, 0.0, 0.0]
    assert (agreement["largest"][0], agreement["rms"][1]) == (1.0, 3.0)
    assert agreement["noise"][2] == pytest.approx((9 + 1 / 12) ** 0.5)
    assert verdict(agreement).startswith("1 of 3 published panels agree within one")
    assert "of the other 2, 1 agree within sampling noise" in verdict(agreement)


def test_the_table_of_a_figure_says_how_well_panels_agree() -> None:
    for actual, agrees in (([[2.0, 1.5]] * 2, True), ([[9.0, 1.5]] * 2, False)):
        section = shown(pair([[1.0, 2.0]] * 2, actual)).sections[0]
        assert section.caption.startswith("Figure 2, group. ")
        assert section.table is not None
        assert section.table["agrees"].tolist() == [agrees]
    beside = pair([[1.0, 2.0]] * 2, [[2.0, 1.5]] * 2, same=False)  # another model's
    assert beside.steps is None
    assert agreements([beside]).empty
    figure = shown(beside).sections[0].drawn()
    assert figure is not None
    assert [trace.name for trace in figure.data] == ["paper, layer 1", "reproduced"]


def test_the_headline_names_the_claims_that_do_not_hold() -> None:
    claims = [Claim(paper=name, reproduced=name == "b", evidence="") for name in ("a", "b", "c")]
    said, missing = verdicts(claims)
    assert "1 of 3 claims" in said
    assert missing == "Not reproduced: a; c."
    assert len(verdicts(claims[1:2])) == 1
    assert verdicts([]) == []


def test_a_map_resampled_to_fewer_pixels_keeps_a_constant_and_its_mean() -> None:
    values = np.random.default_rng(0).normal(size=(13, 13))
    assert resampled(values, 5).mean() == pytest.approx(values.mean())
    constant = np.where(np.tri(13, dtype=bool), 3.0, np.nan)
    pixels = resampled(constant, 5)
    np.testing.assert_allclose(pixels[np.isfinite(pixels)], 3.0)
    assert np.isnan(pixels[0, 4])


@pytest.mark.parametrize("figure", [name for name in FIGURES if FIGURES[name].simulations])
def test_each_simulated_panel_meets_our_map_of_the_same_layer(figure: str) -> None:
    """A run that holds the published values themselves differs from them nowhere."""
    runs = {}
    for half in FIGURES[figure].simulations:
        panels = {
            key.removeprefix(f"{half}/"): panel.values
            for key, panel in published(figure).items()
            if key.startswith(half)
        }
        alphas = sorted({key.split("/")[0] for key in panels})

        def stacked(alpha: str, kind: str, panels: dict[str, np.ndarray] = panels) -> np.ndarray:
            keys = (f"{alpha}/layer{n}" for n in range(1, 5))
            return np.stack([panels.get(f"{key}/{kind}", panels.get(key)) for key in keys])

        maps = {f"{k}/{alpha}": stacked(alpha, k) for alpha in alphas for k in KINDS}
        numbers = [alpha.removeprefix("alpha=") for alpha in alphas]
        rows = [
            {"alpha": float(alpha), "layer": layer, "se": 0.003, "se_plain": 0.02}
            for alpha in numbers
            for layer in range(4)
        ]
        runs[half] = Run(
            manifest=manifest_of(n_samples=dict.fromkeys(numbers, 4000)),
            arrays={"maps": maps},
            tables={"layers": pd.DataFrame(rows)},
        )
    pairs = pairs_of(figure, runs)
    assert len(pairs) == len(published(figure))
    for member in pairs:
        assert member.steps is not None
        assert np.nanmax(np.abs(member.steps)) < 1e-9
        # 4,000 samples of ours, and 100,000 of the paper's without a control variate.
        assert member.noise == pytest.approx((0.003**2 + 0.02**2 * 0.04) ** 0.5)


KINDS = ("score", "normalised")


def test_a_language_models_layers_meet_their_own_panels() -> None:
    maps = {"normalised/intact": np.zeros((5, 1024, 1024), np.float32)}
    runs = {name: Run(arrays={"maps": maps}) for name in LANGUAGE_MODELS[1:]}
    runs["rope-tiny"] = runs["phi-4"]
    pairs = pairs_of("figure5", runs)
    keys = [pair.published.key for pair in pairs if pair.comparable]
    names = [f"figure5/{name}/layer{n}" for name in LANGUAGE_MODELS[1:] for n in range(1, 5)]
    assert keys == names
    beside = [pair for pair in pairs if not pair.comparable]
    assert [pair.group for pair in beside] == ["llama-3.1-8b next to rope-tiny"] * 4
    assert pairs[0].steps is not None
    assert pairs[0].steps.shape == (104, 104)


def test_shipped_models_need_no_flags_and_other_models_folders_of_their_own() -> None:
    tiny = experiments_of(Settings(figure="figure5", model=("rope-tiny",)))["rope-tiny"].recorded()
    assert [tiny[key] for key in ("data", "windows", "seq_len")] == ["shipped", "random", 64]
    figure8 = Settings(figure="figure8", model=("nope-1.5b",), windows="random")
    given = experiments_of(figure8)["nope-1.5b"].recorded()
    assert (given["data"], given["windows"], given["layers"]) == ("fineweb-edu", "random", "all")


def test_figure_8_of_two_models_goes_into_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("nope-tiny", "rope-tiny"):
        run_command(reproduce, "figure8", "--model", model, "--n-seqs", 8, "--verbose")
    assert "figure8, rope-tiny, the paper: without RoPE" in capsys.readouterr().out
    figures = sorted(tmp_path.glob("runs/reproduce-figure8-*/manifest.json"))
    assert len(figures) == 2
    assert len(list(tmp_path.glob("runs/ablate-*-tiny-*/manifest.json"))) == 2
    manifest = read_manifest(figures[0].parent)
    assert manifest.results["panels"]["compared"] == 0
    (claim,) = manifest.results["claims"]
    assert set(claim) == {"experiment", "paper", "reproduced", "evidence"}
    page = (figures[0].parent / "report.html").read_text()
    assert "values cannot be compared, shapes can" in page
    (experiment,) = manifest.results["experiments"].values()
    assert f'href="{experiment}/report.html"' in page


def printed_by(*arguments: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_command(reproduce, *arguments, "--verbose")
    lines = output.getvalue().splitlines()
    return "\n".join(line for line in lines if line.startswith(str(arguments[0])))


def test_figure_1_is_reproduced_but_for_its_third_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = printed_by("figure1", "--out", tmp_path / "run").splitlines()
    for line, said in zip(lines, ("0.15352", "0.13210", "0.15082"), strict=False):
        verdict = "Not reproduced" if said == "0.15082" else "Reproduced"
        assert f"{verdict}: eq. (4) gives {said}" in line
    assert "0.150" in lines[2]
    line = refused(capfd, tmp_path, reproduce, "figure2", "--out", tmp_path / "run")
    assert "holds a run with other settings" in line
    line = refused(capfd, tmp_path, reproduce, "all", "--out", tmp_path / "run")
    assert "holds other files" in line


def test_figure_2_is_computed_once_and_its_verdicts_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["figure2", "--n-samples", 512, "--out", tmp_path / "run"]
    first = printed_by(*flags)
    lines = first.splitlines()
    assert [". Reproduced: " in line for line in lines[:4]] == [True, False, True, True]
    for layer in ("L2", "L3"):  # the paper says that both increase
        assert f"{layer} is not increasing" in lines[1]
    written = (tmp_path / "run" / "manifest.json").read_bytes()
    assert printed_by(*flags) == first
    assert (tmp_path / "run" / "manifest.json").read_bytes() == written
    manifest = json.loads(written)
    assert len(manifest["claims"]) == 4
    assert manifest["panels"]["compared"] == 8
    panels = pd.read_csv(tmp_path / "run" / "panels.csv")
    assert len(panels) == 8
    steps = read_run(tmp_path / "run").maps
    within = [(np.abs(cells[~np.isnan(cells)]) <= 1).mean() for cells in steps.values()]
    assert sorted(within) == pytest.approx(sorted(panels["within_one"]), abs=1e-6)
    (table,) = tmp_path.glob("simulate-*/layers.csv")
    table.write_text(table.read_text().replace("flat", "increasing"))
    with pytest.raises(SystemExit, match="2"):
        run_command(reproduce, *flags)
    line = capfd.readouterr().err.splitlines()[-1]
    assert "layers.csv is not the file that the run wrote" in line


def test_the_page_of_all_figures_names_what_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def write_claims(settings: Settings) -> Path:
        assert settings.out is not None
        claim = {"experiment": "", "paper": "a claim", "reproduced": True, "evidence": "1 < 2"}
        compared = {"published": 2, "compared": 2, "exact": 1, "agree": 2, "verdict": "1 of 2"}
        manifest = {
            "kind": "reproduce",
            "settings": {"figure": settings.figure},
            "as_the_paper": False,
            "finished": "2026-01-01",
            "claims": [claim],
            "panels": compared,
        }
        write_run(settings.out, Run(manifest=manifest_of(**manifest)))
        return settings.out

    monkeypatch.setattr("reproduce_study.run_figure", write_claims)
    folder = run_all(Settings(figure="all", out=tmp_path / "all"))
    table = pd.read_csv(folder / "figures.csv", keep_default_na=False)
    missing = table[table["verdict"].str.contains("run\u00a0yet")]
    names = [figure.split(":")[0] for figure in missing["figure"]]
    assert names == [f"Figure {n}" for n in (5, *range(11, 17))]
    assert missing["numbers"].iloc[0] == "run: python recipes/paper/reproduce.py figure5"
    page = (folder / "report.html").read_text()
    assert "9 of the paper&#39;s 9 claims about its figures are reproduced." in page
    assert "have been run</th><td>9 of 16</td>" in page
    assert "panels within one 8-bit colour step</th><td>9 of 18</td>" in page
    assert page.count('href="../reproduce-figure') == 9
    print_index(folder)
    brief = capfd.readouterr().out
    assert brief.startswith("9 of the paper's 9 claims about its figures are reproduced.")
    assert brief.splitlines()[-1] == f"open {folder / 'report.html'}"
    print_index(folder, verbose=True)
    lines = capfd.readouterr().out.splitlines()
    assert "Figure 1" in lines
    assert "  a claim; ✓ reproduced; 1 < 2" in lines
    assert "  (the published panels); ✓ reproduced; 1 of 2" in lines
    assert not any("../" in line or "\\xa0" in line for line in [*lines, *brief.splitlines()])
