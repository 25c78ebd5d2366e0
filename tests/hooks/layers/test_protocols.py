"""The types of models and hook points hold for every kind of model, and cost no import."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_models import ModelOf

import nope_probe
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.protocols import HookedModel, HookPoint

# Names by which a file asks which kind a model is, and the files that may.
KINDS = ("is_bridge", "HookedLayer", "BridgeLayer", "original_model", "original_component")
BLOCKS = ("hooks/layers/hooked_layer.py", "hooks/layers/bridge_layer.py")
HOMES = (*BLOCKS, "hooks/layers/linear_maps.py", "hooks/layers/model.py", "models/")


@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-rope", "hooked:smollm3-nope"]
)
def test_models_and_their_hook_points_are_of_the_protocols(spec: str, model_of: ModelOf) -> None:
    model, _ = model_of(spec)
    assert isinstance(model, HookedModel)
    for layer in layers_of(model):
        assert isinstance(layer.point("attn.hook_attn_scores"), HookPoint)
        assert not layer.has("attn")


def test_other_modules_are_not_of_the_protocols() -> None:
    assert not isinstance(torch.nn.Linear(2, 3), HookedModel | HookPoint)


def test_hooks_import_no_transformer_lens() -> None:
    code = "import sys, nope_probe.hooks.ablation, nope_probe.hooks.reading.capture\n"
    code += "print('transformer_lens' in sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


def test_only_the_homes_of_the_kinds_ask_which_kind_a_model_is() -> None:
    root = Path(nope_probe.__file__).parent
    files = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    assert {name for name in files if name.startswith(HOMES)} > {*BLOCKS, "hooks/layers/model.py"}
    asking = [
        name
        for name, text in files.items()
        if not name.startswith(HOMES) and any(kind in text for kind in KINDS)
    ]
    assert not asking
