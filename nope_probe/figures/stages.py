"""The circuit figure: the data flow through one block, with a heat map at each stage (a) to (i).

It is the paper's Figure 3 with the block drawn around it. Places are counted in panels: (x, y) is x
panels right of the left edge of (e), and y panels below the upper edge of (a).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from nope_probe.errors import UserError, closed_choices
from nope_probe.figures.names import TABLE, words
from nope_probe.figures.panels import Pooled, RowMaps, heat_map, pool
from nope_probe.figures.style import (
    BLANK,
    DIVERGING,
    SEQUENTIAL,
    ZERO,
    Extent,
    Layout,
    PlotlyTrace,
    axis,
    colour_bar,
    colour_limits,
    inside,
    place_panels,
)
from nope_probe.removal import INK
from nope_probe.stages import LETTERS, SCORE_STAGES, STAGE_MEANINGS, Letter

if TYPE_CHECKING:
    from nope_probe.maps.maps import StageMaps

StageMap: TypeAlias = Float[Any, "row_pos col_pos"]
Of = Literal["shown", "reference", "difference"]
MapKind = Literal["raw", "cosines", "less diagonal means"]
StageView = tuple[Letter, Of, MapKind]
Models: TypeAlias = dict[Of, Mapping[Letter, np.ndarray]]
RAW: MapKind = "raw"
COSINES: MapKind = "cosines"
DIAGONAL: MapKind = "less diagonal means"
MODELS: dict[Of, str] = {"shown": "ablated", "reference": "intact", "difference": "difference"}
MIDDLE = (5, 95)  # colours run between these percentiles of the cells off the diagonal
COMPONENTS = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
MAX_POSITIONS = 128
MAX_CELLS = 27 * MAX_POSITIONS**2  # of all maps together: 2.4 MB of a page
PANEL = 168  # px
MENU = 44  # height of the switch above the figure, px
TITLE, BAR = 24, 44  # from a panel up to the switch, and down to its colour bar, px
MARGIN = {"t": 60 + TITLE + MENU, "b": 112, "l": 56, "r": 44}  # around the panels, px
Point = tuple[float, float]
GAP, DOWN = 0.375, 1.86  # between two columns, and from a row to the next, panels
SIZE = 5 + 4 * GAP, DOWN + 1  # width and height of all panels
CORNER: dict[str, Point] = {letter: (at * (1 + GAP), 0.0) for at, letter in enumerate("abcd", 1)}
CORNER |= {letter: (at * (1 + GAP), DOWN) for at, letter in enumerate("efghi")}
X, SUM = (0.85, 0.5), (CORNER["g"][0] - 0.11, DOWN + 0.5)  # the input, and where (g) is summed
JOIN, EDGE = (X[0], DOWN - 0.33), CORNER["d"][0] + 1.13
BRANCH, FLOOR = CORNER["f"][0] - 0.3, DOWN + 1.46
# The corners of each arrow, by the stage at its end. `x_e` and `e_g` belong to the residual stream,
# and `_g` is the part of (g)'s arrow after the sum.
PATHS: dict[str, Sequence[Point]] = {
    letter: ((x - GAP, y + 0.5), (x, y + 0.5)) for letter, (x, y) in CORNER.items()
}
PATHS |= {
    "a": ((X[0] + 0.08, X[1]), (CORNER["a"][0], X[1])),
    "e": ((CORNER["d"][0] + 1, X[1]), (EDGE, X[1]), (EDGE, JOIN[1]), JOIN, (X[0], DOWN)),
    "g": (PATHS["g"][0], (SUM[0] - 0.04, SUM[1])),
    "_g": (SUM, PATHS["g"][1]),
    "x_e": ((X[0], X[1] + 0.07), (X[0], JOIN[1] - 0.04)),
    "e_g": ((BRANCH, SUM[1]), (BRANCH, FLOOR), (SUM[0], FLOOR), (SUM[0], SUM[1] + 0.04)),
}
Operations = tuple[tuple[str, str], ...]  # words, and the component whose removal removes them
LN: Operations = (("LN", ""), ("weights", "norms"))  # the weights are named only if removed
SCORE: Operations = (("W<sub>Q</sub>", "w_q"), ("W<sub>K</sub>", "w_k"), ("RoPE", "rope"))
BESIDE: dict[str, Layout] = {  # an arrow, above which words stand by default
    "b": {"yanchor": "bottom", "yshift": 4},
    "x_e": {"xanchor": "right", "xshift": -6},
    "e_g": {"yanchor": "top", "yshift": -2},
}
OPERATIONS: dict[str, Operations] = {  # of each arrow
    "a": LN,
    "b": SCORE,
    "c": (("mask", "mask"), ("softmax", ""), ("W<sub>V</sub>", "w_v")),
    "d": (("W<sub>O</sub>", "w_o"),),
    "f": LN,
    "g": (("FFN", "mlp"),),
    "h": (("next LN", ""), LN[1]),
    "i": SCORE,
    "x_e": (("residual", ""),),
    "e_g": (("residual", ""),),
}


@closed_choices("skip_keys")
def circuit(
    stages: StageMaps | Mapping[Any, StageMap],
    *,
    layer: int = 0,
    removed: Sequence[str] = (),
    reference: StageMaps | Mapping[Any, StageMap] | None = None,
    normalised: StageMaps | Mapping[Any, StageMap] | None = None,
    components: Sequence[str] | None = None,
    absent: Mapping[str, str] | None = None,
    query_positions: Int[np.ndarray, " row"] | None = None,
    skip_keys: int | Literal["auto"] = "auto",
) -> go.Figure:
    """Draw a block's stages along the flow of data, joined by named arrows.

    A switch chooses the view: the maps, their cosines (inner products over the vectors' lengths),
    or the maps less the mean of each diagonal; with a reference also the model: ablated, intact, or
    their difference. Each stage has one scale for both models, because stages differ by
    an order of magnitude; all cosines share one. Colours run over the middle 90% of the cells off
    the diagonal.

    Args:
        stages: the result of `capture_stages`, or maps by letter.
        layer: the block under study, from 0.
        removed: the components that an ablation removed; their arrows are struck through.
        reference: the intact model's stages, to compare with.
        normalised: the maps less the mean of each diagonal; captured stages contain them.
        components: the components that the model has; by default mask, weights, MLP and `removed`.
        absent: the reason why a stage does not exist in this block, per letter.
        query_positions: the queries of the rows, if some queries have none; captured stages hold
            them. Cosines are then left out, because they need the lengths of all vectors.
        skip_keys: first positions that the colour limits leave out, as in `score_maps`.

    Raises:
        UserError: for no maps, or for a letter that is no stage.

    Example:
        >>> import numpy as np
        >>> from nope_probe import figures
        >>> figures.circuit({"a": np.eye(5), "b": np.tri(5)}).layout.title.text
        "L0, from its input to the next layer's scores"
    """
    if not isinstance(stages, Mapping):
        normalised = stages if normalised is None else normalised
        query_positions = stages.query_positions.numpy()
        skip_keys = stages.skip_keys if skip_keys == "auto" else skip_keys
    shown = views(_arrays(stages), _arrays(reference), _arrays(normalised, normalised=True))
    drawn = {stage: (name, cells) for name in shown for stage, cells in shown[name].items()}
    size = min(MAX_POSITIONS, int((MAX_CELLS / len(drawn)) ** 0.5))
    pooled = {
        stage: pool(RowMaps(values=cells[None], queries=query_positions), size)
        for stage, (_, cells) in drawn.items()
    }
    skipped = 0 if skip_keys == "auto" else -(-skip_keys // next(iter(pooled.values())).block)
    scales = scales_of({stage: maps.values[0] for stage, maps in pooled.items()}, skipped)
    without = f", without {', '.join(map(words, removed))}" if removed else ""
    figure = place_stages(f"L{layer}, from its input to the next layer's scores{without}")
    figure.add_traces(
        [
            _heat(stage, name, pooled[stage], place)
            for place, (stage, (name, _)) in enumerate(drawn.items())
        ]
    )
    add_switch(figure, shown, scales)
    add_reasons(figure, {letter for letter, _, _ in drawn}, absent or {})
    has = {*removed, *(COMPONENTS if components is None else components)}
    add_arrows(figure, has, removed, absent or {})
    return figure


def _arrays(
    stages: StageMaps | Mapping[Any, StageMap] | None, normalised: bool = False
) -> dict[Any, np.ndarray]:
    """Return stages as arrays by letter: the given maps, or the means of captured maps."""
    if stages is None or isinstance(stages, Mapping):
        return {letter: np.asarray(values) for letter, values in (stages or {}).items()}
    of = stages.normalised if normalised else stages.mean
    return {letter: np.asarray(of(letter)) for letter in stages.folds}


def views(
    maps: Mapping[Letter, np.ndarray],
    reference: Mapping[Letter, np.ndarray],
    normalised: Mapping[Letter, np.ndarray],
) -> dict[str, dict[StageView, np.ndarray]]:
    """Return the maps of each view, by the view's name.

    Scores are not inner products of a single stage's vectors, so they have no cosines. A view of
    cosines shows the scores themselves.

    Args:
        maps: per letter its Gram map, or score map in nats for (b) and (i); NaN where masked.
        reference: the intact model's maps, to compare with; empty without an ablation.
        normalised: the maps less the mean of each diagonal; empty for no such view.

    Raises:
        UserError: for no maps, or for a letter that is no stage.
    """
    letters = [letter for letter in LETTERS if letter in maps]
    if len(letters) < len(maps) or not maps:
        got = " ".join(sorted({*maps} - {*LETTERS})) or "none"
        raise UserError(f"expected maps of the stages a to i, got {got}")
    kinds: dict[MapKind, Models] = {RAW: {"shown": maps, "reference": reference}}
    if len({*maps[letters[0]].shape}) == 1:
        kinds[COSINES] = {of: _cosines_of(cells) for of, cells in kinds[RAW].items()}
    for models in kinds.values() if reference else ():
        models["difference"] = {
            letter: models["shown"][letter] - models["reference"][letter] for letter in letters
        }
    kinds[DIAGONAL] = {"shown": normalised}
    return {
        ", ".join([MODELS[of]] * bool(reference) + [kind] * (kind != RAW or not reference)): {
            (letter, of, RAW if kind == COSINES and letter in SCORE_STAGES else kind): cells[letter]
            for letter in letters
        }
        for kind, models in kinds.items()
        for of, cells in models.items()
        if cells
    }


def _cosines_of(maps: Mapping[Letter, np.ndarray]) -> Mapping[Letter, np.ndarray]:
    return {
        letter: cells if letter in SCORE_STAGES else cosines(cells)
        for letter, cells in maps.items()
    }


def cosines(
    gram: Float[np.ndarray, "row_pos col_pos"],
) -> Float[np.ndarray, "row_pos col_pos"]:
    """Return mean inner products over the root mean square lengths of both positions' vectors.

    Example:
        >>> cosines(np.array([[4.0, 3.0], [3.0, 9.0]])).tolist()
        [[1.0, 0.5], [0.5, 1.0]]
    """
    lengths = np.sqrt(np.diagonal(gram))
    known = np.where(lengths > 0, lengths, np.nan)
    return gram / known[:, None] / known


def is_signed(stage: StageView) -> bool:
    """Return whether a map's colours centre on zero."""
    return stage[1] == "difference" or stage[2] != RAW


def limits(values: Sequence[np.ndarray], signed: bool, skip: int = 0) -> Extent:
    """Return the colour limits of maps on one scale: the middle 90% of cells off the diagonal.

    Args:
        values: the maps.
        signed: whether colours centre on zero.
        skip: how many first rows and columns to leave out.
    """
    scales = []
    for cells in (of_map[skip:, skip:] for of_map in values):
        known = np.isfinite(cells)
        off = cells[known & (np.eye(*cells.shape) == 0)]
        off = off if off.size else cells[known]
        low, high = np.percentile(np.abs(off) if signed else off, MIDDLE) if off.size else (0, 1)
        scales.append((-(high or 1.0), high or 1.0) if signed else (low, high))
    return float(min(low for low, _ in scales)), float(max(high for _, high in scales))


def scales_of(shown: Mapping[StageView, np.ndarray], skip: int = 0) -> dict[StageView, Extent]:
    """Return the colour limits of all maps.

    A stage of the ablated model has the colours of the intact stage. Inner products of different
    stages never share a scale, because vectors differ in length by an order of magnitude; cosines
    do. The first `skip` rows and columns are left out.
    """
    scales = {}
    for letter, of, kind in shown:
        alike: tuple[Of, ...] = ("difference",) if of == "difference" else ("shown", "reference")
        maps = [shown[letter, model, kind] for model in alike if (letter, model, kind) in shown]
        scales[letter, of, kind] = limits(maps, is_signed((letter, of, kind)), skip)
    changes = [high for (_, *of), (_, high) in scales.items() if of == ["difference", COSINES]]
    top = {"difference": max(changes, default=1.0)}
    return {
        (letter, of, kind): (-top.get(of, 1.0), top.get(of, 1.0)) if kind == COSINES else scale
        for (letter, of, kind), scale in scales.items()
    }


def formula(letter: Letter) -> str:
    """Return the formula of a stage in plotly's markup."""
    text = STAGE_MEANINGS[letter].replace("ᵀ", "<sup>T</sup>").replace("W_O", "W<sub>O</sub>")
    return f"{text}, nats" if letter in SCORE_STAGES else text


def _heat(stage: StageView, view: str, pooled: Pooled, place: int) -> PlotlyTrace:
    """Return a map on its colour axis: one for each map, so that no switch exchanges limits."""
    letter, _, kind = stage
    quantity = "score %{z:.3g} nat" if letter in SCORE_STAGES else "inner product %{z:.3g}"
    (trace,) = heat_map(
        pooled.values[0],
        float(pooled.block),
        LETTERS.index(letter),
        name=letter,
        coloraxis=f"coloraxis{axis(place)}",
        value="cosine %{z:.3g}" if kind == COSINES else quantity,
        label=f"({letter}) {formula(letter)}<br>{view}",
    )
    return trace


def place_stages(title: str) -> go.Figure:
    """Return the figure of empty panels, with each stage's letter and formula."""
    figure = place_panels(
        title,
        [None, *(f"<b>({letter})</b> {formula(letter)}" for letter in LETTERS)],
        columns=5,
        panel=PANEL,
        gap=GAP / SIZE[0],
        row_gap=round((DOWN - 1) * PANEL),
        x_title="key position",
        y_title="query position",
        shared_y=True,
    )
    same = {"showgrid": False, "zeroline": False, "constrain": "domain", "nticks": 4}
    figure.update_xaxes(same, tickfont_size=10)
    figure.update_yaxes(same, tickfont_size=10, autorange="reversed", constraintoward="middle")
    for panel, caption in enumerate(figure.layout.annotations):
        left, _ = figure.layout[f"xaxis{axis(panel)}"].domain
        caption.update(x=left, xanchor="left", font_size=12)
        figure.layout[f"yaxis{axis(panel)}"].scaleanchor = f"x{axis(panel)}"
    height = round(SIZE[1] * PANEL) + MARGIN["t"] + MARGIN["b"]
    look = {"plot_bgcolor": BLANK, "paper_bgcolor": "#ffffff"}
    return figure.update_layout(height=height, margin=MARGIN, **look)


def add_reasons(figure: go.Figure, drawn: Collection[str], absent: Mapping[str, str]) -> None:
    """Blank the panels that have no map, and write into them why a stage does not exist."""
    for panel, letter in enumerate(LETTERS):
        if letter not in drawn:
            blank = {"showticklabels": False, "range": [0, 1]}
            figure.update_layout({f"{along}axis{axis(panel)}": blank for along in "xy"})
        if letter in absent:
            text = "<br>".join(wrap(absent[letter], 23))
            where = {"x": 0.5, "y": 0.5, "showarrow": False, **inside(panel)}
            figure.add_annotation(text=text, font={"size": 11, "color": ZERO}, **where)


def add_arrows(
    figure: go.Figure, has: Collection[str], removed: Collection[str], absent: Collection[str]
) -> None:
    """Draw the arrows: lines as shapes; arrowheads, words and crosses as annotations.

    Args:
        figure: the figure of panels.
        has: the model's components; operations of other components are left out.
        removed: components that are removed: their words and arrows are struck through.
        absent: stages that the block lacks; arrows to them are faint and have no words.
    """
    for name, corners in PATHS.items():
        faint = name[-1] in absent
        operations = [of for of in OPERATIONS.get(name, ()) if not of[1] or of[1] in has]
        gone = [component for _, component in operations if component in removed]
        colour = ZERO if faint else TABLE[gone[0]].colour if gone else INK
        line = {"color": colour, "width": 1.5, "dash": "dot" if gone else "solid"}
        look = {"opacity": 0.35 if faint else 1.0, "xref": "paper", "yref": "paper"}
        path = " L ".join("{:.4f},{:.4f}".format(*_on_paper(corner)) for corner in corners)
        figure.add_shape(type="path", path=f"M {path}", line=line, **look)
        (x0, y0), (x1, y1) = corners[-2:]
        tail: Layout = {"ax": 9 * float(np.sign(x0 - x1)), "ay": 9 * float(np.sign(y0 - y1))}
        head: Layout = {"showarrow": True, "arrowhead": 2, "arrowwidth": 1.5, "arrowcolor": colour}
        _note(figure, corners[-1], **head, **tail, opacity=look["opacity"])
        if faint or not operations:
            continue
        (x0, y0), (x1, y1) = corners[1:3] if name == "e_g" else corners[:2]
        middle = (x0 + x1) / 2, (y0 + y1) / 2
        text = "<br>".join(f"<s>{word}</s>" if of in removed else word for word, of in operations)
        _note(figure, middle, text, font_size=11, **BESIDE.get(name, BESIDE["b"]))
        _note(figure, middle, "<b>✕</b>" * bool(gone), font={"size": 18, "color": colour})
    for point, text, size in ((X, "<b>X</b>", 16), (JOIN, "⊕", 20), (SUM, "⊕", 20)):
        _note(figure, point, text, font_size=size)


def _note(figure: go.Figure, at: Point, text: str = "", **keys: Any) -> None:
    x, y = _on_paper(at)
    where = {"xref": "paper", "yref": "paper", "xanchor": "center", "yanchor": "middle"}
    figure.add_annotation({"text": text, "x": x, "y": y, "showarrow": False, **where, **keys})


def _on_paper(point: Point) -> Point:
    """Return a point as shares of the plotting area, from its lower left corner."""
    return point[0] / SIZE[0], 1 - point[1] / SIZE[1]


def add_switch(
    figure: go.Figure,
    shown: Mapping[str, Collection[StageView]],
    scales: Mapping[StageView, Extent],
) -> None:
    """Colour all maps, and add the switch of views: a menu in notebooks, metadata for the page."""
    layout = figure.layout
    for trace, (stage, scale) in zip(figure.data, scales.items(), strict=True):
        across = layout[f"xaxis{axis(LETTERS.index(stage[0]))}"].domain
        _, y = _on_paper((0, CORNER[stage[0]][1] + 1 + BAR / PANEL))
        colours = {"colorscale": DIVERGING if is_signed(stage) else SEQUENTIAL}
        bar = {"colorbar": colour_bar("", across, y)}
        layout[trace.coloraxis] = colour_limits(scale) | colours | bar
    views = {view: [stage in of_view for stage in scales] for view, of_view in shown.items()}
    for trace, is_shown in zip(figure.data, next(iter(views.values())), strict=True):
        trace.visible = is_shown
    buttons = [
        {"label": view, "method": "restyle", "args": [{"visible": flags}]}
        for view, flags in views.items()
    ]
    look = {"bgcolor": "#ffffff", "font": {"size": 12}, "pad": {"b": 14}, "xanchor": "left", "x": 0}
    place = {"y": 1 + TITLE / PANEL / SIZE[1], "yanchor": "bottom"}
    layout.updatemenus = [{"buttons": buttons, **look, **place}]
    layout.meta = {"views": views, "menu": MENU}
