"""Captured maps: what they say of themselves, in words and in notebooks."""

from base64 import b64decode
from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import plotly.io as pio
import pytest
import torch
from support.rounding import MEASURE

from nope_probe import (
    Ablation,
    UserError,
    attribute,
    calibrate,
    capture_attention,
    capture_need,
    capture_scores,
    capture_stages,
    gaussian,
    load,
    measure,
    measure_heads,
    row_centred,
    sequences,
    simulate_scores,
    split_attention,
)
from nope_probe.figures.maps import score_maps
from nope_probe.maps.rows import pattern_rms

TOKENS = torch.randint(3, 99, (23, 11), generator=torch.Generator().manual_seed(0))
BEGUN = torch.nn.functional.pad(TOKENS[:, 1:], (1, 0), value=1)


def test_captures_know_whether_their_sequences_begin_alike(rope_tiny: Any) -> None:
    for capture in (capture_scores, capture_stages):
        assert not capture(rope_tiny.model, TOKENS, n_folds=4).bos
        assert capture(rope_tiny.model, BEGUN, n_folds=4).bos
        assert not capture(rope_tiny.model, BEGUN[:1], n_folds=1).bos


def test_one_key_counts_as_first_in_maps_of_tokens_and_none_in_maps_of_vectors(
    rope_tiny: Any,
) -> None:
    with_bos, without = (
        capture_scores(rope_tiny.model, item, n_folds=4) for item in (BEGUN, TOKENS)
    )
    for maps in (with_bos, without):
        assert repr(measure(maps)) == repr(measure(maps, 1)) != repr(measure(maps, 0))
        assert not isnan(measure(maps)[1].lead.value)
    folds, counts = with_bos.folds, with_bos.counts
    assert repr(measure(folds, counts=counts)) == repr(measure(with_bos, 0))
    inputs = gaussian(n_seqs=8, seq_len=11, d_model=64, alpha=0.3)
    vectors = capture_scores(load("parameter-free").model, inputs, n_folds=4)
    assert repr(measure(vectors)) == repr(measure(vectors, 0))
    assert all(isnan(layer.lead.value) for layer in measure(vectors).values())
    for maps, skip in ((with_bos, 1), (without, 1), (vectors, 0)):
        both = {(): maps, "mask": maps}
        assert repr(attribute(both)) == repr(attribute(both, skip_keys=skip))


def test_colours_of_score_maps_leave_out_the_bos_key(rope_tiny: Any) -> None:
    maps = capture_scores(rope_tiny.model, BEGUN, n_folds=4)
    for skip in (1, 0, 3):
        cells = maps.mean[1, :, skip:]
        cells = cells[cells.isfinite()]
        limits = score_maps(replace(maps, skip_keys=skip), clipped=0.0).layout.coloraxis2
        assert (limits.cmin, limits.cmax) == pytest.approx((float(cells.min()), float(cells.max())))


def test_the_rms_of_a_pattern_is_that_of_its_rows_less_their_means() -> None:
    maps = torch.randn(2, 7, 7, dtype=torch.float64)
    rows = [maps[:, i, 2:i] - maps[:, i, 2:i].mean(-1, keepdim=True) for i in range(3, 7)]
    expected = torch.cat(rows, -1).square().mean(-1).sqrt()
    torch.testing.assert_close(pattern_rms(maps, 2), expected)


def test_the_map_of_a_head_is_found_by_the_numbers_of_its_layer_and_head(rope_tiny: Any) -> None:
    maps = capture_scores(rope_tiny.model, BEGUN, layers=[1], n_folds=4, per_head=True)
    assert maps.per_head is not None
    counts = [6, 6, 6, 5]  # 23 sequences in turn
    for head in range(4):
        by_hand = sum(n * maps.per_head[fold, 0, head] for fold, n in enumerate(counts)) / 23
        of_head = maps.head(1, head)
        assert of_head.names == (f"L1H{head}",)
        torch.testing.assert_close(of_head.mean[0], by_hand, equal_nan=True, check_dtype=False)
        assert repr(measure(of_head)[1]) == repr(measure_heads(maps)[1, head])
        torch.testing.assert_close(maps.heads[0, head], by_hand, equal_nan=True)
    torch.testing.assert_close(
        maps.heads.mean(1).double(), maps.mean.double(), equal_nan=True, rtol=MEASURE, atol=1e-5
    )
    with pytest.raises(UserError, match=r"^no L0H2; there are L1H0 to L1H3$"):
        maps.head(0, 2)
    without = capture_scores(rope_tiny.model, BEGUN, n_folds=4)
    for ask in (lambda: without.heads, lambda: without.head(0, 2)):
        with pytest.raises(UserError, match=r"no heads: capture_scores\(..., per_head=True\)"):
            ask()


def test_the_attention_of_a_head_keeps_its_name_and_all_that_is_known_of_it(rope_tiny: Any) -> None:
    maps = capture_attention(rope_tiny, BEGUN, n_folds=4)
    head = maps.head(1, 3)
    assert (head.names, [*head.heads]) == (("L1H3",), [3])
    assert repr(head).startswith("AttentionMaps: L1H3, 11 queries × 11 keys\n")
    for name in ("weights", "information", "others", "scores"):
        whole, of_head = (getattr(of, name) for of in (maps, head))
        torch.testing.assert_close(of_head[:, 0, 0], whole[:, 1, 3], equal_nan=True)
    again = head.head(1, 3)
    torch.testing.assert_close(again.weights, head.weights)
    for of, others in ((maps, "L0H0 to L1H3"), (head, "L1H3 to L1H3")):
        with pytest.raises(UserError, match=f"^no L1H4; there are {others}$"):
            of.head(1, 4)


def test_a_result_is_a_table_of_its_cells_and_a_few_short_lines(rope_tiny: Any) -> None:
    maps = capture_scores(rope_tiny, BEGUN, n_folds=4, per_head=True, query_rows=5)
    attention = capture_attention(rope_tiny, BEGUN, n_folds=4)
    stages, needs = (
        capture_stages(rope_tiny, BEGUN, n_folds=4),
        capture_need(rope_tiny, BEGUN, "mask"),
    )
    vectors = load("parameter-free").model
    simulated = simulate_scores(vectors, alpha=0.3, seq_len=7, n_samples=256).best
    results = (maps, maps.head(1, 2), attention, attention.head(1, 2), stages, needs, simulated)
    for result in (*results, split_attention(attention), measure(maps)):
        lines = repr(result).splitlines()
        assert len(lines) <= 10, lines
        assert "tensor" not in repr(result)
    assert len(repr(calibrate(rope_tiny, BEGUN))) < 300
    frame = maps.to_frame()
    assert [*frame] == ["layer", "query", "key", "score"]
    rows = maps.query_positions.tolist()
    assert len(frame) == 2 * sum(row + 1 for row in rows)
    cell = frame.query(f"layer == 1 and query == {rows[2]} and key == 1")["score"].item()
    assert cell == pytest.approx(float(maps.mean[1, 2, 1]))
    of_head = maps.head(1, 2).to_frame()
    assert of_head[["layer", "head"]].drop_duplicates().to_numpy().tolist() == [[1, 2]]
    assert of_head["score"].iloc[-1] == pytest.approx(float(maps.heads[1, 2, -1, rows[-1]]))
    weights = attention.to_frame().set_index(["layer", "head", "query", "key"])["weight"]
    assert weights[1, 3, 7, 2] == pytest.approx(float(attention.mean[1, 3, 7, 2]))
    assert len(weights) == 2 * 4 * 66, "visible cells alone"
    assert weights.groupby(level=[0, 1, 2]).sum().to_numpy() == pytest.approx(1, abs=MEASURE)
    need = needs.to_frame().set_index(["layer", "head"])["need"]
    assert need[1, 2] == pytest.approx(float(needs.mean[1, 2]))
    of_stages = stages.to_frame().set_index(["stage", "row", "column"])["value"]
    assert of_stages["c", 7, 2] == pytest.approx(float(stages.mean("c")[7, 2]))
    score = simulated.to_frame().set_index(["layer", "query", "key"])["score"]
    assert score[2, 5, 3] == pytest.approx(float(simulated.mean[2, 5, 3]))


def test_what_stands_at_the_end_of_a_cell_is_a_figure_or_one_or_two_lines(
    rope_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sequences(tokenizer=rope_tiny.tokenizer, n_seqs=23, seq_len=11)
    maps = capture_scores(rope_tiny, data, n_folds=4)
    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    shown = maps._repr_mimebundle_(include=None, exclude=None)
    assert shown["text/plain"] == repr(maps)
    assert "Plotly.newPlot" in shown["text/html"]  # which nbconvert keeps
    displayed: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: displayed.append(bundle))
    score_maps(maps)._ipython_display_()
    assert {"application/vnd.plotly.v1+json", "text/html"} <= {*displayed[-1]}
    figure = shown["application/vnd.plotly.v1+json"]
    drawn = [trace for trace in figure["data"] if trace["coloraxis"] == "coloraxis"]
    strips = [trace for trace in figure["data"] if trace["coloraxis"] == "coloraxis2"]
    assert len(drawn) == len(strips) == 2  # layers; the first key's lead has a strip in each
    for trace, pattern in zip(drawn, row_centred(maps.mean, 1), strict=True):
        cells = np.tril(np.ones((11, 11), bool), -1)
        cells[:, 0] = False  # the lead, on a scale of its own
        z = np.frombuffer(b64decode(trace["z"]["bdata"]), trace["z"]["dtype"]).reshape(11, 11)
        np.testing.assert_allclose(z[cells], pattern.numpy()[cells], rtol=MEASURE, atol=1e-6)
    needs = capture_need(rope_tiny, data, "mask")
    largest = needs.mean.max()
    assert f"L{needs.mean.argmax() // 4}H{needs.mean.argmax() % 4}: {largest:.3g}" in repr(needs)
    assert repr(data).startswith("Sequences: 23 of 11 tokens, shipped, of 23 documents; all begin")
    assert repr(gaussian(n_seqs=3, seq_len=5, d_model=7)).startswith("Sequences: 3 of 5 vectors")
    given = Ablation(remove="w_q", layers=[1], replacement=torch.zeros(2, 3))
    assert repr(given) == "Ablation(remove=['w_q'], layers=[1], replacement=Tensor [2, 3])"
    assert repr(Ablation(remove=["mask"])) == "Ablation(remove=['mask'])"
    for value in (rope_tiny, data, needs, given):
        assert repr(value).count("\n") <= 1
