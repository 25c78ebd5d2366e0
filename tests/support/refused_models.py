"""Folders of models to be broken: a tiny Llama, and changes of a folder's JSON files."""

import json
from pathlib import Path
from typing import Any

from support.tiny_models import CONFIGS, randomised, tokenizer
from transformers import PreTrainedModel


def change(folder: Path, file: str = "config.json", **settings: Any) -> None:
    """Change settings of a JSON file in a folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def write(folder: Path, model: PreTrainedModel, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


def write_llama(folder: Path, **options: Any) -> Path:
    return write(folder, randomised(CONFIGS["llama"]()), **options)
