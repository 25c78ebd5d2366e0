"""The weights that transformers reads are read, of the first layers only from their files."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import safetensors
from support.fake_hub import FolderHub, online, serving
from support.tiny_models import CONFIGS, randomised, tokenizer
from transformers import AutoConfig

from nope_probe import UserError, load
from nope_probe.models.weights import INDEX, read_weights

N_LAYERS = 12


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 12 layers, in files of 60 kB."""
    folder = tmp_path_factory.mktemp("sharded")
    config = CONFIGS["llama"]()
    config.num_hidden_layers = N_LAYERS
    randomised(config).save_pretrained(folder, max_shard_size="60KB")
    tokenizer(forces_bos=True).save_pretrained(folder)
    return folder


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def files_of(folder: Path, n_layers: int) -> set[str]:
    """Return by hand the files that hold the first layers, embeddings, norm and head."""
    first = [f"model.layers.{layer}." for layer in range(n_layers)]
    outside = ["model.embed_tokens.", "model.norm.", "lm_head."]
    wanted = tuple(first + outside)
    return {file for key, file in weight_map(folder).items() if key.startswith(wanted)}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the safetensors files that are opened, in order."""
    names: list[str] = []
    plain_open = safetensors.safe_open

    def recorded(file: Any, *arguments: Any, **options: Any) -> Any:
        names.append(Path(file).name)
        return plain_open(file, *arguments, **options)

    monkeypatch.setattr(safetensors, "safe_open", recorded)
    return names


@pytest.mark.parametrize("n_layers", [2, 5])
def test_only_the_files_that_hold_the_first_layers_are_opened_once_each(
    n_layers: int, sharded: Path, opened: list[str]
) -> None:
    load(str(sharded), n_layers=n_layers)
    assert sorted(opened) == sorted(files_of(sharded, n_layers))
    assert len(opened) < len(set(weight_map(sharded).values()))


def test_files_that_hold_only_later_layers_may_be_missing(sharded: Path, tmp_path: Path) -> None:
    folder = Path(copytree(sharded, tmp_path / "part"))
    for file in set(weight_map(folder).values()) - files_of(folder, 2):
        (folder / file).unlink()
    assert load(str(folder), n_layers=2).info.n_layers == 2
    with pytest.raises(
        UserError, match=r"lacks model-\d+-of-\d+\.safetensors, which its .*index.*lists"
    ):
        load(str(folder), n_layers=3)


def test_weights_that_are_not_read_are_named_in_one_line(sharded: Path, tmp_path: Path) -> None:
    randomised(AutoConfig.from_pretrained(sharded)).save_pretrained(tmp_path)
    copytree(sharded, tmp_path, dirs_exist_ok=True)
    for name in ("pytorch_model.bin", "training_args.bin"):
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=r"read model\.safetensors, and left out model-0") as said:
        loaded = load(tmp_path, n_layers=1)
    assert "\n" not in str(said[0].message)
    shards = {path.name for path in sharded.glob("model*")}
    assert {*loaded.info.unread} == {*shards, "pytorch_model.bin"}
    assert load(str(sharded), n_layers=1).info.unread == ()


@pytest.mark.parametrize("named", ["../model.safetensors", "pytorch_model.bin"])
def test_weights_outside_of_the_folder_or_pickled_are_not_read_by_name(
    named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="transformers_weights"):
        read_weights(str(tmp_path), named=named)


@pytest.fixture
def hub(sharded: Path) -> Iterator[str]:
    """The address of a server that serves the sharded model."""
    FolderHub.folder, FolderHub.asked = sharded, []
    with serving(FolderHub) as address:
        yield address


def test_only_the_files_that_are_needed_are_downloaded_from_the_hub(
    hub: str, sharded: Path, tmp_path: Path
) -> None:
    with online(hub, tmp_path):
        weights = read_weights("owner/model", n_layers=2)
    n_kept = sum(not 2 <= layer < N_LAYERS for layer in map(layer_of, weight_map(sharded)))
    assert len(weights) == n_kept
    sent = [Path(path).name for path in FolderHub.asked]
    assert sorted(sent) == sorted({INDEX, *files_of(sharded, 2)})


def layer_of(key: str) -> int:
    return int(key.split(".")[2]) if key.startswith("model.layers.") else 0
