"""Every model that cannot be loaded is an error of one line with the reason; no network is used."""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any, ClassVar

import pytest
import torch
from support.fake_hub import HubHandler, online, serving
from support.tiny_models import ByName
from transformers import T5Config

from nope_probe import UserError
from nope_probe.models.huggingface import load_hugging_face


def load(source: Any, **options: Any) -> Any:
    return load_hugging_face(str(source), dtype=torch.float32, **options)


@pytest.fixture
def folder(tiny: ByName, tmp_path: Path) -> Path:
    """A copy of a valid model's folder, to be broken."""
    return Path(copytree(tiny("smollm3").folder, tmp_path / "model"))


def test_the_first_layers_keep_their_own_rope_switches(folder: Path) -> None:
    model = load(folder, n_layers=2).model
    assert len(model.model.layers) == 2
    assert model.config.no_rope_layers == [1, 0]


def test_what_is_no_causal_decoder_is_refused(tmp_path: Path) -> None:
    T5Config(d_model=8, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a t5, not a causal decoder"):
        load(tmp_path)


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


def test_gated_missing_and_empty_models_have_errors_of_their_own(hub: str, tmp_path: Path) -> None:
    errors = []
    for name in ("owner/gated", "meta-llama/gated", "owner/missing", "owner/empty"):
        with online(hub, tmp_path), pytest.raises(UserError) as error:
            load(name)
        errors.append(str(error.value))
    gated, metas, missing, empty = errors
    assert gated.startswith("owner/gated is gated: accept its licence on the Hub")
    assert gated.endswith("or an ungated copy such as unsloth/Llama-3.1-8B")
    assert metas.endswith("or an ungated copy such as unsloth/gated")
    assert missing == "there is no model owner/missing on the Hub"
    assert empty.startswith("cannot load owner/empty: ")
    assert "offline" not in empty
