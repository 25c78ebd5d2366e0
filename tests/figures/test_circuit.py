"""The circuit figure: its maps, the words on its arrows, its switch."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from nope_probe import figures
from nope_probe.figures.stages import COSINES, RAW, circuit, cosines
from nope_probe.figures.style import DIVERGING
from nope_probe.stages import LETTERS

N = 11


def maps(letters: Iterable[str] = LETTERS, seed: int = 0) -> dict[str, np.ndarray]:
    """Return Gram maps of random vectors, and causal score maps for (b) and (i)."""
    random = np.random.default_rng(seed)
    result = {}
    for letter in letters:
        vectors = random.standard_normal((N, 17)).astype(np.float32)
        gram = vectors @ vectors.T
        result[letter] = np.where(np.tri(N, dtype=bool), gram, np.nan) if letter in "bi" else gram
    return result


def drawn(**changes: Any) -> go.Figure:
    stages = changes.pop("maps", maps())
    return circuit(stages, **{"layer": 2, **changes})


def text_in(figure: go.Figure) -> list[str]:
    return [mark.text for mark in figure.layout.annotations if mark.text]


def visible(figure: go.Figure, view: str) -> list[go.Heatmap]:
    flags = figure.layout.meta["views"][view]
    return [trace for trace, shown in zip(figure.data, flags, strict=True) if shown]


def test_every_stage_is_a_heat_map_in_the_order_of_the_flow() -> None:
    for _ in range(2):  # a module of the same name would take the place of the function
        assert figures.circuit is circuit
    truth = maps()
    figure = drawn()
    shown = [trace for trace in figure.data if trace.visible]
    assert [trace.name for trace in shown] == list("abcdefghi")
    for trace in shown:
        np.testing.assert_array_equal(trace.z, truth[trace.name].astype(np.float32))
        assert ("nat" in trace.hovertemplate) == (trace.name in "bi")


def test_arrows_name_their_operations_and_only_those_that_the_model_has() -> None:
    texts = text_in(drawn())
    for words in ("LN", "mask<br>softmax<br>W<sub>V</sub>", "W<sub>O</sub>", "FFN", "next LN"):
        assert words in texts
    assert texts.count("W<sub>Q</sub><br>W<sub>K</sub>") == texts.count("residual") == 2
    assert not any("RoPE" in text or "<s>" in text or "✕" in text for text in texts)
    with_rope = text_in(drawn(components=("mask", "rope", "w_q", "w_k", "w_v", "w_o", "mlp")))
    assert with_rope.count("W<sub>Q</sub><br>W<sub>K</sub><br>RoPE") == 2


def test_removed_arrows_are_struck_through_and_dotted() -> None:
    figure = drawn(removed=("mask", "w_k", "mlp", "norms"))
    texts = text_in(figure)
    struck = {
        "<s>mask</s><br>softmax<br>W<sub>V</sub>": 1,
        "W<sub>Q</sub><br><s>W<sub>K</sub></s>": 2,
        "<s>FFN</s>": 1,
        "LN<br><s>weights</s>": 2,
        "next LN<br><s>weights</s>": 1,
    }
    assert {text: texts.count(text) for text in texts if "<s>" in text} == struck
    n_arrows = sum(struck.values())
    assert sum("✕" in text for text in texts) == n_arrows
    assert sum(shape.line.dash == "dot" for shape in figure.layout.shapes) == n_arrows


def by_hand(gram: np.ndarray) -> np.ndarray:
    lengths = np.diagonal(gram) ** 0.5
    return gram / np.outer(lengths, lengths)


def test_a_comparison_offers_both_models_their_difference_and_cosines() -> None:
    truth, normalised, reference = maps(seed=0), maps(seed=2), maps(seed=1)
    figure = drawn(maps=truth, removed=("mlp",), normalised=normalised, reference=reference)
    assert list(figure.layout.meta["views"]) == [
        "ablated",
        "intact",
        "difference",
        "ablated, cosines",
        "intact, cosines",
        "difference, cosines",
        "ablated, less diagonal means",
    ]
    for letter in LETTERS:
        one, two = truth[letter], reference[letter]
        as_cosines = (one, two) if letter in "bi" else (by_hand(one), by_hand(two))
        expected = {
            "ablated": one,
            "intact": two,
            "difference": one - two,
            "ablated, cosines": as_cosines[0],
            "intact, cosines": as_cosines[1],
            "difference, cosines": as_cosines[0] - as_cosines[1],
            "ablated, less diagonal means": normalised[letter],
        }
        for view, values in expected.items():
            [shown] = [trace for trace in visible(figure, view) if trace.name == letter]
            np.testing.assert_allclose(shown.z, values, rtol=1e-5, atol=1e-6)
            limits = figure.layout[shown.coloraxis]
            centred = (
                "difference" in view or "less" in view or ("cosines" in view and letter not in "bi")
            )
            assert (limits.cmin == -limits.cmax) == centred
            assert (limits.colorscale[0][1] == DIVERGING[0][1]) == centred
    assert len(figure.data) == 3 * 9 + 3 * 7 + 9, "a map that two views show is stored once"


def test_a_block_alone_offers_its_maps_and_their_cosines_in_buttons_as_on_the_page() -> None:
    figure = drawn()
    views = figure.layout.meta["views"]
    assert list(views) == [RAW, COSINES]
    [menu] = figure.layout.updatemenus
    shown = {button.label: button.args[0]["visible"] for button in menu.buttons}
    assert shown == {view: list(flags) for view, flags in views.items()}


def test_a_position_whose_vector_is_zero_has_no_cosine() -> None:
    angles = cosines(np.array([[4.0, 0.0, 3.0], [0.0, 0.0, 0.0], [3.0, 0.0, 9.0]]))
    assert np.isnan(angles[1]).all()
    assert np.isnan(angles[:, 1]).all()
    assert angles[0, 2] == 0.5


def colour_limits(figure: go.Figure, view: str) -> dict[str, tuple[float, float]]:
    axes = {trace.name: figure.layout[trace.coloraxis] for trace in visible(figure, view)}
    return {name: (limits.cmin, limits.cmax) for name, limits in axes.items()}


def test_both_models_share_each_stages_colours_and_all_cosines_share_one_scale() -> None:
    truth, reference = maps(seed=0), maps(seed=1)
    truth["g"], reference["e"] = 20 * truth["g"], 20 * reference["e"]
    figure = drawn(maps=truth, reference=reference, removed=("mask",))
    ablated, intact = (colour_limits(figure, view) for view in ("ablated", "intact"))
    assert ablated == intact
    assert len({high for _, high in ablated.values()}) == 9, "no stage has another's"
    off = ~np.eye(N, dtype=bool)
    ends = [np.percentile(maps["e"][off], (5, 95)) for maps in (truth, reference)]
    assert intact["e"] == pytest.approx((min(e[0] for e in ends), max(e[1] for e in ends)))
    for view in ("ablated, cosines", "intact, cosines"):
        shared = colour_limits(figure, view)
        assert {shared[letter] for letter in "acdefgh"} == {(-1.0, 1.0)}
        assert (shared["b"], shared["i"]) == (intact["b"], intact["i"])
    changes = colour_limits(figure, "difference, cosines")
    assert len({changes[letter] for letter in "acdefgh"}) == 1


def test_a_sink_that_measures_skip_does_not_set_the_colours() -> None:
    truth = maps(seed=0)
    for cells in truth.values():
        cells[0], cells[:, 0] = 999.0, 999.0
    with_sink, without = (
        colour_limits(circuit(truth, skip_keys=skip), RAW)["g"][1] for skip in (0, 1)
    )
    kept = truth["g"][1:, 1:][~np.eye(N - 1, dtype=bool)]
    assert with_sink == 999.0
    assert without == pytest.approx(np.percentile(kept, 95))


def test_missing_stages_stay_blank_with_the_reason() -> None:
    why = "L4 is the last layer of this model"
    figure = drawn(maps=maps("abcdefg"), absent={"h": why, "i": why})
    assert {trace.name for trace in figure.data} == set("abcdefg")
    reasons = [text for text in text_in(figure) if text.replace("<br>", " ") == why]
    assert len(reasons) == 2
    assert text_in(figure).count("W<sub>Q</sub><br>W<sub>K</sub>") == 1
    assert figure.layout.xaxis9.showticklabels is False


@pytest.mark.parametrize("wrong", [{}, {"z": np.zeros((3, 3))}])
def test_no_map_or_an_unknown_stage_is_an_error(wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="maps of the stages a to i, got"):
        circuit(wrong, layer=1)
