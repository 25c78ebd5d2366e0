"""What a pattern loses without a writer's position, against exact shares and a model by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.decoders import write_decoder
from support.rounding import NETWORK
from support.tiny_models import N_POS, tokens
from support.traced import bos_reader
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nope_probe import load, sequences
from nope_probe.experiments.engine import Engine
from nope_probe.experiments.tables import writer_table
from nope_probe.experiments.trace.analyse import measure_effects, strongest_pairs
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of

BridgeOf = Callable[[str], Any]
N_FOLDS = 5


def effects(
    model: Any, text: torch.Tensor, skip_keys: int = 0, per_head: bool = False, **options: Any
) -> pd.DataFrame:
    engine = Engine(model=model, inputs=text, n_folds=N_FOLDS, skip_keys=skip_keys)
    layers = [layer.index for layer in layers_of(model)]
    sums = engine.positions(None, layers=layers, per_head=per_head)
    return measure_effects(engine, sums, writer_table(sums), **options)


@pytest.mark.parametrize(
    ("spec", "per_head"),
    [("bridge:gpt2", False), ("hooked:smollm3-rope", False), ("hooked:smollm3-rope", True)],
)
def test_the_direct_effect_is_the_exact_share_where_the_scale_of_the_norm_stays(
    spec: str, per_head: bool, model_of: Callable[[str], tuple[Any, str]]
) -> None:
    """Every fold holds the same sequences, so that means over folds do not differ either."""
    model, _ = model_of(spec)
    text = tokens(7, seed=3).repeat_interleave(N_FOLDS, 0)
    points = [layer.point("ln1.hook_scale") for layer in layers_of(model)]
    with hooks_attached([(point, lambda scale, hook: torch.ones_like(scale)) for point in points]):
        found = effects(model, text, skip_keys=2, per_head=per_head, n_pairs=9)
    assert found["writer"].nunique() > 3
    assert found["direct"].to_list() == pytest.approx(found["predicted"].to_list(), abs=NETWORK)
    assert found["total"].sub(found["direct"]).abs().max() > 1e-3


def test_a_model_without_a_writers_position_is_run_to_the_layers_that_read_it(
    bridge: BridgeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, scores = dict[str, list[int]](), Engine.scores

    def record(engine: Engine, key: str | None, *args: Any, **options: Any) -> Any:
        run[str(key)] = list(options["layers"])
        return scores(engine, key, *args, **options)

    monkeypatch.setattr(Engine, "scores", record)
    text = tokens(7, seed=3).repeat_interleave(N_FOLDS, 0)
    table = effects(bridge("smollm3"), text, skip_keys=2, n_pairs=9)
    read_by = table.groupby("writer")["layer"].unique().map(sorted).to_dict()
    assert {writer: run[f"effects-{writer}"] for writer in read_by} == read_by


@pytest.mark.hooked_transformer
def test_a_clock_built_by_hand_loses_all_without_the_head_that_writes_it() -> None:
    text = torch.randint(1, 17, (40, N_POS), generator=torch.Generator().manual_seed(5))
    text[:, 0] = 0
    table = effects(bos_reader((2.0, -1.0)), text, skip_keys=1, n_pairs=2)
    assert table[["layer", "writer"]].to_numpy().tolist() == [[1, "L0H0"], [1, "L0H1"]]
    for measure in ("predicted", "direct", "total"):
        assert table[measure].to_list() == pytest.approx([2, -1], abs=NETWORK)


def test_heads_act_through_the_mlp_that_reads_them() -> None:
    """L1 of nope-tiny reads MLP0, and nearly nothing of heads, which MLP0 reads (issue's table)."""
    loaded = load("nope-tiny", n_layers=2)
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=64, seq_len=48)
    table = effects(loaded.model, data.inputs, skip_keys=1, n_pairs=1).set_index("writer")
    assert table.index.to_list()[0] == "MLP0"
    assert {*table.index[1:]} == {"L0H0", "L0H1", "L0H2", "L0H3"}
    assert table.loc["MLP0", ["direct", "total"]].min() > 0.8
    for head in ("L0H0", "L0H1"):
        assert abs(table.loc[head, "direct"]) < 0.05
        assert table.loc[head, "total_low"] > 0.2


@pytest.mark.parametrize(("model_type", "block"), [("gpt_neox", 0), ("llama", 1)])
def test_the_heads_that_an_mlp_reads_are_of_the_block_before_where_both_run_in_parallel(
    model_type: str, block: int, tmp_path: Path
) -> None:
    """Of the six heads, the four are measured whose mean output varies most with position."""
    tiny = write_decoder(model_type, tmp_path)
    text, model = tokens(15, seed=3), load(str(tiny.folder)).model
    engine = Engine(model=model, inputs=text, n_folds=N_FOLDS, skip_keys=2)
    sums = engine.positions(None, layers=[2])
    writers = pd.DataFrame([{"layer": 2, "side": "key", "writer": "MLP1", "share": 0.7}])
    table = measure_effects(engine, sums, writers, n_pairs=1)
    kept: list[torch.Tensor] = []
    projection = o_projection(tiny.hf, block)
    handle = projection.register_forward_hook(lambda m, i, o: kept.append(i[0]))
    with torch.inference_mode():
        tiny.hf(text)
    handle.remove()
    weight = projection.weight.unflatten(1, (6, -1))
    written = torch.einsum("bphd,mhd->hpm", kept[0].unflatten(-1, (6, -1)), weight)[:, 2:]
    sizes = (written - written.mean(1, keepdim=True)).norm(dim=(1, 2))
    strongest = [f"L{block}H{head}" for head in sizes.argsort(descending=True)[:4].tolist()]
    assert table["writer"].to_list() == ["MLP1", *strongest]
    assert set(table["layer"]) == {2}


def o_projection(hf: Any, block: int) -> torch.nn.Linear:
    """Return the output projection of a block's attention in plain transformers."""
    base = hf.base_model.layers[block]
    return base.attention.dense if hasattr(base, "attention") else base.self_attn.o_proj


def test_pairs_are_chosen_by_the_share_of_both_sides() -> None:
    rows = [
        (1, "key", "MLP0", 0.5),
        (1, "query", "MLP0", -0.4),
        (1, "key", "L0H0", 0.2),
        (1, "key", "bias", 0.9),
        (2, "key", "L1H0", float("nan")),
        (2, "key", "L1H1", -0.3),
    ]
    writers = pd.DataFrame(rows, columns=["layer", "side", "writer", "share"])
    assert strongest_pairs(writers, 5) == [(2, None, "L1H1"), (1, None, "L0H0"), (1, None, "MLP0")]
    assert strongest_pairs(writers, 1) == [(2, None, "L1H1")]


def test_no_pairs_make_an_empty_table(bridge: BridgeOf) -> None:
    table = effects(bridge("llama"), tokens(7), n_pairs=0)
    assert table.empty
    assert [*table.columns[:4]] == ["layer", "writer", "predicted", "predicted_low"]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_held_is_what_plain_transformers_lose_where_the_scales_of_norms_stay(
    name: str, tiny: Callable[[str], Any], bridge: BridgeOf
) -> None:
    """Every fold holds the same sequences; Qwen3 has norms of queries and keys too."""
    text = tokens(7, seed=3).repeat_interleave(N_FOLDS, 0)
    found = effects(bridge(name), text, skip_keys=2, n_pairs=11)
    assert found["held"].to_list() == pytest.approx(found["predicted"].to_list(), abs=1e-5)
    norm = (found["direct"] - found["held"]).to_list()
    assert found["norm"].to_list() == pytest.approx(norm, abs=1e-9)
    assert found["norm"].abs().max() > 1e-3
    lost = lost_with_scales_held(tiny(name).hf, text, skip=2)
    [of_mlp] = found[found["writer"] == "MLP0"]["held"]
    assert of_mlp == pytest.approx(lost, abs=1e-5)
    assert abs(lost) > 0.01


def lost_with_scales_held(hf: Any, text: torch.Tensor, skip: int) -> float:
    """Return what L1's pattern in plain transformers loses without the position of MLP0.

    The part of the MLP in queries and keys has the scales of the norms in the intact model.
    """
    kept: dict[str, torch.Tensor] = {}
    mlp, block = hf.model.layers[0].mlp, hf.model.layers[1]
    norm, attn = block.input_layernorm, block.self_attn
    handles = [
        mlp.register_forward_hook(lambda m, i, o: kept.update(written=o)),
        norm.register_forward_hook(lambda m, i, o: kept.update(x=i[0], y=o)),
    ]
    with torch.inference_mode():
        hf(text)
    for handle in handles:
        handle.remove()

    def scale(x: torch.Tensor, of: Any) -> torch.Tensor:
        return (x.square().mean(-1, keepdim=True) + of.variance_epsilon).rsqrt() * of.weight

    whole, without = [], []
    for side in ("q", "k"):
        projection, inner = getattr(attn, f"{side}_proj"), getattr(attn, f"{side}_norm", None)
        part = kept["written"] * scale(kept["x"], norm)
        part = (part @ projection.weight.T).unflatten(-1, (-1, attn.head_dim))
        vectors = projection(kept["y"]).unflatten(-1, (-1, attn.head_dim))
        inner_scale = 1.0 if inner is None else scale(vectors, inner)
        vectors, mean = vectors * inner_scale, (part * inner_scale).mean(0)
        whole.append(vectors)
        without.append(vectors - (mean - mean[skip:].mean(0)))
    angles = hf.model.rotary_emb(kept["x"], torch.arange(N_POS)[None])
    v, w = (positional_pattern(*pair, *angles, skip) for pair in (whole, without))
    return float(((v - w) * v).sum() / v.square().sum())


def positional_pattern(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, skip: int
) -> torch.Tensor:
    """Return the pattern over the keys skip <= j < i, up to the scale of the scores."""
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->ij", q.double(), k.double())
    cells = torch.ones(N_POS, N_POS).tril(-1).bool()
    cells[:, :skip] = False
    means = (scores * cells).sum(1, keepdim=True) / cells.sum(1, keepdim=True).clamp_min(1)
    return (scores - means) * cells
