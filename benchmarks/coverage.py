"""How often the 95% intervals contain the truth, on resampled documents.

    python benchmarks/coverage.py [--n-resamples 1000]

Every sequence of a population of documents is run through a model in all conditions, and its own
score maps are kept. A resample draws documents with replacement; its intervals should contain the
value of the whole population 19 times of 20. Folds are of documents (grouped), or of single
sequences in turn (ungrouped), which ignores that those of a document are alike.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import tyro
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from nope_probe import Ablation, ablated, calibrate, capture_scores, gaussian, load, sequences
from nope_probe.analyses import pattern_rows
from nope_probe.analyses.attribution import ContrastGram, conditions_of
from nope_probe.analyses.jackknife import Interval, jackknife, rms_difference
from nope_probe.analyses.pattern import measure_estimates
from nope_probe.data.sequences import Sequences
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.removing.components import components
from nope_probe.maps.estimates import Estimates, cross_products, fold_gram, fold_weights
from nope_probe.maps.folds import grouped_folds, interleaved_folds
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.rows import row_centred
from nope_probe.removal import INTACT, MASK, POSITION_ENCODINGS, Component, Condition

NOISE = 0.5  # of a synthetic sequence, and of its document


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is resampled."""

    n_resamples: int = 1000
    n_folds: int = 8
    seq_len: int = 24
    n_population: int = 900


@dataclass(frozen=True, kw_only=True)
class Population:
    """The pattern of every sequence of a population in all conditions, in one layer.

    Attributes:
        name: of the model and its data.
        patterns: the kept cells of each sequence's pattern, nats.
        documents: the document of each sequence, from 0.
        conditions: in the order of the patterns.
        removed: what the pattern is lost without, besides the sources.
        sources: the mask, and the position encoding if there is one.
        n_drawn: how many documents a resample draws.
        n_pos, skip_keys: the size of the maps, and how many first keys they leave out.
    """

    name: str
    patterns: Float[Tensor, "condition seq cell"]
    documents: Int[Tensor, " seq"]
    conditions: list[Condition]
    removed: tuple[Condition, ...]
    sources: tuple[Component, ...]
    n_drawn: int
    n_pos: int
    skip_keys: int

    @property
    def cells(self) -> Bool[Tensor, "query_pos key_pos"]:
        """The cells of the patterns."""
        cells = torch.ones(self.n_pos, self.n_pos, dtype=torch.bool).tril(-1)
        return cells & (torch.arange(self.n_pos) >= self.skip_keys)


def main(settings: Settings) -> None:
    torch.manual_seed(0)
    for population in populations(settings):
        singly = bool((population.documents.bincount() == 1).all())
        for grouped in (True,) if singly else (True, False):
            folds = "each by itself" if singly else "grouped" if grouped else "ungrouped"
            found = coverage(population, grouped, settings)
            numbers = ", ".join(f"{name} {value}" for name, value in found.items())
            print(f"{population.name} | {folds} | {numbers}", flush=True)


def populations(settings: Settings) -> Iterator[Population]:
    yield synthetic(settings)
    for name, layer in (("rope-tiny", 1), ("nope-tiny", 2)):
        loaded = load(name, n_layers=layer + 1)
        for kind in ("text", "shuffled text"):
            data = sequences(
                tokenizer=loaded.tokenizer,
                n_seqs=settings.n_population,
                seq_len=settings.seq_len,
                shuffle=kind != "text",
            )
            label = f"{name} L{layer}, {kind}"
            whole = captured(label, loaded.model, data, ("w_q+w_k",), layer)
            for n_drawn in (24, 96):
                yield replace(whole, name=f"{label}, {n_drawn} documents", n_drawn=n_drawn)
    vectors = gaussian(settings.n_population, settings.seq_len, 64, alpha=0.2)
    model = load("parameter-free-rope", n_layers=2).model
    label = "parameter-free-rope L1, i.i.d. vectors, 96 sequences"
    yield captured(label, model, vectors, (), 1)


def synthetic(settings: Settings) -> Population:
    """Return two conditions whose documents have patterns of their own, 1 to 24 sequences each."""
    n = settings.seq_len
    cells = torch.ones(n, n, dtype=torch.bool).tril(-1)
    sizes = torch.randint(1, 25, (120,))
    documents = torch.arange(len(sizes)).repeat_interleave(sizes)
    key = row_centred(torch.arange(n).double().expand(n, n) / n)[cells]
    means = torch.stack([key, 0.3 * key])[:, None]
    of_document = NOISE * torch.randn(2, len(sizes), len(key)).double()[:, documents]
    of_sequence = NOISE * torch.randn(2, len(documents), len(key)).double()
    return Population(
        name="synthetic, 24 documents",
        patterns=means + of_document + of_sequence,
        documents=documents,
        conditions=[INTACT, MASK],
        removed=(),
        sources=("mask",),
        n_drawn=24,
        n_pos=n,
        skip_keys=0,
    )


def captured(
    name: str, model: HookedModel, data: Sequences, names: tuple[str, ...], layer: int
) -> Population:
    """Return the patterns of all sequences, each in a fold of its own."""
    sources = tuple(name for name in ("mask", *POSITION_ENCODINGS) if name in components(model))
    removed = tuple(map(Condition.parse, names))
    gains, patterns = calibrate(model, data.inputs), {}
    skip_keys = int(data.kind != "vectors")
    for condition in [*conditions_of(sources), *removed]:
        with ablated(model, Ablation(remove=sorted(condition), replacement="mean"), gains):
            maps = capture_scores(model, data.inputs, layers=[layer], n_folds=len(data))
        centred = row_centred(maps.folds[:, 0], skip_keys)
        patterns[condition] = centred[:, centred[0].isfinite()]
    documents = torch.arange(len(data)) if data.documents is None else data.documents
    return Population(
        name=name,
        patterns=torch.stack(list(patterns.values())),
        documents=documents.unique(return_inverse=True)[1],
        conditions=list(patterns),
        removed=removed,
        sources=sources,
        n_drawn=96,
        n_pos=data.inputs.shape[1],
        skip_keys=skip_keys,
    )


def coverage(population: Population, grouped: bool, settings: Settings) -> dict[str, str]:
    """Return in how many resamples, in %, each interval contains the population's value.

    In brackets: how many resamples, in %, had no interval, where these are any.
    """
    true = truth(population)
    hits, undefined = defaultdict(int), defaultdict(int)
    label = f"{population.name}, {'grouped' if grouped else 'ungrouped'}"
    for _ in tqdm(range(settings.n_resamples), desc=label):
        for name, interval in resample(population, grouped, settings.n_folds).items():
            hits[name] += interval.low <= true[name] <= interval.high
            undefined[name] += interval.value != interval.value
    found = {}
    for name in true:
        n_defined = settings.n_resamples - undefined[name]
        found[name] = f"{100 * hits[name] / n_defined:.1f}" if n_defined else "none"
        if undefined[name]:
            found[name] += f" ({100 * undefined[name] / settings.n_resamples:.0f})"
    return found


def truth(population: Population) -> dict[str, float]:
    """Return the values of the whole population."""
    means = dict(zip(population.conditions, population.patterns.mean(1), strict=True))
    found = {"amplitude": float(means[INTACT].square().mean().sqrt())}
    alike = as_map(means[INTACT], population).expand(4, -1, -1)  # folds of the whole population
    found["locality"] = float(locality(alike, population).values[0])
    intact, unmasked = (
        not_by_distance(means[c], population).square().mean() for c in (INTACT, MASK)
    )
    found["not by distance, by the mask"] = float(intact.sqrt() - unmasked.sqrt())
    for condition in population.conditions[1:]:
        kept = (means[condition] * means[INTACT]).mean() / means[INTACT].square().mean().sqrt()
        found[f"kept without {condition.name}"] = float(kept)
    return found


def resample(population: Population, grouped: bool, n_folds: int) -> dict[str, Interval]:
    """Return the intervals from documents that are drawn with replacement."""
    drawn = torch.randint(int(population.documents.max()) + 1, (population.n_drawn,))
    members = [(population.documents == document).nonzero()[:, 0] for document in drawn]
    owners = torch.arange(len(members)).repeat_interleave(torch.tensor(list(map(len, members))))
    chosen = torch.cat(members)
    order = torch.randperm(len(chosen))
    chosen, owners = chosen[order], owners[order]
    fold_of = grouped_folds(owners, n_folds) if grouped else interleaved_folds(len(chosen), n_folds)
    counts, folds, gram = fold_means(population, chosen, fold_of)
    intact = as_map(folds[population.conditions.index(INTACT)], population)
    found = {"amplitude": gram.size({INTACT: 1.0})}
    found["locality"] = jackknife(locality(intact, population, counts))
    rows = [population.conditions.index(condition) for condition in (INTACT, MASK)]
    rest = not_by_distance(folds[rows], population)
    squares = products(rest, gram.weights).diagonal(dim1=1, dim2=2).T
    one, other = (Estimates(values=values, weights=gram.weights) for values in squares)
    found["not by distance, by the mask"] = rms_difference(one, other)
    for condition in population.conditions[1:]:
        found[f"kept without {condition.name}"] = gram.part({condition: 1.0}, {INTACT: 1.0})
    return found


def products(
    folds: Float[Tensor, "condition fold cell"], weights: Float[Tensor, " fold"]
) -> Float[Tensor, "one_plus_folds condition condition"]:
    """Return the inner products of the conditions' patterns."""
    return cross_products(fold_gram(folds), folds.shape[-1], weights)


def fold_means(
    population: Population, chosen: Int[Tensor, " seq"], fold_of: Int[Tensor, " seq"]
) -> tuple[Int[Tensor, " fold"], Float[Tensor, "condition fold cell"], ContrastGram]:
    """Return the folds' sizes and mean patterns of chosen sequences, and their inner products."""
    counts, n_conditions = fold_of.bincount(), len(population.conditions)
    sums = torch.zeros(n_conditions, len(counts), population.patterns.shape[-1]).double()
    sums.index_add_(1, fold_of, population.patterns[:, chosen].double())
    folds, weights = sums / counts[:, None], fold_weights(len(counts), counts)
    gram = ContrastGram(
        row={condition: row for row, condition in enumerate(population.conditions)},
        products={False: products(folds, weights)},
        weights=weights,
        score_squares=torch.zeros(n_conditions).double(),
    )
    return counts, folds, gram


def locality(
    folds: Float[Tensor, "fold query_pos key_pos"],
    population: Population,
    counts: Int[Tensor, " fold"] | None = None,
) -> Estimates:
    """Return the locality of patterns, on all folds and without each fold."""
    pattern = LayerMaps.of(folds, counts, skip_keys=population.skip_keys).pattern
    return measure_estimates(pattern)["locality"]


def not_by_distance(
    cells: Float[Tensor, "*batch cell"], population: Population
) -> Float[Tensor, "*batch cell"]:
    """Return the kept cells of patterns less their relative part."""
    maps = as_map(cells.reshape(-1, cells.shape[-1]), population)
    rest = pattern_rows.not_by_distance(LayerMaps.of(maps).pattern)
    return rest[:, population.cells].reshape(cells.shape)


def as_map(
    cells: Float[Tensor, "*batch cell"], population: Population
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Return kept cells as maps, NaN elsewhere."""
    maps = torch.full((*cells.shape[:-1], population.n_pos, population.n_pos), torch.nan).double()
    maps[..., population.cells] = cells.double()
    return maps


if __name__ == "__main__":
    main(tyro.cli(Settings))
