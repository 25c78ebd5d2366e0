"""What all commands have in common: quick help, and no flag without an effect."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from support.command_line import refused

from nope_probe import ablate, circuit, reproduce, scores
from nope_probe.cli import find_commands

COMMANDS = (
    "ablate",
    "behaviour",
    "circuit",
    "compare",
    "layers",
    "reproduce",
    "scores",
    "simulate",
    "theory",
    "train",
)
SLOW = {"torch", "transformer_lens", "transformers", "pandas", "numpy", "scipy", "plotly"}
PARAMETER_FREE = ["--model", "parameter-free", "--data", "gaussian"]


def test_these_are_all_the_commands() -> None:
    assert all(callable(import_module(f"nope_probe.{name}").main) for name in COMMANDS)
    assert tuple(find_commands()) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command: str) -> None:
    code = f"import sys; sys.argv = ['x', '--help']; import nope_probe.{command} as command\n"
    code += "try: command.main()\n"
    code += f"except SystemExit: print(sorted({SLOW} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip().endswith("[]")
    assert "--seed" in ended.stdout or command in ("compare", "theory")
    assert "\n    " not in ended.stdout.partition("options")[0].partition("\n\n")[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--alpha", 0.2], "--alpha has no effect on --data shipped"),
        (["--alpha", 0.2, "--data", "random"], "--alpha has no effect on --data random"),
        (["--windows", "start", "--data", "random"], "--windows has no effect on --data random"),
        ([*PARAMETER_FREE, "--windows", "start"], "--windows has no effect on --data gaussian"),
        ([*PARAMETER_FREE, "--bos", "never"], "--bos has no effect on --data gaussian"),
        ([*PARAMETER_FREE, "--shuffle"], "--shuffle has no effect on --data gaussian"),
        ([*PARAMETER_FREE, "--pack"], "--pack joins documents, and --data gaussian has none"),
        (["--revision", "main"], "--revision is for models on the Hub, and "),
        (["--dtype", "int8"], "no dtype 'int8': expected auto, float32"),
        (["--device", "cpu", "--device-map", "auto"], "--device is for one device and --device-"),
    ],
)
def test_a_flag_without_an_effect_is_refused_before_a_model_is_loaded(
    flags: list[object],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nope_probe.models.load.load", None)
    assert refused(capfd, tmp_path, scores, *flags).startswith(message)


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (ablate, ["--players", "mask", "--gain", "norm"], "--gain has no effect where no "),
        (ablate, ["--players", "sources", "--reparametrise", 1], "--reparametrise has no effect "),
        (ablate, [*PARAMETER_FREE, "--reparametrise", 1], "--reparametrise has no effect "),
        (circuit, ["--remove", "mask", "--gain", "norm"], "--gain has no effect where no "),
        (circuit, ["--gain", "norm"], "--gain has no effect where no weight is removed"),
        (reproduce, ["figure1", "--seed", 1], "figure1 takes no --seed"),
        (reproduce, ["all", "--model", "nope-1.5b"], "all takes no --model"),
        (reproduce, ["figure5", "--n-samples", 4000], "figure5 takes no --n-samples"),
    ],
)
def test_a_flag_that_needs_others_is_refused_before_anything_is_run(
    command: ModuleType,
    flags: list[object],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nope_probe.hooks.reading.capture.stream", None)
    assert refused(capfd, tmp_path, command, *flags).startswith(message)
