"""The `compare` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nope_probe.data.documents import MIN_FOLDS
from nope_probe.errors import UserError
from nope_probe.run.flags import COUNT, LARGEST, LAYERS, SEED, SEQ_LEN, Bounds, validate_effects
from nope_probe.run.settings import Dtype, SessionSettings

# Flags of the two runs that `--models` makes.
OF_RUNS = (*("data", "n_seqs", "seq_len", "folds", "layers", "seed"), *("device", "dtype"))


@dataclass(frozen=True, kw_only=True)
class Settings(SessionSettings):
    """Compare finished runs of one command with the first run, or two models in one step.

    Puts their tables side by side, on one page and in differences.csv: differences with intervals,
    paired if the runs had the same sequences. Runs of `ablate` are shown without each source, and
    of runs of `attention` the heads that changed are named. `--models A B` runs `--study` on both.

    Attributes:
        runs: The folders of the runs; the first is the one to compare with.
        models: Two models to run on the same tokens and compare, instead of finished runs.
        study: With --models: which heads attend differently, or what the sources are.
        text: With --models: a text in which the page shows both models' attention.
        data: With --models: the sequences, as in `scores`.
        n_seqs: With --models: how many sequences.
        seq_len: With --models: tokens in a sequence.
        folds: With --models: parts of the data; below 16 hardly any head can be named.
        layers: With --models: how many first layers, or all.
        seed: With --models: seed of every random choice.
        device: With --models: a torch device, or auto.
        dtype: With --models: the type of the weights.
        labels: Their names [their models, or their folders].
        out: Folder of the comparison [runs/compare-HASH].
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    models: tuple[str, ...] = ()
    study: Literal["attention", "ablate"] = "attention"
    text: str | None = None
    data: str = "shipped"
    n_seqs: Annotated[int, COUNT] = 512
    seq_len: Annotated[int, SEQ_LEN] = 64
    folds: Annotated[int, Bounds(MIN_FOLDS, LARGEST)] = 16
    layers: Annotated[int | Literal["all"], LAYERS] = "all"
    seed: Annotated[int, SEED] = 0
    device: str = "auto"
    dtype: Dtype = "auto"
    labels: tuple[str, ...] = ()
    out: Path | None = None

    def validate(self) -> None:
        """Check what can be checked without the runs.

        Raises:
            UserError: for models and runs at once, other than two models, or flags of `--models`
                without it.
        """
        super().validate()
        if not self.models:
            unused = ("study", "text", *OF_RUNS)
            validate_effects(self, dict.fromkeys(unused, "on finished runs: --models runs models"))
            return
        if self.runs:
            raise UserError("finished runs and --models are two ways to compare: take one")
        if len(self.models) != 2:
            raise UserError(f"--models takes two models, got {len(self.models)}")
        if self.text is not None and self.study != "attention":
            raise UserError(f"--text has no effect on --study {self.study}")
