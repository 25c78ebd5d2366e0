"""The explorer of a model: its arrays against captures of the ablated model, one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from support.rounding import MEASURE, assert_same

from nope_probe import attribute, figures
from nope_probe.analyses.pattern import measure
from nope_probe.figures.explorer import Explorer
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.maps.centred import row_centred

N, SEQS = 13, 11
REMOVED: dict[str, tuple[str, ...]] = {"intact": (), "mask": ("mask",), "w_q+w_k": ("w_q", "w_k")}


@pytest.fixture(scope="module")
def model() -> Any:
    from nope_probe.models.load import load

    return load("nope-tiny", n_layers=2).model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 99, (SEQS, N), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def explorer(model: Any, tokens: torch.Tensor) -> Explorer:
    return figures.explore(model, tokens, remove=["qk"], n_folds=4, batch_size=5)


def test_patterns_and_numbers_are_those_of_the_ablated_model(
    explorer: Explorer, model: Any, tokens: torch.Tensor
) -> None:
    view = explorer.view
    assert view.panels == ("mean over heads", "H0", "H1", "H2", "H3")
    assert (view.layers, view.conditions) == ((0, 1), tuple(REMOVED))
    gains, maps = calibrate(model, tokens), {}
    for removed in REMOVED.values():
        ablation = Ablation(remove=removed, replacement="mean")
        with ablated(model, ablation, gains if "w_q" in removed else None):
            maps[removed] = capture_scores(model, tokens, n_folds=4, per_head=True)
    attributed = attribute({name: captured.folds for name, captured in maps.items()}, skip_keys=1)
    for place, (name, removed) in enumerate(REMOVED.items()):
        scores = maps[removed]
        assert_same(view.maps[place, :, 0], row_centred(scores.mean, 1).numpy(), MEASURE)
        per_head = torch.einsum("f,f...->...", scores.counts / SEQS, scores.per_head.float())
        assert_same(view.maps[place, :, 1:], row_centred(per_head, 1), MEASURE)
        lead = scores.mean[:, 12, 0] - scores.mean[:, 12, 1:12].mean(-1)
        np.testing.assert_allclose(view.leads[place, :, 0, 12], lead, rtol=MEASURE, atol=1e-9)
        for layer, measures in measure(scores).items():
            shown = view.measures[place, layer, 0, :, 0]
            expected = [measures.lead.value, measures.amplitude.value]
            np.testing.assert_allclose(shown[:2], expected, rtol=MEASURE, atol=1e-6)
            kept = attributed[layer].conditions[name].kept.value
            np.testing.assert_allclose(shown[2], kept, rtol=1e-4, atol=1e-4)


def test_it_opens_without_the_mask_on_the_shown_layer_where_nope_keeps_nothing() -> None:
    from nope_probe import load, sequences

    loaded = load("nope-tiny", n_layers=3)
    text = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=24)
    explorer = figures.explore(loaded.model, text, remove=["sources"])
    assert explorer.view.conditions[explorer.removed] == "mask"
    whole, left = explorer.view.measures[:, 2, 0, 2, 0]
    assert abs(left) < 0.05 * whole
    assert explorer.layer == 2


def test_long_maps_are_pooled_and_numbers_are_of_the_whole(
    explorer: Explorer, model: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.studies.explore.MAX_POSITIONS", 5)
    small = figures.explore(model, tokens, remove=["sources"], n_folds=4, batch_size=5).view
    assert (small.block, small.maps.shape[-1]) == (3, 5)
    whole = explorer.view
    pooled = whole.maps[0, 1, 0, 9:12, 3:6].mean()
    assert small.maps[0, 1, 0, 3, 1] == pytest.approx(pooled, rel=MEASURE)
    lead = whole.leads[0, 1, 0, 9:12].mean()
    assert small.leads[0, 1, 0, 3] == pytest.approx(lead, rel=1e-4)
    np.testing.assert_allclose(small.measures[0], whole.measures[0], rtol=1e-6)
