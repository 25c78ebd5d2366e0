"""The explorer of a circuit run: one block in every combination of removed components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nope_probe.analyses.shapley import player_set
from nope_probe.components import Substitute, phrase
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.engine import Engine
from nope_probe.experiments.explorer import circuit_view, note_on
from nope_probe.experiments.explorer_views import combinations
from nope_probe.experiments.wording import listed
from nope_probe.figures.explorer import Explorer
from nope_probe.hooks.removing.targets import components


def block_explorer(
    engine: Engine,
    layer: int,
    *,
    removed: Sequence[str],
    substitute: Substitute,
    skip_keys: int,
) -> Explorer:
    """Return the explorer of one block, with a switch for each of the model's components.

    Args:
        engine: the model, on the sequences that each combination runs.
        layer: the block, from 0.
        removed: the components that are removed at first.
        substitute: what stands for removed weights.
        skip_keys: how many first keys the measures leave out.
    """
    has = components(engine.model)
    ablations = [substitute.without(removed) for removed in combinations(player_set(has))]
    engine = engine.calibrated(None, ablations)
    return Explorer(
        title="Press an operation on an arrow: it is removed, and every stage changes",
        players={name: [name] for name in has},
        views=(circuit_view(engine, ablations, [layer], skip_keys),),
        components=has,
        removed=[name for name in removed if name in has],
        note=note_on(engine, substitute, skip_keys) + _ignored(removed, has),
    )


def _ignored(removed: Sequence[str], has: Sequence[str]) -> str:
    """Return which removals of the run have no switch, as the end of a note."""
    names = [phrase(name) for name in removed if name not in has]
    if not names:
        return ""
    return f" There is no switch for {listed(names)}: removed in the figures below, intact here."


def explored(inputs: Sequences, n_switches: int, times: int, n_folds: int) -> Sequences | None:
    """Return the sequences that each combination runs; None where they would be too few.

    Args:
        inputs: the run's sequences.
        n_switches: how many components have a switch.
        times: how many times the run's sequences all combinations may take together.
        n_folds: parts of the data that intervals are made from.
    """
    n_seqs = min(len(inputs), times * len(inputs) // 2**n_switches)
    documents = None if inputs.documents is None else inputs.documents[:n_seqs]
    first = replace(inputs, inputs=inputs.inputs[:n_seqs], documents=documents)
    return first if n_switches and first.n_documents >= n_folds else None
