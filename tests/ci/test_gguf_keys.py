"""What a GGUF file's keys say of positions and norms is in the model, or is refused by name."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from ci.gguf_files import tiny_llama, write_gguf
from support.decoders import SIZES, SPECIAL
from support.rounding import NETWORK
from support.tiny_models import D_VOCAB, distance, randomised, tokens
from transformers import CONFIG_MAPPING, PreTrainedConfig

from nope_probe import UserError, load
from nope_probe.models.context import configured_context

EPSILON = 0.03  # large enough to show in logits
BASE = 700.0
PART = {"rope_theta": BASE, "rope_type": "default", "partial_rotary_factor": 0.5}
LINEAR = {"rope_theta": BASE, "rope_type": "linear", "factor": 8.0}
YARN = {
    "rope_theta": BASE,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0}
GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}
TWO_BASES = {
    "full_attention": LINEAR,
    "sliding_attention": {"rope_theta": 40.0, "rope_type": "default"},
}
# Each architecture that transformers reads and TransformerLens too: its model type, and what its
# configuration has beside the tiny sizes. Layers 0 to 4 and 6 of Gemma 3 have a window.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", GEMMA | CAPS),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "layer_types": None, "rope_parameters": TWO_BASES},
    ),
    "gpt2": ("gpt2", {}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "llama": ("llama", {}),
    "minimax-m2": ("minimax_m2", {"rope_parameters": PART}),
    "nemotron": ("nemotron", {"rope_parameters": PART | {"partial_rotary_factor": 0.25}}),
    "phi3": ("phi3", {"rope_parameters": PART}),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen35": ("qwen3_5_text", {}),
    "stablelm": ("stablelm", {"rope_parameters": PART}),
    # TransformerLens knows StarCoder2's usual epsilon alone, and parity refuses another.
    "starcoder2": ("starcoder2", {"sliding_window": None, "norm_epsilon": 1e-5}),
}


def tiny(architecture: str, **settings: Any) -> PreTrainedConfig:
    """Return a tiny configuration of an architecture, with a base and an epsilon of its own."""
    model_type, special = ARCHITECTURES[architecture]
    kind = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(kind)}
    chosen = {name: value for name, value in SIZES.items() if name in known}
    chosen |= {name: EPSILON for name in known if name.endswith(("norm_eps", "norm_epsilon"))}
    if "layer_norm_eps" in known:
        chosen["layer_norm_eps"] = EPSILON
    if "rope_parameters" in known:
        chosen["rope_parameters"] = {"rope_theta": BASE, "rope_type": "default"}
    if architecture.startswith("qwen"):
        chosen |= {"use_sliding_window": False, "sliding_window": None}
    chosen |= {"vocab_size": D_VOCAB}
    return kind(**chosen | SPECIAL.get(model_type, {}) | special | settings)


def own_keys(architecture: str, config: Any) -> dict[str, Any]:
    """Return the keys that only one architecture's converter writes."""
    if architecture == "lfm2":
        return {
            "attention.head_count_kv": [0, 2, 2],
            "attention.layer_norm_epsilon": None,
            "attention.layer_norm_rms_epsilon": EPSILON,
            "shortconv.l_cache": config.conv_L_cache,
        }
    if architecture == "qwen35":
        return {
            "full_attention_interval": 2,
            "rope.dimension_sections": [1, 1, 1, 0],
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.time_step_rank": config.linear_num_value_heads,
        }
    return {}


def written(architecture: str, path: Path, *, keys: Any = None, **settings: Any) -> Any:
    """Write a tiny model of an architecture to a file, and return the model."""
    config = tiny(architecture, **settings)
    model, own = randomised(config), own_keys(architecture, config)
    write_gguf(path, model, architecture=architecture, keys=own | (keys or {}))
    return model


def error_of(path: Path, model: Any) -> float:
    inputs = tokens(5, 23)
    return distance(load(str(path)).model(inputs), model(inputs).logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_of_each_architecture_is_the_model_that_was_written_into_it(
    architecture: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    model = written(architecture, path)
    assert error_of(path, model) <= NETWORK
    if architecture != "bloom":  # whose ALiBi has no length
        assert configured_context(str(path)) == 64


@pytest.mark.parametrize("architecture", ["llama", "starcoder2", "stablelm"])
@pytest.mark.parametrize("scaling", [LINEAR, YARN])
def test_scaled_rope_is_the_models(
    architecture: str, scaling: dict[str, Any], tmp_path: Path
) -> None:
    path, parameters = tmp_path / "tiny.gguf", dict(scaling)
    if architecture == "stablelm":
        parameters["partial_rotary_factor"] = 0.5
    model = written(architecture, path, rope_parameters=parameters)
    assert error_of(path, model) <= NETWORK


def test_the_older_key_of_a_linear_scale_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    older = dict.fromkeys(
        ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
    )
    model = written("qwen2", path, rope_parameters=LINEAR, keys=older | {"rope.scale_linear": 8.0})
    assert error_of(path, model) <= NETWORK


def test_a_llama_that_is_named_mistral_is_a_llama(tmp_path: Path) -> None:
    model = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", model, name="mistral")
    assert error_of(path, model) <= NETWORK


def test_keys_that_say_nothing_change_nothing(tmp_path: Path) -> None:
    nothing = {
        "attention.causal": True,
        "attention.sliding_window": 0,
        "attention.max_alibi_bias": 0.0,
        "final_logit_softcapping": 0.0,
        "logit_scale": 1.0,
        "rope.scaling.type": "none",
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.finetuned": False,
        "rope.scaling.original_context_length": 16,
    }
    path, model = tmp_path / "tiny.gguf", tiny_llama()
    write_gguf(path, model, keys=nothing)
    assert error_of(path, model) <= NETWORK


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("bloom", "rope.freq_base", 10_000.0),
        ("gemma2", "rope.freq_base_swa", 100.0),
        ("gpt2", "attention.max_alibi_bias", 8.0),
        ("llama", "attention.causal", False),
        ("llama", "attention.clamp_kqv", 6.0),
        ("llama", "attention.temperature_length", 64),
        ("llama", "logit_scale", 0.5),
        ("llama", "rope.scaling.attn_factor", 1.2),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "rope.scaling.type", "yarn"),  # without a factor
        ("qwen2", "attention.sliding_window", 5),
        ("qwen3", "rope.dimension_count", 8),
        ("stablelm", "attention.sliding_window", 5),
    ],
)
def test_a_key_that_the_configuration_cannot_hold_is_refused_by_name(
    architecture: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    written(architecture, path, keys={key: value})
    with pytest.raises(UserError) as refused:
        load(str(path))
    assert str(refused.value) == (
        f"{path} states {key} = {as_float32(value)}, which transformers does not read from GGUF: "
        "take the model's folder or Hub id with safetensors"
    )


def as_float32(value: Any) -> Any:
    """Return a value as a file of float32 has it."""
    return torch.tensor(value).item() if isinstance(value, float) else value


@pytest.mark.parametrize("name", ["blk.1.attn_q_norm.weight", "blk.0.attn_post_norm.weight"])
def test_a_tensor_that_the_model_does_not_use_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = tiny_llama()
    write_gguf(path, model, more={name: torch.ones(model.config.head_dim)})
    with pytest.raises(UserError, match=rf"a LlamaForCausalLM does not use, such as {name} \(1 in"):
        load(str(path))
    loaded = load(str(path), allow_unused=True)
    assert loaded.info.unused == (name,)
    inputs = tokens(5)
    assert distance(loaded.model(inputs), model(inputs).logits) <= NETWORK
    assert load(str(path), n_layers=1, allow_unused=True).info.unused == (
        () if ".1." in name else (name,)
    )
