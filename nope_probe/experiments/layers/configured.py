"""What a model's configuration says about position, and where that is not what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nope_probe.experiments.layers.probe import LayerFindings
from nope_probe.hooks.layers.model import hugging_face_config
from nope_probe.hooks.layers.protocols import HookedModel

TOLERANCE = 1e-3  # relative, of numbers
Value = bool | int | float | None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that a configuration says of a layer.

    Attributes:
        field: the field, as the configuration spells it, with its value.
        about: what it says something about: an entry of `found_of`.
        value: what it says.
    """

    field: str
    about: str
    value: Value


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that a configuration says of some layers and that is not so.

    Attributes:
        layers: the layers.
        field: the field with its value.
        about: what it is about.
        found: what was found instead.
    """

    layers: tuple[int, ...]
    field: str
    about: str
    found: Value

    def __str__(self) -> str:
        named = ", ".join(f"L{layer}" for layer in self.layers)
        return f"{named}: {self.field}, but {_words(self.about, self.found)}"


def differences(model: HookedModel, findings: list[LayerFindings]) -> list[Difference]:
    """Return where the configuration says otherwise, alike layers together.

    A window that is not shorter than the batch does not show, nor does the base of a single pair.
    Of a layer without RoPE, only that is said.
    """
    grouped: dict[tuple[str, str, Value], list[int]] = {}
    for each in findings:
        found = found_of(each)
        for claim in claims(model, each.layer):
            if _is_visible(claim, each) and not _agree(claim.value, found[claim.about]):
                key = (claim.field, claim.about, found[claim.about])
                grouped.setdefault(key, []).append(each.layer)
    return [
        Difference(layers=tuple(layers), field=field, about=about, found=found)
        for (field, about, found), layers in grouped.items()
    ]


def _is_visible(claim: Claim, findings: LayerFindings) -> bool:
    """Return whether the batch can show that a claim is true."""
    if claim.about == "window":
        return (claim.value or 0) < findings.mask.n_positions
    if claim.about == "RoPE base":
        return findings.rope and findings.rope_base is not None
    return findings.rope or claim.about != "rotary fraction"


def found_of(findings: LayerFindings) -> dict[str, Value]:
    """Return what was found in a layer, in the terms that configurations use."""
    windowed = findings.mask.kind in ("window", "two-sided window")
    return {
        "RoPE": findings.rope,
        "RoPE base": findings.rope_base if findings.rope else None,
        "rotary fraction": findings.rotary_fraction if findings.rope else None,
        "learned positions": findings.learned_positions_change > 0,
        "window": findings.mask.size if windowed else None,
        "q/k-norm": findings.q_norm or findings.k_norm,
        "soft cap": findings.soft_cap,
        "scale": abs(findings.scale),
    }


def claims(model: HookedModel, layer: int) -> Iterator[Claim]:
    """Return what TransformerLens's and Hugging Face's configurations say of a layer."""
    yield from _lens_claims(model.cfg)
    config = hugging_face_config(model)
    if config is not None:
        yield from hugging_face_claims(config, layer)


def _lens_claims(cfg: Any) -> Iterator[Claim]:
    kind = cfg.positional_embedding_type
    field = f"TransformerLens's cfg.positional_embedding_type is {kind!r}"
    if kind == "rotary":
        yield Claim(field=field, about="RoPE", value=True)
    elif kind == "standard":
        yield Claim(field=field, about="RoPE", value=False)
        yield Claim(field=field, about="learned positions", value=True)


def hugging_face_claims(config: Mapping[str, Any], layer: int) -> Iterator[Claim]:
    """Return what a config.json says of a layer."""
    rotates = _entry(config.get("no_rope_layers"), layer)
    if rotates is not None:
        field = f"config.no_rope_layers[{layer}] is {rotates} (1: RoPE, 0: none)"
        yield Claim(field=field, about="RoPE", value=bool(rotates))
    rope = _rope_parameters(config, layer)
    if rope and rotates is None:
        yield Claim(field="config.rope_parameters is set", about="RoPE", value=True)
    if rope and rotates != 0:
        yield from _rope_claims(rope)
    yield from _window_claims(config, layer)
    for name, about in (("attn_logit_softcapping", "soft cap"), ("use_qk_norm", "q/k-norm")):
        if name in config:
            yield Claim(field=f"config.{name} is {config[name]}", about=about, value=config[name])
    if config.get("query_pre_attn_scalar"):
        scalar = config["query_pre_attn_scalar"]
        field = f"config.query_pre_attn_scalar is {scalar}"
        yield Claim(field=field, about="scale", value=scalar**-0.5)


def _rope_claims(rope: Mapping[str, Any]) -> Iterator[Claim]:
    if rope.get("rope_theta"):
        field = f"config.rope_parameters has rope_theta {rope['rope_theta']:g}"
        yield Claim(field=field, about="RoPE base", value=float(rope["rope_theta"]))
    if rope.get("partial_rotary_factor"):
        fraction = rope["partial_rotary_factor"]
        field = f"config.rope_parameters has partial_rotary_factor {fraction:.4g}"
        yield Claim(field=field, about="rotary fraction", value=fraction)


def _window_claims(config: Mapping[str, Any], layer: int) -> Iterator[Claim]:
    if "sliding_window" not in config:
        return
    window, kind = config["sliding_window"], _entry(config.get("layer_types"), layer)
    field = f"config.sliding_window is {window}"
    if kind is not None:
        field += f" and layer_types[{layer}] {kind!r}"
    slides = config.get("use_sliding_window", True) and kind in (None, "sliding_attention")
    yield Claim(field=field, about="window", value=window if slides else None)


def _rope_parameters(config: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Return the RoPE parameters of a layer; some models have those of each kind of layer."""
    rope = config.get("rope_parameters") or {}
    own = rope.get(_entry(config.get("layer_types"), layer) or "")
    return own if isinstance(own, Mapping) else rope


def _entry(values: Any, layer: int) -> Any:
    return values[layer] if isinstance(values, list) and layer < len(values) else None


def _agree(said: Value, found: Value) -> bool:
    if said is None or found is None or isinstance(said, bool) or isinstance(found, bool):
        return bool(said) == bool(found) and (said is None) == (found is None)
    return abs(found - said) <= TOLERANCE * abs(said)


def _words(about: str, found: Value) -> str:
    if isinstance(found, bool):
        return f"{'scores depend' if found else 'no score depends'} on {about}"
    return f"no {about} was found" if found is None else f"the {about} is {found:.4g}"
