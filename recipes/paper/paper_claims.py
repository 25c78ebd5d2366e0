"""The paper's claims about its figures, checked on the finished runs of their experiments.

Numbers are means over samples or sequences. Layers count from 0, so the paper's layer 1 is L0.
Figure 3 follows one block stage by stage, and Figure 8 shows every layer of a NoPE model. Figures 5
and 11 to 16 show language models (section 5.2); the other figures are simulated. Signs are reported
as measured, because on the first keys the paper's text, its Figure 5 and its simulation disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.pattern_rows import mean_squares, not_by_distance
from nope_probe.analyses.theory import second_layer_scores, theory_scores
from nope_probe.figures.words import interval_of, interval_text
from nope_probe.maps.layers import LayerMaps, Pattern
from nope_probe.maps.rows import diagonal_normalised, pattern_rms, row_centred
from nope_probe.run.folder import Run
from nope_probe.stages import ParameterFreeSpec
from reproduce_settings import FIGURES

ModelMaps = Float[Tensor, "layer query_pos key_pos"]
PerLayer = Float[Tensor, " layer"]
NEAR_ZERO = 0.1  # share of the diagonal
EDGE = 0.05  # share of the keys
LISTED = 6  # of more layers only the extremes are named


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the paper about a figure.

    Attributes:
        experiment: the model, or the half of the figure, whose run checked the claim.
        paper: the claim.
        reproduced: whether it holds in the run.
        evidence: the numbers of the run.
    """

    experiment: str = ""
    paper: str
    reproduced: bool
    evidence: str

    def __str__(self) -> str:
        verdict = "Reproduced" if self.reproduced else "Not reproduced"
        return f"the paper: {self.paper}. {verdict}: {self.evidence}."


@dataclass(frozen=True, kw_only=True)
class PanelCounts:
    """How the published panels compare with ours.

    Attributes:
        published: how many the figure has.
        compared: how many of them are of a model that we ran.
        exact: how many are within a colour step.
        agree: how many are within sampling noise, those included.
        verdict: a sentence on them.
    """

    published: int = 0
    compared: int = 0
    exact: int = 0
    agree: int = 0
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a figure's run found.

    Attributes:
        as_the_paper: whether the models and the settings are the paper's.
        experiments: the folders of the experiments, from the figure's folder, by name.
        claims: the paper's claims, checked.
        panels: the published panels, compared.
        headline: sentences on both.
        notes: the differences between the run and the paper's.
    """

    as_the_paper: bool = False
    experiments: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    panels: PanelCounts = PanelCounts()
    headline: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def claims_of(figure: str, runs: Mapping[str, Run]) -> list[Claim]:
    """Return the paper's claims about a figure, checked.

    Args:
        figure: the figure.
        runs: its finished experiments by name.
    """
    if figure == "figure1":
        return list(figure1())
    if figure == "figure7":  # its claims need both halves, and count for the first
        return [replace(claim, experiment=next(iter(runs))) for claim in figure7(*runs.values())]
    check = CHECKS.get(figure, lambda run: score_claims(run, FIGURES[figure].maps))
    return [replace(claim, experiment=name) for name, run in runs.items() for claim in check(run)]


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


def figure2(run: Run) -> Iterator[Claim]:
    """Check the increase in j without RoPE at alpha = 0 and 0.2."""
    for alpha, layers, paper in (
        (0.0, range(1, 2), "layer 2 (L1) increases in j at alpha = 0"),
        (0.0, range(2, 4), "layers 3 and 4 (L2, L3) strictly increase in j at alpha = 0"),
        (0.2, range(1, 4), "layers 2 to 4 (L1 to L3) strictly increase in j at alpha = 0.2"),
    ):
        yield _increase(run, alpha, layers, paper)
    weak, strong = (float(pattern_rms(simulated_scores(run)[alpha])[1]) for alpha in (0.0, 0.2))
    yield Claim(
        paper="layer 2's (L1's) pattern is much clearer at alpha = 0.2 than at 0",
        reproduced=strong > 2 * weak,
        evidence=f"its RMS is {strong:.4f} nats against {weak:.4f}",
    )


def figure3(run: Run) -> Iterator[Claim]:
    """Check the claims of section 4.2 about the stages (a) to (i) on a run of one block.

    Ratios leave out the first position, which the paper calls an attention sink.
    """
    ratio = off_diagonal_ratio(run.maps["gram/a"])
    yield Claim(
        paper="(a) inner products are close to zero off the diagonal",
        reproduced=abs(ratio) < NEAR_ZERO,
        evidence=f"their mean is {ratio:.2f} of the diagonal's",
    )
    falls = float(np.mean(np.diff(np.diagonal(run.maps["gram/c"])) < 0))
    yield Claim(
        paper="(c) the diagonal falls with position",
        reproduced=falls > 0.95,
        evidence=f"it does in {falls:.0%} of the steps",
    )
    stages = run.tables["stages"].set_index("stage")
    rows = {str(stage): interval_of(row, "locality") for stage, row in stages.iterrows()}
    text = {stage: interval_text(row, "+.2f") for stage, row in rows.items()}
    rises = {stage: low > 0 for stage, (_, low, _) in rows.items()}
    for stage, paper, reproduced in (
        ("f", "after the norm, nearer keys have more", rises["f"]),
        ("g", "the FFN and the residual invert the pattern", rises["f"] and rows["g"][2] < 0),
        ("h", "after the next norm, again, nearer keys have more", rises["h"]),
        ("i", "the next layer's scores increase towards the query", rises["i"]),
    ):
        inverted = f"{text['f']} at (f), {text['g']} at (g)"
        evidence = f"rank correlation {inverted if stage == 'g' else text[stage]}"
        yield Claim(paper=f"({stage}) {paper}", reproduced=reproduced, evidence=evidence)


def figure4(run: Run) -> Iterator[Claim]:
    """Check RoPE's pattern and the mask's effect on it at alpha = 0."""
    largest = float(simulated_scores(run)[0.0][0].tril(-1).abs().max())
    yield Claim(
        paper="RoPE alone leaves layer 1 (L0) without a pattern",
        reproduced=largest < 1e-3,
        evidence=f"no score off the diagonal is above {largest:.1e} nats",
    )
    yield from _distorted(simulated_scores(run)[0.0])


def figure6(run: Run) -> Iterator[Claim]:
    """Check that scores saturate in j sooner the higher alpha is."""
    scores = simulated_scores(run)
    keys = {alpha: _keys_to_saturation(scores[alpha][3]) for alpha in sorted(scores)}
    text = ", ".join(f"{n_keys} keys at alpha = {alpha:g}" for alpha, n_keys in keys.items())
    yield Claim(
        paper="with higher alpha the pattern saturates faster to a constant in j",
        reproduced=all(a > b for a, b in pairwise(keys.values())),
        evidence=f"in L3 the last query's scores have made 90% of their rise after {text}",
    )


def figure7(sqrt_d: Run, d: Run) -> Iterator[Claim]:
    """Check LayerNorm with scores over sqrt(d) and over d."""
    weak, strong = (float(pattern_rms(simulated_scores(run)[0.2])[1]) for run in (sqrt_d, d))
    yield Claim(
        paper="LayerNorm with scores over sqrt(d) leaves the mask less influence",
        reproduced=weak < strong,
        evidence=f"the RMS of L1 at alpha = 0.2 is {weak:.3f} nats against {strong:.3f} over d",
    )
    yield _increase(
        d, 0.0, range(1, 4), "over d, layers 2 to 4 (L1 to L3) increase in j as with L2 norm"
    )


def figure8(run: Run) -> Iterator[Claim]:
    """Check that layers after the first have a positional pattern (section 4.2, appendix B)."""
    later = run.tables["pattern"].iloc[1:]
    if len(later):
        yield Claim(
            paper="without RoPE, layers after the first have a position-dependent pattern",
            reproduced=bool((later["amplitude_low"] > 0).all()),
            evidence=f"its RMS in nats is {layer_values(later, 'amplitude')}",
        )


def figure9(run: Run) -> Iterator[Claim]:
    """Check RoPE's pattern and the mask's effect on it at alpha = 0.5."""
    yield from _distorted(simulated_scores(run)[0.5])


def figure10(run: Run) -> Iterator[Claim]:
    """Check that without the mask RoPE's pattern stays relative."""
    masked = theory_scores(torch.tensor([0.0]), 50, 4, ParameterFreeSpec(d_model=64, rope=True))[0]
    scores = simulated_scores(run)[0.0]
    without, with_mask = (not_by_distance_sizes(maps)[1:] for maps in (scores, masked))
    yield Claim(
        paper="without the mask RoPE's pattern stays relative",
        reproduced=bool((without < 0.1 * with_mask).all()),
        evidence=f"non-relative RMS in L1 to L3 is {_joined(without)} nats; with the mask, in "
        f"theory, {_joined(with_mask)}",
    )


CHECKS = {
    check.__name__: check
    for check in (figure2, figure3, figure4, figure6, figure8, figure9, figure10)
}


def score_claims(run: Run, kinds: tuple[str, ...]) -> Iterator[Claim]:
    """Check the claims about the maps of a language model.

    Args:
        run: a finished run of `ablate --remove none`.
        kinds: the maps that the figure shows: `score`, `normalised` or both.
    """
    if "score" in kinds:
        yield _scale(run, "score", 10.0, "typical mean scores are within ±10 nats")
    if "normalised" not in kinds:
        return
    yield _scale(run, "normalised", 1.0, "non-relative patterns are within ±1 nat")
    first, later = run.tables["pattern"].iloc[:1], run.tables["pattern"].iloc[1:]
    if later.empty:  # the other claims need later layers
        return
    yield Claim(
        paper="from layer 2 (L1) on, the pattern has a part that is no function of distance",
        reproduced=bool((later["not_by_distance_low"] > 0).all()),
        evidence=f"its RMS in nats is {layer_values(later, 'not_by_distance')}",
    )
    yield Claim(
        paper="layer 1 (L0) has none (here: less than every later layer)",
        reproduced=bool(first["not_by_distance_high"].item() < later["not_by_distance_low"].min()),
        evidence=f"its RMS in nats is {layer_values(first, 'not_by_distance')}",
    )
    contrast = f"the first keys differ from the rest by {layer_values(later, 'edge_contrast')} nats"
    yield Claim(
        paper="less the diagonals' means, the first keys are emphasised (positive in Figure 5)",
        reproduced=bool((later["edge_contrast_low"] > 0).all()),
        evidence=contrast,
    )
    yield Claim(
        paper="this is as in the simulation (negative in Figure 4)",
        reproduced=bool((later["edge_contrast_high"] < 0).all()),
        evidence=contrast,
    )


def simulated_scores(run: Run) -> dict[float, ModelMaps]:
    """Return the mean score maps of a simulation by alpha, nats."""
    return {
        float(name.removeprefix("score/alpha=")): torch.from_numpy(maps).double()
        for name, maps in run.maps.items()
        if name.startswith("score/")
    }


def not_by_distance_sizes(maps: ModelMaps) -> PerLayer:
    """Return each layer's RMS of the non-relative part, the rest of a(i) + f(i - j), nats."""
    pattern = LayerMaps.of(row_centred(maps)).pattern  # a layer in the place of each fold
    return mean_squares(not_by_distance(pattern), 0, pattern.cells).sqrt()


def edge_contrast(pattern: Pattern) -> Float[Tensor, " fold"]:
    """Return the edge contrast of the scores of each fold, nats (Figures 4 and 5).

    It is the mean, over the first 5% of the kept keys (one at least), of the scores less the mean
    of each diagonal, less the mean over the other kept keys. Softmax does not see all of it.
    """
    folds, cells = pattern.maps.folds, pattern.cells
    scores = diagonal_normalised(folds.maps.double(), folds.where)
    n_first = max(1, round(EDGE * (cells.n - cells.skip_keys)))
    is_first = torch.arange(cells.n) < cells.skip_keys + n_first
    first, others = (scores[:, cells.mask & of].mean(1) for of in (is_first, ~is_first))
    return first - others


def off_diagonal_ratio(values: Float[np.ndarray, "query_pos key_pos"]) -> float:
    """Return the mean below the diagonal over the mean on it, without the first position.

    Example:
        >>> off_diagonal_ratio(np.array([[9.0, 9.0, 9.0], [9.0, 4.0, 9.0], [9.0, 1.0, 4.0]]))
        0.25
    """
    kept = values[1:, 1:]
    below = np.tril(np.ones(kept.shape, bool), -1)
    return float(kept[below].mean() / np.diagonal(kept).mean())


def _increase(run: Run, alpha: float, layers: range, paper: str) -> Claim:
    """Check that some layers increase in j, from a simulation's table of layers."""
    table = run.tables["layers"]
    rows = table[(table["alpha"] == alpha) & table["layer"].isin(layers)]
    reproduced = bool((rows["verdict"] == "increasing").all())
    if reproduced:
        shares = ", ".join(f"{share:.3f}" for share in rows["monotonicity"])
        distances = rows["distances"].iloc[0]
        evidence = f"the mean step in j is significantly up at all {distances} distances; "
        evidence += f"monotonicity at lag 8 is {shares}"
    else:
        evidence = "; ".join(_fall(row) for _, row in rows.iterrows())
    return Claim(paper=paper, reproduced=reproduced, evidence=evidence)


def _fall(row: pd.Series) -> str:
    half = (row["fall_high"] - row["fall_low"]) / 2
    return (
        f"L{row['layer']} is {row['verdict']}: in the {row['falling_cells']} cells near the "
        f"diagonal where theory falls ({row['theory_fall']:.1e} nats a step on average), the "
        f"simulation's mean step is {row['fall']:.1e} ± {half:.0e}"
    )


def _distorted(maps: ModelMaps) -> Iterator[Claim]:
    """Check RoPE's pattern and the mask's effect on it."""
    rest, whole = not_by_distance_sizes(maps)[1:], pattern_rms(maps)[1:]
    relative = 1 - (rest / whole) ** 2
    yield Claim(
        paper="a relative pattern from layer 2 (L1) on, which the mask makes non-relative",
        reproduced=bool((relative > 0.5).all() and (rest > 1e-3).all()),
        evidence=f"in L1 to L3 its relative share is {_joined(relative)}, the rest "
        f"{_joined(rest)} nats RMS",
    )
    patterns = [LayerMaps.of(scores[None]).pattern for scores in maps[1:]]
    contrast = torch.cat([edge_contrast(pattern) for pattern in patterns])
    yield Claim(
        paper="less the diagonals' means, the first keys are darker than the others (from layer "
        "3 (L2) on)",
        reproduced=bool((contrast[1:] < 0).all()),
        evidence=f"in L1 to L3 they differ by {_joined(contrast, '+')} nats",
    )


def _keys_to_saturation(maps: Float[Tensor, "query_pos key_pos"]) -> int:
    row = maps[-1, :-1]
    rise = (row - row[0]) / (row[-8:].mean() - row[0])
    return int((rise >= 0.9).nonzero()[0])


def _joined(values: PerLayer, sign: str = "") -> str:
    return ", ".join(format(float(value), f"{sign}.2g") for value in values)


def _scale(run: Run, name: str, bound: float, paper: str) -> Claim:
    spans = np.array([np.nanquantile(layer, [0.01, 0.99]) for layer in run.maps[f"{name}/intact"]])
    low, high = int(spans[:, 0].argmin()), int(spans[:, 1].argmax())
    layers = run.tables["pattern"]["layer"].tolist()
    return Claim(
        paper=paper,
        reproduced=bool((np.abs(spans) <= bound).all()),
        evidence=f"98% of a layer's cells are between {spans[low, 0]:.2g} (L{layers[low]}) and "
        f"{spans[high, 1]:.2g} nats (L{layers[high]}), with a standard error of "
        f"{np.nanmedian(run.maps['se/intact']):.2g} nats",
    )


def layer_values(rows: pd.DataFrame, name: str) -> str:
    """Return each layer's value with its interval; for many layers, only the extremes."""
    many = len(rows) > LISTED
    if many:
        rows = rows.loc[[rows[name].idxmin(), rows[name].idxmax()]]
    values = [
        f"{interval_text(interval_of(row, name), '+.2g')} (L{row['layer']:.0f})"
        for _, row in rows.iterrows()
    ]
    return (" to " if many else ", ").join(values)
