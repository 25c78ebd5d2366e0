"""A Llama with random weights, of any size, as a user would load it, and its tokens."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nope_probe import capture_scores, load


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How large the model and the data are."""

    n_layers: int = 4
    d_model: int = 1024
    n_heads: int = 16
    n_kv_heads: int = 16
    d_mlp: int = 2816
    d_vocab: int = 2048
    seq_len: int = 1024
    batch_size: int = 2
    n_seqs: int = 16
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"


def config_of(settings: Settings) -> Any:
    """Return the configuration of a Llama of these sizes."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.d_vocab,
        hidden_size=settings.d_model,
        intermediate_size=settings.d_mlp,
        num_hidden_layers=settings.n_layers,
        num_attention_heads=settings.n_heads,
        num_key_value_heads=settings.n_kv_heads,
        max_position_embeddings=settings.seq_len,
    )


def build(settings: Settings, dtype: str | None = None) -> Any:
    """Write a folder with a random Llama, and load it as a user would, in its dtype or another."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    shipped = Path(sys.modules["nope_probe"].__path__[0], "checkpoints", "nope-tiny")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with torch.device(settings.device):
            made = LlamaForCausalLM(config_of(settings)).to(getattr(torch, settings.dtype))
        made.save_pretrained(folder)
        del made
        AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
        loaded = load(folder, device=settings.device, dtype=getattr(torch, dtype or settings.dtype))
        return loaded.model


def rounding(settings: Settings) -> tuple[float, float, float]:
    """Compare bfloat16 maps with float32 ones of the same weights: RMS and largest error, size."""
    maps = []
    for dtype in ("bfloat16", "float32"):
        maps.append(capture_scores(build(settings, dtype), tokens_of(settings), batch_size=1).mean)
    error = (maps[0] - maps[1]).nan_to_num()
    cells = maps[1].isfinite().sum()
    rms, size = ((m.nan_to_num().square().sum() / cells).sqrt() for m in (error, maps[1]))
    return float(rms), float(error.abs().max()), float(size)


def tokens_of(settings: Settings) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(settings.d_vocab, (settings.n_seqs, settings.seq_len), generator=generator)


def plain_model(sizes: Settings, attention: str) -> Any:
    """Return a plain model of the same sizes."""
    from transformers import LlamaForCausalLM

    config = config_of(sizes)
    config._attn_implementation = attention
    return LlamaForCausalLM(config).eval()


def plain_pass(model: Any, tokens: torch.Tensor) -> None:
    with torch.inference_mode():
        model(tokens, output_attentions=model.config._attn_implementation == "eager")
