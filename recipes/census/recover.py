"""Recover a block's mask shape, RoPE rotation, scale and soft cap from its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nope_probe.maps.positions import Rotation

MaskKind = Literal[
    "causal", "window", "chunks", "prefix", "bidirectional", "two-sided window", "other"
]
SLOWEST = 1e-10  # radians per position; a pair below it does not turn
FOLLOWS = 1e-3  # relative deviation of a frequency that still follows the power law
ROWS = 256  # queries whose mask is compared at once
LINEAR = 1e-4  # relative error up to which scores are a multiple of q.k


@dataclass(frozen=True, kw_only=True)
class MaskShape:
    """The shape of a mask: the keys that each query attends to.

    Attributes:
        kind: `causal`: all j <= i. `window`: the last `size` keys, i itself included. `chunks`:
            earlier keys in the query's chunk of `size` positions. `prefix`: the first `size`
            positions attend to each other, later positions are causal. `bidirectional`: all keys.
            `two-sided window`: keys less than `size` away. `other`: another shape.
        size: the size of a window, chunk or prefix; else None.
        n_positions: how many positions were seen; a longer window or chunk cannot be detected.
    """

    kind: MaskKind
    size: int | None = None
    n_positions: int

    def __str__(self) -> str:
        return self.kind if self.size is None else f"{self.kind} of {self.size}"


def mask_shape(
    rows: Callable[[slice], Bool[Tensor, "query_pos key_pos"]], n_positions: int
) -> MaskShape:
    """Return the shape of a mask, holding the cells of a few queries at a time.

    Args:
        rows: returns the visible cells of some queries.
        n_positions: how many queries and keys there are.

    Example:
        >>> cells = torch.ones(5, 5, dtype=torch.bool).tril().triu(-2)
        >>> str(mask_shape(cells.__getitem__, 5))
        'window of 3'
    """
    j = torch.arange(n_positions)[None]
    blocks = [slice(i, min(i + ROWS, n_positions)) for i in range(0, n_positions, ROWS)]
    reach, chunk, prefix = 1, 0, 0
    for block in blocks:
        i, cells = torch.arange(n_positions)[block][:, None], rows(block).cpu()
        reach = max(reach, int(((i - j) * cells).max()) + 1)
        hidden = i[~cells[:, 0]]
        chunk = chunk or (int(hidden[0]) if len(hidden) else 0)
        prefix = prefix or int(cells[0].sum())
    chunk = chunk or n_positions
    shapes: dict[tuple[MaskKind, int | None], Callable[[Tensor], Tensor]] = {
        ("causal", None): lambda i: j <= i,
        ("bidirectional", None): lambda i: (j >= 0) & (i >= 0),
        ("window", reach): lambda i: (j <= i) & (i - j < reach),
        ("chunks", chunk): lambda i: (j <= i) & (i // chunk == j // chunk),
        ("prefix", prefix): lambda i: (j <= i) | (j < prefix),
        ("two-sided window", reach): lambda i: (i - j).abs() < reach,
    }
    for block in blocks:
        i, cells = torch.arange(n_positions)[block][:, None], rows(block).cpu()
        shapes = {shape: f for shape, f in shapes.items() if torch.equal(f(i), cells)}
    kind, size = next(iter(shapes), ("other", None))
    return MaskShape(kind=kind, size=size, n_positions=n_positions)


def turning_part(rotation: Rotation) -> Rotation:
    """Return the rotation of the pairs that turn."""
    return rotation.of(rotation.frequencies.abs() > SLOWEST)


def layout_of(rotation: Rotation) -> Literal["halves", "adjacent", "other"] | None:
    """Return `halves` for the pairs (f, f + n), `adjacent` for (2f, 2f + 1); None without pairs."""
    if not len(rotation.known_pairs):
        return None
    low, high = rotation.known_pairs.T
    f, n = torch.arange(len(low)), len(low)
    if torch.equal(low, f) and torch.equal(high, f + n):
        return "halves"
    adjacent = torch.equal(low, 2 * f) and torch.equal(high, 2 * f + 1)
    return "adjacent" if adjacent else "other"


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """Frequencies theta_0 base^(-f/n) of the pairs f = 0, ..., n - 1.

    Attributes:
        base: RoPE's base; None without a law: for a single pair, or if the third pair is off.
        scale: how many times slower the last pair turns than base^(-f/n), without theta_0: the
            factor of linear scaling, of Llama 3.1's and of YaRN; None if the base is not known.
        n_following: how many of the first pairs follow the law; later pairs are slowed down in
            Llama 3.1 and YaRN.
    """

    base: float | None
    scale: float | None
    n_following: int


def recover_rotation(
    straight: Float[Tensor, "two vector d_head"], turned: Float[Tensor, "two vector d_head"]
) -> Rotation | None:
    """Return the rotation that turns vectors at two positions, fitted to the vectors themselves.

    Args:
        straight: the vectors at positions 0 and 1 without RoPE.
        turned: the same vectors with RoPE.

    Returns:
        The rotation; None if the pairs that turn are neither neighbouring coordinates nor
        coordinates at a distance of half the width.

    Example:
        >>> x = torch.randn(2, 5, 3)
        >>> turned = torch.stack([x[0], x[1, :, [1, 0, 2]] * x.new([-1, 1, 1])])
        >>> rotation = recover_rotation(x, turned)
        >>> rotation.pairs.tolist(), round(float(rotation.frequencies), 3)
        ([[0, 1]], 1.571)
    """
    moved = (straight != turned).any(0).any(0).nonzero().flatten()
    if len(moved) % 2:
        return None
    for pairs in (moved.view(-1, 2), moved.view(2, -1).T):
        low, high = pairs.T
        before, after = (torch.complex(x[..., low], x[..., high]) for x in (straight, turned))
        turn = (after * before.conj()).sum(1) / before.abs().square().sum(1)
        if (turn[:, None] * before - after).abs().max() <= FOLLOWS * after.abs().max():
            factor = float(turn[0].abs().mean())
            cos, sin = turn.real / factor, turn.imag / factor
            return Rotation(pairs=pairs, cos=cos, sin=sin, factor=factor)
    return None


def power_law(frequencies: Float[Tensor, " pair"]) -> PowerLaw:
    """Return the power law that the first frequencies follow.

    Example:
        >>> law = power_law(100.0 ** (-torch.arange(4.0) / 4))
        >>> round(law.base), law.n_following
        (100, 4)
    """
    logs = frequencies.abs().double().log()
    n = len(logs)
    if n < 2:  # theta_0 alone, which no base changes
        return PowerLaw(base=None, scale=float((-logs[0]).exp()), n_following=n)
    f = torch.arange(n, dtype=torch.float64)
    follows = (logs - (logs[0] + f * (logs[1] - logs[0]))).abs() < FOLLOWS
    m = int(follows.long().cumprod(0).sum())
    centred = f[:m] - f[:m].mean()
    slope = float((centred * logs[:m]).sum() / centred.square().sum())
    shows = m >= min(3, n)  # any two points lie on a line
    base = math.exp(-slope * n) if shows else None
    scale = math.exp(slope * (n - 1) - float(logs[-1])) if shows else None
    return PowerLaw(base=base, scale=scale, n_following=m)


@dataclass(frozen=True, kw_only=True)
class ScoreProduct:
    """A score as c tanh(scale q.k / c), or scale q.k without a soft cap c.

    Attributes:
        scale: the factor of q.k.
        soft_cap: c, nats, or None.
        error: the largest difference to the scores, relative to the largest score.
    """

    scale: float
    soft_cap: float | None
    error: float


def fit_score_product(
    products: Float[Tensor, " cell"], scores: Float[Tensor, " cell"]
) -> ScoreProduct:
    """Return scale and soft cap by least squares.

    A soft cap can be fitted only if some scores come near it; without a soft cap, `error` is 1e-4
    at most.

    Args:
        products: q.k of some cells, from small to large.
        scores: the block's scores in these cells, nats.

    Example:
        >>> products = torch.linspace(-9, 9, 19).double()
        >>> fit = fit_score_product(products, 5 * torch.tanh(0.5 * products / 5))
        >>> round(fit.scale, 6), round(fit.soft_cap, 6)
        (0.5, 5.0)
    """
    x, y = products.double(), scores.double()
    largest = float(y.abs().max())
    if largest == 0 or not x.any():
        return ScoreProduct(scale=0.0, soft_cap=None, error=float(largest > 0))
    scale = float((x @ y) / (x @ x))
    error = float((scale * x - y).abs().max()) / largest
    if error <= LINEAR:
        return ScoreProduct(scale=scale, soft_cap=None, error=error)
    scale, cap = _fit_cap(x.numpy(), y.numpy())
    fitted = cap * torch.tanh(scale * x / cap)
    return ScoreProduct(scale=scale, soft_cap=cap, error=float((fitted - y).abs().max()) / largest)


def _fit_cap(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    from scipy.optimize import curve_fit

    small = np.abs(x) <= np.quantile(np.abs(x), 0.1)
    slope = float((x[small] @ y[small]) / (x[small] @ x[small]))

    def capped(x: np.ndarray, scale: float, cap: float) -> np.ndarray:
        return cap * np.tanh(scale * x / cap)

    (scale, cap), _ = curve_fit(capped, x, y, p0=(slope, np.abs(y).max()), xtol=1e-12, ftol=1e-12)
    return float(scale), float(cap)
