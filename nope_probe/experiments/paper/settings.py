"""The paper's figures: their settings, and the experiments that reproduce each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args

import tyro

from nope_probe.errors import UserError
from nope_probe.experiments.circuit import run as circuit_run
from nope_probe.experiments.scores import run as scores_run
from nope_probe.experiments.simulation import run as simulation_run
from nope_probe.models.names import CHECKPOINTS, FRIENDLY
from nope_probe.runtime.folder import default_output_dir
from nope_probe.runtime.settings import COUNT, LAYERS, SEED, SEQ_LEN, BoundedSettings, Bounds

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
NAMES: tuple[FigureName, ...] = get_args(FigureName)
ExperimentSettings = simulation_run.Settings | circuit_run.Settings | scores_run.Settings
# n = 50, d = 64 and 4 layers everywhere (section 4.1); Figure 7 has two halves.
SIMULATED: dict[str, dict[str, simulation_run.Settings]] = {
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
# The trained NoPE model (section 4.2): the stages of its first block, and every layer's scores.
NOPE_FIGURES = ("figure3", "figure8")
NOPE_MODEL, NOPE_STAND_IN, NOPE_TOKENS = "nope-1.5b", "nope-tiny", 50
# Language models (section 5.2 and appendix E): whose scores, and of which layers.
LANGUAGE_MODELS = ("llama-3.1-8b", "phi-4", "qwen3-8b")
SCORES: dict[str, tuple[tuple[str, ...], int | Literal["all"]]] = {
    "figure5": (LANGUAGE_MODELS, 4),
    **{f"figure{11 + i}": ((LANGUAGE_MODELS[i % 3],), "all") for i in range(6)},
}
N_SAMPLES = 4000
WITHOUT_IMAGE = ("figure1", "all")  # whose pages have no figure of their own
FEWEST_SAMPLES = 32  # one a block
DEFAULT_SEQS, DEFAULT_TOKENS = 1000, 1024
PAPERS_DATA = "fineweb-edu"


@dataclass(frozen=True, kw_only=True)
class Settings(BoundedSettings):
    """Reproduce one of the paper's figures, or all of those that a laptop can.

    Checks the paper's claims about the figure, and draws the published panels beside ours, with
    their difference where both are of the same model. With the control variate, 4,000 samples have
    smaller errors than the paper's 100,000. Figures 3 and 8 show a trained model, by default the
    small shipped one. Figures 5 and 11 to 16 show the scores of language models, by default the
    paper's on 1,000 sequences of 1,024 tokens of fineweb-edu. `all` runs the simulated figures and
    3 and 8, and writes one page about all sixteen. With the folder of a finished run in a figure's
    place, that run is repeated and compared (`reproduce runs/... --help` shows its flags).
    """

    figure: Annotated[
        tyro.conf.Positional[FigureName | Literal["all"]], _arg(help="Which figure, or all.")
    ]
    n_samples: Annotated[
        int | None,
        Bounds(FEWEST_SAMPLES, 10**9),
        _arg(help="Samples per alpha, for simulated figures [4000]."),
    ] = None
    model: Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        _arg(
            help="The model of figures 3 and 8 [nope-tiny]; of 5 and 11 to 16 [the paper's], for "
            "which it may be given more than once."
        ),
    ] = ()
    n_seqs: Annotated[
        int | None, COUNT, _arg(help="Sequences, for figures of trained models [1000].")
    ] = None
    seq_len: Annotated[
        int | None,
        SEQ_LEN,
        _arg(
            help="Tokens in a sequence, for figures 5 and 11 to 16 [1024; of a shipped model 64]."
        ),
    ] = None
    data: Annotated[
        str | None,
        _arg(
            help="The text, for figures of trained models [fineweb-edu, the paper's; shipped for "
            "shipped models, and in figures 3 and 8 for all but nope-1.5b]."
        ),
    ] = None
    windows: Annotated[
        Literal["random", "start"] | None,
        _arg(
            help="Where sequences begin in documents, for figures of trained models [start, the "
            "paper's; random with --data shipped]."
        ),
    ] = None
    layers: Annotated[
        int | Literal["all"] | None,
        LAYERS,
        _arg(help="How many first layers, for figures 5 [4] and 11 to 16 [all]."),
    ] = None
    seed: Annotated[int, SEED, _arg(help="Seed of the samples.")] = 0
    out: Annotated[
        Path | None,
        _arg(
            help="Folder of the figure [runs/reproduce-FIGURE-HASH]; its experiments are beside it."
        ),
    ] = None

    def validate(self) -> None:
        """Check that every flag that was given has an effect on the figure.

        Raises:
            UserError: naming the flag.
        """
        for field in fields(self):
            given = field.name != "figure" and getattr(self, field.name) != field.default
            if given and field.name not in flags_of(self.figure):
                raise UserError(f"{self.figure} takes no --{field.name.replace('_', '-')}")
        if len({name.lower() for name in self.model}) < len(self.model):
            raise UserError(f"--model names a model twice: {' '.join(self.model)}")
        if self.figure in NOPE_FIGURES and len(self.model) > 1:
            raise UserError(f"{self.figure} takes one --model, got {len(self.model)}")

    def validate_drawable(self) -> None:
        """Check that the page will have a figure to draw as an image.

        Raises:
            UserError: for a page of text and tables.
        """
        if self.figure in WITHOUT_IMAGE:
            raise UserError(f"--image has no effect on {self.figure}, whose page draws no maps")

    @property
    def models(self) -> tuple[str, ...]:
        """The trained models of the figure; none for a simulated one."""
        if self.figure in NOPE_FIGURES:
            return self.model or (NOPE_STAND_IN,)
        return self.model or SCORES[self.figure][0] if self.figure in SCORES else ()


# The command of which an experiment is a run, and its module, by the class of its settings.
COMMANDS: dict[type, tuple[str, ModuleType]] = {
    simulation_run.Settings: ("simulate", simulation_run),
    circuit_run.Settings: ("circuit", circuit_run),
    scores_run.Settings: ("scores", scores_run),
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment of a figure: a run of another command.

    Attributes:
        name: the model, or which half of the figure; empty for the only one.
        settings: the command's settings.
    """

    name: str
    settings: ExperimentSettings

    @property
    def command(self) -> str:
        """The command, as in the folder's name."""
        return COMMANDS[type(self.settings)][0]

    def run(self, beside: Path) -> Path:
        """Run the experiment unless it is finished, and return its folder, in `beside`."""
        module = COMMANDS[type(self.settings)][1]
        folder: Path = module.run(replace(self.settings, out=self.folder(beside)))
        return folder

    def folder(self, beside: Path) -> Path:
        """Return the experiment's folder, in `beside`."""
        settings = self.settings
        default = default_output_dir(self.command, settings.subject, settings.recorded())
        return beside / default.name


def flags_of(figure: str) -> tuple[str, ...]:
    """Return the names of the settings that have an effect on a figure.

    Example:
        >>> flags_of("figure1"), flags_of("figure2")
        (('out',), ('out', 'seed', 'n_samples'))
    """
    if figure in SCORES:
        return ("out", "seed", "model", "n_seqs", "seq_len", "data", "windows", "layers")
    if figure in NOPE_FIGURES:
        return ("out", "seed", "model", "n_seqs", "data", "windows")
    return ("out", "seed", "n_samples") if figure in (*SIMULATED, "all") else ("out",)


def experiments_of(settings: Settings) -> list[Experiment]:
    """Return the experiments of a figure, with the paper's settings where none is given."""
    if settings.figure not in SIMULATED:
        return [
            Experiment(name=each, settings=_of_model(settings, each)) for each in settings.models
        ]
    n_samples = N_SAMPLES if settings.n_samples is None else settings.n_samples
    return [
        Experiment(name=half, settings=replace(chosen, n_samples=n_samples, seed=settings.seed))
        for half, chosen in SIMULATED[settings.figure].items()
    ]


def _of_model(settings: Settings, model: str) -> ExperimentSettings:
    given: dict[str, Any] = {
        "model": model,
        "n_seqs": DEFAULT_SEQS if settings.n_seqs is None else settings.n_seqs,
        "seed": settings.seed,
        **_data(settings, model),
    }
    if settings.figure == "figure3":
        return circuit_run.Settings(**given, layer=0, seq_len=NOPE_TOKENS)
    if settings.figure == "figure8":
        return scores_run.Settings(**given, layers="all", seq_len=NOPE_TOKENS)
    layers = SCORES[settings.figure][1] if settings.layers is None else settings.layers
    shipped = model.lower() in CHECKPOINTS
    default = scores_run.Settings.seq_len if shipped else DEFAULT_TOKENS
    seq_len = default if settings.seq_len is None else settings.seq_len
    return scores_run.Settings(**given, layers=layers, seq_len=seq_len)


def _data(settings: Settings, model: str) -> dict[str, str]:
    stands_in = settings.figure in NOPE_FIGURES and papers_name(settings.figure, model) is None
    ours = stands_in or model.lower() in CHECKPOINTS
    data = settings.data or ("shipped" if ours else PAPERS_DATA)
    windows = settings.windows or ("random" if data in ("shipped", "random") else "start")
    return {"data": data, "windows": windows}


def papers_name(figure: str, model: str) -> str | None:
    """Return the paper's model of a figure that a name or Hub id stands for; None for another.

    Example:
        >>> papers_name("figure5", "Qwen/Qwen3-8B"), papers_name("figure3", "nope-tiny")
        ('qwen3-8b', None)
    """
    papers = (NOPE_MODEL,) if figure in NOPE_FIGURES else LANGUAGE_MODELS
    names = {alias.lower(): name for name in papers for alias in (name, FRIENDLY[name])}
    return names.get(model.lower())


def is_as_the_paper(settings: Settings) -> bool:
    """Return whether a figure was run on the paper's models and with its settings."""
    papers = Settings(figure=settings.figure)
    if not settings.models:
        return True
    same = all(papers_name(settings.figure, model) for model in settings.models)
    given = ("n_seqs", "seq_len", "data", "windows", "layers")
    return same and all(getattr(settings, name) == getattr(papers, name) for name in given)
