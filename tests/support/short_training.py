"""Training that takes seconds: few sequences of random tokens, a checkpoint every second step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import AutoTokenizer

from nope_probe.models.names import CHECKPOINTS
from nope_probe.training import run, trainer
from nope_probe.training.corpus import Corpus, _dataset
from nope_probe.training.settings import RECIPES

SHORT = replace(RECIPES["tiny"], seq_len=11, batch_tokens=4 * 11, micro_batch=2, steps=5, warmup=1)


def short_corpus(seed: int = 1) -> Corpus:
    """Return 21 sequences, five steps and a quarter: the pass over them does not end with a run."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS["nope-tiny"])
    tokens = torch.randint(1, 2048, (21, 10), generator=torch.Generator().manual_seed(seed))
    return Corpus(train=_dataset(tokens, tokenizer), held_out=_dataset(tokens[:9], tokenizer))


def shorten_training(setattr: Callable, setitem: Callable) -> None:
    """Replace recipe, corpus and tokenizer, by a monkeypatch's functions or the built-in ones."""
    tokenizer, short = AutoTokenizer.from_pretrained(CHECKPOINTS["nope-tiny"]), short_corpus()
    setitem(RECIPES, "tiny", SHORT)
    setattr(trainer, "SAVE_EVERY", 2)
    setattr(run, "tokenizer_of", lambda *_: tokenizer)
    setattr(run, "corpus_of", lambda *_: short)
