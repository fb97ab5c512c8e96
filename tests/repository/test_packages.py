"""`scripts/package` and `scripts/release`: the faults that they find."""

import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks import DOCS, kept, packages
from treadle import __version__

ROOT = Path(__file__).parents[2]
SOURCES = {"treadle/__init__.py", "treadle/py.typed", "treadle/datasets/digits.npz"}
ABOUT = {
    f"treadle-0.1.0.dist-info/{name}"
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE")
}
SDIST = {
    *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE", "PKG-INFO"),
    *("constraints.txt", "docs/package-page.md", "src/treadle/py.typed", "scripts/test"),
}


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        (SOURCES | ABOUT, []),
        (SOURCES | ABOUT - {"treadle-0.1.0.dist-info/licenses/NOTICE"}, ["lacks licenses/NOTICE"]),
        (SOURCES - {"treadle/py.typed"} | ABOUT, ["lacks treadle/py.typed"] * 2),
        (SOURCES | ABOUT | {"treadle/x.pyc"}, ["holds treadle/x.pyc, no file of src/"]),
        (
            SOURCES | ABOUT | {"tests/data/a.npz"},
            ["holds tests/data/a.npz, no file of src/", "holds a test: tests/data/a.npz"],
        ),
    ],
)
def test_faults_of_a_wheel(names, faults):
    assert packages.faults_of_wheel(names, SOURCES) == [f"the wheel {fault}" for fault in faults]


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        (SDIST, []),
        (SDIST - {"LICENSE"}, ["lacks LICENSE"]),
        (SDIST | {".venv-demo/bin/python"}, ["holds .venv-demo/bin/python"]),
        (SDIST | {"src/treadle/__pycache__/a.pyc"}, ["holds src/treadle/__pycache__/a.pyc"]),
    ],
)
def test_faults_of_an_sdist(names, faults):
    assert packages.faults_of_sdist(names) == [f"the sdist {fault}" for fault in faults]


def test_all_faults_are_reported_together(tmp_path, monkeypatch):
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("treadle-9.dist-info/METADATA", "Name: treadle\nVersion: 9\n")
    with tarfile.open(sdist, "w:gz"):
        pass
    with pytest.raises(packages.Failed) as caught:
        packages.check(wheel, sdist)
    text = str(caught.value)
    assert "the wheel lacks treadle/py.typed" in text and "the sdist lacks README.md" in text
    assert f"the wheel has version 9, __version__ is {__version__}" in text


def test_a_failing_command_is_shown_with_its_output():
    with pytest.raises(packages.Failed, match=r"cat /none ended with 1, expected 0:[\s\S]*No such"):
        packages._timed(["cat", "/none"])


def test_declared_version():
    assert packages.declared_version() == __version__


def test_the_page_is_written_from_the_results():
    text = "\n".join(packages.page(kept("packages")))
    assert text in (DOCS / "packages.md").read_text()


@pytest.fixture
def release(tmp_path):
    """A function that runs a step of the checklist in a copy of the files that it reads."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src/treadle").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/release", tmp_path / "scripts/release")
    (tmp_path / "src/treadle/__init__.py").write_text('__version__ = "1.2.0"\n')

    def run(step, changelog="## [1.2.0] - 2026-01-31", citation='version: "1.2.0"'):
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}\n\n## [1.1.0]\n")
        released = 'date-released: "2026-01-31"'
        (tmp_path / "CITATION.cff").write_text(f"cff-version: 1.2.0\n{citation}\n{released}\n")
        command = [tmp_path / "scripts/release", step]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def test_release_says_what_is_left_if_its_steps_pass(release):
    done = release("version")
    assert done.returncode == 0, done.stdout
    assert re.search(r"passed  version +\d+ s", done.stdout)
    assert "Left to do by hand for Treadle 1.2.0, in this order:" in done.stdout
    assert "Project URLs" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"changelog": "## [1.2.0] - unreleased"},
            "the first section is '## [1.2.0] - unreleased', expected '## [1.2.0] - YYYY-MM-DD'",
        ),
        (
            {"changelog": "## [1x2.0] - 2026-01-31"},
            "the first section is '## [1x2.0] - 2026-01-31'",
        ),
        ({"citation": 'version: "1.1.0"'}, "CITATION.cff: the version is '1.1.0', expected 1.2.0"),
    ],
)
def test_release_rejects_versions_that_disagree(release, change, message):
    done = release("version", **change)
    assert done.returncode == 1
    assert message in done.stdout
    assert "FAILED  version" in done.stdout and "Treadle 1.2.0 is not ready" in done.stdout


def test_release_rejects_a_tree_with_changes(release, tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    done = release("tree")
    assert done.returncode == 1 and "commit or remove these files first:" in done.stdout
    assert "?? CHANGELOG.md" in done.stdout


def test_a_step_of_a_release_ends_at_the_first_command_that_fails(release):
    done = release("tree")  # in no repository: git fails
    assert done.returncode == 1 and "FAILED  tree" in done.stdout


def test_release_rejects_an_unknown_step(release):
    done = release("publish")
    assert done.returncode == 2
    assert "unknown step publish: expected tree version check test package docs" in done.stderr


def test_the_citation_names_the_version():
    assert f'\nversion: "{__version__}"\n' in (ROOT / "CITATION.cff").read_text()


def test_the_nightly_job_names_folders_and_extras_that_exist():
    text = (ROOT / ".github/workflows/nightly.yml").read_text()
    paths = re.findall(r"(?:--ignore=|(?<!-m) )(tests[/\w.]*)", text)
    assert len(paths) > 5 and all((ROOT / path).exists() for path in paths)
    extras = re.search(r"'\.\[\${{ matrix.backend }},([\w,]+)\]'", text)
    declared = (ROOT / "pyproject.toml").read_text()
    assert extras and all(f"\n{extra} = [" in declared for extra in extras[1].split(","))
