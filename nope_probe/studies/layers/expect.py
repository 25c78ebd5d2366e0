"""Comparison of a probed model with `--expect`, and with its configuration.

An example of an expectation is `no_rope_layers=3,7,11`. This file needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError
from nope_probe.files import JsonObject

if TYPE_CHECKING:
    from nope_probe.studies.layers.probe import LayerFindings

NONE = "none"
Value = bool | int | float | None
# Keys whose value is a list of the layers that have a property, or `none`.
LAYER_LISTS: dict[str, Callable[[LayerFindings], bool]] = {
    "rope_layers": lambda layer: layer.rope,
    "no_rope_layers": lambda layer: not layer.rope,
    "window_layers": lambda layer: layer.mask.kind in ("window", "two-sided window"),
    "qk_norm_layers": lambda layer: layer.q_norm or layer.k_norm,
    "sink_layers": lambda layer: layer.sinks,
    "bias_layers": lambda layer: layer.score_bias > 0,
    "mla_layers": lambda layer: layer.mla,
}
# Keys whose value is a number, equal in all layers that have it, or `none` if no layer may have it.
NUMBERS: dict[str, Callable[[LayerFindings], float | None]] = {
    "sliding_window": lambda layer: layer.mask.size if "window" in layer.mask.kind else None,
    "chunk": lambda layer: layer.mask.size if layer.mask.kind == "chunks" else None,
    "prefix": lambda layer: layer.mask.size if layer.mask.kind == "prefix" else None,
    "rope_base": lambda layer: layer.rope_base if layer.rope else None,
    "rope_first": lambda layer: layer.rope_first if layer.rope else None,
    "rope_scale": lambda layer: layer.rope_scale if layer.rope else None,
    "rotary_fraction": lambda layer: layer.rotary_fraction if layer.rope else None,
    "rope_factor": lambda layer: layer.rope_factor if layer.rope else None,
    "soft_cap": lambda layer: layer.soft_cap,
    "scale": lambda layer: layer.scale,
}
# The findings of a layer that configurations speak of.
MEASURED: dict[str, Callable[[LayerFindings], Value]] = {
    "RoPE": LAYER_LISTS["rope_layers"],
    "RoPE base": NUMBERS["rope_base"],
    "RoPE scale": NUMBERS["rope_scale"],
    "rotary fraction": NUMBERS["rotary_fraction"],
    "learned positions": lambda layer: layer.learned_positions_change > 0,
    "window": NUMBERS["sliding_window"],
    "q/k-norm": LAYER_LISTS["qk_norm_layers"],
    "soft cap": NUMBERS["soft_cap"],
    "scale": lambda layer: abs(layer.scale),
}
BOS = "bos"  # `forced` or `none`
LENGTHS = ("sliding_window", "chunk", "prefix")  # these need a longer batch
SIGNED = ("rope_first",)
KEYS = (*LAYER_LISTS, *NUMBERS, BOS)
TOLERANCE = 1e-3  # relative, of numbers


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A `KEY=VALUE` of the command line.

    Attributes:
        key: an entry of `KEYS`.
        text: the value as given.
        value: layer numbers, a number, None for `none`, or a word for `bos`.
    """

    key: str
    text: str
    value: frozenset[int] | float | str | None

    def check(self, findings: Sequence[LayerFindings], bos: str) -> str | None:
        """Return a line that names the difference; None if the model is as expected."""
        if self.key == BOS:
            return None if bos == self.value else f"bos: expected {self.text}, found {bos}"
        if self.key in LAYER_LISTS:
            has_it = LAYER_LISTS[self.key]
            return self._layers_differ(frozenset(e.layer for e in findings if has_it(e)))
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
    if key == BOS and value not in ("forced", NONE):
        raise UserError(f"--expect {text}: expected bos=forced or bos=none")
    read = _layer_numbers if key in LAYER_LISTS else _number
    expected = value if key == BOS else read(text, key, value)
    return Expectation(key=key, text=value, value=expected)


def _number(text: str, key: str, value: str) -> float | None:
    if value == NONE:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"--expect {text}: expected a number or none, got {value!r}")
    if (number <= 0 and key not in SIGNED) or (key in LENGTHS and not number.is_integer()):
        kind = "whole number of 1 or more" if key in LENGTHS else "number above 0"
        raise UserError(f"--expect {text}: expected a {kind}, or none")
    return number


def validate_depth(expectations: Sequence[Expectation], n_layers: int) -> None:
    """Check that the model has all layers that expectations name.

    Raises:
        UserError: naming a layer that does not exist.
    """
    for expectation in expectations:
        named = expectation.value if isinstance(expectation.value, frozenset) else ()
        if max(named, default=0) >= n_layers:
            raise UserError(
                f"--expect {expectation.key}={expectation.text}: the layers that were read are 0 "
                f"to {n_layers - 1}, and there is no L{max(named)}"
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


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement of a configuration about a layer.

    Attributes:
        field: the field, as the configuration spells it, with its value.
        about: the subject of the statement: an entry of `MEASURED`.
        value: the stated value.
    """

    field: str
    about: str
    value: Value


def mismatches(cfg: Any, config: JsonObject | None, findings: list[LayerFindings]) -> list[str]:
    """Return a line for each difference to the configurations, with the layers that share it.

    A window that is not shorter than the batch cannot be detected, nor can the base of a single
    pair. A layer without RoPE is compared in this alone.

    Args:
        cfg: TransformerLens's configuration.
        config: Hugging Face's, of a bridge.
        findings: what was found of each layer.
    """
    layers: dict[str, list[str]] = {}
    for finding in findings:
        for claim in claims(cfg, config, finding.layer):
            value = MEASURED[claim.about](finding)
            if _is_visible(claim, finding) and not _agree(claim.value, value):
                said = f"{claim.field}, but {_words(claim.about, value)}"
                layers.setdefault(said, []).append(f"L{finding.layer}")
    return [f"{', '.join(named)}: {said}" for said, named in layers.items()]


def _is_visible(claim: Statement, findings: LayerFindings) -> bool:
    """Return whether the batch can show that a claim is true."""
    if claim.about == "window":
        return (claim.value or 0) < findings.mask.n_positions
    if claim.about in ("RoPE base", "RoPE scale"):
        return findings.rope and MEASURED[claim.about](findings) is not None
    return findings.rope_pairs > 0 or claim.about != "rotary fraction"


def claims(cfg: Any, config: JsonObject | None, layer: int) -> Iterator[Statement]:
    """Return the claims of TransformerLens's and Hugging Face's configurations about a layer."""
    yield from _lens_claims(cfg)
    if config is not None:
        yield from hugging_face_claims(config, layer)


def _lens_claims(cfg: Any) -> Iterator[Statement]:
    kind = cfg.positional_embedding_type
    field = f"TransformerLens's cfg.positional_embedding_type is {kind!r}"
    if kind in ("rotary", "standard"):
        yield Statement(field=field, about="RoPE", value=kind == "rotary")
    if kind == "standard":
        yield Statement(field=field, about="learned positions", value=True)


def hugging_face_claims(config: JsonObject, layer: int) -> Iterator[Statement]:
    """Return the claims of a config.json about a layer."""
    rotates = _entry(config.get("no_rope_layers"), layer)
    if rotates is not None:
        field = f"config.no_rope_layers[{layer}] is {rotates} (1: RoPE, 0: none)"
        yield Statement(field=field, about="RoPE", value=bool(rotates))
    rope = _rope_parameters(config, layer)
    if rope and rotates is None:
        yield Statement(field="config.rope_parameters is set", about="RoPE", value=True)
    if rope and rotates != 0:
        yield from _rope_claims(rope)
    yield from _window_claims(config, layer)
    for name, about in (("attn_logit_softcapping", "soft cap"), ("use_qk_norm", "q/k-norm")):
        if name in config:
            yield Statement(
                field=f"config.{name} is {config[name]}", about=about, value=config[name]
            )
    if scalar := config.get("query_pre_attn_scalar"):
        field = f"config.query_pre_attn_scalar is {scalar}"
        yield Statement(field=field, about="scale", value=scalar**-0.5)


def _rope_claims(rope: JsonObject) -> Iterator[Statement]:
    if base := rope.get("rope_theta"):
        field = f"config.rope_parameters has rope_theta {base:g}"
        yield Statement(field=field, about="RoPE base", value=float(base))
    kind = rope.get("rope_type")
    if kind in ("default", "linear"):  # other kinds scale pairs by their wavelength
        scale = float(rope["factor"]) if kind == "linear" else 1.0
        field = f"config.rope_parameters has rope_type {kind!r}"
        field += f" and factor {scale:g}" if kind == "linear" else ""
        yield Statement(field=field, about="RoPE scale", value=scale)
    if fraction := rope.get("partial_rotary_factor"):
        field = f"config.rope_parameters has partial_rotary_factor {fraction:.4g}"
        yield Statement(field=field, about="rotary fraction", value=fraction)


def _window_claims(config: JsonObject, layer: int) -> Iterator[Statement]:
    if "sliding_window" not in config:
        return
    window, kind = config["sliding_window"], _entry(config.get("layer_types"), layer)
    field = f"config.sliding_window is {window}"
    if kind is not None:
        field += f" and layer_types[{layer}] {kind!r}"
    slides = config.get("use_sliding_window", True) and kind in (None, "sliding_attention")
    yield Statement(field=field, about="window", value=window if slides else None)


def _rope_parameters(config: JsonObject, layer: int) -> JsonObject:
    """Return the RoPE parameters of a layer; some models have parameters per kind of layer."""
    rope = config.get("rope_parameters") or {}
    of_kind = rope.get(_entry(config.get("layer_types"), layer) or "")
    return of_kind if isinstance(of_kind, dict) else rope


def _entry(values: Any, layer: int) -> Any:
    return values[layer] if isinstance(values, list) and layer < len(values) else None


def _agree(said: Value, measured: Value) -> bool:
    if said is None or measured is None or isinstance(said, bool) or isinstance(measured, bool):
        return bool(said) == bool(measured) and (said is None) == (measured is None)
    return abs(measured - said) <= TOLERANCE * abs(said)


def _words(about: str, measured: Value) -> str:
    if isinstance(measured, bool):
        return f"{'scores depend' if measured else 'no score depends'} on {about}"
    return f"no {about} was found" if measured is None else f"the {about} is {measured:.4g}"
