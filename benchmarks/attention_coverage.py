"""How often the 95% intervals of the parts of attention contain the truth.

    python benchmarks/attention_coverage.py [--n-resamples 400]
    python benchmarks/attention_coverage.py --model smollm2-135m    # half an hour on two cores

The weights of every sequence of a population of documents are kept. A resample draws documents with
replacement; its intervals should contain the value of the whole population 19 times of 20. A share
is counted where it is given, and how often that is stands behind the slash. Last come the mean
error of the positional share, with the bias of a mean of few texts removed and left, and the mean
gap of its bounds.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isnan

import torch
import tyro
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from nope_probe import capture_attention, load, sequences
from nope_probe.analyses.attention import AttentionSplit, information_parts, split_attention
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern import MIN_KEYS
from nope_probe.maps.folds import grouped_folds
from nope_probe.maps.maps import AttentionMaps

PARTS = ("information", "first_position", "first_content", "others_position", "others_content")
SHARES = ("positional_share", "others_share")
TWINS = {"rope-tiny": ((1, 3), (2, 0), (3, 3)), "nope-tiny": ((1, 0), (2, 1), (3, 2))}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is resampled.

    Attributes:
        model: a model whose heads in one layer are resampled; by default heads of the twins.
    """

    n_resamples: int = 400
    n_folds: int = 8
    model: str | None = None
    layer: int = 3
    seq_len: int = 512
    query_rows: int = 32
    n_population: int = 1600
    n_seqs: tuple[int, ...] = (100, 200)


def main(settings: Settings) -> None:
    torch.manual_seed(0)
    for label, whole, documents, n_drawn in populations(settings):
        for place, layer in enumerate(whole.layers):
            for head in range(whole.weights.shape[2]):
                if settings.model is None and (layer, head) not in TWINS[label.partition(",")[0]]:
                    continue
                percent = coverage(whole, documents, place, head, n_drawn, settings)
                numbers = ", ".join(f"{part} {value}" for part, value in percent.items())
                print(f"{label}, L{layer}H{head}, {n_drawn} documents | {numbers}", flush=True)


def populations(
    settings: Settings,
) -> Iterator[tuple[str, AttentionMaps, Int[Tensor, " seq"], int]]:
    """Yield a name, the maps of every sequence, their documents, and how many to draw."""
    if settings.model is not None:
        loaded = load(settings.model, n_layers=settings.layer + 1)
        data = sequences(
            "stdlib",
            tokenizer=loaded.tokenizer,
            n_seqs=settings.n_population,
            seq_len=settings.seq_len,
        )
        options = {"layers": [settings.layer], "query_rows": settings.query_rows}
        whole = capture_attention(
            loaded.model, data.inputs, n_folds=len(data), batch_size=8, **options
        )
        for n_seqs in settings.n_seqs:
            n_drawn = round(n_seqs * data.n_documents / len(data))
            yield f"{settings.model}, {n_seqs} sequences", whole, numbered(data.documents), n_drawn
        return
    for name in TWINS:
        loaded = load(name)
        for kind in ("text", "shuffled text"):
            data = sequences(
                tokenizer=loaded.tokenizer, n_seqs=900, seq_len=24, shuffle=kind != "text"
            )
            whole = capture_attention(loaded.model, data.inputs, n_folds=len(data))
            for n_drawn in (24, 96):
                yield f"{name}, {kind}", whole, numbered(data.documents), n_drawn


def numbered(documents: Int[Tensor, " seq"] | None) -> Int[Tensor, " seq"]:
    """Return documents numbered from 0."""
    assert documents is not None
    return documents.unique(return_inverse=True)[1]


def coverage(
    whole: AttentionMaps,
    documents: Int[Tensor, " seq"],
    place: int,
    head: int,
    n_drawn: int,
    settings: Settings,
) -> dict[str, str]:
    """Return in how many resamples, in %, each interval contains the population's value."""
    maps = {
        name: getattr(whole, name)[:, place, head].double()
        for name in ("weights", "scores", "information", "others")
    }
    visible, true = whole.visible[place], truth(maps, whole.visible[place])
    members = [(documents == document).nonzero()[:, 0] for document in documents.unique()]
    hits, given = defaultdict[str, int](int), defaultdict[str, int](int)
    errors, gaps = [], []
    for _ in tqdm(range(settings.n_resamples), leave=False):
        drawn = [members[index] for index in torch.randint(len(members), (n_drawn,)).tolist()]
        owners = torch.arange(n_drawn).repeat_interleave(torch.tensor(list(map(len, drawn))))
        fold_of, chosen = grouped_folds(owners, settings.n_folds), torch.cat(drawn)
        counts = fold_of.bincount()
        folds = {name: means_of(x[chosen], fold_of, counts) for name, x in maps.items()}
        resampled = replace(
            whole,
            **{name: fold[:, None, None] for name, fold in folds.items()},
            visible=visible[None],
            counts=counts,
            layers=(whole.layers[place],),
            skip_keys=1,
        )
        [split] = split_attention(resampled).values()
        for name, interval in intervals_of(split).items():
            hits[name] += interval.low <= true[name] <= interval.high
            given[name] += not isnan(interval.value)
        gaps.append(100 * split.positional_share_gap)
        plain = truth({name: x[chosen] for name, x in maps.items()}, visible)
        of_both = (split.positional_share.value, plain["positional_share"])
        errors.append(torch.tensor(of_both) - true["positional_share"])
    percent = {name: f"{100 * hits[name] / max(1, given[name]):.1f}" for name in true}
    for name in SHARES:
        percent[name] += f" / {100 * given[name] / settings.n_resamples:.0f}"
        percent[f"true {name}"] = f"{100 * true[name]:.1f}"
    removed, left = (100 * torch.stack(errors).nanmean(0)).tolist()
    gap = sum(gaps) / len(gaps)
    return percent | {"error, with bias, gap": f"{removed:+.2f} {left:+.2f} {gap:.1f}"}


def means_of(
    texts: Float[Tensor, "seq *map"], fold_of: Int[Tensor, " seq"], counts: Int[Tensor, " fold"]
) -> Float[Tensor, "fold *map"]:
    sums = texts.new_zeros(len(counts), *texts.shape[1:]).index_add_(0, fold_of, texts)
    return sums / counts.view(-1, *[1] * (texts.ndim - 1))


def intervals_of(split: AttentionSplit) -> dict[str, Interval]:
    return {name: getattr(split, name) for name in (*PARTS, *SHARES)}


def truth(maps: dict[str, Tensor], visible: Tensor) -> dict[str, float]:
    """Return the parts of sequences that are all there is, whose mean has no bias."""
    rows = visible.sum(-1) >= MIN_KEYS
    position = information_parts(maps["weights"].mean(0), visible)
    information, others, first, among = (
        float(x[..., rows].mean())
        for x in (maps["information"], maps["others"], position.first, position.others)
    )
    return {
        "information": information,
        "first_position": first,
        "first_content": information - others - first,
        "others_position": among,
        "others_content": others - among,
        "positional_share": (first + among) / information,
        "others_share": among / others,
    }


if __name__ == "__main__":
    main(tyro.cli(Settings))
