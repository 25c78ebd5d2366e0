"""What a model is: its sizes, its kind and where it came from, for the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from nope_probe.hooks.components import rope_layers
from nope_probe.hooks.layer import is_bridge, layers_of


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a model is, for the manifest.

    Attributes:
        parity: how far the hooks are from the truth, relative to the largest value: `logits`
            against plain transformers, `pattern` against softmax of the scores, `scores` against
            q.k times scale, `keys` against keys normed and rotated again; of a model that claims
            to have no position encoding, `positions`: how far permuted position ids move scores.
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
    parity: dict[str, float] = field(default_factory=dict)

    @property
    def parameter_free(self) -> bool:
        """Whether the weights are identities already."""
        return self.name.startswith("parameter-free")

    def to_dict(self) -> dict[str, Any]:
        """Give the info as JSON-ready values."""
        return asdict(self)


def describe(
    model: Any, name: str, source: str = "configuration", architecture: str | None = None
) -> ModelInfo:
    """Write a model's info, without the parity that `check` measures.

    The architecture is by default that of the hooked model, or of what its bridge leads to.
    """
    layer = layers_of(model)[0]
    return ModelInfo(
        name=name,
        source=source,
        architecture=architecture or type(getattr(model, "original_model", model)).__name__,
        kind="TransformerBridge" if is_bridge(model) else "HookedTransformer",
        n_layers=len(model.blocks),
        n_heads=layer.n_heads,
        n_kv_heads=layer.n_kv_heads,
        d_head=layer.d_head,
        d_model=layer.d_model,
        n_ctx=model.cfg.n_ctx,
        d_vocab=model.cfg.d_vocab,
        rope_layers=rope_layers(model),
    )
