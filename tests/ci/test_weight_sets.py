"""Of several sets of weights in a folder, the one that transformers reads is read."""

import json
from itertools import product
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import CONFIGS, randomised
from transformers import AutoModelForCausalLM, PreTrainedModel

from nope_probe import UserError
from nope_probe.models.weights import read_weights

SETS = ("single", "sharded", "pickled", "pickled shards", "variant")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, dict[str, Path]]:
    """The first of five models, each saved in another form, and their folders."""
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 2
    models = [randomised(config) for _ in SETS]
    folders = {name: tmp_path_factory.mktemp("set") for name in SETS}
    for seed, (name, model) in enumerate(zip(SETS, models, strict=True)):
        model.lm_head.weight.data.fill_(seed)
        size = "20KB" if "shard" in name else "50GB"
        variant = "fp16" if name == "variant" else None
        model.save_pretrained(folders[name], max_shard_size=size, variant=variant)
        if "pickled" not in name:
            continue
        for file in [*folders[name].glob("*.safetensors")]:
            pickled = file.name.replace("model", "pytorch_model").replace("safetensors", "bin")
            torch.save(load_file(file), folders[name] / pickled)
            file.unlink()
        for file in folders[name].glob("*.index.json"):
            text = file.read_text().replace("model-", "pytorch_model-")
            (folders[name] / "pytorch_model.bin.index.json").write_text(
                text.replace(".safetensors", ".bin")
            )
            file.unlink()
    return models[0], folders


@pytest.mark.parametrize("named", [None, "model.safetensors.index.json"])
def test_of_several_sets_of_weights_the_set_that_transformers_reads_is_read(
    named: str | None, sets: tuple[PreTrainedModel, dict[str, Path]], tmp_path: Path
) -> None:
    model, folders = sets
    for n, chosen in enumerate(product((False, True), repeat=len(SETS))):
        folder = tmp_path / str(n)
        for name, is_there in zip(SETS, chosen, strict=True):
            if is_there:
                copytree(folders[name], folder, dirs_exist_ok=True)
        fields = model.config.to_dict() | {"transformers_weights": named}
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        has_safetensors = chosen[1] if named else chosen[0] or chosen[1]
        if not has_safetensors:
            are_pickled = any(
                "pickled" in name for name, is_there in zip(SETS, chosen, strict=True) if is_there
            )
            why = r"pickled ones \(\.bin\) are refused" if are_pickled else "has no weights"
            with pytest.raises(UserError, match=why):
                read_weights(str(folder), named=named)
            continue
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        weights = read_weights(str(folder), named=named)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
        first = read_weights(str(folder), n_layers=1, named=named)
        assert first.keys() == {key for key in weights if layer_of(key) == 0}
        assert all(torch.equal(first[key], weights[key]) for key in first)


def layer_of(key: str) -> int:
    return int(key.split(".")[2]) if key.startswith("model.layers.") else 0
