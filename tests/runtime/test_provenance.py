"""A manifest records how a run was made."""

import sys
import time

import numpy as np
import pytest
import torch

from nope_probe.data.sequences import Sequences
from nope_probe.experiments.simulation.run import Settings
from nope_probe.models.load import load
from nope_probe.runtime.identity import (
    command_line,
    input_arrays,
    input_record,
    provenance,
)
from nope_probe.runtime.session import Session


def test_the_command_line_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/bin/nope-probe-scores", "--data", "my file.txt"])
    assert command_line() == "nope-probe-scores --data 'my file.txt'"


def test_tokens_and_vectors_are_recorded_under_their_own_names() -> None:
    tokens, vectors = torch.arange(6).view(2, 3), torch.ones(2, 3, 5)
    inputs = Sequences(inputs=tokens, name="text", bos=True)
    assert list(input_arrays(inputs)) == ["tokens"]
    np.testing.assert_array_equal(input_arrays(inputs)["tokens"], tokens)
    assert list(input_arrays(Sequences(inputs=vectors, name="gaussian"))) == ["vectors"]
    record = input_record(inputs, 1, torch.tensor([1, 1]))
    assert (record["data"]["name"], record["data"]["bos"], record["skip_keys"]) == ("text", True, 1)
    assert (record["documents"], record["fold_sizes"]) == (None, [1, 1])
    assert record["data"]["sha256"] != Sequences(inputs=tokens + 1, name="text").sha256


def test_the_documents_of_sequences_are_recorded() -> None:
    inputs = Sequences(
        inputs=torch.arange(6).view(3, 2), name="text", documents=torch.tensor([7, 2, 7])
    )
    np.testing.assert_array_equal(input_arrays(inputs)["documents"], [7, 2, 7])
    assert input_record(inputs, 1, torch.tensor([2, 1]))["documents"] == 2


def test_a_clock_that_is_set_back_does_not_shorten_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("simulate", Settings())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    record = provenance(load("parameter-free", n_layers=1), "", {}, session.started)
    assert 0 <= record["seconds"] < 600


def test_model_versions_device_and_settings_are_recorded() -> None:
    loaded = load("nope-tiny", n_layers=1)
    record = provenance(loaded, "abc", {"seed": 3}, started=0.0)
    assert record["settings"] == {"seed": 3}
    assert record["model"]["name"] == "nope-tiny"
    assert record["model"]["weights"] == "abc"
    assert (record["device"], record["dtype"]) == ("cpu", "float32")
    assert record["versions"]["torch"] == torch.__version__
    assert record["seconds"] > 0
