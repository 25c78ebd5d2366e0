"""The circuit figure: which maps it shows, what its arrows say, what its switches do."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from nope_probe.errors import UserError
from nope_probe.figures.circuit_figure import circuit
from nope_probe.figures.circuit_layout import LETTERS, narrow, wide
from nope_probe.figures.circuit_views import CHANGE, DIAGONAL, RAW, diagonal_normalised
from nope_probe.figures.export import export, without_controls
from nope_probe.figures.stages import stage_measures
from nope_probe.reports.page import Section, page

N = 11
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--enable-logging=stderr --virtual-time-budget=20000 --dump-dom"
)


def maps(letters: str = LETTERS, seed: int = 0) -> dict[str, np.ndarray]:
    """Random symmetric Gram maps, and causal score maps for (b) and (i)."""
    random = np.random.default_rng(seed)
    found = {}
    for letter in letters:
        values = random.standard_normal((N, N)).astype(np.float32)
        masked = np.where(np.tri(N, dtype=bool), values, np.nan)
        found[letter] = masked if letter in "bi" else values + values.T
    return found


def drawn(**changes: Any) -> go.Figure:
    stages = changes.pop("maps", maps())
    return circuit(stages, **{"layer": 2, **changes})


def said(figure: go.Figure) -> list[str]:
    return [mark.text for mark in figure.layout.annotations if mark.text]


def visible(figure: go.Figure, view: str) -> list[go.Heatmap]:
    flags = figure.layout.meta["switches"]["Maps"][view]["visible"]
    return [trace for trace, shown in zip(figure.data, flags, strict=True) if shown]


def crosses(figure: go.Figure) -> int:
    return sum("✕" in text for text in said(figure))


def test_every_stage_is_a_heat_map_in_the_order_of_the_flow() -> None:
    truth = maps()
    figure = drawn()
    shown = [trace for trace in figure.data if trace.visible]
    assert [trace.name for trace in shown] == list("abcdefghi")
    for trace in shown:
        np.testing.assert_array_equal(trace.z, truth[trace.name].astype(np.float32))


def test_a_hover_gives_query_key_and_value_in_its_unit() -> None:
    for trace in drawn().data:
        assert "query %{y" in trace.hovertemplate
        assert "key %{x" in trace.hovertemplate
        assert ("nat" in trace.hovertemplate) == (trace.name in "bi")


def test_arrows_name_their_operations_and_only_those_that_the_model_has() -> None:
    texts = said(drawn())
    for words in ("LN", "mask<br>softmax<br>W<sub>V</sub>", "W<sub>O</sub>", "FFN", "next LN"):
        assert words in texts
    assert texts.count("W<sub>Q</sub><br>W<sub>K</sub>") == 2
    assert texts.count("residual") == texts.count("⊕") == 2
    assert not any("RoPE" in text for text in texts)
    with_rope = said(drawn(components=("mask", "rope", "w_q", "w_k", "w_v", "w_o", "mlp")))
    assert with_rope.count("W<sub>Q</sub><br>W<sub>K</sub><br>RoPE") == 2


@pytest.mark.parametrize(
    ("removed", "words", "n_arrows"),
    [
        ("mask", "<s>mask</s><br>softmax<br>W<sub>V</sub>", 1),
        ("w_k", "W<sub>Q</sub><br><s>W<sub>K</sub></s>", 2),
        ("w_v", "mask<br>softmax<br><s>W<sub>V</sub></s>", 1),
        ("w_o", "<s>W<sub>O</sub></s>", 1),
        ("mlp", "<s>FFN</s>", 1),
    ],
)
def test_a_removed_arrow_is_struck_through(removed: str, words: str, n_arrows: int) -> None:
    figure = drawn(removed=(removed,), reference=maps(seed=1))
    assert said(figure).count(words) == crosses(figure) == n_arrows
    dashed = [shape for shape in figure.layout.shapes if shape.line.dash == "dot"]
    assert len(dashed) == n_arrows


def test_nothing_is_struck_through_without_an_ablation() -> None:
    assert crosses(drawn()) == 0
    assert not any("<s>" in text for text in said(drawn()))


def test_diagonal_normalising_leaves_nothing_of_distance() -> None:
    lag = np.subtract.outer(np.arange(N), np.arange(N)).astype(float)
    truth = np.where(lag >= 0, np.exp(-lag), np.nan)
    left = diagonal_normalised(truth)
    np.testing.assert_allclose(left[lag >= 0], 0, atol=1e-12)
    assert np.isnan(left[lag < 0]).all()
    by_hand = diagonal_normalised(np.array([[1.0, 7.0], [5.0, 3.0]]))
    np.testing.assert_array_equal(by_hand, [[-1, 0], [0, 1]])


def test_the_first_switch_shows_one_view_of_every_stage() -> None:
    truth, reference = maps(), maps(seed=1)
    figure = drawn(removed=("mlp",), reference=reference)
    assert list(figure.layout.meta["switches"]["Maps"]) == [RAW, DIAGONAL, CHANGE]
    for trace in visible(figure, CHANGE):
        expected = (truth[trace.name] - reference[trace.name]).astype(np.float32)
        np.testing.assert_allclose(trace.z, expected, rtol=1e-6)
    for trace in visible(figure, DIAGONAL):
        assert np.nanmax(np.abs(np.diagonal(trace.z).mean())) < 1e-6
    assert list(drawn().layout.meta["switches"]["Maps"]) == [RAW, DIAGONAL]


def test_the_second_switch_shares_one_scale_among_inner_products_and_one_among_scores() -> None:
    truth = maps()
    truth["g"] = truth["g"] * 100
    truth["i"] = truth["i"] * 10
    figure = drawn(maps=truth)
    scales = figure.layout.meta["switches"]["Scale"]
    tops = {
        name: {
            trace.name: scales[name]["layout"][f"{trace.coloraxis}.cmax"]
            for trace in visible(figure, RAW)
        }
        for name in scales
    }
    own, shared = tops["own colours"], tops["shared colours"]
    assert len(set(own.values())) == 9
    assert {shared[letter] for letter in "acdefgh"} == {own["g"]}
    assert {shared[letter] for letter in "bi"} == {own["i"]}


def test_buttons_for_notebooks_do_what_the_pages_switches_do() -> None:
    figure = drawn()
    for menu, choices in zip(
        figure.layout.updatemenus, figure.layout.meta["switches"].values(), strict=True
    ):
        assert [button.label for button in menu.buttons] == list(choices)
        for button, choice in zip(menu.buttons, choices.values(), strict=True):
            assert dict(button.args[0]).get("visible") == choice.get("visible")
            assert dict(button.args[1]) == choice.get("layout", {})


def test_differences_are_centred_on_zero_and_maps_are_not() -> None:
    figure = drawn(reference=maps(seed=1), removed=("mask",))
    for view, centred in ((RAW, False), (DIAGONAL, True), (CHANGE, True)):
        for trace in visible(figure, view):
            scale = figure.layout[trace.coloraxis]
            assert (scale.cmin == -scale.cmax) == centred


def test_missing_stages_stay_blank_and_say_why() -> None:
    why = "layer 4 is the last: there is no next"
    figure = drawn(maps=maps("abcdefg"), absent={"h": why, "i": why})
    assert {trace.name for trace in figure.data} == set("abcdefg")
    reasons = [text for text in said(figure) if text.replace("<br>", " ") == why]
    assert len(reasons) == 2
    assert said(figure).count("W<sub>Q</sub><br>W<sub>K</sub>") == 1
    assert figure.layout.xaxis9.showticklabels is False


@pytest.mark.parametrize("flow", [wide(), narrow()])
def test_panels_stand_in_the_plot_and_never_overlap(flow: Any) -> None:
    boxes = [flow.domain(letter) for letter in LETTERS]
    for (left, right), (bottom, top) in boxes:
        assert 0 <= left < right <= 1
        assert 0 <= bottom < top <= 1
    for i, ((l1, r1), (b1, t1)) in enumerate(boxes):
        for (l2, r2), (b2, t2) in boxes[:i]:
            assert r1 <= l2 or r2 <= l1 or t1 <= b2 or t2 <= b1


def test_a_phone_gets_one_column() -> None:
    patch = drawn().layout.meta["narrow"]
    assert patch["xaxis.domain"] == patch["xaxis9.domain"]
    assert patch["yaxis2.domain"][1] < patch["yaxis.domain"][0]
    assert "mask softmax W<sub>V</sub>" in [mark["text"] for mark in patch["annotations"]]


def test_large_maps_are_pooled() -> None:
    figure = circuit(maps(), layer=1, max_positions=6)
    assert figure.data[0].z.shape == (6, 6)
    assert (figure.data[0].x0, figure.data[0].dx) == (0.5, 2)


@pytest.mark.parametrize("wrong", [{}, {"z": np.zeros((3, 3))}])
def test_no_map_or_an_unknown_stage_is_an_error(wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="maps of the stages a to i, got"):
        circuit(wrong, layer=1)


def test_leanings_stand_per_stage_with_their_intervals() -> None:
    rows = [("intact", "f", 0.9, 0.8, 0.95), ("intact", "g", -0.2, -0.3, -0.1)]
    table = pd.DataFrame(
        [
            {
                "model": model,
                "stage": stage,
                **{
                    f"{name}{end}": each
                    for name in ("locality", "monotonicity")
                    for end, each in (("", value), ("_low", low), ("_high", high))
                },
            }
            for model, stage, value, low, high in rows
        ]
    )
    trace = stage_measures(table).data[0]
    assert list(trace.x) == ["f", "g"]
    assert list(trace.y) == [0.9, -0.2]
    np.testing.assert_allclose(trace.error_y.arrayminus, [0.1, 0.1])


def test_drawing_needs_no_torch() -> None:
    code = "import sys, nope_probe.experiments.circuit.page\n"
    code += "print({'torch', 'scipy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_an_image_has_no_buttons_and_leaves_the_figure_as_it_was() -> None:
    figure = drawn()
    still = without_controls(figure)
    assert not still.layout.updatemenus
    assert still.layout.height == figure.layout.height - figure.layout.meta["menu"]
    assert len(figure.layout.updatemenus) == 2


def test_an_image_without_kaleido_or_chrome_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"ends in \.png or \.svg"):
        export(drawn(), tmp_path / "figure.jpg")
    monkeypatch.setattr("nope_probe.figures.export.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need kaleido: pip install 'nope-probe\[export\]'"):
        export(drawn(), tmp_path / "figure.png")
    monkeypatch.setattr("nope_probe.figures.export.find_spec", lambda name: object())

    def no_chrome(*args: Any, **options: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    monkeypatch.setattr(go.Figure, "write_image", no_chrome)
    with pytest.raises(UserError, match="need Chrome or Chromium"):
        export(drawn(), tmp_path / "figure.png")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_draws_it_with_its_switches_and_no_error(width: int, tmp_path: Path) -> None:
    figure = drawn(removed=("mlp",), reference=maps(seed=1))
    html = page("title", ["headline"], [Section(title="t", caption="c", figure=figure)], {})
    click = "document.querySelector('input[value=change]')"
    script = f"setTimeout(() => {{ {click}.click(); document.title = 'clicked'; }}, 3000)"
    html = html.replace("</body>", f"<script>{script}</script></body>")
    file = tmp_path / "page.html"
    file.write_text(html, encoding="utf-8")
    options = [f"--window-size={width},4000", f"--user-data-dir={tmp_path / 'profile'}"]
    run = subprocess.run(
        [str(CHROMIUM), *FLAGS.split(), *options, file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert not [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    assert "<title>clicked</title>" in run.stdout
    assert len(re.findall(r'type="radio"', run.stdout)) == 5
    assert len(re.findall(r'<g class="hm"', run.stdout)) == 9


def test_a_page_of_1024_positions_stays_under_15_megabytes() -> None:
    large = {letter: np.broadcast_to(np.float32(1.7), (1024, 1024)) for letter in LETTERS}
    figure = drawn(maps=large, reference=large, removed=("mask",))
    html = page("title", ["headline"], [Section(title="t", caption="c", figure=figure)], {})
    assert 6e6 < len(html.encode()) < 15e6
