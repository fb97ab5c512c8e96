"""Holds a program against four other ways to compute the same.

- `eager`: the readable reference, within rounding;
- `window`: windows of another size, to the bit;
- `resumed`: a run that was killed and goes on, to the bit;
- `hand`: the hand-written loop of `byhand`, within rounding.
"""

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras import ops

import treadle
from treadle.checkpoint import Checkpoints
from treadle.errors import TreadleWarning
from treadle.hooks.log_file import read_log

from . import byhand
from .program import Program
from .text import source

CHECKS = ("hand", "eager", "window", "resumed")

# By dtype policy: how far two ways of computing the same may differ, relative to the largest
# number of a variable or of all steps' values of one name. Twelve steps of these tiny networks
# multiply a rounding error of 6e-8 by some hundreds. In half precision, compiled steps round at
# other places than eager ones.
ROUNDING = {"float64": 1e-9, "float32": 5e-4, "mixed_bfloat16": 8e-2, "mixed_float16": 2e-2}

Array = np.ndarray[Any, Any]


class Difference(AssertionError):
    """Two ways to compute the same differ.

    Attributes:
        check: One of `CHECKS`, or `run`, where the program itself fails.
    """

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


class InvalidProgramError(Exception):
    """The hand-written loop fails: the grammar made what is no program."""


def check(program: Program, checks: tuple[str, ...] = CHECKS) -> str:
    """Run a program in all ways and compare; return how its steps ran.

    Raises:
        Difference: Two ways differ, or one of them raises.
        InvalidProgramError: It is no fault of Treadle's.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-fuzz-") as folder, _quiet():
        return _check(program, checks, Path(folder))


def _check(program: Program, checks: tuple[str, ...], folder: Path) -> str:
    module = loaded(source(program), folder / "program.py")
    first, killed = folder / "first", folder / "killed"
    process: dict[str, str] = {}
    if "resumed" in checks and program.memories:  # other hooks in the process that is killed
        module.copies.append(killed)
        _run(module, "resumed", folder / "before", process="killed")
        newest = Checkpoints(killed / "checkpoints").latest() if killed.exists() else None
        module.saved = 0 if newest is None else newest.progress.step
        process = {"process": "resumed"}
    by_hand: SimpleNamespace | None = None
    if "hand" in checks and has_hand(program):
        by_hand = _run_by_hand(program, folder, getattr(module, "saved", 0))
    if "resumed" in checks:
        module.copies[:] = [killed]
    loop = _run(module, "run", first if _needs_directory(program, checks) else None)
    found = outcome(loop)
    if by_hand is not None:
        steps = {**found.steps, **_weights(loop.task)}
        compare("hand", program, *map(_without_undone, (steps, by_hand.values)))
    if "eager" in checks:
        again = _directory(program, folder / "eager")
        other = outcome(_run(module, "eager", again, execution="eager"))
        compare("eager", program, found.all, other.all)
    if "window" in checks:
        again = _directory(program, folder / "window")
        other = outcome(_run(module, "window", again, window=program.other))
        compare("window", None, found.all, other.all)
    if "resumed" in checks and killed.exists():
        resumed = _run(module, "resumed", killed, window=program.other, **process)
        compare("resumed", None, found.all, outcome(resumed).all)
        compare_logs(first, killed)
    return loop.plan


def has_hand(program: Program) -> bool:
    """Say whether the hand-written loop can compute what a program does."""
    twice = {
        part.network
        for form in program.forms
        for part in form.parts
        if part.kind in ("penalty", "inner")
    }
    # tf.nn.moments stops gradients at its mean, so second derivatives through normalization
    # are wrong in plain Keras on TensorFlow. Treadle mends that.
    normalized = any(program.networks[i].has("Normalization") for i in twice)
    decides = program.callback in ("plateau", "stopping")  # by the mean loss of an epoch
    return not (decides or (normalized and keras.config.backend() == "tensorflow"))


def _without_undone(values: Mapping[str, Array]) -> dict[str, Array]:
    """Return values without what undone steps returned where losses are scaled.

    By hand, inner gradients are not scaled; Treadle scales them by the root of the scale. Where
    that overflows, the step is undone either way, but its loss is NaN on one side alone.
    """
    undone = values.get("steps/undone")
    if undone is None or "steps/loss_scale" not in values:
        return dict(values)
    kept = ("steps/undone", "steps/loss_scale")
    return {
        name: np.where(undone > 0, 0, value)
        if name.startswith("steps/") and name not in kept
        else value
        for name, value in values.items()
    }


def _needs_directory(program: Program, checks: tuple[str, ...]) -> bool:
    return "resumed" in checks or program.nonfinite == "rollback"


def _directory(program: Program, directory: Path) -> Path | None:
    return directory if program.nonfinite == "rollback" else None


def _run(module: ModuleType, check: str, directory: Path | None, **options: Any) -> treadle.Loop:
    try:
        return module.run(directory, **options)
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        text = f"{type(error).__name__}: {error}{f' ({notes})' if notes else ''}"
        raise Difference(check, text) from error


def outcome(loop: treadle.Loop) -> SimpleNamespace:
    """Return all numbers of a run: what steps returned, what was recorded, every variable."""
    steps = {f"steps/{name}": loop.history.steps(name) for name in loop.history.step_names}
    records = {
        f"epoch {number}/{name}": np.asarray(value)
        for number, record in enumerate(loop.history.epochs)
        for name, value in record.items()
        if isinstance(value, (int, float)) and name != "seconds"
    }
    return SimpleNamespace(steps=steps, all={**steps, **records, **loop.state.arrays()})


def compare(
    check: str, rounded: Program | None, found: Mapping[str, Array], expected: Mapping[str, Array]
) -> None:
    """Compare arrays by name, to the bit or within a program's rounding.

    The hand-written loop has fewer names; all others have equal ones.

    Raises:
        Difference: It names the first array that differs.
    """
    if check != "hand" and list(found) != list(expected):
        raise Difference(check, f"other names: {sorted(set(found) ^ set(expected))}")
    for name, right in expected.items():
        if name not in found:
            raise Difference(check, f"{name} is missing")
        value, right = np.asarray(found[name]), np.asarray(right)
        if value.shape != right.shape:
            raise Difference(check, f"{name} has shape {value.shape}, expected {right.shape}")
        if rounded is not None and (value.dtype.kind == "f" or right.dtype.kind == "f"):
            same = close(value, right, ROUNDING[rounded.precision])
        else:
            same = bits(value) == bits(right.astype(value.dtype))
        if not same:
            raise Difference(check, f"{name} is\n{value}\nexpected\n{right}")


def bits(value: Array) -> bytes:
    """Return the bytes of an array in which every NaN is the same one, as it is in a log."""
    if value.dtype.kind == "f":
        value = np.where(np.isnan(value), np.array(np.nan, value.dtype), value)
    return value.tobytes()


def close(value: Array, right: Array, rounding: float) -> bool:
    """Say whether arrays are equal within rounding, relative to the largest number."""
    value, right = value.astype("float64"), right.astype("float64")
    size = max(1.0, float(np.max(np.abs(right), initial=0.0, where=np.isfinite(right))))
    return bool(np.allclose(value, right, rtol=0, atol=rounding * size, equal_nan=True))


def compare_logs(first: Path, resumed: Path) -> None:
    """Compare the lines that two runs wrote, clocks apart.

    Raises:
        Difference: A line differs.
    """
    lines: list[list[dict[str, Any]]] = []
    for directory in (first, resumed):
        steps, records = read_log(directory / "log.jsonl")
        # Warnings are logged at the end of a window, and windows differ.
        both = [*steps, *(record for record in records if record["kind"] != "log")]
        lines.append([{k: v for k, v in line.items() if k != "seconds"} for line in both])
    for mine, theirs in zip(*lines, strict=False):
        if str(mine) != str(theirs):  # NaN is not equal to itself
            raise Difference("resumed", f"log.jsonl has {theirs}, expected {mine}")
    if len(lines[0]) != len(lines[1]):
        raise Difference("resumed", f"log.jsonl has {len(lines[1])} lines, not {len(lines[0])}")


def _weights(task: Any) -> dict[str, Array]:
    """Return the variables that the hand-written loop has too, seeds apart."""
    return {
        f"{name}/{number}": np.asarray(keras.ops.convert_to_numpy(variable))
        for name, part in byhand.parts_of(task).items()
        for number, variable in enumerate(byhand.variables_in(part))
        if not byhand.is_seed(variable)
    }


def _run_by_hand(program: Program, folder: Path, saved: int = 0) -> SimpleNamespace:
    """Run the hand-written loop.

    Raises:
        InvalidProgramError: It fails.
    """
    try:
        keras.utils.clear_session(free_memory=False)
        treadle.setup(seed=program.seed, precision=program.precision)
        byhand.Run.scale = None
        module = loaded(source(program, task=False), folder / "by_hand.py")
        task = module.Program()
        _build(program, task)
        changes = [(step, _on_task(change)) for step, change in module.changes]
        batches, begins, ends = _order(program, module, folder)
        module.saved = saved
        for hook in module.memories("whole") if program.memories else ():
            due = [step for step in hook.steps_due if step <= len(batches)]
            changes += [(step, _on_task(hook.move)) for step in due]
        if program.callback == "falling-rate":
            changes += [(step, _halve) for step in begins]
        skips = program.nonfinite == "skip"
        history = byhand.train(task, batches, ends, changes, skips)
    except Exception as error:
        raise InvalidProgramError(f"{type(error).__name__}: {error}") from error
    values: dict[str, Array] = {f"steps/{k}": np.asarray(v) for k, v in history.items()}
    values["steps/count"] = values["steps/count"].astype("int32")
    return SimpleNamespace(values={**values, **_weights(task)})


def _on_task(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda task: change(SimpleNamespace(task=task))


def _halve(task: Any) -> None:
    task.opt0.learning_rate = 0.5 * float(ops.convert_to_numpy(task.opt0.learning_rate))


def _build(program: Program, task: Any) -> None:
    """Build networks and optimizers before the first step, so that it can be undone."""
    for number in program.used():
        net = getattr(task, f"net{number}")
        if not net.built:
            net.build((None, 4))
        head = net.layers[-1].trainable_variables if hasattr(task, f"head{number}") else []
        if head:
            getattr(task, f"head{number}").build(head)
        # Where every part leaves the head to the other optimizer, this one never gets it.
        shared = head and program.kinds_of(number) == {"parts"}
        own = [v for v in net.trainable_variables if not (shared and any(v is h for h in head))]
        getattr(task, f"opt{number}").build(own)
    if program.outputs is not None:
        task.optimizer.build(task.model.trainable_variables)


def _order(
    program: Program, module: ModuleType, folder: Path
) -> tuple[list[Any], list[int], list[int]]:
    """Return the batches of all steps, and after how many of them epochs begin and calls end."""
    data = loaded(source(program), folder / "data.py")
    made: dict[tuple[int, int, int], list[Any]] = {}

    def epoch(number: int, of: int, call: int = 0) -> list[Any]:
        if (number, of, call) not in made:
            if program.changing:
                data.alter(number if program.looped else call)
            made[number, of, call] = _epoch(program, module, data, number, of)
        return made[number, of, call]

    visits = program.visits(lambda of, number: len(epoch(number, of)))
    order = [epoch(visit.epoch, visit.source, visit.call)[visit.batch] for visit in visits]
    # An epoch whose last step ends a call, too.
    begins = [i for i, visit in enumerate(visits) if i == 0 or visits[i - 1].epoch != visit.epoch]
    # Training by `for` loops ends with the `with` block of the loop.
    fits = [unit in ("epochs", "steps") and not program.looped for unit, *_ in program.calls]
    ends = [sum(visit.call <= call for visit in visits) for call, fit in enumerate(fits) if fit]
    return order, begins, [*ends, len(order)]


def _epoch(
    program: Program, module: ModuleType, data: ModuleType, number: int, of: int
) -> list[Any]:
    """Return the batches of an epoch of one of the sources."""
    if program.sources[of].source != "arrays":
        batches = list((module.batches, getattr(module, "seconds", ()))[of])
    else:
        read = (data.train, getattr(data, "second", None))[of]
        reader, batches = read.read(number, seed=program.seed), []
        while (window := reader.take(1)) is not None:
            batches.append(byhand.mapped(np.array, window.batch(0)))  # which may change
        structure = program.forms[0].structure
        if structure is not None:  # whose classes are those of the other module
            named = [dict([*data.opened(batch).items()][::-1]) for batch in batches]
            batches = [module.packed(arrays, structure) for arrays in named]
    if program.nonfinite == "rollback":
        batches = [b for b in batches if all(np.isfinite(x).all() for x in byhand.leaves_of(b))]
    return batches


def loaded(text: str, path: Path) -> ModuleType:
    """Write source text to a file and import it."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"fuzzed_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TreadleWarning)
        yield


def script(program: Program, failed: str) -> str:
    """Return a stand-alone program that shows a difference."""
    text = source(program)
    if failed == "hand":
        by_hand = source(program, task=False)
        return (
            f"{text}\n\nrun()\n\n# The same by hand; see tests/fuzz/byhand.py.\n'''\n{by_hand}'''\n"
        )
    directory = ', "/tmp/fuzz-%s"' if program.nonfinite == "rollback" else ""
    place = [directory.lstrip(", ") % name if directory else "" for name in ("first", "second")]
    if failed == "resumed":
        copied, killed, resumed = 'copies.append(base / "killed")\n', "", ""
        if program.memories:
            killed = f'{copied}run(base / "before", process="killed")\n'
            killed += 'saved = Checkpoints(copies[0] / "checkpoints").latest().progress.step\n'
            resumed = ', process="resumed"'
        runs = (
            "import pathlib\n\n"
            f"base = pathlib.Path(tempfile.mkdtemp())\n{killed or copied}"
            'first = run(base / "first")\n'
            f"second = run(copies[0], window={program.other!r}{resumed})"
        )
        text = text.replace("import shutil\n", "import shutil\nimport tempfile\n", 1)
    elif failed == "run":
        return f"{text}\n\nrun({place[0]})\n"
    else:
        how = 'execution="eager"' if failed == "eager" else f"window={program.other!r}"
        comma = ", " if place[1] else ""
        runs = f"first = run({place[0]})\nsecond = run({place[1]}{comma}{how})"
    return f"""{text}

{runs}
for name in first.history.step_names:
    print(name, first.history.steps(name), second.history.steps(name), sep="\\n  ")
arrays = second.state.arrays()
for path, value in first.state.arrays().items():
    if not np.array_equal(value, arrays[path], equal_nan=value.dtype.kind == "f"):
        print(path, value.ravel()[:5], arrays[path].ravel()[:5], sep="\\n  ")
"""
