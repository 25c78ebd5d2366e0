"""The first sentences and table of a run of ablate, and the terminal, from tables made by hand."""

from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nope_probe.reports.page import Headline
from nope_probe.run.folder import Run
from nope_probe.studies.ablation import page
from nope_probe.studies.losses import sources_sentence, weights_sentence
from nope_probe.studies.page import print_report
from tests.support.manifests import manifest_of

Numbers = dict[str, tuple[float, float]]  # of lead and pattern, by what is removed or measured
MANIFEST: dict[str, Any] = {
    "model": {"name": "some-model", "depth": 30},
    "layers": [0, 1],
    "positional_sources": ["mask", "rope"],
    "replacements": ["mean", "identity"],
    "removed": ["w_q", "w_k", "w_o", "w_q+w_k", "w_o+w_v"],
    "settings": {"folds": 8, "seq_len": 64, "n_seqs": 96, "data": "shipped"},
    "skip_keys": 1,
    "seconds": 3.0,
}
LOST: Numbers = {  # measured on layer 3 of SmolLM2
    "mask": (1.14, -0.08),
    "rope": (0.35, 1.02),
    "w_q": (0.09, 0.04),
    "w_k": (1.09, 0.49),
    "w_o": (1.17, -0.04),
    "w_q+w_k": (1.18, -0.03),
    "w_o+w_v": (1.17, -0.04),
}
SIZES: Numbers = {"size": (6.2, 0.96), "left": (-0.1, 0.1), "from_sources": (1.01, 1.02)}
QUESTIONS = ("lead", "pattern")


def bounds(name: str, value: float, half: float = 0.01) -> dict[str, float]:
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def tables(lost: Numbers = LOST, sizes: Numbers = SIZES) -> dict[str, pd.DataFrame]:
    """Return the tables of a run of two layers; L0 has a tenth of L1's lead and pattern."""
    rows: dict[str, list[dict[str, Any]]] = {"sources": [], "terms": [], "weights": []}
    pattern = []
    for layer, times in ((0, 0.1), (1, 1.0)):
        size = {name: times * value for name, value in zip(QUESTIONS, sizes["size"], strict=True)}
        row = {"layer": layer, "removed": "intact", "replacement": ""}
        row |= bounds("lead", size["lead"]) | bounds("amplitude", size["pattern"])
        row |= bounds("locality", -0.3) | bounds("monotonicity", 0.5)
        row |= bounds("relative_r2", 0.9) | bounds("non_relative", 0.1)
        for of, part in zip(QUESTIONS, sizes["from_sources"], strict=True):
            row |= bounds(f"{of}_from_sources", part)
        pattern.append(row)
        for place, of in enumerate(QUESTIONS):
            labels = {"layer": layer, "of": of}
            for name, values in lost.items():
                number = bounds("lost", values[place])
                if name in ("mask", "rope"):
                    rows["sources"].append({**labels, "source": name, **number})
                    continue
                of_weight = {**labels, "removed": name, **bounds("amplification", 2.0)}
                for kind, shift in (("mean", 0.0), ("identity", 0.5)):
                    loss = bounds("lost", values[place] + shift)
                    rows["weights"].append({**of_weight, "replacement": kind, **loss})
            term = bounds("share", 1.0) | bounds("size", 1.0)
            rows["terms"].append({**labels, "term": "mask", **term})
            left = bounds("share", np.nan) | bounds("size", sizes["left"][place])
            rows["terms"].append({**labels, "term": "without_sources", **left})
    effect = bounds("with_mask", 0.3) | bounds("without_mask", 0.2) | bounds("difference", 0.1)
    return {
        **{name: pd.DataFrame(some) for name, some in rows.items()},
        "pattern": pd.DataFrame(pattern),
        "non_relative": pd.DataFrame(
            [{"layer": layer, "tokens": "text", **effect} for layer in (0, 1)]
        ),
    }


def lead(given: dict[str, pd.DataFrame], **manifest: Any) -> Headline:
    return page.headline(
        page.Findings(Run(manifest=manifest_of(**MANIFEST | manifest), tables=given))
    )


def shown(
    capsys: pytest.CaptureFixture[str], given: dict[str, pd.DataFrame], verbose: bool = False
) -> list[str]:
    """Return the lines that a run prints, with single spaces."""
    run = Run(
        manifest=manifest_of(**MANIFEST), tables=given | {"offsets": pd.DataFrame({"term": []})}
    )
    print_report(page.report(run), run.manifest, Path("runs/x"), verbose)
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_the_lead_says_what_is_lost_of_the_first_keys_lead_and_of_the_pattern() -> None:
    result = lead(tables())
    assert result.sentence == (
        "Without the causal mask L1 loses the first key's lead (114%); without RoPE the order of "
        "the other keys (102%). The lead needs keys that vary (109%) and what attention writes "
        "(117%), not queries that vary (9%); the order of the others needs no queries or keys "
        "that vary: RoPE on constant ones makes it (-3%)."
    )
    assert result.table.columns.tolist() == ["L1 at 64 tokens", "first key", "other keys"]
    assert result.table.to_numpy().tolist() == [
        ["size", "leads by 6.2 nats", "0.96 nats"],
        ["left without any source", "-0.1 nats", "0.10 nats"],
        ["lost without the causal mask", "114%", "-8%"],
        ["lost without RoPE", "35%", "102%"],
        ["lost with constant queries (W_Q)", "9%", "4%"],
        ["lost with constant keys (W_K)", "109%", "49%"],
        ["lost with both constant", "118%", "-3%"],
        ["lost where attention writes a constant (W_O)", "117%", "-4%"],
    ]
    assert result.caption.startswith(
        "L1 is the strongest of L0, L1 of 30, by lead and pattern. Percent of position's part"
    )


def test_by_identity_rows_name_the_weights_and_no_sentence_speaks_of_them() -> None:
    result = lead(tables(), replacements=["identity"])
    assert result.sentence.endswith("without RoPE the order of the other keys (102%).")
    assert result.table.iloc[4].tolist() == ["lost without W_Q", "59%", "54%"]


def test_a_lead_that_a_model_has_without_sources_comes_from_the_token() -> None:
    result = lead(tables(sizes=SIZES | {"size": (5.7, 0.96), "left": (3.5, 0.1)}))
    assert result.sentence.startswith(
        "L1's lead of the first key comes mostly from the token: 3.5 nats without any source, 5.7 "
        "with them. Without RoPE L1 loses the order of the other keys (102%)."
    )


def test_a_lead_smaller_than_half_the_pattern_has_rows_and_no_sentence() -> None:
    result = lead(tables(sizes=SIZES | {"size": (0.4, 0.96)}))
    assert "first key" not in result.sentence
    assert result.table.iloc[0].tolist() == ["size", "leads by 0.4 nats", "0.96 nats"]
    behind = lead(tables(sizes=SIZES | {"size": (-6.2, 0.96)}))
    assert behind.table.iloc[0, 1] == "trails by 6.2 nats"


def around(value: float, half: float = 0.02) -> tuple[float, float, float]:
    return value, value - half, value + half


def test_where_one_source_is_needed_for_both_or_none_is_the_sentence_says_so() -> None:
    made = {"lead": around(0.97), "pattern": around(1.01)}
    both = {"lead": {"mask": around(0.9)}, "pattern": {"mask": around(0.8)}}
    sources = ["mask", "rope"]
    assert sources_sentence(2, both, sources, made) == (
        "Without the causal mask L2 loses both the first key's lead (90%) and the order of the "
        "other keys (80%)."
    )
    alone = sources_sentence(2, both, ["mask"], made)
    assert alone == (
        "The causal mask alone makes L2's lead of the first key (97%) and the order of its other "
        "keys (101%)."
    )
    of_vectors = sources_sentence(2, {"pattern": both["pattern"]}, ["mask"], made)
    assert of_vectors == "The causal mask alone makes L2's positional pattern (101%)."
    within_noise = made | {"lead": (nan, nan, nan)}
    assert sources_sentence(2, both, ["mask"], within_noise) == of_vectors
    none = {"lead": {"mask": around(0.4)}, "pattern": {"rope": around(0.6, 0.2)}}
    assert sources_sentence(2, none, sources, made) == (
        "No source alone is needed for the first key's lead of L2. No source alone is needed for "
        "the order of the other keys of L2."
    )
    assert sources_sentence(2, {}, sources, made) == ""


def test_what_intervals_leave_open_is_not_said() -> None:
    clear = {"w_q": around(0.0), "w_k": around(1.0), "w_o": around(1.0)}
    sentence = "keys that vary (100%) and what attention writes (100%), not queries that vary (0%)."
    assert weights_sentence({"lead": clear}) == f"The lead needs {sentence}"
    assert weights_sentence({"pattern": clear}) == f"The order of the others needs {sentence}"
    assert weights_sentence({"lead": clear | {"w_q": around(0.25)}}) == ""
    assert weights_sentence({"lead": {"w_q": around(0.0)}}) == "", "W_K was not removed"


def test_noise_is_not_called_a_pattern() -> None:
    given = tables()
    given["pattern"][["amplitude_low"]] = -1.0
    result = lead(given)
    assert "some-model shows no positional pattern" in result.sentence
    assert result.table.empty


def test_the_terminal_shows_sentence_table_and_path_and_all_else_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, tables())
    assert len(lines) < 20
    assert lines[-1] == "open runs/x/report.html"
    row = "1, lead, mask 114.0% [113.0, 115.0]"
    assert row not in lines
    lines = shown(capsys, tables(), verbose=True)
    assert row in lines
    assert any(line.startswith("Layers and heads count from 0") for line in lines)
    assert lines[-1] == "open runs/x/report.html"
