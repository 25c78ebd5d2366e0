"""The circuit figure: the paper's Figure 3, a map for each stage (a) to (i) of a block in a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from nope_probe.errors import UserError, validate_types
from nope_probe.figures.names import words
from nope_probe.figures.panels import RowMaps, panel_groups, pool
from nope_probe.figures.style import percentiles
from nope_probe.removal import REMOVABLE
from nope_probe.stages import LETTERS, SCORE_STAGES, STAGE_WORDS, Letter

if TYPE_CHECKING:
    from nope_probe.maps.maps import StageMaps

StageMap: TypeAlias = Float[Any, "row_pos col_pos"]
MapKind = Literal["raw", "cosines", "less diagonal means"]
MIDDLE = (5.0, 95.0)  # colours run between these percentiles of the cells off the diagonal
COMPONENTS = ("mask", "w_q", "w_k", "w_o", "w_v", "mlp")
MAX_POSITIONS = {1: 128, 3: 64}  # of a map, by the maps of a stage
COMPONENT_OF = {"FFN": "mlp", "weights": "norms"}  # words on arrows that are no names


def circuit(
    stages: StageMaps | Mapping[Any, StageMap],
    *,
    layer: int = 0,
    removed: Sequence[str] = (),
    reference: StageMaps | Mapping[Any, StageMap] | None = None,
    kind: MapKind = "raw",
    components: Sequence[str] | None = None,
    query_positions: Int[np.ndarray, " row"] | None = None,
    skip_keys: int | Literal["auto"] = "auto",
) -> go.Figure:
    """Draw a block's stages in the paper's order, each behind an arrow with what leads to it.

    With a reference, a stage has three maps: of the intact and the ablated model, on one scale, and
    their difference. Scales of other stages differ, because stages differ by an order of magnitude.
    Colours run over the middle 90% of the cells off the diagonal.

    Args:
        stages: the result of `capture_stages`, or maps by letter.
        layer: the block under study, from 0.
        removed: the components that an ablation removed, which are struck through.
        reference: the intact model's stages, to compare with.
        kind: the maps, their cosines (inner products over the vectors' lengths; scores have none),
            or captured maps less the mean of each diagonal. Maps by letter are shown as given.
        components: the components that the model has; by default mask, weights, MLP and `removed`.
        query_positions: the queries of the rows, if some queries have none; captured stages hold
            them. Cosines need the rows of all queries.
        skip_keys: first positions that the colour limits leave out, as in `score_maps`.

    Raises:
        UserError: for no maps, or for a letter that is no stage.

    Example:
        >>> import numpy as np
        >>> from nope_probe import figures
        >>> figures.circuit({"a": np.eye(5), "b": np.tri(5)}).layout.title.text
        "L0, from its input to the next layer's scores"
    """
    choices = {"skip_keys": int | Literal["auto"], "kind": MapKind}
    validate_types(choices, {"skip_keys": skip_keys, "kind": kind})
    skip = getattr(stages, "skip_keys", 0) if skip_keys == "auto" else skip_keys
    if not isinstance(stages, Mapping):
        query_positions = stages.query_positions.numpy()
    shown, intact = (_arrays(of_model, kind) for of_model in (stages, reference))
    letters = [letter for letter in LETTERS if letter in shown]
    if len(letters) < len(shown) or not shown:
        got = " ".join(sorted({*shown} - {*LETTERS})) or "none"
        raise UserError(f"expected maps of the stages a to i, got {got}")
    has = {*removed, *(COMPONENTS if components is None else components)}
    max_positions = MAX_POSITIONS[3 if intact else 1]
    groups = []
    for letter in letters:
        unit = "nats" if letter in SCORE_STAGES else "inner product"
        title, change = _title(letter, has, removed), {}
        models = {title: shown[letter]}
        if intact:
            models = {title: intact[letter], f"({letter}) ablated": shown[letter]}
            change = {f"({letter}) difference": shown[letter] - intact[letter]}
        groups.append(
            [
                pool(RowMaps(values=cells[None], queries=query_positions), max_positions).panel(
                    0,
                    name,
                    low=low,
                    high=high,
                    unit="cosine" if kind == "cosines" else unit,
                    diverging=is_signed,
                )
                for alike, is_signed in ((models, kind != "raw"), (change, True))
                if alike
                for low, high in [limits([*alike.values()], is_signed, skip)]
                for name, cells in alike.items()
            ]
        )
    without = f", without {', '.join(map(words, removed))}" if removed else ""
    title = f"L{layer}, from its input to the next layer's scores{without}"
    return panel_groups(groups, title=title)


def _arrays(
    stages: StageMaps | Mapping[Any, StageMap] | None, kind: MapKind
) -> dict[Any, np.ndarray]:
    """Return maps as arrays by letter, of captured stages their means; as cosines if asked for."""
    if stages is None:
        return {}
    if isinstance(stages, Mapping):
        maps = {letter: np.asarray(values) for letter, values in stages.items()}
    else:
        mean = stages.normalised if kind == "less diagonal means" else stages.mean
        maps = {letter: np.asarray(mean(letter)) for letter in stages.folds}
    if kind == "cosines":
        return {letter: cosines(maps[letter]) for letter in maps if letter not in SCORE_STAGES}
    return maps


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


def limits(values: Sequence[np.ndarray], signed: bool, skip: int = 0) -> tuple[float, float]:
    """Return the colour limits of maps on one scale: the middle 90% of cells off the diagonal.

    Args:
        values: the maps.
        signed: whether colours centre on zero.
        skip: how many first rows and columns to leave out.
    """
    ends = []
    for cells in (of_map[skip:, skip:] for of_map in values):
        off = cells[np.eye(*cells.shape) == 0]
        ends.append(percentiles(np.abs(off) if signed else off, MIDDLE))
    low, high = float(np.min(ends, axis=0)[0]), float(np.max(ends, axis=0)[1])
    return (-(high or 1.0), high or 1.0) if signed else (low, high)


def _title(letter: Letter, has: set[str], removed: Sequence[str]) -> str:
    """Return the arrow to a stage, with its operations, and under it the letter and formula."""
    stage, operations = STAGE_WORDS[letter], []
    for word in stage.arrow.split():
        component = COMPONENT_OF.get(word, word.lower())
        if component in has or component not in REMOVABLE:
            operations.append(f"<s>{word}</s>" if component in removed else word)
    text = f"{' '.join(operations)} →<br><b>({letter})</b> {stage.formula}"
    return re.sub("W_(.)", r"W<sub>\1</sub>", text).replace("ᵀ", "<sup>T</sup>")
