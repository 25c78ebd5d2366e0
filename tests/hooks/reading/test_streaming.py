"""Sequences are counted exactly once, also after a pass that runs out of memory or is stopped."""

from typing import Any

import pytest
import torch
from support.plain_states import agree
from support.rounding import NETWORK
from support.stream_checkpoints import Recorded, out_of_memory_above
from support.tiny_models import ByName, tokens

from nope_probe.errors import UserError
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_losses, capture_scores, capture_stages

N_SEQS, N_FOLDS = 37, 5


@pytest.mark.parametrize("fits_in_0", [37, 11])
@pytest.mark.parametrize(
    ("fits", "sizes"), [(8, [8]), (5, [8, 4]), (3, [8, 4, 2]), (1, [8, 4, 2, 1])]
)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_batch_that_does_not_fit_is_halved_and_counted_once(
    layer: int, fits: int, sizes: list[int], fits_in_0: int, bridge: ByName
):
    """Blocks that have counted different sequences catch up."""
    model, inputs, checkpoint = bridge("smollm3"), tokens(N_SEQS, seed=3), Recorded()
    keep: dict[str, Any] = {"batch_size": 17, "n_folds": N_FOLDS, "per_head": True}
    expected = capture_scores(model, inputs, **keep)
    with out_of_memory_above(fits_in_0, model, 0), out_of_memory_above(fits, model, layer):
        maps = capture_scores(model, inputs, checkpoint=checkpoint, **keep)
    assert checkpoint.sizes == sizes
    assert agree(maps.folds, expected.folds)
    assert maps.per_head is not None
    assert expected.per_head is not None
    assert agree(maps.per_head, expected.per_head)


def test_stages_and_gains_are_halved_too(bridge: ByName):
    model, inputs = bridge("llama"), tokens(N_SEQS, seed=3)
    stages, gains = capture_stages(model, inputs, n_folds=N_FOLDS), calibrate(model, inputs)
    with out_of_memory_above(7, model, 0):
        halved = capture_stages(model, inputs, n_folds=N_FOLDS)
        for letter, folds in stages.folds.items():
            assert agree(halved.folds[letter], folds)
        for name, c in calibrate(model, inputs).gains["identity"].items():
            assert c == pytest.approx(gains.gains["identity"][name], rel=NETWORK)


@pytest.mark.parametrize("kind", ["bridge", "hooked"])
@pytest.mark.parametrize("wrong", [-1, 263, 2**31])
def test_a_token_that_the_model_lacks_is_refused_before_anything_is_run(
    wrong: int, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    model, inputs = request.getfixturevalue(kind)("llama"), tokens(N_SEQS, seed=3)
    inputs[0, :2] = torch.tensor([0, 262])  # the first and the last token there is
    calls = (
        lambda: capture_scores(model, inputs),
        lambda: capture_stages(model, inputs),
        lambda: capture_losses(model, inputs),
        lambda: calibrate(model, inputs),
    )
    for call in calls:
        call()
    inputs[-1, -1] = wrong
    monkeypatch.setattr("nope_probe.hooks.reading.streaming.run_batch", None)
    for call in calls:
        with pytest.raises(
            UserError, match=f"^token {wrong}: the model's tokens are from 0 to 262"
        ):
            call()


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_of_no_sequences_is_an_error(batch_size: int, bridge: ByName):
    with pytest.raises(ValueError, match=f"batches of 1 sequence or more, got {batch_size}"):
        capture_scores(bridge("llama"), tokens(N_SEQS), batch_size=batch_size)
