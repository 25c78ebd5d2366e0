"""What tables say in words: verdict and values of a run of ablate, costs, and the terminal."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.finished_runs import assert_numbers_are_cells

from nope_probe import Run, UserError
from nope_probe.figures.words import bound_columns
from nope_probe.reports.page import Headline, captions, run_notes
from nope_probe.studies import ablate, ablate_page, behaviour
from nope_probe.studies.circuit import preference
from nope_probe.studies.page import print_report
from tests.support.manifests import manifest_of

MANIFEST: dict[str, Any] = {
    "model": {"name": "some-model", "depth": 30},
    "layers": [0, 1],
    "positional_sources": ["mask", "rope"],
    "replacements": ["mean"],
    "conditions": ["intact", "mask", "rope", "mask+rope", "w_q", "w_k", "w_q+w_k", "w_o"],
    "removed": ["w_q", "w_k", "w_q+w_k", "w_o"],
    "settings": {"folds": 8, "seq_len": 64, "n_seqs": 96, "data": "shipped"},
    "skip_keys": 1,
    "seconds": 3.0,
}
NOISE = "within noise"
VALUES = {  # measured on L3 of SmolLM2: lead and kept
    "intact": (6.16, 0.95),
    "mask": (-0.98, 1.02),
    "rope": (4.02, -0.03),
    "mask+rope": (-0.07, -0.01),
    "w_q": (5.66, 0.93),
    "w_k": (-0.59, 0.51),
    "w_q+w_k": (-1.12, 1.01),
    "w_o": (-0.92, 1.01),
}


def bounds(name: str, value: float, half: float = 0.01) -> dict[str, float]:
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def tables(
    values: dict[str, tuple[float, float]] = VALUES, replacement: str = "mean"
) -> dict[str, pd.DataFrame]:
    """Return the tables of a run of two layers; L0 has a tenth of L1's lead and pattern."""
    pattern, means = [], []
    for removed, (lead, kept) in values.items():
        named = {"removed": removed, "replacement": replacement if "w_" in removed else "none"}
        means.append(
            named
            | bounds("lead", lead / 2)
            | bounds("order", kept / 2)
            | bounds("not_by_distance", 0.05)
            | bounds("loss", 3.0)
            | bounds("cost", math.nan if "mask" in removed else 0.5 * (removed != "intact"))
        )
        for layer, times in ((0, 0.1), (1, 1.0)):
            row = {"layer": layer, **named, **bounds("lead", times * lead)}
            row |= bounds("amplitude", times * 0.95) | bounds("order", times * kept)
            row |= bounds("locality", -0.3) | bounds("monotonicity", 0.5)
            rest = 0.0 if removed in ("mask+rope", "w_o") else 0.2 - 0.1 * layer
            pattern.append(row | bounds("relative_r2", 0.9) | bounds("not_by_distance", rest))
    of = [{"layer": layer, "of": "lead", "term": "mask"} | bounds("size", 1.0) for layer in (0, 1)]
    return {
        "pattern": pd.DataFrame(pattern).sort_values("layer", kind="stable"),
        "over_layers": pd.DataFrame(means),
        "terms": pd.DataFrame(of),
    }


def lead(given: dict[str, pd.DataFrame], **manifest: Any) -> Headline:
    return ablate_page.headline(Run(manifest=manifest_of(**MANIFEST | manifest), tables=given))


def test_the_verdict_has_a_row_for_each_number_with_counts_of_layers() -> None:
    result = lead(tables())
    assert result.table.columns.tolist() == ["", "made by", "carried by"]
    assert result.table.to_numpy().tolist() == [
        ["first key's lead", "mask (2 of 2)", "W_K, W_O"],
        ["order of other keys", "RoPE (2 of 2)", "none"],
        ["not by distance", "mask + RoPE, either (2 of 2)", "W_O"],
    ]


def test_the_verdict_has_the_answer_of_the_layer_whose_values_are_shown() -> None:
    given = tables(VALUES | {"w_k": (-0.59, 0.31)})
    pattern = given["pattern"]
    others = [pattern[pattern["layer"] == 0].assign(layer=layer) for layer in (2, 3)]
    is_own = (pattern["layer"] == 1) & pattern["removed"].isin(["mask", "mask+rope"])
    for name, value in bounds("lead", 6.0).items():
        pattern.loc[is_own, name] = value
    given["pattern"] = pd.concat([pattern, *others])
    result = lead(given, layers=[0, 1, 2, 3])
    assert result.table.to_numpy().tolist()[:2] == [
        ["first key's lead", "mask (3 of 4)\nthe first token itself (1 of 4: L1)", "W_K, W_O"],
        ["order of other keys", "RoPE (4 of 4)", "W_K alone"],
    ], "the values are of L1, and with constant queries too the order stays"
    of_all = {"settings": MANIFEST["settings"] | {"layers": "all"}}
    result = lead(given, layers=[0, 1, 2, 3], **of_all)
    assert result.table.iloc[0, 1] == "mask (3 of 4)", "the values are means"


def test_each_number_stands_at_the_layer_where_it_is_largest() -> None:
    result = lead(tables()).then
    assert result.table.columns.tolist() == [
        "nats ±95%",
        "first key's\nlead (L1)",
        "order of\nother keys\n(L1)",
        "not by\ndistance (L0)",
        "cost",
    ]
    assert result.table.to_numpy().tolist() == [
        ["intact", "6.16±0.01", "0.95±0.01", "0.20±0.01", "0 of 3.00"],
        ["without the causal mask", "-0.98±0.01", "1.02±0.01", "0.20±0.01", ""],
        ["without RoPE", "4.02±0.01", "-0.03±0.01", "0.20±0.01", "0.50±0.01"],
        ["without mask + RoPE", "-0.07±0.01", "-0.01±0.01", NOISE, ""],
        ["with constant queries (W_Q)", "5.66±0.01", "0.93±0.01", "0.20±0.01", "0.50±0.01"],
        ["with constant keys (W_K)", "-0.59±0.01", "0.51±0.01", "0.20±0.01", "0.50±0.01"],
        ["with constant queries and keys", "-1.12±0.01", "1.01±0.01", "0.20±0.01", "0.50±0.01"],
        ["attention writes a constant (W_O)", "-0.92±0.01", "1.01±0.01", NOISE, "0.50±0.01"],
    ]


def test_few_texts_in_a_half_are_noted_where_written_position_is_removed() -> None:
    few, many = (manifest_of(fold_sizes=(n, n + 1) * 4, conditions=["written"]) for n in (11, 12))
    assert "from 44 sequences a half" in run_notes(few)[0]
    assert run_notes(many) == run_notes(replace(few, results={})) == []


def test_a_run_of_all_layers_shows_their_mean() -> None:
    result = lead(tables(), settings=MANIFEST["settings"] | {"layers": "all"})
    assert result.table.iloc[0].tolist()[1] == "mask (2 of 2)"
    means = result.then.table
    assert [*means][:2] == ["nats ±95%", "first key's\nlead (mean)"]
    assert means.iloc[0].tolist()[1:] == ["3.08±0.01", "0.47±0.01", "0.05±0.01", "0 of 3.00"]


def test_noise_and_what_was_not_measured_are_said_in_words() -> None:
    given = tables()
    given["pattern"]["not_by_distance_low"] = -0.1
    given["pattern"].loc[:, ["order", *bound_columns("order")]] = math.nan
    given["over_layers"] = given["over_layers"].drop(columns=["loss", "cost", "order"])
    result = lead(given, removed=[])
    assert result.table.to_numpy().tolist() == [
        ["first key's lead", "mask (2 of 2)"],
        ["order of other keys", NOISE],
        ["not by distance", NOISE],
    ], "nothing but sources was removed"
    assert result.sentence == captions("ablate")["nothing"]
    values = result.then
    assert values.table.iloc[1].tolist()[1:] == ["-0.98±0.01", NOISE]
    assert "cost" not in values.table


def test_another_replacement_is_named_and_a_first_key_that_trails_is_said_to() -> None:
    values = {"intact": (-8.2, 5.2), "mask": (-1.0, 0.02), "w_k": (0.0, 0.1), "w_q+w_k": (0, 0.1)}
    conditions = {"conditions": [*values], "removed": ["w_k", "w_q+w_k"]}
    result = lead(tables(values, "identity"), positional_sources=["mask"], **conditions)
    assert result.table.iloc[0].tolist() == [
        "first key's lead\n(trails in 2 of 2)",
        "mask (2 of 2)",
        "W_K",
    ]
    values = result.then.table
    assert values.iloc[0, 1] == "-8.20±0.01"
    of_circuit = "with the query-key circuit (W_Q with W_K) replaced by identity"
    assert values.iloc[2:, 0].tolist() == ["with W_K replaced by identity", of_circuit]


def test_what_makes_a_number_in_each_layer_is_a_table() -> None:
    given = tables()
    given["pattern"].loc[given["pattern"]["layer"] == 0, "order_low"] = -1.0
    section = ablate_page.maker_section(Run(manifest=manifest_of(**MANIFEST), tables=given))
    assert section.table.to_numpy().tolist() == [
        ["L0", "mask", NOISE, "mask + RoPE, either"],
        ["L1", "mask", "RoPE", "mask + RoPE, either"],
    ]


def test_a_term_is_flat_in_the_layers_in_which_it_is_within_its_noise() -> None:
    given = tables()
    given["terms"].loc[given["terms"]["layer"] == 1, "size_low"] = -1.0
    assert ablate_page.flat_layers(given) == {"intact": [], "mask": [1]}


def test_the_answer_of_a_run_is_a_frame_and_other_runs_have_none() -> None:
    run = Run(manifest=manifest_of(**MANIFEST), tables=tables())
    assert run.answer["made_by"].tolist() == ["mask", "rope", "mask+rope"]
    assert run.answer["carried_by"].tolist() == ["w_k, w_o", "", "w_o"]
    with pytest.raises(UserError, match="only a run of ablate that removes the sources"):
        replace(run, tables={}).answer  # noqa: B018


def test_the_terminal_shows_sentence_table_and_path_and_all_else_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    maps = defaultdict(lambda: np.zeros((2, 5, 5)))
    run = Run(manifest=manifest_of(**MANIFEST), tables=tables(), arrays={"maps": maps})
    for verbose in (False, True):
        print_report(ablate.report(run), run.manifest, Path("runs/x"), verbose)
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert len(lines) <= 36 or verbose
        assert ("1, lead, mask 1 [0.99, 1.01]" in lines) == verbose
        assert any(line.startswith("Layers and heads count from 0") for line in lines) == verbose
        assert lines[-1] == "open runs/x/report.html"


Estimate = tuple[float, float, float]
CLEAR = (0.9, 0.8, 1.0)
MINUS = (-0.5, -0.7, -0.3)
NOISY = (0.3, -0.1, 0.7)
NONE = (np.nan, np.nan, np.nan)


def cells(column: str, estimate: Estimate) -> dict[str, float]:
    return dict(zip((column, f"{column}_low", f"{column}_high"), estimate, strict=True))


@pytest.mark.parametrize(
    ("locality", "said"),
    [
        (CLEAR, "near (+0.90±0.10)"),
        (MINUS, "far (-0.50±0.20)"),
        (NOISY, "neither (+0.30±0.40)"),
        (NONE, "no order"),
    ],
)
def test_keys_are_preferred_where_the_interval_says_so(locality: Estimate, said: str) -> None:
    assert preference(cells("locality", locality)) == said


def costs(measure: str, **differences: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Return rows of `behaviour.csv`, given the differences by what is removed."""
    whole = {"replacement": "none", "value": 2.5, "value_low": 2.0, "value_high": 3.0, "note": ""}
    whole |= cells("beyond_null", NONE)
    return [
        {"measure": measure, "removed": name, **whole, **cells("difference", estimate)}
        for name, estimate in {"intact": NONE, **differences}.items()
    ]


def headline_of(rows: list[dict[str, Any]]) -> Headline:
    tables = {"behaviour": pd.DataFrame(rows), "decodability": pd.DataFrame({"chance": [31.7]})}
    return behaviour.headline(Run(manifest=manifest_of(model={"name": "m"}), tables=tables))


def test_the_largest_change_of_behaviour_is_a_cell_of_its_table() -> None:
    mask, rope, both = (0.25, 0.125, 0.5), (2.0, 1.5, 2.5), (3.0, 2.5, 3.5)
    suffix = costs("loss_suffix", mask=mask, rope=rope, **{"mask+rope": both})
    lead = headline_of(suffix)
    assert lead.table is not None
    assert lead.table.to_numpy().tolist() == [
        ["intact", "0 of 2.50"],
        ["without the causal mask", "0.25±0.25"],
        ["without RoPE", "2.00±0.50"],
        ["without mask + RoPE", "3.00±0.50"],
    ]
    assert_numbers_are_cells(lead)
    assert "changes most, by 2.00±0.50 nats: without RoPE." in lead.sentence
    # Of a mask that is removed the loss is unknown, and a null is taken off written position alone.
    written = costs("loss", mask=NONE, written=(0.3, 0.2, 0.4), written_null=(9.0, 8.0, 9.9))
    beyond = {"beyond_null": 0.25, "beyond_null_low": 0.125, "beyond_null_high": 0.375}
    rows = [row | (beyond if row["removed"] == "written" else {}) for row in written]
    lead = headline_of([*rows, *costs("loss_suffix", mask=mask)])
    assert lead.table is not None
    assert lead.table.iloc[:, :2].to_numpy().tolist() == [
        ["intact", "0 of 2.50"],
        ["without the causal mask", ""],
        ["without written position", "0.25±0.12"],
    ]
    assert [*lead.table][1] == "cost"
    only_mask = headline_of([*costs("loss", mask=NONE), *costs("loss_suffix", mask=mask)])
    assert "the suffix loss changes most, by 0.25±0.25" in only_mask.sentence


def test_a_guess_of_the_position_stands_next_to_its_error() -> None:
    table = headline_of(costs("position", rope=(2.0, 1.5, 2.5))).table
    assert table is not None
    assert [*table] == ["nats ±95%", "position\nerror\n(chance 31.7)"]
