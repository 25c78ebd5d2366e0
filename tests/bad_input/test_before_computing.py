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
COMPUTED = (
    "nope_probe.models.load.load",
    "nope_probe.models.parameter_free.build",
    "nope_probe.analyses.parameter_free.critical_alpha.critical_alphas",
    "nope_probe.experiments.paper.run.run_experiments",
    "nope_probe.training.corpus.corpus_of",
)
BANDS = " ".join(f"rope[{pair}:{pair + 1}]" for pair in range(10))
NUMBERS = [
    # A word, a fraction, nothing or another alphabet where a number is expected.
    ("scores --seed 1e3", "--seed '1e3': expected a whole number"),
    ("scores --seed 0x10", "--seed '0x10': expected a whole number"),
    ("scores --seed ''", "--seed '': expected a whole number"),
    ("scores --n-seqs nan", "--n-seqs 'nan': expected a whole number"),
    ("scores --n-seqs 1e12", "--n-seqs '1e12': expected a whole number"),
    ("scores --n-seqs", "Missing value for argument '--n-seqs'"),
    ("scores --layers none", "--layers 'none': expected INT|{all}"),
    ("scores --skip-keys x", "--skip-keys 'x': expected INT|{auto}"),
    ("scores --bands octave", "--bands 'octave': expected {None}|INT|{octaves}"),
    ("scores --checkpoint-every 1.5", "--checkpoint-every '1.5': expected a whole number"),
    ("simulate --alpha 0 x", "--alpha '0', 'x': expected values of another kind"),
    ("simulate --n-samples 1e6", "--n-samples '1e6': expected {None}|INT"),
    # A word that is no choice, a flag that does not exist, and arguments that are missing.
    ("scores --windows middle", "--windows 'middle': expected one of 'random', 'start'"),
    ("scores --device-map magic", "--device-map 'magic': expected one of"),
    ("ablate --gain 0", "--gain '0': expected one of 'output', 'norm', 'identity'"),
    ("behaviour --measures nothing", "--measures 'nothing': expected one of 'loss'"),
    ("theory --norm l7", "--norm 'l7': expected one of"),
    ("scores --n-seq 5", "unknown: --n-seq, 5; did you mean --n-seqs?"),
    ("circuit --layers 3", "unknown: --layers, 3; did you mean --layer?"),
    ("scores extra", "unknown: extra"),
    ("reproduce", "Missing from"),
    ("reproduce figure17", "'figure17': expected one of"),
    ("train", "Missing from"),
    ("train --preset banana", "--preset 'banana': expected one of"),
    ("scores --tyro-print-completion pdp11", "Shell should be one"),
    # Beyond the bounds of a flag.
    ("scores --seed 18446744073709551616", "--seed 18446744073709551616: expected 0 <= seed"),
    ("scores --seed -1", "--seed -1: expected 0 <= seed <= 4294967295"),
    ("scores --n-seqs 1000000000000", "expected 1 <= n-seqs <= 2147483647"),
    ("scores --n-seqs -5", "expected 1 <= n-seqs"),
    ("scores --seq-len 0", "expected 4 <= seq-len"),
    ("scores --seq-len 3 --bos always", "expected 4 <= seq-len"),
    ("scores --seq-len 99999999999999999999", "expected 4 <= seq-len"),
    ("scores --layers 1000000000", "expected 1 <= layers <= 1000"),
    (f"scores {FREE} --layers 1000000000", "expected 1 <= layers <= 1000"),
    ("scores --batch-size 0", "expected 1 <= batch-size"),
    ("scores --folds -1", "expected 4 <= folds"),
    ("scores --skip-keys -1", "expected 0 <= skip-keys"),
    ("scores --bands 100000000", "expected 1 <= bands <= 1024"),
    ("scores --checkpoint-every 99999999999999999999", "expected 1 <= checkpoint-every"),
    (f"scores {FREE} --alpha nan", "--alpha nan: expected 0 <= alpha < 1"),
    (f"scores {FREE} --alpha inf", "--alpha inf: expected 0 <= alpha < 1"),
    (f"scores {FREE} --alpha 1", "--alpha 1.0: expected 0 <= alpha < 1"),
    ("ablate --bands -1", "expected 0 <= bands <= 128"),
    ("ablate --reparametrise 1000000000", "expected 0 <= reparametrise <= 1000"),
    ("circuit --layer 99999999999999999999", "expected 0 <= layer <= 999"),
    ("circuit --explore -1", "expected 0 <= explore"),
    ("behaviour --trained-len -5", "expected 16 <= trained-len <= 1048576"),
    ("behaviour --max-len 1000000000000", "expected 16 <= max-len <= 1048576"),
    ("behaviour --prefix 0", "expected 4 <= prefix"),
    ("behaviour --layers 0", "expected 1 <= layers <= 1000"),
    ("layers --seq-len -1", "expected 4 <= seq-len"),
    ("layers --seed -1", "expected 0 <= seed"),
    ("simulate --n-layers 1000000000", "expected 1 <= n-layers <= 1000"),
    ("simulate --n-samples 100000000000000", "expected 2 <= n-samples <= 1000000000"),
    ("simulate --d-model -64", "expected 2 <= d-model"),
    ("simulate --seq-len 4097", "expected 3 <= seq-len <= 4096"),
    ("simulate --alpha 0.1 -0.1", "--alpha -0.1: expected 0 <= alpha < 1"),
    ("simulate --target-se nan", "expected a --target-se that float32 resolves"),
    ("simulate --alpha", "expected at least one --alpha"),
    ("theory --n-layers 99999999999999999999", "expected 1 <= n-layers <= 1000"),
    ("theory --alpha nan", "--alpha nan: expected 0 <= alpha < 1"),
    ("theory --d-model 0", "expected 2 <= d-model"),
    ("theory --d-model 1000000000", "expected 2 <= d-model <= 65536"),
    ("reproduce figure2 --n-samples 31", "expected 32 <= n-samples"),
    ("reproduce figure3 --n-seqs 0", "expected 1 <= n-seqs"),
    ("reproduce figure5 --model rope-tiny --layers 0", "expected 1 <= layers"),
    ("train --preset nope-tiny --steps 0", "expected 1 <= steps"),
    ("train --preset nope-tiny --seed 4294967296", "expected 0 <= seed <= 4294967295"),
    ("train --preset nope-tiny --steps 5001", "--steps 5001: nope-tiny has 5,000 steps"),
    # Numbers that do not fit each other.
    ("scores --n-seqs 8 --folds 9", "8 sequences do not fill 9 folds"),
    ("scores --skip-keys 62", "--skip-keys 62 leaves no keys of 64"),
    ("behaviour --prefix 127", "expected a --prefix from 4 to 124 of 128 tokens"),
    ("simulate --n-samples 100 --target-se 0.1", "--n-samples or --target-se, not both"),
    ("simulate --alpha 0.2 0.2", "two alphas are the same"),
    ("simulate --alpha 0 -0.0", "two alphas are the same"),
    ("behaviour --measures bos --bos never", "--bos never: the measure bos needs sequences"),
    ("simulate --d-model 65 --rope", "odd"),
    # Beyond the context that a config.json states.
    ("scores --seq-len 257", "--seq-len 257 is beyond the model's context 256"),
    ("ablate --model nope-tiny --seq-len 257 --bos always", "is beyond the model's context 256"),
    ("circuit --seq-len 300", "--seq-len 300 is beyond the model's context 256"),
    ("behaviour --seq-len 513 --trained-len 128", "is beyond the model's context 512"),
    ("layers --seq-len 257", "--seq-len 257 is beyond the model's context 256"),
    (f"scores {FREE} --seq-len 4097 --n-seqs 8", "is beyond the model's context 4096"),
    ("scores --model short", "--seq-len 64 is beyond the model's context 31"),
    ("scores --model bloom", "--seq-len 64 is beyond the model's context 31"),
    ("layers --model shorter --seq-len 20", "--seq-len 20 is beyond the model's context 19"),
    # What fits no machine.
    ("scores --n-seqs 2000000000", "this needs at least 1.02 TB of memory"),
    ("scores --seq-len 1000000 --layers 1 --n-seqs 8", "this needs at least 64 TB of memory"),
    (f"scores {FREE} --n-seqs 2000000000", "this needs at least 32.8 TB of memory"),
    ("circuit --seq-len 1000000", "this needs at least 320 TB of memory"),
    ("behaviour --max-len 1048576 --trained-len 1048576 --n-seqs 2000000000", "TB of memory"),
    ("layers --seq-len 100000000", "this needs at least 80 PB of memory"),
    ("simulate --d-model 65536 --n-layers 1000", "this needs at least 68.7 TB of memory"),
    ("theory --seq-len 1000000", "this needs at least 1.5 PB of memory"),
    (
        "theory --seq-len 100000 --rope --d-model 65536",
        "this needs at least 5.24 PB of memory",
    ),
    # Expectations of a model.
    ("layers --expect sliding_window=nan", "expected a number or none, got 'nan'"),
    ("layers --expect rope_base=inf", "expected a number or none, got 'inf'"),
    ("layers --expect sliding_window=-5", "expected a whole number of 1 or more, or none"),
    ("layers --expect prefix=1.5", "expected a whole number of 1 or more, or none"),
    ("layers --expect soft_cap=0", "expected a number above 0, or none"),
    ("layers --expect no_rope_layers=1,1", "a layer is named twice"),
    (
        "layers --expect no_rope_layers=\N{ARABIC-INDIC DIGIT THREE}",
        "expected layer numbers such as",
    ),
    ("layers --expect rope_base=none rope_base=10000", "--expect names a key twice"),
    # Names of models.
    ("scores --model nope-tiny/", "unknown model 'nope-tiny/'; the nearest names are nope-tiny"),
    ("layers --model \u00e9/\u00fc", "unknown model '\u00e9/\u00fc'"),
    ("ablate --model a/.b", "unknown model 'a/.b'"),
    ("scores --model OLMo-2-1b", "allenai/OLMo-2-0425-1B is not in the local cache"),
    ("train --preset nope-1.5b", "meta-llama/Llama-3.1-8B is not in the local cache"),
    # Devices.
    ("scores --device meta", "--device meta holds no numbers"),
    ("scores --device banana", "no device 'banana' on this machine"),
    ("scores --device cuda:99", "no device 'cuda:99' on this machine"),
    ("layers --device meta", "--device meta holds no numbers"),
    ("scores --dtype int8", "no dtype 'int8'"),
]
WITHOUT_EFFECT = [
    ("scores --alpha 0.2", "--alpha has no effect on --data shipped"),
    ("scores --data random --shuffle", "--shuffle has no effect on --data random"),
    ("scores --data random --windows start", "--windows has no effect on --data random"),
    ("scores --data random --pack", "--pack joins documents, and --data random has none"),
    (f"scores {FREE} --shuffle", "--shuffle has no effect on --data gaussian"),
    (f"scores {FREE} --bos never", "--bos has no effect on --data gaussian"),
    (f"circuit {FREE} --windows start", "--windows has no effect on --data gaussian"),
    ("scores --model parameter-free", "parameter-free takes gaussian vectors, not --data shipped"),
    ("scores --data gaussian", "rope-tiny takes text or random tokens, not --data gaussian"),
    ("scores --revision main", "--revision is for models on the Hub"),
    ("layers --revision main", "--revision is for models on the Hub"),
    ("scores --device cpu --device-map auto", "--device is for one device"),
    ("ablate --players sources --gain norm", "--gain has no effect where no weight is removed"),
    ("ablate --players mask rope --replacement zero", "--replacement has no effect where no"),
    ("ablate --bands 2 --reparametrise 1", "--reparametrise has no effect where no"),
    ("ablate --players mlp --reparametrise 1", "--reparametrise has no effect where no"),
    ("ablate --players mask --bands 2", "--bands divides the player rope"),
    ("ablate --players w_q --replacement zero --gain norm", "--gain is for the replacements"),
    ("ablate --replacement zero zero", "expected each --replacement once"),
    ("ablate --scope both --residuals-gb 2", "--residuals-gb has no effect with --scope both"),
    ("ablate --scope own --residuals-gb nan", "--residuals-gb nan: expected 0 <= residuals-gb"),
    ("ablate --scope own --residuals-gb inf", "--residuals-gb inf: expected 0 <= residuals-gb"),
    (
        "ablate --bands 16 --layers 1",
        "--bands: 17 players have 131,072 conditions, which take 36 hours at 1 s per condition",
    ),
    ("ablate --bands 128", "129 players have 2^129 conditions"),
    (f"ablate --players mask {BANDS}", "11 players have 2,048 conditions, which take 0.57 hours"),
    ("ablate --players mask+mask", "--players: mask is named twice"),
    ("ablate --players mask rope+rope_high", "rope and rope_high share rotary pairs"),
    ("ablate --players rope[0:9] rope[7:16]", "rope[0:9] and rope[7:16] share rotary pairs"),
    ("ablate --players rope_high rope[7:16]", "rope_high and rope[7:16] can share rotary pairs"),
    ("ablate --players qk w_q+w_k", "qk and w_q+w_k share w_q"),
    ("circuit --remove qk w_q", "--remove: qk and w_q share w_q"),
    ("circuit --remove rope rope_low", "--remove: rope and rope_low share rotary pairs"),
    ("circuit --remove norms norms", "--remove: norms is named twice"),
    ("behaviour --remove mask+mask", "--remove: mask is named twice"),
    ("behaviour --remove qk w_q+w_k", "--remove: qk and w_q+w_k remove the same"),
    ("behaviour --remove rope rope_low+rope_high", "rope and rope_low+rope_high remove the same"),
    ("ablate --players nothing", "--players: unknown player 'nothing'"),
    ("ablate --players", "--players: expected at least one player"),
    ("ablate --players mask mask", "--players: mask is named twice"),
    ("circuit --replacement zero", "--replacement has no effect where no weight is removed"),
    ("circuit --remove norms --gain norm", "--gain has no effect where no weight is removed"),
    ("circuit --remove mask mask", "--remove: mask is named twice"),
    ("circuit --remove nothing", "--remove: unknown player 'nothing'"),
    ("behaviour --measures loss --layers 2", "--layers has no effect without the measure"),
    ("behaviour --measures loss --skip-keys 2", "--skip-keys has no effect without the measure"),
    ("behaviour --measures loss --max-len 99", "--max-len has no effect without the measure ext"),
    ("behaviour --measures loss --trained-len 99", "--trained-len has no effect without"),
    ("behaviour --remove mask --gain norm", "--gain has no effect where no weight is removed"),
    ("behaviour --measures in-context --remove mlp --prefix 8", "--prefix has no effect where the"),
    ("behaviour --remove mask mask", "--remove names something twice"),
    ("behaviour --data random", "behaviour is measured on text"),
    ("reproduce figure1 --seed 1", "figure1 takes no --seed"),
    ("reproduce figure1 --image x.png", "--image has no effect on figure1"),
    ("reproduce all --image x.png", "--image has no effect on all"),
    ("reproduce figure2 --model nope-tiny", "figure2 takes no --model"),
    ("reproduce figure3 --n-samples 100", "figure3 takes no --n-samples"),
    ("reproduce figure8 --seq-len 64", "figure8 takes no --seq-len"),
    ("reproduce figure5 --model rope-tiny --model ROPE-TINY", "--model names a model twice"),
    ("layers --expect bos=maybe", "expected bos=forced or bos=none"),
]
PLACES = [
    ("scores --out .", "holds other files"),
    ("scores --out ''", "holds other files"),
    ("scores --out empty/..", "holds other files"),
    ("scores --out new/..", "holds other files"),
    ("scores --out file", "file: it is a file"),
    ("scores --out file/x", "is a file"),
    ("scores --out linkfile", "it is a file"),
    ("scores --out full", "full holds other files"),
    ("scores --out linkfull", "holds other files"),
    ("scores --out loop", "is a link that leads nowhere"),
    ("scores --out dangling/x", "is a link that leads nowhere"),
    ("scores --out loop/x", "is a link that leads nowhere"),
    ("scores --out /proc/x", "cannot write to /proc/x: "),
    ("scores --out /dev/null", "it is a file"),
    (f"scores --out {LONG}", "its name is too long"),
    (f"scores --out {LONG}bbbbbbbbbb/x", "its name is too long"),
    (f"scores --out {'/'.join(17 * [LONG])}", "its name is too long"),
    ("simulate --out /proc/x", "cannot write to /proc/x: "),
    ("circuit --out file/x", "is a file"),
    ("behaviour --out loop", "is a link that leads nowhere"),
    ("reproduce figure2 --out file/x", "is a file"),
    ("reproduce figure1 --out /proc/x/y", "cannot write to /proc/x/y: "),
    ("reproduce all --out /proc/x", "cannot write to /proc/x: "),
    ("reproduce all --out file/x", "is a file"),
    ("reproduce all --out linkfile", "it is a file"),
    ("train --preset nope-tiny --out full", "full holds other files"),
    ("train --preset nope-tiny --out linkfull", "full holds other files"),
    ("train --preset nope-tiny --out hidden", "hidden holds other files"),
    ("train --preset nope-tiny --out deep", "deep holds other files"),
    ("train --preset nope-tiny --out .", "it is in use; name a new folder in it"),
    ("train --preset nope-tiny --out /proc/x", "cannot write to /proc/x: "),
    ("train --preset nope-tiny --out loop", "is a link that leads nowhere"),
    ("train --preset nope-tiny --out /dev/null", "it is a file"),
    ("scores --out http://x/y", "http:/x/y is a URL: name a path on this machine"),
    ("ablate --out=file:///x", "file:/x is a URL"),
    ("simulate --out s3://x/y", "s3:/x/y is a URL"),
    ("train --preset nope-tiny --out http://x/y", "is a URL"),
    ("reproduce figure2 --out http://x/y", "is a URL"),
    ("reproduce http://x/y", "is a URL"),
    ("compare http://x/y full", "is a URL"),
    ("scores --image http://x/y.png", "is a URL"),
    ("scores --data https://x/y.jsonl", "https://x/y.jsonl is a URL"),
    ("scores --model https://x/y", "https://x/y is a URL"),
    ("scores --data pipe.jsonl", "pipe.jsonl is a pipe, a socket or a device: only regular files"),
    ("reproduce ./pipe.jsonl", "pipe.jsonl is a pipe"),
    ("scores --image pipe.png", "pipe.png is a pipe"),
    ("scores --image x.jpg", "expected a name that ends in .png or .svg"),
    ("scores --image dir.png", "dir.png: it is a folder"),
    ("scores --image file/x.png", "is a file"),
    ("scores --image /proc/x.png", "cannot draw /proc/x.png: "),
    ("scores --image x.png --out x.png", "x.png"),
    ("simulate --image loop/x.svg", "is a link that leads nowhere"),
    ("circuit --image dir.png", "dir.png: it is a folder"),
    (f"ablate --image {LONG}.png", "its name is too long"),
]
SEVERAL = "WORLD_SIZE=2 RANK=0 MASTER_ADDR=localhost"
ENVIRONMENTS = [
    ("WORLD_SIZE=banana", "scores", "WORLD_SIZE is 'banana': expected a number from 1"),
    ("WORLD_SIZE=", "simulate", "WORLD_SIZE is ''"),
    ("WORLD_SIZE=0", "theory", "WORLD_SIZE is '0'"),
    ("WORLD_SIZE=-1", "train --preset nope-tiny", "WORLD_SIZE is '-1'"),
    ("WORLD_SIZE=2", "scores", "WORLD_SIZE is 2, and RANK, MASTER_ADDR, MASTER_PORT not set"),
    ("WORLD_SIZE=2", "layers", "WORLD_SIZE is 2, and RANK, MASTER_ADDR, MASTER_PORT not set"),
    ("WORLD_SIZE=2 RANK=0", "ablate", "WORLD_SIZE is 2, and MASTER_ADDR, MASTER_PORT not set"),
    (f"{SEVERAL} MASTER_PORT=x", "behaviour", "MASTER_PORT is 'x': expected a number from 1"),
    (f"{SEVERAL} MASTER_PORT=29500 NOPE_PROBE_JOIN_SECONDS=0", "scores", "JOIN_SECONDS is '0'"),
    (f"{SEVERAL} MASTER_PORT=29500 NOPE_PROBE_JOIN_SECONDS=x", "ablate", "JOIN_SECONDS is 'x'"),
    ("WORLD_SIZE=2 RANK=5", "scores", "RANK is '5': expected a number from 0 to 1"),
    ("RANK=3", "scores", "RANK is '3': expected a number from 0 to 0"),
    ("RANK=banana", "compare a b", "RANK is 'banana'"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with every kind of obstacle, in a process that may not compute anything."""

    def compute(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("this began to compute")

    for name in COMPUTED:
        module, _, function = name.rpartition(".")
        monkeypatch.setattr(import_module(module), function, compute)
    monkeypatch.setattr("nope_probe.runtime.places.validate_browser", lambda: None)
    for name in ("empty", "full", "hidden", "deep/empty", "dir.png", "target"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("file", "full/x", "hidden/.x"):
        (tmp_path / name).touch()
    for name, target in {"loop": "loop", "dangling": "nowhere", "linkfull": "full"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "linkfile").symlink_to("file")
    for name in ("pipe.jsonl", "pipe.png"):
        os.mkfifo(tmp_path / name)
    # Folders that hold a config.json and nothing else: whatever reads weights fails.
    contexts = {"short": {"max_position_embeddings": 31}}
    contexts["bloom"] = {"seq_length": 31}
    contexts["shorter"] = {"n_positions": 19, "max_position_embeddings": 31}
    for name, fields in contexts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    return tmp_path


@pytest.mark.parametrize(("typed", "fragment"), [*NUMBERS, *WITHOUT_EFFECT, *PLACES])
def test_a_users_mistake_is_one_line_and_exit_code_2(
    typed: str, fragment: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *arguments = shlex.split(typed)
    assert fragment in refused(capfd, folder, import_module(f"nope_probe.{command}"), *arguments)


@pytest.mark.parametrize(("variables", "typed", "fragment"), ENVIRONMENTS)
def test_a_fault_of_the_environment_is_one_line_and_exit_code_1(
    variables: str,
    typed: str,
    fragment: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for each in variables.split():
        monkeypatch.setenv(*each.split("=", 1))
    command, *arguments = typed.split()
    module = import_module(f"nope_probe.{command}")
    assert fragment in refused(capfd, folder, module, *arguments, code=1)


def test_of_several_processes_the_first_says_it(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["scores", "--seed", "-1"])
    with pytest.raises(SystemExit) as ended:
        import_module("nope_probe.scores").main()
    assert (ended.value.code, capfd.readouterr().err) == (2, "")


@pytest.mark.parametrize(
    ("redirection", "code", "printed"),
    [
        (">/dev/full", 1, "error: No space left on device\n"),
        (">&-", 0, ""),
        ("| :; exit ${PIPESTATUS[0]}", 141, ""),
        ("--no-such-flag 2>&-", 2, ""),
    ],
)
def test_a_stdout_that_takes_nothing_ends_a_command_without_a_traceback(
    redirection: str, code: int, printed: str
) -> None:
    line = f"{shlex.quote(sys.executable)} -m nope_probe.theory --help {redirection}"
    if "--no-such" in redirection:
        line = line.replace("--help ", "")
    ended = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, printed)


def test_docstrings_that_python_left_out_are_not_blamed_on_the_model() -> None:
    command = [sys.executable, "-OO", "-m", "nope_probe.scores"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: python -OO drops the docstrings that transformers reads: leave out -OO\n",
    )


def test_a_locale_without_unicode_reads_and_prints_what_it_can() -> None:
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "nope_probe.scores", "--model", "modèle"]
    ended = subprocess.run(command, env=ascii_only, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "is no text in this locale (ascii); PYTHONUTF8=1 reads it" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
