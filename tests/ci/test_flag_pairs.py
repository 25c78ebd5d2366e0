"""Pairs of flags of every command, drawn and run to their ends on a model of one layer.

Flags and their choices come from the commands' settings; `GOOD` has values for the others.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from command_reference import settings_of
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.adapters import write_adapter
from support.command_line import draw_without_chrome, ended, leaves_of
from support.finished_runs import assert_whole
from support.tiny_models import randomised, tokenizer, tokens, write_texts
from transformers import LlamaConfig

from nope_probe.run.flags import flag_of
from nope_probe.studies.commands import COMMANDS

Words = tuple[str, ...]
ON_MODEL = {"model": "MODEL", "data": "TEXT", "n_seqs": "10", "seq_len": "20", "folds": "5"}
MAPPED = {**ON_MODEL, "layers": "1", "batch_size": "5"}
# What a line has where the pair does not name the flag; a new command, what those on maps have.
BASE: dict[str, dict[str, str]] = {n: MAPPED for n in COMMANDS} | {
    "behaviour": {**MAPPED, "max_len": "24"},
    "circuit": ON_MODEL,
    "compare": {"runs": "runs/one runs/two"},
    "heads": {**MAPPED, "remove": "rope", "k": "1", "draws": "2", "mean_seqs": "16"},
    "trace": {**MAPPED, "confirm": "1"},
}
# Values of flags that have no choices, in words; of a command alone where the key has its name.
GOOD: dict[str, tuple[str, ...]] = {
    "adapter": ("ADAPTER",),
    "alpha": ("0.3",),
    "by": ("others", "induction positional"),
    "draws": ("3",),
    "k": ("1 2",),
    "mean_seqs": ("32",),
    "batch_size": ("3", "64"),
    "confirm": ("0", "2"),
    "data": ("random", "gaussian", "SHORT"),
    "bos": ("auto", "always", "never", "a"),
    "device": ("cpu", "auto"),
    "folds": ("4", "6"),
    "image": ("image.svg",),
    "in_heads": ("L0H1",),
    "kept_positions": ("0",),
    "labels": ("a b",),
    "layer": ("0",),
    "layers": ("1", "2"),
    "max_len": ("32",),
    "measures": ("loss in-context", "copy position"),
    "model": ("nope-tiny", "parameter-free-rope"),
    "n_seqs": ("13",),
    "out": ("here",),
    "prefix": ("5",),
    "query": ("1", "-1"),
    "query_rows": ("5",),
    "reader": ("L0", "L0H1"),
    "remove": ("none", "mask", "content", "rope w_k", "qk", "mlp", "sources", "position[L0H1]"),
    "replacement": ("mean random",),
    "revision": ("main",),
    "runs": ("runs/one runs/one", "runs/two runs/one"),
    "seed": ("3",),
    "seq_len": ("21", "24"),
    "skip_keys": ("0", "2"),
    "steps": ("2",),
    "tokens": ("TOKENS.npy",),
    "text": ("other",),
    "trained_len": ("16",),
    "why": ("L0H1",),
}


def flags_of(command: str) -> dict[str, list[Words]]:
    """Return a command's flags with the values that pairs give them, as words of a line."""
    kind: Any = settings_of(import_module(f"nope_probe.{command}"))
    hints = get_type_hints(kind, include_extras=True)
    shown = {f.name: hints[f.name] for f in fields(kind) if "Suppress" not in str(hints[f.name])}
    return {name: [*values_of(command, name, hint)] for name, hint in shown.items()}


def values_of(command: str, name: str, hint: Any) -> Iterator[Words]:
    """Yield a flag with each of its values: its choices, on and off, or those of `GOOD`."""
    positional = "Positional" in str(hint)
    leaves = [*leaves_of(hint)]
    if leaves == [bool]:
        yield from ((flag_of(name),), (flag_of(f"no_{name}"),))
        return
    choices = [str(leaf) for leaf in leaves if not isinstance(leaf, type)]
    given = GOOD.get(f"{command} {name}", GOOD.get(name, ()))
    values = given if positional else [*choices, *given]
    assert values, f"a value of {flag_of(name)} of {command} is missing in GOOD"
    for value in values:
        yield (*([] if positional else [flag_of(name)]), *value.split())


FLAGS = {command: flags_of(command) for command in BASE}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model of one layer, texts and two finished runs; images need no Chrome."""

    folder = tmp_path_factory.mktemp("desk")
    config = LlamaConfig(
        vocab_size=263, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        bos_token_id=0, eos_token_id=0, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    randomised(config).save_pretrained(folder / "MODEL")
    tokenizer().save_pretrained(folder / "MODEL")
    for name, n_words in (("TEXT", 60), ("SHORT", 1)):
        write_texts(folder / f"{name}.jsonl", n_texts=97, n_words=n_words)
    np.save(folder / "TOKENS.npy", tokens(10, 20))
    with chdir(folder):
        write_adapter(Path("ADAPTER"), base="MODEL")
    with pytest.MonkeyPatch.context() as patch:
        draw_without_chrome(patch)
        for name, data in (("one", "TEXT"), ("two", "random")):
            given = {"data": ("--data", data), "out": ("--out", f"runs/{name}")}
            assert ended("ablate", line_of("ablate", given, folder), folder).code == 0
        yield folder


def line_of(command: str, chosen: dict[str, Words], desk: Path) -> list[str]:
    """Return the words of a line: the base, with the chosen flags in the place of its own."""
    base = {
        name: words if name == "runs" else (flag_of(name), *words)
        for name, words in ((name, tuple(value.split())) for name, value in BASE[command].items())
    }
    files = {path.name: str(path) for path in desk.iterdir()}
    files |= {path.stem: str(path) for path in desk.glob("*.jsonl")}
    files |= {f"runs/{name}": str(desk / "runs" / name) for name in ("one", "two")}
    return [files.get(word, word) for words in (base | chosen).values() for word in words]


def assert_ends(command: str, chosen: dict[str, Words], desk: Path) -> int:
    """Check that a line leaves a whole run, or one line on stderr and nothing else.

    Returns:
        The exit code.
    """
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        if "image" not in chosen:  # figures take half of the time
            patch.setattr("nope_probe.reports.page.Section.drawn", lambda section: None)
        end = ended(command, line_of(command, chosen, desk), folder)
        # A page of numbers within their noise may have no figure; its run is whole all the same.
        has_no_figure = end.err.endswith("there is no figure on the page to draw as an image\n")
        if end.code == 0 or has_no_figure:
            runs = [path.parent for path in folder.rglob("manifest.json")]
            assert end.out
            is_dry = "--dry-run" in chosen.get("dry_run", ())
            assert runs or is_dry
            assert not (runs and is_dry)
            assert not [*folder.rglob("*.unfinished*")]
            for run in runs:
                assert_whole(run)
            return end.code
        assert end.code == 2, end.err
        assert re.fullmatch(r"error: .*\n", end.err), end.err
        assert not end.out
        assert not [*folder.iterdir()]
        return 2


@pytest.mark.parametrize("command", BASE)
@given(drawn=st.data())
@settings(max_examples=45)
def test_a_pair_of_flags_finishes_or_is_refused_in_one_line(
    command: str, drawn: st.DataObject, desk: Path
) -> None:
    flags = FLAGS[command]
    pair = drawn.draw(st.lists(st.sampled_from([*flags]), min_size=2, max_size=2, unique=True))
    chosen = {name: drawn.draw(st.sampled_from(flags[name])) for name in pair}
    event(f"exit {assert_ends(command, chosen, desk)}")
