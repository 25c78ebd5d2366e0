"""One pass of the intact model, which measures gains, mean outputs and written positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import nan

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from nope_probe.errors import UserError
from nope_probe.files import json_checksum
from nope_probe.hooks.layers.attention import Attention, MeanPattern, upcast, whole
from nope_probe.hooks.layers.base_layer import Layer, Vectors, find_point
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint
from nope_probe.hooks.layers.model import (
    Given,
    Inputs,
    as_inputs,
    block_point,
    blocks_of,
    documents_of,
    kept_positions_of,
    layers_of,
)
from nope_probe.hooks.layers.objects import Model, model_of
from nope_probe.hooks.reading.accumulators import Accumulator, Cut
from nope_probe.hooks.reading.streaming import StreamCheckpoint, stream
from nope_probe.hooks.reading.writers import (
    BlockWriting,
    Residual,
    learned_positions,
    written_by_blocks,
)
from nope_probe.hooks.reading.written import fingerprints_of
from nope_probe.hooks.removing.block_ablation import ABLATED
from nope_probe.hooks.removing.removals import WITH_GAIN, Replacement
from nope_probe.hooks.removing.replacements import (
    MEANS,
    Calibration,
    NewWeight,
    Place,
    WrittenPosition,
)
from nope_probe.maps.folds import State, folds_of, halves_of, sum_parts
from nope_probe.maps.rows import MapRows
from nope_probe.removal import WEIGHTS, Projection, Writer

_CELLS = 1 << 22  # of a block of rows whose checksums are computed at a time


def calibrate(
    model: Model,
    inputs: Given,
    *,
    batch_size: int = 32,
    seed: int | None = None,
    writers: Sequence[str] = (),
    heads: Mapping[int, Sequence[int]] | None = None,
    kept_positions: int | None = None,
    fold_of: Int[Tensor, " seq"] | None = None,
    checkpoint: StreamCheckpoint | None = None,
) -> Calibration:
    """Measure the gains `output` and mean outputs of all projections in one pass.

    For the named writers, the pass also measures their mean output at each position, and for the
    named heads their mean attention.

    Args:
        model: in any form that `load` takes in memory, or what it returns, intact.
        inputs: the run's tokens (or vectors), in any form that `capture_scores` takes. On them, a
            replacement has the RMS of its weight's output.
        batch_size: sequences per forward pass.
        seed: the seed of drawn replacements, to measure their gains too.
        writers: the components whose position is to be removed, such as `L1H0` or `MLP1`.
        heads: the query heads that are to lose their content, by layer. A causal head takes
            2 n (n + 1) bytes at n tokens: 2.1 MB at 1,024. A mean of few texts costs by itself:
            take 384 texts or more.
        kept_positions: how many first positions keep the writers' output, and stay out of its mean
            over positions; by default 1 if all sequences begin with the same token, else 0.
        fold_of: the fold of each sequence, which decides its half: the writers' position in a text
            is that of its half. By default the folds of `capture_scores`.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Raises:
        UserError: inside `ablated` on this model, because gains belong to the intact model, or for
            a writer that the model does not have.

    Example:
        >>> from nope_probe import Ablation, ablated, calibrate, load
        >>> model, tokens = load("nope-tiny").model, torch.tensor([[0, 5, 9], [0, 7, 2]])
        >>> calibration = calibrate(model, tokens)
        >>> with ablated(model, Ablation(remove=["w_q"]), calibration):
        ...     logits = model(tokens)
    """
    model = model_of(model)
    documents, inputs = documents_of(inputs, None), as_inputs(model, inputs)
    if model in ABLATED:
        raise UserError("the model is ablated: calibrate it before `ablated`, while it is intact")
    accumulators = [_OutputAccumulator(layer, seed) for layer in layers_of(model)]
    if fold_of is None:
        fold_of = folds_of(len(inputs), None, documents)
    cut = _halves(inputs, fold_of, kept_positions)
    written = _position_accumulators(model, inputs, writers, cut)
    layers = {layer.index: layer for layer in layers_of(model)}
    patterns = {
        number: _PatternAccumulator(layers[number], torch.tensor(of_layer), inputs.shape[1])
        for number, of_layer in (heads or {}).items()
    }
    read = [*accumulators, *written, *patterns.values()]
    stream(model, inputs, read, halves_of(fold_of), batch_size, checkpoint)
    texts = fingerprints_of(model, inputs, batch_size) if writers else fold_of
    measured = {accumulator.layer.index: accumulator for accumulator in accumulators}
    blocks = [measured.get(number) for number in range(len(blocks_of(model)))]
    means = {
        name: [torch.zeros(0).double() if block is None else block.mean(name) for block in blocks]
        for name in MEANS
    }
    return Calibration(
        checksum=weights_checksum(model),
        gains={
            kind: {
                name: tuple(nan if block is None else block.gain(name, kind) for block in blocks)
                for name in WEIGHTS
            }
            for kind in accumulators[0].units
        },
        seed=seed,
        means={name: pad_sequence(rows, True, nan) for name, rows in means.items()},
        positions=_positions(written, texts, halves_of(fold_of)),
        patterns={number: sums.mean(len(inputs)) for number, sums in patterns.items()},
    )


def capture_written(
    model: HookedModel,
    inputs: Inputs,
    writers: Sequence[str],
    *,
    fold_of: Int[Tensor, " seq"],
    kept_positions: int | None = None,
    batch_size: int = 32,
    checkpoint: StreamCheckpoint | None = None,
) -> dict[str, WrittenPosition]:
    """Return the components' mean output at each position, as `calibrate` measures it.

    Inside `ablated`, it is their output in the ablated model.
    """
    cut, halves = _halves(inputs, fold_of, kept_positions), halves_of(fold_of)
    accumulators = _position_accumulators(model, inputs, writers, cut)
    stream(model, inputs, accumulators, halves, batch_size, checkpoint)
    return _positions(accumulators, fingerprints_of(model, inputs, batch_size), halves)


def blocks_that_write(
    model: HookedModel, writers: Sequence[str], inputs: Inputs | None = None
) -> dict[BlockWriting, list[Writer]]:
    """Return the blocks of some writers, and the writers in each block.

    Args:
        model: a HookedTransformer or TransformerBridge.
        writers: names such as `L1H0`, `MLP1` or `embed`.
        inputs: a sequence on which blocks are run; by default arbitrary tokens.

    Raises:
        UserError: for a writer that the model does not have; the message lists its writers.
    """
    if not writers:
        return {}
    if inputs is None:
        inputs = torch.arange(1, 17)[None].remainder(model.cfg.d_vocab)
    by_head = written_by_blocks(model, inputs, len(blocks_of(model)))
    by_layer = [block.with_whole_attention for block in by_head]
    known = [Writer("embed")]
    if learned_positions(model, inputs) is not None:
        known.append(Writer("pos_embed"))
    known += dict.fromkeys(name for block in (*by_head, *by_layer) for name in block.names)
    unknown = [writer for writer in writers if writer not in known]
    if unknown:
        kinds: dict[str, list[Writer]] = {}
        for name in known:
            kinds.setdefault(name.kind, []).append(name)
        has = [f"{same[0]} to {same[-1]}" if len(same) > 1 else same[0] for same in kinds.values()]
        raise UserError(
            f"{unknown[0]} writes nothing in this model; the components that do are "
            f"{', '.join(has)}"
        )
    by_writing: dict[BlockWriting, list[Writer]] = {}
    for writer in map(Writer, dict.fromkeys(writers)):
        by_writing.setdefault(by_head[writer.block], []).append(writer)
    return by_writing


def weights_checksum(model: HookedModel | nn.Module) -> str:
    """Return a checksum of a model's parameters: equal if all bits are equal, on any device.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = weights_checksum(layer)
        >>> layer.weight.data[1, 2] += 1
        >>> before == weights_checksum(layer)
        False
    """
    return json_checksum({name: tensor_checksum(x) for name, x in model.named_parameters()})


def tensor_checksum(tensor: Tensor) -> str:
    """Return a checksum of a tensor's shape, dtype and bits, which is computed on its device.

    The bits of a row are summed as integers times the odd numbers. The sum is exact in any order,
    and any other number changes it.
    """
    tensor = whole(tensor.detach())
    n_rows = len(tensor) if tensor.ndim > 1 and len(tensor) else 1
    flat, size = tensor.reshape(-1).contiguous(), tensor.element_size()
    aligned = all(n * size % 8 == 0 for n in (len(flat) // n_rows, flat.storage_offset()))
    flat = flat.as_strided(flat.shape, (1,))  # of a single number, the stride may be any
    rows = flat.view(torch.int64 if aligned else torch.uint8).view(n_rows, -1)
    odd = 2 * torch.arange(rows.shape[1], device=rows.device) + 1
    sums = [(block * odd).sum(-1) for block in rows.split(1 + _CELLS // (1 + rows.shape[1]))]
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return sha256(about + torch.cat(sums).cpu().numpy().tobytes()).hexdigest()


def _halves(inputs: Inputs, fold_of: Int[Tensor, " seq"], kept_positions: int | None) -> Cut:
    first = kept_positions_of(inputs) if kept_positions is None else kept_positions
    return Cut(counts=halves_of(fold_of).bincount(minlength=2), kept_positions=first)


def _position_accumulators(
    model: HookedModel, inputs: Inputs, writers: Sequence[str], cut: Cut
) -> list[_PositionAccumulator]:
    positions = learned_positions(model, inputs)
    return [
        _PositionAccumulator(Residual(model, [block], positions), names, cut)
        for block, names in blocks_that_write(model, writers, inputs[:1]).items()
    ]


def _positions(
    accumulators: Sequence[_PositionAccumulator],
    texts: Int[Tensor, " text"],
    halves: Int[Tensor, " text"],
) -> dict[str, WrittenPosition]:
    return {
        writer: accumulator.written(writer, texts, halves)
        for accumulator in accumulators
        for writer in accumulator.writers
    }


class _PositionAccumulator(Accumulator):
    """Sums the outputs of one block's components to the residual stream in each half of the texts.

    Args:
        residual: keeps the outputs of that block alone; embeddings belong to the first block.
        writers: the components.
        cut: the sequences of each half, and how many first positions keep the outputs.
    """

    def __init__(self, residual: Residual, writers: Sequence[Writer], cut: Cut) -> None:
        super().__init__(len(cut.counts))
        self.residual, self.writers, self.cut = residual, writers, cut
        [self.block] = residual.blocks

    @property
    def depth(self) -> int:
        return self.block.index

    def hooks(self) -> Iterator[Attachment]:
        index, names = self.block.index, {"x": "hook_resid_pre", "z": "attn.hook_z"}
        model, positions = self.residual.model, self.residual.positions
        for key, name in {**names, "attn": "hook_attn_out", "mlp": "hook_mlp_out"}.items():
            point = find_point(blocks_of(model)[index], name)
            if point is not None:
                yield point, partial(self.residual.keep, (index, key))
        if positions is not None:
            yield positions, partial(self.residual.keep, (0, "pos"))
        yield block_point(model, index, "hook_resid_post"), self.update

    def reset(self) -> None:
        self.residual.clear()

    def update(self, after: Vectors, hook: HookPoint) -> None:
        """Add the sums of the components' outputs over a batch."""
        outputs = {name: self._output(name, after).double() for name in self.writers}
        self.add(**{name: sum_parts(of, self.fold_of, 2) for name, of in outputs.items()})
        self.reset()

    def _output(self, writer: Writer, after: Vectors) -> Float[Tensor, "batch pos width"]:
        """Return a component's output in a batch; of a head, its z."""
        block, kept = self.block, self.residual.kept
        x, positions = kept[block.index, "x"], kept.get((0, "pos"))
        if writer.head is not None:
            scales = self.residual.post_scales(block)
            output = self.residual.heads(block)[:, :, writer.head] * scales[..., None]
        elif writer == "pos_embed":
            assert positions is not None
            output = positions.expand_as(x)
        elif writer == "embed":
            output = x if positions is None else x - positions
        elif writer.kind == "BLOCK":
            output = after - x
        else:
            output = kept[block.index, writer.kind.lower()] * block.factor
        return output

    def written(
        self, writer: Writer, texts: Int[Tensor, " text"], halves: Int[Tensor, " text"]
    ) -> WrittenPosition:
        """Return a component's mean output at each position, less its mean over positions."""
        block, skip = self.block, self.cut.kept_positions
        mean = self.totals[writer].cpu() / self.cut.counts.clamp(min=1)[:, None, None]
        if writer.head is not None:
            assert block.w_o is not None
            w_o = block.w_o[writer.head].to(mean)
            mean = block.post_norm.linear(mean @ w_o) * block.factor
        vectors = mean - mean[:, skip:].mean(1, keepdim=True)
        vectors[:, :skip] = 0
        factor = block.factor if writer.kind in ("HEAD", "ATTN", "MLP") else 1.0
        known = {"texts": texts.clone(), "halves": halves.clone()}  # stored with each writer
        return WrittenPosition(vectors=vectors, factor=factor, **known)


class _PatternAccumulator(Accumulator):
    """Sums the attention pattern of some heads of a layer, at 4 bytes a cell.

    Args:
        layer: the layer.
        heads: the query heads.
        n: how many positions.
    """

    reads_attention = True
    sum_dtype = torch.float32

    def __init__(self, layer: Layer, heads: Int[Tensor, " head"], n: int) -> None:
        super().__init__(n_folds=1)
        self.layer, self.heads, self.n = layer, heads, n

    def read(self, attention: Attention) -> None:
        """Add the patterns of a batch, a block of queries at a time."""
        blocks = []
        for rows, visible in attention.mask.blocks():
            if "looks_ahead" not in self.flags:
                later = torch.arange(self.n) > torch.arange(self.n)[rows, None]
                self.flags["looks_ahead"] = (visible & later.to(visible.device)).any()
            pattern = attention.pattern(rows)[:, self.heads.to(attention.q.device)]
            total = upcast(pattern).sum(0)
            if not bool(self.flags["looks_ahead"]):
                total = MapRows(torch.arange(self.n)[rows], self.n).pack(total)
            blocks.append(total)
        is_causal = not bool(self.flags["looks_ahead"])
        self.add(pattern=[(0, torch.cat(blocks, -1 if is_causal else -2))])

    def mean(self, n_seqs: int) -> MeanPattern:
        """Return the mean pattern, on the CPU."""
        return MeanPattern(
            heads=self.heads, cells=self.totals["pattern"][0].cpu() / n_seqs, n=self.n
        )


class _OutputAccumulator(Accumulator):
    """Sums one block's projection outputs, their squares, and the squares of replacements.

    Args:
        layer: the block.
        seed: the seed of drawn replacements; None leaves these out.
    """

    def __init__(self, layer: Layer, seed: int | None) -> None:
        super().__init__(n_folds=1)
        self.layer = layer
        self.parts: State = {}
        self.projections = [name for name in WEIGHTS if layer.has_matrix(name)]
        self.units: dict[Replacement, dict[Projection, NewWeight]] = {}
        for kind in WITH_GAIN:
            if seed is not None or kind != "random":
                place = partial(Place, layer=layer, replacement=kind, seed=seed or 0)
                self.units[kind] = {name: place(name=name).made() for name in self.projections}

    def hooks(self) -> Iterator[Attachment]:
        layer = self.layer
        yield layer.point(layer.norm_point("ln1")), self.read_input
        for name in self.projections:
            if name != "w_o":
                yield layer.point(layer.output_point(name)), partial(self._read_output, name)
        if "w_o" in self.projections:
            yield layer.point("attn.hook_z"), self.read_z
        yield layer.point(layer.attn_out_point), self.update

    def reset(self) -> None:
        self.parts.clear()

    def _read_output(self, key: str, tensor: Tensor, hook: HookPoint) -> None:
        self._sum(key, tensor)
        self._square(key, tensor)

    def read_input(self, tensor: Tensor, hook: HookPoint) -> None:
        y = self.layer.norm_output("ln1", tensor)
        for kind, units in self.units.items():
            for name, unit in units.items():
                if name != "w_o":
                    self._square(f"{kind}({name})", unit.outputs(y))

    def read_z(self, tensor: Tensor, hook: HookPoint) -> None:
        z = self.layer.by_head(tensor)
        self._sum("z", z)
        for kind, units in self.units.items():
            self._square(f"{kind}(w_o)", units["w_o"].summed(z, range(self.layer.n_heads)))

    def update(self, tensor: Tensor, hook: HookPoint) -> None:
        """Add the sums of this pass, after its last output, that of W_O."""
        self._read_output("w_o", tensor, hook)
        self.add(**{name: [(0, part)] for name, part in self.parts.items()})
        self.reset()

    def _square(self, key: str, tensor: Tensor) -> None:
        square = tensor.double().square().sum()
        self.parts[f"square/{key}"] = torch.stack((square, square.new_tensor(tensor.numel())))

    def _sum(self, key: str, tensor: Float[Tensor, "batch pos *heads width"]) -> None:
        total = tensor.sum((0, 1), dtype=torch.float64).flatten()
        n_tokens = total.new_tensor([tensor.shape[0] * tensor.shape[1]])
        self.parts[f"sum/{key}"] = torch.cat((total, n_tokens))

    def _rms(self, key: str) -> float:
        square, size = self.totals[f"square/{key}"][0].tolist()
        return (square / size) ** 0.5

    def gain(self, name: Projection, kind: Replacement) -> float:
        """Return c = RMS of the projection's output / RMS of the replacement's, at a gain of 1.

        The gain is 0 where the replacement's output is 0 at any gain (W_O's where W_V is 0), and
        NaN where the block has no such projection.
        """
        if name not in self.projections:
            return nan
        replaced = self._rms(f"{kind}({name})")
        return self._rms(name) / replaced if replaced > 0 else 0.0

    def mean(self, name: str) -> Float[Tensor, " width"]:
        """Return the mean over tokens and positions of a projection's output, or of z."""
        if f"sum/{name}" not in self.totals:
            return torch.zeros(0).double()
        total = self.totals[f"sum/{name}"][0].cpu()
        return total[:-1] / total[-1]
