"""Folders of models that every command refuses, by the reason: unsupported ones and broken ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_models import CONFIGS, randomised, tokenizer
from transformers import PreTrainedConfig, PreTrainedModel


def change(folder: Path, file: str = "config.json", **settings: Any) -> None:
    """Change settings of a JSON file in a folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def write(folder: Path, model: PreTrainedModel, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


def write_llama(folder: Path, **options: Any) -> Path:
    return write(folder, randomised(CONFIGS["llama"]()), **options)


def _decoder(make: Callable[[], PreTrainedConfig]) -> Callable[[Path], Path]:
    return lambda folder: write(folder, randomised(make()))


def _traps(folder: Path, module: str) -> None:
    """Put code beside the weights that leaves a file if it is run."""
    (folder / f"{module}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


def remote_model(folder: Path) -> Path:
    named = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(write_llama(folder), architectures=["OwnForCausalLM"], auto_map=named)
    _traps(folder, "own")
    return folder


def remote_tokenizer(folder: Path) -> Path:
    named = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    file = "tokenizer_config.json"
    change(write_llama(folder), file, tokenizer_class="OwnTokenizer", auto_map=named)
    _traps(folder, "own")
    return folder


def gptq(folder: Path) -> Path:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    change(write_llama(folder), quantization_config=said)
    return folder


mamba = _decoder(
    lambda: transformers.MambaConfig(vocab_size=263, hidden_size=24, num_hidden_layers=2)
)


def fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Write a Llama whose projections are 8-bit floats with a scale per block of 128 x 128.

    Return the plain weights that they encode.
    """
    file = write_llama(folder) / "model.safetensors"
    stored, meant = {}, {}
    for name, weight in load_file(file).items():
        stored[name] = meant[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / 448  # the largest number of float8_e4m3fn
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            meant[name] = stored[name].float() * scale
    save_file(stored, file, metadata={"format": "pt"})
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    change(folder, quantization_config=said)
    return meant
