"""A model in memory, and its description for the manifest: sizes, kind, parity. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nope_probe.files import JsonObject, read_json
from nope_probe.models.names import path_of

if TYPE_CHECKING:  # importing these classes takes seconds
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerBase


# The names of sizes in a config.json, in the spellings of transformers' models.
_SIZES = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "n_kv_heads": ("num_key_value_heads",),
    "d_head": ("head_dim",),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "n_ctx": ("max_position_embeddings",),
    "d_vocab": ("vocab_size",),
}


@dataclass(frozen=True, kw_only=True)
class GGUFInfo:
    """A GGUF file's hash and quantisation, for the manifest.

    Attributes:
        file: its name.
        sha256: the hash of its bytes.
        file_type: the quantisation that the file states, such as `MOSTLY_Q4_1`; None if none.
        tensor_types: the number of tensors of each type.
    """

    file: str
    sha256: str
    file_type: str | None
    tensor_types: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model's description, for the manifest.

    Attributes:
        name: the name given to `load`; the file's name of a GGUF file.
        source: the Hub id, folder or GGUF file; `configuration` for a model without
            weights.
        revision: the Hub revision.
        architecture: the class of the Hugging Face or hooked model.
        kind: `HookedTransformer` or `TransformerBridge`.
        depth: how many layers the model has in its files, of which n_layers were loaded.
        n_layers, n_heads, n_kv_heads, d_head, d_model, n_ctx, d_vocab: sizes.
        rope_layers: for each block, whether it has RoPE.
        not_attending: the numbers of blocks that do not attend, in a hybrid model.
        keys_from: for each block the block whose keys and values it attends to, where blocks share
            keys; empty where none does.
        parity: relative errors. `logits` and `pattern` (attention weights) are against plain
            transformers; `output`, of a parameter-free model, against TransformerLens's code;
            `positions`, of a bridge without position encoding, is the change of scores under
            permuted position ids.
        gguf: the hash and the quantisation of a GGUF file; None for other models.
        adapter: the kind of the adapter that was merged into the weights, such as `LORA`; None
            without an adapter.
        unused: the tensors of the files that the model does not use.
        unread: the files of other weights in the model's folder, which were not read.
    """

    name: str
    source: str
    revision: str | None = None
    architecture: str
    kind: str
    n_layers: int
    depth: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    n_ctx: int
    d_vocab: int
    rope_layers: tuple[bool, ...]
    not_attending: tuple[int, ...] = ()
    keys_from: tuple[int, ...] = ()
    parity: dict[str, float] = field(default_factory=dict)
    gguf: GGUFInfo | None = None
    adapter: str | None = None
    unused: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def attending(self) -> tuple[int, ...]:
        """The numbers of the blocks that attend: all of them, except in hybrid models."""
        return tuple(layer for layer in range(self.n_layers) if layer not in self.not_attending)

    @property
    def parameter_free(self) -> bool:
        """Whether the weights are identities."""
        return self.name.startswith("parameter-free")

    @property
    def summary(self) -> str:
        """The name, kind, sizes, position encoding and parity, in three lines."""
        n_rope = sum(self.rope_layers)
        rope = {0: "no RoPE", self.n_layers: "RoPE in every layer"}.get(
            n_rope, f"RoPE in {n_rope} of {self.n_layers} layers"
        )
        errors = ", ".join(f"{name} {value:.1g}" for name, value in self.parity.items())
        return (
            f"{self.name}, a {self.architecture} as {self.kind}\n"
            f"{self.n_layers} layers of {self.n_heads} heads ({self.n_kv_heads} of keys), d_head "
            f"{self.d_head}, d_model {self.d_model}, d_vocab {self.d_vocab}; {rope}\n"
            f"parity (relative errors): {errors or 'not measured'}"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadedModel:
    """A hooked model, its tokenizer (None if it has none) and its info.

    The tokenizer is as on disk. `model.tokenizer` is a copy in which TransformerLens has set
    missing special tokens, for example BOS to EOS.
    """

    model: HookedTransformer | TransformerBridge
    tokenizer: PreTrainedTokenizerBase | None
    info: ModelInfo

    def __repr__(self) -> str:
        """Return the model's name, kind, sizes and position encoding, in two lines."""
        return f"LoadedModel: {self.info.summary.rpartition(chr(10))[0]}"


def stated_info(name: str) -> ModelInfo | None:
    """Return what the config.json of a model on this machine says, or None without its sizes.

    All blocks are taken to attend, and a size that it does not state is 0. It says of shipped
    models alone which layers have RoPE.

    Example:
        >>> info = stated_info("nope-tiny")
        >>> info.n_layers, info.n_heads, info.n_ctx, info.rope_layers
        (4, 4, 256, (False, False, False, False))
    """
    path = path_of(name)
    try:
        config = read_json(path / "config.json") if path is not None else {}
        config = config.get("text_config") or config
        sizes = JsonObject()
        for size, spellings in _SIZES.items():
            values = map(config.get, spellings)
            sizes[size] = next((n for n in values if isinstance(n, int)), 0)
    except (OSError, ValueError, AttributeError):  # loading the model says what is wrong with it
        return None
    if not (sizes["n_layers"] and sizes["n_heads"]):
        return None
    return ModelInfo(
        name=name,
        source=str(path),
        architecture=str(config.get("model_type")),
        kind="config.json",
        depth=sizes["n_layers"],
        rope_layers=tuple(map(bool, config.get("no_rope_layers") or ())),
        **sizes,
    )
