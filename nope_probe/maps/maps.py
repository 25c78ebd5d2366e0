"""Captured maps: fold means of attention scores, of weights, and of the stages around a block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nope_probe.errors import UserError, kind_of
from nope_probe.maps.folds import State, TensorRecord, pooled, tensors_of
from nope_probe.maps.layers import LayerMaps, PackedFolds
from nope_probe.maps.rows import MapRows, QueryPositions, diagonal_normalised, pattern_rms
from nope_probe.stages import Letter

Layers = dict[int, LayerMaps]  # the maps of a model's layers, by their numbers
NO_HEADS = "the maps have no heads: capture_scores(..., per_head=True) keeps them"
SHOWN = 64  # positions of the figure at the end of a notebook's cell


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerRecord(TensorRecord):
    """Maps of some layers by their numbers, or of one head.

    Attributes:
        visible: the cells that the model does not mask.
        counts: sequences per fold.
        layers: the number of each layer's block, in the order of the maps.
        query_positions: the queries of the rows.
        of_head: the head, if the maps are of one head alone.
    """

    visible: Bool[Tensor, "layer row key_pos"]
    counts: Int[Tensor, " fold"]
    layers: tuple[int, ...]
    query_positions: Int[Tensor, " row"]
    of_head: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers, or of the head: `L3`, or `L3H4`."""
        head = "" if self.of_head is None else f"H{self.of_head}"
        return tuple(f"L{layer}{head}" for layer in self.layers)

    def place_of(self, layer: int, head: int, heads: Sequence[int]) -> tuple[int, int]:
        """Return the places of a layer among the layers, and of a head among its heads.

        Raises:
            UserError: for a head that is not there.
        """
        if layer not in self.layers or head not in heads:
            first, last = (f"L{self.layers[end]}H{heads[end]}" for end in (0, -1))
            raise UserError(f"no L{layer}H{head}; there are {first} to {last}")
        return self.layers.index(layer), heads.index(head)

    def frame_of(
        self, column: str, values: Float[Tensor, "*axes"], heads: Sequence[int]
    ) -> pd.DataFrame:
        """Return a row for each layer, head (if any), query and key that hold a number."""
        of_heads = {"head": heads} if heads else {}
        queries, keys = self.query_positions.tolist(), range(values.shape[-1])
        return cells_frame(column, values, layer=self.layers, **of_heads, query=queries, key=keys)


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoreMaps(LayerRecord):
    """Mean attention scores, in nats; see `LayerRecord`.

    Attributes:
        folds: fold means; masked cells are NaN (j > i, unless the mask is removed).
        per_head: the fold means for each query head; or None.
        bos: whether all sequences begin with the same token.
        skip_keys: how many first keys patterns leave out; captures set 1 for tokens.
        across_halves: whether something was estimated on the texts of each half of the folds; see
            `LayerMaps`.
        checksums: of the inputs, then of each layer's block; none of maps that were not captured.
    """

    folds: Float[Tensor, "fold layer row key_pos"]
    per_head: Float[Tensor, "fold layer head row key_pos"] | None = None
    bos: bool = False
    skip_keys: int = 0
    across_halves: bool = False
    checksums: tuple[int, ...] = ()

    @property
    def where(self) -> MapRows:
        """The queries of the rows, and their keys."""
        return MapRows.of(self.folds, self.query_positions)

    def __repr__(self) -> str:
        """Return sizes, and the strength of each layer's positional pattern."""
        n_layers, n_rows, n = self.folds.shape[1:]
        strength = pattern_rms(self.mean, self.skip_keys, self.where).tolist()
        named = zip(self.names, strength, strict=True)
        shown = ", ".join(f"{name} {value:.3g}" for name, value in named)
        heads = "" if self.per_head is None else f", {self.per_head.shape[2]} heads each"
        of = f"{n_layers} layers{heads}" if self.of_head is None else self.names[0]
        return (
            f"ScoreMaps: {of}, {n_rows} queries × {n} keys, in nats\n"
            f"{_data(self)}\n"
            f"RMS of the positional pattern, nats, noise included: {shown}"
        )

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        """Return the figure of each layer's positional pattern, which a notebook shows."""
        figures = import_module("nope_probe.figures")  # which know maps
        patterns = [layer.pattern.mean_with_lead() for layer in self.by_layer.values()]
        rows = figures.RowMaps(
            values=torch.stack(patterns).numpy(),
            queries=self.query_positions.numpy(),
            skip_keys=self.skip_keys,
        )
        shown = {"title": "Positional pattern", "layers": self.layers, "max_positions": SHOWN}
        name = "" if self.of_head is None else self.names[0]
        figure = figures.term_maps({name: rows}, **shown)
        html = figure.to_html(full_html=False, include_plotlyjs="cdn")  # for nbconvert
        return {**figure._repr_mimebundle_(), "text/html": html, "text/plain": repr(self)}

    @property
    def mean(self) -> Float[Tensor, "layer row key_pos"]:
        """The mean over all sequences and heads, in the order of `layers`."""
        return pooled(self.folds, self.counts)

    @property
    def heads(self) -> Float[Tensor, "layer head row key_pos"]:
        """The mean over all sequences of every head, in the order of `layers`.

        Raises:
            UserError: for maps that were captured without heads.
        """
        if self.per_head is None:
            raise UserError(NO_HEADS)
        return pooled(self.per_head, self.counts)

    def head(self, layer: int, head: int) -> ScoreMaps:
        """Return the maps of one head, which keep its name: `head(3, 4)` is L3H4.

        Raises:
            UserError: for maps that were captured without heads, or that have no such head.
        """
        if self.per_head is None:
            raise UserError(NO_HEADS)
        place, index = self.place_of(layer, head, range(self.per_head.shape[2]))
        return replace(
            self,
            folds=self.per_head[:, [place], index],
            visible=self.visible[[place]],
            per_head=None,
            layers=(layer,),
            of_head=head,
            checksums=(*self.checksums[:1], *self.checksums[1:][place : place + 1]),
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each layer (or the head), query and visible key: the score, nats."""
        return self.frame_of("score", self.mean, () if self.of_head is None else (self.of_head,))

    @property
    def by_layer(self) -> Layers:
        """The maps of each layer by its number, which know their folds and rows."""
        about = self.counts, self.query_positions, self.skip_keys, self.across_halves
        layers: Layers = {}
        for place, number in enumerate(self.layers):
            heads = () if self.per_head is None else self.per_head[:, place].unbind(1)
            of_heads = tuple(LayerMaps.of(folds, *about) for folds in heads)
            layers[number] = replace(LayerMaps.of(self.folds[:, place], *about), heads=of_heads)
        return layers


def maps_by_layer(
    maps: ScoreMaps | Layers | Float[Tensor, "fold layer row key_pos"],
    counts: Int[Tensor, " fold"] | None = None,
    query_positions: QueryPositions = None,
) -> Layers:
    """Return the maps of each layer by its number; fold means are counted from 0.

    Args:
        maps: captured maps, the maps of layers, or fold means of scores, in nats.
        counts: for fold means, the sequences per fold; all the same by default.
        query_positions: for fold means, the queries of the rows; all by default.

    Raises:
        UserError: for anything else.
    """
    if isinstance(maps, ScoreMaps):
        return maps.by_layer
    if isinstance(maps, Tensor) and maps.dim() == 4:
        layers = enumerate(maps.unbind(1))
        return {layer: LayerMaps.of(folds, counts, query_positions) for layer, folds in layers}
    if isinstance(maps, dict) and all(isinstance(layer, LayerMaps) for layer in maps.values()):
        return maps
    raise UserError(
        "expected maps of `capture_scores`, or fold means [fold, layer, row, key_pos], got "
        f"{kind_of(maps)}"
    )


def packed_tensors(maps: ScoreMaps) -> State:
    """Return the tensors of score maps by name, folds as cells j <= i, for `stored_layers`.

    The tensors include the queries of the rows if the maps do not have all rows.
    """
    numbers = {"skip_keys": maps.skip_keys, "across_halves": maps.across_halves}
    tensors = {"counts": maps.counts, **tensors_of(numbers)}
    where = maps.where
    if len(where.queries) < where.n:
        tensors["query_positions"] = where.queries
    for place, layer in enumerate(maps.layers):
        named = {f"{layer}": maps.folds[:, place]}
        if maps.per_head is not None:
            heads = maps.per_head[:, place].unbind(1)
            named |= {f"{layer}/{head}": folds for head, folds in enumerate(heads)}
        for name, folds in named.items():
            tensors[f"{name}/folds"] = where.pack(folds)
            tensors[f"{name}/mean"] = pooled(folds, maps.counts)
    return tensors


def stored_layers(stored: State) -> Layers:
    """Return the maps of each layer from the tensors of `packed_tensors`, in memory or a file.

    Maps of a file are mapped from it, those of heads too, and read where they are used.
    """
    queries, counts = stored.get("query_positions"), stored["counts"]
    skip_keys, across_halves = int(stored["skip_keys"]), bool(stored["across_halves"])
    maps: dict[tuple[int, ...], LayerMaps] = {}  # by layer, and by head
    for name in (key.removesuffix("/mean") for key in stored if key.endswith("/mean")):
        cells = stored[f"{name}/folds"]
        maps[tuple(map(int, name.split("/")))] = LayerMaps(
            folds=PackedFolds(cells, MapRows.of_cells(cells.shape[1], queries)),
            counts=counts,
            skip_keys=skip_keys,
            across_halves=across_halves,
            stored_mean=stored[f"{name}/mean"],
        )
    layers: Layers = {}
    for (number, *head), of_place in sorted(maps.items(), key=lambda item: item[0]):
        layer = layers.get(number, of_place)  # a layer comes before its heads
        layers[number] = replace(layer, heads=(*layer.heads, of_place)) if head else layer
    return layers


def heads_of(layers: Layers) -> dict[tuple[int, int], LayerMaps]:
    """Return the maps of each head by its layer and number.

    Raises:
        UserError: for maps that were captured without heads.
    """
    if not all(layer.heads for layer in layers.values()):
        raise UserError(NO_HEADS)
    return {
        (number, head): maps
        for number, layer in layers.items()
        for head, maps in enumerate(layer.heads)
    }


@dataclass(frozen=True, kw_only=True, repr=False)
class StageMaps(TensorRecord):
    """Gram maps of the paper's stages; (b) and (i) are score maps, in nats.

    Attributes:
        folds: fold means, per letter.
        visible: for score maps, the cells that the model does not mask.
        counts: sequences per fold.
        bos: whether all sequences begin with the same token.
        skip_keys: how many first keys patterns leave out, as in `ScoreMaps`.
        query_positions: the positions of the rows.
    """

    folds: dict[Letter, Float[Tensor, "fold row col_pos"]]
    visible: dict[Letter, Bool[Tensor, "row key_pos"]]
    counts: Int[Tensor, " fold"]
    bos: bool = False
    skip_keys: int = 0
    query_positions: Int[Tensor, " row"]

    def __repr__(self) -> str:
        """Return the stages, and how much data their means are taken over."""
        n_rows, n = next(iter(self.folds.values())).shape[-2:]
        return (
            f"StageMaps: stages {' '.join(self.folds)}, {n_rows} × {n} positions; (b) and (i) "
            "in nats\n"
            f"{_data(self)}"
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each stage and two positions that it has a number of: the number."""
        means = torch.stack([self.mean(letter) for letter in self.folds])
        axes = {"row": self.query_positions.tolist(), "column": range(means.shape[-1])}
        return cells_frame("value", means, stage=[*self.folds], **axes)

    def mean(self, letter: Letter) -> Float[Tensor, "row col_pos"]:
        """Return the mean over all sequences of one stage's map."""
        return pooled(self.folds[letter], self.counts)

    def layer_maps(self, letter: Letter) -> LayerMaps:
        """Return one stage's maps, which know their folds and rows."""
        folds = self.folds[letter]
        return LayerMaps.of(folds, self.counts, self.query_positions, self.skip_keys)

    def normalised(self, letter: Letter) -> Float[Tensor, "row col_pos"]:
        """Return the mean map of one stage, less the mean of each diagonal."""
        return diagonal_normalised(self.mean(letter), self.layer_maps(letter).folds.where)


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionMaps(LayerRecord):
    """The mean attention weights and scores of every head, and its mean information, in nats.

    Attributes:
        weights: fold means of the attention weights; 0 where the model masks.
        information: fold means of KL(A, U), of a query's weights above uniform ones, nats.
        others: fold means of (1 - a) KL(A', U'), the part among the other keys, nats.
        skip_keys: how many first keys are measured separately from the others.
        scores: fold means of the scores, nats; NaN where the model masks. None if the capture left
            them out.
        sinks: fold means of what each head's learned sink takes of a query's attention, a part of
            1; None without sinks. The weights are those of the keys without it, and add up to 1.
    """

    weights: Float[Tensor, "fold layer head row key_pos"]
    information: Float[Tensor, "fold layer head row"]
    others: Float[Tensor, "fold layer head row"]
    skip_keys: int
    scores: Float[Tensor, "fold layer head row key_pos"] | None = None
    sinks: Float[Tensor, "fold layer head"] | None = None

    def __repr__(self) -> str:
        """Return sizes, and how much data the means are taken over."""
        n_layers, n_heads, n_rows, n = self.weights.shape[1:]
        of = f"{n_layers} layers of {n_heads} heads" if self.of_head is None else self.names[0]
        return (
            f"AttentionMaps: {of}, {n_rows} queries × {n} keys\n"
            f"means over {int(self.counts.sum())} sequences in {len(self.counts)} folds"
        )

    @property
    def mean(self) -> Float[Tensor, "layer head row key_pos"]:
        """The mean weights over all sequences; 0 where the model masks."""
        return pooled(self.weights, self.counts)

    @property
    def mean_over_heads(self) -> Float[Tensor, "layer row key_pos"]:
        """The mean weights over all sequences and heads; NaN where the model masks."""
        return self.mean.mean(1).masked_fill(~self.visible, torch.nan)

    @property
    def heads(self) -> Sequence[int]:
        """The numbers of each layer's heads."""
        return range(self.weights.shape[2]) if self.of_head is None else (self.of_head,)

    def head(self, layer: int, head: int) -> AttentionMaps:
        """Return the maps of one head, which keep its name: `head(3, 4)` is L3H4.

        Raises:
            UserError: for maps that have no such head.
        """
        place, index = self.place_of(layer, head, self.heads)
        names = ("weights", "information", "others", "scores", "sinks")
        whole = {name: getattr(self, name) for name in names}
        of_head: dict[str, Any] = {
            name: None if tensor is None else tensor[:, [place]][:, :, [index]]
            for name, tensor in whole.items()
        }
        visible = self.visible[[place]]
        return replace(self, visible=visible, layers=(layer,), of_head=head, **of_head)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each layer, head, query and visible key: the weight."""
        weights = self.mean.masked_fill(~self.visible[:, None], torch.nan)
        return self.frame_of("weight", weights, self.heads)


def cells_frame(
    column: str, values: Float[Tensor, "*axes"], /, **axes: Iterable[Hashable]
) -> pd.DataFrame:
    """Return a row for each cell that holds a number, with its place on each axis.

    Example:
        >>> cells_frame("score", torch.tensor([[1.0, torch.nan]]), layer=[3], key=[0, 1])
           layer  key  score
        0      3    0    1.0
    """
    index = pd.MultiIndex.from_product([*axes.values()], names=[*axes])
    cells = pd.Series(values.double().flatten().numpy(), index, name=column)
    return cells.dropna().reset_index()


def _data(maps: ScoreMaps | StageMaps) -> str:
    begin = "; all begin with the same token (BOS)" if maps.bos else ""
    return f"means over {int(maps.counts.sum())} sequences in {len(maps.counts)} folds{begin}"
