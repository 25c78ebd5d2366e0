"""How often the 95% intervals of the parts of attention contain the truth.

    python benchmarks/attention_coverage.py [--n-resamples 400]

The weights of every sequence of a population of documents are kept. A resample draws documents with
replacement; its intervals should contain the value of the whole population 19 times of 20. Beside
it: the mean error of the positional share, with the bias of a mean of few texts removed and left.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import tyro
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from nope_probe import capture_attention, load, sequences
from nope_probe.analyses.attention import AttentionSplit, information_parts, split_head
from nope_probe.analyses.jackknife import Interval, jackknife
from nope_probe.analyses.pattern import MIN_KEYS
from nope_probe.maps.folds import grouped_folds
from nope_probe.maps.maps import AttentionMaps

PARTS = ("information", "first_position", "first_content", "others_position", "others_content")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is resampled."""

    n_resamples: int = 400
    n_folds: int = 8
    seq_len: int = 24
    n_population: int = 900


def main(settings: Settings) -> None:
    torch.manual_seed(0)
    chosen = {"rope-tiny": ((1, 3), (2, 0), (3, 3)), "nope-tiny": ((1, 0), (2, 1), (3, 2))}
    for name, heads in chosen.items():
        loaded = load(name)
        for kind in ("text", "shuffled text"):
            data = sequences(
                tokenizer=loaded.tokenizer,
                n_seqs=settings.n_population,
                seq_len=settings.seq_len,
                shuffle=kind != "text",
            )
            whole = capture_attention(loaded.model, data.inputs, n_folds=len(data))
            assert data.documents is not None
            documents = data.documents.unique(return_inverse=True)[1]
            for n_drawn in (24, 96):
                for layer, head in heads:
                    label = f"{name} L{layer}H{head}, {kind}, {n_drawn} documents"
                    found = coverage(whole, documents, layer, head, n_drawn, settings)
                    numbers = ", ".join(f"{part} {value}" for part, value in found.items())
                    print(f"{label} | {numbers}", flush=True)


def coverage(
    whole: AttentionMaps,
    documents: Int[Tensor, " seq"],
    layer: int,
    head: int,
    n_drawn: int,
    settings: Settings,
) -> dict[str, str]:
    """Return in how many resamples, in %, each interval contains the population's value."""
    place = whole.layers.index(layer)
    maps = {
        name: getattr(whole, name)[:, place, head].double()
        for name in ("weights", "scores", "information", "others")
    }
    visible, true = whole.visible[place], truth(maps, whole.visible[place])
    members = [(documents == document).nonzero()[:, 0] for document in documents.unique()]
    hits: dict[str, int] = defaultdict(int)
    errors = []
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
            layers=(layer,),
            skip_keys=1,
        )
        split = split_head(resampled, place=0, head=0)
        for name, interval in intervals_of(split).items():
            hits[name] += interval.low <= true[name] <= interval.high
        plain = truth({name: x[chosen] for name, x in maps.items()}, visible)
        of_both = (split.positional_share.value, plain["positional_share"])
        errors.append(torch.tensor(of_both) - true["positional_share"])
    found = {name: f"{100 * hits[name] / settings.n_resamples:.1f}" for name in true}
    removed, left = (100 * torch.stack(errors).mean(0)).tolist()
    share = 100 * true["positional_share"]
    return found | {"share, error, with bias": f"{share:.1f} {removed:+.2f} {left:+.2f}"}


def means_of(
    texts: Float[Tensor, "seq *map"], fold_of: Int[Tensor, " seq"], counts: Int[Tensor, " fold"]
) -> Float[Tensor, "fold *map"]:
    sums = texts.new_zeros(len(counts), *texts.shape[1:]).index_add_(0, fold_of, texts)
    return sums / counts.view(-1, *[1] * (texts.ndim - 1))


def intervals_of(split: AttentionSplit) -> dict[str, Interval]:
    parts = {name: jackknife(getattr(split, name)) for name in PARTS}
    return parts | {"positional_share": split.positional_share}


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
        "positional_share": among / others,
    }


if __name__ == "__main__":
    main(tyro.cli(Settings))
