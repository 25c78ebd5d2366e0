"""The `reproduce` command's run: a figure's experiments, and its claims checked on them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.experiments.simulation import run as simulation_run

if TYPE_CHECKING:
    from nope_probe.experiments.paper.language_models import Maps
    from nope_probe.experiments.scores.run import Settings as ScoreSettings


_arg = tyro.conf.arg
FigureName = Literal[
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "figure6",
    "figure7",
    "figure8",
    "figure9",
    "figure10",
    "figure11",
    "figure12",
    "figure13",
    "figure14",
    "figure15",
    "figure16",
]
# n = 50, d = 64 and 4 layers everywhere (section 4.1); Figure 7 has two halves.
FIGURES: dict[str, dict[str, simulation_run.Settings]] = {
    "figure2": {"": simulation_run.Settings(alpha=(0.0, 0.2))},
    "figure4": {"": simulation_run.Settings(alpha=(0.0,), rope=True)},
    "figure6": {"": simulation_run.Settings(alpha=(0.4, 0.6, 0.8))},
    "figure7": {
        "layernorm-sqrt-d": simulation_run.Settings(alpha=(0.0, 0.2), norm="layernorm-sqrt-d"),
        "layernorm-d": simulation_run.Settings(alpha=(0.0, 0.2), norm="layernorm-d"),
    },
    "figure9": {"": simulation_run.Settings(alpha=(0.5,), rope=True)},
    "figure10": {"": simulation_run.Settings(alpha=(0.0,), rope=True, causal=False)},
}
# Blocks of a trained model (section 4.2): the paper's layer 1, and its layers 2 and 3.
CIRCUITS: dict[str, tuple[int, ...]] = {"figure3": (0,), "figure8": (1, 2)}
# Language models (section 5.2 and appendix E): whose scores, of which layers, and which maps.
PAPERS = ("llama-3.1-8b", "phi-4", "qwen3-8b")
LANGUAGE_MODELS: dict[str, tuple[tuple[str, ...], int | Literal["all"], Maps]] = {
    "figure5": (PAPERS, 4, "both"),
    **{f"figure{11 + i}": ((name,), "all", "score") for i, name in enumerate(PAPERS)},
    **{f"figure{14 + i}": ((name,), "all", "normalised") for i, name in enumerate(PAPERS)},
}
N_SAMPLES = 4000
OURS = "the paper used its own 1.5B model (nope-1.5b), and the first 50 tokens of documents."
PAPERS_RUN = (
    "the paper used llama-3.1-8b, phi-4 and qwen3-8b, and the first 1,024 tokens of 1,000 "
    "documents of fineweb-edu."
)
TRUE_MEANS = (
    "the published Figures 11 to 16 are 50 times too small in scale (20 sequences, divided by 50); "
    "these maps are true means."
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Reproduce one of the paper's figures.

    Prints the paper's claims about the figure and whether they are reproduced, a line each. With
    the control variate, 4,000 samples have smaller errors than the paper's 100,000. Figures 3 and 8
    show a trained model, by default the small shipped one. Figures 5 and 11 to 16 show the scores
    of language models, by default the paper's on 1,000 sequences of 1,024 tokens of fineweb-edu.
    """

    figure: Annotated[tyro.conf.Positional[FigureName], _arg(help="Which figure.")]
    n_samples: Annotated[
        int | None, _arg(help="Samples per alpha, for simulated figures [4000].")
    ] = None
    model: Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        _arg(
            help="The model of figures 3 and 8 [nope-tiny]; of 5 and 11 to 16 [the paper's], for "
            "which it may be given more than once."
        ),
    ] = ()
    n_seqs: Annotated[int | None, _arg(help="Sequences, for figures of trained models [1000].")] = (
        None
    )
    seq_len: Annotated[
        int | None, _arg(help="Tokens in a sequence, for figures 5 and 11 to 16 [1024].")
    ] = None
    data: Annotated[
        str | None, _arg(help="Their text, for figures 5 and 11 to 16 [fineweb-edu].")
    ] = None
    layers: Annotated[
        int | Literal["all"] | None,
        _arg(help="How many first layers, for figures 5 [4] and 11 to 16 [all]."),
    ] = None
    seed: Annotated[int, _arg(help="Seed of the samples.")] = 0
    out: Annotated[Path | None, _arg(help="Folder of the run [runs/reproduce-FIGURE].")] = None


def run(settings: Settings) -> list[str]:
    """Run a figure's experiments unless they are finished, and return its claims, checked.

    Raises:
        UserError: for what cannot be done.
    """
    validate(settings)
    out = settings.out or Path("runs") / f"reproduce-{settings.figure}"
    if settings.figure in LANGUAGE_MODELS:
        return _scores(settings, out)
    return _circuits(settings, out) if settings.figure in CIRCUITS else _simulate(settings, out)


def validate(settings: Settings) -> None:
    """Check that every flag that was given has an effect on the figure.

    Raises:
        UserError: naming the flag.
    """
    for field in fields(settings):
        given = field.name != "figure" and getattr(settings, field.name) != field.default
        if given and field.name not in flags_of(settings.figure):
            raise UserError(f"{settings.figure} takes no --{field.name.replace('_', '-')}")
    if settings.n_samples is not None and settings.n_samples < 32:
        raise UserError(f"expected at least 32 samples, one a block, got {settings.n_samples}")
    if settings.figure in CIRCUITS and len(settings.model) > 1:
        raise UserError(f"{settings.figure} takes one --model, got {len(settings.model)}")


def flags_of(figure: FigureName) -> tuple[str, ...]:
    """Return the names of the settings that have an effect on a figure.

    Example:
        >>> flags_of("figure1"), flags_of("figure2")
        ((), ('seed', 'out', 'n_samples'))
    """
    if figure in LANGUAGE_MODELS:
        return ("seed", "out", "model", "n_seqs", "seq_len", "data", "layers")
    if figure in CIRCUITS:
        return ("seed", "out", "model", "n_seqs")
    return ("seed", "out", "n_samples") if figure in FIGURES else ()


def _scores(settings: Settings, out: Path) -> list[str]:
    """Run `scores` on one language model after the other, each into a folder of its own."""
    from nope_probe.experiments.paper.language_models import score_claims
    from nope_probe.experiments.scores import run as scores_run
    from nope_probe.runtime.distributed import own_device, process_group

    models, layers, maps = LANGUAGE_MODELS[settings.figure]
    given = (settings.model, settings.n_seqs, settings.seq_len, settings.data, settings.layers)
    lines = [] if given == ((), None, None, None, None) else [f"{settings.figure}: {PAPERS_RUN}"]
    if settings.figure != "figure5":
        lines.append(f"{settings.figure}: {TRUE_MEANS}")
    with process_group(own_device("auto")):  # one for all models: it cannot be joined again
        for model in settings.model or models:
            folder = scores_run.run(_score_settings(settings, model, layers, out))
            lines += [f"{settings.figure}, {model}, {each}" for each in score_claims(folder, maps)]
            lines.append(f"report: {folder / 'report.html'}")
    return lines


def _score_settings(
    settings: Settings, model: str, layers: int | Literal["all"], out: Path
) -> ScoreSettings:
    from nope_probe.experiments.scores.run import Settings as ScoreSettings

    return ScoreSettings(
        model=model,
        layers=layers if settings.layers is None else settings.layers,
        n_seqs=1000 if settings.n_seqs is None else settings.n_seqs,
        seq_len=1024 if settings.seq_len is None else settings.seq_len,
        data="fineweb-edu" if settings.data is None else settings.data,
        windows="random" if settings.data == "random" else "start",
        seed=settings.seed,
        out=out / (Path(model).name or model),
    )


def _simulate(settings: Settings, out: Path) -> list[str]:
    folders = []
    for name, chosen in FIGURES.get(settings.figure, {}).items():
        folder = out / name if name else out
        n_samples = N_SAMPLES if settings.n_samples is None else settings.n_samples
        chosen = replace(chosen, n_samples=n_samples, seed=settings.seed, out=folder)
        folders.append(simulation_run.run(chosen))
    from nope_probe.experiments.paper import simulated

    claims = getattr(simulated, settings.figure)(*map(simulated.read_evidence, folders))
    lines = [f"{settings.figure}, {claim}" for claim in claims]
    return lines + [f"report: {folder / 'report.html'}" for folder in folders]


def _circuits(settings: Settings, out: Path) -> list[str]:
    """Run `circuit` on a trained model's blocks; the paper's claims are about the first alone."""
    from nope_probe.experiments.circuit import run as circuit_run
    from nope_probe.experiments.paper.circuit import figure3
    from nope_probe.runtime.folder import read_manifest

    blocks = CIRCUITS[settings.figure]
    model = settings.model[0] if settings.model else "nope-tiny"
    lines = [f"{settings.figure}, run on {model}; {OURS}"]
    for layer in blocks:
        folder = out if len(blocks) == 1 else out / f"L{layer}"
        chosen = circuit_run.Settings(
            model=model,
            layer=layer,
            n_seqs=1000 if settings.n_seqs is None else settings.n_seqs,
            seed=settings.seed,
            out=folder,
        )
        circuit_run.run(chosen)
        first = settings.figure == "figure3"
        results = figure3(folder) if first else read_manifest(folder)["headline"]
        lines += [f"{settings.figure}, {each}" for each in results]
        lines.append(f"report: {folder / 'report.html'}")
    return lines
