"""The settings of the commands that remove components: what is removed, and what replaces it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from nope_probe.errors import UserError
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.stand_ins import WITH_GAIN, Replacement
from nope_probe.models.info import ModelInfo
from nope_probe.removal import COMPONENTS, Condition, Gain, Writer
from nope_probe.run.flags import validate_effects
from nope_probe.run.settings import RunSettings

_arg = tyro.conf.arg
NAMES = (
    f"{' '.join(COMPONENTS)} norms, the circuits qk ov, rope_high and rope_low (pairs whose "
    "wavelength is below the sequence's length, and the rest), the position that a head, MLP or "
    "embedding writes (position[L1H0], position[MLP0]), content (attention becomes its mean over "
    "texts), unions such as w_k+w_o"
)


@dataclass(frozen=True, kw_only=True)
class RemovingSettings(RunSettings):
    """What is removed from a model, and what replaces its weights.

    Attributes:
        in_heads: The heads that lose it (L16H0 L18H6), in place of all heads.
        replacement: What a removed weight is replaced by.
    """

    remove: Annotated[
        tuple[str, ...] | None, _arg(help=f"What to remove from every block: {NAMES}.")
    ] = ()
    in_heads: tuple[str, ...] = ()
    replacement: Replacement = "identity"
    gain: Annotated[Gain, _arg(help=f"The size of the replacements {' and '.join(WITH_GAIN)}.")] = (
        "output"
    )

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        names = self.replacements
        repeated = len({*names}) < max(1, len(names))
        has_gain = self.gain == "output" or bool({*WITH_GAIN} & {*names})
        for is_wrong, message in (
            (repeated, f"expected each --replacement once, got {' '.join(names) or 'none'}"),
            (
                not has_gain,
                f"--gain is for the replacements {' and '.join(WITH_GAIN)}, not {' '.join(names)}",
            ),
        ):
            if is_wrong:
                raise UserError(message)
        self.validate_removed()

    def validate_removed(self) -> None:
        """Check what the settings say is removed, without the model."""
        self.validate_conditions([self.removed])

    def validate_conditions(self, conditions: Sequence[Condition]) -> None:
        """Check that flags of weights and of heads have a condition to act on.

        Raises:
            UserError: naming the flag.
        """
        if not any(condition.weights for condition in conditions):
            reason = "where no weight is removed"
            validate_effects(self, {"replacement": reason, "gain": reason})
        removed = [name for condition in conditions for name in condition.ordered]
        without = [name for name in removed if not name.row.per_head]
        has_heads = self.heads_by_layer is not None
        for is_wrong, message in (
            (has_heads and not removed, "--in-heads has no effect where nothing is removed"),
            (
                has_heads and bool(without),
                f"--in-heads: {''.join(without[:1])} has no heads; name what heads can lose",
            ),
        ):
            if is_wrong:
                raise UserError(message)

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

    def validate_layers(self, info: ModelInfo) -> None:
        """Check that there are the layers and heads that the settings name.

        Raises:
            UserError: naming a layer or head that does not exist.
        """
        super().validate_layers(info)
        n_layers = min(self.depth or info.n_layers, info.n_layers)
        for layer, heads in (self.heads_by_layer or {}).items():
            if layer not in info.attending or layer >= n_layers or max(heads) >= info.n_heads:
                raise UserError(
                    f"--in-heads L{layer}H{max(heads)}: the run has the heads H0 to "
                    f"H{info.n_heads - 1} of L0 to L{n_layers - 1} (--layers)"
                )

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
            Ablation(replacement=name, gain=self.gain, seed=self.seed, heads=self.heads_by_layer)
            for name in self.replacements
        )


def parse_removed(names: str | Iterable[str]) -> Condition:
    """Return the condition that `--remove` names.

    Raises:
        UserError: for a name that does not exist, or names that share a component.
    """
    try:
        return Condition.parse(names)
    except ValueError as error:
        raise UserError(f"--remove: {error}") from error
