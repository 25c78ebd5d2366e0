"""What takes the place of weights: of a removed projection, or of all of an untrained model's.

A removed projection becomes c * P, c * R, or a constant output. P is the rectangular identity,
whose row r reads coordinate r % d_model; R has random orthonormal rows for each head. For W_O both
are transposed. A constant output is the mean of the weight's output over tokens and positions, or
0. Gains and means come from a `Calibration`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from numpy.random import SeedSequence
from torch import Tensor

from nope_probe.errors import UserError
from nope_probe.hooks.layers.attention import HeadVectors, MeanPattern, repeat_heads
from nope_probe.hooks.layers.base_layer import Layer, Vectors
from nope_probe.hooks.layers.model import kept_to_this_thread
from nope_probe.hooks.layers.objects import Model, model_of, refused
from nope_probe.hooks.removing.settings import Ablation, GivenReplacement
from nope_probe.hooks.removing.written import WrittenPositions
from nope_probe.maps.folds import State, TensorRecord, tensors_of
from nope_probe.removal import WEIGHTS, Condition, Projection

AS_INTACT = "as_intact"
MEANS = ("w_q", "w_k", "w_v", "w_o", "z")
STD = 0.02  # initializer_range of transformers' Llama, GPT-2, Qwen, Phi and most others


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
        ablation: says what the projection becomes, and its size.
        calibration: the result of `calibrate` that the replacement needs.
        heads: the query heads that lose the weight; None for all.
    """

    layer: Layer
    name: Projection
    ablation: Ablation
    calibration: Calibration = field(default_factory=Calibration)
    heads: list[int] | None = None

    @property
    def c(self) -> float:
        """The factor of a replacement that has a gain; `norm` is ||W||_F / sqrt(rows of heads)."""
        gain = self.ablation.scaling
        if gain == "norm":
            n_heads, n_rows, n_cols = self.layer.weight_per_head(self.name).shape
            n = n_heads * (n_rows if self.name == "w_o" else n_cols)
            return float(self.layer.weight(self.name).detach().float().norm() / n**0.5)
        if gain == "identity":
            return 1.0
        return self.calibration.gains[self.ablation.kind][self.name][self.layer.index]

    def made(self) -> NewWeight:
        """Return the weight and bias that take the place of the projection's.

        Raises:
            UserError: for a weight that the user gives, of another shape than the projection's.
        """
        layer, replacement = self.layer, self.ablation.replacement
        if not isinstance(replacement, str):
            return self._given(replacement)
        if replacement == "identity":
            rows = torch.arange(layer.n_heads * self.width).view(-1, self.width)
            return Linear(rows=rows % layer.d_model, d_model=layer.d_model, c=self.c)
        if replacement == "random":
            return Linear(rows=self.random_rows(), c=self.c)
        if replacement == "mean":
            return Constant(self._mean_output())
        width = layer.d_model if self.name == "w_o" else layer.d_head
        return Constant(torch.zeros(layer.n_heads, width))

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
        if self.ablation.scaling == "norm":
            size = float(rows.float().norm()) / (rows.shape[0] * rows.shape[1]) ** 0.5
            c = self.c / size if size > 0 else 0.0
        return Linear(rows=rows, c=c)

    @property
    def generator(self) -> torch.Generator:
        """A new generator of random numbers, which depends on seed, layer and projection alone."""
        entropy = SeedSequence([self.ablation.seed, self.layer.index, WEIGHTS.index(self.name)])
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


@dataclass(eq=False)
class Constant:
    """The output of every query head in place of a projection's (of W_O: each head's part)."""

    bias: Float[Tensor, "head out"]

    def outputs(self, y: Vectors) -> HeadVectors:
        """Return the output in place of W_Q's, W_K's or W_V's, for every query head."""
        self.bias = self.bias.to(y)  # and stays there
        return self.bias.expand(*y.shape[:2], -1, -1).clone()  # OLMo clips queries in place

    def summed(self, z: HeadVectors, heads: Sequence[int]) -> Vectors:
        """Return the part of some heads in the output in place of W_O's."""
        self.bias = self.bias.to(z)
        return self.bias[heads].sum(0).expand(*z.shape[:2], -1).clone()


@dataclass(kw_only=True, eq=False)
class Linear:
    """The weight of every query head in place of a projection's.

    Attributes:
        rows: of the weight (of W_O: its columns), or the coordinate that each row of P reads.
        c: multiplies the weight.
        d_model: the width of the residual stream, of P alone.
    """

    rows: Shaped[Tensor, "head width *d_model"]
    c: float
    d_model: int = 0

    def outputs(self, y: Vectors) -> HeadVectors:
        """Return the output in place of W_Q's, W_K's or W_V's, for every query head."""
        rows = self._on_device_of(y)
        return self.c * (y[..., rows] if self.d_model else torch.einsum("bpm,hdm->bphd", y, rows))

    def summed(self, z: HeadVectors, heads: Sequence[int]) -> Vectors:
        """Return the part of some heads in the output in place of W_O's."""
        rows, z = self._on_device_of(z)[heads], z[:, :, heads]
        if not self.d_model:
            return self.c * torch.einsum("bphd,hdm->bpm", z, rows)
        sums = z.new_zeros(*z.shape[:2], self.d_model)
        return self.c * sums.index_add_(-1, rows.flatten(), z.flatten(2))

    def _on_device_of(self, x: Tensor) -> Tensor:
        """Return the rows, which stay on the device and in the dtype of the first input."""
        self.rows = self.rows.to(x.device if self.d_model else x)
        return self.rows


NewWeight: TypeAlias = Constant | Linear  # in place of a projection; a `Place` makes them


@contextmanager
def untrained(model: Model, seed: int = 0) -> Iterator[Any]:
    """Draw a model's weights anew for as long as the context lasts.

    Matrices become Gaussian with a standard deviation of 0.02, norm weights ones and biases zeros.
    Parameters that are all zero, such as the positions of a HookedTransformer without position
    encoding, stay zero. The trained weights wait in main memory. A model is used by one thread at a
    time: the one that enters the context.

    Args:
        model: in any form that `load` takes in memory, or what it returns; bit-identical
            afterwards. Meanwhile a transformers model refuses passes: run what is yielded.
        seed: the seed of the draws.

    Raises:
        UserError: in the passes of other threads.

    Example:
        >>> from nope_probe import load, untrained
        >>> loaded, tokens = load("rope-tiny", n_layers=1), torch.tensor([[0, 5, 9]])
        >>> with untrained(loaded) as model:
        ...     bool(model(tokens).std() < 1)
        True
    """
    model = model_of(model)
    generator = torch.Generator().manual_seed(seed)
    with kept_to_this_thread(model), refused(model):
        # Copied only now: until here another thread may hold weights that it has drawn.
        saved = [(weight, weight.detach().cpu().clone()) for weight in model.parameters()]
        try:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(_drawn(name, parameter, generator))
            yield model
        finally:
            with torch.no_grad():
                for weight, value in saved:
                    weight.copy_(value)


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    last = name.rpartition(".")[2].lstrip("_")
    if not parameter.any() or last.startswith("b"):  # bias, b_Q, b, ...
        return torch.zeros_like(parameter)
    if parameter.ndim == 1:
        return torch.ones_like(parameter)
    drawn = STD * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    spread: Any = parameter
    if not hasattr(spread, "placements"):
        return drawn
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(drawn, spread.device_mesh, spread.placements)
