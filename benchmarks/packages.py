"""Builds the wheel and the sdist, checks them, and tries the wheel in empty environments.

`scripts/package` runs it. Each version of Python at hand gets an environment for each extra that is
a backend, and one without a backend. In it `treadle run digits` runs from another folder.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from treadle.core.installation import describe

from . import DOCS, ROOT, keep, kept, parser_of, write_section

VERSIONS = ("3.11", "3.12", "3.13")
NO_BACKEND = "none"
EXTRAS = ("tensorflow", "jax", "torch", NO_BACKEND)
LEARNED = 0.8  # validation accuracy of digits after its epochs; 0.1 is by chance
SETTINGS = ("KERAS", "TREADLE", "PYTHON", "XLA", "TF_", "VIRTUAL_ENV")


class Failed(Exception):
    """A check of a package failed; the text says which, and what was found."""


def main(arguments: list[str]) -> None:
    """Build, check and try the packages."""
    parser = parser_of("packages", __doc__, page="packages.md", backends=False)
    parser.prog = "scripts/package"
    parser.add_argument("--build-only", action="store_true", help="do not install the wheel")
    parser.add_argument("--python", choices=VERSIONS, action="append", help="only this version")
    parser.add_argument("--extra", choices=EXTRAS, action="append", help="only this extra")
    chosen = parser.parse_args(arguments)
    try:
        wheel, sdist = build()
        check(wheel, sdist)
        if not chosen.build_only:
            rows = list(tried(wheel, chosen.python or VERSIONS, chosen.extra or EXTRAS))
            if chosen.write:
                write(rows)
    except Failed as error:
        sys.exit(f"scripts/package: {error}")


def build() -> tuple[Path, Path]:
    """Build both packages into dist/, the wheel from the sdist; return their paths."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    _run([sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)])
    wheels, sdists = list(dist.glob("*.whl")), list(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        raise Failed(f"expected one wheel and one sdist in {dist}, found {len(wheels + sdists)}")
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, (*wheels, *sdists))])
    return wheels[0], sdists[0]


def check(wheel: Path, sdist: Path) -> None:
    """Check what lies in the packages, and print their sizes.

    Raises:
        Failed: With all faults.
    """
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        version = email.message_from_bytes(opened.read(about))["Version"]
    with tarfile.open(sdist) as opened_sdist:
        inside = [name.partition("/")[2] for name in opened_sdist.getnames()]
    faults = [*faults_of_wheel(names, _sources()), *faults_of_sdist(inside)]
    if version != declared_version():
        faults.append(f"the wheel has version {version}, __version__ is {declared_version()}")
    if faults:
        raise Failed("\n  ".join((f"{len(faults)} faults in the packages:", *faults)))
    for path, count in ((wheel, len(names)), (sdist, len(inside))):
        print(f"{path.name}: {count} files, {path.stat().st_size / 2**20:.1f} MiB", flush=True)


def declared_version() -> str:
    """Return `treadle.__version__`, without importing it."""
    lines = (ROOT / "src/treadle/__init__.py").read_text().splitlines()
    return next(line for line in lines if line.startswith("__version__")).split('"')[1]


def _sources() -> set[str]:
    """Return the files of `src/`, except caches."""
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file())
    return {f.relative_to(ROOT / "src").as_posix() for f in files if "__pycache__" not in f.parts}


def faults_of_wheel(names: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Return what is wrong with the names of the files in a wheel.

    Args:
        names: The names in the wheel.
        sources: The names of the files of the package.
    """
    found = set(names)
    own = {name for name in found if ".dist-info/" not in name}
    faults = [f"the wheel lacks {name}" for name in sorted(set(sources) - own)]
    faults += [f"the wheel holds {name}, no file of src/" for name in sorted(own - set(sources))]
    faults += [f"the wheel holds a test: {name}" for name in sorted(own) if _is_test(name)]
    ends = ("treadle/py.typed", "licenses/LICENSE", "licenses/NOTICE", "entry_points.txt")
    faults += [f"the wheel lacks {end}" for end in ends if not any(x.endswith(end) for x in found)]
    return faults


def _is_test(name: str) -> bool:
    path = PurePosixPath(name)
    return "tests" in path.parts or path.name.startswith(("test_", "conftest"))


def faults_of_sdist(names: Iterable[str]) -> list[str]:
    """Return what is wrong with the names of the files in an sdist, without its top folder."""
    found = set(names)
    needed = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE", "PKG-INFO")
    needed += ("constraints.txt", "docs/package-page.md", "src/treadle/py.typed", "scripts/test")
    faults = [f"the sdist lacks {name}" for name in needed if name not in found]
    unwanted = ("build", "dist", "runs")
    for name in sorted(found):
        parts = PurePosixPath(name).parts
        if parts and (
            parts[0] in unwanted or parts[0].startswith(".venv") or "__pycache__" in parts
        ):
            faults.append(f"the sdist holds {name}")
    return faults


def tried(
    wheel: Path, versions: Iterable[str], extras: Iterable[str]
) -> Iterator[Mapping[str, Any]]:
    """Install and run the wheel with each extra on each version of Python; yield a row for each."""
    extras = list(extras)
    for version in versions:
        python = find_python(version)
        if python is None:
            print(f"Python {version}: not at hand", flush=True)
            continue
        for extra in extras:
            row = {"python": version, "extra": extra, **try_wheel(wheel, python, extra)}
            print(line_of(row), flush=True)
            yield row


def find_python(version: str) -> str | None:
    """Return an interpreter of a version of Python: on the path, or of pyenv; None without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for candidate in (sys.executable, f"python{version}", *map(str, installed)):
        code = "import sys, venv, ensurepip; print('{}.{}'.format(*sys.version_info))"
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def try_wheel(wheel: Path, python: str, extra: str) -> dict[str, Any]:
    """Install a wheel with an extra in an empty environment, and train with it.

    Raises:
        Failed: The installation or a command does something else than expected.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([python, "-m", "venv", str(folder / "env")])
        target = str(wheel) if extra == NO_BACKEND else f"{wheel}[{extra}]"
        install = [str(folder / "env/bin/python"), "-m", "pip", "install", "--quiet"]
        install += ["--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), target]
        seconds, _ = _timed(install)
        size = sum(f.lstat().st_size for f in (folder / "env").rglob("*") if f.is_file()) / 2**20
        found = {"install": round(seconds, 1), "size": round(size)}
        return {**found, **_commands(folder, extra)}


def _commands(folder: Path, extra: str) -> dict[str, Any]:
    """Run the commands of an environment in another folder, and check what they print."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    # As at the first start of a new user: no configuration, no compiled programs.
    environment |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    environment["PATH"] = f"{folder / 'env/bin'}{os.pathsep}{environment['PATH']}"
    (folder / "elsewhere").mkdir()

    def treadle(*arguments: str, code: int = 0) -> tuple[float, Any]:
        command = [str(folder / "env/bin/treadle"), *arguments]
        return _timed(command, cwd=folder / "elsewhere", env=environment, code=code)

    version = declared_version()
    _, printed = treadle("--version")
    if not printed.stdout.startswith(f"treadle {version} (keras "):
        raise Failed(f"treadle --version printed {printed.stdout!r}, expected {version}")
    _, printed = treadle("env", "--json")
    backends = {name for name, found in json.loads(printed.stdout)["backends"].items() if found}
    if backends != {extra} - {NO_BACKEND}:
        raise Failed(f"extra {extra}: treadle env lists the backends {sorted(backends)}")
    if extra == NO_BACKEND:
        _, printed = treadle("run", "digits", code=2)
        if (
            "no backend is installed: pip install jax, or tensorflow, or torch"
            not in printed.stderr
        ):
            raise Failed(f"without a backend, treadle run printed {printed.stderr!r}")
        return {"first": None, "second": None, "accuracy": None}
    first, printed = treadle("run", "digits", "--json")
    outcome = json.loads(printed.stdout)
    accuracy = outcome["last"]["val_accuracy"]
    if outcome["backend"] != extra or accuracy < LEARNED:
        raise Failed(f"extra {extra}: the run on {outcome['backend']} reached {accuracy}")
    second, _ = treadle("run", "digits", "--json")
    return {"first": round(first, 1), "second": round(second, 1), "accuracy": accuracy}


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row as a line of the page's table."""
    if row["first"] is None:
        return (
            f"| {row['python']} | {row['extra']} | {row['install']} | {row['size']} | "
            "names the backends | | |"
        )
    return (
        f"| {row['python']} | {row['extra']} | {row['install']} | {row['size']:,} | "
        f"{row['first']} | {row['second']} | {row['accuracy']:.3f} |"
    )


def write(rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to those measured before, and write the page."""
    results = kept("packages")
    results |= {f"{row['python']} {row['extra']}": dict(row) for row in rows}
    order = [f"{version} {extra}" for version in VERSIONS for extra in EXTRAS]
    facts = describe()
    about = {**facts["machine"], "system": facts["platform"].partition("-")[0]}
    keep("packages", {"machine": about} | {key: results[key] for key in order if key in results})
    write_section(DOCS / "packages.md", "package --write", page(kept("packages")))


def page(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of the section of `docs/packages.md`."""
    about = results["machine"]
    return [
        f"{about['processor']}, {about['cores']} cores, {about['memory_gib']:.0f} GiB, "
        f"{about['system']}; the versions in `constraints.txt`.",
        "",
        "| Python | extra | `pip install`, s | size, MiB | first run, s | second run, s "
        "| val_accuracy |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(line_of(row) for key, row in results.items() if key != "machine"),
    ]


def _run(command: list[str]) -> None:
    _timed(command)


def _timed(
    command: list[str], code: int = 0, **options: Any
) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a command; return its seconds and what it printed."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, **options)
    seconds = time.perf_counter() - start
    if done.returncode != code:
        raise Failed(
            f"{' '.join(command)} ended with {done.returncode}, expected {code}:\n"
            f"{done.stdout}\n{done.stderr}"
        )
    return seconds, done


if __name__ == "__main__":
    main(sys.argv[1:])
