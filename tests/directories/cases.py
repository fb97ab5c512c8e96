"""One case: a run directory, a damage, a command, and what is wrong with what came of it."""

import re
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from treadle.checkpoint.format import DIGEST, MANIFEST, digest_line

from .bases import COMMANDS, KINDS, READING, Place, result, tree
from .damages import SECRET, drawn
from .running import MEMORY, Outcome, run

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
ENDED_WELL = (0, 1, 2, 3)


@dataclass
class Case:
    """What was done and what is wrong.

    Attributes:
        number: The number from which everything else is drawn.
        kind: The kind of run.
        command: The command.
        file: What was damaged.
        damage: How.
        faults: What is wrong, as short sentences.
        answer: "equal", "refused", or "forged": other results, from a forged manifest.
        message: What the command printed.
        seconds: How long it took.
    """

    number: int
    kind: str
    command: str
    file: str
    damage: str
    faults: list[str] = field(default_factory=list)
    answer: str = ""
    message: str = ""
    seconds: float = 0.0


class Cases:
    """Runs cases in one place, one after the other."""

    def __init__(self, place: Place, commands: tuple[str, ...] = COMMANDS) -> None:
        self._place = place
        place.make()
        self._expected: dict[tuple[str, str], Any] = {}
        available = _offered()
        self.commands = tuple(name for name in commands if name.split()[0] in available)
        for kind in KINDS:
            for command in self.commands:
                if (kind, command) == ("recipe", "evaluate"):
                    continue  # its task has no data to evaluate on
                place.restore(kind)
                out = run(place, place.command(command, kind))
                if out.code != 0 or (found := _faults_of_output(out, place)):
                    raise SystemExit(f"undamaged, {kind}, {command}: {out}\n{found}")
                self._expected[kind, command] = result(place, kind, command, out)
        whole = self._expected["finished", "run --fresh"]
        for pair in (("killed", "resume"), ("failed", "resume"), ("killed", "run")):
            if self._expected[pair] != whole:
                raise SystemExit(f"{pair}: {_difference(whole, self._expected[pair])}")

    def run(self, seed: int, number: int) -> Case:
        chance, place = Random(f"{seed} {number}"), self._place
        kind, command = chance.choice(list(self._expected))
        in_turn = None
        if number % 2:  # in each second case, one file of a finished run after the other
            kind, in_turn = "finished", number // 2
            command = chance.choice([of for with_kind, of in self._expected if with_kind == kind])
        place.restore(kind)
        file, name, damage = drawn(place.run, chance, in_turn)
        damage(place.run / file, chance, place.outside)
        case = Case(number, kind, command, file, name)
        forged = name == "content changed" and _is_forged(place.run / file)
        before = tree(place.outside)
        inside = tree(place.run) if command in READING else None
        out = run(place, place.command(command, kind))
        case.message, case.seconds = (out.stderr + out.stdout)[-3000:], out.seconds
        case.faults = _faults_of_output(out, place)
        changes = [name for name in _changes(before, tree(place.outside))]
        if changes:
            case.faults.append(f"changed outside: {', '.join(changes)}")
        if inside is not None and (changes := _changes(inside, tree(place.run))):
            case.faults.append(f"a reading command changed: {', '.join(changes)}")
        case.answer = "refused"
        if out.code == 0:
            case.answer = "equal"
            self._compare(case, out, forged)
        return case

    def _compare(self, case: Case, out: Outcome, forged: bool) -> None:
        checkpoint = "/".join(case.file.split("/")[1:2])
        damaged_checkpoint = bool(checkpoint) and f"skipped checkpoint {checkpoint}" in out.stderr
        deleted_checkpoint = (
            bool(checkpoint)
            and case.damage == "deleted"
            and "evaluating its weights after step" in out.stderr
        )
        if case.command == "evaluate" and (damaged_checkpoint or deleted_checkpoint):
            return  # the one before was used, and that was said
        if case.file == "log.jsonl" and "log.jsonl is missing" in out.stderr:
            return  # the values logged before are lost, and that was said
        expected = self._expected[case.kind, case.command]
        try:
            found = result(self._place, case.kind, case.command, out)
            fault = "" if found == expected else _difference(expected, found)
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[:200]}"
        if fault and forged:
            case.answer = "forged"
        elif fault:
            case.faults.append(f"other results: {fault}")


def _faults_of_output(out: Outcome, place: Place) -> list[str]:
    faults: list[str] = []
    text = out.stdout + out.stderr
    if out.hung:
        return [f"hung, {out.seconds:.0f} s"]
    if "Traceback (most recent call last)" in text:
        last = [line for line in text.splitlines() if line.strip()][-1]
        faults.append(f"traceback: {last[:150]}")
    elif out.code not in ENDED_WELL:
        faults.append(f"exit code {out.code}")
    elif out.code in (1, 2) and str(place.run) not in text:
        faults.append("the message names no file of the directory")
    if out.memory > MEMORY:
        faults.append(f"memory: {out.memory >> 20} MiB")
    if CONTROL.search(text):
        faults.append("control characters printed")
    if "allow_pickle" in text:
        faults.append("advises allow_pickle=")
    if SECRET in text:
        faults.append("prints another file")
    if out.code in (1, 2) and len(out.stderr) > 4000:
        faults.append(f"a message of {len(out.stderr)} characters")
    return faults


def _is_forged(path: Path) -> bool:
    """Return whether a changed file is a manifest whose hash was changed too.

    Everyone who may write the directory can do that, so nothing can be promised about results.
    """
    if path.name != MANIFEST:
        return False
    return path.with_name(DIGEST).read_bytes() == digest_line(path.read_bytes())


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]


def _difference(expected: Any, found: Any, where: str = "") -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in {**expected, **found}:
            if expected.get(key) != found.get(key):
                return _difference(expected.get(key), found.get(key), f"{where}.{key}")
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        for number, (one, other) in enumerate(zip_longest(expected, found)):
            if one != other:
                return _difference(one, other, f"{where}[{number}]")
    return f"{where}: {str(expected)[:80]} became {str(found)[:80]}"


def _offered() -> set[str]:
    """Return the names of all commands."""
    import typer

    from treadle.cli import app

    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
