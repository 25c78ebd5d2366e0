"""The circuit figure: the data flow through one block, with a heat map at each stage (a) to (i).

It is the paper's Figure 3 with the block drawn around it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from nope_probe.components import INK, LETTERS, SCORE_STAGES, STAGE_MEANINGS, Letter, words
from nope_probe.figures.circuit_layout import BAR, Flow, arrows, narrow, wide
from nope_probe.figures.circuit_views import (
    COSINES,
    PER_STAGE,
    RAW,
    Circuit,
    Scale,
    Stage,
    cells,
    is_shown,
    is_signed,
    scales_of,
    stages_of,
    views,
)
from nope_probe.figures.grid import axis, keep, patch
from nope_probe.figures.maps import Stages, normalised_maps, stage_maps
from nope_probe.figures.panels import heat_map
from nope_probe.figures.style import BLANK, DIVERGING, SEQUENTIAL, TEMPLATE, ZERO

COMPONENTS = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
MAX_POSITIONS = 128
MAX_CELLS = 27 * MAX_POSITIONS**2  # of all maps together: 2.4 MB of a page
MENU = 44  # height of the switches above the figure, px
PAPER = "#ffffff"
OF = {"reference": "intact model", "difference": "ablated less intact"}


def circuit(
    stages: Stages,
    *,
    layer: int = 0,
    removed: Sequence[str] = (),
    reference: Stages | None = None,
    normalised: Stages | None = None,
    components: Sequence[str] | None = None,
    absent: Mapping[str, str] | None = None,
    max_positions: int = MAX_POSITIONS,
) -> go.Figure:
    """Draw a block's stages along the flow of data, joined by named arrows.

    One switch chooses the view: the maps, their cosines (inner products over the vectors' lengths),
    or the maps less the mean of each diagonal; with a reference the ablated model, the intact one
    and their difference. Each stage has a scale, which both models share, since stages differ by an
    order of magnitude; the other switch puts all cosines on one scale. Colours run over the middle
    90% of the cells off the diagonal.

    Args:
        stages: what `capture_stages` returned, or maps by letter.
        layer: the block under study, from 0.
        removed: the components that an ablation removed; their arrows are struck through.
        reference: the intact model's stages, to compare with.
        normalised: the maps less the mean of each diagonal; captured stages have them already.
        components: the components that the model has; by default mask, weights, MLP and `removed`.
        absent: why a stage does not exist in this block, per letter.
        max_positions: larger maps are pooled to this many positions, in a comparison to fewer.

    Raises:
        ValueError: if there is no map, or a letter that is no stage.

    Example:
        >>> import numpy as np
        >>> from nope_probe import figures
        >>> figures.circuit({"a": np.eye(5), "b": np.tri(5)}).layout.title.text
        "L0, from its input to the next layer's scores"
    """
    data = Circuit(
        layer=layer,
        maps=stage_maps(stages),
        normalised=normalised_maps(stages) if normalised is None else stage_maps(normalised),
        absent=absent or {},
        components=(*COMPONENTS, *removed) if components is None else components,
        removed=removed,
        reference={} if reference is None else stage_maps(reference),
    )
    offered = views(data)
    first = next(iter(offered.values()))
    held = stages_of(data)
    size = min(max_positions, int((MAX_CELLS / len(held)) ** 0.5))
    drawn = {stage: cells(data, stage, size) for stage in held}
    figure, axes = go.Figure(), _coloraxes(drawn)
    for stage, (values, block) in drawn.items():
        figure.add_trace(_heat(stage, values, block, axes[stage], is_shown(stage, first)))
        colours = DIVERGING if is_signed(stage) else SEQUENTIAL
        figure.update_layout({axes[stage]: {"colorscale": colours}})
    _place(figure, data, axes)
    scales = scales_of({stage: values for stage, (values, _) in drawn.items()})
    patches = {name: _limit_keys(axes, each) for name, each in scales.items()}
    patch(figure, patches[PER_STAGE])
    shown = {name: [is_shown(stage, view) for stage in drawn] for name, view in offered.items()}
    _add_switches(figure, shown, patches)
    return figure


def _coloraxes(stages: Iterable[Stage]) -> dict[Stage, str]:
    """Return each map's colour axis: its own, so that the switches need not exchange limits."""
    kinds: dict[tuple[str, str], int] = {}
    found = {}
    for stage in stages:
        place = kinds.setdefault(stage[1:], len(kinds))
        found[stage] = f"coloraxis{axis(9 * place + LETTERS.index(stage[0]))}"
    return found


def formula(letter: Letter) -> str:
    """Return what a stage holds, as plotly writes it."""
    text = STAGE_MEANINGS[letter].replace("ᵀ", "<sup>T</sup>").replace("W_O", "W<sub>O</sub>")
    return f"{text}, nats" if letter in SCORE_STAGES else text


def _limit_keys(axes: Mapping[Stage, str], scales: Mapping[Stage, Scale]) -> dict[str, float]:
    keys: dict[str, float] = {}
    for stage, (low, high) in scales.items():
        keys |= {f"{axes[stage]}.cmin": low, f"{axes[stage]}.cmax": high}
    return keys


def _heat(
    stage: Stage, values: np.ndarray, block: int, coloraxis: str, visible: bool
) -> go.Heatmap:
    letter, of, kind = stage
    kind_and_model = ("" if kind == RAW else kind, OF.get(of, ""))
    return heat_map(
        values.astype(np.float32),
        float(block),
        LETTERS.index(letter),
        name=letter,
        coloraxis=coloraxis,
        value=_value(stage),
        label="<br>".join([f"({letter}) {formula(letter)}", *filter(None, kind_and_model)]),
        visible=visible,
    )


def _value(stage: Stage) -> str:
    letter, _, kind = stage
    if kind == COSINES:
        return "cosine %{z:.3g}"
    return "score %{z:.3g} nat" if letter in SCORE_STAGES else "inner product %{z:.3g}"


def _place(figure: go.Figure, data: Circuit, axes: Mapping[Stage, str]) -> None:
    figure.update_layout(template=TEMPLATE, title={"text": _title(data)})
    figure.update_layout(plot_bgcolor=BLANK, paper_bgcolor=PAPER)
    square = {"showgrid": False, "zeroline": False, "constrain": "domain", "nticks": 4}
    for letter in LETTERS:
        at = axis(LETTERS.index(letter))
        across = {**square, "anchor": f"y{at}", "tickfont": {"size": 10}}
        down = {"autorange": "reversed", "scaleanchor": f"x{at}", "constraintoward": "middle"}
        blank = {} if letter in data.maps else {"showticklabels": False, "range": [0, 1]}
        figure.update_layout(
            {
                f"xaxis{at}": {**across, **blank},
                f"yaxis{at}": {**across, **down, "anchor": f"x{at}", **blank},
            }
        )
    patch(figure, _layout(wide(), data, axes, titled="e", ticked="e"))
    phone = _layout(narrow(), data, axes, titled="a", ticked=LETTERS)
    phone["margin"] = {"t": 24, "b": 10, "l": 24, "r": 4}
    phone["height"] = narrow().height + 34
    keep(figure, narrow=phone)
    figure.update_layout(margin={"t": 60 + MENU, "b": 16, "l": 56, "r": 16})
    figure.update_layout(height=wide().height + 76 + MENU)


def _title(data: Circuit) -> str:
    without = ", ".join(words(name) for name in data.removed)
    return f"L{data.layer}, from its input to the next layer's scores" + (
        f", without {without}" if without else ""
    )


def _layout(
    flow: Flow, data: Circuit, axes: Mapping[Stage, str], titled: str, ticked: Collection[str]
) -> dict[str, Any]:
    """Return the layout keys of panels, bars, arrows and words on one kind of screen."""
    keys: dict[str, Any] = {}
    for panel, letter in enumerate(LETTERS):
        at, (x, y) = axis(panel), flow.domain(letter)
        keys |= {f"xaxis{at}.domain": list(x), f"yaxis{at}.domain": list(y)}
        keys[f"yaxis{at}.showticklabels"] = letter in ticked and letter in data.maps
        keys[f"xaxis{at}.title.text"] = "key position" if letter == titled else ""
        keys[f"yaxis{at}.title.text"] = "query position" if letter == titled else ""
    for (letter, _, _), coloraxis in axes.items():
        keys[f"{coloraxis}.colorbar"] = _bar(flow, letter)
    shapes, marks = arrows(flow, data.components, data.removed, data.absent)
    return {**keys, "shapes": shapes, "annotations": [*marks, *_captions(flow, data)]}


def _bar(flow: Flow, letter: str) -> dict[str, Any]:
    x, _ = flow.domain(letter)
    top = flow.share(flow.tops[letter] + flow.panel + BAR)
    bar = {"orientation": "h", "thickness": 8, "outlinewidth": 0, "nticks": 4, "xpad": 0, "ypad": 0}
    where = {"x": sum(x) / 2, "xanchor": "center", "len": x[1] - x[0], "lenmode": "fraction"}
    return {**bar, **where, "tickfont": {"size": 10}, "y": top, "yanchor": "top", "yref": "paper"}


def _captions(flow: Flow, data: Circuit) -> list[dict[str, Any]]:
    """Return each panel's letter and formula, and in an empty panel the reason."""
    found = []
    for letter in LETTERS:
        x, y = flow.domain(letter)
        where = {"xref": "paper", "yref": "paper", "showarrow": False}
        above = {"x": x[0], "y": y[1], "xanchor": "left", "yanchor": "bottom"}
        text, size = f"<b>({letter})</b> {formula(letter)}", {"size": 12, "color": INK}
        found.append({"text": text, "font": size, **where, **above})
        if letter in data.absent:
            inside = {"x": sum(x) / 2, "y": sum(y) / 2, "font": {"size": 11, "color": ZERO}}
            found.append({"text": _wrapped(data.absent[letter]), **where, **inside})
    return found


def _wrapped(text: str, width: int = 22) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def _add_switches(
    figure: go.Figure,
    shown: Mapping[str, Sequence[bool]],
    scales: Mapping[str, Mapping[str, float]],
) -> None:
    """Add the switches: as menus for notebooks, and in the metadata for the report page."""
    switches: dict[str, dict[str, Any]] = {
        "Maps": {name: {"visible": list(traces)} for name, traces in shown.items()},
        "Colours": {name: {"layout": dict(keys)} for name, keys in scales.items()},
    }
    menus = []
    for index, choices in enumerate(switches.values()):
        buttons = [
            {
                "label": name,
                "method": "update",
                "args": [
                    {"visible": each["visible"]} if "visible" in each else {},
                    each.get("layout", {}),
                ],
            }
            for name, each in choices.items()
        ]
        where = {"x": 0.3 * index, "xanchor": "left", "y": 1, "yanchor": "bottom"}
        look = {"bgcolor": PAPER, "font": {"size": 12}, "pad": {"b": 14}, "showactive": True}
        menus.append({"type": "dropdown", "buttons": buttons, **where, **look})
    figure.update_layout(updatemenus=menus)
    keep(figure, switches=switches, menu=MENU)
