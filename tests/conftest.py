"""Models that many tests share, made once; the network is off."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as the commands set it before they load torch
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # likewise

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from support.finished_runs import Finished, finish
from support.tiny_models import ByName, ModelOf, Tiny, write_tiny

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# The same examples every time, without a database of earlier failures, and no bound on time.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("repeatable"), max_examples=100)
settings.load_profile("repeatable")

HAS_HOOKED_TRANSFORMER = version("transformer-lens").startswith("3.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of HookedTransformer where TransformerLens has none."""
    if HAS_HOOKED_TRANSFORMER:
        return
    selected = [item for item in items if not needs_hooked_transformer(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = selected


def needs_hooked_transformer(item: pytest.Item) -> bool:
    """Return whether a test is marked so, or uses a model `hooked:name`."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    hooked = any(isinstance(value, str) and value.startswith("hooked:") for value in parameters)
    return hooked or item.get_closest_marker("hooked_transformer") is not None


@pytest.fixture(scope="session")
def kind() -> str:
    """The kind of model that configurations and shipped models become."""
    return "HookedTransformer" if HAS_HOOKED_TRANSFORMER else "TransformerBridge"


@pytest.fixture
def unenforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the library as users do, without the type checks that tests run under."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of the pages of runs, where other tests draw and read them."""
    monkeypatch.setattr("nope_probe.reports.page.Section.drawn", lambda section: None)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Return the finished run of a command line, which runs once for all tests."""
    return cache(lambda line: finish(line, tmp_path_factory.mktemp("finished")))


@pytest.fixture(scope="session")
def rope_tiny() -> Any:
    """Return the first two blocks of rope-tiny, which tests leave as they are."""
    from nope_probe.models.load import load

    return load("rope-tiny", n_layers=2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ByName:
    """Return a tiny model's folder, and the model in plain transformers, by name."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: write_tiny(name, root))


@pytest.fixture(scope="session")
def bridge(tiny: ByName) -> ByName:
    """Return the TransformerBridge of a tiny model's folder, by name."""
    from nope_probe import load

    return cache(lambda name: load(str(tiny(name).folder)).model)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """Return a tiny decoder as it is loaded, and its folder, by transformers' name of its type."""
    from support.decoders import write_decoder

    from nope_probe import load

    def make(model_type: str, **settings: Any) -> tuple[Any, Tiny]:
        written = write_decoder(model_type, tmp_path_factory.mktemp("decoder"), **settings)
        return load(str(written.folder)).model, written

    return cache(make)


@pytest.fixture(scope="session")
def hooked(tiny: ByName) -> ByName:
    """Return a tiny model as a HookedTransformer (on TransformerLens 4, a bridge), by name."""
    from nope_probe.models.load import to_hooked

    return cache(lambda name: to_hooked(tiny(name).hf))


@pytest.fixture(scope="session")
def model_of(bridge: ByName, hooked: ByName, tiny: ByName, decoder: ModelOf) -> ModelOf:
    """Return a model, and its folder, of `hooked:name`, `bridge:name` or `decoder:type`."""

    def make(spec: str) -> tuple[Any, Tiny]:
        kind, name = spec.split(":")
        if kind == "decoder":
            return decoder(name)
        return (hooked if kind == "hooked" else bridge)(name), tiny(name)

    return make
