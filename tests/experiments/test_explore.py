"""The explorer of a model: its arrays against captures of the ablated model, one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.rounding import MEASURE, assert_same

from nope_probe import figures
from nope_probe.analyses.pattern import measure
from nope_probe.analyses.pattern_changes import kept_pattern
from nope_probe.analyses.shapley import player_set
from nope_probe.conditions import INTACT, MASK
from nope_probe.errors import UserError
from nope_probe.experiments.engine import Engine
from nope_probe.experiments.explorer import explorer_of, note_on, pattern_view
from nope_probe.figures.explorer import Explorer
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.hooks.removing.removals import Ablation, Substitute
from nope_probe.maps.centred import row_centred
from nope_probe.maps.layers import patterns_of_others, set_apart
from nope_probe.maps.maps import ScoreMaps, packed_tensors, stored_layers

pytestmark = pytest.mark.usefixtures("unenforced")

N, SEQS = 13, 11
REMOVED: list[Sequence[Any]] = [(), ("mask",), ("w_q", "w_k"), ("mask", "w_q", "w_k")]


@pytest.fixture(scope="module")
def model() -> Any:
    from nope_probe.models.load import load

    return load("nope-tiny", n_layers=2).model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 99, (SEQS, N), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def maps(model: Any, tokens: torch.Tensor) -> ScoreMaps:
    return capture_scores(model, tokens, n_folds=4)


@pytest.fixture(scope="module")
def explorer(model: Any, tokens: torch.Tensor) -> Explorer:
    return figures.explore(model, tokens, players=["mask", "qk"], n_folds=4, batch_size=5)


def test_patterns_are_those_of_the_ablated_model(
    explorer: Explorer, model: Any, tokens: torch.Tensor
) -> None:
    patterns = explorer.view
    assert patterns.panels == ("mean over heads", "H0", "H1", "H2", "H3")
    assert patterns.layers == (0, 1)
    gains = calibrate(model, tokens)
    for number, removed in enumerate(REMOVED):
        with ablated(model, Ablation(remove=removed), gains if "w_q" in removed else None):
            scores = capture_scores(model, tokens, n_folds=4, per_head=True)
        expected = row_centred(scores.mean, 1).numpy()
        assert_same(patterns.maps[number, :, 0], expected, MEASURE)
        per_head = scores.per_head.float()
        head = row_centred(torch.einsum("f,f...->...", scores.counts / SEQS, per_head), 1)
        assert_same(patterns.maps[number, :, 1:], head, MEASURE)
        shown = patterns.measures[number, :, 0, 0, 0]
        amplitudes = [measures.amplitude_others.value for measures in measure(scores)]
        assert_same(shown, np.array(amplitudes), MEASURE)


def test_the_intact_model_keeps_all_of_its_pattern_and_without_mask_nope_has_none() -> None:
    from nope_probe import load, sequences

    loaded = load("nope-tiny", n_layers=3)
    text = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=24)
    explorer = figures.explore(loaded.model, text, players=["sources"])
    assert explorer.players == {"mask": ["mask"]}
    assert explorer.removed == ["mask"]
    [intact, without] = explorer.view.measures[:, 2, 0, 2]
    assert intact == pytest.approx([1, 1, 1])
    assert without[1] < 0 < without[2] < 0.5
    assert explorer.layer == 2, "it opens on the layer with the strongest pattern"


@pytest.mark.parametrize(
    ("players", "message"),
    [
        (["rope"], "no rope; it has mask"),
        ([f"rope[{pair}:{pair + 1}]" for pair in range(11)], "11 players have 2,048 conditions"),
    ],
)
def test_a_users_mistake_is_named_before_anything_is_run(
    players: list[str], message: str, model: Any, tokens: torch.Tensor
) -> None:
    with pytest.raises(UserError, match=message):
        figures.explore(model, tokens, players=players)


def test_long_maps_are_pooled_and_measures_are_of_the_whole(
    maps: ScoreMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pattern_view([maps], maps.layers)
    monkeypatch.setattr("nope_probe.experiments.explorer.MAX_POSITIONS", 5)
    small = pattern_view([maps], maps.layers)
    assert (small.block, small.maps.shape[-1]) == (3, 5)
    pooled = whole.maps[0, 1, 0, 9:12, 3:6].mean()
    assert small.maps[0, 1, 0, 3, 1] == pytest.approx(pooled, rel=MEASURE)
    np.testing.assert_array_equal(small.measures, whole.measures)


def test_an_ablation_runs_explorer_takes_the_conditions_of_the_run(
    maps: ScoreMaps, model: Any, tokens: torch.Tensor
) -> None:
    intact, mask = INTACT, MASK
    captured = {intact: maps, mask: capture_scores(model, tokens.flip(1), n_folds=4)}
    stored = {
        key: set_apart(stored_layers(packed_tensors(maps_of)), 1)
        for key, maps_of in captured.items()
    }
    kept = {
        key: [
            kept_pattern(*patterns_of_others([layer, stored[intact][number]]))
            for number, layer in layers.items()
        ]
        for key, layers in stored.items()
    }
    result = explorer_of(stored, player_set(["mask"]), kept)
    assert result.players == {"mask": ["mask"]}
    expected = row_centred(captured[mask].mean, 1).numpy()
    assert_same(result.view.maps[1, :, 0], expected)
    strengths = np.nanstd(row_centred(captured[intact].mean, 1).numpy(), axis=(1, 2))
    assert result.layer == np.argmax(strengths)


def test_the_note_states_of_which_queries_locality_is(model: Any) -> None:
    short, long = (Engine(model=model, inputs=torch.zeros(5, n)) for n in (512, 1024))
    assert "query" not in note_on(short, Substitute())
    assert "1 query in 4, counted from query 0" in note_on(long, Substitute())
