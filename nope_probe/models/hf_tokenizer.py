"""Load a model's tokenizer, without remote code, and check that the two belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nope_probe.errors import UserError
from nope_probe.models.hf_config import class_name, remote_code_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    source: str, *, d_vocab: int, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that embeds d_vocab tokens.

    Raises:
        UserError: if it needs remote code, if a file is broken, or for ids that the model does not
            embed.
    """
    from transformers import AutoTokenizer

    validate_no_remote_tokenizer(source, revision)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    validate_vocabulary(source, tokenizer, d_vocab)
    tokenizer("a")  # what is wrong with some files shows only now
    return tokenizer


def validate_no_remote_tokenizer(source: str, revision: str | None = None) -> None:
    """Check that a tokenizer's class is in transformers, not in the model's own folder.

    Raises:
        UserError: naming the class that would have to be run.
    """
    from transformers.models.auto.tokenization_auto import (
        get_tokenizer_config,
        tokenizer_class_from_name,
    )

    auto_map = get_tokenizer_config(source, revision=revision).get("auto_map") or ()
    if isinstance(auto_map, Mapping):
        auto_map = auto_map.get("AutoTokenizer") or ()
    names = [auto_map] if isinstance(auto_map, str) else [name for name in auto_map if name]
    if names and not any(tokenizer_class_from_name(class_name(str(name))) for name in names):
        raise remote_code_error(source, names[0])


def validate_vocabulary(source: str, tokenizer: PreTrainedTokenizerBase, d_vocab: int) -> None:
    """Check that a model embeds every token; it may embed more, since vocabularies are padded.

    Raises:
        UserError: naming the largest id.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= d_vocab:
        raise UserError(
            f"the tokenizer of {source} has ids up to {largest}, but the model embeds only "
            f"{d_vocab} tokens: they do not belong together"
        )
