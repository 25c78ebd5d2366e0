"""Names of models: parameter-free, shipped and friendly names, folders, and ids on the Hub.

Without a network, the Hub's client tries every file six times, which takes half a minute and prints
13 lines. This file notices it in seconds, and says what to do. It needs neither torch nor
transformers.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub  # it imports its parts when they are asked for
from huggingface_hub import constants

from nope_probe.errors import UserError
from nope_probe.files import (
    local_path,
    read_json,
    reading,
    validate_regular,
    validate_regular_files,
)

PARAMETER_FREE = ("parameter-free", "parameter-free-rope")
PARAMETER_FREE_CONTEXT = 4096  # positions: any number works, because no position is learned
_SHIPPED = Path(__file__).parents[1] / "checkpoints"
CHECKPOINTS = {name: _SHIPPED / name for name in ("nope-tiny", "rope-tiny")}
FRIENDLY = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "phi-4": "microsoft/phi-4",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "nope-1.5b": "starmpcc/NoPE_1.5B_FW_EDU_15T",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "tinyllama-nope": "AntNLP/TinyLlama-NoPE-1.1B",
}
# What `make real` fetches from the package index; another cache than the Hub's.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nope_probe")
FETCHED = {
    "smollm2-135m": _CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m": _CACHE / "gemma-3-270m-q4_k_m.gguf",
}
NAMES = (*PARAMETER_FREE, *CHECKPOINTS, *FRIENDLY)
ADAPTER = "adapter_config.json"  # describes an adapter, whose weights are added to a model's
_LENS = Path(getattr(find_spec("transformer_lens"), "origin", "")).parent
_ALIASES = _LENS / "tools/model_registry/data/model_aliases.json"


def is_on_hub(name: str) -> bool:
    """Return whether a name is that of a model on the Hub, neither shipped nor on this machine.

    Example:
        >>> is_on_hub("llama-3.1-8b"), is_on_hub("nope-tiny")
        (True, False)
    """
    return name.lower() not in PARAMETER_FREE and path_of(name) is None


def path_of(name: str) -> Path | None:
    """Return a model's folder or GGUF file on this machine; None for a model on the Hub.

    A folder without safetensors that holds one GGUF file means this file.
    """
    if name.lower() in CHECKPOINTS:
        return CHECKPOINTS[name.lower()]
    path = local_path(name)
    if name and os.path.isdir(path):  # False for impossible names
        files = [] if any(path.glob("*.safetensors")) else gguf_files(path)
        return files[0] if len(files) == 1 else path
    if is_gguf(name) and os.path.isfile(path):
        return path
    fetched = FETCHED.get(name.lower())
    return fetched if fetched is not None and fetched.is_file() else None


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file, here or on the Hub, and not of a folder."""
    return name.lower().endswith(".gguf") and not os.path.isdir(local_path(name))


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder."""
    return sorted(path for path in folder.iterdir() if is_gguf(str(path)) and path.is_file())


def file_on_hub(source: str) -> tuple[str, str]:
    """Return the Hub id and the name of the file that is read first.

    Example:
        >>> file_on_hub("owner/name"), file_on_hub("owner/name/Q8/model.gguf")
        (('owner/name', 'config.json'), ('owner/name', 'Q8/model.gguf'))
    """
    if not is_gguf(source):
        return source, "config.json"
    owner, name, file = source.split("/", 2)
    return f"{owner}/{name}", file


def validate_revision(name: str) -> None:
    """Check that a model is on the Hub, as a revision needs.

    Raises:
        UserError: if the model is not on the Hub.
    """
    if not is_on_hub(name):
        raise UserError(f"--revision is for models on the Hub, and {name} is not there")


def resolve(name: str) -> str:
    """Return where a model is: a Hub id, a folder, or a GGUF file here or on the Hub.

    Args:
        name: a friendly name, a Hub id, a folder, a GGUF file or TransformerLens's name.

    Raises:
        UserError: for a folder without a config.json or a single GGUF file, a GGUF file that is
            not there, or an unknown name (with the nearest known names).
    """
    path = path_of(name)
    if path is not None:
        validate_regular_files(path)
        if path.is_dir() and not (path / "config.json").is_file():
            raise UserError(f"the folder {name} {_without_config(name, path)}")
        return str(path)
    if is_gguf(name):
        validate_regular(local_path(name))
        if name.count("/") < 2 or not is_hub_id("/".join(name.split("/")[:2])):
            raise UserError(
                f"there is no file {name}: name a GGUF file on this machine, or one on the Hub as "
                "owner/name/FILE.gguf"
            )
        return name
    path = local_path(name)
    if os.path.isfile(path):
        is_part = {"config.json", ADAPTER} & {*os.listdir(path.parent)}
        whole = f"a file, and a model is the folder that holds it: name {path.parent}"
        other = "no model: name a folder with a config.json, or a GGUF file"
        raise UserError(f"{name} is {whole if is_part else other}")
    if name.startswith((".", "/", "~")):
        raise UserError(f"there is no folder or file {name}: {path} does not exist")
    known = _lens_names() | FRIENDLY
    if name.lower() in known:
        return known[name.lower()]
    if name.count("/") == 1 and is_hub_id(name):
        return name
    names = dict.fromkeys((*NAMES, *known))
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.3) or NAMES
    raise UserError(
        f"unknown model {name!r}; the nearest names are {', '.join(near)}; a Hub id "
        "(owner/name), a local folder or a GGUF file works too"
    )


def _without_config(name: str, folder: Path) -> str:
    """Return what a folder without a config.json holds, and how to load it."""
    if files := gguf_files(folder):
        return f"holds {len(files)} GGUF files: name one of them, such as {files[0]}"
    if (folder / ADAPTER).is_file():
        return (
            f"holds an adapter alone: --adapter {name} (adapter=...) loads its base model, "
            f"{_named_base(name) or 'named by --model'}, with it"
        )
    return "has no config.json: it holds no Hugging Face model"


def base_of(adapter: str) -> str:
    """Return the name of the base model of an adapter, from the adapter's folder.

    Raises:
        UserError: for a folder without an adapter, or an adapter that names no base model, or one
            that is not found.
    """
    base = _named_base(adapter)
    if not base:
        raise UserError(f"the adapter {adapter} names no base model: name it with --model")
    try:
        resolve(base)
    except UserError as error:
        raise UserError(
            f"the adapter {adapter} names {base!r} as its base model, which is not found from "
            "here: name the base model with --model"
        ) from error
    return base


def validate_adapter(adapter: str) -> None:
    """Check that a folder holds an adapter, of regular files.

    Raises:
        UserError: if it does not.
    """
    validate_regular_files(local_path(adapter))
    if not (local_path(adapter) / ADAPTER).is_file():
        raise UserError(f"{adapter} holds no adapter: it has no {ADAPTER}")


def _named_base(adapter: str) -> str:
    """Return the base model in an adapter's description; "" if it names none."""
    validate_adapter(adapter)
    file = local_path(adapter) / ADAPTER
    with reading(f"{file} describes no adapter"):
        return str(read_json(file).get("base_model_name_or_path") or "")


def is_hub_id(name: str) -> bool:
    """Return whether the Hub can have a model of this name.

    Example:
        >>> is_hub_id("Qwen/Qwen3-8B"), is_hub_id("nope-tiny/")
        (True, False)
    """
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


@cache
def _lens_names() -> dict[str, str]:
    """Return the Hub ids of TransformerLens's names and aliases, by lower-case name.

    Its file of names is read, not imported, because importing TransformerLens takes seconds.
    """
    written = dict[str, Any]()
    for statement in ast.parse((_LENS / "supported_models.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(
            statement.value, ast.List | ast.Dict
        ):
            written[ast.unparse(statement.target)] = ast.literal_eval(statement.value)
    if "MODEL_ALIASES" not in written:  # TransformerLens 4 keeps them elsewhere
        written["MODEL_ALIASES"] = read_json(_ALIASES)["aliases"]
    official, aliases = written["OFFICIAL_MODEL_NAMES"], written["MODEL_ALIASES"]
    names = {source.rpartition("/")[2].lower(): source for source in official}
    names |= {alias.lower(): source for source in aliases for alias in aliases[source]}
    return names | {source.lower(): source for source in official}


def trained_length(name: str) -> int | None:
    """Return the training length of a shipped model, in tokens; None for other models.

    Example:
        >>> trained_length("rope-tiny")
        128
    """
    folder = CHECKPOINTS.get(name.lower())
    if folder is None:
        return None
    record = read_json(folder / "training.json")
    return int(record["recipe"]["seq_len"])


SECONDS = 3.0
_GATED_OWNER = "meta-llama"


def validate_reachable(name: str, revision: str | None = None) -> None:
    """Check that a model is on this machine, or that the Hub can be reached.

    Args:
        name: a model's name, as `load` takes it.
        revision: a Hub revision.

    Raises:
        UserError: for an unknown name or a folder without a model; offline, naming the models
            that work.
    """
    if name.lower() in (*CHECKPOINTS, *PARAMETER_FREE):
        return
    source = resolve(name)
    if is_on_hub(name):
        cached = huggingface_hub.try_to_load_from_cache(*file_on_hub(source), revision=revision)
        if not isinstance(cached, str) and is_offline():
            raise not_cached(source, revision)


def validate_hub_answers(what: str) -> None:
    """Check that the Hub answers, unless its client is in offline mode and reads only its cache.

    Args:
        what: the item on the Hub, such as `the data set owner/name`.

    Raises:
        UserError: if the Hub does not answer.
    """
    if not constants.HF_HUB_OFFLINE and not answers(constants.ENDPOINT):
        raise UserError(
            f"{what} is on the Hub, which cannot be reached (offline); without a network --data "
            "shipped, stdlib, random and files work, and HF_HUB_OFFLINE=1 reads the local cache"
        )


def is_offline() -> bool:
    """Return whether the Hub's client is in offline mode, or the Hub does not answer in time."""
    return bool(constants.HF_HUB_OFFLINE) or not answers(constants.ENDPOINT)


def answers(address: str) -> bool:
    """Return whether a web server answers within seconds, with any status.

    Raises:
        UserError: for what is no address, as HF_ENDPOINT may be.
    """
    answered: list[bool] = []
    if not _is_address(address):
        raise UserError(
            f"HF_ENDPOINT is {address!r}: expected an address such as https://huggingface.co"
        )

    def ask() -> None:
        with suppress(Exception):  # each version of the Hub's client has its own errors
            huggingface_hub.get_session().head(address, timeout=SECONDS)
            answered.append(True)

    # A name server that does not answer blocks for longer than any timeout of a request.
    request = Thread(target=ask, daemon=True)
    request.start()
    request.join(SECONDS)
    return bool(answered)


def _is_address(text: str) -> bool:
    """Return whether a text is the address of a web server."""
    try:
        parts = urlsplit(text)
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
    return is_complete and parts.scheme in ("http", "https") and text.split() == [text]


def offline_if_unreachable(source: str) -> AbstractContextManager[object]:
    """Put the Hub's client into offline mode for a model on the Hub, if the Hub does not answer."""
    from unittest.mock import patch

    is_off = constants.HF_HUB_OFFLINE if Path(source).exists() else is_offline()
    return patch.object(constants, "HF_HUB_OFFLINE", is_off)


def not_cached(source: str, revision: str | None = None) -> UserError:
    """Return the error for a model that is neither in the local cache nor within reach."""
    which = "this model is" if source.startswith(f"{_GATED_OWNER}/") else "if it is"
    shipped = ", ".join((*CHECKPOINTS, *PARAMETER_FREE))
    here = "neither a file on this machine nor" if is_gguf(source) else "not"
    of_it = "" if revision is None else f"revision {revision} of "
    return UserError(
        f"{of_it}{source} is {here} in the local cache and the Hub cannot be reached (offline); "
        f"without a network {shipped}, local folders and GGUF files work, and with one, {which} "
        "gated: accept its licence on the Hub and set HF_TOKEN"
    )


@contextmanager
def reading_model(source: str, part: str) -> Iterator[None]:
    """Turn a library's error while a part of a model is read into a UserError of one line.

    Args:
        source: a Hub id or a local folder.
        part: the part, such as `config.json`.
    """
    with reading(f"cannot load {source}: {part}"):
        try:
            yield
        except Exception as error:
            from huggingface_hub.errors import (  # it waits for a client of HTTP
                GatedRepoError,
                LocalEntryNotFoundError,
                RepositoryNotFoundError,
            )

            known = (RepositoryNotFoundError, LocalEntryNotFoundError)
            cause: BaseException | None = error
            while cause and not isinstance(cause, known):
                cause = cause.__cause__ or cause.__context__
            if isinstance(cause, GatedRepoError):
                owner, _, name = source.partition("/")  # Unsloth has ungated copies of Meta's
                copy = f"unsloth/{name}" if owner == _GATED_OWNER else "unsloth/Llama-3.1-8B"
                raise UserError(
                    f"{source} is gated: accept its licence on the Hub and set HF_TOKEN, or use a "
                    f"local folder or an ungated copy such as {copy}"
                ) from error
            if isinstance(cause, RepositoryNotFoundError):
                raise UserError(f"there is no model {source} on the Hub") from error
            if isinstance(cause, LocalEntryNotFoundError):
                raise not_cached(source) from error
            raise
