"""The paper's configurations equal its equations, and conversions equal plain transformers."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from edited_model import edited
from plain_states import plain_states
from tiny_models import CONFIGS, distance, randomised, smollm3_config, tokens
from torch import Tensor
from torch.nn.functional import layer_norm, normalize

from nope_probe.errors import UserError
from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.capture import capture_scores
from nope_probe.hooks.layer import installed, layers_of, run
from nope_probe.models import build, hooked_config, load, nope_llama, parameter_free, to_hooked

LAYERS, N_POS, D = 3, 13, 22


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, N_POS, D, generator=torch.Generator().manual_seed(0))


def attend(scores: Tensor, values: Tensor, causal: bool = True) -> Tensor:
    if causal:
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ values


def rope(y: Tensor) -> Tensor:
    """Turn the pair (f, f + d/2) of position p by the angle p * 10000^(-2f/d)."""
    half = y.shape[-1] // 2
    angle = torch.arange(y.shape[-2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = y[..., :half], y[..., half:]
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ],
        -1,
    )


def eq_1(x: Tensor) -> Tensor:
    y = normalize(x, dim=-1)
    return attend(y @ y.mT, y) + x


def eq_1_with_rope(x: Tensor) -> Tensor:
    y = normalize(x, dim=-1)
    return attend(rope(y) @ rope(y).mT, y) + x


def eq_1_encoder(x: Tensor) -> Tensor:
    y = normalize(x, dim=-1)
    return attend(y @ y.mT, y, causal=False) + x


def layer_norm_variant(divisor: float) -> Callable[[Tensor], Tensor]:
    def block(x: Tensor) -> Tensor:
        y = layer_norm(x, x.shape[-1:], eps=1e-12)
        return attend(y @ y.mT / divisor, y) + x

    return block


@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({}, eq_1),
        ({"rope": True}, eq_1_with_rope),
        ({"causal": False}, eq_1_encoder),
        ({"norm": "layernorm-sqrt-d"}, layer_norm_variant(D**0.5)),
        ({"norm": "layernorm-d"}, layer_norm_variant(D)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_parameter_free_model_equals_the_papers_equation(
    options: dict[str, Any], block: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    model, truth = build(parameter_free(LAYERS, D, **options)), x
    for _ in range(LAYERS):
        truth = block(truth)
    seen = model(x, start_at_layer=0, stop_at_layer=LAYERS)
    assert distance(seen, truth) <= 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "at least 1 layer"),
        ((2, 0), "at least 1 layer and 1 dimension, got 2, 0"),
        ((2, 7, "l2", True), "an even d_model, got 7"),
        ((2, 8, "rms"), "expected norm l2"),
    ],
)
@pytest.mark.usefixtures("unenforced")
def test_a_configuration_that_cannot_be_is_an_error(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parameter_free(*arguments)


def one_head_model(d: int = 14) -> Any:
    """A random SmolLM3 with one head, norm weights 1 and next to no epsilon."""
    config = smollm3_config([1, 1])
    config.hidden_size, config.head_dim = d, d
    config.num_attention_heads = config.num_key_value_heads = 1
    config.rms_norm_eps = 1e-12
    hf = randomised(config)
    for block in hf.model.layers:
        block.input_layernorm.weight.fill_(1)
    return hf


def test_without_weights_a_model_equals_the_parameter_free_transformer() -> None:
    """W_V = I and scores over sqrt(d): the configuration, and softmax(YY^T/sqrt d) Y + X."""
    model, d = to_hooked(one_head_model()), 14
    config = parameter_free(2, d)
    config.attn_scale = d**0.5
    bare = build(config)
    for block in bare.blocks:
        block.attn.W_V.data.copy_(torch.eye(d)[None])
    x = truth = torch.randn(5, N_POS, d, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        y = normalize(truth, dim=-1) * d**0.5
        truth = attend(y @ y.mT / d**0.5, y) + truth
    removed = Ablation(remove=["rope", "w_q", "w_k", "w_v", "w_o", "mlp"], gain="identity")
    with ablated(model, removed):
        seen = model(x, start_at_layer=0, stop_at_layer=2)
    assert distance(bare(x, start_at_layer=0, stop_at_layer=2), truth) <= 1e-5
    assert distance(seen, truth) <= 1e-5


@pytest.mark.parametrize("name", ["smollm3-rope", "smollm3-nope"])
def test_a_converted_model_gives_the_logits_of_transformers(
    name: str, tiny: Callable[[str], Any], hooked: Callable[[str], Any]
) -> None:
    windows = tokens(5, 23, seed=3)
    truth = tiny(name).hf(windows).logits
    assert (hooked(name)(windows) - truth).abs().max() <= 1e-4
    assert distance(hooked(name)(windows), truth) <= 1e-5


def test_a_plain_llama_converts_too() -> None:
    config = CONFIGS["llama"]()
    config.attention_bias = config.mlp_bias = False
    hf, windows = randomised(config), tokens(5)
    assert distance(to_hooked(hf)(windows), hf(windows).logits) <= 1e-5


@pytest.mark.parametrize("name", ["smollm3-rope", "smollm3-nope"])
def test_hooked_transformer_and_bridge_of_a_folder_give_the_same_maps(
    name: str, hooked: Callable[[str], Any], bridge: Callable[[str], Any]
) -> None:
    windows = tokens(17, seed=3)
    ours, theirs = (
        capture_scores(model(name), windows, n_folds=2).folds.nan_to_num()
        for model in (hooked, bridge)
    )
    assert distance(ours, theirs) <= 1e-5


def test_a_mixed_model_needs_a_bridge() -> None:
    with pytest.raises(ValueError, match="RoPE in all layers or in none; use a bridge"):
        hooked_config(smollm3_config([1, 0]))


@pytest.mark.parametrize("rope", [False, True])
def test_the_trained_llamas_configuration_switches_rope_in_every_layer(rope: bool) -> None:
    config = nope_llama("tiny", rope)
    assert (config.positional_embedding_type == "rotary") is rope
    assert (config.n_layers, config.n_heads, config.n_key_value_heads) == (4, 4, 2)
    assert (config.d_model, config.d_mlp, config.d_vocab) == (128, 384, 2048)


@pytest.mark.usefixtures("unenforced")
def test_a_size_that_does_not_exist_is_an_error() -> None:
    size: Any = "70b"
    with pytest.raises(ValueError, match=r"size tiny or 1.5b, got '70b'"):
        nope_llama(size)


@pytest.mark.parametrize("name", ["parameter-free", "Parameter-Free-RoPE"])
def test_parameter_free_models_load_by_name_and_pass_the_contract(name: str) -> None:
    loaded = load(name, n_layers=2)
    assert loaded.tokenizer is None
    assert loaded.card.parameter_free
    assert loaded.card.rope_layers == (name.endswith("RoPE"),) * 2
    assert max(loaded.card.parity.values()) <= 1e-5


def test_a_folder_loads_with_its_parity_on_the_card(tiny: Callable[[str], Any]) -> None:
    loaded = load(str(tiny("smollm3").folder))
    card = loaded.card
    assert (card.kind, card.architecture) == ("TransformerBridge", "SmolLM3ForCausalLM")
    assert card.rope_layers == (True, False, True)
    assert set(card.parity) == {"logits", "pattern", "scores", "keys"}
    assert max(card.parity.values()) <= 1e-5
    windows = tiny("smollm3").tokens
    assert distance(loaded.model(windows), tiny("smollm3").hf(windows).logits) <= 1e-5


@pytest.mark.parametrize("name", ["smollm3", "qwen3", "gemma2"])
def test_the_first_layers_of_a_model_are_those_of_the_whole(
    name: str, tiny: Callable[[str], Any], bridge: Callable[[str], Any]
) -> None:
    windows, part = tokens(3), load(str(tiny(name).folder), n_layers=1)
    assert part.card.n_layers == len(layers_of(part.model)) == 1
    whole = capture_scores(bridge(name), windows, layers=[0], n_folds=1).mean
    seen = capture_scores(part.model, windows, n_folds=1).mean
    assert torch.equal(seen.nan_to_num(), whole.nan_to_num())


def test_the_papers_checkpoint_is_a_llama_whose_rope_is_switched_off(
    tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, llama = "starmpcc/NoPE_1.5B_FW_EDU_15T", tiny("llama")
    copytree(llama.folder, tmp_path / name)
    copytree(llama.folder, tmp_path / "with-rope")
    monkeypatch.chdir(tmp_path)
    unrotated = load(name)
    assert unrotated.card.rope_layers == (False, False)
    assert load("./with-rope").card.rope_layers == (True, True)
    truth = edited(llama.hf, ["rope"])(llama.tokens).logits
    assert distance(unrotated.model(llama.tokens), truth) <= 1e-5


def test_a_bridge_takes_vectors_as_input_embeddings(
    bridge: Callable[[str], Any], tiny: Callable[[str], Any]
) -> None:
    hf, windows, seen = tiny("smollm3").hf, tokens(3), []
    point = layers_of(bridge("smollm3"))[2].point("hook_resid_post")
    with torch.inference_mode(), installed([(point, lambda t, hook: seen.append(t))]):
        run(bridge("smollm3"), hf.model.embed_tokens(windows))
    assert distance(seen[0], plain_states(hf, windows)[2].output) <= 1e-5


@pytest.mark.parametrize("n_layers", [0, -1, 3])
def test_more_layers_than_there_are_or_none_are_an_error(
    n_layers: int, tiny: Callable[[str], Any]
) -> None:
    with pytest.raises(UserError, match="layer"):
        load(str(tiny("llama").folder), n_layers=n_layers)
