"""A block's stages from settings to a folder, for the commands `circuit` and `reproduce`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe import study
from nope_probe.command import refuse_processes
from nope_probe.errors import TooFewLayersError, UserError
from nope_probe.study import StudySettings

if TYPE_CHECKING:
    from nope_probe.data import Windows
    from nope_probe.hooks.ablation import Component
    from nope_probe.hooks.capture import StageMaps
    from nope_probe.models import Loaded

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings(StudySettings):
    """Follow one block from its input to the next block's scores (the paper's Figure 3).

    Writes the mean Gram or score map of each stage, (a) to (i), with standard errors, into a
    folder with manifest.json, stages.csv and report.html.
    """

    model: Annotated[
        str, _arg(help="A shipped or friendly name, a Hub id or a local Hugging Face folder.")
    ] = "nope-tiny"
    layer: Annotated[int, _arg(help="Which block, from 1; the last one has (a) to (g).")] = 1
    remove: Annotated[
        tuple[str, ...],
        _arg(
            help="What to remove in every block, beside a run of the intact model: of mask rope "
            "w_q w_k w_o w_v mlp pos_embed, the circuits qk ov, or norms (the weights of the "
            "norms before attention and MLP)."
        ),
    ] = ()
    gain: Annotated[
        Literal["output", "norm", "identity"], _arg(help="The size of a removed weight's stand-in.")
    ] = "output"
    n_seqs: Annotated[int, _arg(help="How many windows.")] = 1000
    seq_len: Annotated[int, _arg(help="Tokens in a window.")] = 50
    layers: Annotated[int | Literal["all"], tyro.conf.Suppress] = "all"
    checkpoint_every: Annotated[int, tyro.conf.Suppress] = 32
    image: Annotated[
        Path | None, _arg(help="Draw the figure into this .png or .svg file too (needs Chrome).")
    ] = None


def run(settings: Settings) -> Path:
    """Capture the stages unless that is done already, and return the folder.

    Raises:
        UserError: for settings that cannot be, or a place that is taken.
    """
    refuse_processes()
    refuse_impossible(settings)
    from nope_probe.results import check_place, write_run

    unasked = ("layers", "checkpoint_every", "out", "image")
    asked = {key: value for key, value in asdict(settings).items() if key not in unasked}
    asked["remove"] = list(settings.remove)
    out = settings.out or study.default_place("circuit", settings.model, asked)
    if not check_place(out, asked):
        from nope_probe.circuit_record import assemble

        started = time.time()
        loaded, inputs, removed, maps = measure(settings)
        write_run(
            out,
            assemble(
                asked,
                loaded,
                inputs,
                study.skipped_keys(settings, inputs),
                removed,
                maps,
                started,
            ),
        )
    return out


def refuse_impossible(settings: Settings) -> None:
    """Refuse what needs no model to be seen as impossible.

    Raises:
        UserError: saying what was asked and what can be.
    """
    if settings.layer < 1:
        raise UserError(f"layers count from 1, got --layer {settings.layer}")
    if settings.seq_len < 4:
        raise UserError(f"expected at least 4 tokens in a window, got {settings.seq_len}")
    study.refuse_impossible(settings)
    if settings.image is not None:
        from nope_probe.export import check_image

        check_image(settings.image)


def measure(
    settings: Settings,
) -> tuple[Loaded, Windows, tuple[str, ...], list[StageMaps]]:
    """Load the model and capture its stages: intact, and then ablated where that is asked for."""
    from tqdm import tqdm

    from nope_probe.hooks.ablation import WEIGHTS, Ablation, ablated
    from nope_probe.hooks.capture import capture_stages
    from nope_probe.hooks.gain import calibrate
    from nope_probe.hooks.norms import plain_norms

    loaded = _load(settings)
    removed = _components([name for name in settings.remove if name != "norms"], loaded)
    plain = ("norms",) if "norms" in settings.remove else ()
    inputs = study.cut_windows(settings, loaded)
    model, batch, gains = loaded.model, settings.batch_size, None
    calibrates = settings.gain == "output" and bool({*removed} & {*WEIGHTS})
    total = settings.n_seqs * (1 + bool(removed or plain) + calibrates)
    with tqdm(total=total, unit="seq", file=sys.stderr, dynamic_ncols=True) as bar:

        def stages() -> StageMaps:
            return capture_stages(
                model,
                inputs.inputs,
                layer=settings.layer - 1,
                batch_size=batch,
                n_folds=settings.folds,
                on_batch=bar.update,
            )

        maps = [stages()]
        if calibrates:
            gains = calibrate(model, inputs.inputs, batch_size=batch, on_batch=bar.update)
        if removed or plain:
            ablation = Ablation(remove=removed, gain=settings.gain)
            norms = plain_norms(model) if plain else nullcontext()
            with norms, ablated(model, ablation, gains):
                maps.append(stages())
    return loaded, inputs, (*removed, *plain), maps


def _components(names: Sequence[str], loaded: Loaded) -> tuple[Component, ...]:
    """Read what is to be removed, circuits as their weights, in the order of the components."""
    from nope_probe.analyses.game import player
    from nope_probe.hooks.ablation import COMPONENTS, components

    try:
        wanted = {each for name in names for each in player(name).components}
    except ValueError as error:
        raise UserError(str(error)) from error
    has = components(loaded.model)
    lacking = [name for name in COMPONENTS if name in wanted and name not in has]
    if lacking:
        raise UserError(f"the model has no {lacking[0]} to remove; it has {', '.join(has)}")
    return tuple(name for name in COMPONENTS if name in wanted)


def _load(settings: Settings) -> Loaded:
    """Load the blocks up to the one after the block under study, if there is one."""
    try:
        return study.load_model(replace(settings, layers=settings.layer + 1))
    except TooFewLayersError as error:
        if error.depth == settings.layer:
            return study.load_model(replace(settings, layers=settings.layer))
        raise UserError(
            f"{error.source} has {error.depth} layers; there is no --layer {settings.layer}"
        ) from error
