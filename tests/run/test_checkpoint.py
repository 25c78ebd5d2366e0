"""A checkpoint holds the finished parts of a run, for the same run alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from nope_probe import ScoreMaps, UserError, build, parameter_free
from nope_probe.errors import StorageError
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.maps.folds import pooled
from nope_probe.maps.maps import packed_tensors, stored_layers
from nope_probe.run.checkpoint import RunCheckpoint, tensor_writer
from nope_probe.studies.engine import Engine

MAPS = {"folds": torch.arange(66.0).double().view(2, 3, 11), "counts": torch.tensor([5, 7])}


def checkpoint(out: Path, **about: object) -> RunCheckpoint:
    return RunCheckpoint(out / ".run.unfinished", about=about)


def test_a_part_is_computed_once_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    computed, model = [], build(parameter_free(1, 6))

    def compute(engine: Engine, stream: Stream | None) -> dict[str, torch.Tensor]:
        computed.append(stream)
        return {"sums": torch.arange(7.0)}

    for _ in range(3):
        with RunCheckpoint(tmp_path / "run") as run:
            engine = Engine(model=model, inputs=torch.zeros(3, 5, 6), checkpoint=run)
            found = engine.load_or_compute("part", compute)["sums"]
        assert torch.equal(found, torch.arange(7.0))
    assert len(computed) == 1


@pytest.mark.parametrize(
    ("about", "what"),
    [({"settings": 1, "weights": "w"}, "settings"), ({"weights": "x"}, "weights")],
)
def test_an_unfinished_run_of_something_else_is_not_resumed(
    about: dict, what: str, tmp_path: Path
) -> None:
    with checkpoint(tmp_path, settings=0, weights="w") as run:
        run.save("score", MAPS)
    with (
        pytest.raises(UserError, match=f"unfinished run with other {what}; remove it, or choose"),
        checkpoint(tmp_path, **about),
    ):
        pass
    with checkpoint(tmp_path, settings=0, weights="w") as run:
        assert "score" in run


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    with checkpoint(tmp_path) as run:
        run.save("score/mask", MAPS)
        file = tmp_path / ".run.unfinished" / "score,mask.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(StorageError, match=f"{file} is broken"):
            run.load("score/mask")


@pytest.mark.parametrize(
    ("error", "kept"), [(UserError("nothing"), False), (StorageError("full"), True)]
)
def test_a_users_mistake_leaves_nothing_and_another_failure_what_was_saved(
    error: Exception, kept: bool, tmp_path: Path
) -> None:
    def fail() -> None:
        with checkpoint(tmp_path) as run:
            run.save("score", MAPS)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / ".run.unfinished" / "score.safetensors").is_file() is kept


def test_stored_maps_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    folds = torch.randn(5, 2, 11, 11, dtype=torch.float64)
    visible = torch.ones(2, 11, 11, dtype=torch.bool).tril()
    maps = ScoreMaps(
        folds=folds.masked_fill(~visible, torch.nan),
        visible=visible,
        counts=torch.tensor([3, 1, 2, 7, 5]),
        layers=(1, 12),
        skip_keys=1,
        query_positions=torch.arange(11),
        per_head=torch.randn(5, 2, 13, 11, 11).masked_fill(~visible[0], torch.nan),
    )
    with RunCheckpoint(tmp_path / "run") as run:
        run.save("score/all", packed_tensors(maps))
        stored = stored_layers(run.load("score/all"))
        assert [*stored] == [1, 12]
        for place, layer in enumerate(stored.values()):
            exact = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(layer.folds.maps, maps.folds[:, place], **exact)
            torch.testing.assert_close(layer.mean(), maps.mean[place], **exact)
            assert layer.skip_keys == 1
            assert torch.equal(layer.counts, maps.counts)
            assert len(layer.heads) == 13
            for head, captured in zip(layer.heads, maps.per_head[:, place].unbind(1), strict=True):
                torch.testing.assert_close(head.folds.maps, captured, **exact)
                torch.testing.assert_close(head.mean(), pooled(captured, maps.counts), **exact)
                assert head.skip_keys == 1


def test_blocks_in_any_order_make_the_file_that_safetensors_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((3, 7, 5)).astype(np.float32) for name in ("b", "a/ä")}
    path = tmp_path / "maps.safetensors"
    with tensor_writer(path, {name: array.shape for name, array in arrays.items()}) as write:
        for start in (4, 0, 2):
            for layer in (2, 0, 1):
                for name, array in arrays.items():
                    rows = array[layer, start : start + (3 if start == 4 else 2)]
                    write(name, (layer, start), rows)
    found = load_file(path)
    assert sorted(found) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
