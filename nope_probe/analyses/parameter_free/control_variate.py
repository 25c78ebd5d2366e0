"""The control variate: the first-order effect of a finite sample of inputs on the mean scores.

Most of the Monte Carlo noise in a deep layer's mean scores is the inputs' own Gram matrix G,
carried from layer to layer. Its expectation is known exactly (`expected_gram`), so that its effect
can be subtracted: mean(S) - J (mean(G) - E G), J the Jacobian of the mean field at E G. This is
linear in the sample, hence unbiased.

With RoPE a mean score depends on the Gram matrix of every frequency. None of them is formed: at E G
all frequencies are alike, so the part in which they differ is what the network computes with its
attention frozen at the mean field's, x <- M x with M from theory, and scored with RoPE.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jvp

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.analyses.parameter_free.theory import (
    attend,
    expected_gram,
    rope_frequencies,
    rope_kernel,
    steps,
)
from nope_probe.maps.folds import fold_counts, fold_products

FoldMaps = Float[Tensor, "fold pos pos2"]
_CELLS_AT_ONCE = 2**22


class ControlVariate:
    """Sums of the inputs' Gram matrices, per fold, and their effect on each layer's scores.

    Args:
        alpha: the inputs' expected inner product, 0 <= alpha < 1.
        n: positions.
        n_layers: layers.
        spec: which parameter-free transformer (its d_model has to be finite).
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
        self.cos_sin = _cos_sin(n, spec)

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
        x = x * self.spec.start_scale**0.5
        for layer, (_, mixing, _) in enumerate(self.steps):
            turned = _rotated(x, *self.cos_sin)
            self.rotated_sums[layer] += fold_products(turned, turned, fold_of, self.n_folds)
            if layer < len(self.steps) - 1:
                x = mixing.to(x.dtype) @ x

    def deviations(self) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """Return the first-order effect of each fold's inputs on its mean scores, nats.

        Its expectation is 0.
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

        `direct` is the part that frozen attention carries on, `indirect` the part that the change
        of attention adds; only the first differs between RoPE's frequencies.
        """
        direct = self.spec.start_scale * direct
        indirect = torch.zeros_like(direct)
        responses = []
        for layer, (_, mixing, gram) in enumerate(self.steps):
            kernel_gram = self.kernel * gram
            direct_turned = turned[layer] - kernel_gram if self.spec.rope else direct
            change = (direct + indirect, direct_turned + self.kernel * indirect)
            scores, mixings = self._linearised(gram, kernel_gram, change)
            responses.append(scores)
            one_side = mixings @ gram @ mixing.mT
            indirect = mixing @ indirect @ mixing.mT + one_side + one_side.mT
            direct = mixing @ direct @ mixing.mT
        return torch.stack(responses, 1)

    def _linearised(
        self, gram: Tensor, kernel_gram: Tensor, change: tuple[FoldMaps, FoldMaps]
    ) -> tuple[FoldMaps, FoldMaps]:
        """Return the derivatives of a layer's scores and mixing along a change of its Grams."""
        at = tuple(t.expand_as(change[0]).clone() for t in (gram, kernel_gram))
        return jvp(lambda g, k: attend(g, k, self.spec), at, change)[1]


def _cos_sin(n: int, spec: ParameterFreeSpec) -> tuple[Tensor, Tensor]:
    angles = torch.arange(n)[:, None] * rope_frequencies(spec.dimension)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def _rotated(
    x: Float[Tensor, "sample pos d_model"],
    cos: Float[Tensor, "pos d_model"],
    sin: Float[Tensor, "pos d_model"],
) -> Float[Tensor, "sample pos d_model"]:
    """Return vectors rotated in the pairs (f, f + d_model/2) of coordinates."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
