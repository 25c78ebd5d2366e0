"""A model's score maps from settings to a folder, for the commands `scores` and `reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from nope_probe.study import StudySettings, carry_out, layers_studied, skipped_keys

if TYPE_CHECKING:
    from nope_probe.results import Run
    from nope_probe.study_run import StudyRun

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(StudySettings):
    """Map a model's attention scores (the paper's Figure 5).

    Averages the pre-softmax scores of each layer over windows and heads, and writes raw and
    diagonal-normalised maps, standard errors and measures of the pattern in them.
    """

    per_head: Annotated[bool, _arg(help="Keep and measure each head's map too.")] = False


def run(settings: Settings) -> Path:
    """Map the scores, or show them again if the run is finished, and return its folder."""
    from nope_probe.summary_scores import show

    return carry_out("scores", settings, partial(_compute, settings), show)


def _compute(settings: Settings, study: StudyRun) -> Run | None:
    from nope_probe.hooks.capture import capture_scores
    from nope_probe.score_record import assemble

    inputs = study.windows("inputs")
    skip_keys = skipped_keys(settings, inputs)
    with study.progress(passes=1) as bar:
        maps = study.journal.maps(
            "scores",
            lambda keeper: capture_scores(
                study.loaded.model,
                inputs.inputs,
                layers=range(layers_studied(settings, study.loaded)),
                batch_size=settings.batch_size,
                n_folds=settings.folds,
                per_head=settings.per_head,
                on_batch=bar.update,
                keeper=keeper,
            ),
        )
    if not study.processes.is_first:
        return None
    return assemble(
        settings=study.asked,
        loaded=study.loaded,
        inputs=inputs,
        measured=maps,
        skip_keys=skip_keys,
        started=study.started,
    )
