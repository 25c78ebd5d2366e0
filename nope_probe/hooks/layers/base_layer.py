"""Layer: one block of a model, with the same hook points, sizes and steps on every kind of model.

A block's rotation by RoPE is recognised here too.

Hook names are TransformerLens's, without the `blocks.l.` in front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nope_probe.errors import UserError
from nope_probe.hooks.layers.hook_points import HookPoint, PlacedHook
from nope_probe.hooks.layers.tap import Tap
from nope_probe.maps.positions import Angles, Rotation, cos_and_sin
from nope_probe.removal import Projection

ModelKind = Literal["HookedTransformer", "TransformerBridge"]
NormName = Literal["ln1", "ln2"]
COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Vectors = Float[Tensor, "batch pos d_model"]
FITS = 1e-3  # relative error up to which a rotation is recognised


@dataclass(frozen=True, kw_only=True, eq=False)
class Traits:
    """The positional parts of one block's attention.

    Attributes:
        rotary: the rotation of queries and keys; None without RoPE.
        window: whether a sliding window or a chunk hides earlier keys.
        sinks: whether a learned sink takes a share of each row's attention outside the scores.
        alibi: whether a bias is added to the scores.
    """

    rotary: Rotation | None
    window: bool = False
    sinks: bool = False
    alibi: bool = False


def find_point(block: nn.Module, name: str) -> HookPoint | None:
    """Return the hook point of a TransformerLens name in a block, if it has one."""
    module: Any = block
    for part in name.split("."):
        module = getattr(module, part, None)
    return module if isinstance(module, HookPoint) else None


class Layer(ABC):
    """One block of a model.

    Attributes:
        index: the block's number, from 0.
        attending: the module that attends, and that holds the tap.
        n_heads, n_kv_heads, d_head, d_model: sizes.
        d_value: the width of a head's values, d_head except in multi-head latent attention.
        kind: the kind of model that the block belongs to.
        attn_out_point: the hook point at which the output of W_O is replaced.
        shares_keys: whether other blocks attend to the same keys and values (Gemma 4 E2B).
        source_of_keys: the number of the block whose keys and values this block attends to; None
            for its own.
        attention_only: whether the block has no MLP.
        parallel: whether attention and MLP both read the block's input.
        tap: computes the block's attention.
    """

    kind: ClassVar[ModelKind]
    attn_out_point: str
    masked: ClassVar[float | None] = None

    def __init__(self, block: nn.Module, index: int, cfg: Any) -> None:
        self.block, self.index, self.cfg = block, index, cfg
        self.attn: Any = block.attn
        self.attending: Any = self.attn
        self.n_heads, self.d_head, self.d_model = cfg.n_heads, cfg.d_head, cfg.d_model
        self.d_value, self.shares_keys = cfg.d_head, False
        self.source_of_keys: int | None = None
        self.n_kv_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        self.attention_only = bool(getattr(cfg, "attn_only", False))
        self.parallel = bool(getattr(cfg, "parallel_attn_mlp", False))

    @property
    def tap(self) -> Tap:
        """The function that computes the block's attention."""
        attributes = vars(self.attending)  # past a bridge's __setattr__
        if "tap" not in attributes:
            points = self.point("attn.hook_attn_scores"), self.point("attn.hook_pattern")
            attributes["tap"] = Tap(*points, masked=self.masked)
        return attributes["tap"]

    @property
    def is_attached(self) -> bool:
        """Whether the block attends through its tap.

        Raises:
            UserError: if a user has replaced the forward of its attention.
        """
        forwards = [vars(part).get("forward") for part in (self.attn, self.attending)]
        if any(isinstance(forward, FunctionType) for forward in forwards):
            raise UserError(
                f"the forward of blocks.{self.index}.attn was replaced on the object, and would be "
                "dropped: write it as a hook, which acts"
            )
        return forwards[0] is not None

    def attach_tap(self) -> None:
        """Let the block attend through its tap."""
        vars(self.attn)["forward"] = self._attend

    def detach_tap(self) -> None:
        """Let the block attend by TransformerLens's code."""
        del vars(self.attn)["forward"]

    @abstractmethod
    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        """Attend through the tap, with the arguments of TransformerLens's code."""

    def point(self, name: str) -> HookPoint:
        """Return the hook point of a TransformerLens name.

        Raises:
            KeyError: if the block has no such point; the message lists the block's hook points.
        """
        point = find_point(self.block, name)
        if point is None:
            names = [n for n, module in self.block.named_modules() if isinstance(module, HookPoint)]
            raise KeyError(f"block {self.index} has no hook point {name!r}; it has {names}")
        return point

    def has(self, name: str) -> bool:
        """Return whether the block has a hook point of this name."""
        return find_point(self.block, name) is not None

    def by_head(
        self, z: Float[Tensor, "batch pos *heads"]
    ) -> Float[Tensor, "batch pos head d_value"]:
        """Return z split into heads; a bridge splits it by the width of queries, or not at all."""
        return z.flatten(2).unflatten(-1, (self.n_heads, self.d_value))

    def output_point(self, name: Projection) -> str:
        """Return the name of the hook point that carries a projection's output."""
        return self.attn_out_point if name == "w_o" else f"attn.hook_{name[-1]}"

    def has_matrix(self, name: Projection) -> bool:
        """Return whether a projection is a separate matrix, with a hook point at its output."""
        return self.has("attn.hook_z" if name == "w_o" else self.output_point(name))

    def why_not_replaced(self, name: Projection) -> str | None:
        """Return the reason why a projection cannot be replaced; None if it can."""
        return None

    @abstractmethod
    def norm_point(self, norm: NormName) -> str:
        """Return the name of the hook point that `norm_output` reads."""

    @abstractmethod
    def norm_output(self, norm: NormName, tensor: Vectors) -> Vectors:
        """Return a norm's output, learned weight included, from the tensor at its hook point."""

    @abstractmethod
    def hooks_without_norm_weight(self, norm: NormName) -> Iterator[PlacedHook]:
        """Return the hooks that take a norm's learned weight (and bias) out of its output."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the block attends, though its weights be packed."""
        weights = (weight.dtype for part in (self.attn, self.block) for weight in part.parameters())
        return next(dtype for dtype in weights if dtype in COMPUTED)

    @abstractmethod
    def weight(self, name: Projection) -> Tensor:
        """Return the matrix by which a projection multiplies, in the model's layout.

        It is the projection's parameter where one parameter is that matrix.
        """

    @abstractmethod
    def weight_per_head(self, name: Projection) -> Float[Tensor, "head rows cols"]:
        """Return a view of a projection's weight: x W as in HookedTransformer, for each head.

        W_Q, W_K, W_V come as [head, d_model, d_head], W_O as [head, d_head, d_model].
        """


def is_plain(linear: nn.Module) -> bool:
    """Return whether a module multiplies by its weight, and by nothing else."""
    if type(linear).__name__ == "Conv1D":  # of GPT-2
        return True
    tensors = {name for name, _ in (*linear.named_parameters(), *linear.named_buffers())}
    is_alone = isinstance(linear, nn.Linear) and tensors <= {"weight", "bias"}
    return is_alone and linear.weight.dtype in COMPUTED


def fit_rotary(
    angles: Angles | None,
    turned: Float[Tensor, "head d_head"],
    straight: Float[Tensor, "head d_head"],
) -> Rotation | None:
    """Return a block's rotation, from its queries at position 1; None if it does not rotate.

    Args:
        angles: the block's angles of positions 0 and 1, if it takes any.
        turned: the block's queries.
        straight: the queries with the angles of position 0.
    """
    if torch.equal(turned, straight):
        return None
    if angles is None or (isinstance(angles, Tensor) and not angles.is_complex()):
        return Rotation(pairs=None, cos=torch.zeros(2, 0), sin=torch.zeros(2, 0))
    cos, sin = (table.flatten(0, -3)[0].double().cpu() for table in cos_and_sin(angles))
    angle = torch.atan2(sin[1], cos[1])
    fits = max(FITS, 8 * torch.finfo(turned.dtype).eps) * float(turned.abs().max())
    turned, straight = turned.double().cpu(), straight.double().cpu()[None]
    n, half = len(angle), torch.arange(len(angle) // 2)
    layouts = [torch.arange(n)]  # one column for each pair
    if n % 2 == 0:  # the same pairs again, behind the last (0 1 0 1) or in turn (0 0 1 1)
        layouts = [half.repeat(2), half.repeat_interleave(2), *layouts]
    for columns in layouts:
        blank = cos.new_zeros(2, int(columns.max()) + 1)
        rotation = Rotation(pairs=None, cos=blank, sin=blank, columns=columns).at((cos, sin))
        if not torch.allclose(rotation.frequencies[columns], angle):
            continue
        for pairs in _possible_pairs(blank.shape[1], turned.shape[-1]):
            known = replace(rotation, pairs=pairs)
            expected = known.among(slice(1, 2)).turned(straight)
            if (expected[0] - turned).abs().max() <= fits:
                return known
    return rotation


def _possible_pairs(n_pairs: int, d_head: int) -> list[Int[Tensor, "pair two"]]:
    """Return the layouts of pairs in use, in the first coordinates of a head or in the last."""
    number, layouts = torch.arange(n_pairs), []
    for begin in dict.fromkeys((0, d_head - 2 * n_pairs)):
        if 0 <= begin <= d_head - 2 * n_pairs:
            layouts.append(begin + torch.stack((number, number + n_pairs), -1))
            layouts.append(begin + torch.stack((2 * number, 2 * number + 1), -1))
    return layouts
