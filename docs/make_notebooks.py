"""Run the notebooks and write them with outputs that show everywhere: `make notebooks`.

A notebook's code is in its .py file. Its .ipynb holds the outputs too. A plotly figure is kept as
plotly's JSON, which JupyterLab, VS Code and Colab draw, and as a PNG, which all else shows: GitHub,
nbconvert, a viewer without plotly. It is not kept as HTML, which would need plotly.js: 5 MB in each
notebook, or a network. An explorer is HTML that needs nothing; before it stands a picture of it,
which it removes, for viewers that run no scripts.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from base64 import b64encode
from pathlib import Path

import jupytext
import nbclient
import nbformat
import plotly.io as pio

from nope_probe.figures.export import without_controls

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
PLOTLY, HTML, PNG = "application/vnd.plotly.v1+json", "text/html", "image/png"
COLAB = "https://colab.research.google.com/"
CELL_TIMEOUT = 600
STILL = (1060, 1250)  # px of an explorer's picture
FRAME = '<iframe class="explorer"'


def build(name: str) -> Path:
    """Run a notebook, and write it with its outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    with tempfile.TemporaryDirectory() as place:
        resources = {"metadata": {"path": place}}
        nbclient.NotebookClient(notebook, timeout=CELL_TIMEOUT, resources=resources).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [
                    shown for each in cell.outputs if (shown := _shown(each, Path(place)))
                ]
    _add_badge(notebook, name)
    path = FOLDER / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def _shown(output: nbformat.NotebookNode, place: Path) -> nbformat.NotebookNode | None:
    """Return an output as it is kept; None for what goes to stderr, such as progress bars."""
    if output.get("name") == "stderr":
        return None
    data = output.get("data", {})
    if PLOTLY in data:
        figure = without_controls(pio.from_json(pio.to_json(data[PLOTLY], validate=False)))
        image = figure.to_image("png", width=1050, height=figure.layout.height)
        output["data"] = {PLOTLY: data[PLOTLY], PNG: b64encode(image).decode()}
    elif FRAME in data.get(HTML, ""):
        image = b64encode(_screenshot(data[HTML], place)).decode()
        still = f'<img class="still" alt="The explorer" src="data:{PNG};base64,{image}">'
        frame = data[HTML].replace(FRAME, f'{FRAME} onload="this.previousElementSibling.remove()"')
        output["data"] = {HTML: f"<div>{still}{frame}</div>", PNG: image}
    return output


def _screenshot(html: str, place: Path) -> bytes:
    """Return a picture of an explorer, drawn by Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or "google-chrome"
    page, picture = place / "explorer.html", place / "explorer.png"
    page.write_text(f"<!doctype html><body style='margin:0'>{html}")
    size = ",".join(map(str, STILL))
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=9000"
    where = [f"--user-data-dir={place / 'profile'}", f"--window-size={size}"]
    command = [browser, *flags.split(), *where, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return picture.read_bytes()


def _add_badge(notebook: nbformat.NotebookNode, name: str) -> None:
    """Add a link that opens the notebook in Colab, if the project says where it is published."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    url = project.get("urls", {}).get("Repository", "")
    if match := re.search(r"github\.com/([\w.-]+/[\w.-]+)", url):
        target = f"{COLAB}github/{match[1].removesuffix('.git')}/blob/main/notebooks/{name}.ipynb"
        badge = f"[![Open in Colab]({COLAB}assets/colab-badge.svg)]({target})"
        first = notebook.cells[0]
        first.source = f"{first.source}\n\n{badge}"


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    for each in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.py")):
        path = build(each)
        sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB\n")
