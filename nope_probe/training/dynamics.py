"""When does the positional pattern emerge? A Trainer callback that measures it in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import TrainerCallback

from nope_probe.analyses.pattern import Measures, measure
from nope_probe.hooks.capture import capture_scores
from nope_probe.models.load import to_hooked

N_STEPS = 24


class Dynamics(TrainerCallback):
    """Write the pattern's measures per layer at log-spaced steps to a CSV file."""

    def __init__(self, path: Path, windows: Int[Tensor, "seq pos"], steps: int) -> None:
        self.path, self.windows = path, windows
        self.when = log_spaced(steps)
        self.rows: list[dict[str, float | int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what a resumed run has measured; measure the model at its start."""
        if state.global_step and self.path.is_file():
            table = pd.read_csv(self.path)
            self.rows = table[table["step"] <= state.global_step].to_dict("records")
        else:
            self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure, if this is one of the steps."""
        if state.global_step in self.when and state.is_world_process_zero:
            self.rows += pattern_rows(kwargs["model"], self.windows, state.global_step)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(self.rows).to_csv(self.path, index=False, float_format="%.6g")


def log_spaced(steps: int) -> set[int]:
    """Choose up to 24 steps from 0 to the last, evenly on a log scale."""
    ratios = torch.linspace(0, 1, N_STEPS, dtype=torch.float64)
    return {0, *(round(float(steps**ratio)) for ratio in ratios)}


def pattern_rows(
    model: Any, windows: Int[Tensor, "seq pos"], step: int
) -> list[dict[str, float | int]]:
    """Measure each layer's pattern, the BOS key left out."""
    maps = capture_scores(to_hooked(model), windows.cpu())
    return [
        {"step": step, "layer": layer, **_columns(measures)}
        for layer, measures in enumerate(measure(maps.folds, skip_keys=1))
    ]


def _columns(measures: Measures) -> dict[str, float]:
    return {name: getattr(measures, name).value for name in Measures.__dataclass_fields__}
