"""Terms and writers of a pattern, against closed forms and known truths."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from nope_probe.analyses import positions
from nope_probe.analyses.positions import (
    TERMS,
    Reader,
    clock,
    direct_share,
    position_terms,
    term_maps,
)
from nope_probe.experiments.tables import writer_table
from nope_probe.maps.positions import PositionSums, ReaderSums, Turns

N_FOLDS, N_POS, N_HEADS, D_HEAD = 7, 13, 2, 6
CAUSAL = torch.ones(N_POS, N_POS).tril().bool()
EQUAL = torch.full((N_FOLDS,), 5)
FREQUENCIES = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)


def rope() -> Turns:
    angles = torch.arange(N_POS)[:, None] * FREQUENCIES
    pairs = torch.stack((torch.arange(3), torch.arange(3, 6)), -1)
    return Turns(pairs=pairs, cos=angles.cos(), sin=angles.sin())


def sums_of(
    q: torch.Tensor, k: torch.Tensor, turns: Turns | None = None, noise: float = 0.0, **parts: dict
) -> ReaderSums:
    """Return a reader whose scores are the products of its means, and noise."""
    left, right = (x if turns is None else turns.turned(x) for x in (q, k))
    scores = torch.einsum("fihd,fjhd->fij", left, right) * 0.5
    scores = scores + noise * torch.randn_like(scores)
    return ReaderSums(
        q=q,
        k=k,
        queries=parts.get("queries", {"embed": q}),
        keys=parts.get("keys", {"embed": k}),
        scores=scores.masked_fill(~CAUSAL, torch.nan),
        scale=0.5,
        turns=turns,
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
    assert terms["rotation"].share.value == pytest.approx(1, abs=1e-9)
    assert terms["rotation"].relative_r2.value == pytest.approx(1, abs=1e-9)
    assert terms["rotation"].non_relative.value == 0
    for name in (*TERMS[1:], "covariance"):
        assert terms[name].share.value == pytest.approx(0, abs=1e-9)
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


@pytest.mark.parametrize("turns", [None, rope()])
@pytest.mark.parametrize("counts", [EQUAL, torch.tensor([3, 9, 4, 5, 5, 2, 7])])
def test_shares_of_terms_add_up_and_those_of_writers_to_what_is_written(
    turns: Turns | None, counts: torch.Tensor
) -> None:
    parts = [random_vectors(seed) for seed in range(6)]
    queries = dict(zip(("embed", "L0H1", "MLP0"), parts[:3], strict=True))
    keys = dict(zip(("embed", "L0H1", "MLP0"), parts[3:], strict=True))
    q, k = sum(queries.values()), sum(keys.values())
    sums = sums_of(q, k, turns, noise=0.3, queries=queries, keys=keys)
    reader = Reader(sums=sums, counts=counts, skip_keys=1)
    shares = {name: term.share.value for name, term in position_terms(reader).items()}
    assert sum(shares[name] for name in TERMS) == pytest.approx(shares["mean"], abs=1e-9)
    assert shares["mean"] + shares["covariance"] == pytest.approx(shares["all"], abs=1e-9)
    assert shares["all"] == pytest.approx(1, abs=1e-12)
    table = writer_table(PositionSums(readers={3: sums}, counts=counts), 1)
    written = sum(shares[name] for name in TERMS[1:])
    assert table["share"].sum() == pytest.approx(written, abs=1e-9)
    maps = term_maps(reader)
    kept = maps["all"].isfinite()
    total = sum(maps[name] for name in (*TERMS, "covariance"))
    assert torch.allclose(total[kept], maps["all"][kept], atol=1e-9)


def test_without_noise_every_estimate_is_the_product_of_the_maps_themselves() -> None:
    q, k = (random_vectors(seed)[:1].expand(N_FOLDS, -1, -1, -1) for seed in (1, 2))
    reader = Reader(sums=sums_of(q, k, rope()), counts=EQUAL, skip_keys=2)
    maps, terms = term_maps(reader), position_terms(reader)
    kept = maps["all"].isfinite()
    whole = maps["all"][kept]
    for name in (*TERMS, "mean"):
        own = maps[name][kept]
        assert terms[name].rms.value == pytest.approx(float(own.square().mean().sqrt()), rel=1e-9)
        share = float((own * whole).sum() / whole.square().sum())
        assert terms[name].share.value == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize("n_bytes", [1, 1 << 20])
@pytest.mark.parametrize("window", [N_POS, 5])
def test_squares_of_chosen_rows_are_products_of_the_maps_of_four_different_folds(
    n_bytes: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "PAIR_BYTES", n_bytes)
    queries, key = torch.tensor([2, 5, 7, 11, 12]), torch.arange(N_POS)
    q, k = (random_vectors(seed)[:5] for seed in (1, 2))
    sums = sums_of(q, k, rope())
    hidden = queries[:, None] - key >= window
    scores = sums.scores[:, queries].masked_fill(hidden, torch.nan)
    sums = replace(sums, scores=scores, query_positions=queries)
    counts = torch.tensor([3, 5, 2, 7, 4])
    reader = Reader(sums=sums, counts=counts, skip_keys=1)
    left, right = (rope().turned(x) for x in (q, k))
    cells = (key < queries[:, None]) & (key >= 1) & ~hidden
    maps = 0.5 * torch.einsum("aihd,bjhd->abij", left[:, queries], right)
    maps = maps - (maps * cells).sum(-1, keepdim=True) / cells.sum(-1, keepdim=True).clamp_min(1)
    maps = maps * cells
    square = weight = 0.0
    for a, b, c, d in permutations(range(5), 4):
        shares = float(counts[[a, b, c, d]].prod())
        square += shares * float((maps[a, b] * maps[c, d]).sum() / cells.sum())
        weight += shares
    squares = reader.pair_squares(q, k)
    assert float(squares.whole[0]) == pytest.approx(square / weight, rel=1e-9)
    torch.testing.assert_close(reader.pair_square(q, k), squares.whole)


def test_what_goes_directly_is_the_pattern_without_the_writers_vectors() -> None:
    parts = [random_vectors(seed)[:1].expand(N_FOLDS, -1, -1, -1) for seed in range(4)]
    queries, keys = (
        dict(zip(("embed", "MLP0"), pair, strict=True)) for pair in (parts[:2], parts[2:])
    )
    q, k = sum(queries.values()), sum(keys.values())
    reader = Reader(
        sums=sums_of(q, k, rope(), queries=queries, keys=keys), counts=EQUAL, skip_keys=1
    )
    left, right = (x - reader.part(own["MLP0"], "written") for x, own in ((q, queries), (k, keys)))
    without, whole = reader.mean_map(left, right), reader.mean_map(q, k)
    kept = whole.isfinite()
    lost = 1 - (without * whole)[kept].sum() / whole[kept].square().sum()
    assert direct_share(reader, "MLP0").value == pytest.approx(float(lost), abs=1e-9)


def test_intervals_cover_the_truth_in_95_of_100_studies_and_noise_writes_nothing() -> None:
    """The truth: keys that carry a clock; a second writer brings nothing but noise."""
    clock_vectors = torch.zeros(1, N_POS, 1, D_HEAD, dtype=torch.float64)
    clock_vectors[..., 0] = torch.linspace(-1, 1, N_POS, dtype=torch.float64)[None, :, None]
    generator = torch.Generator().manual_seed(17)
    n_studies, covered, null_covered = 300, 0, 0
    for _ in range(n_studies):
        noise = torch.randn(4, N_FOLDS, N_POS, 1, D_HEAD, generator=generator, dtype=torch.float64)
        q = 0.2 * noise[0]
        q[..., 0] += 2
        keys = {"L0H0": clock_vectors + 0.2 * noise[1], "MLP0": 0.2 * noise[2]}
        k = sum(keys.values())
        scores = torch.einsum("fihd,fjhd->fij", q, k) * 0.5
        cells = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
        sums = ReaderSums(
            q=q,
            k=k,
            queries={"embed": q},
            keys=keys,
            scores=(scores + 0.2 * cells).masked_fill(~CAUSAL, torch.nan),
            scale=0.5,
        )
        reader = Reader(sums=sums, counts=EQUAL)
        readings = reader.readings("key")
        for writer, truth in (("L0H0", 1.0), ("MLP0", 0.0)):
            from nope_probe.analyses.jackknife import share

            ratio = share(reader.written_products(readings, keys[writer]), reader.square, EQUAL)
            inside = ratio.low <= truth <= ratio.high
            covered += inside * (writer == "L0H0")
            null_covered += inside * (writer == "MLP0")
    assert 0.92 <= covered / n_studies <= 0.98
    assert 0.92 <= null_covered / n_studies <= 0.98


def test_a_clock_lies_on_a_line_where_keys_differ_in_one_direction() -> None:
    k = torch.zeros(N_FOLDS, N_POS, 1, D_HEAD, dtype=torch.float64)
    k[..., 2] = torch.linspace(0, 3, N_POS, dtype=torch.float64)[None, :, None]
    dial = clock(Reader(sums=sums_of(torch.ones_like(k), k), counts=EQUAL))
    assert float(dial.explained[0]) == pytest.approx(1)
    assert torch.allclose(dial.whole[:, 0].abs(), (k[0, :, 0, 2] - 1.5).abs())
    assert torch.allclose(dial.writers["embed"], dial.whole)


def test_four_folds_are_too_few() -> None:
    q = torch.zeros(4, N_POS, 1, D_HEAD)
    with pytest.raises(ValueError, match="expected 5 folds or more, got 4"):
        Reader(sums=sums_of(q, q), counts=torch.full((4,), 3))
