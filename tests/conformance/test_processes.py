"""Several processes give what one gives: a program that starts itself in each compares them."""

import json
import os
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import pytest
from cases import CASES
from executions import long_to_compile

import treadle
from tests.forked import python
from tests.xla import less_optimized

BACKEND = keras.config.backend()
TENSORFLOW = BACKEND == "tensorflow"
by_rows = pytest.mark.skipif(BACKEND == "jax", reason="JAX divides batches by itself")
CLOSE = 1e-5
ROUGH = {"mixed-bfloat16": 2e-2}


def run(size: int, *checks: str) -> dict[str, Any]:
    """Run checks of `on_processes.py` in so many processes."""
    done = subprocess.run(
        [python(), str(Path(__file__).parent / "on_processes.py"), str(size), *checks],
        env={
            **os.environ,
            **({} if BACKEND == "torch" else less_optimized()),  # compared within rounding
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> Any:
    """Results of checks, which run together, as importing Keras in each process takes long."""

    @cache
    def of(size: int, *checks: str) -> dict[str, Any]:
        return run(size, *checks)

    def one(size: int, name: str, *checks: str) -> Any:
        result = of(size, *checks)[name]
        if isinstance(result, dict) and "error" in result:
            if "mnist was not found" in result["error"] and not os.environ.get("TREADLE_DATA"):
                pytest.skip("TREADLE_DATA names no folder with the real data")
            pytest.fail(result["error"])
        return result

    return one


RESULTS = (
    "reference",
    "eager",
    "gathered",
    "tokens",
    "tokens-accumulated",
    "apart",
    "masked",
    "counted",
    "on-values",
    "sharded",
    "predicted",
    "metric-results",
    "own-function",
    "crowded",
    "changed-values",
    "limited",
)
MORE = (
    *("accumulating", "fewer-rows-than-processes", "short-batch-1", "short-batch-41", "streamed"),
    *("recipe-maml", "recipe-wgan-gp", "recipe-distillation", "recipe-self-supervised"),
    "recipe-char-lm",  # TensorFlow has another adversarial one
)
MORE_ON_TENSORFLOW = ("accumulating", "fewer-rows-than-processes", "recipe-mnist-gan")
FAILURES = {
    "sum-of-losses": (
        r"train_step on 2 processes: a loss is \S+, but \S+ for the whole batch\. Each process "
        r"computes its rows, and the mean over processes is weighted by their number: compute "
        r"losses and values as means over the examples, combine examples only with "
        r"treadle\.gathered, or train with one process"
    ),
    "coupled-examples": (
        r"train_step on 2 processes: a loss is \S+, but \S+ for the whole batch\. .*"
    ),
    "sum-that-is-logged": (
        r"train_step on 2 processes: 'labels' is 6, but 11 for the whole batch\. .*"
    ),
    "variable-of-own-rows": (
        r"train_step on 2 processes: each has another value of mean after the step, which is "
        r"not computed from gradients and is no variable with aggregation='mean' or 'sum'\. .*"
    ),
    "backward": (
        r"train_step computes no gradients with treadle\.gradients or treadle\.minimize, so 2 "
        r"processes would train apart: use these, or train with one process"
    ),
    "loop-over-rows": (
        r"train_step: process 1 sums 2 messages in a step, and process 0 3 or others: what is "
        r"differentiated must not depend on the number of rows or their values\. Use "
        r"treadle\.for_each or keras\.ops\.vectorized_map for functions of single examples"
    ),
    "error-for-some-rows": (
        r"train_step fails for the rows of process 1: ValueError: too few rows"
    ),
    "shuffled-rows": (
        r"(aten\.randperm\.default|keras\.random\.shuffle) draws for the 8 rows of a batch "
        r"together, which several processes cannot divide: draw uniform or normal numbers, or "
        r"train with one process"
    ),
    "poisson-draw": (
        r"the step draws with a function of tf\.random that several processes cannot divide: draw "
        r"with keras\.random, or train with one process"
    ),
    "concrete-function": (
        r"(?s:.*)the step sums over processes inside of a concrete function, which TensorFlow "
        r"traces once, for other rows or without the sums\. Call the function without "
        r"get_concrete_function: Treadle compiles the whole step(?s:.*)"  # TensorFlow adds where
    ),
    "ambiguous-draw": (
        r"a random draw of shape \(4,\) may be rows of the batch, of which this process has 4, "
        r"or not: choose another batch size than 8"
    ),
    "draw-along-the-second-axis": (
        r"a random draw of shape \(6, 4\) has the rows of the batch along axis 1, but several "
        r"processes divide the first axis only: move the rows to the first axis, and transpose "
        r"the result"
    ),
    "other-data": (
        r"train_step: process 1 has another batch than process 0\. All processes must read the "
        r"same data in the same order, and take their rows of each batch: give all the same "
        r"seed and data, or use treadle\.data\.sharded"
    ),
    "other-seed": (
        r"the configuration of process 1 and of process 0 differ: seed is 1 in process 1, and 0 "
        r"in process 0\. All processes must run the same script with the same data and settings"
    ),
    "gathered-without-rows": (
        r"gathered got a tensor of shape \(\), which has no rows of the batch: its first "
        r"dimension must be a multiple of 4, the number of rows of this process"
    ),
    "other-variables": (
        r"process 0 has 12 variables, and process 1 has 12; the first that differs here is "
        r"\['model/layers/0/kernel', 'float32', \[6, 5\]\]: start all processes with the same "
        r"script, settings and data"
    ),
    "changed-by-hand": (
        r"model/layers/0/bias has different values in the 2 processes: each has changed it by "
        r"itself\. Change variables in steps, or in all processes alike"
    ),
}
# Not "eager", whose losses differ by 2.9e-5 if XLA optimizes less, as in the short suite.
ON_JAX = (
    *("reference", "short-batch-1", "streamed", "sharded"),
    "predicted",
)
REFUSED = ("add-loss", "for-each", "critic-steps")  # sums over examples, and parts of a batch
OF_TENSORFLOW = ("poisson-draw", "concrete-function", "own-function")
ON_TENSORFLOW = (
    *("reference", "eager", "gathered", "masked", "sharded", "predicted", "metric-results"),
    *("sum-of-losses", "variable-of-own-rows", "loop-over-rows", "shuffled-rows"),
    *OF_TENSORFLOW,
)
"""TensorFlow has the rules of PyTorch: an example of each, as every check compiles two programs."""


OFTEN = ("reference", "crowded", "coupled-examples")
"""The default run on PyTorch makes these: `tests/selection/kept.txt` names them too."""


def of_backend(names: Iterable[str]) -> list[str]:
    """Return the checks of the backend."""
    if TENSORFLOW:
        return [name for name in names if name in ON_TENSORFLOW]
    return [name for name in names if name not in OF_TENSORFLOW]


def marked(names: Iterable[str]) -> list[Any]:
    """Return the checks of the backend as parameters: most are for `--all`."""
    long = pytest.mark.long
    return [pytest.param(x, marks=() if x in OFTEN else long) for x in of_backend(names)]


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> list[str]:
    """The checks of all selected tests, which two processes run one after another."""
    items: Any = [x for x in request.session.items if x.path == request.path]
    return [x.callspec.params["name"] for x in items if "together" in x.fixturenames]


@by_rows
@long_to_compile
@pytest.mark.parametrize("name", marked(RESULTS))
def test_two_processes_give_what_one_gives(found: Any, together: list[str], name: str) -> None:
    apart, where = found(2, name, *together)
    assert apart <= CLOSE, where


@by_rows
@long_to_compile
@pytest.mark.parametrize("name", marked(FAILURES))
def test_what_several_processes_cannot_compute_is_refused(
    found: Any, together: list[str], name: str
) -> None:
    messages = found(2, name, *together)
    assert re.fullmatch(rf"\w+: {FAILURES[name]}", messages[0]), messages[0]
    errors = {message.partition(":")[0] for message in messages}
    assert len(errors) == 1 or name == "error-for-some-rows"


@by_rows
@pytest.mark.long
@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("name", MORE_ON_TENSORFLOW if TENSORFLOW else ["reference", *MORE])
def test_however_steps_run_several_processes_give_what_one_gives(
    found: Any, name: str, size: int
) -> None:
    more = MORE_ON_TENSORFLOW if TENSORFLOW else ("reference", *MORE)
    apart, where = found(size, name, *more)
    assert apart <= CLOSE, where


@pytest.mark.skipif(
    BACKEND != "torch", reason="TensorFlow has the rules of PyTorch, and starts slowly"
)
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_a_step_may_do_in_three_processes(name: str, found: Any) -> None:
    checks = [f"case-{case}" for case in CASES if case not in REFUSED]
    if name in REFUSED:
        pytest.skip("it adds up over examples, or trains on parts of a batch")
    apart, where = found(3, f"case-{name}", *checks)
    assert apart <= ROUGH.get(name, CLOSE), where


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
@pytest.mark.parametrize("name", ON_JAX)
@pytest.mark.long
def test_two_processes_of_jax_give_what_one_gives(found: Any, name: str) -> None:
    apart, where = found(2, name, *ON_JAX)
    assert apart <= CLOSE, where


def test_a_step_in_one_process_has_all_rows() -> None:
    x = keras.ops.ones((3, 2))
    assert treadle.gathered(x) is x
