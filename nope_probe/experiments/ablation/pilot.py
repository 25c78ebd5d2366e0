"""The pilot round of an attribution, which decides how many sequences the run takes.

A stop that looks at the intervals which it ends makes them too short. The pilot therefore runs on
sequences of its own, drawn with another seed: the number does not depend on the run's sequences,
and a run with this number given is the same to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan

from nope_probe.analyses.attribution import LayerAttribution, attribute
from nope_probe.analyses.jackknife import t_quantile
from nope_probe.analyses.pattern import measure
from nope_probe.conditions import INTACT
from nope_probe.data.documents import MIN_FOLDS
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.ablation.plan import Plan, maps_of
from nope_probe.experiments.ablation.settings import Settings
from nope_probe.experiments.engine import Engine
from nope_probe.maps.estimates import fold_weights
from nope_probe.runtime.processes import process_count
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import NUMBERS

HALF_WIDTH = 0.02  # of each share of a source in the headline's layer
N_FOLDS = 32  # many, because the width that they give then varies little from draw to draw


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """What a pilot round found, and the number of sequences that follows.

    Attributes:
        n_seqs: how many sequences the run takes.
        n_pilot: how many other sequences the pilot took.
        layer: the layer with the strongest pattern; None if no layer showed a pattern.
        half_width: half the width of the widest interval of a source's share in this layer, as
            expected from the run's sequences; None without a pattern.
    """

    n_seqs: int
    n_pilot: int
    layer: int | None = None
    half_width: float | None = None


def pilot_sequences(session: Session[Settings]) -> Sequences:
    """Return the pilot's sequences, drawn as the run's own with another seed.

    Raises:
        UserError: if the data give too few.
    """
    settings = session.settings
    few = replace(settings, n_seqs=NUMBERS[0], seed=settings.seed ^ 1, folds=MIN_FOLDS)
    return session.sequences("pilot-inputs", settings=few)


def run_pilot(session: Session[Settings], plan: Plan, data: Sequences) -> Pilot:
    """Run the conditions of the sources on the pilot's sequences, and choose a number.

    Args:
        session: the run's.
        plan: the conditions.
        data: the pilot's sequences.

    Raises:
        UserError: for a non-finite score.
    """
    batch = min(session.settings.seqs_per_batch, max(1, len(data) // process_count()))
    n_folds = min(N_FOLDS, data.n_documents)
    engine = replace(Engine.of(session, data), n_folds=n_folds, batch_size=batch)
    n_own = session.processes.n_own(len(data), batch)
    with session.checkpoint.progress(plan.keys_of("pilot", plan.of_sources), n_own):
        maps = maps_of(engine, plan, "pilot", plan.of_sources)
    strengths = [measures.amplitude.value for measures in measure(maps[INTACT])]
    layers = attribute(maps, sources=plan.sources)
    clear = [
        (strength, layer.layer, widest_share(layer))
        for strength, layer in zip(strengths, layers, strict=True)
        if not isnan(layer.position.share.value)
    ]
    if not clear:
        return Pilot(n_seqs=NUMBERS[-1], n_pilot=len(data))
    _, strongest, half = max(clear)
    half *= t_quantile(fold_weights(session.settings.folds)) / t_quantile(fold_weights(n_folds))
    n_seqs = number_for(half, len(data), session.settings.folds)
    expected = half * (len(data) / n_seqs) ** 0.5
    return Pilot(n_seqs=n_seqs, n_pilot=len(data), layer=strongest, half_width=expected)


def widest_share(layer: LayerAttribution) -> float:
    """Return half the width of the widest interval of a source's share in a layer."""
    return max((source.share.high - source.share.low) / 2 for source in layer.sources)


def number_for(half_width: float, n_pilot: int, folds: int = 0) -> int:
    """Return the least of `NUMBERS` whose intervals are narrow enough, or the largest.

    Args:
        half_width: of the widest interval from n_pilot sequences; it shrinks as 1 / sqrt(n).
        n_pilot: how many sequences these are.
        folds: how many folds the sequences have to fill.

    Example:
        >>> number_for(0.028, 64), number_for(0.029, 64), number_for(0.5, 64)
        (128, 256, 512)
    """
    needed = max(folds, n_pilot * (half_width / HALF_WIDTH) ** 2)
    return next((number for number in NUMBERS if number >= needed), NUMBERS[-1])
