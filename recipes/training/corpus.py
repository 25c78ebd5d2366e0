"""The training text of a preset: tokenizer, training and held-out sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

import torch
from datasets import Dataset, IterableDataset, load_dataset
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nope_probe.data.documents import is_held_out, stdlib_documents
from nope_probe.data.tokenizing import cut
from nope_probe.files import JsonObject
from presets import Recipe

BOS = "<bos>"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sequences to train on and to evaluate on; all begin with a BOS token."""

    train: Dataset | IterableDataset
    held_out: Dataset

    def checksum(self) -> str:
        """Return the SHA-256 of the tokens; for a stream, only of the held-out tokens."""
        digest = sha256()
        for data in (self.held_out, self.train):
            if isinstance(data, Dataset):
                for batch in data.with_format("numpy").iter(batch_size=4096):
                    digest.update(batch["input_ids"].astype("int64").tobytes())
        return digest.hexdigest()


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the recipe's tokenizer: a byte-level BPE trained here, or a tokenizer on the Hub."""
    if recipe.size != "tiny":
        return AutoTokenizer.from_pretrained(recipe.tokenizer)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(stdlib_documents(held_out=False), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=BOS)


def corpus_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int) -> Corpus:
    """Return the recipe's text, cut into sequences."""
    if recipe.data == "stdlib":
        return _library(recipe, tokenizer, seed)
    stream = load_dataset(recipe.data, split="train", streaming=True)
    # Held-out documents are not trained on, because runs with `--data fineweb-edu` read them.
    few = stream.filter(lambda row: is_held_out(row["text"])).take(2_000)
    rest = stream.filter(lambda row: not is_held_out(row["text"]))
    settings = {"tokenizer": tokenizer, "recipe": recipe}
    held_out = Dataset.from_generator(_packed, gen_kwargs={"stream": few, **settings})
    train = IterableDataset.from_generator(_packed, gen_kwargs={"stream": rest, **settings})
    return Corpus(train=train, held_out=held_out)


def _library(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int) -> Corpus:
    """Cut sequences at random places of the standard library, with new places in every pass."""
    generator = torch.Generator().manual_seed(seed)
    length = recipe.seq_len - 1
    n_wanted = recipe.steps * recipe.batch_tokens // recipe.seq_len
    ids = _ids(stdlib_documents(held_out=False), tokenizer)
    passes: list[torch.Tensor] = []
    while sum(map(len, passes)) < n_wanted:
        n_seqs = sum(len(document) // length for document in ids)
        passes.append(cut(ids, n_seqs, length, generator)[0])
    held_out = _ids(stdlib_documents(held_out=True), tokenizer)
    n_held_out = min(1024, sum(len(document) // length for document in held_out))
    return Corpus(
        train=_dataset(torch.cat(passes)[:n_wanted], tokenizer),
        held_out=_dataset(cut(held_out, n_held_out, length, generator)[0], tokenizer),
    )


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _dataset(tokens: Int[Tensor, "seq pos"], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    rows = torch.nn.functional.pad(tokens, (1, 0), value=tokenizer.bos_token_id).numpy()
    return Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")


def _packed(
    stream: Iterable[JsonObject], tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> Iterator[dict[str, list[int]]]:
    """Join documents, with BOS before every document, and cut them into sequences."""
    pool: list[int] = []
    for row in stream:
        ids = tokenizer(row["text"], add_special_tokens=False).input_ids
        pool += [tokenizer.bos_token_id, *ids]
        while len(pool) >= recipe.seq_len:
            tokens, pool = pool[: recipe.seq_len], pool[recipe.seq_len :]
            yield {"input_ids": tokens, "labels": tokens}
