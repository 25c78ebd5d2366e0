"""Bad numbers, flags without an effect, places and environments: one line, before any computation.

A row is a command line and a fragment of the line that it ends with. Nothing may be loaded or left.
"""

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.command_line import refused

LONG = 250 * "a"
FREE = "--model parameter-free --data gaussian"
NUMBERS = [
    # What tyro refuses, in its own words.
    ("ablate --n-seq 5", "did you mean --n-seqs?"),
    # Beyond the bounds of a flag.
    ("ablate --seed 18446744073709551616", "--seed 18446744073709551616 should be less"),
    (f"ablate {FREE} --alpha nan", "--alpha nan should be less than 1"),
    # Numbers that do not fit each other.
    ("ablate --n-seqs 8 --folds 9", "--n-seqs 8: 9 folds take 9 sequences or more, and --folds 4"),
    ("ablate --skip-keys 62", "--skip-keys 62 leaves no keys of 64"),
    ("ablate --query-rows 65", "--query-rows 65 is more than 64 tokens"),
    ("trace --reader L01", "--reader L01: expected a layer or head, such as L2 or L2H1"),
    ("ablate --remove position[MLP١]", "unknown component 'position[MLP١]'"),
    ("ablate --batch-size 0", "--batch-size 0 should be greater than or equal to 1 or "),
    ("trace --folds 4", "--folds 4 should be greater than or equal to 5"),
    ("trace --writers head", "invalid choice 'head'"),
    ("behaviour --prefix 127", "expected a --prefix from 4 to 124 of 128 tokens"),
    # Beyond the context that a config.json states.
    ("ablate --seq-len 257", "--seq-len 257 is beyond the model's context 256"),
    (f"ablate {FREE} --seq-len 4097 --n-seqs 8", "is beyond the model's context 4096"),
    ("ablate --model short", "--seq-len 64 is beyond the model's context 31"),
    # What fits no machine.
    ("ablate --n-seqs 2000000000", "this needs at least 1.0 TB of memory"),
    # Names of models, and devices.
    ("ablate --model nope-tiny/", "unknown model 'nope-tiny/'; the nearest names are nope-tiny"),
    ("ablate --model OLMo-2-1b", "allenai/OLMo-2-0425-1B is not in the local cache"),
    ("ablate --device meta", "no device 'meta' on this machine"),
]
WITHOUT_EFFECT = [
    ("ablate --alpha 0.2", "--alpha has no effect on --data shipped"),
    ("ablate --windows start --data random", "--windows has no effect on --data random"),
    (f"ablate {FREE} --shuffle", "--shuffle has no effect on --data gaussian"),
    ("ablate --data random --pack", "--pack joins documents, and --data random has none"),
    ("ablate --pack --windows start", "--pack begins sequences anywhere, --windows start where"),
    ("ablate --revision main", "--revision is for models on the Hub"),
    ("ablate --device cpu --device-map auto", "--device is for one device"),
    ("heads --by positions", "--by positions: expected need, others"),
    ("heads --remove rope content", "--by need is of --remove rope or --remove mask"),
    ("heads --by nowhere.csv", "there is no such file"),
    ("heads --data random", "tested on text"),
    ("ablate --remove sources --gain norm", "--gain has no effect where no weight is removed"),
    ("ablate --remove mlp+position[MLP0]", "--remove: mlp and position[MLP0] share the output"),
    ("behaviour --remove position[HEAD0]", "--remove: unknown component 'position[HEAD0]'"),
    ("ablate --gain norm", "the replacements identity and random, not mean: take --replacement"),
    ("ablate --replacement zero zero", "expected each --replacement once"),
    ("ablate --replacement", "expected each --replacement once, got none"),
    ("ablate --remove mask+mask", "--remove: mask is named twice"),
    ("ablate --remove rope[0:9]+rope[7:16]", "rope[0:9] and rope[7:16] share rotary pairs"),
    ("ablate --remove qk+w_q", "qk and w_q share w_q"),
    ("ablate --remove nothing", "--remove: unknown component 'nothing'"),
    ("behaviour --remove qk w_q+w_k", "--remove names something twice"),
    ("behaviour --measures loss --layers 2", "--layers has no effect without the measure"),
    ("behaviour --measures in-context --remove mlp --prefix 8", "--prefix has no effect where the"),
    ("ablate --remove mask MASK", "--remove names something twice"),
    ("ablate --remove sources sources", "--remove names something twice"),
    ("ablate --remove w_q@L0H1", "names of components to remove, and heads separately"),
    ("behaviour --data random", "behaviour is measured on text"),
    ("behaviour --model parameter-free", "measured on text, with a language model"),
    ("circuit --remove mask --replacement zero", "no effect where no weight is removed"),
    ("circuit --remove mlp --in-heads L0H0", "--in-heads: mlp has no heads"),
]
TEXTS = [
    ("attention --text '' --n-seqs 8", "the text is empty"),
    ("attention --text 'a\0b'", "--text is not text: it holds NUL bytes"),
    (
        f"attention --text {1_000_001 * 'x'}",
        "the text has 1,000,001 characters: expected one of up",
    ),
    ("attention --text a --n-seqs 8 --query-rows 7", "leave out --query-rows"),
    ("attention --text a --n-seqs 8 --seq-len 513", "take --seq-len 512 or less"),
    ("attention --text a --seq-len 32", "--seq-len has no effect on a text alone: --n-seqs reads "),
    ("attention --why L0H1", "--why asks about a text"),
    ("attention --query 3", "--query asks about a head"),
    ("attention --steps 2", "--steps asks about a head: name it with --why"),
    ("attention --text a --why MLP1", "--why MLP1: expected a head, such as L1H3"),
    ("attention --text a --why L0H1 --remove qk", "has no terms without w_q and w_k"),
    ("attention --text a --why L0H1 --remove mask w_k", "has no terms without w_k"),
]
WAYS_OUT = [  # what a line was meant to be is what it says to type
    ("ablate rope-tiny", "unknown: rope-tiny; a value follows its flag, as --model NAME does"),
    ("behaviour --measures=loss,copy", "loss,copy"),
    ("ablate --remove mask,rope", "spaces separate components, a union has none"),
    ("circuit --layers 2", "did you mean --layer?"),
    ("ablate --layer 2", "did you mean --layers 2:3?"),
    ("trace --layer=L0", "did you mean --layers 0:1?"),
    ("ablate --n-seqs many", "--n-seqs: expected a whole number, got 'many'"),
    ("attention --layers L2", "a range (7:9 is L7 and L8), all or auto"),
    ("ablate --seq-len 9", "see 8 keys or more besides the first; take --seq-len 10 or more"),
    ("attention --seq-len 7", "take --seq-len 8 or more"),
    ("ablate --model ../no/model", "no/model does not exist"),
]
PLACES = [
    ("ablate --out .", "holds other files"),
    ("ablate --out file", "file: it is a file"),
    ("ablate --out loop", "it is a link that leads nowhere"),
    ("ablate --out file/x", "Not a directory"),
    ("circuit --out /proc/x", "cannot write to /proc/.x.unfinished: "),
    (f"ablate --out {LONG}bbbbbbbbbb/x", "File name too long"),
    ("ablate --out http://x/y", "http:/x/y is a URL: name a path on this machine"),
    ("ablate --model https://x/y", "https://x/y is a URL"),
    ("ablate --data pipe.jsonl", "pipe.jsonl is a pipe, a socket or a device: only regular files"),
    ("ablate --image x.jpg", "expected a name that ends in .pdf, .png or .svg"),
]
HEAVY = {"torch", "transformers", "transformer_lens", "datasets"}
BEFORE_TORCH = [  # found out from names, a config.json and files
    ("ablate --model nope-tini", "unknown model 'nope-tini'; the nearest names are nope-tiny"),
    ("ablate --model ./no/such/folder", "there is no folder or file ./no/such/folder"),
    ("ablate --layers 9", "rope-tiny has 4 layers, 9 were asked for; try --layers all"),
    ("ablate --layers 1:9", "rope-tiny has 4 layers, 9 were asked for"),
    ("ablate --layers 9 --model short", "short has 2 layers, 9 were asked for"),
    ("circuit --layer 5", "nope-tiny has 4 layers, L0 to L3; there is no --layer 5"),
    ("trace --reader L2H4", "--reader L2H4: there are L0, L1, L2, L3, with the heads H0 to H3"),
    ("attention --text a --why L4H0", "--why L4H0: there are L0 to L3, with the heads H0 to H3"),
    ("attention --remove rope --in-heads L1H4", "--in-heads L1H4: the run has the heads H0 to H3"),
    ("circuit --remove mask --in-heads L2H0", "the run has the heads H0 to H3 of L0 to L1"),
    ("ablate --data empty.txt", "empty.txt is empty"),
    ("ablate --data latin.txt", "latin.txt (line 2) is not UTF-8 (unexpected end of data): "),
    ("ablate --data latin.jsonl", "latin.jsonl (line 3) is not UTF-8"),
    ("ablate --data missing.txt", "no data 'missing.txt': expected shipped"),
    ("ablate --tokens missing.npy", "missing.npy: there is no such file"),
    ("ablate --tokens a.npy --n-seqs 8", "--n-seqs has no effect next to --tokens"),
    ("ablate --tokens tokens.pt", "expected a .npy or .safetensors file"),
    ("ablate --adapter short --model short", "short holds no adapter"),
    ("heads --k 9", "--k 9: there are 16 heads, and chance takes as many others: take up to 8"),
    ("heads --model nope-tiny --remove rope", "the model has no rope; it has mask, w_q, w_k, w_o"),
    ("ablate --model nope-tiny --remove w_q rope", "the model has no rope; it has mask, w_q, w_k"),
    ("circuit --remove rope", "the model has no rope; it has mask, w_q, w_k, w_o, w_v, mlp"),
    ("behaviour --model nope-tiny --remove rope", "the model has no rope; it has mask"),
    ("behaviour --remove weights alibi", "the model has no alibi; it has mask, rope, w_q"),
    ("ablate --seq-len 1801", "--seq-len 1801 is beyond the model's context 256: take --beyond"),
    ("ablate --remove maks", "--remove: unknown component 'maks'; there are mask, rope"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with every kind of obstacle, in a process that may not compute anything."""

    def compute(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("this began to compute")

    for name in ("load.load", "parameter_free.build"):
        monkeypatch.setattr(f"nope_probe.models.{name}", compute)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.jsonl")
    # A folder that holds a config.json and nothing else: whatever reads weights fails.
    (tmp_path / "short").mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 31}
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "fragment"),
    [*NUMBERS, *WITHOUT_EFFECT, *TEXTS, *WAYS_OUT, *PLACES],
    ids=lambda words: words[:60],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    typed: str, fragment: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *arguments = shlex.split(typed)
    assert fragment in refused(capfd, folder, import_module(f"nope_probe.{command}"), *arguments)


def test_a_mistake_in_names_and_files_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    config = {"text_config": {"n_layer": 2, "num_attention_heads": 3}, "num_hidden_layers": 99}
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    (tmp_path / "empty.txt").touch()
    rows = ["one", "caf\u00e9"]
    (tmp_path / "latin.txt").write_text("\n".join(rows), encoding="latin-1")
    lines = [json.dumps({"text": row}, ensure_ascii=False) for row in rows]
    (tmp_path / "latin.jsonl").write_text("\n\n".join(lines), encoding="latin-1")
    code = "import runpy, sys\n"
    for typed, _ in BEFORE_TORCH:
        command, *arguments = shlex.split(typed)
        code += f"sys.argv = {['x', *arguments]}\n"
        code += f"try: runpy.run_module('nope_probe.{command}', run_name='__main__')\n"
        code += "except SystemExit as end: assert end.code == 2\n"
        code += f"print({typed!r}, *{HEAVY} & {{*sys.modules}}, sep=': ')\n"
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ended.stdout.splitlines() == [typed for typed, _ in BEFORE_TORCH]
    for (_, fragment), line in zip(BEFORE_TORCH, ended.stderr.splitlines(), strict=True):
        assert line.startswith("error: ")
        assert fragment in line


def test_of_several_processes_the_first_says_it(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["ablate", "--seed", "-1"])
    with pytest.raises(SystemExit) as ended:
        import_module("nope_probe.ablate").main()
    assert (ended.value.code, capfd.readouterr().err) == (2, "")


@pytest.mark.parametrize(
    ("redirection", "code", "printed"),
    [
        (">/dev/full", 1, "error: No space left on device\n"),
        (">&-", 0, ""),
        ("| :; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_a_stdout_that_takes_nothing_ends_a_command_without_a_traceback(
    redirection: str, code: int, printed: str
) -> None:
    line = f"{shlex.quote(sys.executable)} -m nope_probe.circuit --help {redirection}"
    ended = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, printed)
