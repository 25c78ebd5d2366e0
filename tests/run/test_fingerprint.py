"""A model, data or file that changed is noticed before it is used, and nothing else is."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import ByName, change
from transformers import AutoConfig, AutoModelForCausalLM

from nope_probe import Sequences, UserError, load
from nope_probe.run.folder import LARGE, record_sources, validate_unchanged
from nope_probe.run.manifest import RunData
from nope_probe.run.processes import checkpoint_dir
from nope_probe.run.session import Session, fingerprint, input_arrays, numerical_settings
from nope_probe.studies.ablate import Settings
from nope_probe.studies.ablate_run import Ablate


class Bare(torch.nn.Module):
    """Weights of odd kinds: quantised ones are buffers, and some are views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(35.0).view(5, 7).T.bfloat16())
        self.register_buffer("codes", torch.arange(11, dtype=torch.uint8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


@pytest.mark.parametrize("name", ["weight", "codes", "scale", "cache"])
def test_every_value_of_a_weight_or_buffer_counts(name: str) -> None:
    for index in range(getattr(Bare(), name).numel()):
        model = Bare()
        before = fingerprint(model)
        tensor = getattr(model, name).data
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), tensor.shape))
        tensor[place] += 1
        assert fingerprint(model) != before


def test_shapes_names_and_dtypes_count() -> None:
    values = torch.arange(12.0)
    variants = [{"a": values}, {"b": values}, {"a": values.view(3, 4)}]
    variants += [{"a": values.view(torch.int32)}, {"a": values[:6], "b": values[6:]}]
    found = set()
    for tensors in variants:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        found.add(fingerprint(module))
    assert len(found) == len(variants)


@pytest.mark.parametrize(
    "edit", [{"rms_norm_eps": 1e-2}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7}}]
)
def test_the_configuration_counts(edit: dict, tiny: ByName) -> None:
    model, prints = AutoModelForCausalLM.from_pretrained(tiny("llama").folder), []
    for changes in ({}, edit):
        config = AutoConfig.from_pretrained(tiny("llama").folder)
        config.update(changes)
        model.config = config
        bridge = torch.nn.Module()  # the part of a bridge that a fingerprint reads
        bridge.original_model = model
        prints.append(fingerprint(bridge))
    assert prints[0] != prints[1]


def test_the_place_of_a_model_does_not_count(tiny: ByName, tmp_path: Path) -> None:
    there = shutil.copytree(tiny("llama").folder, tmp_path / "elsewhere")
    models = [load(str(folder)).model for folder in (tiny("llama").folder, there)]
    assert (
        numerical_settings(models[0])["rms_norm_eps"]
        == models[0].original_model.config.rms_norm_eps
    )
    assert len({fingerprint(model) for model in models}) == 1


@pytest.fixture
def settings(tiny: ByName, tmp_path: Path) -> Settings:
    """A run on a model folder and a data file of its own."""
    model, data = shutil.copytree(tiny("llama").folder, tmp_path / "model"), tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": f"document {i} of many words " * 9}) for i in range(9)]
    data.write_text("\n".join(rows))
    small = {"layers": 1, "n_seqs": 8, "seq_len": 11, "folds": 4}
    return Settings(model=str(model), data=str(data), out=tmp_path / "run", **small)


def edit_weights(folder: Path) -> None:
    """Zero the last rows of one projection."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][30:] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_data(folder: Path) -> None:
    file = folder.parent / "rows.jsonl"
    file.write_text(file.read_text().replace("many", "some"))


@pytest.mark.parametrize(("edit", "what"), [(edit_weights, "model"), (edit_data, "data")])
def test_what_changed_between_kill_and_resume_is_refused(
    edit: Callable, what: str, settings: Settings
) -> None:
    with Session(settings).opened() as session:
        session.sequences()  # the process ends here
    edit(Path(settings.model))
    with pytest.raises(UserError, match=f"holds an unfinished run with other .*{what}"):
        Ablate.run(settings)
    assert not settings.out.exists()


def test_what_changed_since_a_run_was_finished_is_refused_and_what_changes_no_number_is_not(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    Ablate.run(settings)
    folder = Path(settings.model)
    change(folder, transformers_version="0.1", _name_or_path="elsewhere")
    (folder / "README.md").write_text("a model")
    shown_again(settings, capfd)
    for edit, what in ((edit_data, "data"), (edit_weights, "model")):  # which is compared first
        edit(folder)
        with pytest.raises(UserError, match=f"the {what} has changed since the run in .*choose an"):
            Ablate.run(settings)
    shutil.rmtree(settings.model)
    Path(settings.data).unlink()
    shown_again(settings, capfd)


def shown_again(settings: Settings, capfd: pytest.CaptureFixture[str]) -> None:
    """Run a finished run again, which may only show it."""
    capfd.readouterr()
    assert Ablate.run(settings) == settings.out
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("finished before, in ")


def test_large_files_are_known_by_size_and_time_of_change(tmp_path: Path) -> None:
    big, small = tmp_path / "big.jsonl", tmp_path / "small.jsonl"
    with big.open("wb") as file:
        file.truncate(LARGE)  # sparse
    small.write_text("{}")
    (before,) = record_sources({"data": tmp_path}).values()
    assert {name: [*record] for name, record in before.items()} == {
        "small.jsonl": ["sha256"],
        "big.jsonl": ["size", "modified"],
    }
    small.touch()
    validate_unchanged(tmp_path, {"data": before}, {"data": tmp_path})
    os.utime(big, ns=(1, 1))
    with pytest.raises(UserError, match=r"the data has changed since .*big\.jsonl"):
        validate_unchanged(tmp_path, {"data": before}, {"data": tmp_path})


def test_a_broken_record_of_an_unfinished_run_is_one_line(settings: Settings) -> None:
    with Session(settings).opened() as session:
        session.sequences()
    (checkpoint_dir(settings.out) / "about.json").write_text("[]")
    with pytest.raises(UserError, match=r"about\.json is broken; remove .*unfinished and run"):
        Ablate.run(settings)


def test_tokens_vectors_and_documents_are_recorded_under_their_own_names() -> None:
    tokens, documents = torch.arange(6).view(3, 2), torch.tensor([7, 2, 7])
    inputs = Sequences(inputs=tokens, name="text", bos=True, documents=documents)
    arrays = input_arrays(inputs)
    np.testing.assert_array_equal(arrays["tokens"], tokens)
    np.testing.assert_array_equal(arrays["documents"], documents)
    vectors = Sequences(inputs=torch.ones(2, 3, 5), name="gaussian")
    assert list(input_arrays(vectors)) == ["vectors"]
    assert inputs.sha256 != Sequences(inputs=tokens + 1, name="text").sha256


def test_sequences_model_versions_device_settings_and_time_are_recorded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, documents = torch.arange(10).view(5, 2), torch.tensor([7, 2, 7, 5, 9])
    inputs = Sequences(inputs=tokens, name="text", bos=True, documents=documents)
    with Session(settings).opened() as session:
        monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that is set back shortens no run
        manifest = session.manifest_of(inputs)
    assert manifest.settings == settings.recorded()
    assert manifest.model is not None
    assert manifest.model.name == settings.model
    assert manifest.model.weights == fingerprint(session.loaded.model)
    assert (manifest.device, manifest.dtype) == ("cpu", "float32")
    # A wheel with CUDA says so in the module alone: 2.13.0 is 2.13.0+cu130 there.
    assert torch.__version__.startswith(manifest.versions["torch"])
    assert 0 <= manifest.seconds < 600
    data = RunData(name="text", bos=True, sha256=inputs.sha256)
    assert (manifest.data, manifest.documents, manifest.fold_sizes) == (data, 4, (2, 1, 1, 1))
    assert (manifest.skip_keys, manifest.distinct_sequences) == (1, 5)
