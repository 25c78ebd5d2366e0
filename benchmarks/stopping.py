"""How often the intervals of the sources' shares contain the truth, by the rule that ends a run.

    python benchmarks/stopping.py [--n-resamples 1000]

Resamples are drawn with replacement, a sequence at a time, from a population whose shares are known
exactly. The rule `given` takes 128 sequences, `pilot` the number that `ablate` chooses on 64 other
sequences. For comparison, `looking` doubles the number until the run's own intervals are narrow.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import tyro
from coverage import Population, captured, fold_means
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from nope_probe import load, player_set, sequences
from nope_probe.analyses.jackknife import Interval, t_quantile
from nope_probe.analyses.shapley import source_terms
from nope_probe.conditions import INTACT
from nope_probe.experiments.ablation.pilot import HALF_WIDTH, N_FOLDS, number_for
from nope_probe.maps.estimates import fold_weights
from nope_probe.maps.folds import interleaved_folds
from nope_probe.runtime.settings import NUMBERS

FOLDS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is resampled."""

    n_resamples: int = 1000
    seq_len: int = 24
    n_population: int = 900


def main(settings: Settings) -> None:
    torch.manual_seed(0)
    for population in populations(settings):
        for name, rule in RULES.items():
            doing = tqdm(range(settings.n_resamples), desc=f"{population.name}, {name}")
            ended = [rule(population) for _ in doing]
            print(f"| {population.name} | {name} | {' | '.join(row(population, ended))} |")


def populations(settings: Settings) -> Iterator[Population]:
    """Yield patterns of random tokens and of text, with no key apart."""
    for data, name, layer in (("random", "rope-tiny", 1), ("shipped", "rope-tiny", 1)):
        model = load(name, n_layers=layer + 1)
        drawn = sequences(
            data,
            tokenizer=model.tokenizer,
            n_seqs=settings.n_population,
            seq_len=settings.seq_len,
            bos="never",
        )
        label = f"{name} L{layer}, {drawn.kind}"
        yield captured(label, model.model, drawn, player_set(["mask", "rope"]), layer)


def shares(
    population: Population, chosen: Int[Tensor, " seq"], n_folds: int = FOLDS
) -> dict[str, Interval]:
    """Return the shares of all terms, from chosen sequences dealt to folds in turn."""
    _, _, gram = fold_means(population, chosen, interleaved_folds(len(chosen), n_folds))
    terms = source_terms(population.sources)
    return {name: gram.share(term, {INTACT: 1.0}) for name, term in terms.items()}


def widest(found: dict[str, Interval]) -> float:
    return max((interval.high - interval.low) / 2 for interval in found.values())


def draw(population: Population, n_seqs: int) -> Int[Tensor, " seq"]:
    return torch.randint(population.patterns.shape[1], (n_seqs,))


def given(population: Population) -> tuple[int, dict[str, Interval]]:
    return 128, shares(population, draw(population, 128))


def pilot(population: Population) -> tuple[int, dict[str, Interval]]:
    half = widest(shares(population, draw(population, NUMBERS[0]), N_FOLDS))
    half *= t_quantile(fold_weights(FOLDS)) / t_quantile(fold_weights(N_FOLDS))
    n_seqs = number_for(half, NUMBERS[0])
    return n_seqs, shares(population, draw(population, n_seqs))


def looking(population: Population) -> tuple[int, dict[str, Interval]]:
    chosen = draw(population, NUMBERS[-1])
    for n_seqs in NUMBERS:
        found = shares(population, chosen[:n_seqs])
        if widest(found) <= HALF_WIDTH:
            break
    return n_seqs, found


Rule = Callable[[Population], tuple[int, dict[str, Interval]]]
RULES: dict[str, Rule] = {"given": given, "pilot": pilot, "looking": looking}


def row(population: Population, ended: list[tuple[int, dict[str, Interval]]]) -> list[str]:
    """Return the coverage of each share in %, how often each number was taken, and widths."""
    means = dict(zip(population.conditions, population.patterns.double().mean(1), strict=True))
    whole, cells = means[INTACT], []
    for name, term in source_terms(population.sources).items():
        part = sum(weight * means[condition] for condition, weight in term.items())
        true = float((part * whole).sum() / whole.square().sum())
        hits = sum(found[name].low <= true <= found[name].high for _, found in ended)
        cells.append(f"{100 * hits / len(ended):.1f}")
    taken = Counter(n_seqs for n_seqs, _ in ended)
    numbers = ", ".join(f"{n}: {100 * taken[n] / len(ended):.0f}%" for n in sorted(taken))
    halves = torch.tensor([100 * widest(found) for _, found in ended])
    return [*cells, numbers, f"{halves.median():.1f}", f"{100 * (halves <= 2).float().mean():.0f}"]


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
