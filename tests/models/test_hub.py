"""Models that cannot be loaded are refused in one line; no network is used."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import constants
from support.command_line import refused
from support.fake_hub import FolderHub, HubHandler, online, put_into_cache, serving
from support.tiny_models import ByName
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
)

from nope_probe import UserError, ablate
from nope_probe.errors import printable
from nope_probe.models.context import configured_context, validate_context
from nope_probe.models.huggingface import load_hugging_face
from nope_probe.models.names import (
    answers,
    is_on_hub,
    offline_if_unreachable,
    trained_length,
    validate_hub_answers,
    validate_reachable,
)

CLOSED = "http://127.0.0.1:9"  # the discard port, at which nothing listens
load_float32 = partial(load_hugging_face, dtype=torch.float32)


def test_a_server_answers_with_any_status_and_a_closed_port_does_not(tmp_path: Path) -> None:
    with serving(HubHandler) as hub, online(hub, tmp_path):  # it has no HEAD, and answers 501
        assert answers(hub)
        assert not answers(CLOSED)


def test_an_unreachable_hub_is_not_asked_again_while_a_model_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with online(CLOSED, tmp_path), pytest.raises(UserError) as error:
        load_float32("owner/model")
    assert str(error.value).startswith("owner/model is not in the local cache and the Hub cannot ")
    assert "if it is gated: accept its licence" in str(error.value)
    assert "Retrying" not in capfd.readouterr().err


def test_the_client_is_offline_only_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(HubHandler) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub)
        with offline_if_unreachable("owner/model"):
            assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    with suppress(KeyError), offline_if_unreachable("owner/model"):
        assert constants.HF_HUB_OFFLINE
        raise KeyError
    assert not constants.HF_HUB_OFFLINE


def test_without_the_hub_what_is_not_cached_is_refused_in_one_line_that_says_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    put_into_cache(tmp_path, "owner/model", tmp_path / "model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    for here in ("owner/model", "nope-tiny", "ROPE-tiny", "parameter-free"):
        validate_reachable(here)
    with pytest.raises(UserError, match=r"^revision v2 of owner/model is not in the local cache"):
        validate_reachable("owner/model", "v2")
    with pytest.raises(UserError) as refused:
        validate_reachable("llama-3.1-8b")
    (line,) = str(refused.value).splitlines()
    assert line.startswith("meta-llama/Llama-3.1-8B is not in the local cache ")
    assert "without a network nope-tiny, rope-tiny, parameter-free, " in line
    assert line.endswith("this model is gated: accept its licence on the Hub and set HF_TOKEN")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match="the data set a/b is on the Hub, which cannot be reached"):
        validate_hub_answers("the data set a/b")


@pytest.mark.parametrize(
    "endpoint",
    [
        "mirror.com",
        "",
        "https:/mirror.com",
        "ftp://a.b",
        "localhost:80",
        "http://a:x",
        "http://a\n",
    ],
)
def test_an_endpoint_that_is_no_address_is_named_and_not_asked(
    endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = f"HF_ENDPOINT is {endpoint!r}: expected an address such as https://huggingface.co"
    with online(endpoint, tmp_path):
        for given in (["--model", "owner/model"], ["--model", "rope-tiny", "--data", "a/b"]):
            assert refused(capfd, tmp_path, ablate, *given) == printable(line)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_positions=31, n_ctx=47),
        OPTConfig(max_position_embeddings=31),
        LlamaConfig(max_position_embeddings=31),
        Gemma3TextConfig(max_position_embeddings=31),
    ],
    ids=lambda config: config.model_type,
)
def test_a_context_is_known_by_the_name_that_a_family_gives_it(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    assert configured_context(str(tmp_path)) == 31


def test_shipped_and_local_models_are_not_on_the_hub(tiny: ByName, tmp_path: Path) -> None:
    for name in ("nope-tiny", "Rope-Tiny", "Parameter-Free", str(tiny("llama").folder)):
        assert not is_on_hub(name)
    for name in ("llama-3.1-8b", "owner/model", str(tmp_path / "absent")):
        assert is_on_hub(name)
    assert trained_length("ROPE-tiny") == 128
    assert trained_length("llama-3.1-8b") is None


def test_a_sequence_as_long_as_the_context_fits_and_a_longer_one_if_asked_for(
    tmp_path: Path,
) -> None:
    LlamaConfig(max_position_embeddings=31).save_pretrained(tmp_path / "llama")
    GPT2Config(n_positions=31).save_pretrained(tmp_path / "gpt2")
    validate_context(str(tmp_path / "llama"), 31)
    validate_context(str(tmp_path / "llama"), 32, beyond=True)
    with pytest.raises(UserError, match="beyond the model's context 31: take --beyond-context"):
        validate_context(str(tmp_path / "llama"), 32)
    for beyond in (False, True):
        with pytest.raises(UserError, match="context 31, where its table of positions ends"):
            validate_context(str(tmp_path / "gpt2"), 32, beyond=beyond)


def test_of_a_model_on_the_hub_only_its_configuration_is_downloaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(max_position_embeddings=31).save_pretrained(tmp_path / "model")
    FolderHub.folder, FolderHub.asked = tmp_path / "model", []
    with serving(FolderHub) as hub, online(hub, tmp_path / "cache"):
        line = refused(capfd, tmp_path / "runs", ablate, "--model", "owner/model")
    context = "--seq-len 64 is beyond the model's context 31: "
    assert line == f"{context}take --beyond-context, or shorter sequences"
    assert FolderHub.asked == ["/owner/model/resolve/main/config.json"]


def test_transformers_messages_are_off_while_loading_and_restored_afterwards(
    tiny: ByName, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    folder = str(tiny("smollm3").folder)
    capfd.readouterr()  # the bars of writing it, where no test did before
    logging.set_verbosity_info()
    try:
        load_float32(folder)
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


def test_gated_missing_and_empty_models_have_errors_of_their_own(tmp_path: Path) -> None:
    errors = []
    with serving(_Hub) as hub, online(hub, tmp_path):
        for name in ("owner/gated", "meta-llama/gated", "owner/missing", "owner/empty"):
            with pytest.raises(UserError) as error:
                load_float32(name)
            errors.append(str(error.value))
    gated, metas, missing, empty = errors
    assert gated.startswith("owner/gated is gated: accept its licence on the Hub")
    assert gated.endswith("or an ungated copy such as unsloth/Llama-3.1-8B")
    assert metas.endswith("or an ungated copy such as unsloth/gated")
    assert missing == "there is no model owner/missing on the Hub"
    assert empty.startswith("cannot load owner/empty: ")
    assert "offline" not in empty
