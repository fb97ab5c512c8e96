"""What is added to the words of frameworks, and which lines a traceback shows."""

import importlib
import re
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from mistakes import Does, arrays, raised, source, told
from numpy.linalg import norm

import treadle
from treadle import data
from treadle.backends import user_code
from treadle.errors import DataError, NonFiniteError

# What frameworks say, and what is added


def branches(task: Any, batch: Any, loss: Any) -> Any:
    if loss > 0.5:
        task.holder = None


def native_tensorflow(task: Any, batch: Any, loss: Any) -> Any:
    import tensorflow as tf

    tf.reduce_mean(loss * 2.0)


def native_torch(task: Any, batch: Any, loss: Any) -> Any:
    import torch

    torch.mean(loss)


def native_tensorflow_tape(task: Any, batch: Any, loss: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        inner = ops.mean(task.model(batch[0]))
    tape.gradient(inner, task.model.trainable_variables)


def lightning(task: Any, batch: Any, loss: Any) -> Any:
    class Module:
        def configure_optimizers(self) -> None: ...

    Module().optimizer  # type: ignore[attr-defined]  # noqa: B018


def makes_optimizer(task: Any, batch: Any, loss: Any) -> Any:
    treadle.minimize(lambda: ops.mean(task.model(batch[0])), task.model, keras.optimizers.Adam())


def logs(task: Any, batch: Any, loss: Any) -> Any:
    task.log("loss", loss)


CONDITION = "choose values with keras.ops.where, and branches that train with treadle.cond"
NUMBER = "compute with keras.ops, for example keras.ops.cast, and return values to inspect from"
VALUE = "return it from the step, and inspect it in a hook or in the history"
NUMPY = "A NumPy function was called with a tensor of the step: use "
MADE = "The step creates a variable: create layers, metrics and optimizers once, in the task's "
TO_TENSORFLOW = "write it with keras.ops and treadle.gradients, which run everywhere, or run it"


def keras_minimize(task: Any, batch: Any, loss: Any) -> Any:
    task.optimizer.minimize(lambda: loss, task.model.trainable_variables)


def one_hot_labels(task: Any, batch: Any, loss: Any) -> Any:
    keras.losses.SparseCategoricalCrossentropy()(ops.one_hot(batch[1], 3), task.model(batch[0]))


def class_numbers(task: Any, batch: Any, loss: Any) -> Any:
    keras.losses.CategoricalCrossentropy()(batch[1], task.model(batch[0]))


MINIMIZE = "write treadle.minimize(objective, self.model, self.optimizer), where objective is a"
ONE_HOT = "The labels seem to be one-hot vectors, and the loss needs class numbers: use keras.losse"
CLASS_NUMBERS = "The labels seem to be class numbers, and the loss needs one-hot vectors: use keras"
COMPILED = ("tensorflow", "jax")
EVERYWHERE = (*COMPILED, "torch")


@pytest.mark.parametrize(
    ("action", "hint", "backends"),
    [
        (branches, CONDITION, COMPILED),
        (lambda task, batch, loss: float(loss), NUMBER, COMPILED),
        (lambda task, batch, loss: range(ops.cast(loss, "int32")), NUMBER, COMPILED),
        (lambda task, batch, loss: loss.numpy(), VALUE, COMPILED),
        (lambda task, batch, loss: np.mean(task.model(batch[0])), NUMPY, ("tensorflow", "torch")),
        (lambda task, batch, loss: np.asarray(loss), NUMPY, COMPILED),
        (native_tensorflow, "calls TensorFlow, but Keras runs on JAX: " + TO_TENSORFLOW, ("jax",)),
        (native_tensorflow_tape, "calls TensorFlow, but Keras runs on ", ("jax", "torch")),
        (native_tensorflow_tape, TO_TENSORFLOW, ("jax", "torch")),
        (native_torch, "The step calls PyTorch, but Keras runs on ", COMPILED),
        (lightning, "configure_optimizers is not called: write self.optimizer = k", EVERYWHERE),
        (logs, "A task has no `log`: end the step with `return {", EVERYWHERE),
        (lambda task, batch, loss: loss.backward(), "The step calls PyTorch, but Ker", COMPILED),
        (makes_optimizer, MADE, EVERYWHERE),
        (keras_minimize, MINIMIZE, EVERYWHERE),
        (one_hot_labels, ONE_HOT, EVERYWHERE),
        (class_numbers, CLASS_NUMBERS, EVERYWHERE),
    ],
    ids=[
        "if", "float", "range", "value", "numpy", "asarray",
        "tensorflow", "tape", "instead of tape", "torch",
        "configure", "log", "backward",
        "optimizer", "minimize", "one-hot", "classes",
    ],
)  # fmt: skip
def test_framework_errors_get_a_note_with_advice(
    action: Any, hint: str, backends: tuple[str, ...]
) -> None:
    if keras.config.backend() not in backends:
        pytest.skip("this works there")
    for module in ("tensorflow", "torch"):
        if action.__name__.startswith(f"native_{module}"):
            pytest.importorskip(module)
    notes = raised(Does(action)).__notes__
    assert hint in notes[0]
    assert notes[1].startswith("in train_step, step 1 (epoch 1, batch 1); the weights are those ")


def clipped(x: Any) -> Any:
    return np.clip(  # the user's line
        x, 0.0, 1.0
    )


NUMPY_FUNCTIONS: dict[str, tuple[Any, str, str]] = {
    "of Python": (clipped, "keras.ops.clip", "numpy.clip"),
    "of C": (lambda x: np.exp(x), "keras.ops.exp", "numpy.exp"),  # the user's line
    "imported": (lambda x: norm(x), "keras.ops.norm", "numpy.linalg.norm"),  # the user's line
    "array": (lambda x: np.asarray(x), "keras.ops.convert_to_tensor", "numpy.asarray"),
    "no such": (lambda x: np.ediff1d(x), "functions of keras.ops", "numpy.ediff1d"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy, for tensors of PyTorch
@pytest.mark.parametrize("name", NUMPY_FUNCTIONS)
def test_a_numpy_function_is_named_with_the_users_line(name: str) -> None:
    call, instead, called = NUMPY_FUNCTIONS[name]
    line = rf", at test_explained\.py:{call.__code__.co_firstlineno + (call is clipped)}: "

    def computed(task: Any, batch: Any, loss: Any) -> Any:
        call(batch[0])

    if keras.config.backend() != "torch":
        note = raised(Does(computed)).__notes__[0]
        assert re.match(re.escape(f"{NUMPY}{instead} for {called}") + line, note)
        return
    with treadle.Loop(Does(computed), console=False) as loop:
        loop.fit(source(), epochs=1)
        refused = re.escape(f"it passes a tensor to {called} (use {instead})")
        assert re.search(refused + line, str(loop.plan))

    def differentiated(task: Any, batch: Any, loss: Any) -> Any:
        treadle.gradients(lambda: ops.mean(call(task.model(batch[0]))), task.model)

    note = raised(Does(differentiated)).__notes__[0]
    assert re.match(re.escape(f"{NUMPY}{instead} for {called}") + line, note)


def test_an_installed_package_is_no_line_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless all the code is installed."""
    (tmp_path / "installed_code.py").write_text("def call(f, x):\n    return f(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    call = importlib.import_module("installed_code").call

    def found(*installed: str) -> str:
        monkeypatch.setattr(user_code, "INSTALLED", installed)
        user_code._is_installed.cache_clear()
        try:
            call(float, "text")
        except ValueError as error:
            return str(user_code.failed_line(error))
        return ""

    assert found(str(tmp_path)).endswith(': call(float, "text")')
    assert found("/") == found() == "installed_code.py:2: return f(x)"
    monkeypatch.undo()
    user_code._is_installed.cache_clear()


def test_framework_errors_in_evaluations_get_the_note_too() -> None:
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


OUT_OF_RANGE = (
    "An index or a label is out of range: treadle.Options(checked=True) checks every batch, and "
    "names the layer or the loss, and the step"
)


@pytest.mark.usefixtures("assumes_cpu")  # else a device is lost
def test_labels_out_of_range_in_a_later_batch() -> None:
    x, y = arrays()
    y[27] = 7
    train = data.from_arrays(x, y, batch_size=8, shuffle=False)
    task = Does(lambda task, batch, loss: None)
    if keras.config.backend() == "jax":  # as steps.md says: such a row has no loss there
        with treadle.Loop(task, console=False) as loop:
            losses = loop.fit(train, epochs=1).steps("loss")
        assert np.isfinite(losses).all()
        return
    if keras.config.backend() == "tensorflow":  # XLA makes NaN of it
        assert "Options(checked=True) finds labels and indices out of range" in told(
            NonFiniteError, task, treadle.Options(jit=True), train
        )
    error = raised(Does(lambda *_: None), train, treadle.Options(jit=False))
    if keras.config.backend() == "torch":
        # Keras calls PyTorch's `one_hot` before 3.14, and then its cross-entropy.
        messages = ("Class values must be smaller than num_classes", "Target 7 is out of bounds")
        assert any(message in str(error) for message in messages)
        assert OUT_OF_RANGE in error.__notes__
    else:
        assert "TensorFlow reports: Received a label value of 7 which is out" in error.__notes__[0]
        assert error.__notes__[0].endswith(OUT_OF_RANGE)


def test_arrays_of_other_lengths() -> None:
    x, y = arrays()
    note = (
        "The first array of the batch has 32 rows, but the second array has 30: they must match "
        "if both contain one row per example"
    )
    assert note in raised(Does(lambda *_: None), [(x[:32], y[:30])]).__notes__
    # Floats: TensorFlow multiplies no tensors of two dtypes, and says that first.
    named = [{"image": x[:32], "label": y[:30].astype("float32")}]
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
    message = (
        f"{name} is a list of Python numbers, not an array: make it one with numpy.asarray, or a "
        "tuple if each number is a separate input"
    )
    assert told(DataError, task, train=[batch(*arrays())]) == message
    with pytest.raises(DataError) as caught:
        treadle.Loop(task, console=False).step(batch(*arrays()))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"label": np.array(["cat"])},
            "the array 'label' is a ndarray of dtype <U3: batches are arrays of numbers or "
            "booleans. Encode strings and categories as numbers, pad ragged arrays, and make "
            "sparse arrays dense",
        ),
        *(
            (
                batch,
                f"the batch holds no array, it is {batch}: pass a batch of arrays, such as "
                "loop.step((x, y))",
            )
            for batch in (None, (), {}, (None, None))
        ),
    ],
)
def test_a_single_step_takes_arrays(batch: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        treadle.Loop(Does(lambda *_: None), console=False).step(batch)
    assert str(caught.value) == message


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
    assert Path(frames[0]).parent == Path(__file__).parent and not frames[-1].startswith(OWN)
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
        assert {Path(file).parent for file in lines_of(caught.value)} == {Path(__file__).parent}


def test_a_fault_of_treadles_own_keeps_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.run.epoch_values.joined", None)
    with pytest.raises(TypeError) as caught:
        treadle.Loop(Does(lambda *_: None), console=False).fit(source(), epochs=1)
    assert sum(name.startswith(OWN) for name in lines_of(caught.value)) > 2
