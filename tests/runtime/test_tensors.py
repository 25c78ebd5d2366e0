"""Tensors that are written and read by blocks, against safetensors' own files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from nope_probe.maps.maps import ScoreMaps
from nope_probe.maps.stored_maps import StoredMaps, packed_tensors
from nope_probe.runtime.checkpoint import RunCheckpoint, open_tensors, tensor_writer
from nope_probe.runtime.folder import StorageError, StoredArrays

N, FOLDS = 11, 5


def test_blocks_in_any_order_make_the_file_that_safetensors_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((3, 7, 5)).astype(np.float32) for name in ("b", "a/ä")}
    path = tmp_path / "maps.safetensors"
    with tensor_writer(path, {name: each.shape for name, each in arrays.items()}) as write:
        for start in (4, 0, 2):
            for layer in (2, 0, 1):
                for name, each in arrays.items():
                    rows = each[layer, start : start + (3 if start == 4 else 2)]
                    write(name, (layer, start), rows)
    for found in (load_file(path), StoredArrays(path)):
        assert sorted(found) == sorted(arrays)
        for name, each in arrays.items():
            np.testing.assert_array_equal(found[name], each)


def test_what_cannot_be_finished_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    with pytest.raises(KeyError), tensor_writer(path, {"x": (3, 7)}) as write:
        write("y", (0, 0), np.ones(7, np.float32))
    assert not path.exists()


def test_a_full_disk_is_one_line_and_gets_its_room_back(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    path.symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left"), tensor_writer(path, {}):
        pass
    assert not path.is_symlink()


def test_a_part_of_a_stored_tensor_is_that_part(tmp_path: Path) -> None:
    whole = torch.randn(3, 7, 5, dtype=torch.float64)
    save_file({"x": whole}, tmp_path / "x.safetensors")
    stored = open_tensors(tmp_path / "x.safetensors")["x"]
    assert list(stored.shape) == [3, 7, 5]
    assert torch.equal(stored[...], whole)
    assert torch.equal(stored[1], whole[1])
    assert torch.equal(stored[:, 2:5], whole[:, 2:5])


def test_stored_maps_come_back_from_a_checkpoint_and_a_changed_file_does_not(
    tmp_path: Path,
) -> None:
    folds = torch.randn(FOLDS, 2, N, N, dtype=torch.float64)
    visible = torch.ones(2, N, N, dtype=torch.bool).tril()
    maps = ScoreMaps(
        folds=folds.masked_fill(~visible, torch.nan),
        visible=visible,
        counts=torch.tensor([3, 1, 2, 7, 5]),
        bos=True,
    )
    folder = tmp_path / "run"
    with RunCheckpoint(folder) as checkpoint:
        checkpoint.save("score/all", packed_tensors(maps))
        found = StoredMaps.from_stored(checkpoint.open("score/all"))
        torch.testing.assert_close(found.folds, maps.folds, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found.mean, maps.mean, rtol=0, atol=0, equal_nan=True)
        assert found.bos
        assert torch.equal(found.counts, maps.counts)
    [path] = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    with RunCheckpoint(folder) as checkpoint, pytest.raises(StorageError, match="broken"):
        checkpoint.open("score/all")
