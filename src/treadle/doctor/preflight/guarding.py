"""Running one check so that an exception in it does not end the examination."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any, Final

from .report import Finding
from .trials import Trials

FOLDER: Final = str(Path(__file__).parent)
CODE_OF_A_CHECK: Final = re.compile(r"[A-Z]-[a-z-]+(, [A-Z]-[a-z-]+)*")


def guarded(trials: Trials, check: Callable[..., Iterable[Finding]], *args: Any) -> list[Finding]:
    """Run a check, and list it in `trials.failed` if it raises an exception.

    Args:
        trials: The trials.
        check: The check.
        args: Its arguments.

    Returns:
        Its findings, in case of an exception those before it.
    """
    found: list[Finding] = []
    try:
        found.extend(check(*args))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        codes = ", ".join(sorted(_codes(check.__code__))) or _name(check)
        if error is trials.raised:
            trials.failed[codes] = f"the changed step ends with {text}"
        else:
            trials.failed[codes] = f"this check could not run: {text} ({_line(error)})"
    return found


def _name(check: Callable[..., Any]) -> str:
    module = check.__module__.rpartition("checks_")[2]
    name = check.__name__.strip("_")
    return module if name == "check" else f"{module}: {name}"


def _codes(code: CodeType) -> set[str]:
    """Return the codes of findings that a function names."""
    found = {x for x in code.co_consts if isinstance(x, str) and CODE_OF_A_CHECK.fullmatch(x)}
    nested = [x for x in code.co_consts if isinstance(x, CodeType)]
    return found.union(*(_codes(part) for part in nested))


def _line(error: Exception) -> str:
    """Return the last line of the doctor that an exception passed through, as `file.py:12`."""
    line, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(FOLDER) and not file.endswith("guarding.py"):
            line = f"{Path(file).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
