"""The import rule: which folder of the package may import which, without circles."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter

import draw_imports
import import_rule
import pytest
from import_rule import EVERYWHERE, PUBLIC, RULE, imports, modules, violations


def test_every_import_is_one_that_the_rule_allows() -> None:
    assert violations(imports()) == []


@pytest.mark.parametrize(
    ("importing", "allowed", "refused"),
    [
        ("hooks.layers.model", "removal maps.folds", "models.load hooks.ablation"),
        ("hooks.reading.fused", "hooks.removing.components", "hooks.ablation"),
        ("hooks.removing.components", "hooks.layers.model", "hooks.reading.fused"),
        ("hooks.ablation", "hooks.reading.capture hooks.removing.components", "data.sequences"),
        ("ablate", "cli errors studies.ablate_run", "hooks.ablation"),
        ("cli", "studies.commands run.flags", "ablate"),
        ("data.sequences", "errors", "cli"),
        ("run.session", "models.load", "ablate"),
        ("studies.circuit_run", "studies.engine", "studies.ablate_run"),
        ("studies.ablate_run", "studies.readings", "ablate"),
        ("figures", "studies.page", ""),  # it lists what is public
        ("figures.maps", "maps.rows", "studies.page"),
        ("models", "hooks.ablation", "studies.page"),
    ],
)
def test_an_import_against_the_rule_is_found(importing: str, allowed: str, refused: str) -> None:
    names = {f"nope_probe.{name}" for name in f"{allowed} {refused}".split()}
    assert violations({f"nope_probe.{importing}": names}) == [
        f"nope_probe.{importing} imports nope_probe.{name}" for name in sorted(refused.split())
    ]


def test_the_rule_has_no_arrow_up() -> None:
    order = list(RULE)
    for index, (folder, allowed) in enumerate(RULE.items()):
        assert all(order.index(item) > index for item in allowed), folder


def test_modules_import_each_other_without_circles() -> None:
    order = [*TopologicalSorter(imports()).static_order()]  # of a circle, an error
    assert {*modules()} <= {*order}


def test_every_folder_is_in_the_rule_and_in_the_picture() -> None:
    folders = {name.split(".")[1] for name in modules() if name.count(".") > 1}
    assert folders <= set(RULE)
    assert set(draw_imports.PLACES) == set(RULE) - {"cli", PUBLIC, *EVERYWHERE}


def test_contributing_states_the_rule() -> None:
    text = (import_rule.ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `?(\w+)/?`? \|.*\| ?([\w, ]*?) ?\|$", text, re.MULTILINE)
    stated = {folder: tuple(filter(None, allowed.split(", "))) for folder, allowed in rows[1:]}
    assert stated == {name: RULE[name] for name in RULE if name not in (PUBLIC, "cli", *EVERYWHERE)}


def test_the_picture_shows_the_imports_of_today() -> None:
    assert draw_imports.OUT.read_text() == draw_imports.svg(), "run python docs/draw_imports.py"


def imported(code: str) -> set[str]:
    """Return the modules that are loaded after some code has run in a process of its own."""
    code += "\nimport sys\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


HEAVY = {"torch", "transformers", "transformer_lens"}


def test_importing_the_package_and_its_figures_waits_for_no_heavy_library() -> None:
    loaded = imported("from nope_probe import figures, read_run\nfigures.score_maps")
    assert {"nope_probe.figures.maps", "plotly"} <= loaded
    assert not HEAVY & loaded
    assert not HEAVY & imported("import nope_probe\ndir(nope_probe)")


def test_what_reads_and_prints_a_finished_run_needs_no_torch() -> None:
    folders = ("figures", "reports", "run.folder", "errors", "cli")
    starts = tuple(f"nope_probe.{folder}." for folder in folders)
    names = [name for name in modules() if f"{name}.".startswith(starts)]
    pages = [name for name in modules() if ".studies." in name and name.endswith(".page")]
    pages += [f"nope_probe.studies.{study}" for study in import_rule.STUDIES]
    names += [name for name in pages if name in modules()]
    loaded = imported("\n".join(f"import {name}" for name in names))
    assert {"nope_probe.studies.page", "nope_probe.studies.attention"} <= loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize(("named", "seen"), [(None, "passive"), ("active", "active")])
def test_threads_wait_passively_before_torch_comes_in_unless_the_environment_says_how(
    named: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if named is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", named)
    code = """
import os, sys
class AtImport:
    def find_spec(name, *_):
        if name == "torch": sys.exit(print(os.environ.get("OMP_WAIT_POLICY")))
sys.meta_path.insert(0, AtImport)
from nope_probe import ablate
sys.argv = ["ablate", "--model", "nope-tiny"]
ablate.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == seen


def test_a_mistake_on_the_command_line_waits_for_no_torch() -> None:
    code = "import sys\nfrom nope_probe import ablate\nsys.argv = ['ablate', '--folds', '900']\n"
    code += "try: ablate.main()\nexcept SystemExit as end: assert end.code == 2"
    assert not (HEAVY | {"pandas", "plotly"}) & imported(code)
