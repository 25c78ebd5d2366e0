"""The documentation site: `make docs` builds it, and a warning is an error."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

import nope_probe  # noqa: E402

project = "nope_probe"
author = "nope_probe contributors"
copyright = f"2026, {author}"
release = version = nope_probe.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "command_lexer",
    "site_directives",
]
exclude_patterns = ["_static", "images"]
templates_path: list[str] = []

# Single backticks in docstrings are code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # types are in the signature
python_maximum_signature_line_length = 80

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
# Notebooks are shown with their stored outputs; `docs/notebooks` is a link to their folder.
nb_execution_mode = "off"
suppress_warnings = ["mystnb.unknown_mime_type"]  # of a plotly figure its picture is shown

html_theme = "furo"
html_title = "nope_probe"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
