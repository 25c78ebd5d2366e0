"""The paper's claims about its simulated figures, checked on simulation runs.

A run folder holds maps [layer, query_pos, key_pos] in nats and the table of layers. Numbers are
means over the samples; layers count from 0, so that the paper's layer 1 is L0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.parameter_free.spec import ParameterFreeSpec
from nope_probe.analyses.parameter_free.theory import second_layer_scores, theory_scores
from nope_probe.analyses.pattern import edge_contrast, relative_part
from nope_probe.experiments.paper.claims import Claim
from nope_probe.maps.centred import diagonal_normalised, row_centred
from nope_probe.runtime.folder import Run

LayerMaps = Float[Tensor, "layer query_pos key_pos"]
PerLayer = Float[Tensor, " layer"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A finished simulation of one figure or half of it.

    Attributes:
        scores: mean score maps by alpha.
        layers: the table of layers.
    """

    scores: Mapping[float, LayerMaps]
    layers: pd.DataFrame

    def row(self, alpha: float, layer: int) -> pd.Series:
        """Return the table's row of one layer."""
        rows = self.layers[(self.layers["alpha"] == alpha) & (self.layers["layer"] == layer)]
        return rows.iloc[0]

    def increasing(self, alpha: float, layers: range) -> bool:
        """Return whether scores increase in j at every distance in all these layers."""
        return all(self.row(alpha, layer)["verdict"] == "increasing" for layer in layers)


def figure1() -> Iterator[Claim]:
    """Check the second layer's scores at n = 3 and alpha = 0 (eq. 4)."""
    scores = second_layer_scores(torch.tensor([0.0]), 3)[0]
    for (i, j), printed in {(1, 0): 0.154, (2, 0): 0.132, (2, 1): 0.150}.items():
        value = float(scores[i, j])
        yield Claim(
            paper=f"query {i + 1} scores key {j + 1} with {printed:.3f} in layer 2 (L1)",
            reproduced=round(value, 3) == printed,
            evidence=f"eq. (4) gives {value:.5f}",
        )


def figure2(found: Evidence) -> Iterator[Claim]:
    """Check the increase in j without RoPE at alpha = 0 and 0.2."""
    yield _increase(found, 0.0, range(1, 2), "layer 2 (L1) increases in j at alpha = 0")
    yield _increase(
        found, 0.0, range(2, 4), "layers 3 and 4 (L2, L3) strictly increase in j at alpha = 0"
    )
    yield _increase(
        found, 0.2, range(1, 4), "layers 2 to 4 (L1 to L3) strictly increase in j at alpha = 0.2"
    )
    weak, strong = (float(amplitude(found.scores[alpha])[1]) for alpha in (0.0, 0.2))
    yield Claim(
        paper="layer 2's (L1's) pattern is much clearer at alpha = 0.2 than at 0",
        reproduced=strong > 2 * weak,
        evidence=f"its RMS is {strong:.4f} nats against {weak:.4f}",
    )


def figure4(found: Evidence) -> Iterator[Claim]:
    """Check RoPE's pattern and the mask's effect on it at alpha = 0."""
    yield _flat_first_layer(found)
    yield from _distorted(found, 0.0)


def figure6(found: Evidence) -> Iterator[Claim]:
    """Check that scores saturate in j sooner the higher alpha is."""
    keys = {alpha: _keys_to_saturation(maps[3]) for alpha, maps in found.scores.items()}
    counts = [keys[alpha] for alpha in sorted(keys)]
    text = ", ".join(f"{keys[alpha]} keys at alpha = {alpha:g}" for alpha in sorted(keys))
    yield Claim(
        paper="with higher alpha the pattern saturates faster to a constant in j",
        reproduced=all(a > b for a, b in pairwise(counts)),
        evidence=f"in L3 the last query's scores have made 90% of their rise after {text}",
    )


def figure7(sqrt_d: Evidence, d: Evidence) -> Iterator[Claim]:
    """Check LayerNorm with scores over sqrt(d) and over d."""
    weak, strong = (float(amplitude(each.scores[0.2])[1]) for each in (sqrt_d, d))
    yield Claim(
        paper="LayerNorm with scores over sqrt(d) leaves the mask less influence",
        reproduced=weak < strong,
        evidence=f"the RMS of L1 at alpha = 0.2 is {weak:.3f} nats against {strong:.3f} over d",
    )
    yield _increase(
        d, 0.0, range(1, 4), "over d, layers 2 to 4 (L1 to L3) increase in j as with L2 norm"
    )


def figure9(found: Evidence) -> Iterator[Claim]:
    """Check RoPE's pattern and the mask's effect on it at alpha = 0.5."""
    yield from _distorted(found, 0.5)


def figure10(found: Evidence) -> Iterator[Claim]:
    """Check that without the mask RoPE's pattern stays relative."""
    masked = theory_scores(torch.tensor([0.0]), 50, 4, ParameterFreeSpec(d_model=64, rope=True))[0]
    without, with_mask = (non_relative(maps)[1:] for maps in (found.scores[0.0], masked))
    yield Claim(
        paper="without the mask RoPE's pattern stays relative",
        reproduced=bool((without < 0.1 * with_mask).all()),
        evidence=f"non-relative RMS in L1 to L3 is {_each(without)} nats; with the mask, in "
        f"theory, {_each(with_mask)}",
    )


def amplitude(maps: LayerMaps) -> PerLayer:
    """Return each layer's RMS of the pattern, nats."""
    return row_centred(maps).square().nanmean(dim=(1, 2)).sqrt()


def non_relative(maps: LayerMaps) -> PerLayer:
    """Return each layer's RMS of the non-relative part, what is not a(i) + f(i - j), nats."""
    pattern = row_centred(maps)
    return (pattern - relative_part(pattern)).square().nanmean(dim=(1, 2)).sqrt()


def _increase(found: Evidence, alpha: float, layers: range, paper: str) -> Claim:
    reproduced = found.increasing(alpha, layers)
    if reproduced:
        shares = [found.row(alpha, layer)["monotonicity"] for layer in layers]
        distances = found.row(alpha, layers[0])["distances"]
        evidence = f"the mean step in j is significantly up at all {distances} distances; "
        evidence += "monotonicity at lag 8 is " + ", ".join(f"{share:.3f}" for share in shares)
    else:
        evidence = "; ".join(_fall(found.row(alpha, layer)) for layer in layers)
    return Claim(paper=paper, reproduced=reproduced, evidence=evidence)


def _fall(row: pd.Series) -> str:
    half = (row["fall_high"] - row["fall_low"]) / 2
    return (
        f"L{row['layer']} is {row['verdict']}: in the {row['falling_cells']} cells near the "
        f"diagonal where theory falls ({row['theory_fall']:.1e} nats a step on average), the "
        f"simulation's mean step is {row['fall']:.1e} ± {half:.0e}"
    )


def _flat_first_layer(found: Evidence) -> Claim:
    first = found.scores[0.0][0]
    largest = float(first.tril(-1).abs().max())
    return Claim(
        paper="RoPE alone leaves layer 1 (L0) without a pattern",
        reproduced=largest < 1e-3,
        evidence=f"no score off the diagonal is above {largest:.1e} nats",
    )


def _distorted(found: Evidence, alpha: float) -> Iterator[Claim]:
    maps = found.scores[alpha]
    rest, whole = non_relative(maps)[1:], amplitude(maps)[1:]
    relative = 1 - (rest / whole) ** 2
    yield Claim(
        paper="a relative pattern from layer 2 (L1) on, which the mask makes non-relative",
        reproduced=bool((relative > 0.5).all() and (rest > 1e-3).all()),
        evidence=f"in L1 to L3 its relative share is {_each(relative)}, the rest {_each(rest)} "
        "nats RMS",
    )
    contrast = edge_contrast(diagonal_normalised(maps))[1:]
    yield Claim(
        paper="less the diagonals' means, the first keys are darker than the others (from layer "
        "3 (L2) on)",
        reproduced=bool((contrast[1:] < 0).all()),
        evidence=f"in L1 to L3 they differ by {_each(contrast, '+')} nats",
    )


def _keys_to_saturation(maps: Float[Tensor, "query_pos key_pos"]) -> int:
    row = maps[-1, :-1]
    rise = (row - row[0]) / (row[-8:].mean() - row[0])
    return int((rise >= 0.9).nonzero()[0])


def _each(values: PerLayer, sign: str = "") -> str:
    return ", ".join(format(float(value), f"{sign}.2g") for value in values)


def evidence_of(run: Run) -> Evidence:
    """Return the evidence in a finished simulation."""
    scores = {
        float(name.removeprefix("score/alpha=")): torch.from_numpy(maps).double()
        for name, maps in run.maps.items()
        if name.startswith("score/")
    }
    return Evidence(scores=scores, layers=run.tables["layers"])
