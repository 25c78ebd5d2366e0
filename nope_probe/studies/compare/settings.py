"""The `compare` command's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nope_probe.data.documents import MIN_FOLDS
from nope_probe.errors import UserError
from nope_probe.run.settings import (
    COUNT,
    LARGEST,
    LAYERS,
    SEED,
    SEQ_LEN,
    Bounds,
    Dtype,
    SessionSettings,
    validate_effects,
)

_arg = tyro.conf.arg
# Flags of the two runs that `--models` makes.
OF_RUNS = (
    *("data", "n_seqs", "seq_len", "folds", "layers", "seed"),
    *("device", "dtype"),
)


@dataclass(frozen=True, kw_only=True)
class Settings(SessionSettings):
    """Compare finished runs of one command with the first run, or two models in one step.

    Puts their tables side by side, on one page and in differences.csv: differences with intervals,
    paired if the runs had the same sequences. Runs of `ablate` are shown without each source, and
    of runs of `attention` the heads that changed are named. `--models A B` runs `--study` on both.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        _arg(help="The folders of the runs; the first is the one to compare with."),
    ] = ()
    models: Annotated[
        tuple[str, ...],
        _arg(help="Two models to run on the same tokens and compare, instead of finished runs."),
    ] = ()
    study: Annotated[
        Literal["attention", "ablate"],
        _arg(help="With --models: which heads attend differently, or what the sources are."),
    ] = "attention"
    text: Annotated[
        str | None,
        _arg(help="With --models: a text in which the page shows both models' attention."),
    ] = None
    data: Annotated[str, _arg(help="With --models: the sequences, as in `scores`.")] = "shipped"
    n_seqs: Annotated[int, COUNT, _arg(help="With --models: how many sequences.")] = 512
    seq_len: Annotated[int, SEQ_LEN, _arg(help="With --models: tokens in a sequence.")] = 64
    folds: Annotated[
        int,
        Bounds(MIN_FOLDS, LARGEST),
        _arg(help="With --models: parts of the data; below 16 hardly any head can be named."),
    ] = 16
    layers: Annotated[
        int | Literal["all"], LAYERS, _arg(help="With --models: how many first layers, or all.")
    ] = "all"
    seed: Annotated[int, SEED, _arg(help="With --models: seed of every random choice.")] = 0
    device: Annotated[str, _arg(help="With --models: a torch device, or auto.")] = "auto"
    dtype: Annotated[Dtype, _arg(help="With --models: the type of the weights.")] = "auto"
    labels: Annotated[
        tuple[str, ...], _arg(help="Their names [their models, or their folders].")
    ] = ()
    out: Annotated[Path | None, _arg(help="Folder of the comparison [runs/compare-HASH].")] = None

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
