"""The circuit figure: its maps, the words on its arrows, its scales."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from support.maps import text_of

from nope_probe import figures
from nope_probe.figures.stages import circuit, cosines
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


def scales(figure: go.Figure) -> list[tuple[float, float]]:
    axes = [figure.layout[trace.coloraxis] for trace in figure.data]
    return [(limits.cmin, limits.cmax) for limits in axes]


def test_every_stage_is_a_heat_map_in_the_order_of_the_paper() -> None:
    for _ in range(2):  # a module of the same name would take the place of the function
        assert figures.circuit is circuit
    truth = maps()
    figure = drawn()
    assert [trace.name.split("<br>")[1][:6] for trace in figure.data] == [
        f"<b>({letter})" for letter in LETTERS
    ]
    for trace, letter in zip(figure.data, LETTERS, strict=True):
        np.testing.assert_array_equal(trace.z, truth[letter].astype(np.float32))
        assert ("nats" in trace.hovertemplate) == (letter in "bi")


def test_arrows_name_their_operations_and_only_those_that_the_model_has() -> None:
    arrows = [title.split("<br>")[0] for title in text_of(drawn())]
    q, k, v, o = (f"W<sub>{name}</sub>" for name in "QKVO")
    scores = f"{q} {k} →"
    assert arrows == [
        *("X LN →", scores, f"mask softmax {v} →", f"{o} →", "+ X →", "LN →", "FFN + O →"),
        *("next LN →", scores),
    ]
    with_rope = drawn(components=("mask", "rope", "w_q", "w_k", "w_v", "w_o", "mlp"))
    assert sum(f"{q} {k} RoPE →" in title for title in text_of(with_rope)) == 2


def test_what_is_removed_is_struck_through() -> None:
    text = " ".join(text_of(drawn(removed=("mask", "w_k", "mlp", "norms"))))
    struck = {"mask": 1, "W<sub>K</sub>": 2, "FFN": 1, "weights": 3}
    assert {word: text.count(f"<s>{word}</s>") for word in struck} == struck
    assert text.count("<s>") == sum(struck.values())


def by_hand(gram: np.ndarray) -> np.ndarray:
    lengths = np.diagonal(gram) ** 0.5
    return gram / np.outer(lengths, lengths)


def test_a_comparison_shows_both_models_on_one_scale_and_their_difference() -> None:
    truth, reference = maps(seed=0), maps(seed=1)
    truth["g"], reference["e"] = 20 * truth["g"], 20 * reference["e"]
    figure = drawn(maps=truth, removed=("mlp",), reference=reference)
    limits, off = scales(figure), ~np.eye(N, dtype=bool)
    for index, letter in enumerate(LETTERS):
        one, two, change = figure.data[3 * index : 3 * index + 3]
        assert (two.name, change.name) == (f"({letter}) ablated", f"({letter}) difference")
        np.testing.assert_allclose(one.z, reference[letter], rtol=1e-6)
        np.testing.assert_allclose(two.z, truth[letter], rtol=1e-6)
        np.testing.assert_allclose(change.z, truth[letter] - reference[letter], rtol=1e-5)
        shared, other, centred = limits[3 * index : 3 * index + 3]
        assert shared == other
        assert centred[0] == -centred[1]
        assert figure.layout[change.coloraxis].colorscale[0][1] == DIVERGING[0][1]
    assert len({high for _, high in limits[::3]}) == 9, "no stage has another's"
    ends = [np.percentile(of["e"][off], (5, 95)) for of in (truth, reference)]
    assert limits[3 * 4] == pytest.approx((min(e[0] for e in ends), max(e[1] for e in ends)))


def test_cosines_are_of_vectors_alone_and_centred() -> None:
    truth = maps()
    figure = drawn(maps=truth, kind="cosines")
    vectors = [letter for letter in LETTERS if letter not in "bi"]
    assert len(figure.data) == len(vectors)
    for trace, letter in zip(figure.data, vectors, strict=True):
        np.testing.assert_allclose(trace.z, by_hand(truth[letter]), rtol=1e-5, atol=1e-6)
    assert all(low == -high for low, high in scales(figure))


def test_a_position_whose_vector_is_zero_has_no_cosine() -> None:
    angles = cosines(np.array([[4.0, 0.0, 3.0], [0.0, 0.0, 0.0], [3.0, 0.0, 9.0]]))
    assert np.isnan(angles[1]).all()
    assert np.isnan(angles[:, 1]).all()
    assert angles[0, 2] == 0.5


def test_a_sink_that_measures_skip_does_not_set_the_colours() -> None:
    truth = maps(seed=0)
    for cells in truth.values():
        cells[0], cells[:, 0] = 999.0, 999.0
    place = LETTERS.index("g")
    with_sink, without = (scales(circuit(truth, skip_keys=skip))[place][1] for skip in (0, 1))
    kept = truth["g"][1:, 1:][~np.eye(N - 1, dtype=bool)]
    assert with_sink == 999.0
    assert without == pytest.approx(np.percentile(kept, 95))


@pytest.mark.parametrize("wrong", [{}, {"z": np.zeros((3, 3))}])
def test_no_map_or_an_unknown_stage_is_an_error(wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="maps of the stages a to i, got"):
        circuit(wrong, layer=1)
