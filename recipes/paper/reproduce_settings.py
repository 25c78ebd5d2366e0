"""The settings of `reproduce`: of a figure of the paper and its experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from annotated_types import Interval

from nope_probe.errors import UserError
from nope_probe.files import JsonObject
from nope_probe.models.names import CHECKPOINTS, FRIENDLY
from nope_probe.run.flags import COUNT, LAYERS, SEED, SEQ_LEN, CommandSettings, LocalPath, folder_of
from nope_probe.studies.ablate import Settings as Ablate
from nope_probe.studies.circuit import Settings as Circuit
from simulation_settings import Settings as Simulation

# The trained NoPE model (section 4.2), and the language models (section 5.2 and appendix E).
NOPE_MODEL, NOPE_STAND_IN, NOPE_TOKENS = "nope-1.5b", "nope-tiny", 50
LANGUAGE_MODELS = ("llama-3.1-8b", "phi-4", "qwen3-8b")
N_SAMPLES, N_SEQS, N_TOKENS, PAPERS_DATA = 4000, 1000, 1024, "fineweb-edu"
FEWEST_SAMPLES = 32  # a sample per block
ExperimentSettings = Simulation | Circuit | Ablate


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the paper.

    Attributes:
        shows: its contents, in words.
        simulations: the settings of its simulations, by the half of the figure.
        models: the trained models that are run by default.
        layers: how many first layers of language models the figure shows.
        maps: the kinds of maps of language models in the figure: `score`, `normalised`.
    """

    shows: str
    simulations: Mapping[str, Simulation] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    layers: int | Literal["auto", "all"] = "all"
    maps: tuple[str, ...] = ()

    @property
    def is_of_nope(self) -> bool:
        """Whether it shows the trained NoPE model."""
        return self.models == (NOPE_STAND_IN,)

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the settings that have an effect on the figure."""
        if not self.models:
            return ("out", "seed", "n_samples") if self.simulations else ("out",)
        of_maps = ("seq_len", "layers") if self.maps else ()
        return ("out", "seed", "model", "n_seqs", "data", "windows", *of_maps)


# n = 50, d = 64 and 4 layers in every simulation (section 4.1).
FIGURES: dict[str, Figure] = {
    "figure1": Figure(shows="the second layer's scores of three tokens, eq. (4)"),
    "figure2": Figure(
        shows="simulated scores without RoPE, alpha = 0 and 0.2",
        simulations={"": Simulation(alpha=(0.0, 0.2))},
    ),
    "figure3": Figure(
        shows="a trained NoPE model's first block, stage by stage", models=(NOPE_STAND_IN,)
    ),
    "figure4": Figure(
        shows="simulated scores with RoPE, alpha = 0",
        simulations={"": Simulation(alpha=(0.0,), rope=True)},
    ),
    "figure5": Figure(
        shows="three language models, less diagonal means, first four layers",
        models=LANGUAGE_MODELS,
        layers="auto",
        maps=("score", "normalised"),
    ),
    "figure6": Figure(
        shows="simulated scores, alpha = 0.4, 0.6 and 0.8",
        simulations={"": Simulation(alpha=(0.4, 0.6, 0.8))},
    ),
    "figure7": Figure(
        shows="simulated scores with LayerNorm",
        simulations={
            "layernorm-sqrt-d": Simulation(alpha=(0.0, 0.2), norm="layernorm-sqrt-d"),
            "layernorm-d": Simulation(alpha=(0.0, 0.2), norm="layernorm-d"),
        },
    ),
    "figure8": Figure(shows="a trained NoPE model's scores, every layer", models=(NOPE_STAND_IN,)),
    "figure9": Figure(
        shows="simulated scores with RoPE, alpha = 0.5",
        simulations={"": Simulation(alpha=(0.5,), rope=True)},
    ),
    "figure10": Figure(
        shows="simulated scores with RoPE and without the mask",
        simulations={"": Simulation(alpha=(0.0,), rope=True, causal=False)},
    ),
}
for _number, _kind, _words in ((11, "score", ""), (14, "normalised", ", less diagonal means")):
    for _place, _title in enumerate(("Llama-3.1-8B", "Phi-4", "Qwen3-8B")):
        FIGURES[f"figure{_number + _place}"] = Figure(
            shows=f"{_title}, every layer{_words}", models=(LANGUAGE_MODELS[_place],), maps=(_kind,)
        )
if TYPE_CHECKING:
    FigureName = str
else:
    FigureName = Literal[*FIGURES, "all"]


@dataclass(frozen=True, kw_only=True)
class Settings(CommandSettings):
    """Reproduce one of the paper's figures, or all figures that a laptop can run.

    Checks the paper's claims about the figure, and draws published panels next to the reproduced
    maps, with their difference if both belong to the same model. With the control variate, 4,000
    samples have smaller errors than the paper's 100,000. Figures 3 and 8 show a trained model, by
    default the small shipped one. Figures 5 and 11 to 16 show the scores of language models, by
    default the paper's on 1,000 sequences of 1,024 tokens of fineweb-edu. `all` runs the simulated
    figures and 3 and 8, and writes one page about all sixteen. `--list` says what each shows.

    Attributes:
        figure: Which figure, or all.
        n_samples: Samples per alpha, for simulated figures [4000].
        model: The model of figures 3 and 8 [nope-tiny]; of 5 and 11 to 16 [the paper's], for which
            it may be given more than once.
        n_seqs: Sequences, for figures of trained models [1000].
        seq_len: Tokens in a sequence, for figures 5 and 11 to 16 [1024; of a shipped model 64].
        data: The text, for figures of trained models [fineweb-edu, the paper's; shipped for shipped
            models, and in figures 3 and 8 for all but nope-1.5b].
        windows: Where sequences begin in documents, for figures of trained models [start, the
            paper's; random with --data shipped].
        layers: How many first layers, for figures 5 [4] and 11 to 16 [all].
        seed: Seed of the samples.
        out: Folder of the figure [runs/reproduce-FIGURE-HASH]; its experiments go next to it.
    """

    command = "reproduce"
    examples = ("figure2", "figure3", "--list")

    figure: tyro.conf.Positional[FigureName]
    n_samples: Annotated[int | None, Interval(ge=FEWEST_SAMPLES, le=10**9)] = None
    model: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    n_seqs: Annotated[int | None, COUNT] = None
    seq_len: Annotated[int | None, SEQ_LEN] = None
    data: str | None = None
    windows: Literal["random", "start"] | None = None
    layers: Annotated[int, LAYERS] | Literal["all"] | None = None
    seed: Annotated[int, SEED] = 0
    out: LocalPath | None = None

    @property
    def subject(self) -> str:
        """The figure, for the default folder's name."""
        return self.figure

    @property
    def models(self) -> tuple[str, ...]:
        """The trained models of the figure; empty for a simulated figure."""
        default = FIGURES[self.figure].models
        return (self.model or default) if default else ()

    @property
    def device(self) -> str:
        """The device on which processes share experiments: language models may run on GPUs."""
        return "auto" if FIGURES[self.figure].maps else "cpu"

    @property
    def is_as_the_paper(self) -> bool:
        """Whether the figure is run on the paper's models and with its settings."""
        given = (self.n_seqs, self.seq_len, self.data, self.windows, self.layers)
        same = all(papers_name(self.figure, model) for model in self.models)
        return not self.models or (same and given == (None,) * len(given))

    @property
    def program(self) -> tuple[str, ...]:
        """The words before the flags: the script in a clone."""
        return ("python", f"recipes/paper/{self.command}.py")

    def recorded(self) -> JsonObject:
        """Return the settings that identify a figure's run: the settings of its experiments."""
        runs = {name: run.recorded() for name, run in experiments_of(self).items()}
        return {"figure": self.figure, "experiments": runs}

    def validate(self) -> None:
        """Check that every given flag has an effect on the figure, and check its experiments.

        Raises:
            UserError: naming the flag.
        """
        is_all = self.figure == "all"
        known = ("out", "seed", "n_samples") if is_all else FIGURES[self.figure].flags
        for flag in fields(self)[1:]:  # the first field is the figure
            if getattr(self, flag.name) != flag.default and flag.name not in known:
                raise UserError(f"{self.figure} takes no --{flag.name.replace('_', '-')}")
        if len({name.lower() for name in self.model}) < len(self.model):
            raise UserError(f"--model names a model twice: {' '.join(self.model)}")
        if is_all:
            super().validate()
            return
        if FIGURES[self.figure].is_of_nope and len(self.model) > 1:
            raise UserError(f"{self.figure} takes one --model, got {len(self.model)}")
        for settings in experiments_of(self).values():
            settings.validate()

    def validate_drawable(self) -> None:
        """Check that the page will have a figure to draw as an image.

        Raises:
            UserError: for a page of text and tables.
        """
        if self.figure in ("figure1", "all"):
            raise UserError(f"--image has no effect on {self.figure}, whose page draws no maps")


def title_of(figure: str) -> str:
    """Return a figure's name as a title.

    Example:
        >>> title_of("figure12")
        'Figure 12'
    """
    return f"Figure {figure.removeprefix('figure')}"


def papers_name(figure: str, model: str) -> str | None:
    """Return the paper's model behind a name or Hub id; None for a model that is not the paper's.

    Example:
        >>> papers_name("figure5", "Qwen/Qwen3-8B"), papers_name("figure3", "nope-tiny")
        ('qwen3-8b', None)
    """
    papers = (NOPE_MODEL,) if FIGURES[figure].is_of_nope else LANGUAGE_MODELS
    names = {alias.lower(): name for name in papers for alias in (name, FRIENDLY[name])}
    return names.get(model.lower())


def experiments_of(settings: Settings) -> dict[str, ExperimentSettings]:
    """Return the experiments of a figure, with the paper's settings by default.

    Returns:
        The settings of other commands, by the model or the half of the figure.
    """
    n_samples, seed = settings.n_samples or N_SAMPLES, settings.seed
    simulations = FIGURES[settings.figure].simulations
    return {
        half: replace(simulation, n_samples=n_samples, seed=seed)
        for half, simulation in simulations.items()
    } | {model: _of_model(settings, model) for model in settings.models}


def _of_model(settings: Settings, model: str) -> ExperimentSettings:
    figure, shipped = FIGURES[settings.figure], model.lower() in CHECKPOINTS
    stands_in = figure.is_of_nope and papers_name(settings.figure, model) is None
    data = settings.data or ("shipped" if shipped or stands_in else PAPERS_DATA)
    given: JsonObject = {
        "model": model,
        "n_seqs": settings.n_seqs or N_SEQS,
        "seed": settings.seed,
        "data": data,
        "windows": settings.windows or ("random" if data in ("shipped", "random") else "start"),
    }
    if settings.figure == "figure3":
        return Circuit(**given, layer=0, seq_len=NOPE_TOKENS)
    default = NOPE_TOKENS if figure.is_of_nope else Ablate.seq_len if shipped else N_TOKENS
    seq_len, layers = settings.seq_len or default, settings.layers or figure.layers
    return Ablate(**given, remove=("none",), layers=layers, seq_len=seq_len)


def place(settings: Settings | ExperimentSettings, above: Path) -> Path:
    """Return the folder of a run with its default name, in `above`."""
    return above / folder_of(settings, settings.recorded()).name
