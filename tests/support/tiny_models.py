"""Tiny random Hugging Face folders, one per architecture, with a real tokenizer each.

Sizes are distinct primes where the architecture allows. Norm weights and biases are random, and
projections large enough that attention is far from uniform, so that no weight can be left out
unnoticed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    SmolLM3Config,
)

ByName = Callable[[str], Any]  # a fixture that makes a tiny model by its name
D_VOCAB = 263  # "<bos>", the 256 bytes and six merges
N_POS = 11
N_SEQS = 3

_SHARED: dict[str, Any] = {
    **{"vocab_size": D_VOCAB, "max_position_embeddings": 64, "intermediate_size": 37},
    **{"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
    **{"use_cache": False, "tie_word_embeddings": False},
}
_WIDE = _SHARED | {"hidden_size": 42, "head_dim": 10}  # 60 rows read 42
_PHI = _SHARED | {"hidden_size": 84}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 1e15}
_LLAMA_3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 16}
_PART = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 4 / 7}
_LONG = _PART | {"rope_type": "longrope", "original_max_position_embeddings": 16}
_LONG |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 7.0]}
_OF_GPT2 = {"n_positions": 64, "n_embd": 35, "n_layer": 2, "n_head": 5, "n_inner": 37}
_OF_NEOX = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 5}
_OF_NEOX |= {"intermediate_size": 37, "max_position_embeddings": 64}
_OF_BOTH = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
_GEMMA2 = {"sliding_window": 5, "attn_logit_softcapping": 7.0, "final_logit_softcapping": 29.0}


def smollm3_config(no_rope_layers: list[int]) -> PreTrainedConfig:
    """RoPE (1) or none (0) per layer."""
    sizes = {"hidden_size": 34, "head_dim": 10, "num_hidden_layers": len(no_rope_layers)}
    return SmolLM3Config(**_SHARED | sizes, no_rope_layers=no_rope_layers)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    # GQA, biases everywhere, heads wider than the residual stream
    "llama": partial(LlamaConfig, **_WIDE, attention_bias=True, mlp_bias=True),
    # RoPE forced off: positions divided by so much that no pair turns
    "llama-without-rope": partial(LlamaConfig, **_WIDE, rope_parameters=_LINEAR),
    # Llama 3.1's RoPE: slow pairs are slowed down further
    "llama-scaled": partial(
        LlamaConfig, **_WIDE | {"head_dim": 22, "num_hidden_layers": 1}, rope_parameters=_LLAMA_3
    ),
    # YaRN: slow pairs are slowed down, and rotated queries and keys grow by 1 + 0.1 ln 4
    "llama-yarn": partial(LlamaConfig, **_WIDE, rope_parameters=_YARN),
    # fused qkv, GQA, RoPE on 8 of 14 coordinates
    "phi3": partial(Phi3Config, **_PHI, rope_parameters=_PART),
    # LongRoPE on these: each pair slows down, and the rotated ones grow
    "phi3-longrope": partial(
        Phi3Config, **_PHI, original_max_position_embeddings=16, rope_parameters=_LONG
    ),
    # q/k-norm, biases, heads narrower than the residual stream (36 rows read 46)
    "qwen3": partial(Qwen3Config, **_SHARED, hidden_size=46, head_dim=6, attention_bias=True),
    "smollm3": partial(smollm3_config, [1, 0, 1]),
    "smollm3-rope": partial(smollm3_config, [1, 1]),
    "smollm3-nope": partial(smollm3_config, [0, 0]),
    "mistral": partial(MistralConfig, **_WIDE, sliding_window=5),
    # soft cap, a scale, norms after attention and MLP, a window in every other layer
    "gemma2": partial(Gemma2Config, **_WIDE, **_GEMMA2, query_pre_attn_scalar=13),
    # LayerNorm with biases, learned position embeddings
    "gpt2": partial(GPT2Config, **_OF_BOTH, **_OF_GPT2),
    # attention and MLP in parallel, fused qkv, RoPE on a quarter of each head
    "neox": partial(GPTNeoXConfig, **_OF_BOTH, **_OF_NEOX),
    # attention and MLP in parallel, RoPE on adjacent pairs, LayerNorm without bias
    "cohere": partial(CohereConfig, **_PHI, attention_bias=True),
}


@dataclass(frozen=True)
class Tiny:
    """A folder on disk, and its model in plain transformers."""

    name: str
    folder: Path
    hf: PreTrainedModel
    tokens: torch.Tensor


ModelOf = Callable[..., tuple[Any, Tiny]]  # `bridge:llama` -> the hooked model, and the folder


def write_tiny(name: str, root: Path, seed: int = 0) -> Tiny:
    """Write a random model of a named architecture to a folder, and load it with transformers."""
    folder = root / name
    model = randomised(CONFIGS[name](), seed)
    model.save_pretrained(folder)
    tokenizer(forces_bos=name == "llama").save_pretrained(folder)
    return Tiny(name=name, folder=folder, hf=plain(folder), tokens=tokens(seed=seed))


def change(folder: Path, file: str = "config.json", **settings: Any) -> None:
    """Change settings of a JSON file in a folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def write(folder: Path, model: PreTrainedModel) -> Path:
    """Write a model and the tiny tokenizer to a folder, and return the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_llama(folder: Path) -> Path:
    return write(folder, randomised(CONFIGS["llama"]()))


def randomised(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a model whose every parameter is random: norms around 1, biases around 0."""
    return randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


def randomise(model: Any, seed: int = 0) -> Any:
    """Give every parameter of a model random numbers, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.requires_grad_(False).copy_(_scaled(name, noise))
    return model


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if noise.ndim == 1:
        is_norm_weight = name.endswith("weight")
        return 1 + 0.3 * noise if is_norm_weight else 0.5 * noise
    if "embed" in name or "wte" in name or "wpe" in name:
        return noise
    fan_in = noise.shape[0] if ".c_" in name else noise.shape[1]  # GPT-2's Conv1D is transposed
    return 1.3 * noise / fan_in**0.5


def plain(folder: Path) -> PreTrainedModel:
    """Load a folder with nothing but transformers."""
    config = AutoConfig.from_pretrained(folder)
    hf = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return hf.eval().requires_grad_(False)


def tokens(n_seqs: int = N_SEQS, n_pos: int = N_POS, seed: int = 0) -> torch.Tensor:
    """Draw random token sequences."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(D_VOCAB, (n_seqs, n_pos), generator=generator)


def users_bridge(tiny: Tiny, hf: Any) -> Any:
    """Return the bridge of a model as users make it, without the package."""
    from transformer_lens.model_bridge import TransformerBridge

    folder, boot = str(tiny.folder), TransformerBridge.boot_transformers
    return boot(folder, hf_model=hf, tokenizer=AutoTokenizer.from_pretrained(folder))


def hooked_transformer(**settings: Any) -> Any:
    """Return a HookedTransformer, which TransformerLens 4 has not, of two layers by default."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 2, "n_ctx": 64, "d_vocab": D_VOCAB, "device": "cpu"}
    return HookedTransformer(HookedTransformerConfig(**sizes | settings))


def write_texts(file: Path, *, n_texts: int, n_words: int) -> None:
    """Write random texts to a JSONL file, one a line."""
    words = ["the", "other", "rather", "into", "at", "there", "here", "than", "an", "end", "of"]
    draw = np.random.default_rng(0)
    rows = [json.dumps({"text": " ".join(draw.choice(words, n_words))}) for _ in range(n_texts)]
    file.write_text("\n".join(rows))


def tokenizer(forces_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with six merges, which adds BOS if asked."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "r"), ("t", "h"), ("i", "n"), ("a", "t"), ("o", "n"), ("r", "e")]
    vocab = {token: i for i, token in enumerate(["<bos>", *alphabet, *map("".join, merges)])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if forces_bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<bos>")


def distance(values: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest expected value."""
    return float((values - expected).abs().max().detach() / expected.abs().max().detach())
