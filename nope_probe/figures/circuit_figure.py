"""The circuit figure: the data flow through one block, with a heat map at each stage (a) to (i).

It is the paper's Figure 3 with the block drawn around it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from nope_probe.components import INK, LETTERS, SCORE_STAGES, STAGE_MEANINGS, Letter, words
from nope_probe.figures.circuit_layout import BAR, Flow, arrows, narrow, wide
from nope_probe.figures.circuit_views import (
    COSINES,
    PER_STAGE,
    RAW,
    Circuit,
    Stage,
    cells,
    is_signed,
    scales_of,
    stages_in,
    views,
)
from nope_probe.figures.grid import axis, keep, patch
from nope_probe.figures.panels import heat_map
from nope_probe.figures.style import BLANK, DIVERGING, SEQUENTIAL, TEMPLATE, ZERO
from nope_probe.maps.downsample import Pooled, pool

if TYPE_CHECKING:
    from nope_probe.maps.maps import StageMaps

StageMap: TypeAlias = Float[Any, "row_pos col_pos"]
COMPONENTS = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
MAX_POSITIONS = 128
MAX_CELLS = 27 * MAX_POSITIONS**2  # of all maps together: 2.4 MB of a page
MENU = 44  # height of the switches above the figure, px
PAPER = "#ffffff"
OF = {"reference": "intact model", "difference": "ablated less intact"}


def circuit(
    stages: StageMaps | Mapping[Any, StageMap],
    *,
    layer: int = 0,
    removed: Sequence[str] = (),
    reference: StageMaps | Mapping[Any, StageMap] | None = None,
    normalised: StageMaps | Mapping[Any, StageMap] | None = None,
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
    if normalised is None and not isinstance(stages, Mapping):
        normalised = stages
    data = Circuit(
        layer=layer,
        maps=_stage_maps(stages),
        normalised=_stage_maps(normalised, normalised=True),
        absent=absent or {},
        components=(*COMPONENTS, *removed) if components is None else components,
        removed=removed,
        reference=_stage_maps(reference),
    )
    shown = {name: stages_in(view, data) for name, view in views(data).items()}
    held = list(dict.fromkeys(stage for stages in shown.values() for stage in stages))
    size = min(max_positions, int((MAX_CELLS / len(held)) ** 0.5))
    pooled = {stage: pool(cells(data, stage)[None], size) for stage in held}
    axes, first = _coloraxes(held), next(iter(shown.values()))
    figure = go.Figure(
        [_heat(stage, pooled[stage], axes[stage], visible=stage in first) for stage in held]
    )
    for stage in held:
        colours = DIVERGING if is_signed(stage) else SEQUENTIAL
        figure.layout[axes[stage]] = {"colorscale": colours}
    _place(figure, data, axes)
    scales = {
        name: {
            f"{axes[stage]}.{end}": limit
            for stage, (low, high) in limits_of.items()
            for end, limit in (("cmin", low), ("cmax", high))
        }
        for name, limits_of in scales_of(
            {stage: maps.values[0] for stage, maps in pooled.items()}
        ).items()
    }
    patch(figure, scales[PER_STAGE])
    visible = {name: [stage in stages for stage in held] for name, stages in shown.items()}
    add_switches(
        figure,
        {
            "Maps": {name: {"visible": flags} for name, flags in visible.items()},
            "Colours": {name: {"layout": keys} for name, keys in scales.items()},
        },
    )
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


def _heat(stage: Stage, pooled: Pooled, coloraxis: str, visible: bool) -> go.Heatmap:
    letter, of, kind = stage
    about = [f"({letter}) {formula(letter)}", "" if kind == RAW else kind, OF.get(of, "")]
    return heat_map(
        pooled.values[0],
        float(pooled.block),
        LETTERS.index(letter),
        name=letter,
        coloraxis=coloraxis,
        value=_value(stage),
        label="<br>".join(filter(None, about)),
        visible=visible,
    )


def _value(stage: Stage) -> str:
    letter, _, kind = stage
    if kind == COSINES:
        return "cosine %{z:.3g}"
    return "score %{z:.3g} nat" if letter in SCORE_STAGES else "inner product %{z:.3g}"


def _place(figure: go.Figure, data: Circuit, axes: Mapping[Stage, str]) -> None:
    square = {"showgrid": False, "zeroline": False, "constrain": "domain", "nticks": 4}
    square["tickfont"] = {"size": 10}
    down = {"autorange": "reversed", "constraintoward": "middle"}
    layout: dict[str, Any] = {}
    for panel, letter in enumerate(LETTERS):
        x, y = f"x{axis(panel)}", f"y{axis(panel)}"
        blank = {} if letter in data.maps else {"showticklabels": False, "range": [0, 1]}
        layout[f"xaxis{axis(panel)}"] = {**square, "anchor": y, **blank}
        layout[f"yaxis{axis(panel)}"] = {**square, **down, "scaleanchor": x, "anchor": x, **blank}
    figure.update_layout(
        layout,
        template=TEMPLATE,
        title={"text": _title(data)},
        plot_bgcolor=BLANK,
        paper_bgcolor=PAPER,
        margin={"t": 60 + MENU, "b": 16, "l": 56, "r": 16},
        height=wide().height + 76 + MENU,
    )
    patch(figure, _layout(wide(), data, axes, titled="e", ticked="e"))
    phone = _layout(narrow(), data, axes, titled="a", ticked=LETTERS)
    phone["margin"] = {"t": 24, "b": 10, "l": 24, "r": 4}
    keep(figure, narrow={**phone, "height": narrow().height + 34})


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
    where = {"xref": "paper", "yref": "paper", "showarrow": False}
    captions = []
    for letter in LETTERS:
        x, y = flow.domain(letter)
        above = {"x": x[0], "y": y[1], "xanchor": "left", "yanchor": "bottom"}
        text, font = f"<b>({letter})</b> {formula(letter)}", {"size": 12, "color": INK}
        captions.append({"text": text, "font": font, **where, **above})
        if letter in data.absent:
            text, font = "<br>".join(wrap(data.absent[letter], 23)), {"size": 11, "color": ZERO}
            middle = {"x": sum(x) / 2, "y": sum(y) / 2}
            captions.append({"text": text, "font": font, **where, **middle})
    return captions


def add_switches(
    figure: go.Figure, switches: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> None:
    """Add switches: as menus for notebooks, and in the metadata for the report page.

    Args:
        figure: the figure, whose first choices are shown.
        switches: by name, its choices, of which each says which traces are `visible`, sets keys of
            the `layout`, or both.
    """
    menus = []
    for index, choices in enumerate(switches.values()):
        buttons = [
            {
                "label": name,
                "method": "update",
                "args": [
                    {key: each[key] for key in ("visible",) if key in each},
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


def _stage_maps(
    stages: StageMaps | Mapping[Any, StageMap] | None, normalised: bool = False
) -> dict[str, StageMap]:
    """Return stages as arrays by letter: those given, or the means of captured ones."""
    if stages is None or isinstance(stages, Mapping):
        return {letter: np.asarray(values) for letter, values in (stages or {}).items()}
    of = stages.normalised if normalised else stages.mean
    return {letter: np.asarray(of(letter)) for letter in stages.folds}
