"""The text decoder of a multimodal model is its text class, from an object or a folder."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support.plain_states import plain_losses
from support.rounding import NETWORK
from support.tiny_models import D_VOCAB, distance, randomise, tokens

from nope_probe import UserError, ablated, capture_losses, load
from nope_probe.hooks.layers.reference import text_config_of

TEXT: dict[str, Any] = {
    **{"vocab_size": D_VOCAB, "hidden_size": 48, "intermediate_size": 37, "head_dim": 12},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1},
}
SEEN = {"hidden_size": 16, "intermediate_size": 17, "num_hidden_layers": 1}
SEEN |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 17}
QWEN |= {"out_hidden_size": 48, "patch_size": 14}
THREE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 2]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEP = {**QWEN, "deepstack_visual_indexes": [0]}
# The text decoder's settings beside `TEXT`, and those of what sees.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AyaVision": ({"model_type": "cohere2", "logit_scale": 0.0625}, SEEN),  # scales no logits
    "Gemma3": ({"sliding_window": 5}, SEEN),
    "Gemma4": (
        {
            **{"sliding_window": 5, "hidden_size_per_layer_input": 8, "global_head_dim": 12},
            **{"vocab_size_per_layer_input": D_VOCAB, "num_kv_shared_layers": 0},
        },
        SEEN,
    ),
    "Idefics2": ({}, SEEN),
    "Idefics3": ({}, SEEN),
    "Llama4": (
        {"num_local_experts": 2, "intermediate_size_mlp": 31},
        SEEN | {"vision_output_dim": 48, "projector_input_dim": 16, "projector_output_dim": 48},
    ),
    "Llava": ({"model_type": "gemma2", "final_logit_softcapping": 0.5}, SEEN),  # caps no logits
    "LlavaNext": ({"model_type": "granite", "logits_scaling": 7.0}, SEEN),  # scales no logits
    "Mistral3": ({}, SEEN),
    "Qwen2Audio": (
        {},
        {
            **{"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 17, "num_mel_bins": 8, "max_source_positions": 10},
        },
    ),
    "Qwen2VL": (
        {"rope_parameters": THREE},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48},
    ),
    "Qwen2_5_VL": ({"rope_parameters": THREE}, QWEN),
    "Qwen3VL": ({"rope_parameters": THREE}, DEEP),
    "Qwen3VLMoe": ({"rope_parameters": THREE, **EXPERTS}, DEEP),
    "Qwen3_5": (
        {
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
        },
        QWEN,
    ),
    "SmolVLM": ({}, SEEN),
}


def multimodal(name: str) -> Any:
    """Return a tiny multimodal model of random weights."""
    text, sees = MODELS[name]
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    sees_or_hears = {"audio_config" if name.endswith("Audio") else "vision_config": sees}
    config = kind.config_class(text_config=TEXT | text, **sees_or_hears)
    return randomise(kind(config))


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_of_an_object_or_a_folder_equals_the_whole_model(
    name: str, tmp_path: Path
) -> None:
    hf, inputs = multimodal(name), tokens(3, 11)
    hf.save_pretrained(tmp_path)
    expected = plain_losses(hf, inputs)
    found = load(hf), load(tmp_path)
    for loaded in found:
        assert distance(capture_losses(loaded, inputs), expected) <= NETWORK
        whole = f", the text decoder of a {name}ForConditionalGeneration,"
        assert loaded.info.architecture.endswith(whole)
        within: Any = loaded.model
        names = [path for path, _ in within.original_model.named_parameters()]
        assert not [path for path in names if "vis" in path or "multi_modal" in path]
    of_object, of_folder = ([*_changed(loaded, inputs)] for loaded in found)
    for one, other in zip(of_object, of_folder, strict=True):
        assert distance(one, other) <= NETWORK
        assert distance(one, expected) > 1e-3


def _changed(loaded: Any, inputs: torch.Tensor) -> Any:
    for removed in ("mask", "rope"):
        with ablated(loaded, removed):
            yield capture_losses(loaded, inputs)


@pytest.mark.parametrize("name", ["Gemma3", "Qwen2_5_VL"])
def test_a_multimodal_model_inside_ablated_says_what_to_call(name: str) -> None:
    hf, inputs = multimodal(name), tokens(3, 11)
    intact = plain_losses(hf, inputs)
    with ablated(hf, "mask") as model:
        assert distance(capture_losses(model, inputs), intact) > 0.01
        for own in (hf, hf.model, hf.get_decoder()):
            with pytest.raises(UserError, match="call the model that `ablated` yields"):
                own(input_ids=inputs)
    assert torch.equal(plain_losses(hf, inputs), intact)


@pytest.mark.parametrize("of_text", [False, True], ids=["of the whole class", "of the text class"])
def test_an_adapter_on_a_multimodal_folder_acts_as_peft_does(of_text: bool, tmp_path: Path) -> None:
    hf, inputs = multimodal("Qwen2_5_VL"), tokens(3, 11)
    hf.save_pretrained(tmp_path / "model")
    base = plain_text(hf) if of_text else hf
    targets = r".*layers.*\.(q_proj|k_proj)" if of_text else r".*language_model.*\.(q_proj|k_proj)"
    config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    loaded = load(tmp_path / "model", adapter=tmp_path / "adapter")
    expected = plain_losses(adapted, inputs)
    assert distance(capture_losses(loaded, inputs), expected) <= NETWORK
    assert distance(plain_losses(multimodal("Qwen2_5_VL"), inputs), expected) > 1e-3


def plain_text(hf: Any) -> Any:
    """Return the text class's model of the same weights as a Qwen2.5-VL."""
    config = text_config_of(deepcopy(hf.config))
    text = transformers.Qwen2ForCausalLM(config)
    text.model.load_state_dict(hf.model.language_model.state_dict())
    text.lm_head.load_state_dict(hf.lm_head.state_dict())
    return text.eval()


def test_a_model_that_feeds_its_decoder_otherwise_has_no_text_decoder() -> None:
    config = transformers.PaliGemmaConfig()
    assert text_config_of(config) is config
