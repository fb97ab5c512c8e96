"""What a case holds, under which names, what its steps change, and what they must not."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import runs
from cases import batches_of
from classifier import ROWS

from treadle.testing import Trace, run_steps

STEPS = runs.STEPS

HELD = {
    "supervised": """
        model/layers/0/kernel model/layers/0/bias model/layers/1/kernel model/layers/1/bias
        metrics/accuracy/total metrics/accuracy/count
        optimizer/iterations optimizer/learning_rate
        optimizer/momentums/model/layers/0/kernel optimizer/momentums/model/layers/0/bias
        optimizer/momentums/model/layers/1/kernel optimizer/momentums/model/layers/1/bias
        optimizer/velocities/model/layers/0/kernel optimizer/velocities/model/layers/0/bias
        optimizer/velocities/model/layers/1/kernel optimizer/velocities/model/layers/1/bias
        random/keras
        """,
    "gru": """
        model/layers/1/cell/kernel model/layers/1/cell/recurrent_kernel model/layers/1/cell/bias
        model/layers/1/cell/seed_generator/state
        model/layers/2/kernel model/layers/2/bias
        accuracy/total accuracy/count optimizer/iterations optimizer/learning_rate random/keras
        """,
    "attention": """
        model/layers/1/attention/query_dense/kernel model/layers/1/attention/query_dense/bias
        model/layers/1/attention/key_dense/kernel model/layers/1/attention/key_dense/bias
        model/layers/1/attention/value_dense/kernel model/layers/1/attention/value_dense/bias
        model/layers/1/attention/dropout_layer/seed_generator/state
        model/layers/1/attention/output_dense/kernel model/layers/1/attention/output_dense/bias
        model/layers/3/kernel model/layers/3/bias
        accuracy/total accuracy/count optimizer/iterations optimizer/learning_rate random/keras
        """,
    "spectral": """
        model/layers/0/kernel model/layers/0/vector_u model/layers/0/layer/bias
        model/layers/1/kernel model/layers/1/bias
        accuracy/total accuracy/count optimizer/iterations optimizer/learning_rate random/keras
        """,
    "holders": """
        pair/scale pair/layers/0/kernel pair/layers/0/bias pair/layers/1/kernel pair/layers/1/bias
        heads/a/0/kernel heads/a/0/bias heads/b/0/kernel heads/b/0/bias
        nested/model/layers/0/kernel nested/model/layers/0/bias
        nested/model/layers/1/kernel nested/model/layers/1/bias
        nested/accuracy/total nested/accuracy/count
        nested/optimizer/iterations nested/optimizer/learning_rate
        nested/head_optimizer/iterations nested/head_optimizer/learning_rate
        nested/head_optimizer/momentums/nested/model/layers/1/kernel
        nested/head_optimizer/momentums/nested/model/layers/1/bias
        nested/head_optimizer/velocities/nested/model/layers/1/kernel
        nested/head_optimizer/velocities/nested/model/layers/1/bias
        optimizer/iterations optimizer/learning_rate random/keras
        """,
}

# In addition to the rest, which is all changed by seven steps.
ACCURACY = {"accuracy/total", "accuracy/count"}
CRITIC_BIAS = {  # adds the same to what is real and what is not
    "critic/layers/1/bias",
    "optimizers/critic/momentums/critic/layers/1/bias",
    "optimizers/critic/velocities/critic/layers/1/bias",
}
RATES = {"optimizers/generator/learning_rate", "optimizers/critic/learning_rate"}
UNCHANGED = {
    "keras-random": {"optimizer/learning_rate", *ACCURACY},
    "schedule": {"random/keras"},  # which holds no learning rate
    "cond": {"optimizer/learning_rate", "random/keras", *ACCURACY},
    "substituted": {"optimizer/learning_rate", "random/keras", *ACCURACY},
    "for-each": {"optimizer/learning_rate", "random/keras", *ACCURACY},
    "parts-of-one-model": {
        "optimizer/learning_rate",
        "head_optimizer/learning_rate",
        "random/keras",
        *ACCURACY,
    },
    "multi-optimizer": {
        "optimizer/learning_rate",
        "optimizer/inner_optimizers/0/learning_rate",
        "optimizer/inner_optimizers/1/learning_rate",
        "random/keras",
    },
    "momentum-encoder": {"optimizer/learning_rate", "random/keras", *ACCURACY},
    "frozen-layer": {
        "optimizer/learning_rate",
        "random/keras",
        "model/layers/0/kernel",
        "model/layers/0/bias",
    },
    "lstm": {
        "optimizer/learning_rate",
        "random/keras",
        "model/layers/1/cell/seed_generator/state",  # for dropout, of which it has none
    },
    "accumulator": {"accumulator/skipped", "random/keras", *ACCURACY},
    "gradient-toolkit": {  # whose first layer is frozen
        "optimizer/learning_rate",
        "random/keras",
        "model/layers/0/kernel",
        "model/layers/0/bias",
        *ACCURACY,
    },
    "critic-steps": {*RATES, *CRITIC_BIAS, "random/keras"},
    "two-models": {*RATES, *CRITIC_BIAS, "random/keras"},
    "one-forward-pass": {*RATES, "random/keras"},
    "gradient-penalty": {*RATES, "optimizers/generator/iterations", "random/keras"},
    "holders": {
        "optimizer/learning_rate",
        "nested/optimizer/learning_rate",
        "nested/head_optimizer/learning_rate",
        "nested/accuracy/total",
        "nested/accuracy/count",
        "random/keras",
    },
}
if keras.config.backend() == "torch":  # an unseeded Dropout draws from torch's own generator
    UNCHANGED["dropout-unseeded"] = {
        "optimizer/learning_rate",
        "random/keras",
        "model/layers/1/seed_generator/state",
    }


@pytest.mark.parametrize("name", runs.cases(HELD))
def test_paths_are_what_the_attributes_say(name: str) -> None:
    assert set(runs.compiled(name).state) == set(HELD[name].split())


@pytest.mark.parametrize("name", runs.cases(every=2))
def test_paths_are_the_same_in_every_instance(name: str) -> None:
    paths = list(runs.compiled(name).state)
    assert paths == list(runs.eager(name).state)
    automatic = [path for path in paths if re.search(r"_\d+(/|$)", path)]
    assert automatic == [], "these hold Keras' automatic names, which count instances"


@pytest.mark.parametrize("name", runs.cases())
def test_steps_change_what_they_should_and_nothing_else(name: str) -> None:
    trace = runs.compiled(name)
    default = {"optimizer/learning_rate", "random/keras"}
    assert set(trace.state) - trace.changed == UNCHANGED.get(name, default)


def counted(trace: Trace, path: str) -> int:
    """How far an integer variable, or a seed generator's counter, moved."""
    return int(np.ravel(trace.state[path])[-1]) - int(np.ravel(trace.start[path])[-1])


COUNTED = [
    ("unbuilt", "optimizer/iterations", STEPS),
    ("unbuilt", "accuracy/count", STEPS * ROWS),
    ("metrics-only", "mean_loss/count", STEPS),
    ("metrics-only", "accuracy/count", STEPS * ROWS),
    ("two-models", "optimizers/critic/iterations", STEPS),
    ("multi-optimizer", "optimizer/iterations", STEPS),
    ("multi-optimizer", "optimizer/inner_optimizers/0/iterations", STEPS),
    ("dropout-seeded", "model/layers/1/seed_generator/state", STEPS),
    ("keras-random", "noise/state", STEPS),
    ("cond", "optimizer/iterations", 3),  # steps 0, 3 and 6
    ("cond", "updates", 3),
    ("cond", "model/layers/1/seed_generator/state", 3),
    ("substituted", "model/layers/2/seed_generator/state", 2 * STEPS),
    ("substituted", "optimizer/iterations", STEPS),
    ("for-each", "model/layers/1/seed_generator/state", ROWS * STEPS),
    ("for-each", "optimizer/iterations", STEPS),
]


def counted_cases(every: int = 1) -> list[Any]:
    return [pytest.param(*each, marks=runs.marks(each[0], every)) for each in COUNTED]


@pytest.mark.parametrize(("name", "path", "times"), counted_cases())
def test_every_assignment_happens_once_and_is_kept(name: str, path: str, times: int) -> None:
    assert counted(runs.compiled(name), path) == times


@pytest.mark.parametrize(("name", "path", "times"), counted_cases(every=2))
def test_every_assignment_happens_once_in_an_eager_step(name: str, path: str, times: int) -> None:
    assert counted(runs.eager(name), path) == times


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        pytest.param(name, calls, marks=runs.marks(name))
        for name, calls in {
            "batchnorm": STEPS,
            "substituted": 2 * STEPS,
        }.items()
    ],
)
def test_moving_averages_move_once_per_call(name: str, calls: int) -> None:
    momentum = 0.99  # of BatchNormalization, by default
    moved = runs.compiled(name).state["model/layers/1/moving_variance"]
    # From ones, towards variances of tanh that lie between 0 and 1.
    assert (moved > momentum**calls).all()
    assert (moved < 1).all()
    assert (moved > momentum ** (calls + 1)).all()


@pytest.mark.parametrize("name", runs.cases(["momentum-encoder"]))
def test_frozen_copies_stay_and_averages_follow(name: str) -> None:
    trace = runs.compiled(name)
    for i in (0, 1):
        online, slow, target = (
            trace.state[f"{model}/layers/{i}/kernel"] for model in ("model", "slow", "target")
        )
        start = trace.start[f"model/layers/{i}/kernel"]
        np.testing.assert_array_equal(target, online)
        np.testing.assert_array_equal(trace.start[f"slow/layers/{i}/kernel"], start)
        assert 0 < np.abs(slow - start).max() < np.abs(online - start).max()


def test_logs_are_every_steps_own() -> None:
    trace = runs.compiled("weighted", (7,))
    labels = [batch[1].sum() for batch in batches_of("weighted", STEPS)]
    assert trace.values["step"].tolist() == list(range(STEPS))
    assert trace.weights["loss"].tolist() == labels
    assert "step" not in trace.weights
    assert runs.compiled("cond", (7,)).values["updates"].tolist() == [1, 1, 1, 2, 2, 2, 3]


def test_evaluation_shares_metrics_and_leaves_the_rest() -> None:
    prepared = runs.runner("metrics-only", execution="eager")
    prepared.run(batches_of("metrics-only", 2))
    trace = run_steps(prepared.task, batches_of("metrics-only", 3), step="eval_step")
    assert trace.values == {}
    assert trace.changed == {*ACCURACY, "mean_loss/total", "mean_loss/count"}
    assert counted(trace, "accuracy/count") == 3 * ROWS
    assert counted(trace, "mean_loss/count") == 3
