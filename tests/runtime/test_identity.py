"""A model, data or file that changed is noticed before it is used, and nothing else is."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nope_probe.errors import UserError
from nope_probe.experiments.circuit import run as circuit
from nope_probe.experiments.scores.run import Settings, run
from nope_probe.experiments.simulation import run as simulation
from nope_probe.models.load import load
from nope_probe.models.parameter_free import build, parameter_free
from nope_probe.runtime.folder import checkpoint_dir, read_run
from nope_probe.runtime.identity import (
    BLOCK,
    LARGE,
    configuration,
    fingerprint,
    record_sources,
    tensors_checksum,
    validate_unchanged,
)
from nope_probe.runtime.session import Session


class Bare(torch.nn.Module):
    """Weights of odd kinds: quantised ones are buffers, and some are views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(35.0).view(5, 7).T.bfloat16())
        self.register_buffer("codes", torch.arange(11, dtype=torch.uint8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


@pytest.mark.parametrize("name", ["weight", "codes", "scale"])
def test_every_value_of_a_weight_counts(name: str):
    for index in range(getattr(Bare(), name).numel()):
        model = Bare()
        before = fingerprint(model)
        tensor = getattr(model, name).data
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), tensor.shape))
        tensor[place] += 1
        assert fingerprint(model) != before


def test_what_is_not_stored_does_not_count():
    model = Bare()
    before = fingerprint(model)
    model.cache += 1
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "edit", [{"rms_norm_eps": 1e-2}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7}}]
)
def test_the_configuration_counts(edit: dict, tiny: Callable, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny("llama").folder)
    prints = []
    for changes in ({}, edit):
        config = AutoConfig.from_pretrained(tiny("llama").folder)
        config.update(changes)
        model.config = config
        prints.append(fingerprint(_in_bridge(model)))
    assert prints[0] != prints[1]


def _in_bridge(model: torch.nn.Module) -> torch.nn.Module:
    """The part of a bridge that a fingerprint reads."""
    bridge = torch.nn.Module()
    bridge.original_model = model
    return bridge


def test_the_place_of_a_model_does_not_count(tiny: Callable, tmp_path: Path):
    there = tmp_path / "elsewhere"
    there.mkdir()
    for path in tiny("llama").folder.iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    models = [load(str(folder)).model for folder in (tiny("llama").folder, there)]
    assert configuration(models[0])["rms_norm_eps"] == models[0].original_model.config.rms_norm_eps
    assert len({fingerprint(model) for model in models}) == 1


def test_shapes_names_and_dtypes_count_and_blocks_do_not(monkeypatch: pytest.MonkeyPatch):
    values = torch.arange(12.0)
    variants = [
        {"a": values},
        {"b": values},
        {"a": values.view(3, 4)},
        {"a": values.view(torch.int32)},
        {"a": values[:6], "b": values[6:]},
    ]
    found = [tensors_checksum(each) for each in variants]
    assert len(set(found)) == len(variants)
    monkeypatch.setattr("nope_probe.runtime.identity.BLOCK", 20)
    assert BLOCK > 20
    assert [tensors_checksum(each) for each in variants] == found


def test_a_parameter_free_model_is_the_same_whatever_was_drawn_before():
    config, found = parameter_free(n_layers=2, d_model=6), set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        found.add(fingerprint(build(config)))
        assert torch.equal(torch.rand(3), expected)
    assert len(found) == 1


SMALL = {"layers": 1, "n_seqs": 8, "seq_len": 7, "folds": 4}


@pytest.fixture
def settings(tiny: Callable, tmp_path: Path) -> Settings:
    """A run on a model folder and a data file of its own."""
    shutil.copytree(tiny("llama").folder, tmp_path / "model")
    rows = [json.dumps({"text": f"document {i} of many words " * 9}) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    model, data = str(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    return Settings(model=model, data=data, out=tmp_path / "run", **SMALL)


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder: Path) -> None:
    """Zero the last rows of one projection."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][30:] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_data(folder: Path) -> None:
    file = folder.parent / "rows.jsonl"
    file.write_text(file.read_text().replace("many", "some"))


EDITS = {
    "weights": (edit_weights, "model"),
    "epsilon": (lambda folder: edit_config(folder, rms_norm_eps=0.1), "model"),
    "rope": (
        lambda folder: edit_config(
            folder, rope_parameters={"rope_type": "default", "rope_theta": 50.0}
        ),
        "model",
    ),
    "data": (edit_data, "data"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_changed_between_kill_and_resume_is_refused(edit: str, settings: Settings):
    with Session("scores", settings) as session:
        session.sequences()  # the process ends here
    change, what = EDITS[edit]
    change(Path(settings.model))
    with pytest.raises(UserError, match=f"holds an unfinished run with other .*{what}"):
        run(settings)
    assert not settings.out.exists()


def test_weights_alone_tell_two_models_apart(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Settings, "sources", lambda self: {})
    with Session("scores", settings) as session:
        session.sequences()
    edit_config(Path(settings.model), rms_norm_eps=0.1)
    with pytest.raises(UserError, match="holds an unfinished run with other weights; remove it"):
        run(settings)


@pytest.mark.parametrize("edit", EDITS)
def test_what_changed_since_a_run_was_finished_is_refused(edit: str, settings: Settings):
    run(settings)
    change, what = EDITS[edit]
    change(Path(settings.model))
    with pytest.raises(UserError, match=f"the {what} has changed since the run in .*choose ano"):
        run(settings)


def test_what_changes_no_number_is_accepted(settings: Settings, capfd: pytest.CaptureFixture[str]):
    run(settings)
    edit_config(Path(settings.model), transformers_version="0.1", _name_or_path="elsewhere")
    (Path(settings.model) / "README.md").write_text("a model")
    capfd.readouterr()
    assert run(settings) == settings.out
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("finished before, in ")


def test_what_cannot_be_compared_is_said(settings: Settings, capfd: pytest.CaptureFixture[str]):
    run(settings)
    shutil.rmtree(settings.model)
    Path(settings.data).unlink()
    capfd.readouterr()
    run(settings)
    line, shown = capfd.readouterr().err.splitlines()
    assert shown.startswith("finished before, in ")
    assert line.endswith("whether its model and data changed since was not compared")


def test_large_files_are_known_by_size_and_time_of_change(tmp_path: Path):
    big, small = tmp_path / "big.jsonl", tmp_path / "small.jsonl"
    with big.open("wb") as file:
        file.truncate(LARGE)  # sparse
    small.write_text("{}")
    (before,) = record_sources({"data": tmp_path}).values()
    assert {name: [*each] for name, each in before.items()} == {
        "small.jsonl": ["sha256"],
        "big.jsonl": ["size", "modified"],
    }
    small.touch()
    assert validate_unchanged(tmp_path, {"data": before}, {"data": tmp_path}) == []
    os.utime(big, ns=(1, 1))
    with pytest.raises(UserError, match=r"the data has changed since .*big\.jsonl"):
        validate_unchanged(tmp_path, {"data": before}, {"data": tmp_path})


def flip(path: Path, where: float) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_flipped_bit_of_any_finished_file_is_noticed(settings: Settings):
    run(settings)
    names = files_of(settings.out)
    assert "manifest.json" in names
    assert len(names) >= 5
    for name in names:
        path = settings.out / name
        content = path.read_bytes()
        for where in (0.1, 0.5, 0.9):
            flip(path, where)
            for use in (run, lambda _: read_run(settings.out)):
                with pytest.raises(UserError, match="run"):
                    use(settings)
        path.write_bytes(content)
    run(settings)


def test_an_edited_manifest_is_noticed(settings: Settings):
    run(settings)
    path = settings.out / "manifest.json"
    manifest = json.loads(path.read_text())
    for edit in ({"seconds": 1.0}, {"checksums": {}}, {"sources": {}}, {"complete": False}):
        path.write_text(json.dumps(manifest | edit))
        with pytest.raises(UserError, match=r"manifest\.json is not the file that the run wrote"):
            run(settings)
    older = {name: value for name, value in manifest.items() if name != "checksum"}
    path.write_text(json.dumps(older))
    with pytest.raises(UserError, match="holds a run of an older version, or an edited one"):
        run(settings)
    path.write_text(json.dumps(manifest))
    run(settings)


def test_tables_that_the_run_did_not_write_are_not_read(settings: Settings):
    run(settings)
    (settings.out / "extra.csv").write_text("layer\n1\n")
    assert "extra" not in read_run(settings.out).tables


def test_a_simulations_files_are_checked(tmp_path: Path):
    small = simulation.Settings(n_samples=64, n_layers=2, seq_len=7, out=tmp_path / "run")
    folder = simulation.run(small)
    assert read_run(folder).tables["layers"]["layer"].tolist() == [0, 1, 0, 1]
    table = folder / "layers.csv"
    table.write_text(table.read_text().replace("flat", "increasing", 1) + " ")
    for use in (simulation.run, lambda _: read_run(folder)):
        with pytest.raises(UserError, match=r"layers\.csv is not the file that the run wrote"):
            use(small)


def test_a_broken_record_of_an_unfinished_run_is_one_line(settings: Settings):
    with Session("scores", settings) as session:
        session.sequences()
    for content in ("", "[]", "{", "[" * 100_000):
        (checkpoint_dir(settings.out) / "about.json").write_text(content)
        with pytest.raises(UserError, match=r"about\.json is broken; remove .*unfinished and run"):
            run(settings)


def test_every_session_checks_a_finished_runs_files(settings: Settings):
    shared = {"model": settings.model, "data": settings.data, "out": settings.out}
    chosen = circuit.Settings(**shared, seq_len=16, folds=4, n_seqs=8)
    circuit.run(chosen)
    (settings.out / "stages.csv").write_text((settings.out / "stages.csv").read_text() + " ")
    with pytest.raises(UserError, match=r"stages\.csv is not the file that the run wrote"):
        circuit.run(chosen)
