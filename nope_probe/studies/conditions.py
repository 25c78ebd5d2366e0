"""The settings of the commands that remove components: what is removed, and what replaces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro
from annotated_types import Interval

from nope_probe.errors import UserError
from nope_probe.hooks.removing.settings import WITH_GAIN, Ablation, Replacement
from nope_probe.models.info import ModelInfo
from nope_probe.removal import COMPONENTS, PER_HEAD, Condition, Gain, Writer, spelled
from nope_probe.run.flags import LARGEST, Mistakes, without_effect
from nope_probe.run.settings import RunSettings

_arg = tyro.conf.arg
NAMES = (
    f"{' '.join(COMPONENTS)} norms, the circuits qk ov, rope_high and rope_low (pairs whose "
    "wavelength is below the sequence's length, and the rest), the position that a head, MLP or "
    "embedding writes (position[L1H0], position[MLP0]), that of all blocks in a model that stays "
    "causal (written), content (attention becomes its mean over "
    "texts), unions such as w_k+w_o"
)


@dataclass(frozen=True, kw_only=True)
class RemovingSettings(RunSettings):
    """What is removed from a model, and what replaces its weights.

    Attributes:
        in_heads: The heads that lose what --remove names (L16H0 L18H6), in place of all heads;
            `ablate` removes the sources in all heads as well.
        replacement: What a removed weight is replaced by.
        kept_positions: How many first tokens keep what blocks write, where `written` is removed; 0
            takes the first token's mark too.
    """

    remove: Annotated[
        tuple[str, ...] | None, _arg(help=f"What to remove from every block: {NAMES}.")
    ] = ()
    in_heads: tuple[str, ...] = ()
    replacement: Replacement = "mean"
    gain: Annotated[Gain, _arg(help=f"The size of the replacements {' and '.join(WITH_GAIN)}.")] = (
        "output"
    )

    kept_positions: Annotated[int, Interval(ge=0, le=LARGEST)] = 1

    boxes: ClassVar = {"remove": "removing"}

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        yield from super().mistakes()
        names, with_gain = self.replacements, " and ".join(WITH_GAIN)
        yield (
            len({*names}) < max(1, len(names)),
            f"expected each --replacement once, got {' '.join(names) or 'none'}",
        )
        named, spellings = self.named, [*map(spelled, self.remove or ())]
        yield (
            len({*named}) < len(named) or len({*spellings}) < len(spellings),
            f"--remove names something twice: {' '.join(spellings)}",
        )
        yield from self.wrong_removals()
        yield (
            self.gain != "output" and not {*WITH_GAIN} & {*names},
            f"--gain is for the replacements {with_gain}, not {' '.join(names)}: take "
            f"--replacement {WITH_GAIN[0]}, or leave --gain out",
        )

    @property
    def named(self) -> Sequence[Condition]:
        """What is removed by name, one condition at a time."""
        return [self.removed]

    def wrong_removals(self) -> Mistakes:
        """Yield what can be wrong with what is removed, where the settings say it."""
        if self.remove is not None:
            yield from self.wrong_conditions(self.named)

    def wrong_conditions(self, conditions: Sequence[Condition]) -> Mistakes:
        """Yield for flags of weights and of heads whether they have no condition to act on."""
        if not any(condition.weights for condition in conditions):
            unused = ("replacement", "gain")
            yield from without_effect(self, unused, "where no weight is removed")
        if not any(condition.of_blocks for condition in conditions):
            reason = "where written is not removed"
            yield from without_effect(self, ["kept_positions"], reason)
        removed = [name for condition in conditions for name in condition.ordered]
        without = [name for name in removed if name.kind not in PER_HEAD]
        has_heads = self.heads_by_layer is not None
        yield has_heads and not removed, "--in-heads has no effect where nothing is removed"
        yield (
            has_heads and without,
            f"--in-heads: {''.join(without[:1])} has no heads; name what heads can lose",
        )

    @property
    def heads_by_layer(self) -> dict[int, list[int]] | None:
        """The heads that lose what is removed, by layer; None for all.

        Raises:
            UserError: for a name that is no head's.
        """
        heads: dict[int, list[int]] = {}
        for name in self.in_heads:
            writer = Writer.parse(name)
            if writer is None or writer.head is None:
                raise UserError(f"--in-heads {name}: expected heads, such as L1H3")
            heads.setdefault(writer.block, []).append(writer.head)
        return heads or None

    def mistakes_of(self, info: ModelInfo) -> Mistakes:
        """Yield whether a layer or a head that the settings name does not exist."""
        yield from super().mistakes_of(info)
        n_layers = min(self.depth or info.n_layers, info.n_layers)
        for layer, heads in (self.heads_by_layer or {}).items():
            yield (
                layer not in info.attending or layer >= n_layers or max(heads) >= info.n_heads,
                f"--in-heads L{layer}H{max(heads)}: the run has the heads H0 to "
                f"H{info.n_heads - 1} of L0 to L{n_layers - 1}",
            )

    @property
    def removes(self) -> bool:
        """Whether the run removes components."""
        return self.remove not in ((), ("none",))

    @property
    def removed(self) -> Condition:
        """All components to remove, at once.

        Raises:
            UserError: for a name that does not exist, or names that share a component.
        """
        return parse_removed(self.remove or ())

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """The replacements of removed weights, in turn."""
        given: Replacement | tuple[Replacement, ...] = self.replacement
        return (given,) if isinstance(given, str) else given

    @property
    def ablations(self) -> tuple[Ablation, ...]:
        """For each replacement of removed weights, an ablation that removes nothing yet."""
        return tuple(
            Ablation(
                replacement=name,
                gain=self.gain if name in WITH_GAIN else None,
                seed=self.seed,
                heads=self.heads_by_layer,
                kept_positions=self.kept_positions,
            )
            for name in self.replacements
        )


def parse_removed(names: str | Sequence[str]) -> Condition:
    """Return the condition that `--remove` names.

    Raises:
        UserError: for a name that does not exist, or names that share a component.
    """
    try:
        return Ablation(remove=names).condition
    except ValueError as error:
        raise UserError(f"--remove: {error}") from error
