"""LoRA adapters that begin with random numbers."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import plain


def lora(*modules: str, **options: Any) -> LoraConfig:
    """Return the configuration of an adapter of some modules, of rank 3 by default."""
    return LoraConfig(target_modules=[*modules], init_lora_weights=False, **{"r": 3} | options)


def adapted(hf: Any, **options: Any) -> Any:
    """Return a model with an adapter in attention and MLP."""
    torch.manual_seed(3)
    return get_peft_model(hf, lora("q_proj", "v_proj", "down_proj", **options)).eval()


def write_adapter(folder: Path, base: str) -> None:
    """Write an adapter that changes nothing yet, of a model that its configuration names."""
    tuned = get_peft_model(plain(Path(base)), LoraConfig(target_modules=["q_proj"]))
    tuned.save_pretrained(str(folder))
