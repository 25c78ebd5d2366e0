"""What a run keeps is what it is said to need, and an ablation keeps nothing."""

import gc
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import ByName, tokens

from nope_probe import Ablation, ablated, load
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.run.session import Session
from nope_probe.studies.commands import COMMANDS
from nope_probe.studies.trace import Settings


@pytest.mark.parametrize(
    ("command", "options", "most"),
    [
        ("ablate", {"layers": 3}, 3),
        ("ablate", {"layers": 3, "per_head": True, "remove": ()}, 3 * (1 + 4)),
        ("circuit", {"remove": ("mask",)}, 2 * 9),  # stages (a) to (i), intact and ablated
        ("attention", {"layers": 3, "query_rows": 11}, 3 * 4),
        ("heads", {"layers": 3, "remove": ("mask",), "mean_seqs": 8, "k": (1,), "folds": 5}, 4),
        # L2 sums keys of 2 heads and queries of 2, of 32 numbers, of two blocks' 4 heads and MLP;
        # L1 those of one block; a number of a position is a 17th of a row
        ("trace", {"layers": 3, "folds": 5}, 3 + (2 + 1) * 5 * (2 + 2) * 32 // 17),
    ],
)
def test_the_memory_of_a_run_holds_the_maps_of_its_largest_pass(
    command: str, options: dict[str, Any], most: int, tmp_path: Path
) -> None:
    settings = import_module(f"nope_probe.{command}").Settings(
        model="nope-tiny", n_seqs=8, seq_len=17, out=tmp_path / "run", **options
    )
    kind: Any = COMMANDS[command].study().__self__  # type: ignore[attr-defined]
    with Session(settings, kind.load).opened() as session:
        assert max(one.maps for one in kind(session).passes()) == most


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["heads", "layers"])
def test_the_bytes_of_a_run_are_those_of_what_heads_and_mlps_write(
    kind: Any, per_head: bool, tiny: ByName
) -> None:
    loaded = load(str(tiny("smollm3").folder))
    text = torch.randint(263, (10, 13), generator=torch.Generator().manual_seed(3))
    sums = capture_positions(loaded.model, text, n_folds=5, writers=kind, per_head=per_head)
    kept = sum(
        values.nbytes
        for reader in sums.readers.values()
        for parts in (reader.keys, reader.queries)
        for name, values in parts.items()
        if name not in ("embed", "bias")
    )
    settings = Settings(
        model="x", layers="all", writers=kind, per_head=per_head, folds=5, seq_len=13, n_seqs=10
    )
    assert settings.bytes_of_sums(loaded.info) == kept
    assert replace(settings, layers=1).bytes_of_sums(loaded.info) == 0
    assert replace(settings, reader="L2H1").traces_heads
    assert replace(settings, reader="L2").traces_heads == per_head


@pytest.mark.parametrize("remove", [["w_v"], ["mask", "w_q", "w_k", "w_v", "w_o"]])
def test_tensors_that_an_ablation_reads_are_freed_after_the_block(
    remove: list[Any], bridge: ByName
):
    model, inputs = bridge("llama"), tokens(7, n_pos=29)

    def living() -> list[torch.Size]:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
        return sorted(tensor.shape for tensor in tensors if tensor.shape[:1] == (7,))

    before = living()
    with (
        ablated(model, Ablation(remove=remove, replacement="identity", gain="norm")),
        torch.inference_mode(),
    ):
        model(inputs)
        assert living() == before
