"""One seed from beginning to end: its program, its checks, and the report of a failure."""

import textwrap
import traceback
from typing import Any

from .checks import CHECKS, Difference, check, script
from .program import Program, shown
from .search import program_of, shrunk

LONGEST = 1500  # characters of a message


def examined(
    number: int, features: frozenset[str], short: bool = False, shrink: bool = True
) -> dict[str, Any]:
    """Run a seed's program; return what came of it, as JSON has it.

    Args:
        number: The seed.
        features: What the grammar may use.
        short: A smaller program and two of the four checks. The run that goes on after a kill does
            so in other windows, so that it is held against those as well.
        shrink: Look for a smaller program that fails in the same way.
    """
    program = program_of(number, features, short)
    checks = ("hand", ("eager", "resumed")[number % 2]) if short else CHECKS
    try:
        return {"seed": number, "result": "agree", "plan": check(program, checks)}
    except Difference as difference:
        failed = difference
    except Exception as error:  # of the grammar, the hand-written loop, the comparison
        return told(number, "invalid", "".join(traceback.format_exception(error)), program, "")
    if shrink:
        kind, only = failed.check, needed(failed.check)

        def fails(program: Program) -> Difference | None:
            try:
                check(program, only)
            except Difference as difference:
                return difference if alike(failed, difference) else None
            except Exception:
                return None
            return None

        if fails(program) is not None:
            program, failed = shrunk(number, features, short, fails)
        assert failed.check == kind
    message = str(failed)
    if failed.__cause__ is not None:
        message += "\n" + "".join(traceback.format_exception(failed.__cause__))[-3000:]
    return told(number, failed.check, message, program, script(program, failed.check))


def needed(failed: str) -> tuple[str, ...]:
    """Return the checks that show a difference again."""
    return (failed,) if failed in CHECKS else ()


def alike(one: Difference, other: Difference) -> bool:
    """Say whether two differences are probably one: of the same check, both errors or neither."""
    errors = [type(difference.__cause__) for difference in (one, other)]
    return one.check == other.check and errors[0] is errors[1]


def told(number: int, result: str, message: str, program: Program, text: str) -> dict[str, Any]:
    head = (
        f"# {result}, seed {number}\n{textwrap.indent(message[:LONGEST], '# ')}\n" if text else ""
    )
    return {
        "seed": number,
        "result": result,
        "message": message[-LONGEST * 3 :],
        "program": shown(program),
        "script": head + text,
    }
