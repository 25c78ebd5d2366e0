"""Layers that attend to another layer's keys and values, as in Gemma 4 E2B: L2 to L0's, L3 to L1's.

Edited models are plain transformers: with other weights, and with other cos, sin and keys where a
layer attends.
"""

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.edited_model import plain_run, unmask_and_unrotate
from support.hooked_runs import by_whole_passes, hooked_run, largest_error
from support.plain_attention import blocks_of, plain_attention
from support.rounding import NETWORK, assert_same
from support.tiny_models import Tiny
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

from nope_probe import Ablation, UserError, ablated, calibrate, capture_scores, load
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import entered, logits_of, run_to_enter
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.hooks.removing.weights import Place
from nope_probe.models.load import as_loaded
from nope_probe.run.flags import refuse
from nope_probe.studies.trace import Settings

CLOSE = 1e-5


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_decoder("gemma4_text", tmp_path_factory.mktemp("g"), num_kv_shared_layers=2)


@pytest.fixture(scope="module")
def model(gemma4: Tiny) -> Any:
    return load(str(gemma4.folder)).model


def test_maps_are_of_the_other_layers_keys(gemma4: Tiny, model: Any) -> None:
    layers = layers_of(model)
    assert [layer.source_of_keys for layer in layers] == [None, None, 0, 1]
    assert [(layer.d_head, layer.n_kv_heads) for layer in layers] == [(16, 2), (32, 2)] * 2
    maps = [layer.map for layer in plain_attention(gemma4.hf, gemma4.tokens).values()]
    assert_same(capture_scores(model, gemma4.tokens).mean, torch.stack(maps), NETWORK)
    in_memory = capture_scores(deepcopy(gemma4.hf), gemma4.tokens).mean
    assert_same(in_memory, torch.stack(maps), NETWORK)


def test_layers_before_those_that_read_others_keys_are_traced(gemma4: Tiny, model: Any) -> None:
    traced = capture_positions(model, gemma4.tokens, layers=[0, 1], n_folds=2)
    first: Any = load(str(gemma4.folder), n_layers=2).model  # no layer reads another's keys
    expected = capture_positions(first, gemma4.tokens, n_folds=2)
    assert [*traced.readers] == [*expected.readers] == [0, 1]
    for writer, keys in expected.readers[1].keys.items():
        assert_same(traced.readers[1].keys[writer], keys, NETWORK)
    with pytest.raises(NotImplementedError, match=r"L2 attends to the keys of L0, .* --layers 2 "):
        capture_positions(model, gemma4.tokens, n_folds=2)
    with pytest.raises(UserError, match=r"L2 of .* attends to the keys of L0, .* take --layers 2$"):
        refuse(Settings(layers=4).mistakes_of(as_loaded(model).info))
    refuse(Settings(layers=2).mistakes_of(as_loaded(model).info))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_first_layers_are_those_of_the_whole_model(gemma4: Tiny, model: Any, depth: int) -> None:
    """Their embeddings per layer are the first columns of tables."""
    first: Any = load(str(gemma4.folder), n_layers=depth).model
    expected = capture_scores(model, gemma4.tokens, layers=range(depth)).mean
    assert_same(capture_scores(first, gemma4.tokens).mean, expected, NETWORK)


def drawn(weight: Tensor, place: Place) -> Tensor:
    return torch.randn(weight.shape, generator=place.generator)


def with_drawn_weights(hf: PreTrainedModel, names: Collection[str], model: Any) -> PreTrainedModel:
    copied = deepcopy(hf)
    for layer in layers_of(model):
        for name in names:
            projection = getattr(blocks_of(copied)[layer.index].self_attn, f"{name[-1]}_proj", None)
            if projection is not None:
                place = Place(layer=layer, name=name, ablation=Ablation())  # type: ignore[arg-type]
                new = drawn(layer.weight_per_head(name), place)  # type: ignore[arg-type]
                rows = new if name == "w_o" else new.mT
                projection.weight.copy_(
                    rows.flatten(0, 1).T if name == "w_o" else rows.flatten(0, 1)
                )
    return copied


@pytest.mark.parametrize("names", [["w_k"], ["w_v"], ["w_q"], ["w_o"], ["w_q", "w_k", "w_v"]])
def test_a_removed_weight_is_removed_wherever_its_keys_and_values_are_read(
    gemma4: Tiny, model: Any, names: list[str]
) -> None:
    edited = with_drawn_weights(gemma4.hf, names, model)
    intact = hooked_run(model, gemma4.tokens)
    with ablated(model, Ablation(remove=names, replacement=drawn)):
        outputs = hooked_run(model, gemma4.tokens)
    assert largest_error(outputs, plain_run(edited, gemma4.tokens)) <= CLOSE
    assert largest_error(outputs, intact) > 0.01


def test_keys_and_values_of_one_layer_are_removed_in_the_layers_that_read_them(
    gemma4: Tiny, model: Any
) -> None:
    edited = deepcopy(gemma4.hf)
    attn = blocks_of(edited)[1].self_attn
    attn.k_proj.weight.zero_()
    for layers in ([1], [1, 3]):
        with ablated(model, Ablation(remove="w_k", layers=layers, replacement="zero")):
            outputs = hooked_run(model, gemma4.tokens)
        assert largest_error(outputs, plain_run(edited, gemma4.tokens)) <= CLOSE
    whose = r"w_k of L3 cannot be removed by itself: .* keys and values of L1; remove w_k of L1 too"
    for where in ({"layers": [3]}, {"layers": [0, 3]}, {"heads": {1: [2], 3: [2, 4]}}):
        with pytest.raises(ValueError, match=whose):
            ablated(model, Ablation(remove="w_k", replacement="zero", **where)).__enter__()  # type: ignore[arg-type]


def without_rope(hf: PreTrainedModel, layers: Collection[int]) -> PreTrainedModel:
    """Return a model whose scores have no rotation in some layers, whoever makes their keys."""
    copied = deepcopy(hf)
    straight: dict[str, Any] = {}
    turned: dict[str, Any] = {}

    def before(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cos, sin = kwargs["position_embeddings"]
        shared, kind = kwargs["shared_kv_states"], attn.layer_type
        none = torch.ones_like(cos), torch.zeros_like(sin)
        if not attn.is_kv_shared_layer:
            y = kwargs["hidden_states"]
            keys = attn.k_norm(attn.k_proj(y).unflatten(-1, (-1, attn.head_dim)))
            straight[kind] = apply_rotary_pos_emb(keys, *none, unsqueeze_dim=2).transpose(1, 2)
            turned[kind] = apply_rotary_pos_emb(keys, cos, sin, unsqueeze_dim=2).transpose(1, 2)
        else:
            which = straight if attn.layer_idx in layers else turned
            shared[kind] = which[kind], shared[kind][1]
        if attn.layer_idx in layers:
            kwargs["position_embeddings"] = none
        return args, kwargs

    for block in blocks_of(copied):
        block.self_attn.register_forward_pre_hook(before, with_kwargs=True)
    return copied


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [1], [3], [0, 3]])
def test_rope_is_removed_from_the_scores_of_a_layer_alone(
    gemma4: Tiny, model: Any, layers: list[int]
) -> None:
    expected = plain_run(without_rope(gemma4.hf, layers), gemma4.tokens)
    with ablated(model, Ablation(remove="rope", layers=layers)):
        outputs = hooked_run(model, gemma4.tokens)
    assert largest_error(outputs, expected) <= CLOSE
    heads = {layer: range(6) for layer in layers}
    with ablated(model, Ablation(remove="rope", heads=heads)):
        assert largest_error(hooked_run(model, gemma4.tokens), expected) <= CLOSE


@pytest.mark.parametrize("name", ["mask", "window"])
def test_the_mask_is_removed_in_layers_that_read_others_keys(
    gemma4: Tiny, model: Any, name: str
) -> None:
    edited = deepcopy(gemma4.hf)
    for block in blocks_of(edited)[2:]:
        unmask_and_unrotate(block.self_attn, {name})
    with ablated(model, Ablation(remove=name, layers=[2, 3])):
        outputs = hooked_run(model, gemma4.tokens)
    assert largest_error(outputs, plain_run(edited, gemma4.tokens)) <= CLOSE


def test_a_pass_that_begins_at_a_layer_has_the_keys_of_layers_before(
    gemma4: Tiny, model: Any
) -> None:
    tokens, calibration = gemma4.tokens, calibrate(model, gemma4.tokens)
    entry = run_to_enter(model, tokens, [3])
    assert_same(logits_of(model, tokens), gemma4.hf(tokens).logits, NETWORK)
    with ablated(model, Ablation(remove="w_q", layers=[3]), calibration):
        expected = logits_of(model, tokens)
        with entered(model, entry, 3):
            assert_same(logits_of(model, tokens), expected, NETWORK)


def test_generation_is_that_of_plain_transformers(gemma4: Tiny, model: Any) -> None:
    prompt, options = gemma4.tokens[:1, :5], {"max_new_tokens": 7, "do_sample": False}
    plain = gemma4.hf.generate(prompt, **options)
    assert model.hf_generate(prompt, **options).equal(plain)
    with ablated(model, "mask"):
        expected = by_whole_passes(model, prompt, 7)
        with pytest.warns(UserWarning, match="without a KV cache"):
            assert model.hf_generate(prompt, **options).equal(expected)
