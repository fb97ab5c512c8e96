"""A run whose Python values changed resumes with the changed values, bit for bit, or is refused.

A process ends here by an exception, and the next one is a new task and a new loop.
"""

import enum
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import once, some
from keras import ops

import treadle
from tests.dying import Dying
from tests.run.test_resume import same_run
from treadle.errors import DirectoryError, StateError
from treadle.hooks import Checkpoint, NonFinite

ROWS, BATCH = 40, 8  # five steps an epoch
Schedule = keras.optimizers.schedules.CosineDecay


class Phase(enum.Enum):
    WARM = 1
    FULL = 2


@dataclass
class Weights:
    first: float = 1.0
    second: float = 0.5


@dataclass(frozen=True)
class Frozen:
    power: int = 2
    factor: float = 1.0


class Many(treadle.Task):
    """Goes by Python values of every kind."""

    def __init__(self, learning_rate: Any = 0.05) -> None:
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.2, seed=1)]
        self.model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9, clipnorm=5.0)
        self.optimizer.build(self.model.trainable_variables)
        self.model.layers[2].trainable = False
        self.scale, self.phase, self.teacher = 1.0, Phase.WARM, Weights()
        self.table: dict[str, Any] = {"shift": 0.0, "powers": [1.0], "pair": (1.0, 2.0)}
        self.weights, self.frozen, self.mask = Weights(), Frozen(), np.ones(3, "float32")
        self.shape: Callable[[Any], Any] = ops.abs
        self.large = np.ones((200, 100))
        self.heads = [self.model.layers[0]]

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        x = x * ops.convert_to_tensor(self.mask) + self.table["shift"]
        y = self.scale * y * self.weights.first * self.table["pair"][1]
        trained = self.model.trainable_variables

        def objective() -> Any:
            error = self.shape(self.model(x, training=True) - y) * self.frozen.factor
            loss = sum(ops.mean(error**power) for power in self.table["powers"])
            if self.phase is Phase.FULL:
                loss += ops.mean(error**self.frozen.power) * len(self.heads)
            return loss if self.teacher is None else 1.1 * loss

        return {"loss": treadle.minimize(objective, trained, self.optimizer)}


class Two(Many):
    """Trains by another optimizer once a flag is set, and with a layer that is made only then."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.late = keras.optimizers.Adam(0.01), False
        self.accumulator, self.head = treadle.Accumulator(2), None

    def train_step(self, batch: Any) -> Any:
        if not self.late:
            return super().train_step(batch)
        if self.head is None:
            self.head = keras.layers.Dense(1)
        x, y = batch
        inputs, trained = self.model.layers[0], self.model.layers[0].trainable_variables
        head: Any = self.head

        def objective() -> Any:
            return ops.mean((head(inputs(x)) - y) ** 2)

        loss, grads = treadle.gradients(objective, trained)
        self.accumulator.add(grads, lambda mean: self.second.apply(mean, trained))
        return {"loss": loss}


class Saving(Checkpoint):
    """Waits until what is due is on the disk, however slow that is."""

    def save_if_due(self, *arguments: Any, **named: Any) -> None:
        self.saved.settle()
        super().save_if_due(*arguments, **named)
        self.saved.settle()


def source() -> Any:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    return treadle.data.from_arrays(x, x[:, :1], batch_size=BATCH)


def three_epochs(loop: treadle.Loop) -> None:
    loop.fit(source(), epochs=3)


def run(
    directory: Path | None,
    hooks: Sequence[Any] = (),
    die_at: int | None = None,
    task: Callable[[], Any] = Many,
    body: Callable[[treadle.Loop], None] = three_epochs,
    every: str = "2 steps",
    **how: Any,
) -> treadle.Loop:
    """Do what a script does from its first line on."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    options = treadle.Options()
    if keras.config.backend() == "tensorflow":  # XLA takes three times as long to compile
        options = replace(options, jit=False)
    saving = [] if directory is None else [Saving(every=every)]
    watching = [*saving, Dying(die_at), *hooks]
    how = {"console": False, "options": options, **how}
    with treadle.Loop(task(), directory, hooks=watching, **how) as loop:
        body(loop)
    return loop


def cut(directory: Path, *steps: int, **how: Any) -> treadle.Loop:
    """Run, die at each of these steps, and come to the end."""
    hooks = how.pop("hooks", list)
    for step in steps:
        with pytest.raises(OSError, match="killed"):
            run(directory, hooks(), die_at=step, **how)
    return run(directory, hooks(), **how)


# What is restored


def unfreeze(loop: Any) -> None:
    loop.task.model.layers[2].trainable = True


def freeze_all_but_one(loop: Any) -> None:
    loop.task.model.trainable = False
    loop.task.model.trainable = True
    loop.task.model.layers[0].trainable = False


def double(loop: Any) -> None:
    loop.task.scale *= 2


def change_items(loop: Any) -> None:
    loop.task.table["shift"] = -0.5
    loop.task.table["pair"] = (1.0, 3.0)
    loop.task.table["powers"][0] = 2.0


def change_objects(loop: Any) -> None:
    loop.task.phase = Phase.FULL
    loop.task.weights.first = 0.5
    loop.task.frozen = Frozen(power=4, factor=0.5)
    loop.task.mask = np.array([1, 0, 1], "float32")
    loop.task.teacher = None


def change_rates(loop: Any) -> None:
    loop.task.model.layers[1].rate = 0.6
    loop.task.optimizer.clipnorm = 0.1
    loop.task.optimizer.momentum = 0.5


def replace_schedule(loop: Any) -> None:
    loop.task.optimizer.learning_rate = Schedule(0.2, 40, alpha=0.5)


def select_the_second(loop: Any) -> None:
    loop.task.late = True


def scheduled() -> Many:
    return Many(Schedule(0.05, 20))


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "task"),
    [
        (unfreeze, Many),
        pytest.param(freeze_all_but_one, Many, marks=once),
        pytest.param(double, Many, marks=once),
        pytest.param(change_items, Many, marks=once),
        pytest.param(change_objects, Many, marks=once),
        pytest.param(change_rates, Many, marks=once),
        (replace_schedule, scheduled),
        pytest.param(select_the_second, Two, marks=once),
    ],
)
def test_values_changed_by_hooks_are_as_in_an_uninterrupted_run(
    tmp_path: Path, change: Callable[[Any], None], task: Any
) -> None:
    def hooks() -> Any:
        return [treadle.at("6 steps", change)]

    straight = run(tmp_path / "straight", hooks(), task=task)
    assert "recompiled because " in straight.history["note"][0]
    # The first resume is from the moment of the change, before the step was compiled for it.
    same_run(cut(tmp_path / "cut", 7, 13, hooks=hooks, task=task), straight)


def test_a_float_that_a_hook_doubles(tmp_path: Path) -> None:
    class Line(treadle.Task):
        def __init__(self) -> None:
            self.w, self.scale = keras.Variable([0.0]), 1.0
            self.optimizer = keras.optimizers.SGD(0.1)

        def train_step(self, batch: Any) -> Any:
            def objective() -> Any:
                return ops.mean((self.w - self.scale * batch) ** 2)

            return {"loss": treadle.minimize(objective, [self.w], self.optimizer)}

    how: Any = {
        "task": Line,
        "hooks": lambda: [treadle.at("5 steps", double)],
        "body": lambda loop: loop.fit([np.ones(1, "float32")] * 20, epochs=1),
    }
    w = cut(tmp_path, 12, **how).state.arrays()["w"]
    assert round(float(w[0]), 4) == 1.9533


class Thawing(treadle.Task):
    """Begins with a frozen layer, and builds its optimizer in the first step."""

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((3,)), *map(keras.layers.Dense, (4, 1))])
        self.model.layers[0].trainable = False
        self.optimizer = keras.optimizers.Adam(0.01)

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return ops.mean((self.model(x) - y) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


@pytest.mark.long
def test_a_layer_that_was_trained_and_frozen_again(tmp_path: Path) -> None:
    def turn(loop: Any) -> None:
        loop.task.model.layers[0].trainable ^= True

    def hooks() -> Any:
        return [treadle.at("3 steps", turn), treadle.at("6 steps", turn)]

    straight = run(tmp_path / "straight", hooks(), task=Thawing)
    assert "optimizer/momentums/model/layers/0/kernel" in straight.state.variables
    same_run(cut(tmp_path / "cut", 4, 8, 11, hooks=hooks, task=Thawing), straight)


def test_a_layer_that_only_a_hook_calls_must_be_built(tmp_path: Path) -> None:
    class Looking(Thawing):
        def __init__(self) -> None:
            super().__init__()
            self.probe = keras.layers.Dense(2)

        def look(self, x: Any) -> Any:
            return self.probe(x)

    def hooks() -> Any:
        x = np.ones((2, 3), "float32")

        def look(loop: Any) -> None:
            loop.call(loop.task.look, x)

        return [treadle.at("3 steps", look)]

    told = (
        "probe/kernel is not in this task; probe/bias is not in this task. Nothing was changed. A "
        "layer that only predict_step or loop.call uses must be built in __init__, for example "
        "with an Input"
    )
    with pytest.raises(StateError, match=re.escape(told)):
        cut(tmp_path, 8, hooks=hooks, task=Looking)


@pytest.mark.long
def test_a_value_that_a_hook_changed_back_is_restored(tmp_path: Path) -> None:
    def body(loop: treadle.Loop) -> None:
        loop.task.scale = 3.0  # by the script, each time that it runs
        three_epochs(loop)

    def back(loop: Any) -> None:
        loop.task.scale = 1.0

    def hooks() -> Any:
        return [treadle.at("1 epochs", back), treadle.at("2 epochs", double)]

    straight = run(tmp_path / "straight", hooks(), body=body)
    same_run(cut(tmp_path / "cut", 8, 10, 13, hooks=hooks, body=body), straight)


class Starting(treadle.Hook):
    """Sets values as it starts, which it does again when the run resumes."""

    def start(self, loop: Any) -> None:
        loop.task.scale *= 3
        loop.task.table["shift"] = 0.1
        loop.task.shape = lambda x: ops.abs(x) + 0.1 * x**2


@pytest.mark.long
def test_values_that_hooks_set_in_start_are_set_once(tmp_path: Path) -> None:
    def hooks() -> Any:
        return [Starting(), treadle.at("1 epochs", double)]

    straight = run(tmp_path / "straight", hooks())
    assert straight.task.scale == 6.0
    # From step 0 all of it happens again.
    resumed = cut(tmp_path / "cut", 1, 4, 8, hooks=hooks)
    assert resumed.task.scale == 6.0
    same_run(resumed, straight)


def own_epochs(loop: treadle.Loop) -> None:
    for epoch in loop.epochs(3):
        loop.task.scale = 1.0 + epoch
        for _ in loop.steps(source(), every="2 steps"):
            loop.task.table["shift"] += 0.01


def several_calls(loop: treadle.Loop) -> None:
    for _ in range(3):
        loop.task.scale *= 2
        loop.fit(source(), epochs=1)


def single_steps(loop: treadle.Loop) -> None:
    x = np.random.default_rng(0).normal(size=(15, BATCH, 3)).astype("float32")
    for step in range(loop.progress.step, 15):
        loop.task.scale = 1.0 + step // 4
        loop.step((x[step], x[step, :, :1]))
        loop.task.table["shift"] += 0.01 * (step == 2)
        loop.save()


@pytest.mark.long
@pytest.mark.parametrize("body", [own_epochs, several_calls, single_steps])
def test_values_that_the_script_sets_itself(tmp_path: Path, body: Any) -> None:
    straight = run(tmp_path / "straight", body=body)
    same_run(cut(tmp_path / "cut", 4, 6, 11, body=body), straight)


def test_a_finished_run_has_the_last_values_again(tmp_path: Path) -> None:
    hooks = [treadle.at("6 steps", double)]
    run(tmp_path, hooks)
    again = run(tmp_path, hooks)
    assert again.reason == "it was finished before"
    assert again.task.scale == 2.0


# What is refused


def replace_optimizer(loop: Any) -> None:
    loop.task.optimizer = keras.optimizers.Adam(0.01)


def replace_number_by_schedule(loop: Any) -> None:
    loop.task.optimizer.learning_rate = Schedule(0.2, 40)


def replace_large_array(loop: Any) -> None:
    loop.task.large = np.zeros((200, 100))


def add_attribute(loop: Any) -> None:
    loop.task.seen = 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (replace_optimizer, "optimizer changed from one SGD to one Adam"),
        (
            replace_number_by_schedule,
            r"optimizer/learning_rate changed from one \w*Variable to one CosineDecay",
        ),
        (replace_large_array, "large changed from one ndarray to one ndarray"),
    ],
)
def test_changes_that_a_checkpoint_cannot_hold_end_the_run(
    tmp_path: Path, change: Any, told: str
) -> None:
    with pytest.raises(StateError, match=f"^{told}, which a checkpoint cannot hold, so this run"):
        run(tmp_path, [treadle.at("6 steps", change)], every="3 steps")
    # The next process resumes from before the change.
    resumed = run(tmp_path, every="3 steps")
    assert resumed.progress.step == 15
    assert json.loads((tmp_path / "run.json").read_text())["resumed"][-1]["step"] == 3


@pytest.mark.long
def test_objects_that_the_script_replaces_between_calls(tmp_path: Path) -> None:
    def body(loop: treadle.Loop) -> None:
        loop.task.shape = ops.square
        loop.fit(source(), epochs=1)
        replace_optimizer(loop)
        loop.task.heads.append(loop.task.model.layers[2])
        loop.fit(source(), epochs=2)

    straight = run(tmp_path / "straight", body=body)
    same_run(cut(tmp_path / "cut", 3, 6, 11, body=body), straight)


def test_an_attribute_that_a_hook_added_is_named_in_a_warning(tmp_path: Path, capsys: Any) -> None:
    hooks = [treadle.at("6 steps", add_attribute)]
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, hooks, die_at=9)
    told = "seen changed from nothing to 3 during the run, and is not restored, because the task is"
    run(tmp_path, hooks, console=True)
    assert f"warning: {told}" in " ".join(capsys.readouterr().out.split())


def test_a_value_that_the_task_does_not_take_any_more(tmp_path: Path) -> None:
    class Fixed(Weights):
        first = property(lambda self: 1.0, lambda self, value: None)  # type: ignore[assignment]

    class Edited(Many):
        def __init__(self, learning_rate: Any = 0.05) -> None:
            super().__init__(learning_rate)
            self.weights = Fixed()

    Edited.__qualname__ = Many.__qualname__

    def halve(loop: Any) -> None:
        loop.task.weights.first = 0.5

    hooks = [treadle.at("6 steps", halve)]
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, hooks, die_at=9)
    with pytest.raises(StateError) as raised:
        run(tmp_path, task=Edited)
    assert str(raised.value) == (
        "this run cannot resume from its checkpoint: weights/first changed from 1.0 to 0.5 during "
        "the run, and the task of this script cannot be given that value. Create the task as "
        "before; fresh=True (--fresh) trains from scratch, and override=True (--override) resumes "
        "with the values of this script"
    )
    loop = run(tmp_path, task=Edited, override=["constants.weights/first"])
    assert loop.progress.step == 15 and loop.task.weights.first == 1.0
    [found] = json.loads((tmp_path / "run.json").read_text())["overridden"]
    assert (
        found == "constants.weights/first was not put back: weights/first changed from 1.0 to 0.5"
    )


def test_a_changed_value_that_the_script_now_begins_with_otherwise(tmp_path: Path) -> None:
    class Edited(Many):
        def __init__(self, learning_rate: Any = 0.05) -> None:
            super().__init__(learning_rate)
            self.weights.first = 0.25

    Edited.__qualname__ = Many.__qualname__
    hooks = [treadle.at("6 steps", change_objects)]
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, hooks, die_at=9)
    told = re.escape("constants.weights/first was '1.0', now '0.25'")
    with pytest.raises(DirectoryError, match=f"began with other Python values: {told}.*override"):
        run(tmp_path, hooks, task=Edited)
    loop = run(tmp_path, hooks, task=Edited, override=True)
    assert loop.task.weights.first == 0.25 and loop.task.phase is Phase.FULL
    found = json.loads((tmp_path / "run.json").read_text())["overridden"]
    assert "constants.weights/first was '1.0', now '0.25'" in found


# Going back


def spoiled(at: int) -> Iterator[Any]:
    x = np.random.default_rng(0).normal(size=(15, BATCH, 3)).astype("float32")
    for step in range(15):
        y = x[step, :, :1].copy()
        y[0] = np.nan if step == at else y[0]
        yield x[step], y


@pytest.mark.long
@pytest.mark.parametrize("change", [double, unfreeze])
@pytest.mark.parametrize("every", ["4 steps", "100 steps"])
def test_a_rollback_restores_the_values_of_the_checkpoint(
    tmp_path: Path, change: Any, every: str
) -> None:
    def hooks() -> Any:
        return [Starting(), treadle.at("5 steps", change), NonFinite(action="rollback")]

    def body(bad: int) -> Any:
        batches = list(spoiled(bad))
        lacking = batches[:6] + batches[7:] if bad < 0 else batches
        return lambda loop: loop.fit(lacking, epochs=1)

    straight = run(tmp_path / "lacking", hooks(), body=body(-1), every=every)
    went = run(tmp_path / "went", hooks(), body=body(6), every=every)
    theirs = straight.state.arrays()
    for path, value in went.state.arrays().items():
        assert value.tobytes() == theirs[path].tobytes(), path
    assert went.task.scale == straight.task.scale
    np.testing.assert_array_equal(went.history.steps("loss"), straight.history.steps("loss"))


def changing() -> Any:
    return [treadle.at("6 steps", double), treadle.at("6 steps", change_rates)]


@pytest.fixture(scope="module")
def changed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("changed") / "run"
    run(directory, changing())
    return directory


@pytest.mark.parametrize("step", some([4, 6, 7, 12]))
def test_a_replay_has_the_values_of_its_step(changed_run: Path, step: int) -> None:
    keras.utils.set_random_seed(1)
    report = treadle.doctor.replay(Many(), source(), changed_run, step=step, hooks=changing())
    assert report.agreement.compared and report.agreement.difference == ""
    assert report.eager_distance < 1e-5
