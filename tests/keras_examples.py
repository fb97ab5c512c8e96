"""Runs official examples of Keras twice, with `fit` of Keras and with `treadle.fit`, and compares.

    KERAS_BACKEND=tensorflow python tests/keras_examples.py [--float64] FOLDER [part of a path …]

FOLDER holds sources of Keras, such as `examples/` and `guides/` of a checkout; nothing of them is
part of this repository. The sources may be those of Keras Core, an earlier name. Data is replaced
by random data (`keras_examples_data.py`), each `fit` trains on a few batches for at most two
epochs and without shuffling, and plots are not drawn. A statement that fails is left out, since
many only show what others have computed. Random operations of TensorFlow, whose numbers depend on
the graph that they are in, and Dropout on PyTorch draw the same numbers everywhere. Compared are
the history and the weights after each `fit` that Keras can run, and the value that differs most is
named. With `--float64`, layers compute in float64: a difference that is rounding in float32 is then
near 0. Examples that read tables need Pandas. The exit status is 0 if all are equal within 1e-6.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROWS, BATCHES, EPOCHS, SECONDS = 96, 3, 2, 900
TOLERANCE = 1e-6


def shortened(data: Any, rows: int = ROWS) -> Any:
    """Return the first batches of a data set, or the first rows of arrays."""
    if hasattr(data, "take") and hasattr(data, "element_spec"):
        return data.take(BATCHES)
    if isinstance(data, dict):
        return {name: shortened(part, rows) for name, part in data.items()}
    if isinstance(data, (tuple, list)) and data:
        return type(data)(shortened(part, rows) for part in data)
    return data[:rows] if hasattr(data, "shape") and len(data.shape) else data


def keep_order(packages: set[str]) -> None:
    """Let data sets of TensorFlow and loaders of PyTorch keep the order of their examples."""
    if "tensorflow" in packages:
        import tensorflow as tf

        tf.data.Dataset.shuffle = lambda data, *_, **__: data
    if "torch" in packages:
        from torch.utils.data import DataLoader

        made: Any = DataLoader.__init__

        def make(loader: Any, *rest: Any, **named: Any) -> None:
            made(loader, *rest, **{**named, "shuffle": False})

        DataLoader.__init__ = make


def draw_fixed_numbers() -> None:
    """Let random operations of TensorFlow draw the same numbers in each graph and call."""
    import keras
    import tensorflow as tf

    def fixed(stateless: Any) -> Any:
        def draw(shape: Any, *rest: Any, seed: Any = None, **named: Any) -> Any:
            if len(rest) < 3:  # it is not among the positional arguments
                named.setdefault("dtype", keras.config.floatx())
            return stateless(shape, (1, 2), *rest, **named)

        return draw

    for name in ("normal", "uniform", "truncated_normal", "gamma"):
        setattr(tf.random, name, fixed(getattr(tf.random, f"stateless_{name}")))


def drop_fixed_units() -> None:
    """Let Dropout on PyTorch drop the same units in each call; its numbers are global otherwise."""
    import torch

    def dropout(inputs: Any, p: float = 0.5, *_: Any, **__: Any) -> Any:
        places = torch.arange(inputs.numel()).reshape(inputs.shape)
        return torch.where(places * 7 % 11 >= 11 * p, inputs / (1 - p), 0.0)

    torch.nn.functional.dropout = dropout


def up_to_last_fit(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements up to the last one that calls `fit`, or a function that does."""
    calls, last = {"fit"}, 0
    for number, statement in enumerate(statements):
        nodes = list(ast.walk(statement))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        if calls & (used | {node.id for node in nodes if isinstance(node, ast.Name)}):
            last = number
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                calls.add(statement.name)
    return statements[: last + 1]


def imported(statements: list[ast.stmt]) -> set[str]:
    """Return the names of the packages that statements import."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def run(file: Path, ours: bool, results: Path) -> None:
    """Run an example, and write the history and the weights after each `fit` to a folder."""
    import keras
    import numpy as np
    from keras_examples_data import open_table, replace_all

    import treadle

    warnings.simplefilter("ignore")
    if "FLOAT64" in os.environ:
        treadle.setup(precision="float64")
    text = file.read_text().replace("keras_core", "keras")
    statements = ast.parse(text).body
    os.chdir(results)
    replace_all(imported(statements))
    keep_order(imported(statements))
    if keras.config.backend() == "tensorflow":
        draw_fixed_numbers()
    if keras.config.backend() == "torch":
        drop_fixed_units()
    trainer: Any = next(k for k in keras.Model.__mro__ if k.__name__.endswith("Trainer"))
    plain, evaluate, predict = trainer.fit, trainer.evaluate, trainer.predict
    count = 0

    def fit(model: Any, x: Any = None, y: Any = None, *rest: Any, **named: Any) -> Any:
        nonlocal count
        named |= dict(zip(("batch_size", "epochs"), rest, strict=False))
        named |= {"epochs": min(EPOCHS, named.get("epochs", 1)), "shuffle": False, "verbose": 0}
        for name in ("validation_data", "sample_weight"):
            if named.get(name) is not None:
                named[name] = shortened(named[name])
        for name in ("steps_per_epoch", "validation_steps"):
            if named.get(name):
                named[name] = min(named[name], BATCHES)
        keras.utils.set_random_seed(count)
        x, y = shortened(x), shortened(y)
        number, count = count, count + 1
        try:
            history = treadle.fit(model, x, y, **named) if ours else plain(model, x, y, **named)
        except Exception as error:
            (results / f"{number}.error").write_text(f"{type(error).__name__}: {error}")
            raise
        values = {
            n: [np.asarray(v, "float64").ravel().tolist() for v in values]
            for n, values in history.history.items()
        }
        weights = {
            f"{place} {variable.path}": keras.ops.convert_to_numpy(variable)
            for place, variable in enumerate(model.variables)
        }
        weights = {n: w for n, w in weights.items() if w.dtype.kind in "fiu"}
        np.savez(results / f"{number}.npz", **weights)
        (results / f"{number}.json").write_text(json.dumps(values))
        return history

    def fewer(method: Any) -> Any:
        def call(model: Any, *rest: Any, **named: Any) -> Any:
            few = {name: shortened(value, 8) for name, value in named.items()}
            return method(model, *(shortened(value, 8) for value in rest), **few)

        return call

    trainer.fit, trainer.evaluate, trainer.predict = fit, fewer(evaluate), fewer(predict)
    keras.utils.set_random_seed(1)
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(file), "open": open_table}
    for statement in up_to_last_fit(statements):
        part = compile(ast.Module([statement], []), str(file), "exec")
        try:
            exec(part, names)
        except Exception as error:
            found = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"line {statement.lineno}: {found}", file=sys.stderr)


def compared(plain: Path, ours: Path) -> tuple[int, float, str, int]:
    """Return the number of calls of `fit`, the largest difference and where, and the calls lost."""
    import numpy as np

    largest, where, lost, expected = 0.0, "", 0, sorted(plain.glob("*.json"))
    for file in expected:
        if not (ours / file.name).exists():
            lost += 1
            continue
        a, b = json.loads(file.read_text()), json.loads((ours / file.name).read_text())
        with np.load(plain / f"{file.stem}.npz") as v, np.load(ours / f"{file.stem}.npz") as w:
            weights = [(name, v[name], w[other]) for name, other in zip(v, w, strict=True)]
        if list(a) != list(b):
            largest, where = float("inf"), "the names of the history"
            continue
        for name, one, other in [(name, a[name], b[name]) for name in a] + weights:
            one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
            if one.shape != other.shape:
                largest, where = float("inf"), name
            elif one.size:
                found = np.abs(one - other) / np.maximum(1.0, np.abs(one))
                same = (one == other) | (np.isnan(one) & np.isnan(other))
                found = float(np.where(same, 0.0, found).max())
                largest, where = max((largest, where), (found, f"{name} of fit {file.stem}"))
    return len(expected), largest, where, lost


def run_in_process(file: Path, results: Path) -> str:
    """Run an example in a process; return why a `fit` failed, or else the first statement."""
    results.mkdir()
    command = [sys.executable, __file__, "--child", str(file), results.name, str(results)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        lines = [line for line in done.stderr.splitlines() if line.startswith("line ")]
        lines += done.stderr.splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        lines = [f"more than {SECONDS} s"]
    errors = [error.read_text() for error in sorted(results.glob("*.error"))]
    return " ".join((errors + lines)[0].split())[:300] if errors + lines else ""


def main(arguments: list[str]) -> int:
    """Run all examples of a folder, and print how each differs."""
    if arguments[0] == "--child":
        run(Path(arguments[1]), arguments[2] == "ours", Path(arguments[3]))
        return 0
    if arguments[0] == "--float64":
        os.environ["FLOAT64"] = arguments.pop(0)
    folder, parts = Path(arguments[0]).absolute(), arguments[1:] or [""]
    files = [f for f in sorted(folder.rglob("*.py")) if ".fit(" in f.read_text()]
    failed = 0
    for file in (f for f in files if any(part in str(f) for part in parts)):
        with tempfile.TemporaryDirectory() as place:
            plain, ours = (Path(place) / which for which in ("plain", "ours"))
            reason, reason_of_ours = run_in_process(file, plain), ""
            if list(plain.glob("*.json")):
                reason_of_ours = run_in_process(file, ours)
            count, largest, where, lost = compared(plain, ours)
        result = "equal" if largest == 0 else f"{largest:.0e} in {where}"
        if count == 0:
            result = f"not run: {reason}"
        elif lost:
            result = f"{lost} of {count} lost: {reason_of_ours}"
        failed += count > 0 and (lost > 0 or largest > TOLERANCE)
        print(f"{file.relative_to(folder)}: {count} fits, {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
