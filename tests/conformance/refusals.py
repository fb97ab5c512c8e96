"""PyTorch: the reason why the step of a task is not captured."""

import re
from collections.abc import Callable
from typing import Any

import keras
from classifier import batches

import treadle
from treadle.testing import Trace, run_steps
from treadle.testing.trace import compare

BATCHES = list(zip(*batches(6), strict=True))


def refusal(make: Callable[[], Any]) -> str:
    """Why a task's step is not captured; checks that it then does what it does eagerly."""
    found: list[Trace] = []
    for execution in ("auto", "eager"):
        keras.utils.set_random_seed(3)
        found.append(run_steps(make(), BATCHES, treadle.Options(execution=execution)))
    compare(*found, "not captured", "run eagerly", tolerance=None)
    plan = re.fullmatch(r"eager \(the step could not be captured: (.*)\)", found[0].plan)
    assert plan is not None, found[0].plan
    return plan[1]
