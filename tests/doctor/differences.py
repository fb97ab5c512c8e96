"""How often a difference of sheets names the culprit: `python -m tests.doctor.differences`.

Each program has a wrong and a sound form. The culprits are what its author changed: arrays, layers,
variables, optimizers or terms, up to three, the main one first. A pair counts if a culprit is the
subject of one of the first three lines of the difference, of which there are at most eight.
"""

from collections.abc import Sequence
from typing import Any

import treadle
from tests.doctor.doctor_foreign_programs import PAIRS as FOREIGN
from tests.doctor.doctor_programs import Program
from treadle.doctor import Difference

FIRST = 3


def sheet_of(program: Program, wrong: bool) -> Any:
    """Return the sheet of one form of a program."""
    return treadle.doctor.inspect(*program(wrong))


def named(found: Sequence[Difference], culprits: Sequence[str]) -> bool:
    """Return whether a culprit, or what it contains, is a subject of the first three lines."""
    subjects = [difference.subject for difference in found[:FIRST]]
    return any(
        subject == culprit or subject.startswith((f"{culprit}/", f"{culprit} "))
        for subject in subjects
        for culprit in culprits
    )


def main() -> None:
    """Print the pairs whose culprit is not named, and the share of the others."""
    hits = main_ones = 0
    for program, culprits in FOREIGN:
        found = sheet_of(program, False).diff(sheet_of(program, True))
        main_ones += named(found, culprits[:1])
        if named(found, culprits):
            hits += 1
            continue
        print(f"{program.__name__}: {', '.join(culprits)}")
        print(*(f"    {line}" for line in found), sep="\n", flush=True)
    print(f"{hits} of {len(FOREIGN)} pairs ({100 * hits / len(FOREIGN):.0f} %)")
    print(f"{main_ones} by the first of the author's names")


if __name__ == "__main__":
    main()
