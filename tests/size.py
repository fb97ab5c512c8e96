"""Counts what the library consists of and what a run calls: `scripts/size [BACKEND…]`.

Counts of the source text need no backend. Those of a run train a small network, and count functions
of Treadle that are called in the main thread, the files that they are in, and the calls.
"""

import argparse
import ast
import enum
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.range.names import private_names
from tests.range.sources import attributes_set

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "treadle"
GROUP = {"process_group", "is_chief"}
BACKENDS = ("jax", "torch", "tensorflow")
LONG = 60

# Budgets, which are often reached. A change that needs more raises one, and says why; one that
# lowers a count lowers its limit.
LIMITS = {
    "lines": 71_700,
    "lines of code": 44_490,
    "files": 370,
    "files outside distribute/ that use a group of processes": 10,
    "class names of several classes": 0,
    "names in treadle": 40,
    "modules in treadle": 9,
    "members of Loop": 22,
    "functions above 60 lines": 6,
    "private names of Keras and the frameworks": 87,
    "private names that nothing works without": 20,
    "lines of doctor/": 5_440,  # the aim is 5,000
    "numeric literals of doctor/ (0 and 1 aside)": 93,
}
LEAST = {"docstring lines for each line of code": 0.33}
LIMITS_OF_RUNS = {
    "functions of a steady window": {"jax": 120, "torch": 113, "tensorflow": 98},
    "files of a steady window": {"jax": 32, "torch": 33, "tensorflow": 30},
    "calls in loop.step()": {"jax": 201, "torch": 197, "tensorflow": 187},
    "calls in loop.call()": {"jax": 48, "torch": 48, "tensorflow": 46},
    "functions of loop.save()": {"jax": 215, "torch": 205, "tensorflow": 204},
    "functions of resuming until the first window": {
        "jax": 1160,
        "torch": 1265,
        "tensorflow": 1128,
    },
    "classes reachable from Loop that outlive a window": {"jax": 52, "torch": 52, "tensorflow": 52},
    "their attributes": {"jax": 392, "torch": 393, "tensorflow": 391},
}


def of_source() -> dict[str, float]:
    """Return the counts of the source text."""
    files = sorted(SOURCE.rglob("*.py"))
    texts = {path: path.read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.count("\n") for path, text in texts.items()}
    documented = {path: _docstring_lines(tree) for path, tree in trees.items()}
    docstrings = sum(map(len, documented.values()))
    code = sum(len(_code_lines(texts[path], documented[path])) for path in files)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    public = _literals(trees[SOURCE / "__init__.py"])
    doctor = [path for path in files if SOURCE / "doctor" in path.parents]
    private = private_names()
    return {
        "lines": sum(lines.values()),
        "lines of code": code,
        "files": len(files),
        "files outside distribute/ that use a group of processes": sum(
            SOURCE / "distribute" not in path.parents and bool(GROUP & _names(tree))
            for path, tree in trees.items()
        ),
        "class names of several classes": sum(count > 1 for count in classes.values()),
        "names in treadle": sum(len(names.split()) for names in public["_NAMES"].values()),
        "modules in treadle": len(public["_MODULES"]),
        "members of Loop": len(_members(trees[SOURCE / "loop.py"], "Loop")),
        "functions above 60 lines": sum(
            isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONG
            for node in nodes
        ),
        "private names of Keras and the frameworks": len(private),
        "private names that nothing works without": list(private.values()).count("core"),
        "lines of doctor/": sum(lines[path] for path in doctor),
        "numeric literals of doctor/ (0 and 1 aside)": sum(
            isinstance(node, ast.Constant)
            and type(node.value) in (int, float)
            and node.value not in (0, 1)
            for path in doctor
            for node in ast.walk(trees[path])
        ),
        "docstring lines for each line of code": round(docstrings / code, 3),
    }


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of docstrings, also those of attributes and constants."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def _code_lines(text: str, docstrings: set[int]) -> set[int]:
    """Return the numbers of the lines that are neither blank, nor comments, nor of docstrings."""
    lines = enumerate(text.splitlines(), start=1)
    return {number for number, line in lines if line.strip()[:1] not in ("", "#")} - docstrings


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module reads or calls."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _literals(tree: ast.Module) -> dict[str, Any]:
    """Return the constants of a module that are written as literals."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = eval(compile(ast.Expression(node.value), "", "eval"), {"__builtins__": {}})
            except NameError:
                continue
            found[node.targets[0].id] = value
    return found


def _members(tree: ast.Module, name: str) -> set[str]:
    """Return the public methods and attributes of a class."""
    cls = next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)
    methods = {x.name for x in cls.body if isinstance(x, ast.FunctionDef)}
    return {member for member in methods | attributes_set(cls) if not member.startswith("_")}


def of_run() -> dict[str, float]:
    """Return the counts of a run of a small network on the active backend."""
    import keras
    import numpy as np

    import treadle

    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    train = treadle.data.from_arrays(x, x, batch_size=2)

    def loop_in(folder: str) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8)])
        task = treadle.Supervised(model, "mse", keras.optimizers.Adam())
        return treadle.Loop(task, folder, options=treadle.Options(window=4))

    with tempfile.TemporaryDirectory() as folder:
        with loop_in(folder) as loop:
            windows = loop.steps(train, every="4 steps")
            for _ in range(4):  # the first ones build and compile
                next(windows)
            before = _reachable(loop)
            window = min((called(lambda: next(windows)) for _ in range(2)), key=len)
            kept = [item for key, item in _reachable(loop).items() if key in before]
            saved = called(loop.save)
            interrupted = shutil.copytree(folder, f"{folder}/interrupted")
            loop.stop("it was counted")

        def resume() -> None:
            with loop_in(interrupted) as loop:
                next(loop.steps(train, every="4 steps"))
                sys.setprofile(None)
                loop.stop("it was counted")

        resumed = called(resume)
        with loop_in(f"{folder}/steps") as loop:
            steady = [  # in turns, because a call reads the state of the step before it
                (
                    called(lambda: loop.step((x, x))).total(),
                    called(lambda: loop.call(loop.task.model, x)).total(),
                )
                for _ in range(20)  # PyTorch captures a function that was called 16 times
            ]
    attributes: dict[type, set[str]] = {}
    for item in kept:
        if names := _attributes(item):
            attributes.setdefault(type(item), set()).update(names)
    return {
        "functions of a steady window": len(window),
        "files of a steady window": len({file for file, _, _ in window}),
        "calls in loop.step()": min(step for step, _ in steady),
        "calls in loop.call()": min(call for _, call in steady),
        "functions of loop.save()": len(saved),
        "functions of resuming until the first window": len(resumed),
        "classes reachable from Loop that outlive a window": len(attributes),
        "their attributes": sum(map(len, attributes.values())),
    }


def called(function: Callable[[], Any]) -> Counter[tuple[str, str, int]]:
    """Call a function; return how often it called each function of Treadle: file, name, line."""
    found: Counter[tuple[str, str, int]] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            found[code.co_filename, code.co_qualname, code.co_firstlineno] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    if not found:
        raise RuntimeError(f"no function of {SOURCE} was called: is another Treadle imported?")
    return found


def _reachable(root: Any) -> dict[int, Any]:
    """Return the objects of Treadle's classes that attributes and containers lead to, by id.

    Values that cannot change, frozen dataclasses and enums, are no state of their own; the task is
    the user's.
    """
    import treadle

    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif callable(getattr(item, "__func__", None)):
            waiting.append(item.__self__)
        elif type(item).__module__.startswith("treadle."):
            parameters = getattr(type(item), "__dataclass_params__", None)
            if isinstance(item, treadle.Task):
                continue
            if not (isinstance(item, enum.Enum) or (parameters and parameters.frozen)):
                found[id(item)] = item
            waiting += _attributes(item).values()
    return found


def _attributes(item: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its dictionary and slots."""
    slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ())]
    found = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    return found | getattr(item, "__dict__", {})


def in_a_new_process(backend: str) -> dict[str, float]:
    """Return the counts of `of_run`, which a process that has cached nothing repeats exactly."""
    code = "from tests.size import of_run; print('counts', of_run())"
    variables = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    printed = subprocess.check_output(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, text=True
    )
    last = next(x for x in printed.splitlines()[::-1] if x.startswith("counts"))
    return ast.literal_eval(last.removeprefix("counts "))


def rows(backends: list[str]) -> Iterator[tuple[str, float, float]]:
    """Yield each count with its limit; those of a run are counted in a process for each backend."""
    for name, count in of_source().items():
        yield name, count, {**LIMITS, **LEAST}[name]
    for backend in backends:
        for name, count in in_a_new_process(backend).items():
            yield f"{backend}: {name}", count, LIMITS_OF_RUNS[name][backend]


def main() -> None:
    """Print the counts with their limits."""
    parser = argparse.ArgumentParser(prog="scripts/size", description=__doc__)
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="jax, torch or tensorflow")
    chosen = parser.parse_args().backends or list(BACKENDS)
    print("| | found | limit |\n| --- | --- | --- |")
    for name, count, limit in rows(chosen):
        bound = "at least " if name in LEAST else ""
        print(f"| {name} | {count:,} | {bound}{limit:,} |", flush=True)


if __name__ == "__main__":
    main()
