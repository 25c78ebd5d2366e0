"""Run the notebooks and write them with outputs that show everywhere: `make notebooks`.

A notebook's code is in its .py file. Its .ipynb holds the outputs too, light enough to commit: a
plotly figure is kept as a PNG, and plotly's once its cell has run. A figure with a slider is
kept as a picture of each step behind a slider that needs no plotly. Before it stand a picture and
how to bring it to life, which it removes: viewers that run no scripts show them, as JupyterLab does
until a notebook is trusted.

Jupytext would write the .py file anew whenever a notebook is saved if one of the two named the
other: neither does.
"""

import os
import re
import sys
import tempfile
import tomllib
from base64 import b64encode
from html import escape
from io import BytesIO
from pathlib import Path

import jupytext
import nbclient
import nbformat
import plotly.graph_objects as go
import plotly.io as pio
from PIL import Image

from nope_probe.figures.maps import without_controls

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
PLOTLY, HTML, PNG = "application/vnd.plotly.v1+json", "text/html", "image/png"
WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar, which needs its kernel
COLAB = "https://colab.research.google.com/"
CELL_TIMEOUT = 600
WIDTH = 800  # px of a figure's picture: as wide as a notebook's cells
COLOURS = 192  # of a picture, whose file is a third of one with all colours
STEPS = """<!doctype html><body style="margin:0;font:15px system-ui,sans-serif;background:#fff">
<label style="display:flex;gap:.8em;align-items:center;height:36px;padding-left:10px">
<span style="min-width:6em">{label}</span>
<input type="range" max="{last}" value="{first}" style="width:260px"></label>
{images}
<script>
const images = document.querySelectorAll("img"), slider = document.querySelector("input");
slider.addEventListener("input", () => {{
  images.forEach((image, step) => {{ image.hidden = step != slider.value; }});
  document.querySelector("span").textContent = images[slider.value].alt;
}});
</script>"""


def build(name: str) -> Path:
    """Run a notebook, and write it with its outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    notebook.metadata.pop("jupytext", None)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    with tempfile.TemporaryDirectory() as place:
        resources = {"metadata": {"path": place}}
        nbclient.NotebookClient(notebook, timeout=CELL_TIMEOUT, resources=resources).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [shown for each in cell.outputs if (shown := _shown(each, name))]
    _add_badge(notebook, name)
    path = FOLDER / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def _shown(output: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode | None:
    """Return an output as it is kept; None for progress bars and for text on stderr."""
    data = output.get("data", {})
    if output.get("name") == "stderr" or WIDGET in data:
        return None
    if PLOTLY in data:
        figure = pio.from_json(pio.to_json(data[PLOTLY], validate=False))
        if figure.layout.sliders:
            output["data"] = _with_slider(figure, name)
        else:
            output["data"] = {PNG: _picture(figure)}
    return output


def _picture(figure: go.Figure) -> str:
    """Return a figure as a PNG, without its controls."""
    still = go.Figure(without_controls(figure))
    return _light(still.to_image("png", width=WIDTH, height=still.layout.height))


def _light(png: bytes) -> str:
    """Return a PNG with fewer colours, on white, in base64."""
    picture, small = Image.open(BytesIO(png)).convert("RGBA"), BytesIO()
    paper = Image.new("RGBA", picture.size, "white")
    few = Image.alpha_composite(paper, picture).convert("RGB").quantize(COLOURS, dither=0)
    few.save(small, "png", optimize=True)
    return b64encode(small.getvalue()).decode()


def _with_slider(figure: go.Figure, name: str) -> dict[str, str]:
    """Return a figure as a page with a slider over pictures of its steps, and as the first one."""
    slider = figure.layout.sliders[0]
    labels = [f"{slider.currentvalue.prefix}{step.label}" for step in slider.steps]
    pictures = [_picture(_at_step(figure, step)) for step in slider.steps]
    images = "\n".join(
        f'<img alt="{label}" width="100%" src="data:{PNG};base64,{picture}"'
        f"{'' if step == slider.active else ' hidden'}>"
        for step, (label, picture) in enumerate(zip(labels, pictures, strict=True))
    )
    shown, last = labels[slider.active], len(labels) - 1
    page = STEPS.format(label=shown, last=last, first=slider.active, images=images)
    height = without_controls(figure)["layout"]["height"] + 36
    style = f"width:100%;max-width:{WIDTH}px;aspect-ratio:{WIDTH}/{height};border:0"
    frame = f'<iframe class="steps" title="{shown}" style="{style}" srcdoc="{escape(page)}">'
    return _behind_a_still(shown, pictures[slider.active], f"{frame}</iframe>", name)


def _at_step(figure: go.Figure, step: go.layout.slider.Step) -> go.Figure:
    """Return a figure as it is after its slider was moved to a step."""
    restyled, relayout = step.args
    moved = go.Figure(figure).update_layout(relayout)
    for trace, visible in zip(moved.data, restyled["visible"], strict=True):
        trace.visible = visible
    return moved


def _behind_a_still(alt: str, image: str, html: str, name: str) -> dict[str, str]:
    """Return a page in a frame which, once it is loaded, removes picture and advice before it."""
    source = f"data:{PNG};base64,{image}"
    still = f'<img class="still" alt="{alt}" style="max-width:100%" src="{source}">'
    advice = (
        f'<p class="still">This is a picture. To switch, run this cell, or run <code>jupyter trust '
        f"{name}.ipynb</code> and open the notebook again.</p>"
    )
    remove = "this.parentElement.querySelectorAll('.still').forEach((each) => each.remove())"
    loaded = html.replace("<iframe ", f'<iframe onload="{remove}" ', 1)
    return {HTML: f"<div>{still}{advice}{loaded}</div>", PNG: image}


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
