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
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import Attachment, HookedModel, HookPoint
from nope_probe.hooks.layers.model import Given, blocks_of, layers_of
from nope_probe.hooks.layers.objects import Model
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.streaming import Stream, dealt, stream
from nope_probe.hooks.reading.written import capture_written
from nope_probe.hooks.removing.settings import WITH_GAIN, Ablation, Replacement
from nope_probe.hooks.removing.weights import AS_INTACT, MEANS, Calibration, NewWeight, Place
from nope_probe.hooks.removing.written import ABLATED
from nope_probe.maps.folds import State
from nope_probe.maps.rows import MapRows
from nope_probe.removal import WEIGHTS, Projection

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
    checkpoint: Stream | None = None,
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
    model, inputs, folds = dealt(model, inputs)
    fold_of = folds if fold_of is None else fold_of
    if model in ABLATED:
        raise UserError("the model is ablated: calibrate it before `ablated`, while it is intact")
    outputs = {layer.index: _OutputAccumulator(layer, seed) for layer in layers_of(model)}
    patterns = {
        number: _PatternAccumulator(outputs[number].layer, torch.tensor(named), inputs.shape[1])
        for number, named in (heads or {}).items()
    }
    read = [*outputs.values(), *patterns.values()]
    stream(model, inputs, read, fold_of, batch_size, checkpoint)
    positions = {}
    if writers:
        positions[AS_INTACT] = capture_written(
            model,
            inputs,
            writers,
            as_intact=True,
            fold_of=fold_of,
            kept_positions=kept_positions,
            batch_size=batch_size,
        )
    blocks = [outputs.get(number) for number in range(len(blocks_of(model)))]
    nothing = torch.zeros(0).double()
    means = {name: [block.mean(name) if block else nothing for block in blocks] for name in MEANS}
    return Calibration(
        checksum=weights_checksum(model),
        gains={
            kind: {
                name: tuple(block.gain(name, kind) if block else nan for block in blocks)
                for name in WEIGHTS
            }
            for kind in next(iter(outputs.values())).units
        },
        seed=seed,
        means={name: pad_sequence(rows, True, nan) for name, rows in means.items()},
        positions=positions,
        patterns={number: sums.mean(len(inputs)) for number, sums in patterns.items()},
    )


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


class _PatternAccumulator(Accumulator):
    """Sums the attention pattern of some heads of a layer, at 4 bytes a cell.

    Args:
        layer: the layer.
        heads: the query heads.
        n: how many positions.
    """

    reads_attention = True
    sum_dtype = torch.float32
    is_causal: bool | None = None  # as the first queries of the first batch show

    def __init__(self, layer: Layer, heads: Int[Tensor, " head"], n: int) -> None:
        super().__init__(n_folds=1)
        self.layer, self.heads, self.n = layer, heads, n

    def read(self, attention: Attention) -> None:
        """Add the patterns of a batch, a block of queries at a time."""
        blocks, heads = [], self.heads.to(attention.q.device)
        for rows, visible in attention.mask.blocks():
            if self.is_causal is None:
                self.is_causal = not bool(visible.triu(rows.start + 1).any())
            total, queries = upcast(attention.pattern(rows)[:, heads]).sum(0), torch.arange(self.n)
            blocks.append(MapRows(queries[rows], self.n).pack(total) if self.is_causal else total)
        self.add(pattern=[(0, torch.cat(blocks, -1 if self.is_causal else -2))])

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
                unit = Ablation(replacement=kind, gain="identity", seed=seed or 0)
                place = partial(Place, layer=layer, ablation=unit)
                self.units[kind] = {name: place(name=name).made() for name in self.projections}

    def hooks(self) -> Iterator[Attachment]:
        layer = self.layer
        yield layer.point(layer.norm_point("ln1")), self.read_input
        for name in self.projections:
            if name != "w_o":
                yield layer.point(layer.output_point(name)), partial(self._read, name)
        if "w_o" in self.projections:
            yield layer.point("attn.hook_z"), self.read_z
        yield layer.point(layer.attn_out_point), self.update

    def reset(self) -> None:
        self.parts.clear()

    def _read(
        self,
        name: str,
        tensor: Float[Tensor, "batch pos *heads width"],
        hook: HookPoint | None = None,
    ) -> None:
        """Keep the sums over tokens, the sum of all squares, and the number of tokens."""
        total = tensor.sum((0, 1), dtype=torch.float64).flatten()
        n_tokens = total.new_tensor(tensor.shape[0] * tensor.shape[1])
        square = tensor.double().square().sum()
        self.parts[name] = torch.cat((total, torch.stack((square, n_tokens))))

    def read_input(self, tensor: Tensor, hook: HookPoint) -> None:
        y = self.layer.norm_output("ln1", tensor)
        for kind, units in self.units.items():
            for name, unit in units.items():
                if name != "w_o":
                    self._read(f"{kind}({name})", unit.outputs(y))

    def read_z(self, tensor: Tensor, hook: HookPoint) -> None:
        z = self.layer.by_head(tensor)
        self._read("z", z)
        for kind, units in self.units.items():
            self._read(f"{kind}(w_o)", units["w_o"].summed(z, range(self.layer.n_heads)))

    def update(self, tensor: Tensor, hook: HookPoint) -> None:
        """Add the sums of this pass, after its last output, that of W_O."""
        self._read("w_o", tensor)
        self.add(**{name: [(0, part)] for name, part in self.parts.items()})
        self.reset()

    def _rms(self, name: str) -> float:
        *sums, square, n_tokens = self.totals[name][0].tolist()
        return (square / (n_tokens * len(sums))) ** 0.5

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
        if name not in self.totals:
            return torch.zeros(0).double()
        total = self.totals[name][0].cpu()
        return total[:-2] / total[-1]
