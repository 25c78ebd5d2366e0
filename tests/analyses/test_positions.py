"""Terms and writers of a pattern, against closed forms and known truths."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from math import prod

import pytest
import torch
from support.dense_patterns import estimates

from nope_probe import row_centred
from nope_probe.analyses.jackknife import UNDEFINED, Interval, along, jackknife, rms, share
from nope_probe.analyses.positions import (
    TERMS,
    direct_part,
    position_terms,
    term_maps,
    written_by,
    written_terms,
)
from nope_probe.analyses.reader import Reader
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.layers import Question
from nope_probe.maps.positions import NO_ROTATION, ReaderSums, Rotation
from nope_probe.removal import Writer

N_FOLDS, N_POS, N_HEADS, D_HEAD = 7, 13, 2, 6
CAUSAL = torch.ones(N_POS, N_POS).tril().bool()
EQUAL = torch.full((N_FOLDS,), 5)
FREQUENCIES = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)


def rope() -> Rotation:
    angles = torch.arange(N_POS)[:, None] * FREQUENCIES
    pairs = torch.stack((torch.arange(3), torch.arange(3, 6)), -1)
    return Rotation(pairs=pairs, cos=angles.cos(), sin=angles.sin())


def sums_of(
    q: torch.Tensor,
    k: torch.Tensor,
    rotation: Rotation = NO_ROTATION,
    noise: float = 0.0,
    **parts: dict,
) -> ReaderSums:
    """Return a reader whose scores are the products of its means, and noise."""
    left, right = map(rotation.turned, (q, k))
    scores = torch.einsum("fihd,fjhd->fij", left, right) * 0.5
    scores = scores + noise * torch.randn_like(scores)
    return ReaderSums(
        q=q,
        k=k,
        queries=parts.get("queries", {"embed": q}),
        keys=parts.get("keys", {"embed": k}),
        scores=scores.masked_fill(~CAUSAL, torch.nan),
        scale=0.5,
        rotation=rotation,
    )


def random_vectors(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    same = torch.randn(1, N_POS, N_HEADS, D_HEAD, generator=generator, dtype=torch.float64)
    noise = torch.randn(N_FOLDS, N_POS, N_HEADS, D_HEAD, generator=generator, dtype=torch.float64)
    return same + 0.1 * noise


def test_rope_on_constant_vectors_is_rotation_alone_in_closed_form() -> None:
    """A pair of lengths |q| and |k| gives |q||k| cos(theta (i - j) + their angle)."""
    generator = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(1, 1, 1, D_HEAD, generator=generator, dtype=torch.float64).expand(
            N_FOLDS, N_POS, 1, D_HEAD
        )
        for _ in range(2)
    )
    reader = Reader(sums=sums_of(q, k, rope()), counts=EQUAL)
    terms = position_terms(reader)
    assert terms["rotation"].part.value == pytest.approx(terms["all"].size.value, abs=1e-9)
    assert terms["rotation"].relative_r2.value == pytest.approx(1, abs=1e-9)
    assert terms["rotation"].not_by_distance.value == 0
    for name in (*TERMS[1:], "covariance"):
        assert terms[name].part.value == 0, "within rounding"
    (a, b), (c, d) = ((x[0, 0, 0, :3], x[0, 0, 0, 3:]) for x in (q, k))
    lengths = torch.hypot(a, b) * torch.hypot(c, d)
    phases = torch.atan2(b, a) - torch.atan2(d, c)
    distance = torch.arange(N_POS)[:, None] - torch.arange(N_POS)
    angles = distance[..., None] * FREQUENCIES + phases
    closed = 0.5 * (lengths * angles.cos()).sum(-1)
    kept = CAUSAL.tril(-1)
    means = closed.where(kept, 0).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp_min(1)
    pattern = term_maps(reader)["rotation"]
    assert torch.allclose(pattern[kept], (closed - means)[kept], atol=1e-12)


Part = Callable[[torch.Tensor], torch.Tensor]
UNEVEN = torch.tensor([3, 9, 4, 5, 2])
ROWS = torch.tensor([2, 5, 6, 9, 11, 12])


def estimates_over_folds(n_maps: int, value: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return a product's mean over different folds, on all folds and without each fold."""

    def mean(folds: list[int]) -> torch.Tensor:
        choices = [*permutations(folds, n_maps)]
        weights = [prod(int(UNEVEN[fold]) for fold in choice) for choice in choices]
        products = [w * value(*choice) for w, choice in zip(weights, choices, strict=True)]
        return sum(products, torch.zeros(())) / sum(weights)

    folds = [*range(len(UNEVEN))]
    left_out = [[fold for fold in folds if fold != out] for out in folds]
    return torch.stack([mean(kept) for kept in (folds, *left_out)])


class ByHand:
    """Patterns and their non-relative parts as vectors of cells 1 <= j < i of some rows.

    Or leads, as vectors of the queries from 9 on, which have 8 other keys.
    """

    def __init__(self, rows: torch.Tensor, question: Question, window: int = N_POS) -> None:
        self.rows, self.question = rows, question
        keys = torch.arange(N_POS)
        self.cells = (keys >= 1) & (keys < rows[:, None]) & (rows[:, None] - keys < window)
        row, key = self.cells.nonzero().T
        n = len(row)
        design = torch.zeros(n, len(rows) + N_POS, dtype=torch.float64)
        design[torch.arange(n), row] = 1
        design[torch.arange(n), len(rows) + rows[row] - key] = 1
        self.rest_of = torch.eye(n) - design @ torch.linalg.pinv(design)

    def values(self, scores: torch.Tensor) -> torch.Tensor:
        return self.lead(scores) if self.question == "lead" else self.pattern(scores)

    def lead(self, scores: torch.Tensor) -> torch.Tensor:
        queries = zip(self.rows.tolist(), scores, strict=True)
        return torch.stack([row[0] - row[1:query].mean() for query, row in queries if query >= 9])

    def pattern(self, scores: torch.Tensor) -> torch.Tensor:
        rows = [row[kept] for row, kept in zip(scores, self.cells, strict=True)]
        return torch.cat([row - row.mean() if len(row) else row for row in rows])

    def rest(self, scores: torch.Tensor) -> torch.Tensor:
        return self.rest_of @ self.pattern(scores)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the scores of one fold's queries and another's keys."""
        left, right = (rope().turned(x) for x in (q, k))
        return torch.einsum("ihd,jhd->ij", left[self.rows], right) * 0.5

    def square(self, part: Part, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return <T, T> over four different folds."""
        folds = range(len(UNEVEN))
        maps = {(a, b): part(self.scores(q[a], k[b])) for a, b in permutations(folds, 2)}
        return estimates_over_folds(4, lambda a, b, c, d: (maps[a, b] * maps[c, d]).mean())

    def size(self, q: torch.Tensor, k: torch.Tensor) -> Interval:
        """Return the mean lead over two different folds, or the RMS of the pattern over four."""
        if self.question == "pattern":
            return rms(uneven(self.square(self.pattern, q, k)))
        leads = estimates_over_folds(2, lambda a, b: self.lead(self.scores(q[a], k[b])).mean())
        return jackknife(uneven(leads))

    def crossed(
        self, part: Part, q: torch.Tensor, k: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Return <T, V> over three different folds."""
        maps = [part(fold) for fold in scores]
        return estimates_over_folds(
            3, lambda a, b, c: (part(self.scores(q[a], k[b])) * maps[c]).mean()
        )

    def square_of_maps(self, part: Part, scores: torch.Tensor) -> torch.Tensor:
        """Return <V, V> over two different folds."""
        maps = [part(fold) for fold in scores]
        return estimates_over_folds(2, lambda a, b: (maps[a] * maps[b]).mean())


def uneven(values: torch.Tensor) -> Estimates:
    return estimates(values, UNEVEN)


def nats(product: torch.Tensor, square: torch.Tensor) -> Interval:
    part = along(uneven(product), uneven(square))
    return UNDEFINED if part is None else jackknife(part)


def assert_equal(found: Interval, expected: Interval) -> None:
    for end in ("value", "low", "high"):
        assert getattr(found, end) == pytest.approx(getattr(expected, end), abs=1e-9, nan_ok=True)


def noisy_reader(
    rows: torch.Tensor, question: Question, *, has_alibi: bool = False
) -> tuple[Reader, torch.Tensor | None]:
    """Return a reader of five uneven folds whose q, k and scores differ between folds; ALiBi."""
    torch.manual_seed(5)
    bias = 9 * torch.randn(N_POS, N_POS, dtype=torch.float64) if has_alibi else None
    parts = [random_vectors(seed)[: len(UNEVEN)] for seed in range(7)]
    queries, keys = (
        dict(zip(("embed", "L0H1", "MLP0"), three, strict=True))
        for three in (parts[:3], parts[3:6])
    )
    q, k = (sum(written.values(), torch.zeros(())) for written in (queries, keys))
    noise = {"lead": 1.0, "pattern": 9.0}[question]  # few queries have a lead
    sums = sums_of(q, k, rope(), noise=noise, queries=queries, keys=keys)
    own = {
        "scores": sums.scores[:, rows],
        "bias": bias if bias is None else bias[rows],
        "query_positions": rows,
        "first_queries": {"L0H1": parts[6]},
        "first_keys": {"L0H1": -0.4 * parts[6]},
    }
    given = replace(sums, **own)
    options = {"skip_keys": 1, "kept_positions": 1, "question": question}
    return Reader(sums=given, counts=UNEVEN, **options), bias


@pytest.mark.parametrize("question", ["lead", "pattern"])
@pytest.mark.parametrize(("rows", "has_alibi"), [(torch.arange(N_POS), False), (ROWS, True)])
def test_terms_are_products_of_different_folds_by_brute_force(
    rows: torch.Tensor, has_alibi: bool, question: Question
) -> None:
    """The covariance is scores less mean term: 2, 4 and 3 folds; ALiBi is known without noise."""
    reader, bias = noisy_reader(rows, question, has_alibi=has_alibi)
    hand = ByHand(rows, question)
    terms, scores = position_terms(reader), reader.sums.scores
    with_bias = scores if bias is None else scores + bias[rows]
    square = hand.square_of_maps(hand.values, with_bias)
    vectors = {name: reader.term(name) for name in (*TERMS, "mean")}
    products = {name: hand.crossed(hand.values, *of, with_bias) for name, of in vectors.items()}
    products |= {"covariance": square - products["mean"], "all": square}
    if bias is not None:
        of_bias, whole = hand.values(bias[rows]), [hand.values(fold) for fold in with_bias]
        products["alibi"] = estimates_over_folds(1, lambda a: (of_bias * whole[a]).mean())
        products["covariance"] = products["covariance"] - products["alibi"]
    assert {*terms} == {*products}
    for name, term in terms.items():
        if question == "pattern":
            assert_equal(term.part, nats(products[name], square))
        if name in vectors:
            if question == "lead":
                assert_equal(term.part, hand.size(*vectors[name]))
            assert_equal(term.size, hand.size(*vectors[name]))
    parts = ("mean", "covariance", *(["alibi"] if has_alibi else []))
    added = sum(terms[name].part.value for name in parts)
    assert added == pytest.approx(terms["all"].size.value, abs=1e-9)
    if question == "lead":
        assert_equal(terms["mean"].relative_r2, UNDEFINED)
        leads = torch.stack([hand.lead(fold).mean() for fold in with_bias])
        assert_equal(terms["all"].size, jackknife(Estimates.of_means(leads, reader.weights)))
        sizes = sum(terms[name].size.value for name in parts)
        assert sizes == pytest.approx(terms["all"].size.value, abs=1e-9)


@pytest.mark.parametrize(
    ("rows", "window", "has_alibi"), [(torch.arange(N_POS), N_POS, True), (ROWS, 6, False)]
)
def test_strengths_of_patterns_are_squares_of_different_folds_by_brute_force(
    rows: torch.Tensor, window: int, has_alibi: bool
) -> None:
    reader, bias = noisy_reader(rows, "pattern", has_alibi=has_alibi)
    hand = ByHand(rows, "pattern", window)
    hidden = rows[:, None] - torch.arange(N_POS) >= window
    sums = replace(reader.sums, scores=reader.sums.scores.masked_fill(hidden, torch.nan))
    reader = replace(reader, sums=sums)
    terms, scores = position_terms(reader), sums.scores
    with_bias = scores if bias is None else scores + bias[rows]
    in_cells = with_bias[:, hand.cells].square().mean()
    assert float(reader.score_square) == pytest.approx(float(in_cells))
    vectors = {name: reader.term(name) for name in (*TERMS, "mean")}
    squares, rests = (
        {name: hand.square(part, *of) for name, of in vectors.items()}
        for part in (hand.pattern, hand.rest)
    )
    for found, part in ((squares, hand.pattern), (rests, hand.rest)):
        crossed = hand.crossed(part, *vectors["mean"], scores)
        found["covariance"] = hand.square_of_maps(part, scores) + found["mean"] - 2 * crossed
        found["all"] = hand.square_of_maps(part, with_bias)
    if bias is not None:
        for found, part in ((squares, hand.pattern), (rests, hand.rest)):
            found["alibi"] = part(bias[rows]).square().mean().expand(1 + len(UNEVEN))
    for name, term in terms.items():
        assert_equal(term.size, rms(uneven(squares[name])))
        assert_equal(
            term.relative_r2, share(uneven(squares[name] - rests[name]), uneven(squares[name]))
        )
        assert_equal(term.not_by_distance, rms(uneven(rests[name])))
    maps, parts = term_maps(reader), ("mean", "covariance", *(["alibi"] if has_alibi else []))
    kept = hand.cells
    if window == N_POS:
        leads = torch.stack([hand.lead(fold) for fold in with_bias])
        weights = UNEVEN.double() / UNEVEN.sum()
        found = maps["all"][(rows >= 9).nonzero()[:, 0], 0]
        assert torch.allclose(found, weights @ leads, atol=1e-9)
    assert torch.allclose(sum(maps[name] for name in parts)[kept], maps["all"][kept], atol=1e-9)
    assert torch.allclose(sum(maps[name] for name in TERMS)[kept], maps["mean"][kept], atol=1e-9)
    if bias is not None:
        assert torch.allclose(maps["alibi"][kept], hand.pattern(bias[rows]), atol=1e-9)


@pytest.mark.parametrize(("rows", "question"), [(torch.arange(N_POS), "pattern"), (ROWS, "lead")])
def test_writers_are_products_of_different_folds_by_brute_force(
    rows: torch.Tensor, question: Question
) -> None:
    """The key side meets whole queries, the query side the keys' mean over positions."""
    (reader, _), hand = noisy_reader(rows, question), ByHand(rows, question)
    sums, scores = reader.sums, reader.sums.scores
    square = hand.square_of_maps(hand.values, scores)

    def about_mean(x: torch.Tensor) -> torch.Tensor:
        return x - x[:, 1:].mean(1, keepdim=True)

    def part_of(pair: tuple[torch.Tensor, torch.Tensor]) -> Interval:
        if question == "lead":
            return hand.size(*pair)
        return nats(hand.crossed(hand.values, *pair, scores), square)

    mean_key = (sums.k - about_mean(sums.k)).expand_as(sums.k)
    for side, written, first in (
        ("key", sums.keys, sums.first_keys),
        ("query", sums.queries, sums.first_queries),
    ):
        terms = written_terms(reader, side)
        assert {*terms} == {*written}
        for writer, term in terms.items():
            x = about_mean(written[writer])
            pair = (sums.q, x) if side == "key" else (x, mean_key)
            assert_equal(term.part, part_of(pair))
            assert_equal(term.size, hand.size(*pair))
            if writer not in first:
                assert_equal(term.from_first_key, UNDEFINED)
                continue
            x = about_mean(first[writer])
            pair = (sums.q, x) if side == "key" else (x, mean_key)
            assert_equal(term.from_first_key, part_of(pair))
    query, key = (about_mean(x["MLP0"]) for x in (sums.queries, sums.keys))
    pairs = ((sums.q, sums.k), (sums.q - query, sums.k - key))
    found = direct_part(reader, Writer("MLP0"))
    if question == "lead":
        whole, without = (hand.size(*pair).value for pair in pairs)
        assert found.value == pytest.approx(whole - without, abs=1e-9)
    else:
        whole, without = (hand.crossed(hand.values, *pair, scores) for pair in pairs)
        assert_equal(found, nats(whole - without, square))


def test_queries_whose_window_hides_the_first_key_have_no_lead() -> None:
    q, k = (random_vectors(seed) for seed in (1, 2))
    sums, position = sums_of(q, k, rope()), torch.arange(N_POS)
    hidden = position[:, None] - position >= 11
    windowed = replace(sums, scores=sums.scores.masked_fill(hidden, torch.nan))
    asked = [*Reader(sums=windowed, counts=EQUAL, skip_keys=1).questions()]
    assert asked[0].question == "lead"
    assert asked[0].n_values == 2, "queries 9 and 10"
    leads = (windowed.scores[:, 9:11, 0] - torch.stack(
        [windowed.scores[:, query, 1:query].mean(-1) for query in (9, 10)], -1
    ))  # fmt: skip
    assert position_terms(asked[0])["all"].size.value == pytest.approx(float(leads.mean()))
    narrow = replace(
        sums, scores=sums.scores.masked_fill(position[:, None] - position >= 5, torch.nan)
    )
    [only] = Reader(sums=narrow, counts=EQUAL, skip_keys=1).questions()
    assert only.question == "pattern"
    [of_vectors] = Reader(sums=sums, counts=EQUAL).questions()
    assert of_vectors.question == "pattern", "no vector is first"


def test_an_attention_writes_what_its_heads_write() -> None:
    parts = [random_vectors(seed) for seed in range(8)]
    names = ("L0H0", "L0H1", "MLP0", "L1H0")
    queries, keys = (
        dict(zip(names, parts[:4], strict=True)),
        dict(zip(names, parts[4:], strict=True)),
    )
    sums = sums_of(sum(queries.values()), sum(keys.values()), queries=queries, keys=keys)
    reader = Reader(sums=sums, counts=EQUAL, skip_keys=1)
    for writer, heads in (("ATTN0", names[:2]), ("L0H1", names[1:2]), ("MLP0", names[2:3])):
        found = written_by(reader, Writer(writer))
        for x, of_side in zip(found, (queries, keys), strict=True):
            whole = sum(of_side[name] for name in heads)
            torch.testing.assert_close(x, whole - whole.mean(1, keepdim=True))


def test_the_norms_term_is_its_keys_before_all_queries_and_its_queries_before_the_mean_key() -> (
    None
):
    q, k, of_q, of_k = (random_vectors(s)[:1].expand(N_FOLDS, -1, -1, -1) for s in range(4))
    sums = replace(sums_of(q, k, rope()), norm_queries=of_q, norm_keys=of_k)
    reader = Reader(sums=sums, counts=EQUAL, skip_keys=1, kept_positions=1)
    term = position_terms(reader)["norm"]
    maps = reader.mean_map(q, of_k - of_k[:, 1:].mean(1, keepdim=True)) + reader.mean_map(
        of_q - of_q[:, 1:].mean(1, keepdim=True), k[:, 1:].mean(1, keepdim=True).expand_as(k)
    )
    maps, whole = (row_centred(x, skip_keys=1) for x in (maps, reader.mean_map(q, k)))
    kept = whole.isfinite()
    part = float((maps * whole)[kept].mean() / whole[kept].square().mean().sqrt())
    assert term.part.value == pytest.approx(part, abs=1e-9)
    assert term.size.value == pytest.approx(float(maps[kept].square().mean().sqrt()), rel=1e-9)
    assert "norm" not in position_terms(replace(reader, sums=sums_of(q, k, rope())))
