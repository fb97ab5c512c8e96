"""Compares Keras programs between `fit` and `treadle.fit`, and writes a table of the results.

python -m tests.conformance.keras_comparison            # all backends, prints the table
python -m tests.conformance.keras_comparison --write    # also into docs/coming-from-keras.md
KERAS_BACKEND=jax python -m tests.conformance.keras_comparison recurrent …  # programs, as JSON
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOLERANCE = 1e-6
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
PAGE = Path(__file__).parents[2] / "docs" / "coming-from-keras.md"
BEGIN = "<!-- python -m tests.conformance.keras_comparison --write -->"
END = "<!-- end of programs -->"

# Programs that Keras itself cannot train on a backend, and why.
NOT_POSSIBLE = {
    ("adversarial", "jax"): "Keras passes the state of one optimizer",
    ("accumulation_by_hand", "jax"): "the step assigns variables, which JAX does not allow",
    ("gradient_penalty", "jax"): "the step is written with a tape",
}
# The largest difference, and its reason, where it is more than TOLERANCE.
DIFFERENT = {
    ("half_precision", "tensorflow"): (1e-2, "compiled steps round bfloat16 at other places"),
    ("language_model", "tensorflow"): (1e-5, "rounding in float32"),
    ("accumulation_by_hand", "tensorflow"): (9.0, "`fit` logs 0 for a loss without a metric"),
    ("accumulation_by_hand", "torch"): (9.0, "`fit` logs 0 for a loss without a metric"),
    ("recurrent", "torch"): (1e-2, "Keras' masked loss changes the sample weights in place"),
}


def programs() -> dict[str, Callable[[Path], Any]]:
    """Return all programs by name."""
    from tests.conformance import keras_programs, keras_programs_data, keras_programs_own

    return {**keras_programs.CASES, **keras_programs_own.CASES, **keras_programs_data.CASES}


def made(name: str, folder: Path) -> Any:
    """Return a program from the same seed and names as before."""
    import keras

    folder.mkdir()
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    case = programs()[name](folder)
    case.arguments = {"epochs": 3, "shuffle": False, "verbose": 0, **case.arguments}
    return case


def difference(name: str, folder: Path) -> float:
    """Return the largest difference between values of the two histories, or between weights.

    It is relative for numbers above 1, and infinite if the names, epochs or shapes differ.
    """
    import keras
    import numpy as np

    import treadle

    plain, ours = made(name, folder / "plain"), made(name, folder / "ours")
    expected = plain.model.fit(**plain.arguments)
    found = treadle.fit(ours.model, **ours.arguments)
    if list(found.history) != list(expected.history) or found.epoch != expected.epoch:
        return float("inf")
    pairs = [(found.history[key], values) for key, values in expected.history.items()]
    both = zip(ours.model.variables, plain.model.variables, strict=True)
    pairs += [tuple(map(keras.ops.convert_to_numpy, variables)) for variables in both]
    largest = 0.0
    for one, other in pairs:
        a, b = np.asarray(one, "float64"), np.asarray(other, "float64")
        if a.shape != b.shape:
            return float("inf")
        if a.size:
            largest = max(largest, float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max()))
    return largest


def measured(names: list[str]) -> dict[str, float | None]:
    """Return the differences of programs on this backend; None where Keras cannot train one."""
    backend = os.environ["KERAS_BACKEND"]
    warnings.simplefilter("ignore")
    results: dict[str, float | None] = {}
    for name in names or list(programs()):
        with tempfile.TemporaryDirectory() as folder:
            possible = (name, backend) not in NOT_POSSIBLE
            results[name] = difference(name, Path(folder)) if possible else None
    return results


def cell(name: str, backend: str, found: float | None) -> str:
    """Return the entry of a program in the table."""
    if found is None:
        return f"not possible: {NOT_POSSIBLE[name, backend]}"
    if found <= TOLERANCE:
        return "equal" if found == 0 else "within 1e-6"
    reason = DIFFERENT.get((name, backend), (0, "NO REASON IS KNOWN"))[1]
    return f"{found:.0e}: {reason}"


def table(results: dict[str, dict[str, float | None]]) -> str:
    """Return the table of all programs in Markdown."""
    lines = [f"| program | {' | '.join(BACKENDS.values())} |", "| --- " * 4 + "|"]
    for name, make in programs().items():
        entries = " | ".join(cell(name, b, results[b][name]) for b in BACKENDS)
        text = " ".join((make.__doc__ or "").split()).rstrip(".")
        lines.append(f"| {text} | {entries} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the differences on this backend as JSON, or run all backends and print the table."""
    if "KERAS_BACKEND" in os.environ:
        print(json.dumps(measured(arguments)))
        return 0
    results: dict[str, Any] = {}
    for backend in BACKENDS:
        command = [sys.executable, "-m", "tests.conformance.keras_comparison"]
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        results[backend] = json.loads(done.stdout.splitlines()[-1])
    os.environ["KERAS_BACKEND"] = "torch"  # the fastest to import, for the descriptions
    text = table(results)
    print(text)
    if "--write" in arguments:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    return int("NO REASON" in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
