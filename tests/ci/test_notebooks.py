"""The notebooks run without network, show figures everywhere, and are pairs of the same cells."""

from __future__ import annotations

import os
import re
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ci.chromium import needs_chromium, told

if TYPE_CHECKING:
    from jupyter_client import KernelManager

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed")
nbconvert = pytest.importorskip("nbconvert", reason="nbconvert is not installed")
jupyter_client = pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

FOLDER = Path(__file__).parents[2] / "notebooks"
# The figures without a slider, and those with one, of each notebook.
SHOWN = {
    "01_parameter_free": (2, 1),
    "02_hook_experiments": (2, 2),
    "03_attribution": (2, 1),
    "04_language_models": (3, 1),
    "05_behaviour": (2, 0),
    "06_who_writes_position": (0, 1),
    "07_attention": (2, 0),
    "08_without_the_mask": (1, 0),
    "09_text_to_circuit": (0, 0),
    "10_a_series": (1, 0),
}
NAMES = tuple(SHOWN)
PLOTLY, HTML, PNG = "application/vnd.plotly.v1+json", "text/html", "image/png"
BADGE = re.compile(r"\n\n\[!\[Open in Colab\]\(\S+\)\]\(\S+\)$")


def notebook(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook) -> list:
    return [item for cell in notebook.cells for item in cell.get("outputs", [])]


def with_type(notebook, kind: str) -> list:
    return [output.data[kind] for output in outputs(notebook) if kind in output.get("data", {})]


def frames(notebook) -> list:
    return [item for item in with_type(notebook, HTML) if ' class="steps"' in item]


def shown(notebook) -> tuple[int, int]:
    pictures = [output for output in outputs(notebook) if {*output.get("data", {})} == {PNG}]
    return len(pictures), len(frames(notebook))


def test_these_are_all_the_notebooks() -> None:
    for ending in ("py", "ipynb"):
        assert sorted(path.stem for path in FOLDER.glob(f"*.{ending}")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_holds_the_same_cells_of_public_names_with_exercises(name: str) -> None:
    text = jupytext.read(FOLDER / f"{name}.py")
    actual = [(cell.cell_type, cell.source) for cell in text.cells]
    theirs = [(cell.cell_type, BADGE.sub("", cell.source)) for cell in notebook(name).cells]
    assert actual == theirs, "run make notebooks"
    # Where one names the other, jupytext writes the .py anew whenever JupyterLab saves.
    assert "jupytext" not in notebook(name).metadata
    assert "formats" not in text.metadata["jupytext"]
    code = "\n".join(source for _, source in actual)
    assert "from nope_probe import " in code
    assert not re.findall(r"nope_probe\.\w+", code)
    assert code.count('"pip", "install"') == 1
    assert code.count("**Exercise.**") == code.count("<details><summary>Answer</summary>") >= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_is_small_ran_without_an_error_and_holds_its_figures(
    name: str,
) -> None:
    result = notebook(name)
    counts = [cell.execution_count for cell in result.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert {output.output_type for output in outputs(result)} <= {"display_data", "execute_result"}
    assert shown(result) == SHOWN[name]
    assert not with_type(result, PLOTLY)
    assert not [item for item in with_type(result, HTML) if "plotly" in item]
    # Every figure has a picture for viewers without scripts, of frames too, until they load.
    pictures = [output.data for output in outputs(result) if PNG in output.get("data", {})]
    assert len(pictures) == sum(SHOWN[name])
    for data in pictures:
        header = b64decode(data[PNG])[:24]
        assert header.startswith(b"\x89PNG")
        assert 700 <= int.from_bytes(header[16:20]) <= 810  # px wide: a notebook's cell
        if HTML in data:
            assert f'src="data:image/png;base64,{data[PNG]}"' in data[HTML]
            assert f"run this cell, or run <code>jupyter trust {name}.ipynb</code>" in data[HTML]
    page, _ = nbconvert.HTMLExporter().from_notebook_node(result)
    assert len(re.findall(r'<img[^>]*src="data:image/png', page)) == len(pictures)
    assert page.count('class="steps"') == SHOWN[name][1]


def test_the_notebooks_are_light_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.ipynb")) < 3_000_000


@needs_chromium
def test_a_sliders_frame_replaces_its_picture_and_answers(tmp_path: Path) -> None:
    [slider] = frames(notebook("03_attribution"))
    script = """setTimeout(() => {
      const inside = document.querySelector("iframe").contentDocument;
      const input = inside.querySelector("input"), images = [...inside.images];
      const seen = images.map((_, step) => {
        input.value = step;
        input.dispatchEvent(new Event("input"));
        const visible = images.filter((image) => !image.hidden).length;
        return inside.querySelector("span").textContent + visible;
      });
      document.body.dataset.seen = seen.join();
      document.body.dataset.pictures = new Set(images.map((image) => image.src)).size;
      document.body.dataset.stills = document.querySelectorAll(".still").length;
    }, 500)"""
    seen = ",".join(f"L{layer}1" for layer in range(4))
    found = told(f"<body>{slider}</body>", tmp_path, script)
    assert found == {"stills": "0", "seen": seen, "pictures": "4"}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """A kernel for all notebooks: importing TransformerLens takes longer than most of them.

    Its home is empty, so that a notebook takes a shipped model where it would take a fetched model.
    """
    home = {"HOME": str(tmp_path_factory.mktemp("home"))}
    manager = jupyter_client.KernelManager()
    manager.start_kernel(env=os.environ | home | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_at_another_length_of_fewer_sequences_and_shows_figures(
    name: str, kernel: KernelManager, tmp_path: Path
) -> None:
    actual = notebook(name)  # its stored outputs are of the length that it names
    for cell in actual.cells:
        cell.source = re.sub(
            r"\b(seq_len=|n_pos = )(\d+)", lambda m: f"{m[1]}{int(m[2]) - 3}", cell.source
        )
        cell.source = re.sub(
            r"(n_seqs\W+)(\d+)", lambda m: f"{m[1]}{max(16, int(m[2]) // 4)}", cell.source
        )
    # Without the names of the notebook before, in a folder of its own.
    fresh = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}")
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[fresh]), km=kernel).execute()
    nbclient.NotebookClient(actual, km=kernel, timeout=180).execute()
    assert len(with_type(actual, PLOTLY)) == sum(SHOWN[name])


def test_conclusions_leave_out_the_bos_key() -> None:
    tables = with_type(notebook("02_hook_experiments"), "text/plain")
    [table] = [table for table in tables if "without the mask" in table]
    intact, without = (float(text) for text in re.findall(r"(-?[\d.]+) \[", table.split("L3")[1]))
    assert abs(without) < 0.1 * intact


def test_jupyter_completes_the_options_of_a_run_and_shows_their_defaults_and_help(
    kernel: KernelManager,
) -> None:
    client = kernel.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    imported = "from nope_probe import run_ablations, run_trace"
    client.execute_interactive(imported, timeout=180, output_hook=print)
    asked = {"run_ablations(model, n_s": "n_seqs=", "run_trace(model, data, conf": "confirm="}
    for code, expected in asked.items():
        client.complete(code, len(code))
        assert expected in client.get_shell_msg(timeout=180)["content"]["matches"]
    client.inspect("run_trace", 3)
    shown = client.get_shell_msg(timeout=60)["content"]["data"]["text/plain"]
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "n_seqs: int = 64," in shown
    assert "n_seqs: How many sequences." in shown
    client.stop_channels()
