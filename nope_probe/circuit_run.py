"""A block's stages from settings to a folder, for the commands `circuit` and `reproduce`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from nope_probe.data import Windows
    from nope_probe.hooks.ablation import Component
    from nope_probe.hooks.capture import StageMaps
    from nope_probe.models import Loaded

_arg = tyro.conf.arg


@dataclass(frozen=True, kw_only=True)
class Settings:
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
            "w_q w_k w_o w_v mlp pos_embed, or the circuits qk ov."
        ),
    ] = ()
    gain: Annotated[
        Literal["output", "norm", "identity"], _arg(help="The size of a removed weight's stand-in.")
    ] = "output"
    data: Annotated[
        str, _arg(help="shipped, stdlib, random, gaussian, or a .txt, .jsonl or .parquet file.")
    ] = "shipped"
    alpha: Annotated[float, _arg(help="With gaussian: the expected inner product of inputs.")] = 0.0
    shuffle: Annotated[bool, _arg(help="Permute the tokens within each window.")] = False
    n_seqs: Annotated[int, _arg(help="How many windows.")] = 1000
    seq_len: Annotated[int, _arg(help="Tokens in a window.")] = 50
    batch_size: Annotated[int, _arg(help="Windows per forward pass.")] = 32
    folds: Annotated[int, _arg(help="Parts of the data that errors are made from.")] = 8
    seed: Annotated[int, _arg(help="Seed of every random choice.")] = 0
    device: Annotated[str, _arg(help="A torch device, or auto.")] = "auto"
    out: Annotated[Path | None, _arg(help="Folder of the run [runs/circuit-MODEL-HASH].")] = None
    image: Annotated[
        Path | None, _arg(help="Draw the figure into this .png or .svg file too (needs Chrome).")
    ] = None


def run(settings: Settings) -> Path:
    """Capture the stages unless that is done already, and return the folder.

    Raises:
        UserError: for settings that cannot be, or a place that is taken.
    """
    refuse_impossible(settings)
    from nope_probe.results import check_place, settings_hash, write_run

    places = ("out", "image")
    asked = {key: value for key, value in asdict(settings).items() if key not in places}
    asked["remove"] = list(settings.remove)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(settings.model).name or settings.model).strip("-")
    out = settings.out or Path("runs") / f"circuit-{name}-{settings_hash(asked)}"
    if not check_place(out, asked):
        from nope_probe.circuit_record import assemble

        started = time.time()
        loaded, inputs, removed, maps = measure(settings)
        command = " ".join(["python", "-m", "nope_probe.circuit", *sys.argv[1:]])
        write_run(out, assemble(command, asked, loaded, inputs, removed, maps, started))
    return out


def refuse_impossible(settings: Settings) -> None:
    """Refuse what needs no model to be seen as impossible.

    Raises:
        UserError: saying what was asked and what can be.
    """
    if settings.layer < 1:
        raise UserError(f"layers count from 1, got --layer {settings.layer}")
    if settings.folds < 4:
        raise UserError(f"expected at least 4 folds, got {settings.folds}")
    if settings.n_seqs < settings.folds:
        raise UserError(f"{settings.n_seqs} sequences do not fill {settings.folds} folds")
    if settings.seq_len < 4:
        raise UserError(f"expected at least 4 tokens in a window, got {settings.seq_len}")
    if settings.batch_size < 1:
        raise UserError("expected a positive --batch-size")
    if settings.image is not None:
        from nope_probe.export import check_image

        check_image(settings.image)


def measure(
    settings: Settings,
) -> tuple[Loaded, Windows, tuple[Component, ...], list[StageMaps]]:
    """Load the model and capture its stages: intact, and then ablated where that is asked for."""
    from tqdm import tqdm

    from nope_probe.hooks.ablation import WEIGHTS, Ablation, ablated
    from nope_probe.hooks.capture import capture_stages
    from nope_probe.hooks.gain import calibrate

    loaded = _load(settings)
    removed = _components(settings.remove, loaded)
    inputs = _inputs(settings, loaded)
    model, batch, gains = loaded.model, settings.batch_size, None
    calibrates = settings.gain == "output" and bool({*removed} & {*WEIGHTS})
    total = settings.n_seqs * (1 + bool(removed) + calibrates)
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
        if removed:
            with ablated(model, Ablation(remove=removed, gain=settings.gain), gains):
                maps.append(stages())
    return loaded, inputs, removed, maps


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
    import torch

    from nope_probe.models import load

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"no device {device!r} on this machine") from error
    try:
        return load(settings.model, n_layers=settings.layer + 1, device=device)
    except UserError as error:
        if f"has {settings.layer} layers" in str(error):
            return load(settings.model, n_layers=settings.layer, device=device)
        raise UserError(_asked_for(str(error), settings.layer)) from error


def _asked_for(message: str, layer: int) -> str:
    return re.sub(r", \d+ were asked for.*", f"; there is no --layer {layer}", message)


def _inputs(settings: Settings, loaded: Loaded) -> Windows:
    from nope_probe.data import gaussian, windows

    card = loaded.card
    n_seqs, seq_len, seed = settings.n_seqs, settings.seq_len, settings.seed
    if seq_len > card.n_ctx:
        raise UserError(f"--seq-len {seq_len} is beyond the model's context {card.n_ctx}")
    if (settings.data == "gaussian") != card.parameter_free:
        kind = "gaussian vectors" if card.parameter_free else "text or random tokens"
        raise UserError(f"{card.name} takes {kind}, not --data {settings.data}")
    if settings.data == "gaussian":
        return gaussian(n_seqs, seq_len, card.d_model, settings.alpha, seed)
    return windows(
        settings.data,
        tokenizer=loaded.tokenizer,
        n_seqs=n_seqs,
        seq_len=seq_len,
        seed=seed,
        shuffle=settings.shuffle,
    )
