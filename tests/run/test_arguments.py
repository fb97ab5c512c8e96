"""What a loop cannot mean is refused at once, and the message says what to write."""

import inspect
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.core.habits import (
    OF_HOOKS,
    OF_MODEL_CHECKPOINT,
    OF_MONITORS,
    OF_PLATEAU,
    OF_STOPPING,
    OF_TENSORBOARD,
    OF_TREADLE,
)
from treadle.errors import ConfigurationError, DataError, StepError, TreadleWarning
from treadle.run import habits
from treadle.run.run import Run


class Mine(treadle.Task):
    def train_step(self, batch: Any) -> Any:
        return {"mean": keras.ops.mean(batch)}


class Parts(treadle.Task):
    def train_step(self, x: Any, y: Any) -> Any:
        return {"mean": keras.ops.mean(x - y)}


class Lightning:
    def training_step(self, batch: Any, index: int) -> Any: ...

    def configure_optimizers(self) -> Any: ...


class Recorder(treadle.Hook):
    def record(self, record: Any) -> None: ...  # type: ignore[override]


def fit_model(**how: Any) -> Any:
    model = dense()
    model.compile("sgd", "mse")
    return treadle.fit(model, np.ones((4, 2)), np.ones((4, 1)), **how)


def fit(**how: Any) -> Any:
    return treadle.Loop(Mine(), console=False).fit([np.ones(2)], **how)


def loop(**how: Any) -> Any:
    return treadle.Loop(Mine(), console=False, **how)


def dense() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="net")


EVERY = treadle.every("1 step", lambda loop: None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: treadle.Loop(Mine),
            r"got the class Mine: pass an instance, treadle\.Loop\(Mine\(\)\)",
        ),
        (
            lambda: treadle.Loop(dense()),
            r"the model .net. \(Sequential\) is not compiled: write model.compile\(optimizer=",
        ),
        (lambda: treadle.Loop(object()), r"got a object, which has no train_step: inherit from"),
        (lambda: loop(options={"window": 8}), r"not a dict: write options=treadle.Options\("),
        (lambda: loop(hooks=EVERY), r"a list, not one Scheduled: write hooks=\[…\] around it"),
        (lambda: loop(hooks=print), r"hooks must be a list, not a builtin_function"),
        (lambda: loop(hooks=[print]), r"is not a hook: schedule a function"),
        (lambda: loop(hooks=[[EVERY]]), r"has a list in it: write its hooks one by one, and Keras"),
        (lambda: treadle.every(print, "1 s"), r"begins with its time or count, as treadle.every\("),
        (
            lambda: loop(hooks=[keras.callbacks.EarlyStopping()]),
            r"^EarlyStopping is a Keras callback, not a hook: write hooks=\[treadle\.hooks\."
            r"KerasCallbacks\(\[…\]\)\] around it$",
        ),
        (
            lambda: fit_model(callbacks=[treadle.hooks.EarlyStopping("loss")]),
            r"^EarlyStopping is a hook, not a Keras callback: pass it as hooks=\[…\]$",
        ),
        (
            lambda: treadle.Loop(Parts()),
            r"^train_step of Parts takes x, y, but is called with one batch: write `def "
            r"train_step\(self, batch\):`, and take the batch apart in it, as in `x, y = batch`; "
            r"treadle\.step\(\) is the number of the step$",
        ),
        (
            lambda: fit(validation=[np.ones(2)], epochs=1),
            r"^Mine has no eval_step: write `def eval_step\(self, batch\):` to evaluate or valid",
        ),
        (
            lambda: treadle.Loop(Lightning()),
            r"^Lightning has no train_step, but a training_step: rename it, let it take one batch, "
            r"and update the model in it with treadle\.minimize\(objective, self\.model, self\.opt"
            r"imizer\); optimizers are attributes of the task, and configure_optimizers is not",
        ),
        (
            lambda: loop(hooks=[treadle.hooks.BestWeights]),
            r"^BestWeights is a class, not a hook: write hooks=\[BestWeights\(…\)\]$",
        ),
        (
            lambda: loop(hooks=[Recorder()]),
            r"^record of the hook Recorder takes record: write `def record\(self, loop, record\):`",
        ),
        (
            lambda: treadle.every("1 epoch", lambda: None),
            r"^<lambda> takes no arguments, but a hook is called with the loop: write `def show\(",
        ),
        (
            lambda: treadle.every("1 epoch", print("")),  # type: ignore[arg-type, func-returns-value]
            r"^a trigger needs a function, not None: write treadle\.every\('200 steps', function\),"
            r" without calling the function$",
        ),
        (
            lambda: treadle.every(100, print),  # type: ignore[arg-type]
            r"^cannot read 100 as a time or a count: write a number and a unit in quotes, for "
            r"example '100 steps'; units are steps, epochs, examples, s, min, h$",
        ),
        (lambda: treadle.task(print, hooks=[]), r"^'hooks' cannot be the name of a state$"),
        (lambda: fit(epochs=1.5), r"^epochs must be a whole number, not 1\.5$"),
        (lambda: fit(epochs=2.0), r"^epochs must be a whole number, not 2\.0: write epochs=2$"),
        (lambda: fit(epochs="2"), r"^epochs must be a whole number, not '2': write epochs=2$"),
        (lambda: fit(steps=True), r"^steps must be a whole number, not True$"),
        (lambda: fit(steps=-1), r"^steps must be at least 1, not -1$"),
        (lambda: next(loop().epochs("3")), r"^epochs must be a whole number, not '3'"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.parametrize(
    ("method", "of", "habits"),
    [
        (fit, "Loop.fit", habits.OF_FIT),
        (loop, "Loop", habits.OF_LOOP),
        (fit_model, "treadle.fit", habits.OF_KERAS_FIT),
        (treadle.hooks.BestWeights, "BestWeights", OF_MONITORS),
        (treadle.hooks.EarlyStopping, "EarlyStopping", OF_STOPPING),
        (treadle.hooks.ReduceOnPlateau, "ReduceOnPlateau", OF_PLATEAU),
        (treadle.hooks.Checkpoint, "Checkpoint", OF_MODEL_CHECKPOINT),
        (treadle.hooks.TensorBoard, "TensorBoard", OF_TENSORBOARD),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_of_other_libraries_are_translated(method: Any, of: str, habits: Any) -> None:
    for name, remedy in habits.items():
        with pytest.raises(ConfigurationError) as caught:
            method(**{name: 1})
        assert str(caught.value) == f"{of} has no argument {name}: {remedy}"
    functions = {"Loop.fit": treadle.Loop.fit, "treadle.fit": treadle.fit}
    function = functions.get(of, method if inspect.isclass(method) else treadle.Loop)
    assert not habits.keys() & {*inspect.signature(function).parameters}
    with pytest.raises(TypeError, match="unexpected keyword argument 'epohcs'"):
        method(epohcs=1)


@pytest.mark.parametrize(
    ("module", "habits"), [(treadle, OF_TREADLE), (treadle.hooks, OF_HOOKS)], ids=["", "hooks"]
)
def test_names_of_other_libraries_are_translated(module: Any, habits: Any) -> None:
    for name, remedy in {**habits, "Nothing": ""}.items():
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        expected = f"module {module.__name__!r} has no attribute {name!r}"
        assert str(caught.value) == (f"{expected}: {remedy}" if remedy else expected)


def test_attributes_of_other_trainers_are_translated() -> None:
    trained = loop()
    for name, remedy in habits.OF_LOOPS.items():
        with pytest.raises(AttributeError) as caught:
            getattr(trained, name)
        assert str(caught.value) == f"'Loop' object has no attribute {name!r}: {remedy}"
    with pytest.raises(AttributeError, match=r"^'Loop' object has no attribute 'nothing'$"):
        _ = trained.nothing


def test_a_property_of_a_loop_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(run: Any) -> Any:
        raise AttributeError("in a property of the task")

    monkeypatch.setattr(Run, "state", property(state))
    with pytest.raises(AttributeError, match=r"^in a property of the task$"):
        _ = loop().state


class Keras(treadle.Hook):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...

    def on_train_begin(self, logs: Any = None) -> None: ...


class CallsItself(treadle.Hook):
    def record(self, loop: Any, record: Any) -> None:
        self.on_epoch_end(0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...


class OfLightning(Mine):
    def __init__(self) -> None:
        self.configure_optimizers()

    def configure_optimizers(self) -> None: ...

    def eval_step(self, batch: Any) -> Any:
        return (lambda: self.validation_step(batch, 0))()

    def validation_step(self, batch: Any, index: int) -> Any: ...


class Unused(Mine):
    def configure_optimizers(self) -> Any: ...

    def validation_step(self, batch: Any, index: int) -> Any: ...

    def test_step(self, batch: Any, index: int) -> Any: ...

    def on_epoch_end(self) -> None: ...


class OfKeras(treadle.Task, keras.Model):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Its `test_step` is that of Keras."""

    def train_step(self, batch: Any) -> Any:
        return {"mean": keras.ops.mean(batch)}


class Recording(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...


def test_methods_that_are_never_called_give_one_warning() -> None:
    with pytest.warns(TreadleWarning) as caught:
        loop(hooks=[Keras(), EVERY])
    assert [str(warning.message) for warning in caught] == [
        "a loop does not call Keras.on_epoch_end: write record(self, loop, record); "
        "a loop does not call Keras.on_train_begin: write start(self, loop)"
    ]
    with pytest.warns(TreadleWarning) as caught:
        treadle.Loop(Unused(), console=False)
    assert [str(warning.message) for warning in caught] == [
        "a loop does not call Unused.configure_optimizers: make the optimizer in __init__, and "
        "apply it in train_step; a loop does not call Unused.on_epoch_end: write a hook, see "
        "treadle.Hook; a loop does not call Unused.test_step: write eval_step(self, batch); a loop "
        "does not call Unused.validation_step: write eval_step(self, batch)"
    ]


class Both(treadle.Hook, Recording):
    """A hook and a callback, whose methods Keras' list of callbacks calls."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...


class CallsTheTask(treadle.Hook):
    def record(self, loop: Any, record: Any) -> None:
        loop.task.test_step(None, 0)
        getattr(loop.task, "validation_step")  # noqa: B009


class Called(Mine):
    def validation_step(self, batch: Any, index: int) -> Any: ...

    def test_step(self, batch: Any, index: int) -> Any: ...


def test_methods_that_are_called_give_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    callbacks = treadle.hooks.KerasCallbacks([Recording(), Both()])
    treadle.Loop(Called(), hooks=[CallsTheTask()], console=False)
    treadle.Loop(OfLightning(), hooks=[CallsItself(), callbacks], console=False)
    treadle.Loop(OfKeras(), console=False)
    fit_model(callbacks=[Recording()], verbose=0)
    assert not [each for each in recwarn if issubclass(each.category, TreadleWarning)]


def test_advice_covers_the_methods_of_keras_callbacks() -> None:
    of_keras = {name for name in dir(keras.callbacks.Callback) if name.startswith("on_")}
    missing = {name for name in of_keras - habits.OF_HOOKS.keys() if "predict" not in name}
    assert missing == {"on_test_batch_begin", "on_test_batch_end"}


def test_a_metric_that_is_returned_too_is_left_out() -> None:
    class Counting(treadle.Task):
        def __init__(self) -> None:
            self.acc = keras.metrics.Mean(name="acc")

        def train_step(self, batch: Any) -> Any:
            self.acc.update_state(batch)
            return {"acc": self.acc.result()}

    message = "leave it out of the returned values, since the metric is logged under its name"
    with pytest.raises(StepError, match=message):
        treadle.Loop(Counting(), console=False).fit([np.ones(2)], epochs=1)


@pytest.mark.parametrize("size", [32.0, "32", None])
def test_a_batch_size_is_a_whole_number(size: Any) -> None:
    message = r"^batch_size must be a whole number, not [\w.']+(: write batch_size=32)?$"
    with pytest.raises(DataError, match=message):
        treadle.data.from_arrays(np.ones(64), batch_size=size)
    assert treadle.data.from_arrays(np.ones(64), batch_size=np.int64(32)).length == 2


def test_an_object_with_a_train_step_is_a_task() -> None:
    class Line:
        def __init__(self) -> None:
            self.slope, self.optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)

        def train_step(self, batch: Any) -> Any:
            return treadle.minimize(
                lambda: keras.ops.mean(self.slope * batch), [self.slope], self.optimizer
            )

    line = Line()
    with treadle.Loop(line, console=False) as loop:
        loop.fit([np.ones(2, "float32")] * 4, epochs=1)
    assert line.slope.numpy() == pytest.approx(0.6)
    with pytest.raises(ConfigurationError, match="Line has no eval_step: write `def eval_step"):
        loop.evaluate([np.ones(2)])


def test_numpy_s_whole_numbers_count() -> None:
    assert fit(epochs=np.int32(2)).steps("mean").tolist() == [1, 1]
