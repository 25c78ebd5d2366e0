"""What the commands that study a trained model share: settings, model, windows, skipped keys."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from nope_probe.command import is_first_process, process_count
from nope_probe.documents import refuse_packing
from nope_probe.errors import UserError
from nope_probe.results import Run, check_place, read_run, settings_hash, unfinished

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.data import Windows
    from nope_probe.models import Loaded
    from nope_probe.study_run import StudyRun

_arg = tyro.conf.arg
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Which model is studied, on which windows, and how they are run."""

    model: Annotated[
        str, _arg(help="A shipped or friendly name, a Hub id or a local Hugging Face folder.")
    ] = "rope-tiny"
    revision: Annotated[str | None, _arg(help="A branch, tag or commit of a model on the Hub.")] = (
        None
    )
    data: Annotated[
        str,
        _arg(
            help="shipped, stdlib, random, gaussian, a .txt, .jsonl or .parquet file, fineweb-edu, "
            "a Hub data set (owner/name or owner/name:config) or a local folder of one."
        ),
    ] = "shipped"
    windows: Annotated[
        Literal["random", "start"],
        _arg(help="Where a window stands in its document; start: its first tokens (the paper's)."),
    ] = "random"
    pack: Annotated[
        bool,
        _arg(help="Join documents, an EOS token after each, and cut windows across them instead."),
    ] = False
    bos: Annotated[
        Literal["auto", "always", "never"],
        _arg(help="Begin windows with a BOS token; auto: where the tokenizer forces it."),
    ] = "auto"
    alpha: Annotated[float, _arg(help="With gaussian: the expected inner product of inputs.")] = 0.0
    shuffle: Annotated[bool, _arg(help="Permute the tokens within each window.")] = False
    layers: Annotated[
        int | Literal["all"], _arg(help="How many first layers to study, or all.")
    ] = 4
    n_seqs: Annotated[int, _arg(help="How many windows.")] = 512
    seq_len: Annotated[int, _arg(help="Tokens in a window.")] = 64
    batch_size: Annotated[int, _arg(help="Windows per forward pass.")] = 32
    folds: Annotated[int, _arg(help="Parts of the data that intervals are made from.")] = 8
    skip_keys: Annotated[
        int | Literal["auto"],
        _arg(help="First keys to leave out; auto: 1 where windows begin with BOS, else 0."),
    ] = "auto"
    seed: Annotated[int, _arg(help="Seed of every random choice.")] = 0
    device: Annotated[
        str, _arg(help="A torch device, or auto; under torchrun each process takes a GPU.")
    ] = "auto"
    device_map: Annotated[
        Literal["auto", "balanced", "sequential"] | None,
        _arg(help="Spread a model that is larger than one GPU over all of them."),
    ] = None
    dtype: Annotated[str, _arg(help="float32, float64, bfloat16, float16 or auto.")] = "auto"
    checkpoint_every: Annotated[
        int, _arg(help="Batches between two states that are kept; a killed run goes on from one.")
    ] = 32
    out: Annotated[Path | None, _arg(help="Folder of the run [runs/COMMAND-MODEL-HASH].")] = None


def carry_out(
    command: str,
    settings: StudySettings,
    compute: Callable[[StudyRun], Run | None],
    show: Callable[[dict[str, Any], Mapping[str, pd.DataFrame], Path], None],
) -> Path:
    """Run a study unless it is finished already, show it, and return its folder.

    Args:
        command: its name.
        settings: what is asked.
        compute: what computes it.
        show: what prints a finished run.

    Raises:
        UserError: for what cannot be done.
    """
    refuse_impossible(settings)
    unasked = ("out", "checkpoint_every")
    asked = {key: value for key, value in asdict(settings).items() if key not in unasked}
    out = settings.out or default_place(command, settings.model, asked)
    if check_place(out, asked):
        # A process that was killed after it wrote the run and before it cleared up.
        shutil.rmtree(unfinished(out), ignore_errors=True)
    else:
        from nope_probe.study_run import run_study

        run_study(out, asked, settings, compute)
    if is_first_process():
        run = read_run(out)
        show(run.manifest, run.tables, out)
    return out


def default_place(command: str, model: str, asked: dict[str, Any]) -> Path:
    """Name the folder of a run after its command, its model and the hash of its settings."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(model).name or model).strip("-")
    return Path("runs") / f"{command}-{name}-{settings_hash(asked)}"


def refuse_impossible(settings: StudySettings) -> None:
    """Refuse what needs no model to be seen as impossible.

    Raises:
        UserError: in one line that names the flag.
    """
    if settings.folds < 4:
        raise UserError(f"expected at least 4 folds, got {settings.folds}")
    if settings.n_seqs < settings.folds:
        raise UserError(f"{settings.n_seqs} sequences do not fill {settings.folds} folds")
    for name in ("seq_len", "batch_size", "checkpoint_every"):
        if getattr(settings, name) < 1:
            raise UserError(f"expected a positive --{name.replace('_', '-')}")
    if settings.layers != "all" and settings.layers < 1:
        raise UserError(f"expected at least 1 layer, got {settings.layers}")
    if settings.dtype not in ("auto", *DTYPES):
        raise UserError(f"no dtype {settings.dtype!r}: expected auto, {', '.join(DTYPES)}")
    _refuse_other_devices(settings)
    if settings.pack:
        refuse_packing(settings.data, settings.windows)


def _refuse_other_devices(settings: StudySettings) -> None:
    if settings.device_map is None:
        return
    if settings.device != "auto":
        raise UserError("--device is for one device and --device-map for several: take one")
    if process_count() > 1:
        raise UserError(
            "--device-map gives one process all GPUs, and torchrun gives each its own: take one"
        )


def load_model(settings: StudySettings) -> Loaded:
    """Load the first layers of the model that is studied.

    Raises:
        UserError: if there is no such device or model.
    """
    import torch

    from nope_probe.models import load
    from nope_probe.processes import own_device

    device = own_device(settings.device)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    first = None if settings.layers == "all" else settings.layers
    return load(
        settings.model,
        n_layers=first,
        device=device,
        dtype=dtype,
        revision=settings.revision,
        device_map=settings.device_map,
    )


def layers_studied(settings: StudySettings, loaded: Loaded) -> int:
    """Give how many layers a run has maps of."""
    return loaded.card.n_layers if settings.layers == "all" else settings.layers


def cut_windows(settings: StudySettings, loaded: Loaded, *, shuffle: bool | None = None) -> Windows:
    """Give the windows that a model is run on: vectors for a parameter-free model, else tokens.

    Args:
        settings: what was asked.
        loaded: the model.
        shuffle: whether to permute tokens; what was asked by default.

    Raises:
        UserError: if the model cannot take what was asked, or there are too few windows.
    """
    from nope_probe.data import gaussian, windows

    card = loaded.card
    if settings.seq_len > card.n_ctx:
        raise UserError(f"--seq-len {settings.seq_len} is beyond the model's context {card.n_ctx}")
    if (settings.data == "gaussian") != card.parameter_free:
        kind = "gaussian vectors" if card.parameter_free else "text or random tokens"
        raise UserError(f"{card.name} takes {kind}, not --data {settings.data}")
    if settings.data == "gaussian":
        return gaussian(
            settings.n_seqs, settings.seq_len, card.d_model, settings.alpha, settings.seed
        )
    return windows(
        settings.data,
        tokenizer=loaded.tokenizer,
        n_seqs=settings.n_seqs,
        seq_len=settings.seq_len,
        seed=settings.seed,
        place=settings.windows,
        bos=settings.bos,
        pack=settings.pack,
        shuffle=settings.shuffle if shuffle is None else shuffle,
    )


def skipped_keys(settings: StudySettings, inputs: Windows) -> int:
    """Give how many first keys the patterns leave out.

    Raises:
        UserError: if none would be left.
    """
    if settings.skip_keys == "auto":
        return int(inputs.bos)
    if not 0 <= settings.skip_keys <= settings.seq_len - 3:
        raise UserError(f"--skip-keys {settings.skip_keys} leaves no keys of {settings.seq_len}")
    return settings.skip_keys
