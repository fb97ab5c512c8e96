"""Every example in README.md and docs/ runs, and prints what the page says that it prints.

The Python blocks of a page are one script, run in a folder of its own on the active backend, by a
process of its own, a fork that need not import Keras again. The words behind the language of a
fence say more:

- `python tensorflow`, `python torch`: only on that backend, on which the page runs as well; if it
  is the first Python block of a page, the whole page runs on that backend only;
- `python torch lightning`: only where this package is installed, which `scripts/test` does not do;
- `python my_task.py`: written to this file as well;
- `sh run`: run after the script, in its folder; other `sh` blocks are checked for commands and
  options that do not exist;
- `text` behind a block that runs: exactly what it prints; `text varies`: what it prints, other
  numbers and lines between apart.
"""

import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import pytest
import typer
from typer.testing import CliRunner

from tests.forked import python
from tests.waiting import WATCHDOG
from tests.xla import less_optimized
from treadle.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
FIRST_PAGES = ("README.md", "docs/start/program.md")
BACKENDS = ("tensorflow", "jax", "torch")
# Libraries that pages compare with: their blocks run where they are installed.
COMPARED = ("accelerate", "lightning", "orbit")
WARNINGS = (
    "error",
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
)
ERRORS = [part for warning in WARNINGS for part in ("-W", warning)]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The page's path.
        line: The number of its first line, from 1.
        info: The words behind the fence: its language and what the top of this file lists.
        lines: What it holds.
    """

    page: str
    line: int
    info: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def backend(self) -> str | None:
        return next((word for word in self.info if word in BACKENDS), None)

    @property
    def compared(self) -> tuple[str, ...]:
        return tuple(word for word in self.info if word in COMPARED)

    @property
    def file(self) -> str | None:
        return next((word for word in self.info if word.endswith(".py")), None)

    @property
    def runs_on(self) -> str | None:
        """The backend on which it runs; None if it does not run."""
        runnable = self.language == "python" or self.info == ("sh", "run")
        if not runnable or not all(find_spec(name) is not None for name in self.compared):
            return None
        backend = self.backend or backend_of(self.page)
        return backend if backend in backends_of(self.page) else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Read the fenced blocks of a page."""
    found: list[Block] = []
    info: tuple[str, ...] | None = None
    inside: list[str] = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1):
        if not line.startswith("```"):
            inside.append(line)
        elif info is None:
            info, inside = tuple(line.removeprefix("```").split()), []
        else:
            found.append(Block(page, number - len(inside), info, tuple(inside)))
            info = None
    assert info is None, f"{page}: the last fence is not closed"
    return tuple(found)


def backend_of(page: str) -> str:
    """Return the backend that a page runs on."""
    first = next((block for block in blocks(page) if block.language == "python"), None)
    return (first and first.backend) or keras.config.backend()


@cache
def backends_of(page: str) -> list[str]:
    """Return the backends that a page runs on: of a page for one backend, only that one."""
    named = [block.backend for block in blocks(page) if block.language == "python"]
    others = [] if named and named[0] else [backend for backend in named if backend]
    return list(dict.fromkeys([backend_of(page), *others]))


ALL = [block for page in PAGES for block in blocks(page)]


def of(page: str, *values: Any) -> Any:
    """A parameter set of a test that runs a page: only the first pages do without `--all`."""
    marks = () if page in FIRST_PAGES else (pytest.mark.long,)
    return pytest.param(*values, marks=marks, id=str(values[0]))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Printed"]:
    """What the blocks of each page that ran have printed; filled by the first test of a page."""
    yield Printed(tmp_path_factory)


class Printed(dict[str, dict[Block, str]]):
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, page: str) -> dict[Block, str]:
        found = self[page] = {}
        for backend in backends_of(page):
            others = run_page(page, backend, self._folders.mktemp("page"))
            found |= {b: text for b, text in others.items() if b.runs_on == backend}
        return found


def run_page(page: str, backend: str, folder: Path) -> dict[Block, str]:
    """Run a page on a backend; returns what each of its blocks printed."""
    in_page = [block for block in blocks(page) if block.backend in (None, backend)]
    in_page = [block for block in in_page if block.runs_on]
    scripts = [block for block in in_page if block.language == "python"]
    # Each line stands where it stands in the page, so that tracebacks name the page's lines.
    lines = [""] * len((ROOT / page).read_text().splitlines())
    for block in scripts:
        lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
        lines[block.line - 1 + len(block.lines)] = f'print("{end_of(block)}")'
        if block.file:
            (folder / block.file).write_text("\n".join(block.lines) + "\n")
    script = folder / f"{Path(page).stem.replace('-', '_')}_page.py"
    script.write_text("\n".join(lines) + "\n")
    # Other libraries warn of things that are theirs.
    errors = [] if any(block.compared for block in scripts) else ERRORS
    rest = process(["python", *errors, script.name], folder, backend)
    found: dict[Block, str] = {}
    for block in scripts:
        found[block], _, rest = rest.partition(end_of(block) + "\n")
    for block in in_page:
        if block.language == "sh" and backend == backend_of(page):
            command = ["bash", "-e", "-c", "\n".join(block.lines)]
            found[block] = process(command, folder, backend)
    return found


def end_of(block: Block) -> str:
    return f"-- end of {block}"


def process(command: list[str], folder: Path, backend: str) -> str:
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "PATH": os.pathsep.join([str(Path(python()).parent), os.environ["PATH"]]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",  # PyTorch's threads wait for one another on busy cores
        # Keras imports it where a page saves a model or sets a seed, in 5 processor seconds.
        "FORKED_IMPORTS": "tensorflow",
        **less_optimized(),  # pages run few steps: compiling them took most of the time
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WATCHDOG
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.replace(str(folder), "/home/ada")  # where pages run, in their texts


@pytest.mark.parametrize("page", [of(p, p) for p in PAGES if any(b.runs_on for b in blocks(p))])
def test_page_runs(page: str, printed: Printed) -> None:
    assert printed[page]


@pytest.mark.parametrize("block", [of(b.page, b) for b in ALL if b.backend])
def test_block_for_one_backend_runs(block: Block, printed: Printed) -> None:
    if not block.runs_on:
        pytest.skip(f"the example needs {' '.join(block.info[1:])}")
    assert block in printed[block.page]


OUTPUTS = [
    (block, output)
    for block, output in itertools.pairwise(ALL)
    if (
        output.language == "text" and block.language in ("python", "sh") and "run" in block.info[:2]
    )
    or (output.language == "text" and block.language == "python")
]


@pytest.mark.parametrize(("block", "output"), [of(b.page, b, output) for b, output in OUTPUTS])
def test_block_prints_what_the_page_says(block: Block, output: Block, printed: Printed) -> None:
    if not block.runs_on:
        pytest.skip(f"the example needs {' '.join(block.info[1:])}")
    found = printed[block.page][block].splitlines()
    expected = list(output.lines)
    if "varies" not in output.info:
        assert found == expected
        return
    # Each backend describes its plan in its own words: the page shows those of one.
    if not block.backend:
        expected = [line for line in expected if not line.startswith("plan: ")]
    expected = [without_numbers(line) for line in expected]
    following = iter([without_numbers(line) for line in found])
    missing = [line for line in expected if line not in following]
    assert not missing, "\n".join(found)


def without_numbers(line: str) -> str:
    # Other costs are printed if they are long enough, as on a busy machine.
    line = re.sub(r"^(finished: .* s) \(.*\)$", r"\1", line)
    return re.sub(r"\d[\d,.]*(e[-+]\d+)?", "N", line).rstrip()


def commands() -> Iterator[tuple[str, str]]:
    """Yield every command of the shell blocks, and where it stands."""
    for block in ALL:
        if block.language == "sh":
            text = "\n".join(block.lines).replace("\\\n", " ")
            for line in text.splitlines():
                command = re.sub(r"^(\w+=\S* )+", "", line.partition("  #")[0].strip())
                if command and not command.startswith("#"):
                    yield command, str(block)


@pytest.mark.parametrize("command", [pytest.param(c, id=f"{at} {c}") for c, at in commands()])
def test_command_exists(command: str) -> None:
    program, *arguments = command.split()
    if program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK)
    elif program == "treadle":
        inner = [word for word in arguments[:1] if not word.startswith("-")]
        asked = CliRunner().invoke(app, [*inner, "--help"], env={"COLUMNS": "200"})
        assert asked.exit_code == 0, asked.output
        options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert {option for option in options if option not in asked.output} == set()
    else:
        assert program in ("pip", "python", "cat", "ls", "cd", "git", "export"), "what is this?"


def test_every_option_of_run_is_on_the_page() -> None:
    page = (ROOT / "docs/runs.md").read_text()
    table = page.partition("Options of `treadle run`:")[2].partition("Exit codes")[0]
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = {name for option in run.params for name in option.opts if name.startswith("--")}
    assert {name for name in options if f"`{name}" not in table} == set()


def links() -> Iterator[tuple[str, str]]:
    """Yield every relative link of the pages."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
            if "://" not in target:
                yield page, target


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_link_leads_somewhere(page: str, target: str) -> None:
    path, _, heading = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists()
    if heading:
        titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
        assert heading in [slug(title) for title in titles]


def slug(title: str) -> str:
    """Return the anchor of a heading, as web sites that show Markdown make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


BEFORE_DIFFS = """
import keras, numpy as np, tensorflow as tf, treadle
treadle.setup(seed=0)
x, y = np.ones((128, 3), "float32"), np.ones((128, 1), "float32")
train = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
model, callbacks = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), []
optimizer, loss_of = keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError()
model.compile("sgd", "mse")
"""


DIFFS = [block for block in blocks("README.md") if block.language == "diff"]


@pytest.mark.long  # each is a process that imports TensorFlow
@pytest.mark.parametrize("side", "-+")
@pytest.mark.parametrize("block", DIFFS)
def test_both_sides_of_a_diff_run(block: Block, side: str, tmp_path: Path) -> None:
    lines = [line[1:] for line in block.lines if line[:1] in (" ", side, "")]
    (tmp_path / "side.py").write_text("\n".join([BEFORE_DIFFS, *lines]))
    process(["python", "side.py"], tmp_path, "tensorflow")
