"""Compares the list of slow tests with a measured run: `scripts/slow-tests FILE`."""

import argparse
import re
import sys
from pathlib import Path

from tests import selection

RUN = re.compile(r"== (\w+)[-\w]*: ")
DURATION = re.compile(r"([\d.]+)s (?:setup|call|teardown) +(tests/.*)")


def measured(text: str) -> dict[tuple[str, str], float]:
    """Return the seconds of each test in the output of `scripts/test --all`."""
    found: dict[tuple[str, str], float] = {}
    backend = ""
    for line in text.splitlines():
        if run := RUN.match(line):
            backend = "torch" if run[1] == "general" else run[1]
        elif backend and (duration := DURATION.fullmatch(line)):
            key = backend, duration[2]
            found[key] = found.get(key, 0) + float(duration[1])
    return found


def differences(
    seconds: dict[tuple[str, str], float], listed: dict[tuple[str, str], float]
) -> list[str]:
    """Return a line for each test that is slow and not listed, or listed and not slow."""
    lines = [
        f"{value:.1f} s, not listed: {backend} {test}"
        for (backend, test), value in sorted(seconds.items())
        if value >= selection.SECONDS and (backend, test) not in listed
    ]
    return lines + [
        f"listed, below {selection.SECONDS:g} s or gone: {backend} {test}"
        for backend, test in sorted({*listed} - {*seconds})
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/slow-tests", description=__doc__)
    parser.add_argument("file", type=Path, help="the output of scripts/test --all, or without it")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="replace the list: FILE is of --all")
    how.add_argument("--add", action="store_true", help="add the slow tests of FILE to the list")
    asked = parser.parse_args()
    seconds = measured(asked.file.read_text())
    seconds = {key: value for key, value in seconds.items() if value >= selection.SECONDS}
    if not seconds:
        print(f"error: {asked.file} names no test of 1 s or more; see --help", file=sys.stderr)
        return 2
    listed = selection.slow()
    if asked.add:
        seconds = {**listed, **seconds}
    if missing := {of for of, _ in listed} - {of for of, _ in seconds}:
        print(f"error: {asked.file} has no durations of {', '.join(missing)}", file=sys.stderr)
        return 2
    lines = differences(seconds, listed)
    print("\n".join(lines) or "The list is that of the run.")
    if asked.write or asked.add:
        head = [x for x in selection.SLOW.read_text().splitlines() if x.startswith("#")]
        rows = [f"{of}\t{value:.1f}\t{test}" for (of, test), value in sorted(seconds.items())]
        selection.SLOW.write_text("\n".join([*head, *rows]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
