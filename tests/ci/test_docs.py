"""The code in README, docs and docstrings runs, and prints what it says."""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import json
import pkgutil
import re
from pathlib import Path
from xml.etree import ElementTree

import draw_data_way
import make_findings
import pandas as pd
import pytest
import torch
from make_long_sequences import STORED, tables

import nope_probe
from nope_probe import figures
from nope_probe.models.parameter_free import has_hooked_transformer
from nope_probe.removal import PER_HEAD, Writer
from nope_probe.run.flags import hints_of
from nope_probe.studies.ablate import DEFAULT_REMOVED, Settings

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}


def python_blocks(text: str) -> list[tuple[str, str]]:
    """Return the Python blocks of a page, each with the text block right after it."""
    return re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL)


def test_the_way_of_the_data_is_drawn_with_files_that_exist():
    assert draw_data_way.OUT.read_text() == draw_data_way.svg(), "run python docs/draw_data_way.py"
    ElementTree.fromstring(draw_data_way.svg())
    steps = [file for *_, file in [*draw_data_way.STEPS, *draw_data_way.ASIDES.values()]]
    for file in ", ".join(steps).replace("COMMAND", "ablate").split(", "):
        assert (ROOT / "nope_probe" / file).exists()


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(PAGES[page])])
def test_the_code_of_a_page_prints_what_it_says(page: str):
    names: dict[str, object] = {}  # a page reads from top to bottom
    for code, printed in python_blocks(PAGES[page]):
        if "import HookedTransformer," in code and not has_hooked_transformer():
            continue
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if ">>>" in code:
                example = doctest.DocTestParser().get_doctest(code, names, page, page, 0)
                result = doctest.DocTestRunner().run(example, clear_globs=False)
                assert result.failed == 0, output.getvalue()
                names |= example.globs
            else:
                exec(code, names)
        assert not printed or output.getvalue() == printed


def test_every_make_target_of_readme_and_docs_exists():
    targets = {*re.findall(r"(?:^|`)make (\w+)", "\n".join(PAGES.values()), re.MULTILINE)}
    defined = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    assert targets <= {*defined}


def test_the_readme_has_at_most_700_words():
    assert len(PAGES["README.md"].split()) <= 700


def test_findings_are_of_the_shipped_checkpoints_and_the_citation_of_this_version():
    for name in ("nope-tiny", "rope-tiny"):
        record = json.loads((ROOT / f"nope_probe/checkpoints/{name}/training.json").read_text())
        row = rf"\| `{name}` \| {record['held_out_loss']:.3f} \|"
        assert re.search(row, PAGES["docs/findings.md"])
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {nope_probe.__version__}\n" in citation


def test_the_tables_of_long_sequences_are_those_of_the_stored_results():
    made = tables(pd.read_csv(STORED))
    assert len(made) == 4
    page = PAGES["docs/long-sequences.md"]
    assert [table for table in made if table not in page] == []
    prose = "\n".join(line for line in page.splitlines() if not line.startswith("|"))
    estimates = [unsigned(text) for text in re.findall(ESTIMATE, prose)]
    assert len(estimates) > 10
    assert {*estimates} <= {unsigned(text) for text in re.findall(ESTIMATE, "\n".join(made))}


# A value and its interval, such as `0.40 nats [0.24, 0.56]`; a sentence may say "lower by 0.40".
ESTIMATE = r"([+-]?[\d.]+)(?: nats)?\s\[([+-]?[\d.]+),\s([+-]?[\d.]+)\]"


def unsigned(estimate: tuple[str, ...]) -> tuple[float, ...]:
    value, *ends = (abs(float(number)) for number in estimate)
    return value, *sorted(ends)


def test_findings_are_what_is_stored_with_the_commands_that_measured_it():
    names = ("README.md", "docs/findings.md", "docs/intervals.md", "docs/trace.md")
    page = "".join(PAGES[name] for name in names)
    made = make_findings.tables(pd.read_csv(make_findings.STORED))
    assert [table for table in made if table not in page] == []
    assert [command for command in make_findings.COMMANDS.values() if command not in page] == []
    prose = "\n".join(line for line in page.splitlines() if not line.startswith("|"))
    told = {unsigned(text) for text in re.findall(ESTIMATE, "\n".join(made))}
    assert {unsigned(text) for text in re.findall(ESTIMATE, prose)} <= told


@pytest.mark.parametrize("page", ["README.md", "docs/findings.md"])
def test_a_number_in_a_sentence_stands_in_a_table_too(page: str):
    code = r"```.*?```|`[^`]*`|\d{4}\.\d{5}|Python \d\.\d+"
    lines = re.sub(code, "", PAGES[page], flags=re.DOTALL).splitlines()
    tables = "\n".join(make_findings.tables(pd.read_csv(make_findings.STORED)))
    cells = [number.lstrip("+-") for number in re.findall(r"[+-]?\d+\.\d+", tables)]
    said = {
        number
        for line in lines
        if not line.startswith("|")
        for number in re.findall(r"(?<![\d.])\d+\.\d+(?![\d.]|\w)", line)
    }
    rounded = {
        f"{float(cell):.{places}f}"
        for cell in cells
        for places in range(len(cell.split(".")[1]) + 1)
    }
    assert len(said) > 5
    assert said - rounded == set()


@pytest.mark.parametrize("page", PAGES)
def test_the_links_and_images_of_a_page_exist(page: str):
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", PAGES[page])
    local = [link for link in links if not re.match(r"https?:", link)]
    folder = (ROOT / page).parent
    assert [link for link in local if not (folder / link).exists()] == []


OF_LIBRARIES = {  # of TransformerLens, datasets and transformers
    *("hook_q", "hook_k", "hook_v", "hook_cos", "hook_sin", "run_with_hooks"),
    *("from_pretrained_no_processing", "save_to_disk", "pipeline", "eager_attention_forward"),
}


def spans(page: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


@pytest.fixture(scope="module")
def words_of_code() -> set[str]:
    """The names and the words of strings in the code, without docstrings and comments."""
    found = {path.name for path in ROOT.iterdir()} | OF_LIBRARIES
    for path in [file for folder in CODE for file in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
            values = (getattr(node, of, None) for of in ("id", "attr", "name", "arg", "value"))
            found |= {x for value in values if isinstance(value, str) for x in WORD.findall(value)}
            found |= {*WORD.findall(getattr(node, "module", None) or "")}
    return found


CODE = ("nope_probe", "recipes", "benchmarks", "docs")
WORD = re.compile(r"[A-Za-z_]\w*")


@pytest.mark.parametrize("page", PAGES)
def test_the_names_in_backticks_exist(page: str, words_of_code: set[str]):
    of_package = r"((?:`\w+`(?:, | and )?)+) of `(nope_probe[\w.]*)`"
    for names, module in re.findall(of_package, PAGES[page]):
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(module), name), f"{name} of {module}"
    for span in spans(page):
        if re.fullmatch(r"[\w/]+\.py", span):
            assert any((ROOT / folder / span).is_file() for folder in ("", *CODE, "tests")), span
        elif span not in words_of_code and re.fullmatch(r"[\w.]+(\(.*\)|\[.*\])?", span):
            named = re.findall(r"(?<![\w'\"/-])([A-Za-z]\w*)(?=[(=.\[]|$)", span)
            columns = {re.sub("_(low|high)$", "", name) for name in named}
            unknown = [name for name in columns - words_of_code if not Writer.parse(name)]
            assert unknown == [], span


def test_the_help_and_the_guide_name_what_ablate_removes_by_default() -> None:
    named = " ".join(DEFAULT_REMOVED)
    guide = "\n".join(PAGES.values())
    assert [*re.findall(r"`--remove (written [^`]*)`", guide)] == [named]
    assert f"By default {named}." in " ".join(str(hints_of(Settings)["remove"]).split())


def test_the_guide_names_each_command_in_python() -> None:
    commands = {name for name in nope_probe.__all__ if name.startswith("run_")}
    for page in ("docs/guide/how-to.md", "docs/reference/api.md"):
        [listed] = re.findall(r"^`run_ablations`, .*?run_trace`", PAGES[page], re.MULTILINE)
        assert {*re.findall(r"run_\w+", listed)} == commands, page


def test_the_guide_names_each_removal_that_heads_can_lose() -> None:
    [named] = re.findall(r"query heads\]\}` \| ([^;]*);", PAGES["docs/removals.md"])
    assert re.split(", | and ", named) == [*PER_HEAD]


def modules() -> list[str]:
    packages = pkgutil.walk_packages(nope_probe.__path__, "nope_probe.")
    return sorted(module.name for module in packages if not module.name.endswith("__main__"))


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str):
    module = importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        failed = doctest.testmod(module, extraglobs={"torch": torch}).failed
    assert failed == 0, output.getvalue()


FUNCTIONS = [name for name in nope_probe.__all__ if inspect.isfunction(getattr(nope_probe, name))]


@pytest.mark.parametrize("name", [*FUNCTIONS, "Ablation", "ParameterFreeSpec"])
def test_what_a_user_calls_has_a_docstring_with_an_example_of_public_names(name: str):
    documented = getattr(nope_probe, name).__doc__
    (example,) = re.findall(r"Example:\n(.*)", documented, re.DOTALL)
    assert re.search(rf">>> .*\b{name}\b", example)
    inner = re.findall(r"from (nope_probe\.\S+) import", example)
    assert inner == (["nope_probe.run.folder"] if name == "read_run" else [])


@pytest.mark.parametrize("name", figures.__all__)
def test_a_public_figure_has_a_docstring_that_names_its_arguments(name: str):
    figure = getattr(figures, name)
    arguments = inspect.signature(figure).parameters
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(figure) or "", re.MULTILINE)
    assert [argument for argument in arguments if argument not in documented] == []


@pytest.mark.parametrize("name", ["hooks", "analyses"])
def test_the_links_at_the_top_level_load_no_second_copy(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"import nope_probe.{name}, not {name}"):
        importlib.import_module(name)
