"""The Hugging Face Hub: checks that it can be reached, and errors that say what to do.

Without a network, the Hub's client tries every file six times, which takes half a minute and prints
13 lines. This file notices it in seconds. It imports torch and transformers only when it needs
them.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nope_probe.errors import UserError
from nope_probe.files import reading
from nope_probe.models.names import (
    CHECKPOINTS,
    PARAMETER_FREE,
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
        UserError: for an unknown name or a folder without a model; offline, naming the models
            that work.
    """
    if name.lower() in (*CHECKPOINTS, *PARAMETER_FREE):
        return
    source = resolve(name)
    if is_on_hub(name) and not is_cached(source, revision) and is_offline():
        raise not_cached(source)


def validate_hub_answers(what: str) -> None:
    """Check that the Hub answers, unless its client is in offline mode and reads only its cache.

    Args:
        what: the item on the Hub, such as `the data set owner/name`.

    Raises:
        UserError: if the Hub does not answer.
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
    answered: list[bool] = []

    def ask() -> None:
        try:
            urlopen(Request(address, method="HEAD"), timeout=SECONDS).close()
        except HTTPError:
            pass
        except URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # the client has its own certificates
                return
        except OSError:
            return
        answered.append(True)

    # A name server that does not answer blocks for longer than any timeout of a request.
    request = Thread(target=ask, daemon=True)
    request.start()
    request.join(SECONDS)
    return bool(answered)


@contextmanager
def offline_if_unreachable(source: str) -> Iterator[None]:
    """Put the Hub's client into offline mode for a model on the Hub, if the Hub does not answer."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before if Path(source).is_dir() else is_offline()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def not_cached(source: str) -> UserError:
    """Return the error for a model that is neither in the local cache nor within reach."""
    owner = source.partition("/")[0]
    which = "this model is" if owner in _GATED_OWNERS else "if it is"
    shipped = ", ".join((*CHECKPOINTS, *PARAMETER_FREE))
    return UserError(
        f"{source} is not in the local cache and the Hub cannot be reached (offline); without a "
        f"network {shipped} and local folders work, and with one, {which} gated: accept its "
        "licence on the Hub and set HF_TOKEN"
    )


@contextmanager
def reading_model(source: str, part: str) -> Iterator[None]:
    """Turn a library's error while a part of a model is read into a UserError of one line.

    Args:
        source: a Hub id or a local folder.
        part: the part, such as `config.json`.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    with reading(f"cannot load {source}: {part}"):
        try:
            yield
        except Exception as error:
            causes = list(_chain(error))
            if any(isinstance(cause, GatedRepoError) for cause in causes):
                owner, _, name = source.partition("/")  # Unsloth has ungated copies of Meta's
                copy = f"unsloth/{name}" if owner == "meta-llama" else "unsloth/Llama-3.1-8B"
                raise UserError(
                    f"{source} is gated: accept its licence on the Hub and set HF_TOKEN, or use a "
                    f"local folder or an ungated copy such as {copy}"
                ) from error
            if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
                raise UserError(f"there is no model {source} on the Hub") from error
            if any(isinstance(cause, LocalEntryNotFoundError) for cause in causes):
                raise not_cached(source) from error
            raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
