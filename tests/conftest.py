"""Models and windows that many tests share, made once; the network is off."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import Tiny, write_tiny

torch.set_num_threads(1)


@pytest.fixture
def unenforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the library as users do, without the type checks that tests run under."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Give a tiny model's folder, and plain transformers' view of it, by name."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: write_tiny(name, root))


@pytest.fixture(scope="session")
def bridge(tiny: Callable[[str], Tiny]) -> Callable[[str], Any]:
    """Give the TransformerBridge that `load` makes of a tiny model's folder."""
    from nope_probe.models import load

    return cache(lambda name: load(str(tiny(name).folder)).model)


@pytest.fixture(scope="session")
def hooked(tiny: Callable[[str], Tiny]) -> Callable[[str], Any]:
    """Give the HookedTransformer converted from a tiny model."""
    from nope_probe.models import to_hooked

    return cache(lambda name: to_hooked(tiny(name).hf))


@pytest.fixture(scope="session")
def model_of(
    bridge: Callable[[str], Any], hooked: Callable[[str], Any]
) -> Callable[[str], tuple[Any, str]]:
    """Give a hooked model, and its tiny model's name, of `hooked:name` or `bridge:name`."""

    def make(spec: str) -> tuple[Any, str]:
        kind, name = spec.split(":")
        return (hooked if kind == "hooked" else bridge)(name), name

    return make
