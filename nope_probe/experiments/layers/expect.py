"""Expectations of a model, such as `no_rope_layers=3,7,11`, held against what was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from nope_probe.experiments.layers.probe import LayerFindings

NONE = "none"
# Which layers have something; the value is a list of layer numbers, or `none`.
LAYER_LISTS: dict[str, Callable[[LayerFindings], bool]] = {
    "rope_layers": lambda layer: layer.rope,
    "no_rope_layers": lambda layer: not layer.rope,
    "window_layers": lambda layer: layer.mask.kind in ("window", "two-sided window"),
    "qk_norm_layers": lambda layer: layer.q_norm or layer.k_norm,
    "sink_layers": lambda layer: layer.sinks,
    "bias_layers": lambda layer: layer.score_bias > 0,
    "mla_layers": lambda layer: layer.mla,
}
# A number that is the same in all layers that have it, or `none` if no layer may have it.
NUMBERS: dict[str, Callable[[LayerFindings], float | None]] = {
    "sliding_window": lambda layer: layer.mask.size if "window" in layer.mask.kind else None,
    "chunk": lambda layer: layer.mask.size if layer.mask.kind == "chunks" else None,
    "prefix": lambda layer: layer.mask.size if layer.mask.kind == "prefix" else None,
    "rope_base": lambda layer: layer.rope_base if layer.rope else None,
    "rotary_fraction": lambda layer: layer.rotary_fraction if layer.rope else None,
    "rope_factor": lambda layer: layer.rope_factor if layer.rope else None,
    "soft_cap": lambda layer: layer.soft_cap,
    "scale": lambda layer: layer.scale,
}
BOS = "bos"  # `forced` or `none`
LENGTHS = ("sliding_window", "chunk", "prefix")  # which need a batch that is longer
KEYS = (*LAYER_LISTS, *NUMBERS, BOS)
TOLERANCE = 1e-3  # relative, of numbers


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One `KEY=VALUE` of the command line.

    Attributes:
        key: one of `KEYS`.
        text: the value as it was given.
        value: layer numbers, a number, None for `none`, or a word for `bos`.
    """

    key: str
    text: str
    value: frozenset[int] | float | str | None

    def check(self, findings: Sequence[LayerFindings], bos: str) -> str | None:
        """Return a line that says what differs; None if all is as expected."""
        if self.key == BOS:
            return None if bos == self.value else f"bos: expected {self.text}, found {bos}"
        if self.key in LAYER_LISTS:
            layers = frozenset(e.layer for e in findings if LAYER_LISTS[self.key](e))
            return self._layers_differ(layers)
        return self._numbers_differ(findings)

    def _layers_differ(self, layers: frozenset[int]) -> str | None:
        expected = self.value
        if not isinstance(expected, frozenset) or layers == expected:
            return None
        parts = [f"{self.key}: expected {_named(expected)}, found {_named(layers)}"]
        if layers - expected:
            parts.append(f"not expected {_named(layers - expected)}")
        if expected - layers:
            parts.append(f"missing {_named(expected - layers)}")
        return "; ".join(parts)

    def _numbers_differ(self, findings: Sequence[LayerFindings]) -> str | None:
        values = {finding.layer: NUMBERS[self.key](finding) for finding in findings}
        known = {layer: float(value) for layer, value in values.items() if value is not None}
        if self.value is None:
            return None if not known else f"{self.key}: expected none, found {_numbers(known)}"
        assert isinstance(self.value, float)
        if not known:
            return f"{self.key}: expected {self.text}, found none"
        limit = TOLERANCE * abs(self.value)
        wrong = {layer: v for layer, v in known.items() if abs(v - self.value) > limit}
        return None if not wrong else f"{self.key}: expected {self.text}, found {_numbers(wrong)}"


def parse_expectation(text: str) -> Expectation:
    """Return the expectation of a `KEY=VALUE`.

    Raises:
        UserError: for a key that does not exist, or a value of another kind.

    Example:
        >>> sorted(parse_expectation("no_rope_layers=3,7").value)
        [3, 7]
    """
    key, equals, value = text.partition("=")
    if not equals or key not in KEYS:
        raise UserError(f"--expect {text}: expected KEY=VALUE with a KEY of {', '.join(KEYS)}")
    if key == BOS:
        if value not in ("forced", NONE):
            raise UserError(f"--expect {text}: expected bos=forced or bos=none")
        return Expectation(key=key, text=value, value=value)
    if key in LAYER_LISTS:
        return Expectation(key=key, text=value, value=_layer_numbers(text, key, value))
    return Expectation(key=key, text=value, value=_number(text, key, value))


def _number(text: str, key: str, value: str) -> float | None:
    if value == NONE:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"--expect {text}: expected a number or none, got {value!r}")
    if number <= 0 or (key in LENGTHS and not number.is_integer()):
        kind = "whole number of 1 or more" if key in LENGTHS else "number above 0"
        raise UserError(f"--expect {text}: expected a {kind}, or none")
    return number


def validate_depth(expectations: Sequence[Expectation], n_layers: int) -> None:
    """Check that the model has the layers that are expected of it.

    Raises:
        UserError: naming a layer that does not exist.
    """
    for expectation in expectations:
        if (
            isinstance(expectation.value, frozenset)
            and max(expectation.value, default=0) >= n_layers
        ):
            raise UserError(
                f"--expect {expectation.key}={expectation.text}: the layers that were read are 0 "
                f"to {n_layers - 1}, and there is no L{max(expectation.value)}"
            )


def _layer_numbers(text: str, key: str, value: str) -> frozenset[int]:
    parts = [] if value == NONE else value.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UserError(f"--expect {text}: expected layer numbers such as {key}=3,7,11, or none")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):
        raise UserError(
            f"--expect {text}: a layer is named twice; expected layer numbers from 0, not a flag "
            "per layer as in SmolLM3's config.json (where 1 means that the layer uses RoPE)"
        )
    return frozenset(numbers)


def _named(layers: frozenset[int]) -> str:
    return ",".join(map(str, sorted(layers))) or NONE


def _numbers(values: dict[int, float]) -> str:
    return ", ".join(f"{value:.6g} in L{layer}" for layer, value in values.items())
