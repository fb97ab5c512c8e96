"""How often `sheet.diff` of a pair of the catalogue names the culprit: `python -m …differences`.

Each program of the catalogue has a wrong and a sound form. The culprit is what its author changed,
as `culprits.py` names it. A pair counts if the culprit is the subject of one of the first three
lines of the difference, of which there are at most eight.

With `--foreign`, the pairs are those of an author who had seen neither the doctor nor its tests,
and who named up to three culprits for each, the main one first.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import treadle
from tests.doctor import (
    doctor_advanced_programs,  # noqa: F401  # these add to PAIRS
    doctor_further_programs,  # noqa: F401
    doctor_label_programs,  # noqa: F401
    doctor_other_programs,  # noqa: F401
    doctor_supervised_programs,  # noqa: F401
    doctor_term_programs,  # noqa: F401
)
from tests.doctor.culprits import CULPRITS
from tests.doctor.doctor_programs import PAIRS, Pair, Program
from treadle.doctor import Difference

FIRST = 3


def sheet_of(pair: Pair, wrong: bool) -> Any:
    """Return the sheet of one form of a pair."""
    return treadle.doctor.inspect(*pair.program(wrong))


def named(found: Sequence[Difference], culprits: Sequence[str]) -> bool:
    """Return whether a culprit, or what it contains, is a subject of the first three lines."""
    subjects = [difference.subject for difference in found[:FIRST]]
    return any(
        subject == culprit or subject.startswith((f"{culprit}/", f"{culprit} "))
        for subject in subjects
        for culprit in culprits
    )


def difference(pair: Pair) -> list[Difference]:
    """Return what the sheet of the wrong form shows differently."""
    return sheet_of(pair, False).diff(sheet_of(pair, True))


def main() -> None:
    """Print the pairs whose culprit is not named, and the share of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--foreign", action="store_true")
    pairs = [(pair, CULPRITS[pair.program.__name__]) for pair in PAIRS]
    if parser.parse_args().foreign:
        pairs = [(Pair("foreign", program), names) for program, names in foreign()]
    hits = main_ones = 0
    for pair, culprits in pairs:
        found = difference(pair)
        main_ones += named(found, culprits[:1])
        if named(found, culprits):
            hits += 1
            continue
        print(f"{pair.name}: {', '.join(culprits)}")
        print(*(f"    {line}" for line in found), sep="\n", flush=True)
    print(f"{hits} of {len(pairs)} pairs ({100 * hits / len(pairs):.0f} %)")
    print(f"{main_ones} by the first of the author's names")


def foreign() -> Iterable[tuple[Program, tuple[str, ...]]]:
    """Return the programs of the other author, with their culprits."""
    from tests.doctor.doctor_foreign_programs import PAIRS as found

    return found


if __name__ == "__main__":
    main()
