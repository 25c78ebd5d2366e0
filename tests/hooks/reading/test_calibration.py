"""Gains equal those of plain transformers' own projections."""

import pytest
import torch
from support.hooked_runs import hooks_left
from support.tiny_models import ByName, ModelOf, tokens

from nope_probe import Calibration, UserError, ablated, calibrate, untrained
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.calibration import weights_checksum


def test_a_calibration_survives_as_tensors(bridge: ByName) -> None:
    for seed in (None, 3):
        measured = calibrate(bridge("llama"), tokens(7), seed=seed, heads={1: [4]})
        again = Calibration.from_tensors(measured.to_tensors())
        assert (again.gains, again.seed, again.checksum) == (measured.gains, seed, "")
        assert all(torch.equal(mean, again.means[name]) for name, mean in measured.means.items())
        rows = [one.patterns[1].rows(slice(None)) for one in (again, measured)]
        assert torch.equal(*rows)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_an_ablated_model_is_not_calibrated(spec: str, model_of: ModelOf) -> None:
    model = model_of(spec)[0]
    refused = pytest.raises(UserError, match=r"^the model is ablated: calibrate it before")
    with ablated(model, "mask"), refused:
        calibrate(model, tokens(7))
    assert not hooks_left(model)


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-rope"])
def test_a_calibration_serves_the_model_and_weights_that_it_was_measured_on(
    spec: str, model_of: ModelOf
) -> None:
    model, inputs = model_of(spec)[0], tokens(7)

    def run(calibration: Calibration) -> torch.Tensor:
        with torch.inference_mode(), ablated(model, "w_q", calibration):
            return model(inputs)

    refused = pytest.raises(ValueError, match=r"^the calibration belongs to another model")
    own, other = calibrate(model, inputs), calibrate(model_of("bridge:phi3")[0], inputs)
    expected = run(own)
    with refused:
        run(other)
    with untrained(model):
        run(calibrate(model, inputs))
        with refused:
            run(own)
    entry = layers_of(model)[0].weight("w_v").data
    before = entry[0, 1].clone()
    entry[0, 1] += 1  # as a user edits a weight, which no version counter of torch counts
    with refused:
        run(own)
    entry[0, 1] = before
    assert torch.equal(run(own), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (7,), (8,), (3, 5), (2, 3, 8)])
def test_the_checksum_of_weights_notices_every_entry_and_their_order(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    stored = torch.arange(1.0, 60.0).to(dtype)  # the weight begins at an odd place of its storage
    size = torch.Size(shape).numel()
    holder, weight = torch.nn.Module(), stored[1 : 1 + size].view(shape)
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    before, changed = weights_checksum(holder), []
    for index in range(size):
        stored[1 + index] += 1
        changed.append(weights_checksum(holder))
        stored[1 + index] -= 1
    assert weights_checksum(holder) == before
    for dim in range(len(shape)):  # entries in another order
        holder.weight = torch.nn.Parameter(weight.flip(dim), requires_grad=False)
        changed.append(weights_checksum(holder))
    assert before not in changed
