"""Notebooks to download: the texts in docs/notebooks as `.ipynb` files that open anywhere.

Their first cell installs what is missing and chooses a backend that is there. They hold no outputs.
"""

import re
from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx

import treadle

FIRST = """\
# Run this cell first: it installs what is missing, and chooses a backend that is there.
import importlib.util
import os

if importlib.util.find_spec("treadle") is None:
    # It is on no package index yet: put the wheel that scripts/package builds into this folder.
    %pip install --quiet treadle-{version}-py3-none-any.whl matplotlib pandas optuna
backends = [name for name in {backends} if importlib.util.find_spec(name)]
if not backends:
    %pip install --quiet {backends[0]}
os.environ.setdefault("KERAS_BACKEND", (backends or {backends})[0])"""
EVERY = ("jax", "tensorflow", "torch")


def add_link(app: Sphinx, page: str, source: list[str]) -> None:
    """Add a link to the `.ipynb` file below the title of a notebook."""
    if page.startswith("notebooks/"):
        name = page.removeprefix("notebooks/")
        link = f'<p><a href="{name}.ipynb" download>Download this notebook</a></p>'
        source[0] = re.sub(r"^(# .*\n)", rf"\1\n{link}\n", source[0], count=1, flags=re.MULTILINE)


def write_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Write all notebooks into the folder of their pages."""
    for path in sorted((Path(app.srcdir) / "notebooks").glob("*.md")) if error is None else ():
        text = converted(path.read_text(), str(path))
        (Path(app.outdir) / "notebooks" / f"{path.stem}.ipynb").write_text(text)


def converted(text: str, name: str) -> str:
    """Return a notebook's text as JSON."""
    notebook = read_myst_markdown_notebook(text, path=name)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "markdown":  # links to other pages lead nowhere outside of the site
            cell.source = re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", cell.source)
    backends = ("jax",) if 'backend="jax"' in text else EVERY
    first = FIRST.replace("{version}", treadle.__version__)
    first = first.replace("{backends[0]}", backends[0]).replace("{backends}", repr(backends))
    notebook.cells.insert(1, nbformat.v4.new_code_cell(first))
    for number, cell in enumerate(notebook.cells):  # the same text gives the same file
        cell.id = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {"kernelspec": kernel}
    nbformat.validate(notebook)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT)
