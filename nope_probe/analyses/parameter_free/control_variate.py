"""The control variate: how far a finite sample of inputs moves the mean field, to first order.

Most of the Monte Carlo noise in a deep layer's mean scores is the inputs' own Gram matrix, carried
upwards. Its expectation is known exactly (`expected_gram`), so what it contributes can be taken
off: mean(S) - J (mean(G) - E G), J the Jacobian of the mean field at E G. That is linear in the
sample, hence unbiased.

With RoPE a mean score depends on the Gram matrix of every frequency. None is formed: at E G all
frequencies are alike, so the part that differs between them is what the network gives when its
attention is frozen at the mean field's, x <- M x with M from theory, and scored with RoPE.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jvp

from nope_probe.analyses.parameter_free.mean_field import (
    ParameterFreeSpec,
    attend,
    expected_gram,
    rope_frequencies,
    rope_kernel,
    steps,
)
from nope_probe.hooks.attention import rotated
from nope_probe.hooks.folds import fold_counts, fold_products

FoldMaps = Float[Tensor, "fold pos pos2"]
_CELLS_AT_ONCE = 2**22


class ControlVariate:
    """Gram matrices of the inputs seen so far, per fold, and what they do to each layer's scores.

    Args:
        alpha: the inputs' expected inner product, 0 <= alpha < 1.
        n: positions.
        n_layers: layers.
        field: which parameter-free transformer (its d_model must be known).
        n_folds: sample s goes to fold s % n_folds.
    """

    def __init__(
        self, alpha: float, n: int, n_layers: int, field: ParameterFreeSpec, n_folds: int
    ) -> None:
        self.field, self.n_folds, self.n_samples = field, n_folds, 0
        self.expected = expected_gram(torch.tensor([alpha], dtype=torch.float64), n, field)[0]
        self.steps = list(steps(self.expected, n_layers, field))
        self.kernel = rope_kernel(n, field)
        self.sums = torch.zeros(n_folds, n, n, dtype=torch.float64)
        rotated_layers = n_layers if field.rope else 0
        self.rotated_sums = torch.zeros(rotated_layers, n_folds, n, n, dtype=torch.float64)
        self.cos_sin = _cos_sin(n, field)

    def add(self, x: Float[Tensor, "sample pos d_model"]) -> None:
        """Add the inputs of some samples, in their order."""
        last = self.n_samples + len(x)
        fold_of = torch.arange(self.n_samples, last) % self.n_folds
        if self.field.centred:
            x = torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)
        self.sums += fold_products(x, x, fold_of, self.n_folds)
        if self.field.rope:
            self._add_rotated(x, fold_of)
        self.n_samples = last

    def _add_rotated(self, x: Tensor, fold_of: Int[Tensor, " sample"]) -> None:
        """Run the samples through the network whose attention is frozen, and score them."""
        x = x * self.field.start_scale**0.5
        for layer, (_, mixing, _) in enumerate(self.steps):
            turned = rotated(x[:, :, None], *self.cos_sin)[:, :, 0]
            self.rotated_sums[layer] += fold_products(turned, turned, fold_of, self.n_folds)
            if layer < len(self.steps) - 1:
                x = mixing.to(x.dtype) @ x

    def deviations(self) -> Float[Tensor, "fold layer query_pos key_pos"]:
        """Give what each fold's inputs add to its mean scores, to first order; expected to be 0."""
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

        `direct` is what frozen attention carries on, `indirect` what the change of attention adds;
        only the first differs between RoPE's frequencies.
        """
        direct = self.field.start_scale * direct
        indirect = torch.zeros_like(direct)
        responses = []
        for layer, (_, mixing, gram) in enumerate(self.steps):
            kernel_gram = self.kernel * gram
            direct_turned = turned[layer] - kernel_gram if self.field.rope else direct
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
        """Differentiate a layer's scores and mixing along a change of its Gram matrices."""
        at = tuple(t.expand_as(change[0]).clone() for t in (gram, kernel_gram))
        return jvp(lambda g, k: attend(g, k, self.field), at, change)[1]


def _cos_sin(n: int, field: ParameterFreeSpec) -> tuple[Tensor, Tensor]:
    angles = torch.arange(n)[:, None] * rope_frequencies(field.dimension)
    angles = torch.cat([angles, angles], -1)[None]
    return angles.cos().float(), angles.sin().float()
