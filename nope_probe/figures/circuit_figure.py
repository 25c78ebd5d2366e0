"""The circuit figure: the data flow through one block, with a heat map at each stage (a) to (i).

It is the paper's Figure 3 with the block drawn around it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from nope_probe.errors import closed_choices
from nope_probe.figures.circuit_layout import (
    BAR,
    LABELLED,
    MARGIN,
    MENU,
    PANEL,
    Flow,
    arrows,
    block_flow,
)
from nope_probe.figures.names import words
from nope_probe.figures.panels import Pooled, RowMaps, heat_map, pool
from nope_probe.figures.style import (
    BLANK,
    DIVERGING,
    SEQUENTIAL,
    TEMPLATE,
    ZERO,
    Layout,
    PlotlyTrace,
    axis,
    colour_bar,
    colour_limits,
)
from nope_probe.removal import INK
from nope_probe.stages import LETTERS, SCORE_STAGES, STAGE_MEANINGS, Letter

if TYPE_CHECKING:
    from nope_probe.maps.maps import StageMaps

StageMap: TypeAlias = Float[Any, "row_pos col_pos"]
Of = Literal["shown", "reference", "difference"]
MapKind = Literal["raw", "cosines", "less diagonal means"]
StageView = tuple[Letter, Of, MapKind]
Scale = tuple[float, float]
Choice = list[Layout]  # a switch's choice: keys of the traces, and keys of the layout
RAW: MapKind = "raw"
COSINES: MapKind = "cosines"
DIAGONAL: MapKind = "less diagonal means"
PER_STAGE, ALL_COSINES = "one for each stage", "one for all cosines"
MIDDLE = (5, 95)  # colours run between these percentiles of the cells off the diagonal
COMPONENTS = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
MAX_POSITIONS = 128
MAX_CELLS = 27 * MAX_POSITIONS**2  # of all maps together: 2.4 MB of a page
PAPER = "#ffffff"
COMPARED: dict[MapKind, dict[Of, str]] = {  # the views of an ablation
    RAW: {"shown": "ablated", "reference": "intact", "difference": "difference"},
    COSINES: {
        "shown": "ablated cosines",
        "reference": "intact cosines",
        "difference": "difference of cosines",
    },
}
OF = {"reference": "intact model", "difference": "ablated less intact"}


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
    an order of magnitude. The other switch puts all cosines on one scale. Colours run over the
    middle 90% of the cells off the diagonal.

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
        ValueError: for no maps, or for a letter that is no stage.

    Example:
        >>> import numpy as np
        >>> from nope_probe import figures
        >>> figures.circuit({"a": np.eye(5), "b": np.tri(5)}).layout.title.text
        "L0, from its input to the next layer's scores"
    """
    if normalised is None and not isinstance(stages, Mapping):
        normalised = stages
    maps = _stage_maps(stages)
    shown = views(maps, _stage_maps(reference), _stage_maps(normalised, normalised=True))
    drawn = {stage: cells for view in shown.values() for stage, cells in view.items()}
    size = min(MAX_POSITIONS, int((MAX_CELLS / len(drawn)) ** 0.5))
    if query_positions is None and not isinstance(stages, Mapping):
        query_positions = stages.query_positions.numpy()
    pooled = {
        stage: pool(RowMaps(values=cells[None], queries=query_positions), size)
        for stage, cells in drawn.items()
    }
    # A colour axis for each map, so that the switches need not exchange limits.
    axes = {stage: f"coloraxis{axis(place)}" for place, stage in enumerate(drawn)}
    first = next(iter(shown.values()))
    traces = [_heat(stage, pooled[stage], axes[stage], visible=stage in first) for stage in drawn]
    block = next(iter(pooled.values())).block
    if skip_keys == "auto":
        skip_keys = int(getattr(stages, "skip_keys", 0))
    skipped = -(-skip_keys // block)
    scales = scales_of({stage: maps.values[0] for stage, maps in pooled.items()}, skipped)
    has, absent = (*COMPONENTS, *removed) if components is None else components, absent or {}
    flow = block_flow()
    without = f", without {', '.join(map(words, removed))}" if removed else ""
    layout = _layout(flow, maps, axes, arrows(flow, has, removed, absent), absent)
    layout |= {"template": TEMPLATE, "plot_bgcolor": BLANK, "paper_bgcolor": PAPER}
    layout["title"] = {"text": f"L{layer}, from its input to the next layer's scores{without}"}
    _switch(layout, shown, scales, axes)
    return go.Figure(traces, layout)


def _switch(
    layout: Layout,
    shown: Mapping[str, Collection[StageView]],
    scales: Mapping[str, Mapping[StageView, Scale]],
    axes: Mapping[StageView, str],
) -> None:
    """Set the colours of all maps, and add the switches between views and between scales."""
    colours: dict[str, Choice] = {}
    for name, of_choice in scales.items():
        colours[name] = [{}, {}]
        for stage, scale in of_choice.items():
            colours[name][1] |= colour_limits(scale, f"{axes[stage]}.")
    for stage, coloraxis in axes.items():
        colorscale = DIVERGING if is_signed(stage) else SEQUENTIAL
        layout[coloraxis] |= colour_limits(scales[PER_STAGE][stage]) | {"colorscale": colorscale}
    maps_of = {
        name: [{"visible": [stage in view for stage in axes]}, {}] for name, view in shown.items()
    }
    add_switches(layout, {"Maps": maps_of, "Colours": colours})


def _stage_maps(
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
        ValueError: for no maps, or for a letter that is no stage.
    """
    letters = [letter for letter in LETTERS if letter in maps]
    if len(letters) < len(maps) or not maps:
        got = " ".join(sorted({*maps} - {*LETTERS})) or "none"
        raise ValueError(f"expected maps of the stages a to i, got {got}")
    views: dict[str, dict[StageView, np.ndarray]] = {}
    n_rows, n = next(iter(maps.values())).shape
    for kind in COMPARED if n_rows == n else (RAW,):
        models: dict[Of, Mapping[Letter, np.ndarray]] = {"shown": maps, "reference": reference}
        if kind == COSINES:
            models = {of: _cosines_of(cells) for of, cells in models.items()}
        if reference:
            models["difference"] = {
                letter: models["shown"][letter] - models["reference"][letter] for letter in letters
            }
        else:
            del models["reference"]
        for of, cells in models.items():
            views[COMPARED[kind][of] if reference else kind] = {
                (letter, of, RAW if letter in SCORE_STAGES else kind): cells[letter]
                for letter in letters
            }
    if normalised:
        name = f"ablated {DIAGONAL}" if reference else DIAGONAL
        views[name] = {(letter, "shown", DIAGONAL): normalised[letter] for letter in letters}
    return views


def _cosines_of(maps: Mapping[Letter, np.ndarray]) -> Mapping[Letter, np.ndarray]:
    """Return the cosines of Gram maps, and score maps themselves."""
    return {
        letter: cells if letter in SCORE_STAGES else cosines(cells)
        for letter, cells in maps.items()
    }


def cosines(
    gram: Float[np.ndarray, "row_pos col_pos"],
) -> Float[np.ndarray, "row_pos col_pos"]:
    """Return mean inner products over the root mean square lengths of both positions' vectors.

    Example:
        >>> cosines(np.array([[4.0, 3.0], [3.0, 9.0]]))[1].tolist()
        [0.5, 1.0]
    """
    lengths = np.sqrt(np.diagonal(gram).clip(min=0))
    known = np.where(lengths > 0, lengths, np.nan)
    return gram / known[:, None] / known


def is_signed(stage: StageView) -> bool:
    """Return whether a map's colours centre on zero."""
    return stage[1] == "difference" or stage[2] != RAW


def limits(values: Sequence[np.ndarray], signed: bool, skip: int = 0) -> Scale:
    """Return the colour limits of maps on one scale: the middle 90% of cells off the diagonal.

    Args:
        values: the maps.
        signed: whether colours centre on zero.
        skip: how many first rows and columns to leave out.
    """
    scales = [_limits(cells[skip:, skip:], signed) for cells in values]
    return min(low for low, _ in scales), max(high for _, high in scales)


def _limits(values: np.ndarray, signed: bool) -> Scale:
    n_rows, n = values.shape
    off = values[np.isfinite(values) & (np.arange(n_rows)[:, None] != np.arange(n))]
    off = off if off.size else values[np.isfinite(values)]
    if not off.size:
        return 0.0, 1.0
    if signed:
        top = float(np.percentile(np.abs(off), MIDDLE[1])) or 1.0
        return -top, top
    low, high = np.percentile(off, MIDDLE)
    return float(low), float(high)


def scales_of(
    shown: Mapping[StageView, np.ndarray], skip: int = 0
) -> dict[str, dict[StageView, Scale]]:
    """Return the colour limits of all maps, by the name of the switch's choice.

    A stage of the ablated model has the colours of the intact stage. Inner products of different
    stages never share a scale, because vectors differ in length by an order of magnitude; cosines
    can. The first `skip` rows and columns are left out.
    """
    scales = {}
    for letter, of, kind in shown:
        alike: tuple[Of, ...] = ("difference",) if of == "difference" else ("shown", "reference")
        maps = [shown[letter, model, kind] for model in alike if (letter, model, kind) in shown]
        scales[letter, of, kind] = limits(maps, is_signed((letter, of, kind)), skip)
    changes = [
        high for (_, of, kind), (_, high) in scales.items() if (of, kind) == ("difference", COSINES)
    ]
    tops: dict[Of, float] = {"shown": 1.0, "reference": 1.0, "difference": max(changes, default=1)}
    shared = {
        stage: (-tops[stage[1]], tops[stage[1]]) if stage[2] == COSINES else scale
        for stage, scale in scales.items()
    }
    return {PER_STAGE: scales, ALL_COSINES: shared}


def formula(letter: Letter) -> str:
    """Return the formula of a stage in plotly's markup."""
    text = STAGE_MEANINGS[letter].replace("ᵀ", "<sup>T</sup>").replace("W_O", "W<sub>O</sub>")
    return f"{text}, nats" if letter in SCORE_STAGES else text


def _heat(stage: StageView, pooled: Pooled, coloraxis: str, visible: bool) -> PlotlyTrace:
    letter, of, kind = stage
    about = [f"({letter}) {formula(letter)}", "" if kind == RAW else kind, OF.get(of, "")]
    quantity = "score %{z:.3g} nat" if letter in SCORE_STAGES else "inner product %{z:.3g}"
    (trace,) = heat_map(
        pooled.values[0],
        float(pooled.block),
        LETTERS.index(letter),
        name=letter,
        coloraxis=coloraxis,
        value="cosine %{z:.3g}" if kind == COSINES else quantity,
        label="<br>".join(filter(None, about)),
        visible=visible,
    )
    return trace


def _layout(
    flow: Flow,
    drawn: Collection[str],
    axes: Mapping[StageView, str],
    between: tuple[list[Layout], list[Layout]],
    absent: Mapping[str, str],
) -> Layout:
    """Return the layout keys of panels, arrows and colour bars.

    Args:
        flow: the places of panels and arrows.
        drawn: the letters with a map; other panels are blank.
        axes: each map's colour axis.
        between: the arrows, as `arrows` returns them.
        absent: the reason why a stage does not exist, per letter.
    """
    shapes, marks = between
    notes = [*marks, *_captions(flow, absent)]
    height = flow.height + MARGIN["t"] + MARGIN["b"]
    keys: Layout = {"height": height, "margin": {**MARGIN}}
    keys |= {"shapes": shapes, "annotations": notes}
    square = {"showgrid": False, "zeroline": False, "constrain": "domain", "nticks": 4}
    square["tickfont"] = {"size": 10}
    for panel, letter in enumerate(LETTERS):
        (x, y), at = flow.domain(letter), axis(panel)
        blank = {} if letter in drawn else {"showticklabels": False, "range": [0, 1]}
        title = letter == LABELLED
        keys[f"xaxis{at}"] = {
            **square,
            "anchor": f"y{at}",
            "domain": list(x),
            "title": {"text": "key position" if title else ""},
            **blank,
        }
        keys[f"yaxis{at}"] = {
            **square,
            "autorange": "reversed",
            "constraintoward": "middle",
            "scaleanchor": f"x{at}",
            "anchor": f"x{at}",
            "domain": list(y),
            "showticklabels": letter == LABELLED,
            "title": {"text": "query position" if title else ""},
            **blank,
        }
    for (letter, _, _), coloraxis in axes.items():
        x, _ = flow.domain(letter)
        top = flow.share(flow.tops[letter] + PANEL + BAR)
        keys[coloraxis] = {"colorbar": colour_bar(across=x, y=top)}
    return keys


def _captions(flow: Flow, absent: Mapping[str, str]) -> list[Layout]:
    """Return each panel's letter and formula, and in an empty panel the reason."""
    where = {"xref": "paper", "yref": "paper", "showarrow": False}
    captions = []
    for letter in LETTERS:
        x, y = flow.domain(letter)
        above = {"x": x[0], "y": y[1], "xanchor": "left", "yanchor": "bottom"}
        text, font = f"<b>({letter})</b> {formula(letter)}", {"size": 12, "color": INK}
        captions.append({"text": text, "font": font, **where, **above})
        if letter in absent:
            text, font = "<br>".join(wrap(absent[letter], 23)), {"size": 11, "color": ZERO}
            middle = {"x": sum(x) / 2, "y": sum(y) / 2}
            captions.append({"text": text, "font": font, **where, **middle})
    return captions


def add_switches(layout: Layout, switches: Mapping[str, Mapping[str, Choice]]) -> None:
    """Add switches: as menus for notebooks, and in the metadata for the report page.

    A choice has the arguments of `Plotly.update`: keys of the traces, and keys of the layout.
    """
    layout["updatemenus"] = []
    for index, choices in enumerate(switches.values()):
        buttons = [
            {"label": name, "method": "update", "args": args} for name, args in choices.items()
        ]
        where = {"x": 0.3 * index, "xanchor": "left", "y": 1, "yanchor": "bottom"}
        look = {"bgcolor": PAPER, "font": {"size": 12}, "pad": {"b": 14}, "showactive": True}
        menu = {"type": "dropdown", "buttons": buttons, **where, **look}
        layout["updatemenus"].append(menu)
    layout["meta"] = {"switches": switches, "menu": MENU}
