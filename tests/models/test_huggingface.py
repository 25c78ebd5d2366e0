"""Every model that cannot be loaded is an error of one line with the reason; no network is used."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any, ClassVar

import pytest
import torch
from support.fake_hub import HubHandler, online, serving
from support.tiny_models import plain

from nope_probe.errors import UserError
from nope_probe.models.huggingface import load_hugging_face
from nope_probe.models.names import resolve


def load(source: Any, **options: Any) -> Any:
    return load_hugging_face(str(source), dtype=torch.float32, **options)


@pytest.fixture
def folder(tiny: Callable[[str], Any], tmp_path: Path) -> Path:
    """A copy of a valid model's folder, to be broken."""
    return Path(copytree(tiny("smollm3").folder, tmp_path / "model"))


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("phi-4", "microsoft/phi-4"),
        ("QWEN3-8b", "Qwen/Qwen3-8B"),
        ("NoPE-1.5B", "starmpcc/NoPE_1.5B_FW_EDU_15T"),
        ("TinyLlama", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
        ("tinyllama-NoPE", "AntNLP/TinyLlama-NoPE-1.1B"),
        ("owner/Some-Model", "owner/Some-Model"),
    ],
)
def test_friendly_names_and_hub_ids_are_known_in_any_case(name: str, source: str) -> None:
    assert resolve(name) == source


def test_a_folder_resolves_to_itself(folder: Path) -> None:
    assert resolve(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("name", "near"),
    [("llama-3.1", "llama-3.1-8b"), ("qwen8b", "qwen3-8b"), ("rope-tiney", "rope-tiny")],
)
def test_an_unknown_name_is_an_error_with_the_nearest_names(name: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"unknown model '{name}'; the nearest .*{near}"):
        resolve(name)


@pytest.mark.parametrize("name", ["", "zzzzzz", "./no/folder", "/no/folder", "a/b/c", "~/nowhere"])
def test_a_string_that_is_neither_name_nor_folder_is_an_error(name: str) -> None:
    with pytest.raises(UserError, match="unknown model"):
        resolve(name)


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no config"):
        resolve(str(tmp_path))


def test_a_loaded_model_equals_that_of_plain_transformers(folder: Path) -> None:
    model, tokenizer = load(folder)
    inputs = torch.arange(13)[None]
    assert torch.equal(model(inputs).logits, plain(folder)(inputs).logits)
    assert model.config._attn_implementation == "eager"
    assert tokenizer("a")["input_ids"]


def test_the_first_layers_keep_their_own_rope_switches(folder: Path) -> None:
    model, _ = load(folder, n_layers=2)
    assert len(model.model.layers) == 2
    assert model.config.no_rope_layers == [1, 0]


@pytest.mark.parametrize("name", ["nope-1.5b", "tinyllama-nope"])
def test_a_llama_trained_without_rope_is_loaded_with_rope_off(
    name: str, tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.models.llama.modeling_llama as llama

    from nope_probe.models import hf_config as config

    assert resolve(name).lower() in config.WITHOUT_ROPE
    folder, inputs = tiny("llama").folder, torch.arange(13)[None]
    monkeypatch.setattr(config, "WITHOUT_ROPE", (str(folder).lower(),))
    model, _ = load(folder)
    with_rope = plain(folder)(inputs).logits
    # As the checkpoint's model card asks: leave queries and keys as they are.
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    without_rope = plain(folder)(inputs).logits
    torch.testing.assert_close(model(inputs).logits, without_rope, rtol=1e-5, atol=1e-5)
    assert (with_rope - without_rope).abs().max() > 0.1


@pytest.mark.parametrize(
    ("n_layers", "message"),
    [(4, "has 3 layers, 4 were asked for"), (0, "at least 1 layer"), (-1, "at least 1 layer")],
)
def test_too_many_layers_or_none_are_an_error(n_layers: int, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(folder, n_layers=n_layers)


def test_a_model_that_is_not_cached_is_an_error_without_a_network() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(UserError, match=r"nobody/no-model is not in the local cache .*offline"):
        load("nobody/no-model")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is an encoder-decoder \(t5\), not a causal"):
        load(tmp_path)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig

    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is an encoder \(BertForMaskedLM\), not a causal"):
        load(tmp_path)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a vit model, not a causal decoder"):
        load(tmp_path)


def test_missing_weights_are_never_drawn_at_random(folder: Path) -> None:
    change(folder, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1], layer_types=None)
    with pytest.raises(UserError, match=r"lacks weights, such as model\.layers\.3"):
        load(folder)


def test_weights_of_another_size_are_an_error(folder: Path) -> None:
    change(folder, intermediate_size=41)
    with pytest.raises(UserError, match=r"other shapes .*model\.layers\.0\.mlp\.down_proj"):
        load(folder)


def test_broken_weights_are_an_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=rf"{weights} is a broken safetensors file: "):
        load(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="has no safetensors weights; pickled ones are refused"):
        load(folder)


def test_a_config_that_is_not_json_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot load"):
        load(folder)


def test_an_unknown_model_type_is_an_error(folder: Path) -> None:
    change(folder, model_type="perceptron")
    with pytest.raises(UserError, match=r"cannot load .*perceptron"):
        load(folder)


def test_code_in_the_folder_is_not_run(folder: Path) -> None:
    change(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match="needs remote code"):
        load(folder)
    assert not (folder / "ran").exists()


def test_a_missing_tokenizer_is_an_error(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="cannot load"):
        load(folder)


def test_transformers_messages_are_off_while_loading_and_restored_afterwards(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    logging.set_verbosity_info()
    try:
        load(folder)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")


class _Hub(HubHandler):
    """Answers as the Hub does for models that are gated, do not exist or have no files."""

    ERRORS: ClassVar = {"gated": "GatedRepo", "missing": "RepoNotFound", "empty": "EntryNotFound"}

    def do_HEAD(self) -> None:
        if self.path == "/":  # whether the Hub can be reached
            return self.answer(200)
        name = next(name for name in self.ERRORS if name in self.path)
        self.answer(403 if name == "gated" else 404, X_Error_Code=self.ERRORS[name])

    do_GET = do_HEAD  # noqa: N815  (the server asks for this name)


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a server that has no model."""
    with serving(_Hub) as address:
        yield address


_LOAD_ALL = """
import torch
from nope_probe.models.huggingface import load_hugging_face
for name in ("owner/gated", "meta-llama/gated", "owner/missing", "owner/empty"):
    try:
        load_hugging_face(name, dtype=torch.float32)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_gated_missing_and_empty_models_have_errors_of_their_own(hub: str, tmp_path: Path) -> None:
    environment = online(hub, tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", _LOAD_ALL]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    gated, metas, missing, empty = answer.stdout.splitlines()
    assert gated.startswith("UserError owner/gated is gated: accept its licence on the Hub")
    assert gated.endswith("or an ungated copy such as unsloth/Llama-3.1-8B")
    assert metas.endswith("or an ungated copy such as unsloth/gated")
    assert missing == "UserError there is no model owner/missing on the Hub"
    assert empty.startswith("UserError cannot load owner/empty: ")
    assert "offline" not in empty
