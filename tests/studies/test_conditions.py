"""The conditions of a run of ablate, several replacements side by side, and what stops a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.edited_model import subsets
from support.rounding import MEASURE
from support.tiny_models import ByName, tokens
from transformers import AutoConfig

from nope_probe import (
    Ablation,
    Sequences,
    UserError,
    ablated,
    attribute_heads,
    build,
    capture_scores,
    run_ablations,
)
from nope_probe.hooks.reading.written import capture_written
from nope_probe.models.load import as_loaded
from nope_probe.models.names import CHECKPOINTS
from nope_probe.models.parameter_free import hooked_config
from nope_probe.removal import INTACT, Condition
from nope_probe.run.checkpoint import RunCheckpoint
from nope_probe.run.process_group import Processes
from nope_probe.run.session import Session, on_inputs
from nope_probe.studies.ablate import Settings, report
from nope_probe.studies.ablate_run import Ablate, ablations_of, chosen, key_of, runs_of
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import run_passes
from nope_probe.studies.tables import Row

pytestmark = pytest.mark.usefixtures("undrawn")

NOPE = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
LLAMA, GPT2 = ("mask", "rope", *NOPE[1:]), (*NOPE, "pos_embed")


def small_model(seed: int = 0):
    torch.manual_seed(seed)
    model = build(hooked_config(AutoConfig.from_pretrained(CHECKPOINTS["rope-tiny"])))
    for parameter in model.parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape)
    return model


def random_tokens(first: int = 0) -> Sequences:
    return Sequences(inputs=first + torch.randint(1024, (13, 11)), name="random")


def rows_of(
    has: Any, left_out: Mapping[str, str] = {}, **options: Any
) -> tuple[list[str], list[Condition], dict[str, str], dict[Row, Ablation]]:
    """Return the sources, what else is removed, what is left out, and what is run for each row."""
    settings = Settings(**options)
    sources, removed, idle = chosen(has, settings, left_out)
    return [*sources], removed, idle, runs_of(ablations_of(sources, removed, settings))


@contextmanager
def study_of(model: Any, inputs: Sequences, folder: Path, **options: Any) -> Iterator[Ablate]:
    settings = Settings(folds=4, batch_size=7, out=folder / "run", **options)
    given = {"model": as_loaded(model), "inputs": inputs}
    with Session(on_inputs(settings, inputs, 4), **given).opened() as session:
        yield Ablate(session)


@pytest.mark.parametrize(
    ("has", "encodings"),
    [
        (LLAMA, ["rope"]),
        (NOPE, []),
        (GPT2, ["pos_embed"]),
        ((*LLAMA, "window"), ["rope", "window"]),
    ],
)
def test_a_plan_removes_sources_in_all_combinations_and_weights_alone(
    has: Any, encodings: list[str]
):
    found, removed, _, rows = rows_of(has)
    sources = ["mask", *encodings]
    assert found == sources
    conditions = [condition for condition, _ in rows]
    assert conditions[0] == INTACT
    of_sources = {frozenset(item) for item in subsets(sources)}
    plain = {condition for condition, by in rows if by == "none"}
    assert plain == {*of_sources, frozenset({"written"})}
    assert conditions[1:3] == [{"mask"}, {"written"}]
    weights = [{"written"}, {"w_q"}, {"w_k"}, {"w_q", "w_k"}, {"w_o"}]
    assert [set(condition) for condition in removed] == weights
    assert conditions[len(plain) :] == removed[1:]
    assert {condition for condition, _ in rows_of(has, remove=("sources",))[-1]} == of_sources


def test_mask_and_rope_take_ten_runs_and_another_replacement_four_more(tmp_path: Path):
    for names, n_scores in ((["mean"], 10), (["mean", "identity"], 14)):
        options = {"replacement": tuple(names), "n_seqs": 13, "seq_len": 11}
        with study_of(small_model(), random_tokens(), tmp_path / names[-1], **options) as study:
            keys = [one.key for one in study.passes()]
        scores = [key for key in keys if key.startswith("score")]
        assert len(scores) == len({*scores}) == n_scores
        assert keys.index("calibration") < keys.index("score_mean/w_q")


def test_behind_a_constant_output_w_v_does_not_matter():
    *_, rows = rows_of(LLAMA, remove=("w_o", "ov"))
    of_weights = {row.removed.name: key_of(by) for row, by in rows.items() if row.removed.weights}
    assert of_weights == {"w_o": "score_mean/w_o", "w_o+w_v": "score_mean/w_o"}


def test_removals_that_change_the_same_output_are_calibrated_one_by_one() -> None:
    *_, rows = rows_of(LLAMA, remove=("w_o", "position[L1H0]"))
    removed = [one.condition.name for one in rows.values()]
    assert {*removed} - {"intact", "mask", "rope", "mask+rope"} == {"w_o", "position[L1H0]"}


def test_what_cannot_be_removed_is_removed_by_no_default_and_no_source() -> None:
    has, why = (*LLAMA, "window"), {"window": "hides nothing", "w_k": "is no matrix"}
    sources, removed, idle, _ = rows_of(has, {**why, "sink": "the model has none"})
    assert [condition.name for condition in removed] == ["written", "w_q", "w_o"]
    assert (sources, idle) == (["mask", "rope"], why)
    assert rows_of(has, why, remove=("w_q",))[2] == {"window": "hides nothing"}


def test_what_all_blocks_write_is_no_default_where_some_heads_are_named() -> None:
    for heads, written in (((), ["written"]), (("L1H0",), [])):
        removed = rows_of(LLAMA, in_heads=heads)[1]
        assert [condition.name for condition in removed if condition.of_blocks] == written


def test_what_is_named_is_removed_in_the_heads_and_the_sources_in_all(tmp_path: Path) -> None:
    model, inputs = small_model(), random_tokens()
    in_all, in_heads = ["intact", "mask", "rope", "mask+rope"], ["mask@L1H0,L1H3", "w_q@L1H0,L1H3"]
    options = {"remove": ("mask", "w_q"), "in_heads": ("L1H3", "L1H0"), "layers": 3}
    with study_of(model, inputs, tmp_path, **options) as study:
        assert [row.removed.name for row in study.rows] == [*in_all, *in_heads]
        results = run_passes(study.passes())
        maps = {row.removed.name: results[key_of(by)].maps for row, by in study.runs.items()}
    for name in (*in_all[1:], *in_heads):
        removed, *heads = name.split("@")
        ablation = Ablation(remove=removed, heads={1: [0, 3]} if heads else None)
        with ablated(model, ablation, tokens=None if removed != "w_q" else inputs.inputs):
            captured = capture_scores(model, inputs.inputs, n_folds=4, batch_size=7)
        mine = torch.stack([maps[name][layer].mean() for layer in range(3)])
        expected = captured.mean[:3]
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


def test_an_encoder_without_a_mask_is_refused():
    with pytest.raises(UserError, match="no causal mask"):
        rows_of(("w_q", "w_k", "w_o", "w_v"))


class Listing(RunCheckpoint):
    """Lists the streams that are run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.listed: list[str] = []

    def stream(self, key: str) -> Any:
        self.listed.append(key)
        return super().stream(key)


@pytest.mark.parametrize("removed", [("w_k",), ("w_k", "position[MLP0]+position[L1H0]")])
def test_keys_are_those_of_all_streams_in_the_order_of_the_run(
    removed: tuple[str, ...], tmp_path: Path
) -> None:
    tokens, checkpoint = random_tokens(), Listing(tmp_path)
    with study_of(small_model(), tokens, tmp_path, remove=removed, layers=2) as study:
        study.engine = replace(study.engine, checkpoint=checkpoint)
        run_passes(study.passes())
        sizes = [one.sizes(Processes()) for one in study.passes()]
    assert checkpoint.listed == [key for of_pass in sizes for key in of_pass]
    assert {n_seqs for of_pass in sizes for n_seqs in of_pass.values()} == {len(tokens)}
    assert len(set(checkpoint.listed)) == len(checkpoint.listed)
    assert ("shuffled/mask" in checkpoint.listed) == (tokens.kind == "text")


def test_position_is_taken_away_as_it_is_written_without_all_else():
    """Then next to nothing is left of it; what the intact model writes would leave its opposite."""
    model, tokens, names = small_model(), random_tokens().inputs, ["MLP0", "MLP1"]
    mask = Ablation(remove=["mask"])
    removed = Ablation(remove=["mask", *(f"position[{name}]" for name in names)])
    engine = Engine(model=model, inputs=tokens, n_folds=4)

    def sizes(engine: Engine, stream: Any) -> dict[str, torch.Tensor]:
        written = capture_written(model, tokens, names, fold_of=engine.fold_of, as_intact=True)
        return {name: torch.tensor(written.size(name)) for name in names}

    left, before = (engine.load_or_compute("sizes", sizes, of) for of in (removed, mask))
    # A text has the means of the other texts of its half: its part of their error is left.
    n_others = len(tokens) / 2 - 1
    assert all(left[name] <= before[name] / n_others for name in names)


def test_the_position_of_heads_of_a_layer_is_that_of_the_intact_model():
    """No head reads another head of its layer, so that a calibration of both serves both."""
    model, tokens = small_model(), random_tokens().inputs
    removed = Ablation(remove=["position[L1H0]", "position[L1H1]"])
    engine = Engine(model=model, inputs=tokens, n_folds=4)
    alone = engine.with_positions("alone", removed.condition.writers)
    maps, expected = (
        torch.stack([layer.mean() for layer in of.scores("score", removed).values()]).nan_to_num()
        for of in (engine, alone)
    )
    assert torch.equal(maps, expected)


def test_a_non_finite_score_stops_the_run_and_is_named(tmp_path: Path) -> None:
    model = small_model()
    model.blocks[0].attn.W_Q.data[0, 0, 0] = 1e30  # finite scores, but a norm that overflows
    options = {"remove": ("w_q",), "replacement": ("identity",), "gain": "norm", "layers": 2}
    refused = pytest.raises(UserError, match=r"non-finite scores in L0, pass score_identity/")
    with study_of(model, random_tokens(), tmp_path, **options) as study, refused:
        run_passes(study.passes())


def test_each_replacement_has_the_rows_of_a_run_with_it_alone(bridge: ByName) -> None:
    model, inputs, kinds = bridge("llama"), tokens(16, 11), ("random", "identity", "mean")
    together, mean = (
        run_ablations(model, inputs, remove=["w_q", "w_k"], folds=4, replacement=replacement)
        for replacement in (kinds, "mean")
    )
    rows = together.tables["pattern"]
    of_mean = rows[rows["replacement"].isin(("none", "mean"))].reset_index(drop=True)
    pd.testing.assert_frame_equal(of_mean, mean.tables["pattern"])
    assert {*rows["replacement"]} == {"none", *kinds}
    # Removals without a weight run once.
    names = set(together.maps)
    assert not {f"score_{kind}/mask" for kind in kinds} & names
    for kind in kinds:
        assert {f"score_{kind}/w_q", f"score_{kind}/w_k"} <= names
    for name in ("score_mean/w_q", "score/mask"):
        np.testing.assert_array_equal(together.maps[name], mean.maps[name])


def test_each_band_of_rope_is_a_row_and_all_together_are_rope(bridge: ByName) -> None:
    model, inputs = bridge("llama"), tokens(16, 11)
    bands, whole = (
        run_ablations(model, inputs, folds=4, **options)
        for options in ({"remove": ["rope[0:2]", "rope[2:5]"]}, {"remove": ["sources"]})
    )
    names = ["intact", "mask", "rope", "mask+rope", "rope[0:2]", "rope[2:5]"]
    rows = bands.tables["pattern"]
    assert rows["removed"].unique().tolist() == [*names, "shuffled", "mask+shuffled"]
    rows = rows[~rows["removed"].isin(names[4:])].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, whole.tables["pattern"])
    one = run_ablations(model, inputs, folds=4, remove="rope[0:5]").tables["pattern"]
    for name in ("lead", "order"):
        by_source = one.pivot(index="layer", columns="removed", values=name)
        np.testing.assert_allclose(by_source["rope[0:5]"], by_source["rope"], rtol=1e-4, atol=1e-4)


BANDS = ("rope[0:2]", "rope[2:5]")


def test_the_values_of_a_head_are_those_of_its_maps_without_each_source_and_band(
    bridge: ByName,
) -> None:
    model, inputs = bridge("llama"), tokens(97, 13)
    run = run_ablations(model, inputs, folds=5, batch_size=31, remove=BANDS, per_head=True)
    table, names = run.tables["head_pattern"], ["intact", "mask", "rope", "mask+rope", *BANDS]
    assert table["removed"].tolist() == names * 2 * 6
    maps = {}
    for name in names:
        removed = () if name == "intact" else name
        with ablated(model, Ablation(remove=removed)):
            maps[removed] = capture_scores(model, inputs, n_folds=5, per_head=True)
    heads = attribute_heads(maps)
    for row in table.to_dict("records"):
        values = heads[row["layer"], row["head"]].conditions[row["removed"]]
        for name in ("lead", "amplitude", "order"):
            found = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
            expected = getattr(values, name).ends
            assert found == pytest.approx(expected, rel=MEASURE, abs=MEASURE, nan_ok=True)
    (of_heads,) = [of for of in report(run).sections if of.title == "Heads without each source"]
    assert callable(of_heads.figure)
    titles = [title.text for title in of_heads.figure().layout.annotations]
    assert "order of other keys, without RoPE" in titles
