"""A manifest is read back as it was written; what differs among several: axis, lines, names."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import pytest

from nope_probe.models.info import GGUFInfo
from nope_probe.run.manifest import Manifest, RunData, RunModel, ShownText, record_of, what_differs
from tests.support.manifests import A_MODEL, manifest_of

GGUF = GGUFInfo(file="a.gguf", sha256="b1", file_type=None, tensor_types={"F32": 61})
FULL = Manifest(
    kind="ablate",
    settings={"layers": 3, "given": {"hooks": ["hook_z"]}},
    model=RunModel(**A_MODEL | {"rope_layers": (True, False), "gguf": GGUF}),
    sources={"model": {"config.json": {"sha256": "c1"}}, "data": None},
    data=RunData(name="shipped", bos=False, sha256="d1", notes=("a note",), bos_token="<s>"),
    distinct_sequences=5,
    fold_sizes=(3, 2),
    layers=(0, 2),
    text=ShownText(pieces=("", "The"), bos="<s>"),
    results={"reader": "L1"},
)


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert Manifest.of_json(json.loads(json.dumps(FULL.to_json()))) == FULL


def test_what_a_run_has_none_of_is_not_written_and_none_of_its_sequences_is() -> None:
    assert Manifest(kind="compare").to_json() == {"kind": "compare"}
    entries = FULL.to_json()
    assert entries["documents"] is None
    assert entries["skip_keys"] == 0
    assert entries["model"]["revision"] is None
    assert entries["text"] == {"pieces": ("", "The"), "bos": "<s>", "notes": ()}
    assert entries["reader"] == "L1"
    assert not {"results", "left_out", "removed"} & {*entries}


def test_entries_of_the_file_itself_are_no_results() -> None:
    read = Manifest.of_json({"format": 6, "complete": True, "checksum": "c", "prefix": 7})
    assert read.results == {"prefix": 7}


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a command found."""

    layer: int = 0
    components: tuple[str, ...] = ()
    of: dict[str, str] | None = None


def test_a_command_reads_its_results_as_a_record() -> None:
    block = Block(layer=1, components=("mask", "w_q"), of={"h": "it is the last"})
    entries = json.loads(json.dumps(Manifest(results=asdict(block)).to_json()))
    assert record_of(Block, Manifest.of_json(entries).results) == block


def test_a_model_in_a_folder_is_named_after_the_folder() -> None:
    for name, said in (("/home/me/llama", "llama"), ("meta-llama/Llama-3.1-8B",) * 2):
        assert manifest_of(model={"name": name}).model_name == said
    assert Manifest().model_name == ""


def test_a_text_alone_has_no_length() -> None:
    settings = {"seq_len": 64}
    assert Manifest(settings=settings, fold_sizes=(4, 3)).seq_len == 64
    assert Manifest(settings=settings, fold_sizes=(1,)).seq_len == 0
    assert Manifest().seq_len == 0


def run(model: str = "tiny", **settings: Any) -> Manifest:
    return manifest_of(model={"name": model}, settings={"seq_len": 64, "seed": 0} | settings)


def series(
    manifests: Sequence[Manifest], names: Sequence[str] = "abcdefghij"
) -> tuple[pd.DataFrame, list[str]]:
    return what_differs(manifests, [*names][: len(manifests)])


def test_the_setting_that_differs_is_the_axis_and_names_the_runs() -> None:
    lengths, _ = series([run(seq_len=n) for n in (128, 32, 512)])
    assert [*lengths] == ["seq_len"]
    assert [*lengths.index] == ["seq_len 128", "seq_len 32", "seq_len 512"]
    first_tokens, _ = series([run(bos=name) for name in ("never", "always", "x")])
    assert [*first_tokens.index] == ["never", "always", "x"]


def test_of_two_settings_the_second_is_the_line_whatever_the_order_of_the_runs() -> None:
    lengths, models = (11, 31, 7), ("nope", "rope")
    runs = [run(model, seq_len=n) for n in lengths for model in models]
    crossed, lines = series(runs)
    assert [*crossed] == ["seq_len", "model"]
    assert lines == ["model"]
    assert crossed.index[0] == "seq_len 11, nope"
    five, lines = series([run(f"m{n}", n_seqs=96 if n else 48) for n in range(5)])
    assert (five.columns[0], lines) == ("model", []), "two numbers are no axis"


def test_what_changes_along_the_axis_is_no_line() -> None:
    runs = [run(seq_len=n, n_seqs=count) for n, count in ((32, 64), (128, 16), (512, 8))]
    table, lines = series(runs)
    assert lines == []
    assert [*table] == ["seq_len", "n_seqs"]


def test_what_follows_from_the_axis_and_the_lines_is_neither() -> None:
    places = [("a", 64, 96), ("a", 256, 48), ("a", 1024, 16), ("b", 64, 96), ("b", 256, 16)]
    runs = [run(model, seq_len=n, n_seqs=n_seqs) for model, n, n_seqs in places]
    table, lines = series(runs)
    assert lines == ["model"]
    assert [*table] == ["seq_len", "model", "n_seqs"]


@pytest.mark.parametrize(
    "runs",
    [
        [run("pythia", revision=f"step{n}") for n in (1000, 30, 143000)],
        [run(f"/runs/train/checkpoint-{n}") for n in (1000, 30, 143000)],
        [run(f"/runs/nope-step-{n}") for n in (1000, 30, 143000)],
    ],
)
def test_the_step_of_a_checkpoint_is_a_number(runs: list[Manifest]) -> None:
    found, _ = series(runs)
    assert [*found] == ["step"]
    assert found["step"].tolist() == [1000, 30, 143000]


def test_snapshots_of_two_trainings_are_two_lines() -> None:
    names = [(model, n) for model in ("nope", "rope") for n in (0, 30, 100)]
    found, lines = series([run(f"/runs/{model}/step-{n}") for model, n in names])
    assert found.index[4] == "step 30, rope"
    assert lines == ["model"]


def test_runs_that_differ_in_nothing_are_named_after_their_folders() -> None:
    assert [*series([run(), run(), run()])[0].index] == ["a", "b", "c"]
    steps, _ = series([run()] * 3, ["x-step2", "x-step10", "x-step1"])
    assert [*steps.index] == ["step 2", "step 10", "step 1"]


def test_two_runs_are_named_after_what_differs() -> None:
    assert [*series([run("/a/nope"), run("/a/rope")])[0].index] == ["nope", "rope"]
    assert [*series([run("/a/x"), run("/b/x")])[0].index] == ["/a/x", "/b/x"]
    assert [*series([run(seq_len=9), run(seq_len=7)])[0].index] == ["seq_len 9", "seq_len 7"]


def test_a_setting_with_the_name_of_a_column_says_that_it_is_of_the_run() -> None:
    found, _ = what_differs([run(layer=n) for n in (0, 1)], ["a", "b"], taken=["layer"])
    assert [*found] == ["layer of run"]
