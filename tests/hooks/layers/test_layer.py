"""One block's hook points, weights and steps from q and k to scores, on each kind of model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from support.edited_model import projections
from support.plain_states import plain_states
from support.tiny_models import (
    CONFIGS,
    D_VOCAB,
    distance,
    plain,
    randomised,
    tokenizer,
    tokens,
)
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_adjacent
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from nope_probe.hooks.layers.attached_hooks import hooks_attached
from nope_probe.hooks.layers.attention import repeat_heads, rotated
from nope_probe.hooks.layers.model import StopForward, layers_of, run_forward
from nope_probe.hooks.layers.qk_reader import QKReader
from nope_probe.models.load import load

ModelOf = Callable[[str], tuple[Any, str]]


def test_the_type_checks_of_shapes_are_on() -> None:
    with pytest.raises(TypeCheckError):
        repeat_heads(torch.zeros(2, 3, 5), 6)


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:smollm3", "hooked:smollm3-rope"])
def test_the_reader_reads_the_queries_and_keys_of_plain_transformers(
    spec: str, model_of: ModelOf, tiny: Callable[[str], Any]
) -> None:
    model, name = model_of(spec)
    readers = [QKReader(layer) for layer in layers_of(model)]
    with (
        torch.inference_mode(),
        hooks_attached(pair for reader in readers for pair in reader.hooks()),
    ):
        model(tiny(name).tokens)
        for reader, states in zip(
            readers, plain_states(tiny(name).hf, tiny(name).tokens), strict=True
        ):
            assert distance(reader.read("q"), states.q) <= 1e-5
            assert distance(reader.read("k"), states.k) <= 1e-5
            scores = reader.layer.scores(reader.read("q"), reader.read("k"))
            assert distance(scores, states.scores()) <= 1e-5


@pytest.mark.parametrize("d_rotary", [6, 10])
@pytest.mark.parametrize("adjacent", [False, True])
def test_rotating_equals_transformers_own_function(adjacent: bool, d_rotary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, 3, 10, generator=generator)
    angles = torch.randn(1, 7, d_rotary // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    theirs = rotate_adjacent if adjacent else rotate_halves
    turn, rest = x[..., :d_rotary], x[..., d_rotary:]
    expected = torch.cat([theirs(turn, turn, cos, sin, unsqueeze_dim=2)[0], rest], -1)
    assert torch.allclose(rotated(x, cos, sin, adjacent), expected, atol=1e-6)


@pytest.mark.parametrize(
    "spec",
    ["bridge:llama", "bridge:phi3", "bridge:gpt2", "hooked:smollm3-rope"],
)
def test_weights_per_head_are_views_that_multiply_as_transformers_projections(
    spec: str, model_of: ModelOf, tiny: Callable[[str], Any]
) -> None:
    model, name = model_of(spec)
    for layer in layers_of(model):
        for projection, (weight, bias) in projections(tiny(name).hf, layer.index).items():
            ours = layer.weight_per_head(projection)
            assert ours.data_ptr() == layer.weight(projection).data_ptr()
            if projection == "w_o":
                assert torch.equal(ours.flatten(0, 1), weight.T)
                continue
            assert torch.equal(ours.transpose(0, 1).flatten(1), weight.T)
            our_bias = layer.bias_per_head(projection)
            has_bias = bias is not None and bool(bias.any())
            assert (our_bias is not None and bool(our_bias.any())) is has_bias
            assert not has_bias or torch.equal(our_bias.flatten(), bias)


@pytest.mark.parametrize(
    ("spec", "parallel", "post_norm", "qk_norm", "d_rotary"),
    [
        ("bridge:llama", False, False, False, 10),
        ("bridge:phi3", False, False, False, 8),
        ("bridge:qwen3", False, False, True, 6),
        ("bridge:gemma2", False, True, False, 10),
        ("bridge:neox", True, False, False, 2),
        ("hooked:smollm3-rope", False, False, False, 10),
    ],
)
def test_the_features_of_a_block_are_those_of_its_architecture(
    spec: str, parallel: bool, post_norm: bool, qk_norm: bool, d_rotary: int, model_of: ModelOf
) -> None:
    for layer in layers_of(model_of(spec)[0]):
        assert (layer.parallel, layer.has_post_norm) == (parallel, post_norm)
        assert (layer.has_qk_norm, layer.d_rotary) == (qk_norm, d_rotary)
        assert (layer.attention_only, layer.has_sinks) == (False, False)


def test_a_parameter_free_block_is_attention_only() -> None:
    from nope_probe.models.parameter_free import build, parameter_free

    assert all(layer.attention_only for layer in layers_of(build(parameter_free(2, 6))))


def test_query_heads_share_key_heads_in_groups() -> None:
    x = torch.arange(2.0)[None, None, :, None]
    assert repeat_heads(x, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]


def test_sizes_are_those_of_the_configuration(model_of: ModelOf) -> None:
    for spec in ("bridge:llama", "bridge:smollm3", "hooked:smollm3-rope"):
        model, name = model_of(spec)
        layer = layers_of(model)[1]
        assert (layer.n_heads, layer.n_kv_heads, layer.d_head) == (6, 2, 10)
        assert layer.d_model == (42 if name == "llama" else 34)
        assert layer.scale == pytest.approx(10**-0.5)


def test_gemma_has_its_own_scale_and_a_soft_cap(bridge: Callable[[str], Any]) -> None:
    layer = layers_of(bridge("gemma2"))[0]
    assert (layer.scale, layer.soft_cap) == (pytest.approx(13**-0.5), 7.0)
    big = torch.full((1, 1, 1, 10), 50.0)
    assert layer.scores(big.expand(1, 1, 6, 10), big.expand(1, 1, 2, 10)).max() <= 7.0


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_hook_point_that_does_not_exist_is_an_error_that_lists_them(
    spec: str, model_of: ModelOf
) -> None:
    layer = layers_of(model_of(spec)[0])[1]
    assert layer.has("attn.hook_attn_scores")
    assert not layer.has("attn.hook_atn_scores")
    message = r"block 1 has no hook point 'attn.hook_atn_scores'; it has .*attn.hook_attn_scores"
    with pytest.raises(KeyError, match=message):
        layer.point("attn.hook_atn_scores")


@pytest.mark.usefixtures("unenforced")
def test_a_model_without_hook_points_is_an_error() -> None:
    linear: Any = torch.nn.Linear(2, 3)
    with pytest.raises(TypeError, match=r"expected a HookedTransformer .* got Linear"):
        layers_of(linear)


def test_hooks_run_in_order_and_only_they_are_removed(hooked: Callable[[str], Any]) -> None:
    point, calls = layers_of(hooked("smollm3-rope"))[0].point("attn.hook_q"), []

    def note(name: str) -> Any:
        return lambda tensor, hook: calls.append(name)

    def run_once() -> str:
        calls.clear()
        hooked("smollm3-rope")(torch.zeros(1, 3, dtype=torch.long))
        return "".join(calls)

    with hooks_attached([(point, note("a"))]):
        with hooks_attached([(point, note("b")), (point, note("c"))]):
            assert run_once() == "abc"
        assert run_once() == "a"
    assert run_once() == ""


def test_hooks_are_removed_when_a_later_one_cannot_be_attached(
    hooked: Callable[[str], Any],
) -> None:
    layer = layers_of(hooked("smollm3-rope"))[0]
    names = ("attn.hook_q", "attn.hook_typo")
    with (
        pytest.raises(KeyError),
        hooks_attached((layer.point(name), lambda tensor, hook: None) for name in names),
    ):
        pass
    assert not layer.point("attn.hook_q").fwd_hooks


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_run_takes_tokens_or_their_embeddings_and_ends_when_a_hook_stops_it(
    spec: str, model_of: ModelOf, tiny: Callable[[str], Any]
) -> None:
    model, name = model_of(spec)
    kept: list[torch.Tensor] = []

    def keep_and_stop(tensor: torch.Tensor, hook: object) -> None:
        kept.append(tensor.clone())
        raise StopForward

    tokens = tiny(name).tokens
    embeddings = tiny(name).hf.model.embed_tokens(tokens)
    point = layers_of(model)[1].point("hook_resid_post")
    with torch.inference_mode(), hooks_attached([(point, keep_and_stop)]):
        run_forward(model, tokens)
        run_forward(model, embeddings)
    assert tokens.max() < D_VOCAB
    assert distance(kept[1], kept[0]) <= 1e-6


def test_the_hooks_folder_imports_under_one_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    with pytest.raises(ImportError, match=r"import nope_probe\.hooks"):
        __import__("hooks")


def test_the_scale_of_gpt2_can_fall_with_the_layers_index(tmp_path: Path) -> None:
    """As in Mistral's GPT-2 models: scores of block l are over l + 1 too."""
    config = CONFIGS["gpt2"]()
    config.n_layer, config.scale_attn_by_inverse_layer_idx = 3, True
    randomised(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model, inputs = load(str(tmp_path)).model, tokens(5)
    weights = plain(tmp_path)(inputs, output_attentions=True).attentions
    for layer, expected in zip(layers_of(model), weights, strict=True):
        reader = QKReader(layer)
        assert layer.scale == pytest.approx(7**-0.5 / (layer.index + 1))
        with torch.inference_mode(), hooks_attached(reader.hooks()):
            model(inputs)
            scores = layer.scores(reader.read("q"), reader.read("k"))
        causal = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
        assert distance(causal.softmax(-1), expected) <= 1e-5
