"""What lead and pattern lose without a writer's position, against exact parts and plain models."""

from typing import Any

import pandas as pd
import pytest
import torch
from support.edited_model import attention_inputs, projections
from support.models_by_hand import bos_reader
from support.rounding import NETWORK
from support.tiny_models import N_POS, ByName, ModelOf, tokens

from nope_probe import capture_scores, measure
from nope_probe.hooks.layers.model import layers_of
from nope_probe.studies.engine import Engine
from nope_probe.studies.tables import term_table, writer_table
from nope_probe.studies.trace_run import direct_parts, measure_effects

N_FOLDS = 5
QUESTIONS = ("lead", "pattern")


def effects(
    model: Any, text: torch.Tensor, reader: str, *, kept_positions: int = 0, n_heads: int = 6
) -> pd.DataFrame:
    engine = Engine(
        model=model, inputs=text, n_folds=N_FOLDS, skip_keys=1, kept_positions=kept_positions
    )
    layers = [layer.index for layer in layers_of(model)]
    sums = engine.positions("positions", layers=layers, per_head="H" in reader)
    return measure_effects(engine, sums, writer_table(sums), reader, n_heads=n_heads)


def test_one_run_without_a_writer_serves_lead_and_pattern(
    bridge: ByName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every earlier attention and MLP has a run on all paths, and a run on the direct path."""
    keys, scores = list[str](), Engine.scores

    def record(engine: Engine, key: str, *args: Any, **options: Any) -> Any:
        assert options["layers"] == [2]
        keys.append(str(key).removeprefix("effects-"))
        return scores(engine, key, *args, **options)

    monkeypatch.setattr(Engine, "scores", record)
    text = tokens(7, seed=3).repeat_interleave(N_FOLDS, 0)
    table = effects(bridge("smollm3"), text, "L2", n_heads=0)
    writers = ["embed", "ATTN0", "MLP0", "ATTN1", "MLP1"]
    assert keys == ["intact", *(f"{name}{to}" for name in writers for to in ("", "-to-L2"))]
    assert list(zip(table["of"], table["writer"], strict=True)) == [
        (question, writer) for question in QUESTIONS for writer in writers
    ]


@pytest.mark.hooked_transformer
@pytest.mark.parametrize("kept", [0, 1])
def test_a_clock_built_by_hand_loses_all_without_the_head_that_writes_it(kept: int) -> None:
    """The first token keeps its position where all texts begin with it: no loss of the lead."""
    text = torch.randint(1, 17, (40, N_POS), generator=torch.Generator().manual_seed(5))
    text[:, 0] = 0
    model = bos_reader((2.0, -1.0))
    table = effects(model, text, "L1", kept_positions=kept)
    intact = measure(capture_scores(model, text, layers=[1]))[1]
    whole = {"lead": intact.lead.value, "pattern": intact.amplitude.value}
    assert {*table["of"]} == ({"pattern"} if kept else {*QUESTIONS})
    for question, rows in table.groupby("of"):
        for column in ("predicted", "held", "direct", "total"):
            lost = dict(zip(rows["writer"], rows[column] / whole[question], strict=True))
            embed = 1 if column == "total" and not kept else 0  # BOS, which heads of L0 read
            truth = {"embed": embed, "ATTN0": 1, "L0H0": 2, "L0H1": -1}
            assert lost == pytest.approx(truth, abs=NETWORK)


def test_heads_of_attentions_that_matter_are_taken_by_part_then_by_size(decoder: ModelOf) -> None:
    """The size of a head's position: how much its mean output varies with the position."""
    (model, tiny), text = decoder("llama"), tokens(15, seed=3)
    engine = Engine(model=model, inputs=text, n_folds=N_FOLDS, skip_keys=1, kept_positions=0)
    sums = engine.positions("positions", layers=[2])
    columns = ["layer", "of", "side", "writer", "part", "part_low", "part_high"]
    row = (2, "pattern", "key", "L1H4", 0.7, 0.6, 0.8)
    table = measure_effects(engine, sums, pd.DataFrame([row], columns=columns), "L2", n_heads=4)
    bounds = table[["total_low", "total_high"]].abs().max(axis=1)
    terms = term_table(sums)
    whole = terms[terms["term"] == "all"].set_index("of")["size"].abs()
    matter = {"ATTN1", *table.loc[bounds >= 0.05 * table["of"].map(whole), "writer"]}
    sizes = {}
    for block, (_, z) in enumerate(attention_inputs(tiny.hf, text)[:2]):
        weight = projections(tiny.hf, block)["w_o"].weight.unflatten(1, (6, -1))
        written = torch.einsum("bphd,mhd->hpm", z.unflatten(-1, (6, -1)), weight)
        norms = (written - written.mean(1, keepdim=True)).norm(dim=(1, 2)).tolist()
        if f"ATTN{block}" in matter:
            sizes |= {f"L{block}H{head}": size for head, size in enumerate(norms)}
    del sizes["L1H4"]
    largest = sorted(sizes, key=lambda head: -sizes[head])[:3]
    heads = [name for name in table["writer"].unique() if "H" in name]
    assert heads == sorted(["L1H4", *largest])


def test_direct_parts_are_those_of_both_sides_that_could_matter() -> None:
    """Parts come over the least that matters: 0.05 nats of the pattern, and 0.4 of the lead."""
    rows = [
        ("pattern", "key", "MLP0", 0.035, 0.03, 0.04),
        ("pattern", "query", "MLP0", 0.005, 0.0, 0.011),
        ("lead", "key", "MLP0", -0.2, -0.41, -0.1),
        ("pattern", "key", "L0H0", 0.03, 0.02, 0.049),
        ("lead", "key", "L0H0", 0.3, 0.2, 0.39),
        ("pattern", "key", "L0H1", -0.02, -0.051, 0.02),
        ("pattern", "key", "embed", float("nan"), float("nan"), float("nan")),
    ]
    columns = ["of", "side", "writer", "part", "part_low", "part_high"]
    least = {"lead": 0.4, "pattern": 0.05}
    table = pd.DataFrame(rows, columns=columns)
    assert direct_parts(table.assign(part=float("nan")), least) == {}, "no pattern, no part"
    parts = direct_parts(table, least)
    assert parts == {"MLP0": pytest.approx(0.8), "L0H1": pytest.approx(0.4)}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_with_the_norms_scale_held_the_loss_is_the_exact_part_and_the_norm_makes_the_rest(
    name: str, bridge: ByName
) -> None:
    """Every fold holds the same sequences; Qwen3 has norms of queries and keys too."""
    text = tokens(7, seed=3).repeat_interleave(N_FOLDS, 0)
    found = effects(bridge(name), text, "L1")
    assert found["held"].to_list() == pytest.approx(found["predicted"].to_list(), abs=1e-5)
    norm = (found["direct"] - found["held"]).to_list()
    assert found["norm"].to_list() == pytest.approx(norm, abs=1e-9)
    assert found["norm"].abs().max() > 1e-3
