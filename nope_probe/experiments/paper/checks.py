"""The paper's claims about a figure, checked on the figure's finished experiments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nope_probe.experiments.paper.claim import Claim
from nope_probe.experiments.paper.settings import NOPE_FIGURES, SIMULATED

NOPE_NOTE = (
    "run on {model}; the paper used its own 1.5B model (nope-1.5b), and the first 50 tokens of "
    "documents of fineweb-edu."
)
SCORES_NOTE = (
    "the paper used llama-3.1-8b, phi-4 and qwen3-8b, and the first 1,024 tokens of 1,000 "
    "documents of fineweb-edu."
)
TRUE_MEANS = (
    "the published Figures 11 to 16 are 50 times too small in scale (20 sequences, divided by 50); "
    "these maps are true means."
)


def claims_of(figure: str, folders: Mapping[str, Path]) -> list[tuple[str, Claim]]:
    """Return the paper's claims about a figure, checked, each with its experiment's name.

    Args:
        figure: the figure.
        folders: the folders of its experiments by name.
    """
    if figure == "figure1" or figure in SIMULATED:
        from nope_probe.experiments.paper import simulated

        evidence = [simulated.read_evidence(folder) for folder in folders.values()]
        name = next(iter(folders), "")  # a claim about two halves links to the first
        return [(name, claim) for claim in getattr(simulated, figure)(*evidence)]
    return [
        (name, claim) for name, folder in folders.items() for claim in _of_model(figure, folder)
    ]


def _of_model(figure: str, folder: Path) -> Iterator[Claim]:
    from nope_probe.experiments.paper import circuit, language_models

    if figure == "figure3":
        return circuit.figure3(folder)
    if figure == "figure8":
        return language_models.figure8(folder)
    return language_models.score_claims(folder, language_models.MAPS[figure])


def notes_of(figure: str, models: tuple[str, ...], as_the_paper: bool) -> list[str]:
    """Return in what a figure's run differs from the paper's, a sentence each.

    Args:
        figure: the figure.
        models: the models it was run on; none for a simulated figure.
        as_the_paper: whether these models and their settings are the paper's.
    """
    notes = []
    if figure in NOPE_FIGURES and not as_the_paper:
        notes.append(NOPE_NOTE.format(model=models[0]))
    elif models and not as_the_paper:
        notes.append(SCORES_NOTE)
    if figure.removeprefix("figure") in ("11", "12", "13", "14", "15", "16"):
        notes.append(TRUE_MEANS)
    return notes
