"""What the README and the docstrings promise is run."""

import contextlib
import doctest
import importlib
import io
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch
import tyro

import nope_probe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readmes_code_prints_what_it_says():
    [code, printed] = re.search(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL
    ).groups()
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(code, {})
    assert told.getvalue() == printed


def test_every_python_block_of_the_readme_runs():
    for code in blocks("python"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, {})


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if "-m nope_probe." in line]


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_readme_is_understood(line: str):
    _, _, rest = line.partition("-m nope_probe.")
    name, *arguments = shlex.split(rest)
    settings = importlib.import_module(f"nope_probe.{name}").Settings
    assert isinstance(tyro.cli(settings, args=arguments), settings)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make (\w+)", README))))
def test_every_make_target_of_the_readme_exists(target: str):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["nope-tiny", "rope-tiny"])
def test_the_readmes_losses_are_those_of_the_checkpoints(name: str):
    record = json.loads((ROOT / f"nope_probe/checkpoints/{name}/training.json").read_text())
    assert re.search(rf"\| `{name}` \| {record['held_out_loss']:.3f} \|", README)


def test_the_readmes_images_exist():
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert images
    assert all((ROOT / image).is_file() for image in images)


def modules() -> list[str]:
    found = pkgutil.walk_packages(nope_probe.__path__, "nope_probe.")
    return sorted(module.name for module in found if not module.name.endswith("__main__"))


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str):
    module = importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        failed = doctest.testmod(module, extraglobs={"torch": torch}).failed
    assert failed == 0, told.getvalue()


def test_public_names_are_few_and_importable():
    assert len(nope_probe.__all__) < 10
    for name in nope_probe.__all__:
        assert getattr(nope_probe, name).__doc__
    with pytest.raises(AttributeError, match="nope_probe has no 'attribut'; it has Ablation"):
        _ = nope_probe.attribut


@pytest.mark.parametrize("name", ["hooks", "analyses"])
def test_the_links_at_the_top_level_load_no_second_copy(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"import nope_probe.{name}, not {name}"):
        importlib.import_module(name)
