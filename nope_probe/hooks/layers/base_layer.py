"""Layer: one block of a model, with the same hook points, sizes and steps on every kind of model.

Hook names are TransformerLens's own, without the `blocks.l.` in front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nope_probe.components import Projection
from nope_probe.hooks.layers.attached_hooks import PlacedHook
from nope_probe.hooks.layers.attention import RemovedPairs, Rotary, repeat_heads
from nope_probe.hooks.layers.protocols import HookPoint

Kind = Literal["HookedTransformer", "TransformerBridge"]
NormName = Literal["ln1", "ln2"]
QueryOrKey = Literal["q", "k"]
Vectors = Float[Tensor, "batch pos d_model"]
Heads = Float[Tensor, "batch pos head d_head"]
# A removed W_K or W_V leaves a key or value head per query head.
Keys = Float[Tensor, "batch pos kv_head d_head"]
Values = Float[Tensor, "batch pos value_head d_head"]
Visible = Bool[Tensor, "query_pos key_pos"]
# From q and k as they are multiplied, v, and which keys each query attends to, to z.
Attend = Callable[[Heads, Keys, Values, Visible], Heads]

# Settings of TransformerLens under which other hook points of attention fire.
OPTIONS = (
    "use_attn_result",
    "use_split_qkv_input",
    "use_attn_in",
    "gated_q_proj",
    "use_logn_attn",
)


class Layer(ABC):
    """One block of a model.

    Attributes:
        index: the block's number, from 0.
        n_heads, n_kv_heads, d_head, d_model: sizes.
        scale: the factor between q.k and a score (1/sqrt(d_head) as a rule).
        soft_cap: c of c * tanh(score / c), or None (Gemma-2 has one).
        kind: the kind of model that the block belongs to.
        attn_out_point: the hook point at which the output of W_O is replaced.
        rope_point: a hook point that fires if and only if the block rotates q and k.
        attention_only: whether the block has no MLP.
        parallel: whether attention and MLP both read the block's input.
    """

    kind: ClassVar[Kind]
    attn_out_point: ClassVar[str]
    rope_point: ClassVar[str]
    scale: float
    soft_cap: float | None
    _UNFUSED: ClassVar[tuple[str, ...]]

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        self.block, self.index, self.cfg = block, index, cfg
        self.attn: Any = block.attn
        self.n_heads, self.d_head, self.d_model = cfg.n_heads, cfg.d_head, cfg.d_model
        self.n_kv_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        self.attention_only = bool(getattr(cfg, "attn_only", False))
        self.parallel = bool(getattr(cfg, "parallel_attn_mlp", False))

    def point(self, name: str) -> HookPoint:
        """Return the hook point of a TransformerLens name.

        Raises:
            KeyError: if there is none; the message lists those that there are.
        """
        found = self._find(name)
        if found is None:
            names = [n for n, each in self.block.named_modules() if isinstance(each, HookPoint)]
            raise KeyError(f"block {self.index} has no hook point {name!r}; it has {names}")
        return found

    def has(self, name: str) -> bool:
        """Return whether the block has a hook point of this name."""
        return self._find(name) is not None

    def _find(self, name: str) -> HookPoint | None:
        module: Any = self.block
        for part in name.split("."):
            module = getattr(module, part, None)
        return module if isinstance(module, HookPoint) else None

    def width(self, name: Projection) -> int:
        """Return the width of a projection's output: d_head of W_Q, W_K, W_V, d_model of W_O."""
        return self.d_model if name == "w_o" else self.d_head

    @property
    def adjacent(self) -> bool:
        """Whether RoPE turns the coordinates (2f, 2f + 1) together, and not (f, f + d_rotary/2)."""
        names = ("rotary_adjacent_pairs", "rotary_interleaved_cos_sin")
        return any(getattr(self.cfg, name, False) for name in names)

    @property
    def has_post_norm(self) -> bool:
        """Whether norms also follow attention or MLP (as in Gemma-2)."""
        return self.has("ln1_post.hook_out") or self.has("ln2_post.hook_out")

    @property
    @abstractmethod
    def has_qk_norm(self) -> bool:
        """Whether norms stand between W_Q, W_K and the scores."""

    @property
    @abstractmethod
    def has_sinks(self) -> bool:
        """Whether a learned sink takes a share of each row's attention outside the scores."""

    @property
    @abstractmethod
    def d_rotary(self) -> int:
        """How many coordinates of each head RoPE would turn."""

    @abstractmethod
    def norm_point(self, norm: NormName) -> str:
        """Return the name of the hook point that `norm_output` reads."""

    @abstractmethod
    def norm_output(self, norm: NormName, tensor: Vectors) -> Vectors:
        """Return a norm's output, learned weight included, from what its hook point carries."""

    @abstractmethod
    def hooks_without_norm_weight(self, norm: NormName) -> Iterator[PlacedHook]:
        """Return the hooks that take a norm's learned weight (and bias) out of its output."""

    @abstractmethod
    def hooks_without_rope(self, rope: RemovedPairs) -> Iterator[PlacedHook]:
        """Return the hooks that rotate some pairs of q and k as at position 0, everywhere."""

    @abstractmethod
    def rotary(self, fired: dict[str, Tensor]) -> Rotary | None:
        """Return how the block rotates queries and keys; None in a NoPE layer.

        Args:
            fired: the tensors of a pass over 2 positions or more, from 0 on, by the names of
                attention's hook points.
        """

    def score_bias(self, n_pos: int) -> Float[Tensor, "head query_pos key_pos"] | None:
        """Return what the last pass added to q.k times the scale (ALiBi), or None."""
        return None

    @abstractmethod
    def qk_norm(self, x: Heads, which: QueryOrKey) -> Heads:
        """Apply the q-norm or k-norm, if the block has one."""

    @abstractmethod
    def rotate(
        self, x: Heads, fired: dict[str, Tensor], real: Bool[Tensor, "batch pos"] | None = None
    ) -> Heads:
        """Apply RoPE as the block applies it in a forward pass.

        Args:
            x: normed queries or keys.
            fired: the tensors of that pass by the names of attention's hook points.
            real: which positions are not padding; None for all.
        """

    @abstractmethod
    def weight(self, name: Projection) -> nn.Parameter:
        """Return a projection's parameter, in the model's own layout."""

    @abstractmethod
    def weight_per_head(self, name: Projection) -> Float[Tensor, "head rows cols"]:
        """Return a view of a projection's weight: x W as in HookedTransformer, for each head.

        W_Q, W_K, W_V come as [head, d_model, d_head], W_O as [head, d_head, d_model].
        """

    @abstractmethod
    def bias_per_head(self, name: Projection) -> Float[Tensor, "head d_head"] | None:
        """Return a view of the bias of W_Q, W_K or W_V, if it has one."""

    @property
    @abstractmethod
    def has_plain_attention(self) -> bool:
        """Whether attention may be softmax(scale q.k) v and no more; a short batch has to show it.

        False for soft caps, sinks, and options of TransformerLens that other hook points need.
        """

    def unfused_points(self) -> list[HookPoint]:
        """Return the hook points of attention that do not fire in a fused forward pass."""
        return [self.point(f"attn.{name}") for name in self._UNFUSED if self.has(f"attn.{name}")]

    @abstractmethod
    def fused_forward(self, attend: Attend, replaced: Collection[Projection]) -> Callable[..., Any]:
        """Return a forward pass of attention in which `attend` stands for scores and pattern.

        Norms, RoPE, projections and their hook points are the model's own.

        Args:
            attend: computes z.
            replaced: projections whose output a hook replaces, before any other hook reads it: it
                need not be computed.
        """

    def with_unrotated(self, normed: Heads, turned: Heads, rope: RemovedPairs) -> Heads:
        """Return rotated queries or keys with the removed pairs as at position 0.

        Args:
            normed: queries or keys before RoPE, after q/k-norm.
            turned: the same after RoPE.
            rope: the removed pairs.
        """
        columns = self.rotary_columns(rope.mask(turned.shape[1])).to(turned.device)
        return torch.where(columns, normed * rope.rotary.factor, turned)

    def rotary_columns(self, pairs: Bool[Tensor, " pair"]) -> Bool[Tensor, " d_head"]:
        """Return which coordinates of each head belong to some rotary pairs."""
        turned = pairs.repeat_interleave(2) if self.adjacent else pairs.repeat(2)
        return torch.cat((turned, turned.new_zeros(self.d_head - len(turned))))

    def scores(
        self,
        q: Float[Tensor, "batch query_pos head d_head"],
        k: Float[Tensor, "batch key_pos kv_head d_head"],
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """Return the score of every query and key, scale and soft cap included, without a mask."""
        k = repeat_heads(k, self.n_heads)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        if self.soft_cap is None:
            return scores
        return self.soft_cap * torch.tanh(scores / self.soft_cap)
