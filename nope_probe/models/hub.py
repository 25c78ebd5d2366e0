"""Whether the Hugging Face Hub can be reached, found in seconds and without its client's retries.

While it cannot, the client tries every file six times, which takes half a minute and prints 13
lines. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nope_probe.errors import MachineError, UserError
from nope_probe.files import read_json, reading
from nope_probe.models.names import (
    CHECKPOINTS,
    PARAMETER_FREE,
    PARAMETER_FREE_CONTEXT,
    folder_of,
    is_on_hub,
    resolve,
)

SECONDS = 3.0
_GATED_OWNERS = ("meta-llama",)


def validate_reachable(name: str, revision: str | None = None) -> None:
    """Check that a model is on this machine, or that the Hub can be reached.

    Args:
        name: a model's name, as `load` takes it.
        revision: a Hub revision.

    Raises:
        UserError: for an unknown name, a folder without a model, or naming what works offline.
    """
    validate_docstrings()
    if name.lower() in (*CHECKPOINTS, *PARAMETER_FREE):
        return
    source = resolve(name)
    if is_on_hub(name) and not is_cached(source, revision) and is_offline():
        raise not_cached(source)


def validate_docstrings() -> None:
    """Check that Python keeps docstrings: transformers reads its own, and fails without them.

    Raises:
        MachineError: under `python -OO`.
    """
    if sys.flags.optimize > 1:
        raise MachineError("python -OO drops the docstrings that transformers reads: leave out -OO")


def validate_hub_answers(what: str) -> None:
    """Check that the Hub answers, unless its client is in offline mode and reads its cache alone.

    Args:
        what: what is on the Hub, such as `the data set owner/name`.

    Raises:
        UserError: if it does not.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not answers(constants.ENDPOINT):
        raise UserError(
            f"{what} is on the Hub, which cannot be reached (offline); without a network --data "
            "shipped, stdlib, random and files work, and HF_HUB_OFFLINE=1 reads the local cache"
        )


def is_cached(source: str, revision: str | None = None) -> bool:
    """Return whether the local cache has the config.json of a model on the Hub."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str)


def is_offline() -> bool:
    """Return whether the Hub's client is in offline mode, or the Hub does not answer in time."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or not answers(constants.ENDPOINT)


def answers(address: str) -> bool:
    """Return whether a web server answers within seconds, with any status."""
    found: list[bool] = []
    # A name server that does not answer blocks for longer than any timeout of a request.
    request = Thread(target=lambda: found.append(_responds(address)), daemon=True)
    request.start()
    request.join(SECONDS)
    return bool(found) and found[0]


def _responds(address: str) -> bool:
    try:
        urlopen(Request(address, method="HEAD"), timeout=SECONDS).close()
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the client has certificates of its own
    except OSError:
        return False
    return True


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Put the Hub's client into offline mode for the context if the Hub does not answer."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = is_offline()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def not_cached(source: str) -> UserError:
    """Return the error for a model that is neither in the local cache nor within reach."""
    owner = source.partition("/")[0]
    which = "this model is" if owner in _GATED_OWNERS else "if it is"
    ours = ", ".join((*CHECKPOINTS, *PARAMETER_FREE))
    return UserError(
        f"{source} is not in the local cache and the Hub cannot be reached (offline); without a "
        f"network {ours} and local folders work, and with one, {which} gated: accept its licence "
        "on the Hub and set HF_TOKEN"
    )


# Fields of a config.json, in the order in which TransformerLens looks for them. `n_ctx` is none of
# them: where GPT-2's holds it, its positions are `n_positions` all the same.
_FIELDS = (
    "n_positions",
    "max_position_embeddings",
    "max_context_length",
    "seq_length",  # BLOOM
    "max_seq_len",  # MPT, DBRX
    "max_sequence_length",
)
_OF_TEXT = "text_config"  # of models that read more than text, such as Gemma 3 and Llama 4


def validate_seq_len(seq_len: int, n_ctx: int | None) -> None:
    """Check that sequences are no longer than a model's context, if it is known.

    Raises:
        UserError: with both lengths.
    """
    if n_ctx is not None and seq_len > n_ctx:
        raise UserError(f"--seq-len {seq_len} is beyond the model's context {n_ctx}")


def configured_context(name: str, revision: str | None = None) -> int | None:
    """Return how many positions a model takes, by its config.json; None where that is not known.

    It is not known where the field is left out for transformers' own default, or where the file
    cannot be read: what is wrong with it is found, and told, when the model is loaded.

    Args:
        name: a model's name, as `load` takes it.
        revision: a Hub revision.

    Example:
        >>> configured_context("rope-tiny"), configured_context("parameter-free")
        (256, 4096)
    """
    if name.lower() in PARAMETER_FREE:
        return PARAMETER_FREE_CONTEXT
    folder = folder_of(name)
    config = _hub_config(resolve(name), revision) if folder is None else folder / "config.json"
    fields = {} if config is None else _fields(config)
    if isinstance(fields.get(_OF_TEXT), dict):
        fields = fields[_OF_TEXT]
    named = [fields[field] for field in _FIELDS if field in fields]
    return named[0] if named and isinstance(named[0], int) and named[0] > 0 else None


def _fields(config: Path) -> dict[str, Any]:
    try:
        fields = read_json(config)
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _hub_config(source: str, revision: str | None) -> Path | None:
    """Return the config.json of a model on the Hub, downloaded if need be; None without one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    unavailable = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
    with offline_if_unreachable():
        try:
            return Path(hf_hub_download(source, "config.json", revision=revision))
        except unavailable:
            return None


def reading_model(source: str, part: str) -> AbstractContextManager[None]:
    """Raise a UserError of one line for what libraries raise while a part of a model is read.

    Args:
        source: a Hub id or a local folder.
        part: what is read, such as `config.json`.
    """
    return reading(f"cannot load {source}: {part}", partial(_hub_error, source))


def _hub_error(source: str, error: BaseException) -> UserError | None:
    """Return the error for a model that the Hub does not hand out; None for any other reason."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    causes = list(_chain(error))
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return UserError(
            f"{source} is gated: accept its licence on the Hub and set HF_TOKEN, or use a "
            f"local folder or an ungated copy such as {_ungated(source)}"
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return UserError(f"there is no model {source} on the Hub")
    if any(isinstance(cause, LocalEntryNotFoundError) for cause in causes):
        return not_cached(source)
    return None


def _ungated(source: str) -> str:
    """Return the id of an ungated copy of a gated model: Unsloth has those of Meta's."""
    owner, _, name = source.partition("/")
    return f"unsloth/{name}" if owner == "meta-llama" else "unsloth/Llama-3.1-8B"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
