"""How often the 95% intervals without written position contain the value of many texts.

    python benchmarks/written.py [--model nope-tiny] [--n-draws 40]

Each draw is a run of `ablate` on other texts. In some layers, it counts the intervals of the three
numbers that contain the value of `many` texts, and those of the cost.
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, stdev

import tyro
from tqdm import tqdm

from nope_probe import run_ablations
from nope_probe.figures.words import NUMBERS, interval_of

Values = dict[str, tuple[float, float, float]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How many texts are drawn, and how often."""

    model: str = "rope-tiny"
    n_draws: int = 40
    n_seqs: int = 64
    many: int = 2000
    layers: tuple[int, ...] = (2, 3)


def main(settings: Settings) -> None:
    truth, draws = values_of(settings, settings.many, seed=settings.n_draws), defaultdict(list)
    for seed in tqdm(range(settings.n_draws)):
        for name, ends in values_of(settings, settings.n_seqs, seed).items():
            draws[name].append(ends)
    print(f"{settings.model}, {settings.n_draws} draws of {settings.n_seqs} texts")
    for name, of_draws in draws.items():
        value, means = truth[name][0], [ends[0] for ends in of_draws]
        inside = sum(low <= value <= high for _, low, high in of_draws)
        print(
            f"{name}: {inside} of {settings.n_draws} intervals contain {value:.3f} of "
            f"{settings.many:,} texts; mean {fmean(means):.3f}, deviation {stdev(means):.3f}"
        )


def values_of(settings: Settings, n_seqs: int, seed: int) -> Values:
    """Return the numbers of layers without written position, and its cost, with their bounds."""
    options = {"remove": ("written",), "n_seqs": n_seqs, "seed": seed}
    tables = run_ablations(settings.model, **options).tables
    of_layers, values = tables["pattern"].set_index(["removed", "layer"]), Values()
    for layer in settings.layers:
        for name in NUMBERS:
            values[f"L{layer} {name}"] = interval_of(of_layers.loc[("written", layer)], name)
    means = tables["over_layers"].set_index("removed").loc["written"]
    return values | {name: interval_of(means, name) for name in ("cost", "cost_with_noise")}


if __name__ == "__main__":
    main(tyro.cli(Settings))
