"""What new users do wrong inside a step, and what they are told: the same on every backend."""

import random
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from cases import CLASSES, FEATURES, Classifier, dense, head
from keras import ops

import treadle
from treadle import data
from treadle.errors import ConfigurationError, DataError, GradientError, StepError, TreadleError
from treadle.hooks.lines import read_log

ROWS = 40


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=ROWS).astype("int32")


def source() -> Any:
    return data.from_arrays(*arrays(), batch_size=8)


class Does(Classifier):
    """A classifier that does something of the test's own after each step of learning."""

    def __init__(self, action: Callable[..., Any], **state: Any) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.action = action
        vars(self).update(state)

    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        self.action(self, batch, logs["loss"])
        return logs


@pytest.fixture(params=["auto", "eager"])
def options(request: pytest.FixtureRequest) -> treadle.Options:
    return treadle.Options(execution=request.param)


def told(
    kind: type[TreadleError], task: Any, options: treadle.Options | None = None, train: Any = None
) -> str:
    """The message that training ends with."""
    with pytest.raises(kind) as caught, treadle.Loop(task, options=options, console=False) as loop:
        loop.fit(source() if train is None else train, epochs=1)
    assert type(caught.value) is kind
    return str(caught.value)


# What is kept in Python


@pytest.mark.parametrize(
    ("holder", "keep", "expected"),
    [
        (
            [],
            lambda held, loss: held.append(1),
            r"train_step changes Python values \(held changed from a list of \d to a list of \d\), "
            r"which a compiled step does only while it is traced: keep what changes in a keras\."
            r"Variable",
        ),
        (
            {"start": 0},
            lambda held, loss: held.update({f"key{len(held)}": 0}),
            r"train_step changes Python values \(held changed from a dict of \d \(start, key1.*\) "
            r"to a dict of \d \(start, key1.*\)\), which .*",
        ),
        (
            [],
            lambda held, loss: held.append(loss),
            r"a tensor of train_step was kept in held, where it means nothing once the step is "
            r"compiled: return it from the step, which logs it, or assign it to a keras\.Variable "
            r"that the task holds",
        ),
        (
            {"last": None},
            lambda held, loss: held.update(last=loss),
            r"a tensor of train_step was kept in held(/last)?, where .*",
        ),
    ],
    ids=["number-in-list", "key-in-dict", "tensor-in-list", "tensor-in-dict"],
)
def test_what_a_step_puts_into_containers(
    options: treadle.Options, holder: Any, keep: Any, expected: str
) -> None:
    task = Does(lambda task, batch, loss: keep(task.held, loss), held=type(holder)(holder))
    assert re.fullmatch(expected, told(StepError, task, options))


def test_a_tensor_kept_in_an_attribute(options: treadle.Options) -> None:
    task = Does(lambda task, batch, loss: setattr(task, "last", loss), last=None)
    assert told(StepError, task, options).startswith("a tensor of train_step was kept in last, ")


def test_containers_that_hooks_fill_are_constants() -> None:
    task = Does(lambda task, batch, loss: None, seen=[])
    hooks = [treadle.at("2 steps", lambda loop: loop.task.seen.append(1))]
    with treadle.Loop(task, hooks=hooks, console=False) as loop:
        history = loop.fit(source(), epochs=1)
    assert history["note"] == [
        "compiled anew, because seen changed from a list of 0 to a list of 1"
    ]


def test_an_optimizer_of_another_kind_is_told_by_both() -> None:
    def replaced(loop: Any) -> None:
        loop.task.optimizer = keras.optimizers.SGD(0.1)

    task = Does(lambda task, batch, loss: None)
    task.optimizer = keras.optimizers.Adam()
    hooks = [treadle.at("2 steps", replaced)]
    with treadle.Loop(task, hooks=hooks, console=False) as loop:
        history = loop.fit(source(), epochs=1)
    assert "optimizer changed from one Adam to one SGD" in history["note"][0]


@pytest.mark.parametrize(
    ("draw", "which"),
    [
        (lambda task: random.random(), "Python's random"),
        (lambda task: np.random.normal(), "numpy.random"),
        (lambda task: task.rng.normal(), "rng"),
        (lambda task: task.old.normal(), "old"),
        (lambda task: task.python.random(), "python"),
    ],
)
def test_random_numbers_that_are_not_of_keras(
    options: treadle.Options, draw: Callable[[Any], float], which: str
) -> None:
    task = Does(
        lambda task, batch, loss: draw(task),
        rng=np.random.default_rng(0),
        old=np.random.RandomState(0),
        python=random.Random(0),
    )
    assert told(StepError, task, options) == (
        f"train_step draws from {which}, which a compiled step does only while it is traced, so "
        "that all steps would get the same number: use keras.random with a "
        "keras.random.SeedGenerator that the task holds, or draw where batches are made"
    )


def test_random_numbers_of_keras_and_of_sources_are_fine(options: treadle.Options) -> None:
    def batches() -> Any:
        for _ in range(3):
            yield tuple(part[np.random.permutation(ROWS)[:8]] for part in arrays())

    class Dropping(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), keras.layers.Dropout(0.5), head()])  # not built

    with treadle.Loop(Dropping(), options=options, console=False) as loop:
        loop.fit(batches, epochs=1)
    assert loop.progress.step == 3


# Losses and gradients


def test_the_loss_comes_first(options: treadle.Options) -> None:
    class Swapped(Does):
        def train_step(self, batch: Any) -> Any:
            x, y = batch

            def objective() -> Any:
                logits = self.model(x)
                return logits, self.loss(y, logits)

            (loss, logits), grads = treadle.gradients(objective, self.model.trainable_variables)
            self.accuracy.update_state(y, logits)
            self.optimizer.apply(grads, self.model.trainable_variables)
            return {"loss": loss}

    assert told(GradientError, Swapped(print), options) == (
        f"the loss must be a scalar, but has shape (8, {CLASSES}): return the loss first, as "
        "(loss, anything)"
    )


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_one_gradient_for_each_variable(options: treadle.Options, optimizer: Any) -> None:
    class Forgetful(Does):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            variables = self.model.trainable_variables
            loss, grads = treadle.gradients(lambda: self.loss(y, self.model(x)), variables)
            self.action(self.optimizer, grads, self.model.trainable_variables)
            return {"loss": loss}

    def task(action: Any) -> Any:
        made = Forgetful(action)
        made.optimizer = optimizer(0.1)
        made.model = keras.Sequential([dense(), head()])  # not built: no gradients at first
        return made

    kind = optimizer.__name__
    fewer = told(StepError, task(lambda o, g, v: o.apply(g[:-1], v)), options)
    assert fewer == (
        f"train_step applies 3 gradients to 4 variables by optimizer ({kind}), so that none is "
        "left for model/layers/1/bias: pass one gradient for each variable, in the same order"
    )
    more = told(StepError, task(lambda o, g, v: o.apply(g, v[:-1])), options)
    assert more == (
        f"train_step applies 4 gradients to 3 variables by optimizer ({kind}): pass one gradient "
        "for each variable, in the same order"
    )


# Hooks


def logged(value: Any) -> Any:
    """The history and the log's lines of a run whose hook returns this, and whose user logs it."""

    def hook(loop: Any) -> Any:
        return value(loop) if callable(value) else value

    task = Does(lambda task, batch, loss: None)
    with treadle.Loop(task, hooks=[treadle.at("2 steps", hook)], console=False) as loop:
        return loop.fit(source(), epochs=1)


def test_scalars_and_texts_of_any_library_are_logged(tmp_path: Any) -> None:
    def hook(loop: Any) -> Any:
        weight = loop.task.model.trainable_variables[0]
        return {
            "text": "half way",
            "yes": True,
            "numpy": np.float32(0.5),
            "array": np.array(3),
            "tensor": ops.convert_to_tensor(weight)[0, 0],  # requires a gradient on PyTorch
            "variable": loop.task.optimizer.iterations,
        }

    task = Does(lambda task, batch, loss: None)
    hooks = [treadle.at("2 steps", hook)]
    with treadle.Loop(task, tmp_path, hooks=hooks, console=False) as loop:
        loop.fit(source(), epochs=1)
    record = next(r for r in loop.history.records if r.kind == "log")
    kinds = {name: type(value) for name, value in record.values.items()}
    assert kinds == dict(text=str, yes=bool, numpy=float, array=int, tensor=float, variable=int)
    assert record.values["variable"] == 2
    _, records = read_log(tmp_path / "log.jsonl")
    assert {name: records[0][name] for name in kinds} == record.values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"rates": np.zeros(3)},
            "the hook hook logs 'rates', of shape (3,): only scalars and texts can be logged. "
            "Reduce it, for example with keras.ops.mean, or keep it out",
        ),
        (
            lambda loop: {"kernel": loop.task.model.trainable_variables[0]},
            f"the hook hook logs 'kernel', of shape ({FEATURES}, 5): only scalars and texts can be "
            "logged. Reduce it, for example with keras.ops.mean, or keep it out",
        ),
        (
            {"nothing": None},
            "the hook hook logs 'nothing', a NoneType: only scalars and texts can be logged. "
            "Reduce it, for example with keras.ops.mean, or keep it out",
        ),
        (
            "half way",
            "the hook hook returned 'half way' without a name, so it cannot be logged: return a "
            "dict such as {'name': value}, or nothing",
        ),
        (
            0.5,
            "the hook hook returned 0.5 without a name, so it cannot be logged: return a dict such "
            "as {'name': value}, or nothing",
        ),
    ],
)
def test_what_hooks_must_not_return(value: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        logged(value)
    assert str(caught.value) == expected
    assert caught.value.__notes__[0].startswith("in hook, after step 2, epoch 1, batch 2")


def test_tensors_that_hooks_return_by_the_way_are_passed_over() -> None:
    history = logged(lambda loop: loop.task.optimizer.iterations.assign(7))
    assert history.names() == ["loss", "accuracy"]


def test_what_users_must_not_log() -> None:
    task = Does(lambda task, batch, loss: None)
    with (
        treadle.Loop(task, console=False) as loop,
        pytest.raises(ConfigurationError, match=r"^loop\.log logs 'a', of shape \(2,\): only"),
    ):
        loop.log({"a": np.zeros(2)})
    assert loop.history.records == []


# What frameworks say, and what is added


def raised(task: Any, train: Any = None) -> Exception:
    """What training ends with."""
    with pytest.raises(Exception) as caught, treadle.Loop(task, console=False) as loop:
        loop.fit(source() if train is None else train, epochs=1)
    assert not isinstance(caught.value, TreadleError)
    return caught.value


def branches(task: Any, batch: Any, loss: Any) -> Any:
    if loss > 0.5:
        task.holder = None


def native_tensorflow(task: Any, batch: Any, loss: Any) -> Any:
    import tensorflow as tf

    tf.reduce_mean(loss * 2.0)


def native_torch(task: Any, batch: Any, loss: Any) -> Any:
    import torch

    torch.mean(loss)


def makes_optimizer(task: Any, batch: Any, loss: Any) -> Any:
    treadle.minimize(lambda: ops.mean(task.model(batch[0])), task.model, keras.optimizers.Adam())


CONDITION = "choose values with keras.ops.where, and branches that train with treadle.cond"
NUMBER = "compute with keras.ops, for example keras.ops.cast, and return from the step"
VALUE = "return it from the step, and look at it in a hook or in the history"
NUMPY = "A function of NumPy's was given a tensor of the step: use the one of the same name in"
MADE = "The step makes a variable: make layers, metrics and optimizers once, in the task's __init__"
TO_TENSORFLOW = "write it with keras.ops and treadle.gradients, which run everywhere, or run it"
COMPILED = ("tensorflow", "jax")


@pytest.mark.parametrize(
    ("action", "hint", "backends"),
    [
        (branches, CONDITION, COMPILED),
        (lambda task, batch, loss: float(loss), NUMBER, COMPILED),
        (lambda task, batch, loss: range(ops.cast(loss, "int32")), NUMBER, COMPILED),
        (lambda task, batch, loss: loss.numpy(), VALUE, COMPILED),
        (lambda task, batch, loss: np.mean(task.model(batch[0])), NUMPY, ("tensorflow", "torch")),
        (lambda task, batch, loss: np.asarray(loss), NUMPY, COMPILED),
        (native_tensorflow, "calls TensorFlow, and Keras runs on JAX: " + TO_TENSORFLOW, ("jax",)),
        (native_torch, "The step calls PyTorch, and Keras runs on ", COMPILED),
        (lambda task, batch, loss: loss.backward(), "The step calls PyTorch, and Ker", COMPILED),
        (makes_optimizer, MADE, (*COMPILED, "torch")),
    ],
    ids=[
        "if", "float", "range", "value", "numpy", "asarray", "tensorflow", "torch", "backward",
        "optimizer",
    ],
)  # fmt: skip
def test_broken_rules_come_with_what_to_do(
    action: Any, hint: str, backends: tuple[str, ...]
) -> None:
    if keras.config.backend() not in backends:
        pytest.skip("this works there")
    for module in ("tensorflow", "torch"):
        if action.__name__ == f"native_{module}":
            pytest.importorskip(module)
    notes = raised(Does(action)).__notes__
    assert hint in notes[-2]
    assert notes[-1].startswith("in train_step, step 1 (epoch 1, batch 1); the weights are those ")


def test_rules_broken_in_evaluations_too() -> None:
    if keras.config.backend() == "torch":
        pytest.skip("there a tensor's value is known")

    class Evaluates(Does):
        def eval_step(self, batch: Any) -> Any:
            return {"loss": float(super().eval_step(batch)["loss"])}

    with treadle.Loop(Evaluates(lambda *_: None), console=False) as loop:
        for run in (lambda: loop.evaluate(source()), lambda: loop.call(float, np.float32(1))):
            with pytest.raises(Exception) as caught:
                run()
            assert any(NUMBER in note for note in caught.value.__notes__)


def test_labels_out_of_range() -> None:
    x, y = arrays()
    y[27] = 7
    train = data.from_arrays(x, y, batch_size=8, shuffle=False)
    task = Does(lambda task, batch, loss: None)
    if keras.config.backend() == "jax":  # as steps.md says: such a row has no loss there
        with treadle.Loop(task, console=False) as loop:
            losses = loop.fit(train, epochs=1).steps("loss")
        assert np.isfinite(losses).all()
        return
    error = raised(task, train)
    told = {"tensorflow": "Received a label value of 7 which is outside the valid range of [0, 3)."}
    text = told.get(keras.config.backend(), "Target 7 is out of bounds")
    assert text in (str(error) if keras.config.backend() == "torch" else error.__notes__[-2])


def test_arrays_of_other_lengths() -> None:
    x, y = arrays()
    note = (
        "The first array of the batch has 32 rows, but the second array has 30: if both count "
        "examples, the batch was cut wrongly"
    )
    assert note in raised(Does(lambda *_: None), [(x[:32], y[:30])]).__notes__
    named = [{"image": x[:32], "label": y[:30]}]
    task = treadle.task(lambda batch: ops.mean(batch["image"][:, 0] * batch["label"]))
    assert note.replace("first array", "array 'image'").replace(
        "second array", "array 'label'"
    ) in (raised(task, named).__notes__)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        (lambda x, y: (x.tolist(), y.tolist()), "the first array"),
        (lambda x, y: [x, y.tolist()], "the second array"),
        (lambda x, y: {"image": x, "label": y.tolist()}, "the array 'label'"),
        (lambda x, y: y.tolist(), "the batch"),
    ],
)
def test_lists_of_numbers(batch: Any, name: str) -> None:
    task = Does(lambda *_: None)
    assert told(DataError, task, train=[batch(*arrays())]) == (
        f"{name} is a list of Python numbers, not an array: make it one with numpy.asarray, or a "
        "tuple where each number is meant by itself"
    )


# Tracebacks


OWN = str(Path(treadle.__file__).parent)


def lines_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def fails(task: Any, batch: Any, loss: Any) -> Any:
    raise ZeroDivisionError("mine")


def in_an_objective(task: Any, batch: Any, loss: Any) -> Any:
    def objective() -> Any:
        return fails(task, batch, loss)

    treadle.minimize(objective, task.model, task.optimizer)


def test_tracebacks_are_of_the_user_and_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for action, names in (
        (fails, ["raised", "train_step", "fails"]),
        (in_an_objective, ["raised", "train_step", "in_an_objective", "objective", "fails"]),
    ):
        error = raised(Does(action))
        frames = traceback.extract_tb(error.__traceback__)
        assert [frame.name for frame in frames] == names
    assert not any(name.startswith(OWN) for name in lines_of(error))
    assert len(error.__notes__) >= 1
    monkeypatch.setenv("TREADLE_TRACEBACK", "full")
    assert any(name.startswith(OWN) for name in lines_of(raised(Does(fails))))


def test_tracebacks_end_in_the_library_that_failed() -> None:
    x, y = arrays()
    frames = lines_of(raised(Does(lambda *_: None), [(x[:32], y[:30])]))
    assert frames[0] == __file__ and not frames[-1].startswith(OWN)
    assert not any(name.startswith(OWN) for name in frames[:-1])


def test_tracebacks_of_treadles_errors_are_the_users_lines() -> None:
    task = Does(lambda *_: None)
    with pytest.raises(DataError) as caught:
        treadle.Loop(task, console=False).fit([arrays()[1].tolist()], epochs=1)
    assert [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)] == [
        __file__
    ]


def test_tracebacks_of_every_way_in() -> None:
    class Failing(Does):
        def eval_step(self, batch: Any) -> Any:
            fails(self, batch, None)

        predict_step = eval_step

    def stepwise(loop: Any) -> None:
        for _ in loop.epochs(1):
            for _ in loop.steps(source()):
                pass

    loop = treadle.Loop(Failing(fails), console=False)
    for run in (
        stepwise,
        lambda loop: list(loop.steps(source())),
        lambda loop: loop.step(tuple(part[:8] for part in arrays())),
        lambda loop: loop.prepare(source()),
        lambda loop: loop.evaluate(source()),
        lambda loop: loop.predict(source()),
        lambda loop: loop.call(lambda: fails(None, None, None)),
    ):
        with pytest.raises(ZeroDivisionError) as caught:
            run(loop)
        files = set(lines_of(caught.value))
        assert files == {__file__}


def test_a_fault_of_treadles_own_keeps_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.training.joined", None)
    with pytest.raises(TypeError) as caught:
        treadle.Loop(Does(lambda *_: None), console=False).fit(source(), epochs=1)
    assert sum(name.startswith(OWN) for name in lines_of(caught.value)) > 2
