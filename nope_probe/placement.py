"""Placement: a model's parts on one device or several, each where its weights can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nope_probe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DeviceMap = str | dict[str, Any]  # a strategy, or the device of each part by name


def refuse_offloaded(source: str, hf: PreTrainedModel) -> None:
    """Refuse a model of which parts wait elsewhere until they are run.

    Raises:
        UserError: naming the first such part.
    """
    away = [name for name, each in hf.named_parameters() if each.device.type == "meta"]
    if away:
        raise UserError(
            f"{source} does not fit the devices: {len(away)} of its weights, such as {away[0]}, "
            "would be kept elsewhere, where they cannot be read; study fewer --layers, or take a "
            "smaller --dtype"
        )


def devices_of(model: Any) -> str:
    """Name the devices that a model's weights are on, for the manifest.

    Example:
        >>> import torch
        >>> devices_of(torch.nn.Linear(2, 3))
        'cpu'
    """
    return ", ".join(sorted({str(parameter.device) for parameter in model.parameters()}))
