"""Benchmarks, which `scripts/bench` runs by name, and what they share: options, results, pages."""

import argparse
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any

BACKENDS = ("tensorflow", "jax", "torch")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = Path(__file__).with_name("results")
END = "<!-- end -->\n"


def parser_of(
    name: str,
    description: str | None,
    rounds: int | None = None,
    page: str = "",
    backends: bool = True,
) -> ArgumentParser:
    """Return the parser of a benchmark's options, with those that most benchmarks have.

    Args:
        name: The benchmark.
        description: A docstring, which `--help` shows line by line.
        rounds: The turns of each contestant, if `--rounds` sets them.
        page: The page in `docs/` that `--write` writes, if any.
        backends: Whether `--backend` chooses among backends.
    """
    parser = ArgumentParser(
        prog=f"scripts/bench {name}",
        description=cleandoc(description or ""),
        formatter_class=RawDescriptionHelpFormatter,
    )
    if backends:
        told = "only this backend"
        parser.add_argument("--backend", choices=BACKENDS, action="append", help=told)
    if rounds is not None:
        told = f"turns of each contestant ({rounds})"
        parser.add_argument("--rounds", type=int, default=rounds, help=told)
    if page:
        told = f"keep results, and write docs/{page}"
        parser.add_argument("--write", action="store_true", help=told)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def environment_of(backend: str) -> dict[str, str]:
    """Return the environment of a process on a backend."""
    return {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}


def in_process(name: str, backend: str, *options: str, **environment: str) -> Any:
    """Run `scripts/bench NAME --child OPTIONS` in a process; return the JSON of its last line.

    A backend is fixed when Keras is imported, so each needs a process.
    """
    command = [sys.executable, "-m", "benchmarks", name, "--child", *options]
    variables = environment_of(backend) | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        told = f"{done.stdout}{done.stderr[-3000:]}"
        sys.exit(f"{name} {' '.join(options)} on {backend} failed:\n{told}")
    return json.loads(done.stdout.splitlines()[-1])


def kept(name: str) -> dict[str, Any]:
    """Return the results that a benchmark has kept, by case."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(name: str, results: Mapping[str, Any]) -> None:
    """Keep the results of a benchmark: a line for each case, numbers with eight digits."""
    lines = [
        f"{json.dumps(case)}: {json.dumps(_rounded(result), ensure_ascii=False)}"
        for case, result in results.items()
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def write_section(page: Path, command: str, lines: Iterable[str]) -> None:
    """Replace what a command has written into a page; the rest of the page is written by hand."""
    begin = f"<!-- scripts/{command} -->\n"
    before, found, rest = page.read_text().partition(begin)
    if not found:
        raise ValueError(f"{page} has no line {begin.strip()}, behind which the figures belong")
    body = "\n".join(lines).strip("\n")
    page.write_text(f"{before}{begin}\n{body}\n\n{END}{rest.partition(END)[2]}")
