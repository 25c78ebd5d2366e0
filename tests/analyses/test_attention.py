"""The information of attention in four parts: by hand, by brute force, and without the bias."""

from math import isnan, log

import pytest
import torch
from jaxtyping import Float
from scipy.special import rel_entr
from torch import Tensor

from nope_probe import AttentionMaps, AttentionSplit, split_attention
from nope_probe.analyses.attention import information_parts
from nope_probe.analyses.jackknife import Interval, jackknife, share
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.folds import sum_parts

N, N_FOLDS = 13, 5
FIRST_ROW = 7  # the first query that sees 8 keys
CAUSAL = torch.ones(N, N).tril().bool()
NOISE = torch.randn(37, N, N, generator=torch.Generator().manual_seed(0))
SCORES = (torch.linspace(-1, 2, N) + NOISE).double()  # [text, row, key_pos]
PARTS = ("first_position", "first_content", "others_position", "others_content")


def softmax(scores: Float[Tensor, "text row key_pos"]) -> Float[Tensor, "text row key_pos"]:
    return scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1)


def uniform(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.float64) / n


def relative_entropy(p: Tensor, q: Tensor) -> float:
    return float(rel_entr(p.numpy(), q.numpy()).sum())


def binary(a: float, u: float) -> float:
    """KLb(a, u)."""
    return a * log(a / u) + (1 - a) * log((1 - a) / (1 - u))


def folds_of(texts: Tensor, fold_of: Tensor) -> Tensor:
    sums = torch.zeros(N_FOLDS, *texts.shape[1:], dtype=texts.dtype)
    for fold, total in sum_parts(texts, fold_of, N_FOLDS):
        sums[fold] += total
    return sums / fold_of.bincount().view(-1, *[1] * (texts.ndim - 1))


def split(scores: Tensor, fold_of: Tensor, skip_keys: int = 1) -> AttentionSplit:
    weights = softmax(scores)
    first, others, _ = information_parts(weights, CAUSAL, skip_keys)
    means = {
        "weights": folds_of(weights, fold_of),
        "scores": folds_of(scores, fold_of),
        "information": folds_of(first + others, fold_of),
        "others": folds_of(others, fold_of),
    }
    return split_attention(maps_of(means, fold_of.bincount(), skip_keys))[0, 0]


def estimates(found: AttentionSplit, name: str) -> Estimates:
    """Return the estimates of a part on all folds, then without each."""
    kept = getattr(found, name).replicates
    assert isinstance(kept, Estimates)
    return kept


def maps_of(means: dict[str, Tensor], counts: Tensor, skip_keys: int = 1) -> AttentionMaps:
    """Return the maps of one head from its fold means."""
    return AttentionMaps(
        **{name: mean[:, None, None] for name, mean in means.items()},
        visible=CAUSAL[None],
        counts=counts,
        layers=(0,),
        skip_keys=skip_keys,
        query_positions=torch.arange(N),
    )


def test_the_four_parts_add_up_to_the_information() -> None:
    fold_of = torch.arange(37) % N_FOLDS
    found = split(SCORES, fold_of)
    by_hand = [
        relative_entropy(row[: i + 1], uniform(i + 1))
        for text in softmax(SCORES)
        for i, row in enumerate(text)
        if i >= FIRST_ROW
    ]
    expected = sum(by_hand) / len(by_hand)
    assert found.information.value == pytest.approx(expected, abs=1e-9)
    added = sum(estimates(found, part).values for part in PARTS)
    assert (added - estimates(found, "information").values).abs().max() < 1e-9


def test_position_is_the_information_of_the_mean_weights_less_its_bias() -> None:
    fold_of = torch.tensor([0] * 3 + [1] * 5 + [2] * 7 + [3] * 11 + [4] * 11)
    found, weights = split(SCORES, fold_of), softmax(SCORES)

    def at_first_and_others(texts: Tensor) -> Tensor:
        """The plain formula on the mean over texts."""
        first, others = [], []
        for i in range(FIRST_ROW, N):
            mean, n = texts[:, i, : i + 1].mean(0), i + 1
            m, rest = float(mean[0]), mean[1:]
            first.append(binary(m, 1 / n))
            others.append((1 - m) * relative_entropy(rest / rest.sum(), uniform(n - 1)))
        return torch.tensor([first, others]).double().mean(1)

    def unbiased(texts: Tensor, folds: Tensor) -> Tensor:
        """The delete-m jackknife, by its definition."""
        whole = at_first_and_others(texts)
        value = whole
        for fold in folds.unique():
            left = folds != fold
            value = value - left.double().mean() * (at_first_and_others(texts[left]) - whole)
        return value

    for place, left_out in enumerate([None, *range(N_FOLDS)]):
        kept = torch.ones(37).bool() if left_out is None else fold_of != left_out
        expected = unbiased(weights[kept], fold_of[kept])
        for name, value in zip(("first_position", "others_position"), expected, strict=True):
            assert float(estimates(found, name).values[place]) == pytest.approx(float(value))


def test_the_maps_of_a_head_have_its_split() -> None:
    """Two layers of three heads, of uneven folds."""
    generator, fold_of = torch.Generator().manual_seed(4), torch.arange(37) % N_FOLDS
    scores = torch.randn(37, 2, 3, N, N, generator=generator).double()
    weights = softmax(scores.flatten(1, 2)).unflatten(1, (2, 3))
    zeros = torch.zeros(N_FOLDS, 2, 3, N).double()
    maps = AttentionMaps(
        weights=folds_of(weights, fold_of),
        scores=None,
        information=zeros,
        others=zeros,
        visible=CAUSAL.expand(2, -1, -1),
        counts=fold_of.bincount(),
        layers=(4, 7),
        skip_keys=1,
        query_positions=torch.arange(N),
    )
    of_head = split_attention(maps.head(7, 1))
    assert [*of_head] == [(7, 1)]
    assert repr(of_head[7, 1]) == repr(split_attention(maps)[7, 1])


def contains(interval: Interval, value: float, slack: float = 0) -> bool:
    return interval.low - slack <= value <= interval.high + slack


def test_attention_that_ignores_the_text_is_positional_and_the_softmax_of_its_scores() -> None:
    position = (3 * torch.rand(N, N, generator=torch.Generator().manual_seed(2))).double()
    found = split(position.expand(40, -1, -1), torch.arange(40) % N_FOLDS)
    for interval in (found.positional_share, found.others_share):
        assert contains(interval, 1, slack=1e-9)
    for none in (found.first_content, found.others_content, found.pattern_missed):
        assert none.value == pytest.approx(0, abs=1e-9)
    assert found.positional_share_gap == pytest.approx(0, abs=1e-9)


def test_the_bounds_are_the_mean_weights_and_each_folds_weights_read_with_the_others() -> None:
    """The upper bound is KL(M, U), the lower E A log(M / U) with M of the other folds' texts."""
    fold_of = torch.tensor([0] * 3 + [1] * 5 + [2] * 7 + [3] * 11 + [4] * 11)
    found, weights = split(SCORES, fold_of), softmax(SCORES)
    gaps = torch.zeros(2, dtype=torch.float64)
    for i in range(FIRST_ROW, N):
        rows, n = weights[:, i, : i + 1], i + 1
        mean = rows.mean(0)
        m, u = mean[1:] / mean[1:].sum(), uniform(n - 1)
        upper = relative_entropy(mean, uniform(n))
        upper_others = float(1 - mean[0]) * relative_entropy(m, u)
        lower, lower_others = [], []
        for text, fold in zip(rows, fold_of, strict=True):
            other = rows[fold_of != fold].mean(0)
            lower.append((text * (n * other).log()).sum())
            ratios = other[1:] / other[1:].sum() * (n - 1)
            lower_others.append((text[1:] * ratios.log()).sum())
        both = upper - float(torch.stack(lower).mean())
        others = upper_others - float(torch.stack(lower_others).mean())
        gaps += torch.tensor([both - others, others], dtype=torch.float64)
    expected = (gaps / (N - FIRST_ROW)).tolist()
    assert min(expected) > 0
    whole = found.information.value
    assert found.positional_share_gap == pytest.approx(sum(expected) / whole)
    among = found.others_position.value + found.others_content.value
    assert found.others_share_gap == pytest.approx(expected[1] / among)
    names = ("first_position", "others_position", "others_content", "information")
    at_first, position, content, information = (estimates(found, name) for name in names)
    plain = share(at_first + position, information)
    assert found.positional_share.high == plain.high
    lowered = plain.low - found.positional_share_gap / 8
    assert found.positional_share.low == pytest.approx(lowered)
    lowest, highest = jackknife(position).low, jackknife(content).high
    assert found.others_position.low == pytest.approx(lowest - expected[1] / 8)
    assert found.others_content.high == pytest.approx(highest + expected[1] / 8)
    assert found.information == jackknife(information)


def one_key_a_text(n_texts: int, seed: int) -> Tensor:
    """Return scores of texts that each attend to one key, drawn evenly from those after the first.

    No position tells which: all that is left is the bias of few texts.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(1, FIRST_ROW + 1, (n_texts,), generator=generator)
    return 30.0 * torch.nn.functional.one_hot(keys, N)[:, None].expand(-1, N, -1).double()


def test_no_share_is_given_where_the_bounds_are_far_apart() -> None:
    few, many = (split(one_key_a_text(n, 0), torch.arange(n) % N_FOLDS) for n in (10, 400))
    assert few.positional_share_gap > 0.5
    for interval in (few.positional_share, few.others_share):
        assert isnan(interval.value)
    assert 0 < many.positional_share_gap < 0.05
    assert not isnan(many.positional_share.value)


def test_intervals_of_few_texts_hold_the_share_of_all() -> None:
    """Each text looks at its own key with 3 nats more than position gives; the truth is a sum."""
    position = torch.linspace(0, 2, N).double()
    every = (position + 3 * torch.eye(N).double())[:, None].expand(-1, N, -1)
    true = split(every.repeat(N_FOLDS, 1, 1), torch.arange(N_FOLDS).repeat_interleave(N))
    expected = true.others_share.value
    hits = {17: 0, 61: 0}
    for n_texts in hits:
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            drawn = every[torch.randint(N, (n_texts,), generator=generator)]
            found = split(drawn, torch.arange(n_texts) % N_FOLDS)
            hits[n_texts] += contains(found.others_share, expected)
    assert min(hits.values()) >= 37, hits


def test_weights_that_mean_scores_do_not_show_are_missed() -> None:
    """Key 3 gets 4 nats in half of the texts and -4 in the others: 0 on average, not in weight.

    The mean scores are uniform, so they miss all that the mean weights tell.
    """
    key = (torch.arange(N) == 3).double()
    signs = torch.tensor([1.0, -1.0]).repeat(30).double()
    scores = (4 * key * signs[:, None])[:, None].expand(-1, N, -1)
    found = split(scores, torch.arange(60) // 2 % N_FOLDS)
    assert found.others_position.value > 0.01
    assert found.pattern_missed.value == pytest.approx(1, abs=1e-9)


def test_without_a_first_key_all_information_is_among_the_other_keys() -> None:
    found = split(SCORES, torch.arange(37) % N_FOLDS, skip_keys=0)
    for part in ("first_position", "first_content", "first_weight"):
        assert estimates(found, part).values.abs().max() < 1e-9
    among = estimates(found, "others_position") + estimates(found, "others_content")
    assert torch.allclose(among.values, estimates(found, "information").values)


def test_fewer_than_4_folds_are_refused() -> None:
    means = dict.fromkeys(("information", "others"), torch.zeros(2, N).double())
    of_two = maps_of(means | {"weights": torch.ones(2, N, N).double()}, torch.ones(2).long())
    with pytest.raises(ValueError, match="at least 4 folds, got 2"):
        split_attention(of_two)
