"""The documentation site: every page is in its navigation, every public name in its reference.

These tests read the sources of the site; `scripts/docs` builds it and checks links and anchors.
"""

import ast
import importlib
import inspect
import re
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import treadle
from tests.tutorial_pictures import PICTURES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAVIGATION = tomllib.loads((DOCS / "site/navigation.toml").read_text())
LISTED = [page for section in NAVIGATION["section"] for page in section["pages"]]
ENTRY = re.compile(r"^\.\. (?:auto|py:)(?:class|function|exception|module|data):: (\S+)", re.M)
ENTRIES = [
    name for page in (DOCS / "reference").glob("*.rst") for name in ENTRY.findall(page.read_text())
]


def public_names(module):
    """The public names of a module: declared, imported on first use, or defined in it."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    )


MODULES = [name for name in treadle.__all__ if inspect.ismodule(getattr(treadle, name))]
NAMES = [
    *(f"treadle.{name}" for name in treadle.__all__),
    *(
        f"treadle.{module}.{name}"
        for module in MODULES
        for name in public_names(getattr(treadle, module))
    ),
]


def resolve(name):
    """Return the object that a name of the reference stands for."""
    module, found = name, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            found.insert(0, last)
    for part in found:
        value = getattr(value, part)
    return value


def test_every_page_is_in_the_navigation_once():
    sources = [path for suffix in ("md", "rst") for path in DOCS.rglob(f"*.{suffix}")]
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in sources}
    assert pages == {"index", *LISTED, *NAVIGATION["excluded"]}
    assert [page for page, count in Counter(LISTED).items() if count > 1] == []
    assert set(LISTED).isdisjoint(NAVIGATION["excluded"])


@pytest.mark.parametrize(
    ("page", "word"),
    [
        ("gradients", "several optimizers"),
        ("resume", "resuming"),
        ("replay", "NaN"),
        ("hooks", "Hooks"),
        ("hooks", "images"),
        ("devices", "devices"),
        ("data", "DataLoader"),
        ("export", "Export"),
        ("speed", "faster"),
        ("coming-from-lightning", "Lightning"),
        ("troubleshooting", "errors"),
    ],
)
def test_title_names_the_question(page, word):
    """The navigation shows titles, and the search ranks them first."""
    assert page in LISTED and word in text(f"{page}.md").partition("\n")[0]


def test_names_are_found():
    assert len(NAMES) > 100 and "treadle.hooks.CSV" in NAMES
    assert "treadle.schedules.Cyclic" in NAMES and "treadle.data.zipped" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_in_the_reference(name):
    same = [entry for entry in ENTRIES if entry.rpartition(".")[2] == name.rpartition(".")[2]]
    assert any(resolve(entry) is resolve(name) for entry in same), "name it in docs/reference/"


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_of_the_reference_exists_and_has_a_docstring(entry):
    assert inspect.getdoc(resolve(entry))


# Modules are described by their contents, and errors by docs/troubleshooting.md.
CONSTANTS = {"treadle.__version__", "treadle.checkpoint.FORMAT"}
WITHOUT_EXAMPLE = {*CONSTANTS, *(f"treadle.{name}" for name in MODULES)}


def needs_example(name):
    found = resolve(name)
    error = inspect.isclass(found) and issubclass(found, BaseException)
    return name not in WITHOUT_EXAMPLE and not error


DESCRIBED = [name for name in NAMES if needs_example(name)]


@pytest.mark.parametrize("name", DESCRIBED)
def test_public_name_has_an_example(name):
    assert ">>> " in inspect.getdoc(resolve(name)), "give it an example in its docstring"


def test_reference_names_nothing_twice():
    assert [name for name, count in Counter(ENTRIES).items() if count > 1] == []


@pytest.mark.parametrize("page", ["index.md", "../README.md"])
def test_figures_of_the_first_pages_are_those_of_the_measurements(page):
    landing = " ".join(text(page).split())
    ratios = re.findall(r"the fastest `fit`[^|]*\| 1.00 \| ([\d.]+)", text("benchmarks.md"))
    values = [float(ratio) for ratio in ratios]
    assert (
        f"**{statistics.median(values):.1f}×** the speed of the fastest `fit`: the median of "
        f"{len(values)} pairs of program and backend, from {min(values)}× to {max(values)}×"
    ) in landing

    kills = re.findall(r"^\| \w+ \| \d+ \| (\d+) of (\d+) \|", text("reliability.md"), re.M)
    survived, of = (sum(map(int, column)) for column in zip(*kills, strict=True))
    assert f"**{survived} of {of}** kills" in landing

    differences = re.findall(
        r"^\| [\w-]+ \| .+ → .+ \| (\d\.\d)e\+00 \|$", text("results.md"), re.M
    )
    assert set(differences) == {"0.0"}
    assert f"**0** difference in the first 300 losses of {len(differences)} programs" in landing


def text(page):
    return (DOCS / page).read_text()


def texts(node):
    """Yield the texts in a piece of source code, with `…` for what is inserted into them."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.JoinedStr):
            pieces = (x.value if isinstance(x, ast.Constant) else "…" for x in part.values)
            yield "".join(pieces)


@pytest.fixture(scope="module")
def texts_of_files():
    files = (ROOT / "src/treadle").rglob("*.py")
    return [list(texts(ast.parse(path.read_text()))) for path in files]


MESSAGES = re.findall(r"^- `(.+)`\\$", text("troubleshooting.md"), re.M)


def test_messages_are_found():
    assert len(MESSAGES) > 90


@pytest.mark.parametrize("message", MESSAGES)
def test_message_of_the_troubleshooting_page_exists(message, texts_of_files):
    """Each part between two `…` is in one file of the sources."""
    parts = [part.strip(" .:") for part in message.split("…")]
    parts = [part for part in parts if part]
    assert max(map(len, parts)) > 10
    assert any(
        all(any(part in one for one in file) for part in parts) for file in texts_of_files
    ), "quote the message as it is now in docs/troubleshooting.md"


@pytest.mark.parametrize("page", PICTURES)
def test_pictures_of_tutorials_are_written_and_shown(page):
    content = text(f"tutorials/{page}.md")
    for written, name in PICTURES[page].items():
        assert f'"{written}"' in content and f"](../images/{name})" in content


CHECK = DOCS / "site/check_links.py"
SOUND = '<h1 id="top-of-b">B</h1><a href="a.html#here">a</a><a href="https://example.org">out</a>'


@pytest.mark.parametrize(
    ("page", "style", "fault"),
    [
        (SOUND, "", None),
        ('<a href="c.html">c</a>', "", "b.html: no such file: c.html"),
        ('<a href="a.html#there">a</a>', "", "b.html: no such anchor: a.html#there"),
        ('<a href="#nowhere">b</a>', "", "b.html: no such anchor: #nowhere"),
        ('<a href="../../x.html">x</a>', "", "b.html: no such file: ../../x.html"),
        (
            '<script src="https://cdn.org/x.js">',
            "",
            "b.html: <script> requests https://cdn.org/x.js",
        ),
        ('<img src="//cdn.org/x.png">', "", "b.html: <img> requests //cdn.org/x.png"),
        (SOUND, "a { background: url(https://cdn.org/f.woff) }", "requests https://cdn.org/f.woff"),
    ],
)
def test_check_of_links(tmp_path, page, style, fault):
    (tmp_path / "a.html").write_text('<p id="here">A</p>')
    (tmp_path / "b.html").write_text(page)
    (tmp_path / "site.css").write_text(style)
    done = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True)
    assert done.returncode == (0 if fault is None else 1), done.stderr
    assert (fault or "2 pages: all internal links and anchors exist") in done.stdout


def test_check_of_links_rejects_an_empty_folder(tmp_path):
    done = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and "holds no page: build the site first" in done.stdout
