"""What libraries raise while a model is read, as one line with the file and the cause."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nope_probe.errors import UserError, is_rust_error
from nope_probe.models.hub import not_cached

MOST_CHARACTERS = 300


@contextmanager
def reading(source: str, part: str) -> Iterator[None]:
    """Raise a UserError of one line for what libraries raise while a part of a model is read.

    transformers, huggingface_hub, safetensors and tokenizers raise nearly every class of error for
    a file that is broken: what surrounds them here reads files and builds modules, nothing else.

    Args:
        source: a Hub id or a local folder.
        part: what is read, such as `config.json`.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    python = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    rarer = (AssertionError, ImportError, MemoryError, RuntimeError, StopIteration)
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (*python, *rarer, SafetensorError, StrictDataclassError) as error:
        raise _one_line(source, part, error) from error
    except BaseException as error:
        if not is_rust_error(error):
            raise
        raise _one_line(source, part, error) from error


def _one_line(source: str, part: str, error: BaseException) -> UserError:
    return _hub_error(source, error) or UserError(f"cannot load {source}: {part}: {cause(error)}")


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


def cause(error: BaseException) -> str:
    """Return an error's text on one line, and where it is from if the text alone says little.

    Example:
        >>> try:
        ...     {}["swish"]
        ... except KeyError as error:
        ...     print(cause(error))
        'swish' (KeyError in <doctest nope_probe.models.reading.cause[0]>)
    """
    text = " ".join(str(error).split())[:MOST_CHARACTERS]
    if isinstance(error, (OSError, ValueError)) or type(error) is Exception:
        return text or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {_module(frames[-1].filename)}" if frames else ""
    return f"{text} ({type(error).__name__}{where})".strip()


def _module(file: str) -> str:
    """Return a file's path from its package on, such as `transformers/activations.py`."""
    return file.rpartition("/site-packages/")[2] or Path(file).name


def _ungated(source: str) -> str:
    """Return the id of an ungated copy of a gated model: Unsloth has those of Meta's."""
    owner, _, name = source.partition("/")
    return f"unsloth/{name}" if owner == "meta-llama" else "unsloth/Llama-3.1-8B"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
