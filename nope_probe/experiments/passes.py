"""The passes of a run: sequences through a model, listed once by a study and run in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nope_probe.data.sequences import Sequences
from nope_probe.experiments.engine import Engine, position_keys
from nope_probe.hooks.removing.removals import Ablation


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Sequences through a model once.

    Attributes:
        key: its name in the checkpoint and among the results.
        read: captures what the pass is for, given the engine, the key and the ablation.
        ablation: what the model is run without; None for the intact model.
        sequences: what is run; None for the run's sequences.
        calibrates: whether it measures gains and means for all passes after it.
    """

    key: str
    read: Callable[[Engine, str, Ablation | None], Any]
    ablation: Ablation | None = None
    sequences: Sequences | None = None
    calibrates: bool = False

    @property
    def keys(self) -> list[str]:
        """The keys of all that it captures: written positions of removed writers come first."""
        of_positions = position_keys(self.key, self.ablation or Ablation())
        return [*of_positions.values(), self.key]


def execute(engine: Engine, passes: Iterable[Pass]) -> Iterator[tuple[str, Any]]:
    """Run passes in turn, and yield the key and the result of each.

    Args:
        engine: the model on the run's sequences.
        passes: in the order in which they are run.
    """
    for one in passes:
        on = engine if one.sequences is None else engine.on(one.sequences)
        result = one.read(on, one.key, one.ablation)
        if one.calibrates:
            engine = replace(engine, calibration=result)
        yield one.key, result
