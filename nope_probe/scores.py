"""Map a model's mean attention scores, whole or per head, with errors and pattern measures."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nope_probe.command import run_command
from nope_probe.results import Run, check_place, read_run, write_run
from nope_probe.study import (
    StudySettings,
    cut_windows,
    default_place,
    layers_studied,
    load_model,
    refuse_impossible,
    skipped_keys,
)

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(StudySettings):
    """Map a model's attention scores (the paper's Figure 5).

    Averages the pre-softmax scores of each layer over windows and heads, and writes raw and
    diagonal-normalised maps, standard errors and measures of the pattern in them.
    """

    per_head: Annotated[bool, _arg(help="Keep and measure each head's map too.")] = False
    out: Annotated[Path | None, _arg(help="Folder of the run [runs/scores-MODEL-HASH].")] = None


def main() -> None:
    """Run the command line."""
    run_command(Settings, scores)


def scores(settings: Settings) -> Path:
    """Map the scores, or show them again if the run is finished, and return its folder."""
    from nope_probe.summary_scores import show

    refuse_impossible(settings)
    asked = {key: value for key, value in asdict(settings).items() if key != "out"}
    out = settings.out or default_place("scores", settings.model, asked)
    if not check_place(out, asked):
        write_run(out, _compute(settings, asked))
    run = read_run(out)
    show(run.manifest, run.tables, out)
    return out


def _compute(settings: Settings, asked: dict[str, Any]) -> Run:
    from tqdm import tqdm

    from nope_probe.hooks.capture import capture_scores
    from nope_probe.score_record import assemble

    started = time.time()
    loaded = load_model(settings)
    inputs = cut_windows(settings, loaded)
    skip_keys = skipped_keys(settings, inputs)
    with tqdm(total=settings.n_seqs, unit="seq", file=sys.stderr, dynamic_ncols=True) as bar:
        maps = capture_scores(
            loaded.model,
            inputs.inputs,
            layers=range(layers_studied(settings, loaded)),
            batch_size=settings.batch_size,
            n_folds=settings.folds,
            per_head=settings.per_head,
            on_batch=bar.update,
        )
    return assemble(
        command=" ".join(["python", "-m", "nope_probe.scores", *sys.argv[1:]]),
        settings=asked,
        loaded=loaded,
        inputs=inputs,
        measured=maps,
        skip_keys=skip_keys,
        started=started,
    )


if __name__ == "__main__":
    main()
