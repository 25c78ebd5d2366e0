"""Two runs, or a series: numbers, heads, tests of neighbours, figure, terminal table, refusals."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import ttest_ind, ttest_rel
from support.command_line import ended, refused, run_command
from support.tiny_models import ByName
from transformers import AutoModelForCausalLM

from nope_probe import Run, ablate, attention, compare, difference, figures, read_run
from nope_probe.analyses.jackknife import jackknife, rms
from nope_probe.figures import words as names
from nope_probe.maps.estimates import Estimates
from nope_probe.run.folder import write_run
from nope_probe.run.manifest import read_manifest
from nope_probe.run.processes import checkpoint_dir, locked
from nope_probe.studies.compare import PARTS
from nope_probe.studies.tables import interval_columns
from tests.support.manifests import manifest_of

FOLDS, CONDITIONS = 7, ("intact", "rope", "w_q")
LEAD, *_, RMS = names.NUMBERS
NUMBERS = (LEAD, "cost")


def folds_of(seed: int) -> np.ndarray:
    """Return fold means, [number, condition, fold]."""
    shape = (len(NUMBERS), len(CONDITIONS), FOLDS)
    return np.random.default_rng(seed).normal(2 + seed, 1, shape)


def run_of(draw: int, layers: int = 2, data: str = "same", **settings: Any) -> Run:
    """Return a run of `ablate` whose numbers are means over folds, but for an RMS near 0."""
    estimates = [
        [Estimates.of_means(torch.from_numpy(of)) for of in number] for number in folds_of(draw)
    ]
    means = [
        {"removed": removed, "replacement": "mean" if removed == "w_q" else "none"}
        | interval_columns(
            **{
                LEAD: jackknife(estimates[0][row]),
                "cost": jackknife(estimates[1][row]),
                RMS: rms(0.0 * estimates[0][row]),
            }
        )
        for row, removed in enumerate(CONDITIONS)
    ]
    single = [{"layer": layer} | row for layer in range(layers) for row in means]
    by_position = [{"position": place} | row for place in range(3) for row in means]
    manifest = manifest_of(
        kind="ablate",
        model={"name": settings.pop("model", "tiny")},
        settings={"seq_len": 64, **settings},
        data={"sha256": data},
        fold_sizes=[3] * FOLDS,
    )
    size = interval_columns(size=jackknife(estimates[0][0]))
    tables = {
        "over_layers": means,
        "pattern": single,
        "by_position": by_position,
        "terms": [{"layer": 0, "of": "lead", "term": "mask", **size}],
    }
    return Run(
        manifest=manifest,
        tables={name: pd.DataFrame(rows) for name, rows in tables.items()},
        page="a page",
    )


def value_of(table: pd.DataFrame, run: str, number: str = LEAD, removed: str = "rope") -> Any:
    rows = table.query("table == 'over_layers' and number == @number and removed == @removed")
    return rows.set_index("run").loc[run]


def test_neighbours_along_the_axis_are_tested_fold_by_fold() -> None:
    lengths = {128: 2, 16: 0, 32: 1}  # the seeds are in the order of the lengths
    table = difference(*(run_of(seed, seq_len=n) for n, seed in lengths.items()))
    assert [*table["run"].unique()] == ["seq_len 16", "seq_len 32", "seq_len 128"]
    assert [*table.columns[:3]] == ["run", "seq_len", "table"]
    assert table["seq_len"].dtype.kind == "i"
    assert table[table["seq_len"] == 16]["difference"].isna().all()
    for number, of_number in enumerate(NUMBERS):
        for row, removed in enumerate(CONDITIONS):
            for seed, run in ((1, "seq_len 32"), (2, "seq_len 128")):
                found = value_of(table, run, of_number, removed)
                now, before = (folds_of(n)[number, row] for n in (seed, seed - 1))
                test = ttest_rel(now, before)
                low, high = test.confidence_interval(0.95)
                assert found["value"] == pytest.approx(now.mean())
                ends = [found[f"difference{end}"] for end in ("", "_low", "_high")]
                assert ends == pytest.approx([(now - before).mean(), low, high])
                assert found["method"] == "paired"


def test_the_size_of_a_lead_is_compared_as_a_mean() -> None:
    rows = difference(run_of(0), run_of(1)).set_index(["table", "removed", "number"])
    ends = ["difference", "difference_low", "difference_high"]
    size = rows[rows["of"] == "lead"].loc["terms"].squeeze()[ends]
    assert [*size] == [*rows.loc[("over_layers", "intact", LEAD), ends]]


def test_holms_rule_is_over_all_neighbours_of_a_table() -> None:
    table = difference(*(run_of(seed, seq_len=2**seed) for seed in range(4)))
    of_table = table[table["table"] == "over_layers"].dropna(subset=["p_holm"])
    raw = sorted(
        float(ttest_rel(folds_of(seed)[number, row], folds_of(seed - 1)[number, row]).pvalue)
        for seed in (1, 2, 3)
        for number in range(2)
        for row in range(3)
    )
    n = len(of_table)
    assert n == 3 * 3 * 3, "with the RMS that is 0, whose p is 1"
    expected = np.minimum(1, np.maximum.accumulate([p * (n - i) for i, p in enumerate(raw)]))
    means = of_table[of_table["number"] != RMS]
    assert sorted(means["p_holm"]) == pytest.approx(expected.tolist())
    assert (means["differs"] == (means["p_holm"] <= 0.05)).all()


def test_lines_are_not_compared_with_each_other() -> None:
    runs = {
        (n, model): run_of(seed, seq_len=n, model=model, data=model)
        for seed, (n, model) in enumerate((n, model) for n in (5, 7, 11) for model in "ab")
    }
    table = difference(*runs.values())
    assert [*table.columns[:4]] == ["run", "seq_len", "model", "table"]
    found = value_of(table, "seq_len 7, b")
    change = folds_of(3)[0, 1].mean() - folds_of(1)[0, 1].mean()
    assert found["difference"] == pytest.approx(change)
    assert table[table["seq_len"] == 5]["method"].isna().all()


def test_a_second_setting_is_a_dash_of_its_own_and_stands_in_the_legend(tmp_path: Path) -> None:
    for seed, (n, model) in enumerate((n, model) for n in (5, 7) for model in "ab"):
        write_run(tmp_path / f"{n}{model}", run_of(seed, seq_len=n, model=model))
    ended("compare", ["5a", "7a", "5b", "7b", "--out", "out"], tmp_path)
    (figure,) = figures.of_run(read_run(tmp_path / "out")).values()
    dashes = {trace.name: trace.line.dash for trace in figure.data}
    assert dashes == {
        f"{removed}, {model}": dash
        for removed in ("intact", "without RoPE", "with constant queries (W_Q)")
        for model, dash in (("a", "solid"), ("b", "dot"))
    }


def test_other_sequences_are_unpaired() -> None:
    table = difference(*(run_of(seed, seq_len=9 + seed, data=f"{seed}") for seed in range(3)))
    found = value_of(table, "seq_len 10")
    test = ttest_ind(folds_of(1)[0, 1], folds_of(0)[0, 1], equal_var=False)
    low, high = test.confidence_interval(0.95)
    assert (found["difference_low"], found["difference_high"]) == pytest.approx((low, high))
    assert found["method"] == "unpaired"


def test_single_layers_are_compared_where_runs_share_them_and_all_are_in_the_table() -> None:
    table = difference(run_of(0, model="a"), run_of(1, 5, model="b"), run_of(2, 3, model="c"))
    layers = table[table["table"] == "pattern"]
    shown = layers.groupby("run")["layer"].unique().map(list)
    assert shown.to_dict() == {"a": [0, 1], "b": [0, 1, 2, 3, 4], "c": [0, 1, 2]}
    compared = layers.dropna(subset=["difference"]).groupby("run")["layer"].unique().map(list)
    assert compared.to_dict() == {"b": [0, 1], "c": [0, 1, 2]}


@pytest.mark.parametrize("change", [{"seq_len": 32}, {"query_rows": 4}])
@pytest.mark.parametrize("n", [2, 3])
def test_single_positions_are_left_out_where_lengths_or_rows_differ(
    n: int, change: dict[str, int]
) -> None:
    runs = [run_of(seed, seed=seed) for seed in range(n)]
    assert "by_position" in {*difference(*runs)["table"]}
    table = difference(*runs[1:], run_of(n, **change))
    assert {*table["table"]} == {"over_layers", "pattern", "terms"}


def test_a_run_twice_has_no_difference() -> None:
    table = difference(*[run_of(0)] * 3)
    assert [*table["run"].unique()] == ["run 0", "run 1", "run 2"]
    compared = table[table["run"] != "run 0"]
    assert (compared["difference"] == 0).all()
    assert (compared["p_holm"] == 1).all()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A series of steps 0, 30, 100 and 1000 of a training, compared on the command line."""
    desk = tmp_path_factory.mktemp("steps")
    for seed, step in enumerate((0, 30, 100, 1000)):
        write_run(desk / f"run-{step}", run_of(seed, model=f"/trained/step-{step}"))
    names = [f"run-{step}" for step in (1000, 0, 100, 30)]
    result = ended("compare", [*names, "--out", "out"], desk)
    assert result.code == 0, result.err
    return {"out": result.out, "run": read_run(desk / "out"), "folder": desk / "out"}


def test_a_logarithmic_axis_has_the_untrained_model_at_its_left_end(steps: dict[str, Any]) -> None:
    (figure,) = figures.of_run(steps["run"]).values()
    assert figure.layout.xaxis.type == "log"
    assert [*figure.layout.xaxis.ticktext] == ["0", "30", "100", "1000"]
    assert [*figure.layout.xaxis.tickvals] == [10, 30, 100, 1000]
    titles = [note.text for note in figure.layout.annotations]
    assert titles == ["first key's lead, nats", "not by distance, nats", "cost, nats"]
    shown = {trace.name for trace in figure.data if trace.visible is not False}
    assert shown == {"intact", "without RoPE"}, "the button adds the weights"
    lead = next(trace for trace in figure.data if trace.name == "without RoPE")
    assert list(lead.y) == pytest.approx([folds_of(n)[0, 1].mean() for n in range(4)])
    assert [*lead.marker.symbol] == ["diamond"] * 4
    noise = [trace for trace in figure.data if trace.name == "intact"][1]
    assert [*noise.marker.symbol] == ["circle-open"] * 4, "within noise"


def test_the_terminal_has_a_row_a_condition_and_a_column_a_run(steps: dict[str, Any]) -> None:
    spread = np.ptp([folds_of(seed).mean(-1) for seed in range(4)], axis=0)
    number, condition = np.unravel_index(spread.argmax(), spread.shape)
    label = ("First key's lead", "Cost")[number]
    row = ("intact", "without RoPE", "with constant queries (W_Q)")[condition]
    lines = steps["out"].splitlines()
    assert f"{label} changes most, {row}." in lines
    heading = next(line for line in lines if "step 0" in line)
    assert heading.split()[-8:] == ["step", "0", "step", "30", "step", "100", "step", "1000"]
    table = steps["run"].tables["differences"]
    tested = f"{table['differs'].sum()} of {table['p_holm'].count()} numbers differ"
    assert f"{tested} from the run before." in lines


def test_the_page_links_to_the_pages_of_the_runs(steps: dict[str, Any]) -> None:
    page = (steps["folder"] / "report.html").read_text()
    for step in (0, 30, 100, 1000):
        assert f'<a href="../run-{step}/report.html">step {step}</a>' in page


def test_runs_are_compared_without_torch(steps: dict[str, Any]) -> None:
    code = (
        "import sys; from nope_probe.compare import main; sys.argv = ['compare', *sys.argv[1:]]; "
        "main(); print(sorted({'torch', 'transformers', 'transformer_lens'} & {*sys.modules}))"
    )
    desk = steps["folder"].parent
    runs = [str(desk / f"run-{step}") for step in (0, 30, 100)]
    line = [sys.executable, "-c", code, *runs, "--out", str(desk / "without")]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_runs_that_share_nothing_and_a_changed_run_are_refused_in_one_line(tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        run = run_of(seed, model=name)
        tables = {"over_layers": run.tables["over_layers"].replace("rope", name).iloc[[1]]}
        write_run(tmp_path / name, Run(manifest=run.manifest, tables=tables, page="a page"))
    result = ended("compare", ["a", "b", "c", "--out", "out"], tmp_path)
    assert (result.code, "the runs have no numbers in common" in result.err) == (2, True)
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest | {"format": 7}))
    result = ended("compare", ["a", "b", "c", "--out", "out"], tmp_path)
    assert result.code == 2
    assert "is not the file that the run wrote" in result.err


def test_a_number_along_which_no_two_runs_are_on_a_line_is_no_axis() -> None:
    places = ((5, "a"), (5, "b"), (7, "c"), (9, "d"))
    runs = [run_of(seed, seq_len=n, model=model) for seed, (n, model) in enumerate(places)]
    table = difference(*runs)
    assert [*table.columns[:3]] == ["run", "model", "seq_len"]
    assert [*table.dropna(subset=["difference"])["run"].unique()] == ["b", "c", "d"]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs on the same sequences."""
    for seed, name in enumerate("ab"):
        write_run(tmp_path / name, run_of(seed, model=name))
    return [tmp_path / "a", tmp_path / "b"]


def test_of_two_runs_the_second_less_the_first_is_on_a_page_that_links_to_both(
    runs: list[Path], tmp_path: Path
) -> None:
    run_command(compare, *runs, "--out", tmp_path / "out")
    table = read_run(tmp_path / "out").tables["differences"]
    row = table.query("table == 'over_layers' and number == @LEAD and removed == 'rope'").iloc[0]
    before, after = (folds_of(seed)[0, 1].mean() for seed in (0, 1))
    found = row[["base_value", "value", "difference"]].tolist()
    assert found == pytest.approx([before, after, after - before])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "less that of a" in page
    assert 'href="../a/report.html">a</a>' in page
    assert "The intact pattern in both runs" not in page, "no run keeps the pattern's map"


def test_a_finished_comparison_is_shown_again_and_one_in_progress_is_locked(
    runs: list[Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    shutil.rmtree(runs[1])
    write_run(runs[1], run_of(0, model="b"))  # the numbers of a
    with locked(checkpoint_dir(out)):
        line = refused(capfd, tmp_path, compare, *runs, "--out", out)
        assert "another process is at work on the run in" in line
    assert not out.exists()
    run_command(compare, *runs, "--out", out)
    manifest = read_manifest(out)
    assert "0 of 55 numbers of b and a differ beyond noise; " in (out / "report.html").read_text()
    assert manifest.kind == "compare"
    assert {"report.html", "differences.csv"} <= set(manifest.checksums)
    assert [*tmp_path.glob(".out*")] == []
    capfd.readouterr()
    monkeypatch.setattr("nope_probe.studies.compare_run.analyse", None)
    run_command(compare, *runs, "--out", out)
    assert f"shown again from {out}" in capfd.readouterr().err
    shutil.rmtree(runs[1])
    write_run(runs[1], run_of(7, model="b"))
    assert "other settings" in refused(capfd, tmp_path, compare, *runs, "--out", out)


def test_folders_that_cannot_be_compared_are_refused(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, other = runs
    (tmp_path / "empty").mkdir()
    (tmp_path / ".c.unfinished").mkdir()
    inside = f"is in the run {other}: take --out outside of the runs"
    (tmp_path / ".d.unfinished").mkdir()
    going = f"{tmp_path / 'c'}, {tmp_path / 'd'} are not finished"
    for arguments, message in (
        ([], "expected two runs or more to compare, got 0"),
        ([base], "expected two runs or more to compare, got 1"),
        ([base, other, base], "a run was given twice"),
        ([base, tmp_path / "c", tmp_path / "d"], going),
        ([base, base], "a run was given twice"),
        ([base, tmp_path / "empty"], "holds no run: it has no manifest.json"),
        ([base, tmp_path / "c"], "is not finished; run its command again"),
        ([base, other, "--out", other / "compared"], inside),
    ):
        assert message in refused(capfd, tmp_path, compare, *arguments)
    assert inside in refused(capfd, other, compare, base, other)  # whose runs/ would be in it


def test_models_in_the_place_of_runs_are_answered_by_the_command_to_type(
    runs: list[Path], tiny: ByName, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["nope-tiny", "gpt2"], [runs[0], tiny("llama").folder]):
        line = refused(capfd, tmp_path, compare, *arguments)
        assert "such as python -m nope_probe.ablate --model" in line


@pytest.mark.usefixtures("undrawn")
def test_a_model_that_begins_with_bos_is_compared_with_one_that_does_not(
    tiny: ByName, tmp_path: Path
) -> None:
    flags = ["--data", "random", "--seq-len", 11, "--n-seqs", 8, "--folds", 4, "--layers", 2]
    for bos in ("always", "never"):
        out = ["--bos", bos, "--out", tmp_path / bos]
        run_command(ablate, "--remove", "none", "--model", tiny("llama").folder, *flags, *out)
        assert read_run(tmp_path / bos).manifest.skip_keys == 1
    run_command(compare, tmp_path / "always", tmp_path / "never", "--out", tmp_path / "out")
    differences = read_run(tmp_path / "out").tables["differences"]
    assert {"amplitude", "lead"} <= {*differences["number"]}


SMALL = ("--data", "random", "--n-seqs", 34, "--seq-len", 13, "--folds", 17)
LAYER, HEADS, D_HEAD = 1, (2, 4), 10
TEXT = "at other times"


@pytest.fixture(scope="module")
def folders(tiny: ByName, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny Llama, and the same with the query weights of L1H2 and L1H4 tripled."""
    root = tmp_path_factory.mktemp("models")
    base, edited = tiny("llama").folder, root / "edited"
    shutil.copytree(base, edited)
    model = AutoModelForCausalLM.from_pretrained(edited)
    with torch.no_grad():
        for head in HEADS:
            rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
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


def test_the_edited_heads_are_named_first_and_no_other(compared: Path, folders: list[Path]) -> None:
    run = read_run(compared)
    table = run.tables["differences"]
    differs = table[table["differs"]]
    edited = [(LAYER, head) for head in HEADS]
    assert {*zip(differs["layer"], differs["head"], strict=True)} == {*edited}
    is_edited = pd.Series([*zip(table["layer"], table["head"], strict=True)]).isin(edited)
    rest = table[~is_edited].dropna(subset=["difference"])
    assert (rest["difference"] == 0).all()
    assert (rest["p_holm"] == 1).all()
    assert (table.groupby("number").size() == 2 * 6).all()
    assert {*PARTS, "first_weight", "need_rope"} <= {*table["number"]}
    counted = f"2 of 12 heads of edited and {folders[0].name} differ"
    sentence = f"{counted} beyond noise; furthest: L{LAYER}H"
    page = (compared / "report.html").read_text()
    assert sentence in page
    assert {*table["method"].dropna()} == {"paired"}
    assert sentence in " ".join((compared.parent / "terminal").read_text().split())
    assert "Which heads changed" in page
    colours = figures.of_run(run)["Which heads changed"].layout.coloraxis
    assert colours.cmin == -colours.cmax < 0
    assert table["differs"].is_monotonic_decreasing
    sizes = table["difference"].abs()
    assert sizes[table["differs"]].is_monotonic_decreasing
    assert sizes[~table["differs"] & sizes.notna()].is_monotonic_decreasing


@pytest.mark.usefixtures("undrawn")
def test_other_tokens_are_unpaired_and_the_page_names_the_flags(
    folders: list[Path], tmp_path: Path
) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for seed, run in enumerate(runs):
        small = [*SMALL[:-1], 7]
        run_command(attention, "--model", folders[0], *small, "--seed", seed, "--out", run)
    run_command(compare, *runs, "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "0 of 12 heads of seed 1 and seed 0 differ beyond noise; " in page
    assert "Run both with the same --data" in page
    assert {*read_run(tmp_path / "out").tables["differences"]["method"].dropna()} == {"unpaired"}
