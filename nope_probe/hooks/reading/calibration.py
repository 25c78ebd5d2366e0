"""One pass of the intact model for what replacements need: gains and mean outputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from math import nan

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from nope_probe.components import (
    NEEDS,
    WEIGHTS,
    WITH_GAIN,
    Ablation,
    Projection,
    Replacement,
)
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.model import Inputs, blocks_of, layers_of
from nope_probe.hooks.layers.protocols import Attachment, HookedModel, HookPoint
from nope_probe.hooks.reading.accumulators import Accumulator
from nope_probe.hooks.reading.streaming import StreamCheckpoint, stream
from nope_probe.hooks.removing.block_ablation import ABLATED
from nope_probe.hooks.removing.replacements import (
    MEANS,
    REPLACED,
    Calibration,
    Place,
    ReplacedWeight,
)
from nope_probe.maps.folds import Part

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def calibrate(
    model: HookedModel,
    inputs: Inputs,
    *,
    batch_size: int = 32,
    seed: int | None = None,
    checkpoint: StreamCheckpoint | None = None,
) -> Calibration:
    """Measure the gains `output` and mean outputs of all projections in one pass.

    Args:
        model: a HookedTransformer or TransformerBridge, intact.
        inputs: the tokens of the run (or vectors), on which outputs are to have the same RMS.
        batch_size: sequences per forward pass.
        seed: of the replacement `random`, to measure its gains too.
        checkpoint: deals out batches to processes and saves sums; see `stream`.

    Raises:
        RuntimeError: inside `ablated` on this model: gains are those of the intact model.

    Example:
        >>> from nope_probe import Ablation, ablated, calibrate, load
        >>> model, tokens = load("nope-tiny").model, torch.tensor([[0, 5, 9], [0, 7, 2]])
        >>> calibration = calibrate(model, tokens)
        >>> with ablated(model, Ablation(remove=["w_q"], replacement="mean"), calibration):
        ...     logits = model(tokens)
    """
    if model in ABLATED:
        raise RuntimeError(
            "the model is ablated: calibrate it before `ablated`, while it is intact"
        )
    layers = layers_of(model)
    accumulators = [_OutputAccumulator(layer, seed) for layer in layers]
    stream(
        model,
        inputs,
        accumulators,
        fold_of=torch.zeros(len(inputs), dtype=torch.long),
        end=layers[-1].point("hook_resid_post"),
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    measured = {each.layer.index: each for each in accumulators}
    blocks = [measured.get(number) for number in range(len(blocks_of(model)))]
    means = {
        name: [torch.zeros(0).double() if each is None else each.mean(name) for each in blocks]
        for name in MEANS
    }
    return Calibration(
        checksum=weights_checksum(model),
        gains={
            kind: {
                name: tuple(nan if each is None else each.gain(name, kind) for each in blocks)
                for name in WEIGHTS
            }
            for kind in accumulators[0].units
        },
        seed=seed,
        means={name: pad_sequence(rows, True, nan) for name, rows in means.items()},
    )


def weights_checksum(model: HookedModel | nn.Module) -> str:
    """Return a checksum of a model's parameters: equal if all bits are, on whichever device.

    The bits of each row are summed as integers, which is exact in any order and reads the weights
    once, where they are: it is quick enough for every ablation.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = weights_checksum(layer)
        >>> layer.weight.data[1, 2] += 1
        >>> before == weights_checksum(layer)
        False
    """
    digest = sha256()
    for parameter in model.parameters():
        digest.update(_row_sums(parameter.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _row_sums(weight: Tensor) -> Tensor:
    """Return the sum of the bits of each row as 64-bit integers."""
    rows = (weight.flatten(1) if weight.ndim > 1 else weight.reshape(1, -1)).contiguous()
    size = rows.element_size()
    aligned = all(n * size % 8 == 0 for n in (rows.shape[-1], rows.storage_offset()))
    return rows.view(_INTEGERS[8 if aligned else size]).sum(-1, dtype=torch.int64)


class _OutputAccumulator(Accumulator):
    """Sums the outputs of one block's projections, and the squares of these and of replacements.

    Args:
        layer: the block.
        seed: of replacements that are drawn; None leaves them out.
    """

    def __init__(self, layer: Layer, seed: int | None) -> None:
        super().__init__(n_folds=1)
        self.layer = layer
        self.parts: dict[str, list[Part]] = {}
        self.projections = [name for name in WEIGHTS if layer.has_matrix(name)]
        self.units: dict[Replacement, dict[Projection, ReplacedWeight]] = {
            kind: {
                name: REPLACED[kind](
                    Place(
                        layer=layer,
                        name=name,
                        ablation=Ablation(replacement=kind, gain="identity", seed=seed or 0),
                    )
                )
                for name in self.projections
            }
            for kind in WITH_GAIN
            if seed is not None or not NEEDS[kind].seed
        }

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
        self._sum(key, tensor.flatten(2))
        self._square(key, tensor)

    def read_input(self, tensor: Tensor, hook: HookPoint) -> None:
        y = self.layer.norm_output("ln1", tensor)
        for kind, units in self.units.items():
            for name, unit in units.items():
                if name != "w_o":
                    self._square(f"{kind}({name})", unit.outputs(y))

    def read_z(self, tensor: Tensor, hook: HookPoint) -> None:
        z = rearrange(tensor, "batch pos head d_head -> batch pos (head d_head)")
        self._sum("z", z)
        for kind, units in self.units.items():
            self._square(f"{kind}(w_o)", units["w_o"].summed(tensor, range(self.layer.n_heads)))

    def update(self, tensor: Tensor, hook: HookPoint) -> None:
        """Add the sums of this pass, the output of W_O being the last."""
        self._sum("w_o", tensor)
        self._square("w_o", tensor)
        if not self.already_counted:
            self.add(**self.parts)
        self.reset()

    def _square(self, key: str, tensor: Tensor) -> None:
        square = tensor.double().square().sum()
        self.parts[f"square/{key}"] = [
            (0, torch.stack((square, square.new_tensor(tensor.numel()))))
        ]

    def _sum(self, key: str, tensor: Float[Tensor, "batch pos width"]) -> None:
        total = tensor.sum((0, 1), dtype=torch.float64)
        n_tokens = total.new_tensor([tensor.shape[0] * tensor.shape[1]])
        self.parts[f"sum/{key}"] = [(0, torch.cat((total, n_tokens)))]

    def _rms(self, key: str) -> float:
        square, size = self.totals[f"square/{key}"][0].tolist()
        return (square / size) ** 0.5

    def gain(self, name: Projection, kind: Replacement) -> float:
        """Return c = RMS of the projection's output / RMS of the replacement's, at a gain of 1.

        It is 0 where the replacement's output is 0 at any gain, as that of W_O is where W_V is 0,
        and NaN where the block has no such projection.
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
