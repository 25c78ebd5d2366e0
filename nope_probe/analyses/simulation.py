"""Monte Carlo of the parameter-free transformer, with a control variate.

Samples are drawn and run through the model in chunks that fit into the CPU's cache; a map is a
running sum inside a hook. Standard errors come from 32 blocks, sample s in block s % 32.

Most of the Monte Carlo noise in a deep layer's mean scores comes from the inputs' Gram matrix
G, carried from layer to layer. The expectation of G is known exactly (`expected_gram`), so its
effect can be subtracted: mean(S) - J (mean(G) - E G), with J the Jacobian of the mean field at E G.
The control variate is linear in the sample, hence unbiased.

With RoPE a mean score depends on the Gram matrix of every frequency. No such matrix is formed: at
E G all frequencies are alike. Their differences are computed by running the network with its
attention frozen at the mean field's, x <- M x with M from theory, and taking scores with RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jvp

from nope_probe.analyses.jackknife import standard_error
from nope_probe.analyses.theory import (
    attend,
    expected_gram,
    rope_frequencies,
    rope_kernel,
    steps,
    visible,
)
from nope_probe.errors import UserError
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.accumulators import Cut, ScoreAccumulator
from nope_probe.hooks.reading.streaming import Stream, stream
from nope_probe.maps.estimates import fold_weights
from nope_probe.maps.folds import (
    TensorRecord,
    fold_counts,
    fold_products,
    interleaved_folds,
    pooled,
)
from nope_probe.maps.maps import cells_frame
from nope_probe.maps.positions import Rotation
from nope_probe.stages import Norm, ParameterFreeSpec

BLOCK = 64  # samples that one seed draws
N_BLOCKS = 32
FIRST_GOAL = 4 * BLOCK


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate(TensorRecord):
    """Mean score maps with their standard errors.

    Attributes:
        folds: means of the blocks of samples, nats; NaN where the model masks.
        counts: samples per block.
    """

    folds: Float[Tensor, "fold layer query_pos key_pos"]
    counts: Int[Tensor, " fold"]

    def __repr__(self) -> str:
        """Return sizes and standard errors."""
        n_layers, n = self.folds.shape[1:3]
        errors = ", ".join(f"L{i} {error:.2g}" for i, error in enumerate(self.pooled_se.tolist()))
        return (
            f"Estimate: {n_layers} layers, {n} queries × {n} keys, in nats, means over "
            f"{int(self.counts.sum())} samples\nstandard errors: {errors}"
        )

    @property
    def mean(self) -> Float[Tensor, "layer query_pos key_pos"]:
        """The mean over all samples."""
        return pooled(self.folds, self.counts)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each layer, query and visible key: the score, nats."""
        layers, _, n = self.mean.shape
        return cells_frame("score", self.mean, layer=range(layers), query=range(n), key=range(n))

    @property
    def se(self) -> Float[Tensor, "layer query_pos key_pos"]:
        """The standard error of the mean, from the variance between blocks."""
        return standard_error(self.folds, fold_weights(len(self.counts), self.counts))

    @property
    def pooled_se(self) -> Float[Tensor, " layer"]:
        """Each layer's standard error: RMS over the cells off the diagonal that are not masked."""
        se = self.se
        cells = visible(se.shape[-1], causal=bool(se[0, 0, -1].isnan()))
        cells &= ~torch.eye(se.shape[-1], dtype=torch.bool)
        return se[:, cells].square().mean(-1).sqrt()


@dataclass(frozen=True, kw_only=True)
class Simulation(TensorRecord):
    """The mean scores of a simulation.

    Attributes:
        n_samples: how many samples were drawn.
        plain: the mean of the scores.
        controlled: the mean less the control variate; None if that was off.
    """

    n_samples: int
    plain: Estimate
    controlled: Estimate | None = None

    @property
    def best(self) -> Estimate:
        """The estimate with less noise."""
        return self.controlled or self.plain

    @property
    def variance_ratio(self) -> Float[Tensor, " layer"]:
        """Variance without the control variate over the variance with it, per layer."""
        return (self.plain.pooled_se / self.best.pooled_se) ** 2


def simulate_scores(
    model: HookedModel,
    *,
    alpha: float,
    seq_len: int = 50,
    n_samples: int | None = None,
    target_se: float | None = None,
    control_variate: bool = True,
    seed: int = 0,
    chunk_size: int = 2 * BLOCK,
    checkpoint: Stream | None = None,
) -> Simulation:
    """Estimate the mean scores of every layer of a parameter-free model.

    Args:
        model: `build(parameter_free(...))`.
        alpha: expected inner product of the inputs, 0 <= alpha < 1.
        seq_len: positions.
        n_samples: how many samples to draw, 2 at least; or
        target_se: the pooled standard error, in nats, at which to stop sampling; it holds for
            every layer.
        control_variate: whether to subtract the effect of the inputs' Gram matrix.
        seed: the seed of the samples; sample s of a seed is the same for every chunk size.
        chunk_size: samples per forward pass.
        checkpoint: hears of each chunk; may end the simulation.

    Raises:
        UserError: if both or neither of n_samples and target_se are given, or out of range.

    Example:
        >>> from nope_probe import load, simulate_scores
        >>> model = load("parameter-free", n_layers=2).model
        >>> simulate_scores(model, alpha=0.0, n_samples=1000).variance_ratio[1] > 40
        tensor(True)
    """
    spec, n_layers = spec_of(model), model.cfg.n_layers
    _validate(spec, n_samples, target_se)
    n_blocks = N_BLOCKS if n_samples is None else min(N_BLOCKS, n_samples)
    cut = Cut(counts=torch.zeros(n_blocks, dtype=torch.long))  # which `_estimates` counts
    sums, variate = [ScoreAccumulator(layer, cut) for layer in layers_of(model)], None
    if control_variate:
        variate = ControlVariate(alpha, seq_len, n_layers, spec, n_blocks)
    checkpoint = checkpoint or Stream()
    done, goal = 0, n_samples or FIRST_GOAL
    while done < goal:
        before, done = done, min(done + chunk_size, goal)
        x = sample_inputs(
            before, done, alpha=alpha, seq_len=seq_len, d_model=spec.dimension, seed=seed
        )
        stream(model, x, sums, interleaved_folds(len(x), n_blocks, first=before), len(x))
        if variate is not None:
            variate.add(x)
        if target_se is not None and done == goal:
            goal = _next_goal(_estimates(sums, variate, done), target_se)
        checkpoint.advance(done - before)
    return _estimates(sums, variate, done)


def _estimates(
    sums: Sequence[ScoreAccumulator], variate: ControlVariate | None, n_samples: int
) -> Simulation:
    """Return the estimates from the samples so far."""
    counts = fold_counts(n_samples, sums[0].n_folds)
    means = [of.joined([of.totals["map"].cpu() / counts[:, None, None]]) for of in sums]
    plain, controlled = Estimate(folds=torch.stack(means, 1), counts=counts), None
    if variate is not None:
        folds = plain.folds - variate.deviations()
        controlled = Estimate(folds=folds, counts=plain.counts.clone())  # saved by itself
    return Simulation(n_samples=n_samples, plain=plain, controlled=controlled)


def _next_goal(simulation: Simulation, target_se: float) -> int:
    """Return how many samples the target needs, judged by the noise so far, at most 8-fold."""
    excess = float(simulation.best.pooled_se.max()) / target_se
    if excess <= 1:
        return simulation.n_samples
    needed = simulation.n_samples * min(8.0, max(1.05 * excess**2, 1.1))
    return BLOCK * ceil(needed / BLOCK)


def _validate(spec: ParameterFreeSpec, n_samples: int | None, target_se: float | None) -> None:
    if (n_samples is None) == (target_se is None):
        raise UserError("expected either n_samples or target_se")
    if n_samples is not None and n_samples < 2:
        raise UserError(f"expected at least 2 samples, got {n_samples}: 1 sample has no variance")
    if target_se is not None and not target_se >= spec.resolution:
        raise UserError(f"float32 resolves {spec.resolution:.1e} nats, not {target_se:g}")


def spec_of(model: HookedModel) -> ParameterFreeSpec:
    """Return the spec of a parameter-free model, from its configuration."""
    cfg = model.cfg
    sqrt_d = cfg.normalization_type == "LNPre" and cfg.attn_scale < cfg.d_model
    layernorm: Norm = "layernorm-sqrt-d" if sqrt_d else "layernorm-d"
    return ParameterFreeSpec(
        d_model=cfg.d_model,
        norm="l2" if cfg.normalization_type == "RMSPre" else layernorm,
        rope=cfg.positional_embedding_type == "rotary",
        causal=cfg.attention_dir == "causal",
    )


def sample_inputs(
    start: int, stop: int, *, alpha: float, seq_len: int, d_model: int, seed: int
) -> Float[Tensor, "sample pos d_model"]:
    """Return the samples start <= s < stop: unit vectors with E<x_i, x_j> near alpha (eq. 2).

    A vector is Gaussian noise plus l times noise that all vectors of its sample share,
    normalised; l^2 = alpha / (1 - alpha). Noise is seeded per block of 64 samples, so sample s of a
    seed is the same in every run. All alphas share the noise.

    Raises:
        UserError: for alpha outside [0, 1) or a negative seed.
    """
    if not 0 <= alpha < 1:
        raise UserError(f"expected 0 <= alpha < 1, got {alpha}")
    blocks = range(start // BLOCK, -(-stop // BLOCK))
    noise = torch.cat([_noise(seed, block, seq_len, d_model) for block in blocks])
    noise = noise[start - blocks.start * BLOCK : stop - blocks.start * BLOCK]
    x = noise[:, 1:]
    if alpha > 0:
        x = x + (alpha / (1 - alpha)) ** 0.5 * noise[:, :1]
    return torch.nn.functional.normalize(x, dim=-1)


def _noise(seed: int, block: int, seq_len: int, d_model: int) -> Tensor:
    """Return a block's noise; position 0 is the shared part."""
    # The generator takes 32 bits; the odd stride gives all blocks of a run different seeds.
    (base,) = np.random.SeedSequence(seed).generate_state(1).tolist()
    generator = torch.Generator().manual_seed((base + block * 0x9E3779B1) % 2**32)
    return torch.randn(BLOCK, seq_len + 1, d_model, generator=generator)


FoldMaps = Float[Tensor, "fold pos pos2"]
_CELLS_AT_ONCE = 2**22


class ControlVariate:
    """Sums of the inputs' Gram matrices, per fold, and their effect on each layer's scores.

    Args:
        alpha: the inputs' expected inner product, 0 <= alpha < 1.
        n: positions.
        n_layers: layers.
        spec: the parameter-free transformer (its d_model has to be finite).
        n_folds: sample s goes to fold s % n_folds.
    """

    def __init__(
        self, alpha: float, n: int, n_layers: int, spec: ParameterFreeSpec, n_folds: int
    ) -> None:
        self.spec, self.n_folds, self.n_samples = spec, n_folds, 0
        self.expected = expected_gram(torch.tensor([alpha], dtype=torch.float64), n, spec)[0]
        self.steps = list(steps(self.expected, n_layers, spec))
        self.kernel = rope_kernel(n, spec)
        self.sums = torch.zeros(n_folds, n, n, dtype=torch.float64)
        rotated_layers = n_layers if spec.rope else 0
        self.rotated_sums = torch.zeros(rotated_layers, n_folds, n, n, dtype=torch.float64)

    def add(self, x: Float[Tensor, "sample pos d_model"]) -> None:
        """Add the next samples' inputs."""
        last = self.n_samples + len(x)
        fold_of = torch.arange(self.n_samples, last) % self.n_folds
        if self.spec.centred:
            x = torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)
        self.sums += fold_products(x, x, fold_of, self.n_folds)
        if self.spec.rope:
            self._add_rotated(x, fold_of)
        self.n_samples = last

    def _add_rotated(self, x: Tensor, fold_of: Int[Tensor, " sample"]) -> None:
        """Run samples through the network with frozen attention, and add their rotated products."""
        n, d = x.shape[1:]
        angles = torch.arange(n)[:, None] * rope_frequencies(d)
        pairs = torch.arange(d).view(2, -1).T
        rotation = Rotation(pairs=pairs, cos=angles.cos().float(), sin=angles.sin().float())
        x = x * self.spec.start_scale**0.5
        for layer, (_, mixing, _) in enumerate(self.steps):
            turned = rotation.turned(x[:, :, None])[:, :, 0]
            self.rotated_sums[layer] += fold_products(turned, turned, fold_of, self.n_folds)
            if layer < len(self.steps) - 1:
                x = mixing.to(x.dtype) @ x

    def deviations(self) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """Return the first-order effect of each fold's inputs on its mean scores, nats.

        The effect's expectation is 0.
        """
        counts = fold_counts(self.n_samples, self.n_folds)[:, None, None]
        direct = self.sums / counts - self.expected
        turned = self.rotated_sums / counts
        at_once = max(1, _CELLS_AT_ONCE // direct[0].numel())
        parts = [
            self._respond(direct[part], turned[:, part])
            for part in torch.arange(self.n_folds).split(at_once)
        ]
        return torch.cat(parts)

    def _respond(
        self, direct: FoldMaps, turned: Float[Tensor, "rotated_layer fold pos pos2"]
    ) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """Carry deviations of the input Gram matrix through the linearised mean field.

        `direct` is the part that frozen attention carries on, `indirect` the part from the change
        of attention. Only `direct` differs between RoPE's frequencies.
        """
        direct = self.spec.start_scale * direct
        indirect = torch.zeros_like(direct)
        responses = []
        for layer, (_, mixing, gram) in enumerate(self.steps):
            kernel_gram = self.kernel * gram
            direct_turned = turned[layer] - kernel_gram if self.spec.rope else direct
            change = (direct + indirect, direct_turned + self.kernel * indirect)
            at = tuple(t.expand_as(direct).clone() for t in (gram, kernel_gram))
            scores, mixings = jvp(lambda g, k: attend(g, k, self.spec), at, change)[1]
            responses.append(scores)
            one_side = mixings @ gram @ mixing.mT
            indirect = mixing @ indirect @ mixing.mT + one_side + one_side.mT
            direct = mixing @ direct @ mixing.mT
        return torch.stack(responses, 1)
