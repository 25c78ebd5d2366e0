"""Simulate several devices on the CPU: each tensor has the name of one, and mixing two fails.

The names cpu:1, cpu:2, ... are passed on by every function of torch. A function of tensors of two
devices raises an error, as on CUDA, with CUDA's exceptions: a number, an index or a copy from
another device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HOME = torch.device("cpu")
_MAY_MIX = ("__getitem__", "__setitem__", "copy_", "index_put_")


def place_of(tensor: Tensor) -> torch.device:
    return tensor.__dict__.get("virtual_device", HOME)


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    tensor.virtual_device = device  # type: ignore[attr-defined]
    return tensor


class VirtualDevices(TorchFunctionMode):
    """Passes the names of devices on through torch while the mode is on."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return place_of(args[0])
        if name in ("to", "cpu") and isinstance(args[0], Tensor):
            return self.moved(func, name, args, kwargs)
        if name == "numpy" and place_of(args[0]) != HOME:
            raise TypeError(f"can't convert a tensor on {place_of(args[0])} to numpy")
        if "device" in kwargs:
            asked = torch.device(kwargs["device"]) if kwargs["device"] is not None else HOME
            return _tag(func(*args, **{**kwargs, "device": HOME}), asked)
        where = self.together(name, [*args, *kwargs.values()])
        return _tag(func(*args, **kwargs), where)

    def moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        asked = [argument for argument in args[1:] if isinstance(argument, torch.device | str)]
        asked += [kwargs["device"]] if kwargs.get("device") is not None else []
        target = torch.device(asked[0]) if asked else place_of(args[0])
        if name == "cpu":
            target = HOME
        here = [HOME if isinstance(argument, torch.device | str) else argument for argument in args]
        moved = func(*here, **{**kwargs, "device": HOME} if "device" in kwargs else kwargs)
        if moved is args[0] and target != place_of(moved):
            moved = moved.clone()
        return placed(moved, target)

    def together(self, name: str, values: Any) -> torch.device:
        places = [place_of(tensor) for tensor in _tensors(values) if tensor.ndim]
        if name in _MAY_MIX:
            return places[0] if places else HOME
        if len(set(places)) > 1:
            raise RuntimeError(f"{name}: found tensors on two devices, {sorted(map(str, places))}")
        if places:
            return places[0]
        return next((place_of(tensor) for tensor in _tensors(values)), HOME)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _tag(result: Any, where: torch.device) -> Any:
    for tensor in _tensors([result]):
        placed(tensor, where)
    return result


def _place(module: nn.Module, device: torch.device) -> None:
    """Put a module's weights on a device, and move its inputs there, as accelerate does."""
    for item in [*module.parameters(), *module.buffers()]:
        placed(item, device)

    def fetch(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return _sent(args, device), _sent(kwargs, device)

    module.register_forward_pre_hook(fetch, with_kwargs=True)


def _sent(values: Any, device: torch.device) -> Any:
    if isinstance(values, Tensor):
        return values.to(device)
    if isinstance(values, list | tuple):
        return type(values)(_sent(value, device) for value in values)
    if isinstance(values, dict):
        return {key: _sent(value, device) for key, value in values.items()}
    return values


@contextmanager
def device_per_block(hf: Any) -> Iterator[VirtualDevices]:
    """Put each block of a plain Llama-like model on a device of its own, the head on the last."""
    # TransformerLens adds it, and a mode does not see tensors that nn.Parameter makes.
    hf.lm_head.bias = nn.Parameter(torch.zeros(hf.config.vocab_size))
    with VirtualDevices() as mode:
        for number, block in enumerate(hf.model.layers, 1):
            _place(block, torch.device(f"cpu:{number}"))
        for module in (hf.model.norm, hf.lm_head):
            _place(module, torch.device(f"cpu:{len(hf.model.layers)}"))
        yield mode
