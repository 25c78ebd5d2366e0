"""Every documented command line and every flag, run to their ends.

A line is run in a copy of the desk: a folder in which all that the documentation names is there,
tiny. Models with a name on the Hub come from a cache of random ones, the network is off, and of an
image everything is made but Chrome's drawing.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from glob import glob
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from ci.gguf_files import tiny_llama, write_gguf
from command_reference import flags_of, settings_of
from huggingface_hub import constants
from support import command_line
from support.adapters import write_adapter
from support.command_line import Ended, draw_without_chrome
from support.fake_hub import put_into_cache
from support.tiny_models import CONFIGS, smollm3_config, tokens, write_texts, write_tiny

from nope_probe.cli import overview
from nope_probe.models.names import FETCHED
from nope_probe.studies.commands import COMMANDS

ROOT = Path(__file__).parents[2]

# What every line is made small by: the flags that take the place of a documented line's own.
SMALL_RUN = {"--n-seqs": "4", "--seq-len": "11", "--folds": "4"}
RUN_SIZES = {**SMALL_RUN, "--batch-size": "4"}
ON_TEXT = {**RUN_SIZES, "--n-seqs": "8", "--batch-size": "8", "--seq-len": "20"}
MAPPED = {**RUN_SIZES, "--layers": "1"}  # of commands that have these flags and no row
SIZES: dict[str, dict[str, str]] = {
    "circuit": RUN_SIZES,
    "heads": {**ON_TEXT, "--mean-seqs": "16", "--draws": "2"},
    "behaviour": ON_TEXT,
    "trace": {**RUN_SIZES, "--n-seqs": "10", "--folds": "5", "--layers": "2", "--confirm": "1"},
}
# Numbers of heads that the tiny models lack.
TINY = dict.fromkeys([("60", "100", "136"), ("30", "60", "100")], ("1", "2", "3"))
OF_WHY = {"--layers": "4", "--query": "1"}  # L3H3, in a text of two tokens
OF_TEXTS = ("--n-seqs", "--seq-len")
TEXT, PACKED = "my.jsonl", "short.jsonl"
# What stands for what cannot be run here, and why it cannot.
SUBSTITUTES = {
    "runs/rope": "runs/two",  # runs that the desk has
    "runs/nope": "runs/one",
    "fineweb-edu": TEXT,  # a data set on the Hub
    "def area(width, height): return width * height": "ab",  # longer than the small sequences
    "step1000": "main",  # the checkpoints of Pythia's training
    "step143000": "main",
    "unsloth/Llama-3.1-8B": "llama-3.1-8b",  # the same model
}
HUB = {
    "meta-llama/Llama-3.1-8B": "llama",
    "microsoft/phi-4": "phi3",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-0.6B": "qwen3",
    "HuggingFaceTB/SmolLM3-3B": "smollm3-deep",
    "gpt2": "gpt2",
    "EleutherAI/pythia-160m": "neox",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
}

# One row a line. Together with the documented lines they give every flag of every command.
TABLE = """
ablate --model llama-3.1-8b --revision main --data my.jsonl --windows start --bos always --shuffle
    --remove mask+rope mlp+w_o --device cpu --dtype float64 --batch-size 3 --skip-keys 2 --seed 3
    --beyond-context --allow-unused --query-rows 5
    --out runs/a --image a.png --verbose
ablate --data short.jsonl --pack --remove qk --replacement random mean --gain norm
ablate --remove rope_low w_q --data prose --bos .. --no-pack --no-shuffle --skip-keys 0
    --no-beyond-context --no-allow-unused --no-verbose --no-dry-run --no-per-head
ablate --remove rope[0:2] w_q --per-head
ablate --remove content --in-heads L0H1
ablate --in-heads L0H1
ablate --remove written+rope --kept-positions 0
attention --remove content w_q --in-heads L0H1 L0H3
attention --remove written --kept-positions 2
circuit --remove content --in-heads L0H1
circuit --remove written --kept-positions 0
heads --model llama-3.1-8b --revision main --data my.jsonl --windows start --bos always --shuffle
    --device cpu --dtype float64 --batch-size 3 --skip-keys 1 --seed 3
    --by others induction order.csv --remove rope content mask --k 1 2 --draws 2
    --mean-seqs 16 --layers 1 --beyond-context --allow-unused --query-rows 5 --out runs/f
    --image f.svg --verbose
heads --model models/qwen3-8b --device-map auto --data short.jsonl --pack --no-shuffle
    --no-beyond-context --no-allow-unused --no-verbose --remove mask
heads --no-dry-run --no-pack --no-least --no-singles --remove rope --alpha 0
heads --dry-run --remove rope --least
heads --remove mask --k 1 --singles
heads --tokens tokens.npy --adapter adapter --remove mask --k 1
behaviour --kept-positions 3 --measures loss position
behaviour --in-heads L0H1 --measures loss
behaviour --remove content rope --in-heads L0H1 L1H3 --measures loss copy extrapolation
ablate --model parameter-free-rope --data gaussian --alpha 0.3
attention --model llama-3.1-8b --revision main --data my.jsonl --windows start
    --bos never --shuffle --device cpu --dtype bfloat16 --batch-size 3 --skip-keys 1 --seed 3
    --remove qk --replacement mean --beyond-context --allow-unused
    --query-rows 5 --out runs/h --image h.svg --verbose
attention --model models/qwen3-8b --device-map sequential --data short.jsonl --pack --remove w_q
    --replacement identity --gain identity --text ab
attention --tokens tokens.npy --adapter adapter
ablate --tokens tokens.npy --adapter adapter --remove sources
circuit --tokens tokens.npy --adapter adapter
behaviour --tokens tokens.npy --adapter adapter --measures loss --remove mask
trace --tokens tokens.npy --adapter adapter
attention --model parameter-free-rope --data gaussian --alpha 0.3 --no-pack --no-shuffle
    --remove rope --no-beyond-context --no-allow-unused --no-verbose --no-dry-run
ablate --remove none --model models/qwen3-8b --device-map sequential --data short.jsonl --pack
    --per-head
circuit --model llama-3.1-8b --revision main --data my.jsonl --windows start --bos never --shuffle
    --device cpu --dtype float16 --batch-size 3 --skip-keys 1 --seed 3
    --layer 1 --remove qk --replacement mean --beyond-context --allow-unused --query-rows 5
    --out runs/c --image c.svg --verbose
circuit --model models/qwen3-8b --device-map balanced --data short.jsonl --pack --remove ov norms
    --replacement identity --gain identity
circuit --model parameter-free-rope --data gaussian --alpha 0.3 --no-pack --no-shuffle --remove rope
    --no-beyond-context --no-allow-unused --no-verbose --no-dry-run
behaviour --model llama-3.1-8b --revision main --data my.jsonl --windows start --bos always
    --shuffle --device cpu --dtype float64 --batch-size 3 --skip-keys 1 --seed 3 --layers 1
    --remove mask+w_v --prefix 5 --replacement zero random --gain identity
    --max-len 24 --trained-len 16 --beyond-context --allow-unused --query-rows 11
    --out runs/b --image b.svg --verbose
behaviour --model models/qwen3-8b --device-map auto --data short.jsonl --pack --measures position
    --remove rope qk
behaviour --measures position bos --no-pack --no-shuffle --alpha 0 --remove mask mlp
    --no-beyond-context --no-allow-unused --no-verbose --no-dry-run
compare runs/one runs/two --out runs/compared --image d.svg --verbose
compare runs/one runs/two --no-verbose
trace --model llama-3.1-8b --revision main --data my.jsonl --windows start --bos never --shuffle
    --device cpu --dtype float64 --batch-size 3 --skip-keys 1 --seed 3
    --reader L1H1 --writers layers --beyond-context --allow-unused --query-rows 5
    --out runs/w --image w.svg --verbose
trace --model models/qwen3-8b --device-map auto --data short.jsonl --pack --no-per-head
trace --model parameter-free-rope --data gaussian --alpha 0.3 --no-pack --no-shuffle --per-head
    --no-beyond-context --no-allow-unused --no-verbose --no-dry-run
attention --dry-run
ablate --remove none --dry-run
circuit --dry-run
behaviour --dry-run
trace --dry-run
"""


@dataclass(frozen=True)
class Line:
    """A command line: its positional arguments under the name "", each flag's values under its."""

    command: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def arguments(self) -> list[str]:
        return [word for name, values in self.groups for word in (name, *values) if word]

    def without(self, flag: str) -> Line:
        return Line(self.command, tuple(group for group in self.groups if group[0] != flag))

    def __str__(self) -> str:
        return shlex.join([self.command, *self.arguments])


def settings_kind(command: str) -> type:
    """Return the settings that a command parses."""
    return settings_of(import_module(f"nope_probe.{command}"))


def defaults_of(command: str) -> dict[str, tuple[str, ...]]:
    """Return the values that each flag of a command has where it is not given."""
    flags = flags_of(settings_kind(command))
    return {name.split()[0]: tuple(default.split()) for name, default, _ in flags}


DEFAULTS = {command: defaults_of(command) for command in COMMANDS}


def sizes_of(command: str) -> dict[str, str]:
    """Return the flags that make a line small."""
    mapped = MAPPED if {*MAPPED} <= {*DEFAULTS[command]} else {}
    return SIZES.get(command, mapped)


def line_of(command: str, groups: Mapping[str, tuple[str, ...]]) -> Line:
    """Return a line made small, on a small text, without defaults, its flags in order.

    All removals and measures are of the plain `ablate` and `behaviour`; with flags, they are few.
    """
    small = sizes_of(command)
    takes_vectors = groups.get("--model", ("",))[0].startswith("parameter-free")
    reads_text = "--folds" in small and "--tokens" not in groups and not takes_vectors
    defaults = DEFAULTS[command]
    chosen = {n: TINY.get(given, given) for n, given in groups.items() if given != defaults.get(n)}
    if chosen.get("--layers") == ("all",):
        small = {name: size for name, size in small.items() if name != "--layers"}
    elif command == "behaviour" and "--layers" in chosen:
        small = {**small, "--layers": "1"}
    if command == "ablate" and not {"--remove", "--alpha"} & {*chosen} and groups:
        chosen["--remove"] = ("w_q",)
    if command == "behaviour" and "--measures" not in chosen:
        if not groups or "--trained-len" in chosen:
            small = {**small, "--max-len": "24"}
        else:
            chosen["--measures"] = ("position",)
    names_a_writer = any("position[L1" in name for name in chosen.get("--remove", ()))
    if names_a_writer and command != "behaviour":
        small = {**small, "--layers": "2"}
    if reads_text:
        chosen = {"--data": (PACKED if "--pack" in chosen else TEXT,), **chosen}
    small = {**small, **(OF_WHY if "--why" in chosen else {})}
    small = without_sizes(small) if "--tokens" in chosen else small
    sizes = {name: (size,) for name, size in small.items()}
    sizes |= {"--query-rows": ("5",)} if "--query-rows" in chosen else {}  # of 11 tokens
    return Line(command, tuple(sorted((chosen | sizes).items())))


def without_sizes(small: Mapping[str, str]) -> dict[str, str]:
    """Return flags without those of tokens that have a number and a length."""
    return {name: size for name, size in small.items() if name not in OF_TEXTS}


def parsed(text: str) -> Line:
    """Return the small line of a command and its arguments as typed."""
    command, *words = shlex.split(text)
    groups: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            groups[name] = ()
        else:
            known = word if name == "--out" else SUBSTITUTES.get(word, word)  # a new folder
            groups[name] = (*groups.get(name, ()), known)
    return line_of(command, groups)


def documented_text() -> Iterator[str]:
    """Yield each command line that README, docs and help texts show, as typed."""
    anywhere = re.compile(rf"(?:-m nope_probe\.|nope-probe )({'|'.join(COMMANDS)})\b([^\n`#>]*)")
    in_prose = re.compile(rf"`({'|'.join(COMMANDS)}) (--[^`\n]*)`")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for command, words in [*anywhere.findall(text), *in_prose.findall(text)]:
            yield f"{command} {words}"
    for line in overview().partition("examples:\n")[2].splitlines():
        yield re.search(rf"(?:{'|'.join(COMMANDS)}) --.*", line)[0]  # whatever started Python
    for command in COMMANDS:
        for words in import_module(f"nope_probe.{command}").Settings.examples:
            yield f"{command} {words}"


def in_new_ways(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines less those that differ from another only in a model's name and its layers.

    Every name of a model is in a line that is left; tests of every decoder run all commands.
    """
    seen: set[object] = set()
    for line in lines:
        groups = dict(line.groups)
        names = {
            name for name in groups.get("--model", ()) if not name.startswith("parameter-free")
        }
        of_any_model = line.without("--layers")
        of_any_model = of_any_model.without("--model") if names else of_any_model
        if not {of_any_model, *names} <= seen:
            yield line
        seen |= {of_any_model, *names}


PLAIN = ("ablate", "behaviour", "ablate --remove none --per-head")
DOCUMENTED = [text for text in documented_text() if "--help" not in text]
ROWS = TABLE.strip().replace("\n    ", " ").splitlines()
WITH_REPEATS = list(dict.fromkeys(parsed(text) for text in [*DOCUMENTED, *ROWS]))
# A line with an image runs all of the same line without.
IMAGES = {line.without("--image") for line in WITH_REPEATS if "--image" in dict(line.groups)}
LINES = [*in_new_ways(line for line in WITH_REPEATS if line not in IMAGES)]
# Figures take half of the time: those of the table, of images and of plain commands are drawn.
DRAWN = {*map(parsed, [*ROWS, *PLAIN])} | {line for line in LINES if "--image" in dict(line.groups)}


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the Hub with tiny models, images without Chrome."""

    cache = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "smollm3-deep", lambda: smollm3_config([1, 1, 1, 0] * 3))
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.delitem(FETCHED, "smollm2-135m")  # the tiny model stands for it
        draw_without_chrome(patch)
        made = {name: write_tiny(name, tmp_path_factory.mktemp("made")) for name in {*HUB.values()}}
        for name, tiny in HUB.items():
            put_into_cache(cache, name, made[tiny].folder)
        yield


@pytest.fixture(scope="module")
def desk(
    surroundings: None, tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with all that documented lines name: models, text, finished runs."""
    folder = tmp_path_factory.mktemp("desk")
    copytree(tiny("qwen3").folder, folder / "models" / "qwen3-8b")
    write_gguf(folder / "models" / "smollm2.gguf", tiny_llama())
    write_texts(folder / TEXT, n_texts=19, n_words=90)
    write_texts(folder / PACKED, n_texts=97, n_words=1)
    (folder / "order.csv").write_text("layer,head\n0,2\n0,1\n")
    np.save(folder / "tokens.npy", tokens(16, 24))
    with chdir(folder):
        write_adapter(Path("adapter"), base="models/qwen3-8b")
    for name in ("nope-tiny", "rope-tiny"):
        run = f"ablate --remove sources --model {name} --layers 1 --out runs/{name}"
        assert ended(parsed(run), folder).code == 0
    runs = folder / "runs"
    for name in ("nope-tiny", "rope-tiny"):
        copytree(runs / name, runs / "twins" / name)
    for name in ("one", "length-16", "pythia-step1000"):
        copytree(runs / "nope-tiny", runs / name)
    for name in ("two", "length-32", "length-64", "pythia-step16000", "pythia-step143000"):
        copytree(runs / "rope-tiny", runs / name)
    (runs / "nope-tiny").rename(runs / "ablate-nope-tiny-0a1b2c3d")
    (runs / "rope-tiny").rename(runs / "ablate-rope-tiny-4e5f6a7b")
    return folder


def ended(line: Line, folder: Path) -> Ended:
    """Run a line in a folder."""
    with chdir(folder):
        arguments = [name for word in line.arguments for name in sorted(glob(word)) or [word]]
    return command_line.ended(line.command, arguments, folder)


def copy_of(desk: Path, above: Path) -> Path:
    """Return a copy of the desk; the files of finished runs, which nothing changes, are linked."""
    copytree(desk / "runs", above / "desk" / "runs", copy_function=os.link)
    return Path(copytree(desk, above / "desk", ignore=leave_out_runs, dirs_exist_ok=True))


def leave_out_runs(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "runs"]


def assert_finished(line: Line, end: Ended, folder: Path) -> None:
    """Check that a command printed what it found, and left a finished folder if it writes one."""
    groups = dict(line.groups)
    assert end.out
    if "--dry-run" in groups:
        assert re.search(r"^about \d+ s for \d+ passes, which begin after", end.out, re.MULTILINE)
        return
    assert not [*folder.rglob("*.unfinished*")]
    page = re.findall(r"^open (.*report\.html)$", end.out, re.MULTILINE)[-1]
    assert (folder / page).is_file()
    assert (folder / page).with_name("manifest.json").is_file()
    for image in groups.get("--image", ()):
        assert (folder / image).is_file()


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_line_runs_to_a_finished_folder(
    line: Line, desk: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if line not in DRAWN:
        request.getfixturevalue("undrawn")
    folder = copy_of(desk, tmp_path)
    end = ended(line, folder)
    assert end.code == 0, end.err
    assert_finished(line, end, folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_in_a_line(command: str) -> None:
    lines = [line for line in LINES if line.command == command]
    used = {name for line in lines for name, _ in line.groups}
    flags = [flag for flag, _, _ in flags_of(settings_kind(command))]
    words = {word for flag in flags for word in flag.split() if word.startswith("--")}
    assert words - used == set()
    assert used - {""} <= words
