"""Who writes into queries and keys, against plain transformers and a model built by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.plain_states import per_fold, plain_states
from support.tiny_models import N_POS, distance, tokens
from support.traced import bos_reader

from nope_probe import load
from nope_probe.experiments.tables import term_table, writer_table
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.maps.positions import PositionSums, ReaderSums

ModelOf = Callable[[str], tuple[Any, str]]
TinyOf = Callable[[str], Any]
BridgeOf = Callable[[str], Any]

N_FOLDS = 5
SPECS = [
    *("bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3", "bridge:gpt2"),
    *("bridge:neox", "bridge:gemma2", "hooked:smollm3-nope"),
]


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return tokens(13, seed=7)


def additivity_error(sums: PositionSums) -> float:
    """Return the largest relative difference between what writers bring and what is read."""
    return max(
        distance(sum(written.values()), whole)
        for reader in sums.readers.values()
        for written, whole in ((reader.keys, reader.k), (reader.queries, reader.q))
    )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("per_head", [False, True])
def test_what_writers_bring_adds_up_to_queries_and_keys(
    spec: str, per_head: bool, model_of: ModelOf, inputs: torch.Tensor
) -> None:
    sums = capture_positions(model_of(spec)[0], inputs, n_folds=N_FOLDS, per_head=per_head)
    assert additivity_error(sums) <= 2e-6


@pytest.mark.parametrize("name", ["olmo2", "deepseek_v3", "qwen3_next", "gemma4_text", "mpt"])
def test_it_adds_up_in_families_of_another_build(name: str, tmp_path: Path) -> None:
    """Norms behind attention, latent attention, hybrids, blocks that scale what they add, ALiBi."""
    tiny = write_decoder(name, tmp_path)
    for writers in ("heads", "layers"):
        sums = capture_positions(
            load(str(tiny.folder)).model, tiny.tokens, n_folds=1, writers=writers
        )
        assert additivity_error(sums) <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "deepseek_v3"])
def test_in_half_precision_the_writers_and_their_parts_are_those_of_float32_within_its_rounding(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    dense = {"first_k_dense_replace": 3} if name == "deepseek_v3" else {}
    tiny = write_decoder(name, tmp_path, **dense)
    models = [load(str(tiny.folder), dtype=kind).model for kind in (dtype, torch.float32)]
    for parameter in models[1].parameters():
        parameter.data.copy_(parameter.to(dtype))
    half, full = (capture_positions(model, tiny.tokens, n_folds=1) for model in models)
    for layer, reader in full.readers.items():
        for parts, expected in (
            (half.readers[layer].keys, reader.keys),
            (half.readers[layer].queries, reader.queries),
        ):
            assert parts.keys() == expected.keys()
            largest = float(sum(expected.values()).abs().max())
            errors = [float((parts[writer] - expected[writer]).abs().max()) for writer in parts]
            assert max(errors) <= 8 * torch.finfo(dtype).eps * largest


def test_parts_that_do_not_add_up_are_refused_in_the_first_batch(
    bridge: BridgeOf, inputs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = bridge("llama"), []
    monkeypatch.setattr("nope_probe.hooks.reading.readers.MOST_ERROR", 1e-9)
    monkeypatch.setattr("nope_probe.hooks.reading.readers.ROUNDINGS", 0)
    point = layers_of(model)[0].point("hook_resid_pre")
    with (
        hooks_attached([(point, lambda tensor, hook: batches.append(len(tensor)))]),
        pytest.raises(NotImplementedError, match="do not add up to the queries and keys of L0"),
    ):
        capture_positions(model, inputs, n_folds=N_FOLDS, batch_size=3)
    assert batches.count(3) == 1


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_mean_queries_and_keys_are_those_before_rope(
    name: str, tiny: TinyOf, bridge: BridgeOf, inputs: torch.Tensor
) -> None:
    sums = capture_positions(bridge(name), inputs, n_folds=N_FOLDS, per_head=True)
    for layer, states in enumerate(plain_states(tiny(name).hf, inputs, rope=False)):
        reader = sums.readers[layer]
        assert distance(reader.q, per_fold(states.q, N_FOLDS)) <= 2e-6
        assert distance(reader.k, per_fold(states.k, N_FOLDS)) <= 2e-6


def test_a_mean_over_heads_needs_only_sums_of_queries(
    bridge: BridgeOf, inputs: torch.Tensor
) -> None:
    over_heads, by_head = (
        capture_positions(bridge("qwen3"), inputs, n_folds=N_FOLDS, per_head=per_head).readers[1]
        for per_head in (False, True)
    )
    maps = [mean_map(one) for _, one in by_head.heads()]
    assert distance(mean_map(over_heads), torch.stack(maps).mean(0)) <= 1e-6
    assert distance(over_heads.scores.nan_to_num(), by_head.scores.mean(1).nan_to_num()) <= 1e-6


def mean_map(reader: ReaderSums) -> torch.Tensor:
    """Return the products of a reader's mean queries and keys, turned, times its scale."""
    turns = reader.turns
    q, k = (x if turns is None else turns.turned(x) for x in (reader.q, reader.k))
    return torch.einsum("fihd,fjhd->fij", q, k) * reader.scale


def test_what_a_writer_brings_is_its_output_through_norm_and_projection(
    tiny: TinyOf, bridge: BridgeOf, inputs: torch.Tensor
) -> None:
    """Each writer's output is read from plain transformers, and normed by hand."""
    hf = tiny("llama").hf
    kept: dict[str, torch.Tensor] = {}
    block, reader = hf.model.layers[0], hf.model.layers[1]
    handles = [
        hf.model.embed_tokens.register_forward_hook(lambda m, i, o: kept.update(embed=o)),
        block.mlp.register_forward_hook(lambda m, i, o: kept.update(MLP0=o)),
        block.self_attn.o_proj.register_forward_hook(lambda m, i, o: kept.update(z=i[0])),
        reader.input_layernorm.register_forward_hook(lambda m, i, o: kept.update(x=i[0])),
    ]
    with torch.inference_mode():
        hf(inputs)
    for handle in handles:
        handle.remove()
    norm, d_head = reader.input_layernorm, block.self_attn.head_dim
    scale = (kept["x"].square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    for head in range(6):
        columns = slice(head * d_head, (head + 1) * d_head)
        kept[f"L0H{head}"] = kept["z"][..., columns] @ block.self_attn.o_proj.weight[:, columns].T
    sums = capture_positions(bridge("llama"), inputs, n_folds=N_FOLDS, layers=[1]).readers[1]
    writers = ["embed", "MLP0", *(f"L0H{head}" for head in range(6))]
    assert {*sums.keys} == {*writers, "bias"}
    for writer in writers:
        keys = (kept[writer] * scale * norm.weight) @ reader.self_attn.k_proj.weight.T
        expected = per_fold(keys.unflatten(-1, (-1, d_head)).detach(), N_FOLDS)
        assert distance(sums.keys[writer], expected) <= 2e-6


def test_a_whole_attention_is_the_sum_of_its_heads(bridge: BridgeOf, inputs: torch.Tensor) -> None:
    model = bridge("gemma2")
    heads = capture_positions(model, inputs, n_folds=1).readers[1]
    whole = capture_positions(model, inputs, n_folds=1, writers="layers").readers[1]
    names = [name for name in heads.keys if name.startswith("L0H")]
    assert names == [f"L0H{head}" for head in range(len(names))]
    constants = heads.keys["bias"] - whole.keys["bias"]
    assert (
        distance(sum(heads.keys[name] for name in names) + constants, whole.keys["ATTN0"]) <= 2e-6
    )
    assert distance(heads.keys["MLP0"], whole.keys["MLP0"]) <= 2e-6


def test_sums_do_not_depend_on_the_size_of_batches_and_survive_storage(
    bridge: BridgeOf, inputs: torch.Tensor
) -> None:
    model = bridge("qwen3")
    whole, pieces = (
        capture_positions(model, inputs, n_folds=N_FOLDS, batch_size=size).to_tensors()
        for size in (13, 4)
    )
    again = PositionSums.from_tensors(pieces).to_tensors()
    assert whole.keys() == again.keys()
    for name, tensor in whole.items():
        if tensor.any():
            assert distance(again[name].double().nan_to_num(), tensor.double().nan_to_num()) <= 1e-6


@pytest.mark.hooked_transformer
@pytest.mark.parametrize("strength", [(1.0, 0.0), (2.0, -1.0)])
def test_a_clock_built_by_hand_is_written_by_the_heads_that_see_bos_fade(
    strength: tuple[float, float],
) -> None:
    text = torch.randint(1, 17, (16, N_POS), generator=torch.Generator().manual_seed(5))
    text[:, 0] = 0
    sums = capture_positions(bos_reader(strength), text, n_folds=8)
    terms = term_table(sums, 1).set_index(["layer", "term"])["share"]
    assert terms[1, "written_key"] == pytest.approx(1, abs=1e-6)
    for term in ("rotation", "written_query", "written_both", "covariance"):
        assert terms[1, term] == pytest.approx(0, abs=1e-6)
    table = writer_table(sums, 1)
    writers = table[table["layer"] == 1].set_index(["side", "writer"])
    for (side, writer), row in writers.iterrows():
        number = int(writer[-1]) if writer.startswith("L0H") else None
        expected = strength[number] if side == "key" and number is not None else 0.0
        assert row["share"] == pytest.approx(expected, abs=1e-6)
        if expected:
            assert row["first_key"] == pytest.approx(expected, abs=1e-6)


def test_a_clock_is_gone_when_tokens_change_places(bridge: BridgeOf, inputs: torch.Tensor) -> None:
    """Tokens that are permuted behind L0, a sequence at a time, carry no position to L1."""
    text = tokens(64, seed=11)
    model = bridge("smollm3-nope")
    generator = torch.Generator().manual_seed(2)
    orders = torch.stack([torch.randperm(N_POS, generator=generator) for _ in text])
    entry = layers_of(model)[1].point("hook_resid_pre")

    def permute(tensor: torch.Tensor, hook: object) -> torch.Tensor:
        return tensor.gather(1, orders[: len(tensor), :, None].expand_as(tensor))

    with hooks_attached([(entry, permute)]):
        sums = capture_positions(model, text, layers=[1], batch_size=64)
    terms = term_table(sums, 0).set_index("term")
    for name in ("written_key", "written_query", "written_both"):
        assert terms.loc[name, "rms"] <= 3 * (terms.loc[name, "rms_high"] - terms.loc[name, "rms"])
        low, high = terms.loc[name, ["share_low", "share_high"]]
        assert not low > 0
        assert not high < 0
