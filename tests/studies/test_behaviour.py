"""The behaviour command as a user types it: its numbers are those of plain, edited models."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from support.command_line import run_command
from support.edited_model import edited, norm_sizes
from support.plain_states import calls_of, of_others, plain_losses
from support.rounding import MEASURE, NETWORK, assert_same
from support.tiny_models import ByName
from support.tiny_models import plain as plain_model

from nope_probe import behaviour, read_run, run_behaviour, untrained
from nope_probe.hooks.removing.components import components
from nope_probe.maps.folds import grouped_folds
from nope_probe.models.names import CHECKPOINTS
from nope_probe.studies.behaviour import Settings, less_nulls, make_conditions

N_SEQS, N_POS, PREFIX, TRAINED = 16, 29, 11, 16
SMALL = ["--n-seqs", N_SEQS, "--seq-len", N_POS, "--folds", 4, "--batch-size", 5]
SMALL += ["--prefix", PREFIX, "--replacement", "identity", "--gain", "norm"]
SMALL += ["--trained-len", TRAINED]
TYPED = ("mask", "rope", "w_q", "mlp", "rope+mask", "ov")
REMOVED = ("mask", "rope", "w_q", "mlp", "mask+rope", "w_o+w_v")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that are long enough, one per sequence."""
    words = ["the", "other", "rather", "than", "on", "into", "it", "at", "there", "here"]
    draw = np.random.default_rng(0)
    rows = [{"text": " ".join(draw.choice(words, 60))} for _ in range(N_SEQS)]
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def done(tiny: ByName, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the folder of a Llama with grouped keys and a BOS token."""
    out = tmp_path_factory.mktemp("runs") / "llama"
    model = ["--model", tiny("llama").folder, "--data", texts, "--remove", *TYPED]
    run_command(behaviour, *SMALL, *model, "--out", out)
    return out


@pytest.fixture(scope="module")
def plain(done: Path, tiny: ByName) -> Callable[[str, str], np.ndarray]:
    """Return the losses [seq, target] of an edited plain model on a probe of the run."""
    hf, tokens = tiny("llama").hf, load_file(done / "tokens.safetensors")

    @cache
    def losses(condition: str, probe: str, prefix: int = PREFIX) -> np.ndarray:
        remove = condition.split("+") if condition else ()
        has_mask = "mask" not in remove
        model = edited(hf, remove, norm_sizes(hf), prefix=None if has_mask else prefix)
        return plain_losses(model, tokens[probe]).numpy()

    return losses


def rows_of(run: Path, measure: str) -> pd.DataFrame:
    table = pd.read_csv(run / "behaviour.csv", keep_default_na=False, na_values=[""])
    return table[table["measure"] == measure].set_index("removed")


def assert_interval(row: pd.Series, column: str, values: np.ndarray) -> None:
    """Compare an estimate and its bounds with Student's interval of one value per document."""
    low, high = stats.t.interval(0.95, len(values) - 1, loc=values.mean(), scale=stats.sem(values))
    seen = row[[column, f"{column}_low", f"{column}_high"]].to_numpy(float)
    assert_same(seen, np.array([values.mean(), low, high]), MEASURE, size=max(1.0, abs(high)))


def per_document(
    plain: Callable[..., np.ndarray], measure: str, condition: str, first: int
) -> np.ndarray:
    """Return a measure from the losses of the edited plain model, a number per document."""
    suffix, tokens = slice(PREFIX - 1, None), ("tokens", slice(first - 1, None))
    spans = {
        "loss": [("tokens", slice(None))],
        "loss_suffix": [("tokens", suffix)],
        "in_context": [("tokens", slice(1, 3)), ("tokens", slice(26, None))],
        "copy_text_second": [("copy_text", slice(15, None))],
        "extrapolation": [("long", slice(TRAINED - 1, None)), ("long", slice(11, 15))],
        "order": [("order", suffix), ("tokens", suffix)],
        "other_first": [("other_first", tokens[1]), tokens],
        "without_bos": [("without_bos", slice(first - 2, None)), tokens],
    }
    prefixes = {"copy_text": 15, "without_bos": PREFIX - 1}
    means = [
        plain(condition, probe, prefixes.get(probe, PREFIX))[:, span].mean(1)
        for probe, span in spans[measure]
    ]
    return means[0] - means[1] if means[1:] else means[0]


@pytest.mark.parametrize(
    ("measure", "condition"),
    [
        *(("loss", condition) for condition in ("", "rope", "w_q", "mlp", "w_o+w_v")),
        *(("loss_suffix", condition) for condition in ("mask", "mask+rope")),
        *(("order", condition) for condition in ("", "mask", "w_q")),
        *((bos, each) for bos in ("without_bos", "other_first") for each in ("", "mask", "rope")),
        *(("in_context", condition) for condition in ("", "rope")),
        ("copy_text_second", "mask"),
        ("extrapolation", "rope"),
    ],
)
def test_a_measure_and_its_difference_are_those_of_the_edited_model(
    measure: str, condition: str, done: Path, plain: Callable[..., np.ndarray]
) -> None:
    row, first = rows_of(done, measure).loc[condition or "intact"], 2
    if "mask" in condition:
        first = PREFIX
    values, intact = (per_document(plain, measure, each, first) for each in (condition, ""))
    assert_interval(row, "value", values)
    if condition:
        assert_interval(row, "difference", values - intact)


def of_position(encoding: str) -> list[str]:
    """Return the conditions by default: a null follows each removal of written position."""
    removed = ["written", f"{encoding}+written"]
    nulls = [name.replace("written", "written_null") for name in removed]
    pairs = zip(removed, nulls, strict=True)
    return [encoding, *(name for pair in pairs for name in pair), "mask"]


@pytest.mark.parametrize(
    ("model", "remove", "conditions"),
    [
        ("llama", ("position",), of_position("rope")),
        ("gpt2", ("position",), of_position("pos_embed")),
        ("llama", ("weights", "mask"), ["w_q", "w_k", "w_q+w_k", "w_o", "w_o+w_v", "mlp", "mask"]),
        ("llama", ("sources",), ["rope", "mask", "mask+rope"]),
    ],
)
def test_position_is_removed_by_default_and_weights_where_they_are_asked_for(
    model: str, remove: tuple[str, ...], conditions: list[str], bridge: ByName
) -> None:
    assert Settings().remove == ("position",)
    made = make_conditions(components(bridge(model)), Settings(remove=remove))
    assert [*made] == ["intact", *conditions]


def test_the_probes_are_made_of_the_text_windows(done: Path) -> None:
    tokens = load_file(done / "tokens.safetensors")
    text = tokens["tokens"]
    assert torch.equal(tokens["order"][:, PREFIX:], text[:, PREFIX:])
    assert torch.equal(tokens["order"].sort(-1).values, text.sort(-1).values)
    assert not torch.equal(tokens["order"], text)
    for probe in ("copy_text", "copy_random"):
        assert torch.equal(tokens[probe][:, 1:15], tokens[probe][:, 15:])
    assert torch.equal(tokens["copy_text"][:, :15], text[:, :15])
    assert torch.equal(tokens["without_bos"], text[:, 1:])
    assert tokens["long"].shape[1] == 4 * TRAINED
    assert pd.read_csv(done / "extrapolation.csv")["position"].max() == 4 * TRAINED - 1


def test_without_the_mask_only_the_suffix_is_scored(done: Path) -> None:
    table = pd.read_csv(done / "loss_by_position.csv")
    for condition in ("mask", "mask+rope"):
        for measure in ("loss", "in_context", "copy_text"):
            row = rows_of(done, measure).loc[condition]
            assert np.isnan(row["value"])
            assert row["note"]
        assert table[table["removed"] == condition]["position"].min() == PREFIX


def test_a_model_that_does_not_copy_says_so_and_shows_no_number(done: Path) -> None:
    rows = rows_of(done, "copy_random")
    assert rows[["value", "difference"]].isna().all(axis=None)
    masked = rows.drop(index=["mask", "mask+rope"])
    assert masked["note"].str.contains("does not copy").all()
    second = rows_of(done, "copy_random_second")
    above = second["value"].isna()
    assert above["intact"]  # a random model is worse than a uniform guess
    assert second.loc[above & (second.index != "intact"), "difference"].notna().all()
    assert (second.loc[above, "note"] != "").all()


@pytest.mark.usefixtures("undrawn")
def test_a_model_that_copies_has_the_losses_of_both_copies_in_plain_transformers(
    tmp_path: Path,
) -> None:
    """Windows of BOS and a segment of 24 tokens twice; neither copy's first token is scored."""
    chosen = ["--measures", "copy", "--n-seqs", 16, "--seq-len", 49, "--folds", 4]
    removed = ["--model", "rope-tiny", "--remove", "mlp"]
    run_command(behaviour, *removed, *chosen, "--out", tmp_path / "run")
    run, hf = read_run(tmp_path / "run"), plain_model(CHECKPOINTS["rope-tiny"])
    documents = {"copy_text": run.arrays["tokens"]["documents"], "copy_random": np.arange(16)}
    for measure, of in documents.items():
        ids = torch.from_numpy(run.arrays["tokens"][measure])
        losses = [plain_losses(model, ids) for model in (hf, edited(hf, ["mlp"]))]
        losses = [pd.DataFrame(rows).groupby(of).mean().to_numpy() for rows in losses]
        first, second = ([rows[:, at : at + 23].mean(1) for rows in losses] for at in (1, 25))
        values = {measure: [b - a for a, b in zip(first, second, strict=True)]}
        for name, (intact, without) in (values | {f"{measure}_second": second}).items():
            rows = rows_of(tmp_path / "run", name)
            assert_interval(rows.loc["mlp"], "difference", without - intact)
            if name != "copy_random_second":  # its losses are above a uniform guess
                assert_interval(rows.loc["mlp"], "value", without)
                assert_interval(rows.loc["intact"], "value", intact)


@pytest.mark.parametrize(
    ("table", "probe", "condition", "positions"),
    [
        ("extrapolation", "long", "", (1, TRAINED, 4 * TRAINED - 1)),
        ("extrapolation", "long", "rope", (1, TRAINED, 4 * TRAINED - 1)),
        ("loss_by_position", "tokens", "w_q", (1, 17, N_POS - 1)),
    ],
)
def test_losses_by_position_are_means_over_documents_of_plain_transformers(
    table: str,
    probe: str,
    condition: str,
    positions: tuple[int, ...],
    done: Path,
    plain: Callable[..., np.ndarray],
) -> None:
    rows = pd.read_csv(done / f"{table}.csv").set_index(["removed", "position"])
    losses = plain(condition, probe)
    for position in positions:
        row = rows.loc[condition or "intact", position]
        assert_interval(row, "loss", losses[:, position - 1])


def test_position_is_regressed_on_half_of_the_documents_and_read_on_the_other(
    done: Path, tiny: ByName
) -> None:
    table = pd.read_csv(done / "decodability.csv").set_index(["removed", "layer"])
    assert set(table.index.get_level_values("removed")) == {"intact", *REMOVED}
    hf, tokens = tiny("llama").hf, load_file(done / "tokens.safetensors")["tokens"]
    with torch.inference_mode():
        streams = hf(tokens, output_hidden_states=True).hidden_states
    run = read_run(done)
    documents = torch.from_numpy(run.arrays["tokens"]["documents"])
    place = grouped_folds(documents, len(run.manifest.fold_sizes))
    index = torch.arange(1.0, N_POS).double()
    n_fit = int((place % 2 == 0).sum())
    draws = torch.rand(n_fit, N_POS - 1, generator=torch.Generator().manual_seed(0))
    targets = {"distance": index.expand(n_fit, -1), "null": index[draws.argsort(-1)]}
    with untrained(hf) as drawn, torch.inference_mode():
        of_drawn = drawn.original_model(tokens, output_hidden_states=True).hidden_states
    targets["untrained"] = targets["distance"]
    for column, y in targets.items():
        x = (of_drawn if column == "untrained" else streams)[1][:, 1:].double()  # of block 0
        distances = regressed(x[place % 2 == 0], y, x[place % 2 == 1], index)
        assert_interval(table.loc["intact", 0], column, distances)
    assert table["chance"].to_numpy() == pytest.approx(float((index - index.mean()).abs().mean()))
    changed = table.loc[("w_q", 0), "distance"] - table.loc[("intact", 0), "distance"]
    assert table.loc[("w_q", 0), "difference"] == pytest.approx(changed, abs=1e-6)


def regressed(
    fit: torch.Tensor, y: torch.Tensor, held_out: torch.Tensor, index: torch.Tensor
) -> np.ndarray:
    """Return how far ridge regression is off in held-out sequences, [seq]."""
    rows, numbers = fit.flatten(0, 1), y.flatten()
    mean, spread = rows.mean(0), rows.std(0, correction=0)
    standard = (rows - mean) / spread
    gram = standard.T @ standard + 1e-3 * len(rows) * torch.eye(standard.shape[1])
    w = torch.linalg.solve(gram, standard.T @ (numbers - numbers.mean()))
    predicted = (held_out - mean) / spread @ w + numbers.mean()
    return (predicted - index).abs().mean(1).numpy()


@pytest.mark.usefixtures("undrawn")
def test_the_position_that_a_component_writes_is_taken_away_in_windows_of_any_length(
    tiny: ByName, texts: Path, tmp_path: Path
) -> None:
    """Lengths differ where BOS is left out, and beyond the trained context."""
    model = ["--model", tiny("llama").folder, "--data", texts]
    model += ["--remove", "position[MLP0]", "mask+position[MLP0]"]
    chosen = ["--measures", "loss", "bos", "extrapolation", "position", "--layers", 2]
    run_command(behaviour, *SMALL[:10], *SMALL[-2:], *chosen, *model, "--out", tmp_path / "run")
    hf, ids = tiny("llama").hf, load_file(tmp_path / "run" / "tokens.safetensors")["tokens"]
    mlp, intact = hf.model.layers[0].mlp, plain_losses(hf, ids)
    [written] = calls_of(hf, {"MLP0": mlp}, ids).values()
    documents = torch.from_numpy(read_run(tmp_path / "run").arrays["tokens"]["documents"])
    half = grouped_folds(documents, 8) % 2
    vectors = of_others(written.output, 1, half)  # of BOS, all that it writes stays
    handle = mlp.register_forward_hook(lambda module, inputs, output: output - vectors)
    rise = (plain_losses(hf, ids) - intact).mean(1)
    handle.remove()
    table = pd.read_csv(tmp_path / "run" / "behaviour.csv").set_index(["measure", "removed"])
    found = table.loc[("loss", "position[MLP0]"), "difference"]
    assert found == pytest.approx(float(rise.mean()), abs=NETWORK * float(intact.max()))
    for measure in ("without_bos", "extrapolation"):
        assert table.loc[(measure, "position[MLP0]"), "difference"] != 0


@pytest.mark.usefixtures("undrawn")
def test_learned_positions_have_none_beyond_and_replacements_stand_side_by_side(
    tiny: ByName, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", tiny("gpt2").folder, "--data", texts, "--remove", "w_q", "pos_embed"]
    chosen = ["--replacement", "mean", "zero", "--measures", "loss", "bos", "extrapolation"]
    run_command(behaviour, *SMALL[:8], *model, *chosen, "--out", tmp_path / "run", "--verbose")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["conditions"] == ["intact", "w_q", "pos_embed"]
    rows = rows_of(tmp_path / "run", "loss").reset_index()[["removed", "replacement"]]
    assert rows.to_numpy().tolist() == [
        *(["intact", "none"], ["w_q", "mean"], ["w_q", "zero"], ["pos_embed", "none"])
    ]
    assert set(manifest["skipped"]) == {"bos", "extrapolation"}
    shown = " ".join(capsys.readouterr().out.split())
    assert "positions are learned: there are none beyond the context" in shown
    assert "sequences begin without a BOS token" in shown
    loss = rows_of(tmp_path / "run", "loss")["value"]
    assert len({*loss}) == 4
    assert len(pd.read_csv(tmp_path / "run" / "extrapolation.csv")) == 0


def test_a_range_of_layers_has_the_positions_of_these_layers() -> None:
    few = {"n_seqs": 16, "seq_len": 13, "measures": ["position"], "remove": ["mlp"]}
    whole, some = (
        run_behaviour("nope-tiny", layers=layers, **few).tables["decodability"]
        for layers in ("all", "2:4")
    )
    expected = whole[whole["layer"].isin([2, 3])].reset_index(drop=True)
    pd.testing.assert_frame_equal(some, expected)


def test_positions_are_not_decoded_of_three_documents() -> None:
    """Of five folds of eight documents, the two odd ones have three documents."""
    options = {"n_seqs": 8, "seq_len": 11, "folds": 5, "remove": ("mask",), "layers": 1}
    run = run_behaviour("rope-tiny", measures=["loss", "position"], **options)
    assert run.manifest.results["skipped"]["position"].startswith("3 documents are in odd folds")
    values = run.tables["behaviour"].set_index("measure")["value"]
    assert values.loc["loss"].notna().any()
    assert values.loc[["position"]].isna().all()


def test_written_position_alone_is_shown_less_its_null() -> None:
    names = ["intact", "written", "written_null", "rope+written", "rope+written_null"]
    table = pd.DataFrame({"removed": names})
    for end in ("", "_low", "_high"):
        table[f"difference{end}"] = [np.nan, 9.0, 7.0, 6.0, 5.0]
        table[f"beyond_null{end}"] = [np.nan, 2.0, np.nan, 1.0, np.nan]
    shown = less_nulls(table).set_index("removed")
    for end in ("", "_low", "_high"):
        assert shown[f"difference{end}"].dropna().to_dict() == {"written": 2.0, "rope+written": 6.0}
