"""ModelInfo: a model's sizes, its kind and where it was loaded from, for the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from nope_probe.hooks.layers.model import blocks_of, layers_of
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.removing.targets import rope_layers


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model's description, for the manifest.

    Attributes:
        name: the name that it was loaded by.
        source: the Hub id or folder; `configuration` for a model without weights of its own.
        revision: the Hub revision.
        architecture: the class of the Hugging Face or hooked model.
        kind: `HookedTransformer` or `TransformerBridge`.
        n_layers, n_heads, n_kv_heads, d_head, d_model, n_ctx, d_vocab: sizes.
        rope_layers: for each block whether it has RoPE.
        not_attending: the numbers of blocks that do not attend, in a hybrid model.
        parity: relative errors: `logits` and `pattern` (attention weights) against plain
            transformers; of a parameter-free model, `output` against TransformerLens's own code; of
            a bridge without position encoding, `positions`: how far permuted position ids change
            the scores.
    """

    name: str
    source: str
    revision: str | None = None
    architecture: str
    kind: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    n_ctx: int
    d_vocab: int
    rope_layers: tuple[bool, ...]
    not_attending: tuple[int, ...] = ()
    parity: dict[str, float] = field(default_factory=dict)

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

    def to_dict(self) -> dict[str, object]:
        """Return the info as JSON-ready values."""
        return asdict(self)


def describe(
    model: HookedModel,
    name: str,
    source: str = "configuration",
    architecture: str | None = None,
    revision: str | None = None,
) -> ModelInfo:
    """Return a model's info, without the parity that `check_parity` measures.

    The architecture is by default the class of the hooked model, or of the model in its bridge.
    """
    layers = layers_of(model)
    return ModelInfo(
        name=name,
        source=source,
        revision=revision,
        architecture=architecture or type(getattr(model, "original_model", model)).__name__,
        kind=layers[0].kind,
        n_layers=len(blocks_of(model)),
        n_heads=layers[0].n_heads,
        n_kv_heads=layers[0].n_kv_heads,
        d_head=layers[0].d_head,
        d_model=layers[0].d_model,
        n_ctx=model.cfg.n_ctx,
        d_vocab=model.cfg.d_vocab,
        rope_layers=rope_layers(model),
        not_attending=tuple(
            sorted({*range(len(blocks_of(model)))} - {each.index for each in layers})
        ),
    )
