"""Attribute a model's positional attention pattern to mask, RoPE and the weights it needs."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from nope_probe.command import run_command
from nope_probe.errors import UserError
from nope_probe.results import Run, check_place, read_run, settings_hash, write_run

if TYPE_CHECKING:
    from nope_probe.data import Windows
    from nope_probe.models import Loaded

_arg = tyro.conf.arg
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights, and reports per layer how
    much of the pattern each source brings and which weights it needs, with intervals.
    """

    model: Annotated[
        str, _arg(help="A shipped or friendly name, a Hub id or a local Hugging Face folder.")
    ] = "rope-tiny"
    revision: Annotated[str | None, _arg(help="A branch, tag or commit of a model on the Hub.")] = (
        None
    )
    data: Annotated[
        str,
        _arg(help="shipped, stdlib, random, gaussian, or a .txt, .jsonl or .parquet file."),
    ] = "shipped"
    alpha: Annotated[float, _arg(help="With gaussian: the expected inner product of inputs.")] = 0.0
    shuffle: Annotated[bool, _arg(help="Permute the tokens within each window.")] = False
    players: Annotated[
        tuple[str, ...] | None,
        _arg(
            help="What is kept or removed: of mask rope w_q w_k w_o w_v mlp pos_embed, the "
            "circuits qk ov, unions such as w_q+mlp; or `sources` alone. By default mask rope w_q "
            "w_k w_o, and the circuits beside."
        ),
    ] = None
    layers: Annotated[
        int | Literal["all"], _arg(help="How many first layers to study, or all.")
    ] = 4
    n_seqs: Annotated[int, _arg(help="How many windows.")] = 512
    seq_len: Annotated[int, _arg(help="Tokens in a window.")] = 64
    batch_size: Annotated[int, _arg(help="Windows per forward pass.")] = 32
    folds: Annotated[int, _arg(help="Parts of the data that intervals are made from.")] = 8
    skip_keys: Annotated[
        int | Literal["auto"],
        _arg(help="First keys to leave out; auto: 1 where a BOS token is forced, else 0."),
    ] = "auto"
    gain: Annotated[
        Literal["output", "norm", "identity"], _arg(help="The size of a removed weight's stand-in.")
    ] = "output"
    scope: Annotated[
        Literal["both", "upstream", "own"],
        _arg(help="For a layer's scores, remove in the layers before it, in itself, or in both."),
    ] = "both"
    gauge: Annotated[
        int, _arg(help="In how many random bases of the weights to repeat single matrices.")
    ] = 0
    seed: Annotated[int, _arg(help="Seed of every random choice.")] = 0
    device: Annotated[str, _arg(help="A torch device, or auto.")] = "auto"
    dtype: Annotated[str, _arg(help="float32, float64, bfloat16, float16 or auto.")] = "auto"
    out: Annotated[Path | None, _arg(help="Folder of the run [runs/ablate-MODEL-HASH].")] = None


def main() -> None:
    """Run the command line."""
    run_command(Settings, ablate)


def ablate(settings: Settings) -> Path:
    """Run the attribution, or show it again if it is finished, and return its folder."""
    from nope_probe.summary import show

    _refuse_impossible(settings)
    asked = {key: value for key, value in asdict(settings).items() if key != "out"}
    asked["players"] = list(settings.players) if settings.players is not None else None
    out = settings.out or default_place(settings.model, asked)
    if not check_place(out, asked):
        write_run(out, _compute(settings, asked))
    run = read_run(out)
    show(run.manifest, run.tables, out)
    return out


def default_place(model: str, asked: dict[str, Any]) -> Path:
    """Name the folder of a run after its model and the hash of its settings."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(model).name or model).strip("-")
    return Path("runs") / f"ablate-{name}-{settings_hash(asked)}"


def _refuse_impossible(settings: Settings) -> None:
    """Refuse what needs no model to be seen as impossible."""
    if settings.folds < 4:
        raise UserError(f"expected at least 4 folds, got {settings.folds}")
    if settings.n_seqs < settings.folds:
        raise UserError(f"{settings.n_seqs} sequences do not fill {settings.folds} folds")
    for name in ("seq_len", "batch_size"):
        if getattr(settings, name) < 1:
            raise UserError(f"expected a positive --{name.replace('_', '-')}")
    if settings.gauge < 0:
        raise UserError(f"expected a --gauge of 0 or more, got {settings.gauge}")
    if settings.layers != "all" and settings.layers < 1:
        raise UserError(f"expected at least 1 layer, got {settings.layers}")
    if settings.dtype not in ("auto", *DTYPES):
        raise UserError(f"no dtype {settings.dtype!r}: expected auto, {', '.join(DTYPES)}")


def _compute(settings: Settings, asked: dict[str, Any]) -> Run:
    from tqdm import tqdm

    from nope_probe.experiment import How, make_plan, passes, run_conditions, run_gauges
    from nope_probe.hooks.ablation import components
    from nope_probe.run_record import assemble

    started = time.time()
    loaded = _load(settings)
    inputs, shuffled = _inputs(settings, loaded)
    skip_keys = _skip_keys(settings, inputs)
    plan = make_plan(components(loaded.model), settings.players, loaded.card.parameter_free)
    if settings.gauge and not plan.games:
        raise UserError("--gauge needs players: the sources have no weights to rewrite")
    how = How(
        n_layers=loaded.card.n_layers if settings.layers == "all" else settings.layers,
        batch_size=settings.batch_size,
        n_folds=settings.folds,
        gain=settings.gain,
        scope=settings.scope,
    )
    total = passes(plan, how, shuffled is not None, settings.gauge) * settings.n_seqs
    with tqdm(total=total, unit="seq", file=sys.stderr, dynamic_ncols=True) as bar:
        how = replace(how, on_batch=bar.update)
        measured = run_conditions(loaded.model, inputs, plan, how, shuffled)
        gauges = list(run_gauges(loaded.model, inputs, plan, how, settings.gauge, settings.seed))
    return assemble(
        command=" ".join(["python", "-m", "nope_probe.ablate", *sys.argv[1:]]),
        settings=asked,
        loaded=loaded,
        inputs=inputs,
        plan=plan,
        measured=measured,
        gauges=gauges,
        skip_keys=skip_keys,
        started=started,
    )


def _skip_keys(settings: Settings, inputs: Windows) -> int:
    if settings.skip_keys == "auto":
        return int(inputs.bos)
    if not 0 <= settings.skip_keys <= settings.seq_len - 3:
        raise UserError(f"--skip-keys {settings.skip_keys} leaves no keys of {settings.seq_len}")
    return settings.skip_keys


def _load(settings: Settings) -> Loaded:
    import torch

    from nope_probe.models import load

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"no device {device!r} on this machine") from error
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    first = None if settings.layers == "all" else settings.layers
    return load(
        settings.model, n_layers=first, device=device, dtype=dtype, revision=settings.revision
    )


def _inputs(settings: Settings, loaded: Loaded) -> tuple[Windows, Windows | None]:
    """Give the run's windows, and shuffled ones as a control where order means something."""
    from nope_probe.data import gaussian, windows

    card = loaded.card
    if settings.seq_len > card.n_ctx:
        raise UserError(f"--seq-len {settings.seq_len} is beyond the model's context {card.n_ctx}")
    if (settings.data == "gaussian") != card.parameter_free:
        kind = "gaussian vectors" if card.parameter_free else "text or random tokens"
        raise UserError(f"{card.name} takes {kind}, not --data {settings.data}")
    if settings.data == "gaussian":
        vectors = gaussian(
            settings.n_seqs, settings.seq_len, card.d_model, settings.alpha, settings.seed
        )
        return vectors, None
    cut = partial(
        windows,
        settings.data,
        tokenizer=loaded.tokenizer,
        n_seqs=settings.n_seqs,
        seq_len=settings.seq_len,
        seed=settings.seed,
    )
    if settings.shuffle or settings.data == "random":
        return cut(shuffle=settings.shuffle), None
    return cut(), cut(shuffle=True)


if __name__ == "__main__":
    main()
