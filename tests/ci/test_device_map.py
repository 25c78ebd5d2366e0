"""A model on several devices gives the same maps as on one; offloaded weights are refused.

Several devices are simulated on the CPU: the names cpu:1, cpu:2, ... are passed on by every
function of torch. A function of tensors of two devices raises an error, as on CUDA, with CUDA's
exceptions: a number, an index or a copy from another device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from support.rounding import NETWORK, assert_same
from support.tiny_models import ByName, tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from nope_probe import (
    Ablation,
    UserError,
    ablated,
    calibrate,
    capture_attention,
    capture_scores,
    capture_stages,
    load,
    run_ablations,
    untrained,
)
from nope_probe.hooks.layers.bridges import boot_bridge
from nope_probe.hooks.removing.components import components
from nope_probe.models.load import describe, error_of_tap

HOME = torch.device("cpu")
MAY_MIX = ("__getitem__", "__setitem__", "copy_", "index_put_")


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
            return tagged(func(*args, **{**kwargs, "device": HOME}), asked)
        where = self.together(name, [*args, *kwargs.values()])
        return tagged(func(*args, **kwargs), where)

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
        places = [place_of(tensor) for tensor in tensors_of(values) if tensor.ndim]
        if name in MAY_MIX:
            return places[0] if places else HOME
        if len(set(places)) > 1:
            raise RuntimeError(f"{name}: found tensors on two devices, {sorted(map(str, places))}")
        if places:
            return places[0]
        return next((place_of(tensor) for tensor in tensors_of(values)), HOME)


def tensors_of(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def tagged(result: Any, where: torch.device) -> Any:
    for tensor in tensors_of(result):
        placed(tensor, where)
    return result


def put_on(module: nn.Module, device: torch.device) -> None:
    """Put a module's weights on a device, and move its inputs there, as accelerate does."""
    for item in [*module.parameters(), *module.buffers()]:
        placed(item, device)
    module.register_forward_pre_hook(
        lambda _, args, options: send_to_device((args, options), device), with_kwargs=True
    )


@contextmanager
def device_per_block(hf: Any) -> Iterator[VirtualDevices]:
    """Put each block of a plain Llama-like model on a device of its own, the head on the last."""
    # TransformerLens adds it, and a mode does not see tensors that nn.Parameter makes.
    hf.lm_head.bias = nn.Parameter(torch.zeros(hf.config.vocab_size))
    with VirtualDevices() as mode:
        for number, block in enumerate(hf.model.layers, 1):
            put_on(block, torch.device(f"cpu:{number}"))
        for module in (hf.model.norm, hf.lm_head):
            put_on(module, torch.device(f"cpu:{len(hf.model.layers)}"))
        yield mode


WINDOWS = tokens(7, 11, seed=3)
NAMES = ("qwen3", "smollm3")


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, tiny: ByName, bridge: ByName) -> Iterator[tuple[Any, Any]]:
    """A model on one device, and the same with a device for each block."""
    hf = deepcopy(tiny(request.param).hf)
    hf.name_or_path = hf.config.name_or_path = str(tiny(request.param).folder)
    one = bridge(request.param)
    with device_per_block(hf):
        yield one, boot_bridge("spread", hf, one.tokenizer)


def maps(model: Any) -> torch.Tensor:
    return capture_scores(model, WINDOWS, n_folds=3, batch_size=5).folds


def test_each_block_is_on_its_device_of_process_and_mixing_two_devices_is_an_error(
    pair: tuple[Any, Any],
) -> None:
    _, several = pair
    weights = [next(block.parameters()) for block in several.blocks]
    assert [str(place_of(weight)) for weight in weights] == [
        f"cpu:{n}" for n in range(1, len(weights) + 1)
    ]
    with pytest.raises(RuntimeError, match="found tensors on two devices"):
        weights[0].flatten()[:2] + weights[1].flatten()[:2]


def test_maps_of_scores_and_stages_are_the_same_on_several_devices(pair: tuple[Any, Any]) -> None:
    one, several = pair
    options: dict[str, Any] = {"n_folds": 3, "batch_size": 5, "per_head": True}
    actual, theirs = (capture_scores(model, WINDOWS, **options) for model in (several, one))
    for name in ("folds", "per_head"):
        assert_same(getattr(actual, name), getattr(theirs, name))
    actual, theirs = (capture_stages(model, WINDOWS, n_folds=3).folds for model in (several, one))
    assert set(actual) == set("abcdefghi")
    for letter, folds in actual.items():
        assert_same(folds, theirs[letter])


def test_parity_is_measured_across_devices(pair: tuple[Any, Any]) -> None:
    _, several = pair
    info = describe(several, "spread", error_of_tap(several))
    assert max(info.parity.values()) <= NETWORK


@pytest.mark.parametrize("gain", ["output", "norm"])
def test_every_removal_is_the_same_on_several_devices(gain: Any, pair: tuple[Any, Any]) -> None:
    one, _ = pair
    for names in (*((name,) for name in (*components(one), "norms")), components(one)):
        result = []
        for model in pair:
            gains = calibrate(model, WINDOWS, batch_size=5) if gain == "output" else None
            with ablated(model, Ablation(remove=names, replacement="identity", gain=gain), gains):
                result.append(maps(model))
        assert_same(result[1], result[0])


def test_rewritten_weights_are_the_same_on_several_devices(pair: tuple[Any, Any]) -> None:
    result = []
    for model in pair:
        with untrained(model):
            result.append(maps(model))
    assert_same(result[1], result[0])


PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_placed_model_gives_the_same_maps(device_map: Any, tiny: ByName, bridge: ByName) -> None:
    loaded = load(str(tiny("qwen3").folder), device_map=device_map)
    assert torch.equal(maps(loaded.model).nan_to_num(), maps(bridge("qwen3")).nan_to_num())


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        (
            {"": "meta"},
            r"\d+ weights of .*qwen3, such as model\.embed_tokens.*, are offloaded",
        ),
        (
            dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk"},
            "cannot load .*qwen3: weights: ",
        ),
    ],
)
def test_offloaded_weights_are_refused(
    device_map: dict[str, str], message: str, tiny: ByName
) -> None:
    with pytest.raises(UserError, match=message) as error:
        load(str(tiny("qwen3").folder), device_map=device_map)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["mlp", "o_proj"])
def test_a_model_in_memory_whose_weights_are_offloaded_is_refused_in_a_line(
    place: str, tiny: ByName
) -> None:
    loaded = load(str(tiny("qwen3").folder))
    for name, module in loaded.model.original_model.named_modules():
        if name.endswith(place):
            module.to("meta")
    for measure in (capture_scores, calibrate, capture_attention, run_ablations):
        with pytest.raises(UserError, match=rf"such as .*{place}.*, are offloaded") as error:
            measure(loaded.model, WINDOWS)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="are offloaded"), ablated(loaded.model, "mask"):
        pass
