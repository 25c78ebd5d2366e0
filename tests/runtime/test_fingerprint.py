"""A fingerprint changes with each weight and setting that numbers depend on, and with no other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nope_probe.models.load import load
from nope_probe.models.parameter_free import build, parameter_free
from nope_probe.runtime.checksums import BLOCK, tensors_checksum
from nope_probe.runtime.fingerprint import configuration, fingerprint


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


def test_half_the_rows_of_a_query_projection_count():
    model = load("rope-tiny", n_layers=2).model
    before = fingerprint(model)
    assert fingerprint(load("rope-tiny", n_layers=2).model) == before
    weight = dict(model.named_parameters())
    name = next(
        each for each in weight if each.endswith(("W_Q", "q_proj._original_component.weight"))
    )
    with torch.no_grad():
        weight[name][-1, ..., -1] = 0
    assert fingerprint(model) != before


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
    monkeypatch.setattr("nope_probe.runtime.checksums.BLOCK", 20)
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
