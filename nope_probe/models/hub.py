"""Whether the Hugging Face Hub can be reached, found in seconds and without its client's retries.

While it cannot, the client tries every file six times, which takes half a minute and prints 13
lines. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nope_probe.errors import MachineError, UserError
from nope_probe.models.names import CHECKPOINTS, PARAMETER_FREE, is_on_hub, resolve

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
