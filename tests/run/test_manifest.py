"""A manifest is written as entries of JSON, and read back from them as the same record."""

import json
from dataclasses import asdict, dataclass

from nope_probe.models.info import GGUFInfo
from nope_probe.run.manifest import Manifest, RunData, RunModel, ShownText, record_of
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
