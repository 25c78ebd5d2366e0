"""The `attention` command: its table, groups of layers, ablations, sentences and page."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.chromium import needs_chromium, opened
from support.command_line import refused, run_command
from support.rounding import MEASURE
from support.tiny_models import plain

from nope_probe import (
    Ablation,
    ablated,
    attention,
    capture_attention,
    load,
    read_run,
    run_attention,
    sequences,
    split_attention,
)
from nope_probe.analyses.jackknife import Interval, jackknife
from nope_probe.experiments.attention import sections, settings
from nope_probe.figures.attention import attention_heads
from nope_probe.figures.intervals import bound_columns
from nope_probe.models.names import CHECKPOINTS

SIZES = {"n_seqs": 23, "seq_len": 19, "folds": 5, "layers": 2}
SMALL = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", value)]
PARTS = ("first_position", "first_content", "others_position", "others_content")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return run_attention("rope-tiny", **SIZES).tables["attention"]


def test_the_table_has_the_split_of_every_head(table: pd.DataFrame) -> None:
    loaded = load("rope-tiny", n_layers=2)
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=23, seq_len=19)
    heads = split_attention(capture_attention(loaded.model, data, n_folds=5))
    assert [*zip(table["layer"], table["head"], strict=True)] == [*heads]
    for row, split in zip(table.to_dict("records"), heads.values(), strict=True):
        for name in ("information", *PARTS, "first_weight", "positional_share", "pattern_missed"):
            part = getattr(split, name)
            interval = part if isinstance(part, Interval) else jackknife(part)
            expected = (interval.value, interval.low, interval.high)
            found = [row[column] for column in (name, *bound_columns(name))]
            assert found == pytest.approx(expected, nan_ok=True)
    added = table[list(PARTS)].sum(axis=1)
    np.testing.assert_allclose(added, table["information"], rtol=0, atol=3e-7)  # 8 digits


def test_information_is_that_of_plain_transformers_weights(table: pd.DataFrame) -> None:
    """The mean over texts and queries of 8 keys or more: log n + sum a log a, of two choices."""
    loaded = load("rope-tiny", n_layers=2)
    tokens = sequences(tokenizer=loaded.tokenizer, n_seqs=23, seq_len=19).inputs
    with torch.inference_mode():
        layers = plain(CHECKPOINTS["rope-tiny"])(tokens, output_attentions=True).attentions
    for row in table.itertuples():
        whole, at_first, first = [], [], []
        for weights in layers[row.layer][:, row.head].double():
            for query in range(7, 19):
                keys, n = weights[query, : query + 1], query + 1
                a = float(keys[0])
                whole.append(math.log(n) + float(torch.special.xlogy(keys, keys).sum()))
                at_first.append(a * math.log(a * n) + (1 - a) * math.log((1 - a) * n / (n - 1)))
                first.append(a)
        assert row.information == pytest.approx(np.mean(whole), rel=MEASURE)
        assert row.first_weight == pytest.approx(np.mean(first), rel=MEASURE)
        found = row.first_position + row.first_content
        assert found == pytest.approx(np.mean(at_first), rel=MEASURE)


def test_layers_read_one_at_a_time_give_the_same_table(
    table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "MAP_BYTES", 1)
    one_by_one = run_attention("rope-tiny", **SIZES).tables["attention"]
    pd.testing.assert_frame_equal(one_by_one, table)


def test_a_removal_is_that_of_ablated(table: pd.DataFrame) -> None:
    removed = run_attention("rope-tiny", remove="rope", **SIZES).tables["attention"]
    assert not np.allclose(removed["information"], table["information"], rtol=0.01)
    loaded = load("rope-tiny", n_layers=2)
    with ablated(loaded.model, Ablation(remove=["rope"])):
        inside = run_attention(loaded, n_seqs=23, seq_len=19, folds=5).tables["attention"]
    pd.testing.assert_frame_equal(inside, removed)


def test_weights_of_the_run_are_the_mean_weights(tmp_path: Path) -> None:
    run_command(attention, *SMALL, "--query-rows", 7, "--out", tmp_path / "run")
    run, loaded = read_run(tmp_path / "run"), load("rope-tiny", n_layers=2)
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=23, seq_len=19)
    maps = capture_attention(loaded.model, data, n_folds=5, query_rows=7)
    np.testing.assert_allclose(run.maps["weights"], maps.mean, rtol=0, atol=1e-6)
    assert run.query_positions.tolist() == maps.query_positions.tolist()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seq-len", 7], "take --seq-len 8 or more"),
        (["--remove", "values"], "--remove: "),
        (["--remove", "rope", "--gain", "norm"], "--gain has no effect"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[object], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capfd, tmp_path / "here", attention, *flags)


def made(**columns: list[float]) -> pd.DataFrame:
    """Return a table of heads in L1, with bounds 0.01 below and above."""
    table = pd.DataFrame({"layer": 1, "head": range(len(next(iter(columns.values()))))})
    for name, values in columns.items():
        low, high = bound_columns(name)
        table = table.assign(**{name: values})
        table = table.assign(**{low: table[name] - 0.01, high: table[name] + 0.01})
    return table


def test_the_lead_counts_positional_heads_and_lists_what_they_do() -> None:
    heads = made(
        information=[2.0, 1.0, 1.0],
        others_position=[1.5, 0.2, 0.001],
        positional_share=[0.9, 0.3, 0.1],
        first_weight=[0.2, 0.6, 0.4],
        pattern_missed=[0.1, 0.7, 0.9],
    )
    lead = sections.lead("m", heads)
    assert lead.sentence == (
        "1 of 3 heads of m attend mostly by position, 1 mostly by content; the first key gets 40% "
        "of the weight (median)."
    )
    assert lead.table.to_dict("list") == {
        "head": ["L1H0", "L1H1"],
        "by position, nats": ["1.50 [1.49, 1.51]", "0.20 [0.19, 0.21]"],
        "positional": ["90% [89, 91]", "30% [29, 31]"],
        "on first key": ["20% [19, 21]", "60% [59, 61]"],
        "missed": ["10% [9, 11]", "70% [69, 71]"],
    }
    assert sections.lead("m", heads.assign(others_position_low=-1.0)).table.empty


def test_the_map_draws_share_information_and_the_first_key() -> None:
    heads = made(
        information=[4.0, 1.0], positional_share=[0.9, float("nan")], first_weight=[0.0, 0.5]
    )
    rings, dots = attention_heads(heads).data
    assert dots.x.tolist() == [0, 1]
    assert dots.y.tolist() == [1, 1]
    assert dots.marker.color.tolist() == [0.9, 0.0]
    sizes = np.array(dots.marker.size) - 4  # of the smallest head
    assert sizes[0] == pytest.approx(2 * sizes[1])  # areas as information
    assert rings.marker.line.width.tolist() == [0, 2]


def test_heads_that_never_see_8_keys_are_left_out() -> None:
    columns = ("information", "positional_share", "first_weight", "others_position")
    heads = made(**{name: [float("nan"), 0.5] for name in (*columns, "pattern_missed")})
    assert attention_heads(heads).data[1].x.tolist() == [1]
    none = heads[:1]
    assert not len(attention_heads(none).data[1].x)
    known = none.dropna(subset=["information"])
    assert "no head is measured" in sections.lead("m", known).sentence


CLICK = """<script>setTimeout(() => {
  const plot = document.querySelector(".plot");
  plot.emit("plotly_click", { points: [{ x: 3, y: 1 }] });
  document.body.dataset.opened = document.querySelector(".large strong")?.textContent ?? "closed";
}, 3000)</script></body>"""


@needs_chromium
def test_a_click_on_a_head_opens_its_map(tmp_path: Path) -> None:
    run_command(attention, *SMALL, "--out", tmp_path / "run")
    html = (tmp_path / "run" / "report.html").read_text().replace("</body>", CLICK)
    elements = opened(html, tmp_path)
    assert re.search(r'<body[^>]*data-opened="L1H3: [0-9.]+ nats above uniform"', elements)
