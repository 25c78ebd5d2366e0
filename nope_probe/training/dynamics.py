"""The training dynamics of the positional pattern: a Trainer callback that measures it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from nope_probe.analyses.pattern import Measures, measure
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.models.load import to_hooked
from nope_probe.runtime.folder import atomic_write

N_STEPS = 24


class Dynamics(TrainerCallback):
    """Writes the measures of each layer's pattern at log-spaced steps to a CSV file.

    Args:
        path: the file.
        tokens: on which the model is measured.
        n_steps: how many steps training has.
    """

    def __init__(self, path: Path, tokens: Int[Tensor, "seq pos"], n_steps: int) -> None:
        self.path, self.tokens = path, tokens
        self.steps = log_spaced(n_steps)
        self.rows: list[dict[str, float | int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read what a resumed run has measured; measure a new run's model at its start."""
        if state.global_step and self.path.is_file():
            table = pd.read_csv(self.path)
            self.rows = table[table["step"] <= state.global_step].to_dict("records")
        else:
            self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model, if this is one of the steps."""
        if state.global_step in self.steps and state.is_world_process_zero:
            self.rows += pattern_rows(kwargs["model"], self.tokens, state.global_step)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as partial:
                pd.DataFrame(self.rows).to_csv(partial, index=False, float_format="%.6g")


def log_spaced(n_steps: int) -> set[int]:
    """Return step 0 and up to 24 steps from 1 to the last, evenly on a log scale.

    Example:
        >>> sorted(log_spaced(10))
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    """
    ratios = torch.linspace(0, 1, N_STEPS, dtype=torch.float64)
    return {0, *(round(float(n_steps**ratio)) for ratio in ratios)}


def pattern_rows(
    model: PreTrainedModel, tokens: Int[Tensor, "seq pos"], step: int
) -> list[dict[str, float | int]]:
    """Return the measures of each layer's pattern, a row per layer; the BOS key is left out."""
    maps = capture_scores(to_hooked(model), tokens.cpu())
    return [
        {"step": step, "layer": layer, **_columns(measures)}
        for layer, measures in enumerate(measure(maps, skip_keys=1))
    ]


def _columns(measures: Measures) -> dict[str, float]:
    return {name: getattr(measures, name).value for name in Measures.__dataclass_fields__}
