"""Which tests are too slow for the default run: those of 1 s or more, but for a few.

`slow.tsv` is measured. The marker `long` is for tests that repeat what a faster one guards.
`kept.txt` is chosen by hand: tests that run by default all the same, since no faster one guards
what they do.
"""

from pathlib import Path

SLOW = Path(__file__).with_name("slow.tsv")
KEPT = Path(__file__).with_name("kept.txt")
MOST_KEPT = 120
SECONDS = 1.0


def slow() -> dict[tuple[str, str], float]:
    """Return the seconds of each slow test by its backend and name."""
    found: dict[tuple[str, str], float] = {}
    for line in SLOW.read_text().splitlines():
        if not line.startswith("#"):
            backend, seconds, test = line.split("\t")
            found[backend, test] = float(seconds)
    return found


def kept() -> list[tuple[str, str]]:
    """Return the backend and name of each slow or long test that runs by default."""
    lines = [line for line in KEPT.read_text().splitlines() if line and not line.startswith("#")]
    return [(backend, test) for backend, test in (line.split(" ", 1) for line in lines)]


def of(backend: str) -> tuple[set[str], set[str]]:
    """Return the names of the slow tests of a backend, and of those that run all the same."""
    return (
        {test for of, test in slow() if of == backend},
        {test for of, test in kept() if of == backend},
    )
