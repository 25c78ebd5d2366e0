"""The replacements of a removed projection or position: c * P, c * R, or a constant output.

P is the rectangular identity, whose row r reads coordinate r % d_model; R has random orthonormal
rows for each head. For W_O both are transposed. A constant output is the mean of the weight's
output over tokens and positions, or 0. Gains and means come from a `Calibration`.

A component's mean output differs between positions. The removal of the position that it writes
into the residual stream replaces this mean by its mean over positions. The rest of the output says
as much about content as before, and nothing about position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from einops import rearrange
from jaxtyping import Float, Int
from numpy.random import SeedSequence
from torch import Tensor
from torch.nn.functional import pad

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import HeadVectors, MeanPattern, repeat_heads
from nope_probe.hooks.layers.base_layer import Layer, Vectors
from nope_probe.maps.folds import State, TensorRecord, read_tensors, tensors_of, under
from nope_probe.removal import WEIGHTS, Gain, Projection

GivenReplacement: TypeAlias = Tensor | Callable[[Tensor, "Place"], Tensor]
MEANS = ("w_q", "w_k", "w_v", "w_o", "z")


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """The measurements of `calibrate` on the run's tokens in the intact model.

    Attributes:
        checksum: the `weights_checksum` of the model; other models must not use this calibration.
        gains: per replacement and projection, the gain `output` in each block, with which the
            replacement's output has the RMS of the weight's output. It is 0 where the replacement's
            output is 0 at any gain, NaN in blocks without this projection.
        seed: the seed of drawn replacements, if any were drawn.
        means: the mean over tokens and positions of each projection's output, bias included, and of
            `z`, the input of W_O; heads are concatenated (key heads for w_k and w_v). Rows of
            blocks with a narrower projection than other blocks, or none, end in NaN.
        positions: the mean output of the named writers at each position.
        patterns: the mean attention pattern of the heads that are to lose their content, by layer.
        written: the position that blocks write, by the removal `written` or `written_null`. It
            belongs to one condition, and is not stored with the others.
    """

    checksum: str
    gains: Mapping[str, Mapping[Projection, tuple[float, ...]]]
    seed: int | None = None
    means: Mapping[str, Float[Tensor, "layer width"]] = field(default_factory=dict)
    positions: Mapping[str, WrittenPosition] = field(default_factory=dict)
    patterns: Mapping[int, MeanPattern] = field(default_factory=dict)
    written: Mapping[str, BlockPositions] = field(default_factory=dict)

    def mean(self, name: str, layer: int) -> Float[Tensor, " width"]:
        """Return the mean output of a block's projection, or of `z`, in the block's width."""
        mean = self.means[name][layer]
        return mean[~mean.isnan()]

    def to_tensors(self) -> State:
        """Return gains, means and positions as tensors, for `from_tensors`."""
        measured = {"mean": self.means, "gain": self.gains, "seed": self.seed}
        patterns = tensors_of({"pattern": self.patterns})
        return tensors_of(measured) | patterns | tensors_of(self.positions)

    @classmethod
    def from_tensors(cls, state: State, checksum: str) -> Calibration:
        """Return the calibration that `to_tensors` turned into these tensors.

        Args:
            state: the tensors.
            checksum: the `weights_checksum` of the calibrated model.
        """
        measured = sorted({name.split("/")[1] for name in state if name.startswith("gain/")})
        gains = {
            replacement: {
                name: tuple(state[f"gain/{replacement}/{name}"].tolist()) for name in WEIGHTS
            }
            for replacement in measured
        }
        means = {name: state[f"mean/{name}"] for name in MEANS}
        seed = int(state["seed"]) if "seed" in state else None
        writers = [name.removesuffix("/vectors") for name in state if name.endswith("/vectors")]
        positions = {
            name: WrittenPosition.from_tensors(under(state, f"{name}/")) for name in writers
        }
        layers = [int(name.split("/")[1]) for name in state if name.endswith("/cells")]
        patterns = {
            layer: read_tensors(MeanPattern, under(state, f"pattern/{layer}/")) for layer in layers
        }
        return cls(
            checksum=checksum,
            gains=gains,
            seed=seed,
            means=means,
            positions=positions,
            patterns=patterns,
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a weight is replaced, and what its replacement may be made of.

    Attributes:
        layer: the block.
        name: the projection.
        replacement: the replacement's name in the calibration.
        gain: its size; see `Ablation`.
        seed: of what is drawn.
        calibration: the result of `calibrate`, if the replacement needs it.
        heads: the query heads that lose the weight; None for all.
    """

    layer: Layer
    name: Projection
    replacement: str
    gain: Gain = "identity"
    seed: int = 0
    calibration: Calibration | None = None
    heads: list[int] | None = None

    @property
    def c(self) -> float:
        """The factor of a replacement that has a gain."""
        if self.gain == "norm":
            return norm_gain(self.layer, self.name)
        if self.gain == "identity":
            return 1.0
        assert self.calibration is not None, "the gain `output` is measured first"
        return self.calibration.gains[self.replacement][self.name][self.layer.index]

    def identity(self) -> ReplacedWeight:
        """Return c * P, the same coordinates for every weight."""
        return _IdentityWeight(self.layer, self.c)

    def matrix(self, rows: Float[Tensor, "head d_head d_model"]) -> ReplacedWeight:
        """Return c times a matrix: for each query head, its rows (for W_O, its columns)."""
        return _MatrixWeight(rows, self.c)

    def constant(self, output: Float[Tensor, "head width"] | None = None) -> ReplacedWeight:
        """Return a weight of 0, and as bias the output of each query head; by default 0.

        For W_O, the output is each head's part of it.
        """
        if output is None:
            width = self.layer.d_model if self.name == "w_o" else self.layer.d_head
            output = torch.zeros(self.layer.n_heads, width)
        return _ConstantWeight(output)

    def given(self, replacement: GivenReplacement) -> ReplacedWeight:
        """Return a weight that the user gives, without bias; see `Ablation`.

        Raises:
            UserError: for what is no tensor, or has another shape than the weight.
        """
        weight = self.layer.weight_per_head(self.name).clone()
        new = replacement(weight, self) if callable(replacement) else replacement
        what = f"the replacement of {self.name} in L{self.layer.index}"
        if not isinstance(new, Tensor):
            kind = type(new).__name__
            raise UserError(
                f"{what}: expected a tensor, or a function that returns one, got {kind}"
            )
        per_query_head = (self.layer.n_heads, *weight.shape[1:])
        if new.shape not in (weight.shape, per_query_head):
            shapes = dict.fromkeys((tuple(weight.shape), per_query_head))
            expected = " or ".join(str(list(shape)) for shape in shapes)
            axes = "head, d_head, d_model" if self.name == "w_o" else "head, d_model, d_head"
            raise UserError(
                f"{what}: expected the shape {expected} ({axes}), got {list(new.shape)}"
            )
        rows = (new if self.name == "w_o" else new.mT).repeat_interleave(
            self.layer.n_heads // len(new), dim=0
        )
        c = 1.0
        if self.gain == "norm":
            size = float(rows.float().norm()) / (rows.shape[0] * rows.shape[1]) ** 0.5
            c = self.c / size if size > 0 else 0.0
        return _MatrixWeight(rows, c)

    @property
    def generator(self) -> torch.Generator:
        """A new generator of random numbers, which depends on seed, layer and projection alone."""
        return _generator(self.layer, self.name, self.seed)

    def random_rows(self) -> Float[Tensor, "head d_head d_model"]:
        """Return random rows that are orthonormal for each head; see `random_rows`."""
        return random_rows(self.layer, self.name, self.seed)

    def mean_output(self) -> Float[Tensor, "head width"]:
        """Return the mean of the weight's output over tokens and positions, for `constant`."""
        assert self.calibration is not None, "the mean output is measured first"
        layer = self.layer
        if self.name == "w_o" and self.heads is not None:  # its bias belongs to no head
            z = self.calibration.mean("z", layer.index).view(layer.n_heads, -1)
            weight = layer.weight_per_head("w_o").cpu().to(z)
            return torch.einsum("hd,hdm->hm", z, weight)
        mean = self.calibration.mean(self.name, layer.index)
        if self.name == "w_o":  # all heads add equal parts
            return mean.expand(layer.n_heads, -1) / layer.n_heads
        # One per key head, or per query head.
        return repeat_heads(mean.view(1, 1, -1, layer.d_head), layer.n_heads)[0, 0]


class ReplacedWeight(ABC):
    """The replacement of one projection of one block; a `Place` makes it."""

    @abstractmethod
    def outputs(self, y: Vectors) -> HeadVectors:
        """Return the output of the replacement of W_Q, W_K or W_V, for every query head."""

    @abstractmethod
    def summed(self, z: HeadVectors, heads: Sequence[int]) -> Vectors:
        """Return the part of some heads in the output of the replacement of W_O."""


class _IdentityWeight(ReplacedWeight):
    def __init__(self, layer: Layer, c: float) -> None:
        self.layer, self.c = layer, c

    def outputs(self, y: Vectors) -> HeadVectors:
        return self.c * project_identity(y, self.layer.n_heads, self.layer.d_head)

    def summed(self, z: HeadVectors, heads: Sequence[int]) -> Vectors:
        kept = z
        if len(heads) < self.layer.n_heads:
            kept = torch.zeros_like(z)
            kept[:, :, heads] = z[:, :, heads]
        flat = rearrange(kept, "batch pos head d_head -> batch pos (head d_head)")
        return self.c * project_identity_transposed(flat, self.layer.d_model)


class _MatrixWeight(ReplacedWeight):
    def __init__(self, rows: Float[Tensor, "head d_head d_model"], c: float) -> None:
        self.rows, self.c = rows, c

    def outputs(self, y: Vectors) -> HeadVectors:
        rows = self.rows = self.rows.to(y)
        return self.c * torch.einsum("bpm,hdm->bphd", y, rows)

    def summed(self, z: HeadVectors, heads: Sequence[int]) -> Vectors:
        rows = self.rows = self.rows.to(z)
        return self.c * torch.einsum("bphd,hdm->bpm", z[:, :, heads], rows[heads])


class _ConstantWeight(ReplacedWeight):
    def __init__(self, output: Float[Tensor, "head width"]) -> None:
        self.output = output

    def outputs(self, y: Vectors) -> HeadVectors:
        output = self.output = self.output.to(y)
        # A copy: OLMo clips queries in place.
        return output.expand(*y.shape[:2], -1, -1).clone()

    def summed(self, z: HeadVectors, heads: Sequence[int]) -> Vectors:
        output = self.output = self.output.to(z)
        return output[heads].sum(0).expand(*z.shape[:2], -1).clone()


def project_identity(
    y: Float[Tensor, "batch pos d_model"], n_heads: int, d_head: int
) -> Float[Tensor, "batch pos head d_head"]:
    """Apply P, whose row r reads coordinate r % d_model; rows run over all heads."""
    width = n_heads * d_head
    repeated = y.repeat(1, 1, -(-width // y.shape[-1])) if width > y.shape[-1] else y
    heads = "batch pos (head d_head) -> batch pos head d_head"
    return rearrange(repeated[..., :width], heads, head=n_heads)


def project_identity_transposed(
    z: Float[Tensor, "batch pos width"], d_model: int
) -> Float[Tensor, "batch pos d_model"]:
    """Apply P transposed: coordinate m sums the rows r with r % d_model == m."""
    padded = pad(z, (0, -z.shape[-1] % d_model))
    return padded.unflatten(-1, (-1, d_model)).sum(-2)


def random_rows(layer: Layer, name: Projection, seed: int) -> Float[Tensor, "head d_head d_model"]:
    """Draw R for one projection: for each head, random rows that are orthonormal.

    The draw depends on seed, projection and layer alone, and is made on the CPU in float64. Heads
    wider than d_model get several blocks of orthonormal rows, as not all rows can be orthogonal.
    """
    generator = _generator(layer, name, seed)
    width = layer.d_value if name == "w_o" else layer.d_head
    blocks, size = -(-width // layer.d_model), min(width, layer.d_model)
    shape = (layer.n_heads, blocks, layer.d_model, size)
    basis, triangle = torch.linalg.qr(torch.randn(*shape, generator=generator).double())
    # Libraries differ in QR's signs, so the diagonal of its second factor is made positive.
    basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rows = rearrange(basis, "head block m row -> head (block row) m")
    return rows[:, :width].float()


def _generator(layer: Layer, name: Projection, seed: int) -> torch.Generator:
    entropy = SeedSequence([seed, layer.index, WEIGHTS.index(name)])
    return torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))


def norm_gain(layer: Layer, name: Projection) -> float:
    """Return the gain `norm`, ||W||_F / sqrt(rows), rows counted on the side of the heads."""
    weight = layer.weight(name).detach()
    n_heads = layer.n_kv_heads if name in ("w_k", "w_v") else layer.n_heads
    width = layer.d_value if name == "w_o" else layer.d_head
    return float(weight.float().norm() / (n_heads * width) ** 0.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenPosition(TensorRecord):
    """A component's mean output at each position, less its mean over the kept positions.

    Attributes:
        vectors: in the residual stream; 0 at positions that are not kept.
        factor: multiplies the component's output before it is added.
    """

    vectors: Float[Tensor, "pos d_model"]
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanOutput(TensorRecord):
    """A component's mean output at each position, over texts.

    Outputs of massive norm stay out of the mean: a delimiter that a block marks as it marks the
    first token is one text in a hundred and a thousand times as large.

    Attributes:
        mean: over the outputs that count; 0 where none does.
        counts: how many outputs count at each position.
        limits: the largest norm of an output that counts, at each position.
    """

    mean: Float[Tensor, "pos d_model"]
    counts: Float[Tensor, " pos"]
    limits: Float[Tensor, " pos"]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPositions(TensorRecord):
    """The position that every block's attention and MLP write, and the texts that show it.

    Attributes:
        outputs: the mean outputs, by the name of the component.
        texts: the `fingerprints` of the texts.
        kept_positions: how many first positions keep the outputs.
        order: of the null, the positions of each text in the order in which they are averaged.
    """

    outputs: dict[str, MeanOutput]
    texts: Int[Tensor, " text"]
    kept_positions: int
    order: Int[Tensor, "text pos"] | None = None

    @property
    def n_left_out(self) -> int:
        """How many outputs stay out of the means because of their norm."""
        return sum(int((len(self.texts) - of.counts).sum()) for of in self.outputs.values())

    def seen(self, output: Vectors, text: Int[Tensor, " batch"]) -> Vectors:
        """Return the texts' outputs at the positions at which they enter the means."""
        if self.order is None:
            return output
        order = self.order.to(output.device)[text.clamp(min=0)]
        return output.gather(1, order[..., None].expand_as(output))

    def written(
        self, name: str, output: Vectors, text: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the position that a component writes into each text.

        The text's own output is left out of the means that it is a part of.

        Args:
            name: of the component.
            output: its output.
            text: the numbers of the texts; a negative number belongs to none.
        """
        of, kept = self.outputs[name], self.kept_positions
        seen = self.seen(output.float(), text)
        own = (seen.norm(dim=-1) <= of.limits.to(seen)) & (text >= 0)[:, None]
        counts = of.counts.to(seen)
        total = of.mean.to(seen) * counts[:, None] - seen.masked_fill(~own[..., None], 0.0)
        mean = total / (counts - own.to(seen)).clamp(min=1)[..., None]
        written = mean - mean[:, kept:].mean(1, keepdim=True)
        written[:, :kept] = 0
        return written
