"""Training that takes seconds: few sequences of random tokens, a checkpoint every second step.

As a command it is `train` in this way, which resumes what lies in its folder.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

import train
import trainer
import training_run as run
from corpus import Corpus, _dataset
from nope_probe.models.names import CHECKPOINTS
from presets import RECIPES

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


def main() -> None:
    """Run `train` so; `--out` is the last of its arguments."""
    shorten_training(setattr, dict.__setitem__)
    if Path(sys.argv[-1], "run.json").is_file():
        sys.argv.append("--resume")
    train.main()
