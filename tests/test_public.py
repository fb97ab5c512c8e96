"""The public names, what importing them costs, and the errors."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import treadle
from treadle import errors
from treadle.core.progress import Progress
from treadle.core.tracebacks import add_note, noting
from treadle.errors import TreadleError, did_you_mean

ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_what_trains_raises_no_warning() -> None:
    code = "import treadle; treadle.setup(backend='torch'); treadle.Loop; treadle.Supervised"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def public_names() -> list[str]:
    """The names that `treadle/__init__.py` declares to type checkers."""
    source = Path(treadle.__file__).read_text()
    declared = source[source.index("if TYPE_CHECKING") : source.index("__version__")]
    return re.findall(r"import (\w+) as \1", declared)


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("import treadle", {"numpy", "rich", "typer"}),
        ("import treadle as t; t.every('1 step', print), t.Options(), t.Hook()", set()),
        ("import treadle; treadle.Image, treadle.errors.TreadleError", set()),
        ("import treadle.data", {"grain"}),
        ("import treadle.hooks", {"rich", "matplotlib"}),
        ("from treadle import cli; from treadle.testing.certify import certificate", set()),
        *((f"from treadle.datasets import *; {x}()", set()) for x in ("digits", "wine", "alice")),
    ],
)
def test_no_framework_is_imported_where_it_is_not_needed(code: str, more: set[str]) -> None:
    heavy = {"keras", "tensorflow", "jax", "torch", *more}
    assert run(f"import sys; {code}; print({heavy} & {{*sys.modules}})") == "set()"


def test_every_public_name_resolves_and_is_listed() -> None:
    names = public_names()
    assert len(names) > 25
    for name in names:
        found = getattr(treadle, name)
        assert found.__doc__, name
        assert name in dir(treadle)
    assert sorted(names) == sorted([*treadle._MODULE_OF, *treadle._MODULES])


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'treadle' has no attribute 'Lopo'"):
        _ = treadle.Lopo


def test_errors_are_one_tree() -> None:
    kinds = [
        kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and name.endswith("Error") and kind.__module__ == errors.__name__
    ]
    assert len(kinds) > 8
    for kind in kinds:
        assert issubclass(kind, TreadleError)
        assert kind.__doc__


def test_did_you_mean() -> None:
    known = ["tensorflow", "jax", "torch"]
    assert did_you_mean("pytorch", known).startswith(" Did you mean 'torch'?")
    assert did_you_mean("xyz", known) == " Known: tensorflow, jax, torch."
    assert did_you_mean("xyz", []) == " Known: none."
    assert did_you_mean("jx", iter(known)).endswith("Known: tensorflow, jax, torch.")


def test_noting_says_where_once() -> None:
    with (
        pytest.raises(ValueError, match="broken") as caught,
        noting("outer", Progress(step=9)),
        noting("train_step", Progress(step=3, epoch=1, batch=2)),
    ):
        raise ValueError("broken")
    assert caught.value.__notes__ == [
        "in train_step, after step 3, epoch 2, batch 2; the weights are those of that step"
    ]
    with noting("nothing", Progress()):
        pass


@pytest.mark.parametrize(
    ("place", "note"),
    [
        ({}, "in it, after step 16 and 4 epochs; the weights are those of that step"),
        ({"running": 1}, "in it, step 17 (epoch 5, batch 1); the weights are those before it"),
        (
            {"running": 1, "lost": 1},
            "in it, step 17 (epoch 5, batch 1); the weights are those before or after it",
        ),
        (
            {"running": 8},
            "in it, steps 17 to 24 (epoch 5, batches 1 to 8); the weights are those before step 17",
        ),
        (
            {"running": 8, "lost": 8},
            "in it, steps 17 to 24 (epoch 5, batches 1 to 8); the weights are those before step 17 "
            "or of any step to 24",
        ),
    ],
)
def test_noting_counts_from_one(place: dict[str, int], note: str) -> None:
    error = ValueError()
    add_note(error, "it", Progress(step=16, epoch=4), **place)
    assert error.__notes__ == [note]


def test_noting_knows_the_start() -> None:
    with pytest.raises(ValueError) as caught, noting("it", Progress()):
        raise ValueError
    assert caught.value.__notes__ == [
        "in it, before the first step; the weights are those of the start"
    ]


def test_dir_is_what_all_says() -> None:
    shown = set(dir(treadle))
    assert set(treadle.__all__) <= shown
    assert {name for name in shown if not name.startswith("__")} == {
        name for name in treadle.__all__ if not name.startswith("__")
    }
    assert run("from treadle import errors, Options; import treadle; print(len(dir(treadle)) > 40)")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_page_has_no_relative_links() -> None:
    page = (ROOT / PROJECT["readme"]).read_text()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.parametrize("page", ["docs/start/installation.md", PROJECT["readme"]])
def test_every_extra_is_described(page: str) -> None:
    text = (ROOT / page).read_text()
    for extra in PROJECT["optional-dependencies"]:
        assert f"`{extra}`" in text or f"[{extra}]" in text, extra


def test_requirements_of_the_report_extra_are_imported() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for requirement in PROJECT["optional-dependencies"]["report"]:
        assert re.search(rf"\b{re.match('[a-z0-9]+', requirement)[0]}\b", sources)  # type: ignore
