"""The settings of `simulate` and of `theory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from nope_probe.files import JsonObject
from nope_probe.run.flags import ALPHA, LARGEST, LAYERS, SEED, CommandSettings, LocalPath, Mistakes
from nope_probe.stages import Norm, ParameterFreeSpec

CONTEXT = 4096
DEFAULT_SAMPLES = 2000
DIMENSION = Interval(ge=2, le=2**16)  # the series in d takes time proportional to d
N_SAMPLES = Interval(ge=2, le=10**9)  # a single sample has no variance


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    """Simulate the parameter-free transformer (eq. 1 of the paper) and compare it with theory.

    Writes manifest.json, maps.safetensors, layers.csv and report.html into a folder.

    Attributes:
        alpha: Expected inner products of the inputs, 0 <= alpha < 1.
        n_layers: Layers.
        n_samples: Samples per alpha [2000, unless --target-se is given].
        target_se: Sample until every layer's pooled standard error is at most this, nats.
        seq_len: Positions.
        d_model: Dimension.
        norm: L2, or LayerNorm with scores over sqrt(d) or d.
        rope: Rotate queries and keys.
        causal: Mask keys after the query.
        control_variate: Subtract the effect of the inputs' Gram matrix, most of the noise.
        seed: Seed of the samples.
        out: Folder of the run [runs/simulate-HASH].
    """

    command = "simulate"
    examples = ("--alpha 0 0.2", "--rope --n-layers 3 --target-se 1e-4")

    alpha: tuple[Annotated[float, ALPHA], ...] = (0.0, 0.2)
    n_layers: Annotated[int, LAYERS] = 4
    n_samples: Annotated[int | None, N_SAMPLES] = None
    target_se: float | None = None
    seq_len: Annotated[int, Interval(ge=3, le=CONTEXT)] = 50
    d_model: Annotated[int, DIMENSION] = 64
    norm: Norm = "l2"
    rope: bool = False
    causal: bool = True
    control_variate: bool = True
    seed: Annotated[int, SEED] = 0
    out: LocalPath | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # -0.0 becomes 0, else its other name would make a second simulation of alpha 0.
        object.__setattr__(self, "alpha", tuple(alpha + 0.0 for alpha in self.alpha))

    @property
    def samples(self) -> int | None:
        """How many samples per alpha; None if a target decides."""
        undecided = self.n_samples is None and self.target_se is None
        return DEFAULT_SAMPLES if undecided else self.n_samples

    @property
    def spec(self) -> ParameterFreeSpec:
        """The simulated parameter-free transformer.

        Raises:
            UserError: for a dimension that the norm or RoPE does not allow.
        """
        return ParameterFreeSpec(
            d_model=self.d_model, norm=self.norm, rope=self.rope, causal=self.causal
        )

    @property
    def program(self) -> tuple[str, ...]:
        """The words before the flags: the script in a clone."""
        return ("python", f"recipes/paper/{self.command}.py")

    def recorded(self) -> JsonObject:
        """Return the settings that a run's manifest records, which identify the run."""
        return super().recorded() | {"n_samples": self.samples}

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong, each with its message."""
        yield not self.alpha, "expected at least one --alpha"
        different = {f"{alpha:g}" for alpha in self.alpha}
        yield len(different) < len(self.alpha), "two alphas are the same to six digits"
        resolution, target = self.spec.resolution, self.target_se
        both = self.n_samples is not None and target is not None
        yield both, "expected --n-samples or --target-se, not both"
        yield (
            target is not None and not resolution <= target < float("inf"),
            f"expected a --target-se that float32 resolves, {resolution:.2g} nats or more",
        )

    def memory(self, n_maps: int = 1, d_model: int = 0, n_heads: int = 0, d_vocab: int = 0) -> int:
        """Return the bytes of one map (float64) of each layer."""
        return 8 * self.n_layers * self.seq_len**2


@dataclass(frozen=True, kw_only=True)
class TheorySettings(CommandSettings):
    """Find for each layer the alpha below which its scores do not increase in the key position j.

    Uses the mean field, which is exact as d_model grows, and no sampling. With --alpha, the
    smallest step S[i, j+1] - S[i, j] of each layer is printed as well.

    Attributes:
        seq_len: Positions.
        n_layers: Layers.
        alpha: Alphas at which to print the smallest steps.
        d_model: Dimension; infinite if not given.
        norm: Norm of the residual stream.
        rope: Rotate queries and keys.
    """

    examples = ("", "--seq-len 100 --alpha 0.1 0.2")

    seq_len: Annotated[int, Interval(ge=3, le=LARGEST)] = 50
    n_layers: Annotated[int, LAYERS] = 10
    alpha: tuple[Annotated[float, ALPHA], ...] = ()
    d_model: Annotated[int | None, DIMENSION] = None
    norm: Norm = "l2"
    rope: bool = False
