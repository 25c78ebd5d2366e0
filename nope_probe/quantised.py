"""Quantised checkpoints: read as the plain weights that they stand for, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# These methods' loaders can give plain weights themselves; the others are undone afterwards.
UNDONE_WHILE_LOADING = ("fp8", "mxfp4", "compressed-tensors")


def is_quantised(config: PreTrainedConfig) -> bool:
    """Tell whether a checkpoint's configuration says that its weights are quantised."""
    return bool(getattr(config, "quantization_config", None))


def load_quantised(
    kind: type[PreTrainedModel], source: str, revision: str | None, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a quantised checkpoint and undo the quantisation at once.

    Gains, gauges and edits read weights as numbers, which packed ones are not; and some kernels
    repack them in their first forward pass, after which they are no longer what was stored.

    Args:
        kind: the model's class.
        source: a Hub id or a local folder.
        revision: a Hub revision.
        options: what `from_pretrained` is given beside; its `config` may be changed.

    Raises:
        UserError: for a method that transformers does not know, or cannot undo on this machine.
    """
    method = _ask_for_plain_weights(options["config"])
    try:
        if not _is_known(method):
            raise NotImplementedError("transformers does not know this method")
        model, report = kind.from_pretrained(
            source, revision=revision, use_safetensors=True, **options
        )
        if getattr(model, "is_quantized", False):
            model = model.dequantize()
        if not all(parameter.is_floating_point() for parameter in model.parameters()):
            raise NotImplementedError("its weights stay packed")
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source} is quantised ({method}), and its weights cannot be read as plain numbers: "
            f"take the unquantised model ({reason})"
        ) from error
    return model, report


def _ask_for_plain_weights(config: PreTrainedConfig) -> str:
    """Set what makes a loader give plain weights, and give the method's name."""
    said = config.quantization_config
    if not isinstance(said, dict):
        said = said.to_dict()
    method = str(said.get("quant_method") or "by no named method")
    if method in UNDONE_WHILE_LOADING:
        config.quantization_config = said | {"dequantize": True}
    return method


def _is_known(method: str) -> bool:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    # Both of its bit widths have an entry of their own.
    return {"bitsandbytes": "bitsandbytes_4bit"}.get(method, method) in (
        AUTO_QUANTIZATION_CONFIG_MAPPING
    )
