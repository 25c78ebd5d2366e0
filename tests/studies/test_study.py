"""The attribution in memory is the ablate command's, for any model of TransformerLens."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rich.filesize import decimal
from support.command_line import run_command
from support.rounding import MEASURE, assert_same
from support.tiny_models import ModelOf

from nope_probe import (
    Ablation,
    Run,
    ablate,
    ablated,
    behaviour,
    capture_scores,
    run_ablations,
    sequences,
)
from nope_probe.run.session import Session
from nope_probe.studies.ablate_page import headline
from nope_probe.studies.ablate_run import Ablate
from nope_probe.studies.behaviour_run import Behaviour
from nope_probe.studies.engine import Engine
from nope_probe.studies.study import Pass, forecast, memory_in_words, seconds_per_token

SMALL = {"n_seqs": 23, "seq_len": 11, "seed": 3}
REMOVED = ("mlp", "w_q+mlp", "w_k", "rope_low")


@pytest.fixture(scope="module")
def study(rope_tiny: Any) -> Run:
    """An attribution with every part that it can have."""
    options = {"folds": 5, "batch_size": 7}
    return run_ablations(rope_tiny, remove=REMOVED, **options, **SMALL)


def test_terms_of_the_lead_add_up_to_it_and_means_over_layers_are_of_their_rows(study: Run) -> None:
    terms, pattern = study.tables["terms"], study.tables["pattern"]
    added = terms[terms["of"] == "lead"].groupby("layer")["size"].sum()
    intact = pattern[pattern["removed"] == "intact"].set_index("layer")
    assert_same(added, intact["lead"], MEASURE)
    means = study.tables["over_layers"].set_index(["removed", "replacement"])
    is_control = pattern["removed"].str.contains("null|shuffled")
    groups = pattern[~is_control].groupby(["removed", "replacement"])
    for name in ("lead", "order", "not_by_distance"):
        assert_same(means[name], groups[name].mean().loc[means.index], MEASURE)
        counts = {place: [0, 0] for place in means.index}
        for place, rows in groups:
            for layer, row in rows.set_index("layer").iterrows():
                low, high = intact.loc[layer, [f"{name}_low", f"{name}_high"]]
                whole, left = intact.loc[layer, name], row[name]
                if low > 0 or high < 0:
                    counts[place][0] += 1
                    counts[place][1] += left < whole / 2 if whole > 0 else left > whole / 2
        ends = [f"{name}_layers", f"{name}_below_half"]
        assert means[ends].to_numpy().tolist() == [counts[place] for place in means.index]


def test_what_the_mask_adds_beyond_distance_is_the_part_with_it_less_that_without(
    study: Run,
) -> None:
    table = study.tables["pattern"].set_index(["removed", "layer"])
    parts, n_layers = table["not_by_distance"], len(table.loc["mask"])
    for whole, name in (("intact", "mask"), ("shuffled", "mask+shuffled")):
        adds = table.loc[name]
        assert_same(adds["mask_adds"], parts[whole] - parts[name], MEASURE)
        assert (adds["mask_adds_low"] <= adds["mask_adds"]).all()
        assert (adds["mask_adds"] <= adds["mask_adds_high"]).all()
    assert table["mask_adds"].notna().sum() == 2 * n_layers


@pytest.mark.parametrize("spec", ["bridge:gpt2", "hooked:llama"])
def test_a_model_of_ones_own_is_studied(spec: str, model_of: ModelOf) -> None:
    model, _ = model_of(spec)
    tokens = torch.randint(200, (19, 11), generator=torch.Generator().manual_seed(0))
    position = "pos_embed" if spec == "bridge:gpt2" else "rope"
    study = run_ablations(model, tokens, remove=["sources"], layers=1, folds=4)
    terms = ["mask", position, f"mask_x_{position}", "without_sources"]
    assert list(study.tables["terms"].query("of == 'pattern'")["term"]) == terms
    assert study.manifest.skip_keys == 1, "whatever tokens the sequences begin with"
    with ablated(model, Ablation(remove=[position])):
        truth = capture_scores(model, tokens, layers=[0]).mean.float().numpy()
    assert_same(study.maps[f"score/{position}"], truth)


def test_few_sequences_are_as_many_folds_and_fewer_than_four_have_no_intervals(
    rope_tiny: Any,
) -> None:
    tokens = sequences(tokenizer=rope_tiny.tokenizer, **SMALL).inputs
    few, same = (
        run_ablations(rope_tiny.model, tokens[:5], remove=["sources"], layers=1, **folds)
        for folds in ({}, {"folds": 5})
    )
    pd.testing.assert_frame_equal(few.tables["pattern"], same.tables["pattern"])
    with pytest.raises(ValueError, match="expected 4 sequences or more for intervals, got 3"):
        run_ablations(rope_tiny.model, tokens[:3])


def test_a_study_is_one_line_and_in_a_notebook_a_row_per_table_and_group_of_maps(
    study: Run,
) -> None:
    assert repr(study).startswith("Run of ")
    assert "\n" not in repr(study)
    tables = {name for name, table in study.tables.items() if len(table)}
    groups = {name.partition("/")[0] for name in study.maps}
    shown = study._repr_html_()
    assert headline(study).html() in shown
    rows = shown.partition(study.headline)[2].split("<tr")[2:]  # after the headings
    assert len(rows) == len(tables) + len(groups)
    assert sum("term/..." in row for row in rows) == 1
    assert not any("lead_low" in row for row in rows)


def test_a_dry_run_lists_every_pass_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_command(ablate, "--n-seqs", "8", "--folds", "4", "--seq-len", "16", "--dry-run")
    printed = capsys.readouterr().out
    header, *rows, last = printed.splitlines()
    assert header.split() == ["pass", "removed", "tokens", "seconds"]
    listed = {row.split()[0]: row.split()[1:] for row in rows}
    assert listed["score/mask+rope"][:2] == ["mask+rope", str(8 * 16)]
    assert listed["score_mean/w_k"][:2] == ["w_k", str(8 * 16)]
    assert "calibration" in listed
    assert f"for {len(rows)} passes" in last
    total = sum(float(columns[-1]) for columns in listed.values())
    assert abs(float(last.split()[1]) - total) < 0.5 + 0.05 * len(rows)  # both are rounded
    assert not list(tmp_path.iterdir())


def test_the_first_batch_of_a_pass_is_timed_by_the_token(
    rope_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(engine: Engine, key: str, ablation: Ablation) -> None:
        engine.stream.advance(5)

    engine = Engine(model=rope_tiny.model, inputs=torch.zeros(13, 7, dtype=torch.int64))
    monkeypatch.setattr("time.monotonic", iter([100.0, 170.0]).__next__)
    assert seconds_per_token(Pass(key="x", engine=engine, read=read)) == 70 / (5 * 7)


def test_written_position_is_measured_once_for_all_passes_of_a_length_and_its_memory_counted(
    tmp_path: Path,
) -> None:
    options = {"model": "nope-tiny", "measures": ("loss", "copy", "order"), "remove": ("written",)}
    settings = behaviour.Settings(n_seqs=23, seq_len=18, out=tmp_path / "run", **options)
    with Session(settings, Behaviour.load).opened() as session:
        passes = [*Behaviour(session).passes()]
        text = forecast(session, passes)
        streams = 2 * 4 * 23 * 18 * 128  # the residual stream and one output of 128 float32
        d_vocab = session.loaded.info.d_vocab
        assert decimal(session.settings.memory(0, 128, 4, d_vocab) + streams) in text
    rows = [line.split() for line in text.splitlines()[1:-1]]
    assert len({row[0] for row in rows}) == len(rows)
    # The copies have one token less than the text; a block runs to its attention, then to its end.
    lengths = {row[0]: int(row[2]) for row in rows if row[0].startswith("positions")}
    assert lengths == {
        f"positions/{name}/{n}": 2 * 23 * n
        for name in ("written", "written_null")
        for n in (18, 17)
    }


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({}, ["intact", "written", "rope", "w_q", "w_k", "w_q+w_k", "w_o", "written_null"]),
        ({"layers": 3}, []),
        ({"data": "random"}, []),
    ],
)
def test_losses_are_read_where_all_layers_run_on_text_and_their_logits_count_as_memory(
    options: dict[str, Any], read: list[str], tmp_path: Path
) -> None:
    settings = ablate.Settings(n_seqs=8, seq_len=17, out=tmp_path / "run", **options)
    with Session(settings, Ablate.load).opened() as session:
        passes = [*Ablate(session).passes()]
        keys = [one.key.split("/")[1] for one in passes if one.reads_logits]
        assert keys == read
        n_maps, info = max(one.maps for one in passes), session.loaded.info
        n_bytes = settings.memory(n_maps, info.d_model, 4) + 4 * 8 * 17 * info.d_vocab * bool(read)
        n_bytes += 2 * 4 * 8 * 17 * info.d_model  # where the position that blocks write is measured
        assert decimal(n_bytes) in memory_in_words(session, passes)
