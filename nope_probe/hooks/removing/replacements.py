"""The replacements of a removed projection or position: c * P, c * R, or a constant output.

P is the rectangular identity, whose row r reads coordinate r % d_model; R has random orthonormal
rows for each head. For W_O both are transposed. A constant output is the mean of the weight's
output over tokens and positions, or 0. Gains and means come from a `Calibration`.

A component's mean output differs between positions. The removal of the position that it writes
into the residual stream replaces this mean by its mean over positions. The rest of the output says
as much about content as before, and nothing about position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from numpy.random import SeedSequence
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import HeadVectors, MeanPattern, repeat_heads
from nope_probe.hooks.layers.base_layer import Layer, Vectors
from nope_probe.hooks.removing.removals import GivenReplacement, Replacement
from nope_probe.maps.folds import State, TensorRecord, tensors_of
from nope_probe.removal import WEIGHTS, Condition, Gain, Projection

AS_INTACT = "as_intact"
MEANS = ("w_q", "w_k", "w_v", "w_o", "z")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Calibration(TensorRecord):
    """The measurements of `calibrate` on the run's tokens in the intact model.

    Attributes:
        checksum: the `weights_checksum` of the model; other models must not use this calibration.
            Empty inside a run, which has a single model.
        gains: per replacement and projection, the gain `output` in each block, with which the
            replacement's output has the RMS of the weight's output. It is 0 where the replacement's
            output is 0 at any gain, NaN in blocks without this projection.
        seed: the seed of drawn replacements, if any were drawn.
        means: the mean over tokens and positions of each projection's output, bias included, and of
            `z`, the input of W_O; heads are concatenated (key heads for w_k and w_v). Rows of
            blocks with a narrower projection than other blocks, or none, end in NaN.
        positions: the position that components write, by the name of the condition that removes
            it; by `AS_INTACT`, that of writers each of which was measured in the intact model.
        patterns: the mean attention pattern of the heads that are to lose their content, by layer.
    """

    checksum: str = ""
    gains: Mapping[str, Mapping[Projection, tuple[float, ...]]] = field(default_factory=dict)
    seed: int | None = None
    means: Mapping[str, Float[Tensor, "layer width"]] = field(default_factory=dict)
    positions: Mapping[str, WrittenPositions] = field(default_factory=dict)
    patterns: Mapping[int, MeanPattern] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the names of what was measured."""
        held = {name: of for name, of in vars(self).items() if isinstance(of, Mapping) and of}
        return f"Calibration({', '.join(f'{name}={[*of]}' for name, of in held.items())})"

    def mean(self, name: str, layer: int) -> Float[Tensor, " width"]:
        """Return the mean output of a block's projection, or of `z`, in the block's width."""
        mean = self.means[name][layer]
        return mean[~mean.isnan()]

    def positions_for(self, condition: Condition) -> WrittenPositions | None:
        """Return the position that a condition removes; None if it was not measured."""
        as_intact = self.positions.get(AS_INTACT) if condition.writes_as_intact else None
        if as_intact is not None and not {*condition.writers} <= {*as_intact.outputs}:
            as_intact = None
        return self.positions.get(condition.name, as_intact)

    def to_tensors(self) -> State:
        """Return gains, means, positions and patterns as tensors, without the checksum."""
        return tensors_of(vars(self) | {"checksum": None})


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a weight is replaced, and what its replacement may be made of.

    Attributes:
        layer: the block.
        name: the projection.
        replacement: what the projection becomes; see `Ablation`.
        gain: its size; see `Ablation`.
        seed: of what is drawn.
        calibration: the result of `calibrate`, if the replacement needs it.
        heads: the query heads that lose the weight; None for all.
    """

    layer: Layer
    name: Projection
    replacement: Replacement | GivenReplacement
    gain: Gain = "identity"
    seed: int = 0
    calibration: Calibration | None = None
    heads: list[int] | None = None

    @property
    def c(self) -> float:
        """The factor of a replacement that has a gain; `norm` is ||W||_F / sqrt(rows of heads)."""
        if self.gain == "norm":
            n_heads, n_rows, n_cols = self.layer.weight_per_head(self.name).shape
            n = n_heads * (n_rows if self.name == "w_o" else n_cols)
            return float(self.layer.weight(self.name).detach().float().norm() / n**0.5)
        if self.gain == "identity":
            return 1.0
        assert self.calibration is not None, "the gain `output` is measured first"
        return self.calibration.gains[str(self.replacement)][self.name][self.layer.index]

    def made(self) -> NewWeight:
        """Return the weight and bias that take the place of the projection's.

        Raises:
            UserError: for a weight that the user gives, of another shape than the projection's.
        """
        layer, in_o = self.layer, self.name == "w_o"
        if not isinstance(self.replacement, str):
            return self._given(self.replacement)
        if self.replacement == "identity":
            rows = torch.arange(layer.n_heads * self.width).view(-1, self.width)
            return NewWeight(rows=rows % layer.d_model, d_model=layer.d_model, c=self.c)
        if self.replacement == "random":
            return NewWeight(rows=self.random_rows(), c=self.c)
        zero = torch.zeros(layer.n_heads, layer.d_model if in_o else layer.d_head)
        return NewWeight(bias=zero if self.replacement == "zero" else self._mean_output())

    @property
    def width(self) -> int:
        """The width of a head at the weight."""
        return self.layer.d_value if self.name == "w_o" else self.layer.d_head

    def _given(self, replacement: GivenReplacement) -> NewWeight:
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
        return NewWeight(rows=rows, c=c)

    @property
    def generator(self) -> torch.Generator:
        """A new generator of random numbers, which depends on seed, layer and projection alone."""
        entropy = SeedSequence([self.seed, self.layer.index, WEIGHTS.index(self.name)])
        return torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))

    def random_rows(self) -> Float[Tensor, "head d_head d_model"]:
        """Draw R: for each head, random rows that are orthonormal.

        The draw is made on the CPU in float64. Heads wider than d_model get several blocks of
        orthonormal rows, as not all rows can be orthogonal.
        """
        layer, width = self.layer, self.width
        blocks, size = -(-width // layer.d_model), min(width, layer.d_model)
        shape = (layer.n_heads, blocks, layer.d_model, size)
        drawn = torch.randn(*shape, generator=self.generator).double()
        basis, triangle = torch.linalg.qr(drawn)
        # Libraries differ in QR's signs, so the diagonal of its second factor is made positive.
        basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        rows = rearrange(basis, "head block m row -> head (block row) m")
        return rows[:, :width].float()

    def _mean_output(self) -> Float[Tensor, "head width"]:
        """Return the part of each head in the mean output over tokens and positions."""
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


@dataclass(kw_only=True, eq=False)
class NewWeight:
    """The weight and bias of every query head in place of a projection's; a `Place` makes them.

    Attributes:
        rows: of the weight (of W_O: its columns), or the coordinate that each row of P reads; None
            for a weight of 0.
        bias: of W_O, each head's part of it; where there is one, the weight is 0.
        c: multiplies the weight.
        d_model: the width of the residual stream, of P alone.
    """

    rows: Shaped[Tensor, "head width *d_model"] | None = None
    bias: Float[Tensor, "head out"] | None = None
    c: float = 1.0
    d_model: int = 0

    def outputs(self, y: Vectors) -> HeadVectors:
        """Return the output in place of W_Q's, W_K's or W_V's, for every query head."""
        rows, bias = self._on_device_of(y)
        if bias is not None:  # A copy: OLMo clips queries in place.
            return bias.expand(*y.shape[:2], -1, -1).clone()
        assert rows is not None
        return self.c * (y[..., rows] if self.d_model else torch.einsum("bpm,hdm->bphd", y, rows))

    def summed(self, z: HeadVectors, heads: Sequence[int]) -> Vectors:
        """Return the part of some heads in the output in place of W_O's."""
        rows, bias = self._on_device_of(z)
        if bias is not None:
            return bias[heads].sum(0).expand(*z.shape[:2], -1).clone()
        assert rows is not None
        if not self.d_model:
            return self.c * torch.einsum("bphd,hdm->bpm", z[:, :, heads], rows[heads])
        sums = z.new_zeros(*z.shape[:2], self.d_model)
        return self.c * sums.index_add_(-1, rows[heads].flatten(), z[:, :, heads].flatten(2))

    def _on_device_of(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias, which stay on the device and in the dtype of the first input."""
        if self.bias is not None:
            self.bias = self.bias.to(x)
        elif self.rows is not None:
            self.rows = self.rows.to(x.device if self.d_model else x)
        return self.rows, self.bias


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanOutput(TensorRecord):
    """A component's mean output at each position, over the texts of each half.

    Outputs of massive norm stay out of the mean: a delimiter that a block marks as it marks the
    first token is one text in a hundred and a thousand times as large.

    Attributes:
        mean: over the outputs that count; 0 where none does.
        counts: how many outputs count at each position.
        limits: the largest norm of an output that counts, at each position.
        factor: multiplies an output before it is added to the residual stream.
    """

    mean: Float[Tensor, "half pos d_model"]
    counts: Float[Tensor, "half pos"]
    limits: Float[Tensor, " pos"]
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenPositions(TensorRecord):
    """The position that components write, and the texts that show it.

    Attributes:
        outputs: the mean outputs, by the name of the component.
        texts: the `fingerprints` of the texts.
        halves: the half of each text, 0 or 1; see `maps.folds.halves_of`.
        kept_positions: how many first positions keep the outputs.
        of_tokens: whether the texts are tokens, to whose embeddings a model may add positions.
        order: of the null, the positions of each text in the order in which they are averaged.
    """

    outputs: dict[str, MeanOutput]
    texts: Int[Tensor, " text"]
    halves: Int[Tensor, " text"]
    kept_positions: int
    of_tokens: bool = True
    order: Int[Tensor, "text pos"] | None = None

    @property
    def n_left_out(self) -> int:
        """How many outputs stay out of the means because of their norm."""
        n, n_pos = len(self.texts), next(iter(self.outputs.values())).counts.shape[1]
        return sum(n * n_pos - int(of.counts.sum()) for of in self.outputs.values())

    def size(self, name: str) -> float:
        """Return the norm of the position that a component writes, over all positions."""
        of_all = self.outputs[name].mean[:1]  # a single text, which is none of the texts
        return float(self.written(name, of_all, torch.tensor([-1])).norm())

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

        The mean is over the other texts of the text's half; over all texts if the text is new.

        Args:
            name: of the component.
            output: its output.
            text: the numbers of the texts; a negative number belongs to none.
        """
        of, kept = self.outputs[name], self.kept_positions
        seen, halves = self.seen(output.float(), text), self.halves.to(text)
        own = (seen.norm(dim=-1) <= of.limits.to(seen)) & (text >= 0)[:, None]
        is_used = (halves[text, None] == torch.arange(2).to(text)) | (text < 0)[:, None]
        counts = is_used.to(seen) @ of.counts.to(seen)
        sums = (of.mean * of.counts[..., None]).to(seen)
        total = torch.einsum("th,hpd->tpd", is_used.to(seen), sums)
        total -= seen.masked_fill(~own[..., None], 0.0)
        mean = total / (counts - own.to(seen)).clamp(min=1)[..., None]
        written = mean - mean[:, kept:].mean(1, keepdim=True)
        written[:, :kept] = 0
        return written
