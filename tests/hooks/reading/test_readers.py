"""Who writes into queries and keys, against plain transformers and a model built by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ablations import identities
from support.decoders import write_decoder
from support.models_by_hand import bos_reader
from support.plain_attention import per_fold, plain_attention
from support.plain_states import calls_of, plain_states
from support.rounding import NETWORK, assert_same
from support.tiny_models import N_POS, ByName, ModelOf, distance, tokens

from nope_probe import ablated, load
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.maps.positions import PositionSums, ReaderSums
from nope_probe.maps.rows import choose_rows
from nope_probe.studies.tables import term_table, writer_table

N_FOLDS = 5
INPUTS = tokens(13, seed=7)
SPECS = [
    *("bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3", "bridge:gpt2"),
    *("bridge:neox", "bridge:gemma2", "hooked:smollm3-nope"),
    # Norms behind attention; latent attention; hybrids; blocks that scale what they add; ALiBi.
    *("decoder:olmo2", "decoder:deepseek_v3", "decoder:qwen3_next", "decoder:gemma4_text"),
    "decoder:mpt",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("options", [{}, {"per_head": True}, {"writers": "layers"}], ids=str)
def test_what_writers_bring_adds_up_to_queries_and_keys(
    spec: str, options: dict[str, Any], model_of: ModelOf
) -> None:
    sums = capture_positions(model_of(spec)[0], INPUTS, n_folds=N_FOLDS, **options)
    for reader in sums.readers.values():
        for written, whole in ((reader.keys, reader.k), (reader.queries, reader.q)):
            assert distance(sum(written.values()), whole) <= NETWORK


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gemma2", torch.float16)])
def test_in_half_precision_the_writers_and_their_parts_are_those_of_float32_within_its_rounding(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny = write_decoder(name, tmp_path)
    models = [load(str(tiny.folder), dtype=kind).model for kind in (dtype, torch.float32)]
    for parameter in models[1].parameters():
        parameter.data.copy_(parameter.to(dtype))
    half, full = (capture_positions(model, tiny.tokens, n_folds=1) for model in models)
    for layer, reader in full.readers.items():
        for side in ("keys", "queries"):
            parts, expected = (getattr(of, side) for of in (half.readers[layer], reader))
            assert parts.keys() == expected.keys()
            largest = float(sum(expected.values()).abs().max())
            errors = [float((parts[writer] - expected[writer]).abs().max()) for writer in parts]
            assert max(errors) <= 8 * torch.finfo(dtype).eps * largest


def test_parts_that_do_not_add_up_are_refused_in_the_first_batch(
    bridge: ByName, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = bridge("llama"), []
    monkeypatch.setattr("nope_probe.hooks.reading.readers.MOST_ERROR", 1e-9)
    monkeypatch.setattr("nope_probe.hooks.reading.readers.ROUNDINGS", 0)
    point = layers_of(model)[0].point("hook_resid_pre")
    count = hooks_attached([(point, lambda tensor, hook: batches.append(len(tensor)))])
    refused = pytest.raises(
        NotImplementedError, match="do not add up to the queries and keys of L0"
    )
    with count, refused:
        capture_positions(model, INPUTS, n_folds=N_FOLDS, batch_size=3)
    assert batches.count(3) == 1


@pytest.mark.parametrize("per_head", [False, True])
def test_shared_key_heads_that_are_replaced_one_by_one_have_no_parts(
    per_head: bool, bridge: ByName
) -> None:
    model = bridge("llama")
    error = pytest.raises(NotImplementedError, match=r"the keys of L1 are not those of its W_K: q")
    with ablated(model, identities("w_k")), error:
        capture_positions(model, INPUTS, layers=[1], per_head=per_head)


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_mean_queries_and_keys_are_those_before_rope(
    name: str, tiny: ByName, bridge: ByName
) -> None:
    sums = capture_positions(bridge(name), INPUTS, n_folds=N_FOLDS, per_head=True)
    for layer, states in enumerate(plain_states(tiny(name).hf, INPUTS, rope=False)):
        reader = sums.readers[layer]
        assert distance(reader.q, per_fold(states.q, N_FOLDS)) <= NETWORK
        assert distance(reader.k, per_fold(states.k, N_FOLDS)) <= NETWORK


def test_a_mean_over_heads_needs_only_sums_of_queries(bridge: ByName) -> None:
    over_heads, by_head = (
        capture_positions(bridge("qwen3"), INPUTS, n_folds=N_FOLDS, per_head=per_head).readers[1]
        for per_head in (False, True)
    )
    maps = [mean_map(one) for _, one in by_head.heads()]
    assert distance(mean_map(over_heads), torch.stack(maps).mean(0)) <= NETWORK
    assert distance(over_heads.scores.nan_to_num(), by_head.scores.mean(1).nan_to_num()) <= NETWORK


def mean_map(reader: ReaderSums) -> torch.Tensor:
    """Return the products of a reader's mean queries and keys, turned, times its scale."""
    q, k = map(reader.rotation.turned, (reader.q, reader.k))
    return torch.einsum("fihd,fjhd->fij", q, k) * reader.scale


def first_block(
    hf: Any, inputs: torch.Tensor, factor: float = 1.0
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return what embeddings, heads and MLP write, what L1's norm multiplies by, and values."""
    block, reader = hf.model.layers[0], hf.model.layers[1]
    attn, norm = block.self_attn, reader.input_layernorm
    parts = (block, block.mlp, attn.o_proj, attn.v_proj, norm)
    whole, mlp, o, v, normed = calls_of(hf, dict(enumerate(parts)), inputs).values()
    weights = (factor * attn.o_proj.weight).unflatten(1, (6, -1)).unbind(1)
    written = {"embed": whole.input, "MLP0": factor * mlp.output}
    heads = zip(o.input.unflatten(-1, (6, -1)).unbind(2), weights, strict=True)
    written |= {f"L0H{head}": z @ weight.T for head, (z, weight) in enumerate(heads)}
    square = normed.input.square().mean(-1, keepdim=True)
    return written, (square + norm.variance_epsilon).rsqrt() * norm.weight, v.output


@pytest.mark.parametrize(("name", "factor"), [("llama", 1.0), ("granite", 0.37)])
def test_what_a_writer_brings_is_its_output_through_norm_and_projection(
    name: str, factor: float, tiny: ByName, bridge: ByName, decoder: ModelOf
) -> None:
    """Outputs of plain transformers, normed by hand; Granite multiplies what blocks add."""
    model, given = bridge("llama"), tiny("llama")
    if name == "granite":
        model, given = decoder("granite", residual_multiplier=factor)
    written, scale, _ = first_block(given.hf, given.tokens, factor)
    options = {"n_folds": 1, "layers": [1]}
    sums = capture_positions(model, given.tokens, **options).readers[1]
    whole = capture_positions(model, given.tokens, **options, writers="layers").readers[1]
    assert {*sums.keys} - {"bias"} == {*written}
    projection = given.hf.model.layers[1].self_attn.k_proj
    if factor != 1:  # without biases
        written["ATTN0"] = sum((written[f"L0H{head}"] for head in range(6)), torch.zeros(()))
    for writer, x in written.items():
        keys = ((x * scale) @ projection.weight.T).unflatten(-1, sums.k.shape[2:])
        found = whole.keys if writer == "ATTN0" else sums.keys
        assert distance(found[writer], per_fold(keys.detach(), 1)) <= NETWORK


@pytest.mark.parametrize("n_pos", [N_POS, 131])
def test_a_head_brings_from_the_first_key_its_weight_times_its_value(
    n_pos: int, tiny: ByName, bridge: ByName
) -> None:
    hf, inputs = tiny("llama").hf, tokens(3, n_pos, seed=7)
    attn, reader = hf.model.layers[0].self_attn, hf.model.layers[1].self_attn
    _, scale, v = first_block(hf, inputs)
    with torch.inference_mode():
        weights = hf(inputs, output_attentions=True).attentions[0]
    value = v[:, 0].unflatten(-1, (2, 10)).repeat_interleave(3, 1)
    by_layer, by_head = (
        capture_positions(bridge("llama"), inputs, n_folds=1, layers=[1], per_head=per_head)
        for per_head in (False, True)
    )
    for head in range(6):
        z = weights[:, head, :, 0, None] * value[:, None, head]
        written = (z @ attn.o_proj.weight[:, 10 * head : 10 * (head + 1)].T) * scale
        q, k = (
            per_fold((written @ projection.weight.T).unflatten(-1, (-1, 10)).detach(), 1)
            for projection in (reader.q_proj, reader.k_proj)
        )
        for sums, queries in ((by_layer, q.unflatten(2, (2, 3)).sum(3)), (by_head, q)):
            assert distance(sums.readers[1].first_keys[f"L0H{head}"], k) <= 5e-6
            assert distance(sums.readers[1].first_queries[f"L0H{head}"], queries) <= 5e-6


def test_sums_do_not_depend_on_the_size_of_batches_and_survive_storage(bridge: ByName) -> None:
    model = bridge("qwen3")
    whole, pieces = (
        capture_positions(model, INPUTS, n_folds=N_FOLDS, batch_size=size).to_tensors()
        for size in (13, 4)
    )
    again = PositionSums.from_tensors(pieces).to_tensors()
    assert whole.keys() == again.keys()
    for name, tensor in whole.items():
        both = (x.double().nan_to_num() for x in (again[name], tensor))
        assert not tensor.any() or distance(*both) <= NETWORK


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "gpt_neox"])
@pytest.mark.parametrize("query_rows", [None, 7])
def test_scores_and_alibi_are_those_of_plain_transformers(
    model_type: str, query_rows: int | None, decoder: ModelOf
) -> None:
    """Scores are without the bias that is added to them."""
    (model, tiny), rows = decoder(model_type), choose_rows(N_POS, query_rows)
    intact = plain_attention(tiny.hf, tiny.tokens)
    has_alibi = model_type != "gpt_neox"
    without = plain_attention(tiny.hf, tiny.tokens, without="alibi") if has_alibi else intact
    scores_of_heads, biased = (of[0].scores.double().mean(0)[:, rows] for of in (without, intact))
    for per_head in (False, True):
        options = {"n_folds": 1, "per_head": per_head, "query_rows": query_rows}
        sums = capture_positions(model, tiny.tokens, **options)
        assert [*sums.readers] == [*intact]
        first = sums.readers[0]
        scores, bias, product = scores_of_heads, biased - scores_of_heads, first.scores[0]
        if not per_head:
            scores, bias = scores.mean(0), bias.mean(0)
        assert torch.equal(first.query_positions, rows)
        assert_same(product, scores)
        if not has_alibi:
            assert first.bias is None
            continue
        seen = ~bias.isnan()
        assert distance(first.bias[seen], bias[seen]) <= 1e-5


def test_scores_that_hooks_change_have_no_terms_and_scores_that_they_read_have(
    bridge: ByName,
) -> None:
    model, kept = bridge("llama"), []
    point = layers_of(model)[1].point("attn.hook_attn_scores")
    expected = capture_positions(model, INPUTS, n_folds=1).readers[1].scores
    with hooks_attached([(point, lambda scores, hook: kept.append(scores.shape))]):
        found = capture_positions(model, INPUTS, n_folds=1).readers[1].scores
    assert kept
    assert distance(found.nan_to_num(), expected.nan_to_num()) <= 1e-6
    changed = hooks_attached([(point, lambda scores, hook: 1.1 * scores)])
    with changed, pytest.raises(NotImplementedError, match=r"the scores of L1 are not q\.k"):
        capture_positions(model, INPUTS, n_folds=1)


def test_readers_are_sorted_and_the_first_token_is_noticed_if_all_begin_alike(
    bridge: ByName,
) -> None:
    model = bridge("llama")
    sums = capture_positions(model, INPUTS, n_folds=N_FOLDS, layers=[1, 0])
    assert ([*sums.readers], sums.bos, sums.counts.tolist()) == ([0, 1], False, [3, 3, 3, 2, 2])
    alike = INPUTS.clone()
    alike[:, 0] = 5
    by_document = capture_positions(model, alike, layers=[0], documents=torch.arange(13) // 2)
    assert (by_document.bos, by_document.counts.tolist()) == (True, [2] * 6 + [1])


@pytest.mark.hooked_transformer
@pytest.mark.parametrize("strength", [(1.0, 0.0), (2.0, -1.0)])
def test_a_clock_built_by_hand_is_written_by_the_heads_that_see_bos_fade(
    strength: tuple[float, float],
) -> None:
    text = torch.randint(1, 17, (16, N_POS), generator=torch.Generator().manual_seed(5))
    text[:, 0] = 0
    sums = capture_positions(bos_reader(strength), text, n_folds=8)
    terms = term_table(sums).set_index(["layer", "of", "term"])["part"]
    whole = {question: terms[1, question, "all"] for question in ("lead", "pattern")}
    for question, nats in whole.items():
        assert abs(nats) > 0.01
        assert terms[1, question, "written_key"] == pytest.approx(nats, abs=NETWORK)
        for term in ("rotation", "written_query", "written_both", "covariance"):
            assert terms[1, question, term] == pytest.approx(0, abs=NETWORK)
    table = writer_table(sums)
    writers = table[table["layer"] == 1].set_index(["of", "side", "writer"])
    assert {*writers.index.get_level_values("of")} == {"lead", "pattern"}
    for (question, side, writer), row in writers.iterrows():
        number = int(writer[-1]) if writer.startswith("L0H") else None
        written = strength[number] if side == "key" and number is not None else 0.0
        expected = written * whole[question]
        assert row["part"] == pytest.approx(expected, abs=NETWORK)
        if expected:
            assert row["from_first_key"] == pytest.approx(expected, abs=NETWORK)


@pytest.mark.parametrize(
    ("name", "per_head"), [("llama", False), ("qwen3", False), ("qwen3", True)]
)
def test_norms_multiply_the_mean_residual_stream_by_their_mean_scale_at_each_position(
    name: str, per_head: bool, tiny: ByName, bridge: ByName
) -> None:
    hf = tiny(name).hf
    block = hf.model.layers[1]
    norm, attn = block.input_layernorm, block.self_attn
    [(x, y)] = calls_of(hf, {"norm": norm}, INPUTS).values()
    sums = capture_positions(bridge(name), INPUTS, n_folds=1, layers=[1], per_head=per_head)
    reader = sums.readers[1]

    def scale(x: torch.Tensor, of: Any) -> torch.Tensor:
        return (x.square().mean(-1, keepdim=True) + of.variance_epsilon).rsqrt()

    outer, stream = scale(x, norm), x.mean((0, 1)) * norm.weight
    for side, found in (("q", reader.norm_queries), ("k", reader.norm_keys)):
        projection, inner = getattr(attn, f"{side}_proj"), getattr(attn, f"{side}_norm", None)
        raw = projection(y).unflatten(-1, (-1, attn.head_dim))
        gains = torch.ones(()).expand(*raw.shape[:3], 1) if inner is None else scale(raw, inner)
        made = (projection.weight @ stream).view(raw.shape[2:])
        made = made * (outer[..., None] * gains).mean(0)
        if projection.bias is not None:
            made = made + projection.bias.view(raw.shape[2:]) * gains.mean(0)
        made = made if inner is None else made * inner.weight
        if side == "q" and not per_head:
            made = made.unflatten(1, (reader.k.shape[2], -1)).sum(2)
        assert distance(found[0], made.detach().double()) <= NETWORK
