"""A model's tokenizer, without remote code, and one that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nope_probe.errors import UserError
from nope_probe.models.hf_config import class_name, remote_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    source: str, *, d_vocab: int, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that embeds d_vocab tokens.

    Raises:
        UserError: for remote code, a broken file, or ids that the model does not embed.
    """
    from transformers import AutoTokenizer

    _validate_remote_code(source, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
    except Exception as error:
        if type(error) is not Exception:  # which is what `tokenizers` raises for a broken file
            raise
        raise UserError(f"{source} has a tokenizer that cannot be read: {error}") from error
    _validate_other_vocabulary(source, tokenizer, d_vocab)
    return tokenizer


def _validate_remote_code(source: str, revision: str | None) -> None:
    from transformers.models.auto.tokenization_auto import (
        get_tokenizer_config,
        tokenizer_class_from_name,
    )

    brought = get_tokenizer_config(source, revision=revision).get("auto_map") or ()
    if isinstance(brought, Mapping):
        brought = brought.get("AutoTokenizer") or ()
    names = [brought] if isinstance(brought, str) else [name for name in brought if name]
    if names and not any(tokenizer_class_from_name(class_name(name)) for name in names):
        raise remote_code(source, names[0])


def _validate_other_vocabulary(
    source: str, tokenizer: PreTrainedTokenizerBase, d_vocab: int
) -> None:
    """Refuse ids beyond the embeddings; fewer are fine, since vocabularies are padded."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= d_vocab:
        raise UserError(
            f"the tokenizer of {source} has ids up to {largest}, but the model embeds only "
            f"{d_vocab} tokens: they do not belong together"
        )
