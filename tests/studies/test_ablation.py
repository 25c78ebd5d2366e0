"""The ablate command as a user types it: the run's files, its output, its refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import ended, run_command
from support.edited_model import constants, edited
from support.plain_attention import plain_attention
from support.plain_states import plain_losses
from support.rounding import MEASURE, assert_same
from support.tiny_models import plain
from torch import Tensor
from transformers import PreTrainedModel

from nope_probe import (
    Ablation,
    Run,
    ablate,
    ablated,
    calibrate,
    capture_scores,
    figures,
    load,
    read_run,
    row_centred,
)
from nope_probe.maps.folds import folds_of
from nope_probe.models.names import path_of
from nope_probe.studies.ablate import report

N = 13
SMALL = ["--n-seqs", "16", "--seq-len", str(N), "--folds", "5", "--batch-size", "11"]
INTACT = "score/intact"


def run_of(out: Path, *flags: object) -> Run:
    run_command(ablate, *SMALL, *flags, "--out", out)
    return read_run(out)


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("runs") / "default", "--layers", "2")


def test_a_run_has_a_row_for_each_source_weight_and_control(default_run: Run):
    model = default_run.manifest.model
    assert "folds.safetensors" in default_run.manifest.checksums
    assert (model.rope_layers, model.parity["logits"] < 1e-4) == ((True, True), True)
    table = default_run.tables["pattern"]
    assert table.groupby("replacement")["removed"].unique().map(list).to_dict() == {
        "none": [
            *("intact", "mask", "written", "rope", "mask+rope"),
            *("written_null", "shuffled", "mask+shuffled"),
        ],
        "mean": ["w_q", "w_k", "w_q+w_k", "w_o"],
    }


def test_the_first_column_of_a_pattern_is_the_lead_of_the_first_key(default_run: Run):
    maps = default_run.maps
    scores, column = maps[INTACT].astype(float), maps["pattern/intact"][..., 0]
    for query in range(2, N):
        lead = scores[:, query, 0] - scores[:, query, 1:query].mean(-1)
        assert_same(column[:, query], lead, MEASURE)
    assert np.isnan(column[:, :2]).all(), "without another earlier key there is no lead"
    table = default_run.tables["pattern"].query("removed == 'intact'")
    assert_same(table["lead"].to_numpy(), column[:, 9:].mean(-1), MEASURE)  # 8 other keys or more


@pytest.mark.usefixtures("undrawn")
def test_lead_kept_and_cost_of_the_eight_conditions_are_those_of_plain_transformers(tmp_path: Path):
    hf, n_seqs = plain(path_of("rope-tiny")), 67
    run = run_of(tmp_path / "run", "--n-seqs", n_seqs, "--layers", 4)
    sizes = torch.tensor(run.manifest.fold_sizes).double()
    table = run.tables["pattern"].set_index(["layer", "removed"])
    stored = run.arrays["tokens"]
    tokens, documents = (torch.from_numpy(stored[name]) for name in ("tokens", "documents"))
    fold_of = folds_of(n_seqs, 5, documents)

    def folds(hf: PreTrainedModel, without: str | None = None) -> Tensor:
        """Return the mean scores [fold, layer, query, key] over sequences and heads."""
        plain = plain_attention(hf, tokens, without=without)
        scores = torch.stack([layer.scores.double().mean(1) for layer in plain.values()], 1)
        return torch.stack([scores[fold_of == fold].mean(0) for fold in range(5)])

    captured = {"intact": folds(hf), "mask": folds(hf, "mask"), "rope": folds(hf, "rope")}
    captured["mask+rope"] = folds(hf, "mask and rope")
    models = {"intact": hf, "rope": edited(hf, ["rope"])}
    means = constants(hf, tokens)
    models |= {
        name: edited(hf, name.split("+"), replaced=means)
        for name in ("w_q", "w_k", "w_q+w_k", "w_o")
    }
    captured |= {name: folds(model) for name, model in models.items() if "w_" in name}
    losses = {name: float(plain_losses(model, tokens).mean()) for name, model in models.items()}
    means = run.tables["over_layers"].set_index("removed")
    for name, loss in losses.items():
        assert means.loc[name, "loss"] == pytest.approx(loss, abs=1e-4), name
        assert means.loc[name, "cost"] == pytest.approx(loss - losses["intact"], abs=1e-4), name
        ends = means.loc[name, ["cost_low", "cost", "cost_high"]].tolist()
        assert ends == sorted(ends)
    assert {*means.index[means["loss"].isna()]} == {"mask", "mask+rope"}, "they see the next token"
    written = means.loc["written"]
    rise = written["loss"] - losses["intact"]
    assert written["cost_with_noise"] == pytest.approx(rise, abs=1e-4)
    assert written["cost"] == pytest.approx(rise - written["cost_null"], abs=1e-4)
    assert written["cost_null_low"] > 0, "means of few texts cost by their noise"
    assert {*means.index[means["cost_null"].notna()]} == {"written"}
    weights = sizes[:, None] * sizes * (1 - torch.eye(5))
    for layer in range(4):
        cells = {name: patterns_of(maps[:, layer]) for name, maps in captured.items()}
        products = {
            name: float((weights * (x @ cells["intact"].T)).sum() / weights.sum() / x.shape[1])
            for name, x in cells.items()
        }
        for name, maps in captured.items():
            row, of_layer = table.loc[(layer, name)], maps[:, layer]
            rows = [of_layer[:, i, 0] - of_layer[:, i, 1:i].mean(-1) for i in range(9, N)]
            lead = float(sizes @ torch.stack(rows, -1).mean(-1) / sizes.sum())
            assert row["lead"] == pytest.approx(lead, abs=0.02), name
            if row["order"] == row["order"]:
                kept = products[name] / products["intact"] ** 0.5
                assert row["order"] == pytest.approx(kept, abs=0.02), name
    assert table.loc[1].loc[list(captured), "order"].notna().all()
    assert table.loc[(1, "intact"), "order"] > 1


def patterns_of(maps: Tensor) -> Tensor:
    """Return [fold, cell]: the other keys' scores less their mean."""
    rows = [maps[:, i, 1:i] - maps[:, i, 1:i].mean(-1, keepdim=True) for i in range(2, N)]
    return torch.cat(rows, -1)


def test_rows_sentences_and_legends_name_the_heads_that_lose_something(tmp_path: Path) -> None:
    flags = ["--remove", "mask", "qk", "--in-heads", "L1H2", "L0H1", "--layers", "2"]
    printed = ended("ablate", [*SMALL, *flags, "--out", "run"], tmp_path)
    assert printed.code == 0, printed.err
    run = read_run(tmp_path / "run")
    names = [*run.tables["over_layers"]["removed"]]
    assert names[:5] == ["intact", "mask", "rope", "mask+rope", "mask@L0H1,L1H2"]
    assert names[5] == "w_q@L0H1,L1H2+w_k@L0H1,L1H2"
    assert "without the causal mask in L0H1, L1H2" in " ".join(printed.out.split())
    [legend] = [
        {trace.name for trace in figure.data}
        for title, figure in figures.of_run(run).items()
        if title == "The three numbers in every layer"
    ]
    assert {"without the causal mask", "without the causal mask in L0H1, L1H2"} < legend


@pytest.mark.usefixtures("undrawn")
def test_shuffled_rows_are_the_intact_model_on_the_tokens_of_shuffle(
    default_run: Run, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", "--layers", "2", "--remove", "none", "--shuffle")
    expected, pattern = run.tables["pattern"], default_run.tables["pattern"]
    rows = pattern.query("removed == 'shuffled'")
    for name in ("lead", "lead_low", "amplitude", "not_by_distance"):
        assert_same(rows[name].to_numpy(), expected[name].to_numpy(), MEASURE)
    intact = pattern.query("removed == 'intact'")
    assert (intact["lead"].to_numpy() != expected["lead"].to_numpy()).all()


def test_controls_are_in_their_figure_alone(default_run: Run) -> None:
    drawn = figures.of_run(default_run)
    numbers, controls = (
        {trace.name for trace in drawn[title].data if trace.name}
        for title in (
            "The three numbers in every layer",
            "Controls: shuffled tokens, null of written position",
        )
    )
    of_controls = {"without the tokens' order", "null of written position"}
    of_controls.add("without mask + tokens' order")
    assert of_controls < controls
    assert {"intact", "without the causal mask", "without written position"} < controls
    assert not of_controls & numbers
    values = report(default_run).headline.then
    assert values is not None
    assert len(values.table) == len(default_run.manifest.results["conditions"])


@pytest.mark.usefixtures("undrawn")
def test_a_files_name_does_not_say_what_its_tokens_are(tmp_path: Path):
    words = np.random.default_rng(0).choice(["def", "return", "while", "x", "="], (11, 200))
    file = tmp_path / "random.jsonl"
    file.write_text("\n".join(json.dumps({"text": " ".join(row)}) for row in words))
    run = run_of(tmp_path / "run", "--remove", "sources", "--layers", "1", "--data", file)
    assert run.tables["pattern"]["removed"].tolist()[-2:] == ["shuffled", "mask+shuffled"]


REMOVED = {
    "pairs by number": ["--remove", "rope[0:3]", "rope[3:8]+w_q"],
    "bands": ["--remove", "rope[0:8]", "rope[8:16]", "qk", "--replacement", "zero", "mean"],
}


@pytest.mark.parametrize("case", REMOVED)
def test_the_page_shows_the_pattern_of_the_model_without_each_part(case: str, tmp_path: Path):
    run = run_of(tmp_path / "run", "--layers", "2", "--data", "random", *REMOVED[case])
    manifest, conditions = run.manifest, run.manifest.results["conditions"]
    assert conditions[:4] == ["intact", "mask", "rope", "mask+rope"]
    figure = figures.of_run(run)["The pattern without each part"]
    drawn, strips = (
        [np.array(x.z, float) for x in figure.data if x.coloraxis == f"coloraxis{of}"]
        for of in ("", 2)
    )
    leads = [strip[:, 0] for strip in strips]
    assert len(drawn) == len(leads) == 2 * len(conditions)
    tokens = torch.from_numpy(run.arrays["tokens"]["tokens"])
    model = load("rope-tiny", n_layers=2).model
    gains = calibrate(model, tokens)
    replacement = next(iter(manifest.results["replacements"]), "identity")
    for place, removed in enumerate(conditions):
        names = [] if removed == "intact" else removed.split("+")
        ablation = Ablation(remove=names, replacement=replacement)
        with ablated(model, ablation, gains if ablation.needs_calibration else None):
            scores = capture_scores(model, tokens, n_folds=5).mean.double()
        expected = row_centred(scores, manifest.skip_keys).numpy()
        for layer in range(2):
            shown = layer * len(conditions) + place
            assert_same(drawn[shown], expected[layer], MEASURE)
            lead = [row[0] - row[1:i].mean() for i, row in enumerate(scores[layer]) if i > 8]
            assert_same(leads[shown][9:], np.array(lead), MEASURE)


def test_a_parameter_free_model_takes_gaussian_vectors(tmp_path: Path):
    model = ["--model", "parameter-free", "--data", "gaussian", "--alpha", "0.2", "--layers", "3"]
    run = run_of(tmp_path / "run", *model)
    pattern = run.tables["pattern"].query("layer == 2")
    kept = pattern.set_index("removed")["order"]
    assert kept["intact"] > 0.01
    assert abs(kept["w_k"]) < 1e-6, "without RoPE, constant keys have no order"
    assert pattern["lead"].isna().all(), "vectors have no first key"
    assert run.arrays["tokens"]["vectors"].shape == (16, N, 64)
