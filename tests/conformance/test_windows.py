"""How a window runs changes nothing: its length, where its data lies, what was read ahead."""

import ast
import re
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, dense, head, labelled
from executions import long_to_compile
from keras import ops
from loops import same

import treadle
from treadle import data
from treadle.backends.base import active
from treadle.errors import StepError
from treadle.steps.compiled_step import CompiledStep
from treadle.steps.measuring import fastest
from treadle.testing import same_start

KERNEL = np.ones((3, 4, 4), "float32")
OPTIONS = treadle.Options()
ROWS = 108  # 13 batches of 8, and one of 4
EVEN = 104  # 13 batches of 8: half as many programs


def source(rows: int = ROWS, **kwargs: Any) -> Any:
    x, y = labelled(ROWS)
    return data.from_arrays(x[:rows], y[:rows], batch_size=8, **kwargs)


def drawing() -> Classifier:
    return Classifier(
        [dense(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=1), head()],
        keras.optimizers.Adam(1e-2),
    )


def plain() -> Classifier:
    return Classifier([dense(), keras.layers.BatchNormalization(), head()])


def convolving() -> Classifier:
    layers = [
        keras.layers.Reshape((FEATURES, 1)),
        keras.layers.Conv1D(4, 3, activation="tanh"),
        keras.layers.Flatten(),
        head(),
    ]
    return Classifier(layers, keras.optimizers.RMSprop(1e-2))


def trained(
    make: Any, train: Any, epochs: int = 2, rows: int = ROWS, **options: Any
) -> tuple[Any, treadle.Loop]:
    """Return the arrays and losses of a run from one and the same start.

    Validation is on the first rows of the data set.
    """
    keras.utils.set_random_seed(0)
    task = make()
    with treadle.Loop(task, console=False, options=treadle.Options(**options)) as loop:
        loop.prepare(train)
        same_start(task)
        history = loop.fit(train, validation=source(rows, shuffle=False), epochs=epochs)
    losses = {"losses": history.steps("loss"), "val": np.array(history["val_loss"])}
    return {**losses, **loop.state.arrays()}, loop


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "rows", "windows"), [(drawing, ROWS, (1, 3)), (convolving, EVEN, (5,))]
)
def test_data_on_the_device_streamed_and_read_one_by_one_agree_bit_for_bit(
    make: Any, rows: int, windows: tuple[int, ...]
) -> None:
    expected, resident = trained(make, source(rows), rows=EVEN, data_on_device=True)
    streamed, loop = trained(make, source(rows), rows=EVEN, data_on_device=False)
    same(streamed, expected)
    for window in windows:
        same(trained(make, source(rows), rows=EVEN, window=window)[0], expected)
    if "eager" not in resident.plan:
        assert "data on the device" in resident.plan
        assert "data streamed" in loop.plan


def test_programs_are_few_and_counted() -> None:
    _, loop = trained(drawing, source(), epochs=3, rows=EVEN)
    if "eager" in loop.plan:
        assert loop.costs.programs == 0
    else:
        assert loop.costs.programs == 2  # full batches and the short one
        assert loop.costs.compiling > 0


def test_single_steps_agree_with_windows() -> None:
    fused, loop = trained(plain, source(EVEN), rows=EVEN, fused=True)
    single, alone = trained(plain, source(EVEN), rows=EVEN, fused=False)
    for path, value in fused.items():
        np.testing.assert_allclose(single[path], value, rtol=2e-4, atol=1e-5, err_msg=path)
    if "eager" not in loop.plan:
        assert loop.plan.startswith("windows of up to 256, ")
        assert alone.plan.startswith("single steps, ")


@long_to_compile
@pytest.mark.usefixtures("assumes_cpu")  # elsewhere XLA compiles the whole window
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="the others have one loop each")
@pytest.mark.parametrize(
    "options",
    [
        {"window": 3},
        pytest.param({"window": 1}, marks=pytest.mark.long),
        pytest.param({"data_on_device": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_step_that_xla_compiles_alone_agrees_for_all_windows(options: Any) -> None:
    def run(**options: Any) -> tuple[Any, treadle.Loop]:
        return trained(convolving, source(EVEN), epochs=1, rows=EVEN, **options)

    graph, loop = run()
    assert loop.plan.startswith("windows of up to 256, graph (XLA convolves")
    expected, loop = run(jit=True, fused=True)
    assert loop.plan.startswith("windows of up to 256, XLA, ")
    assert loop.costs.programs == 1
    same(run(jit=True, fused=True, **options)[0], expected)
    for path, value in graph.items():
        np.testing.assert_allclose(expected[path], value, rtol=2e-4, atol=1e-5, err_msg=path)


@pytest.mark.usefixtures("assumes_cpu")
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="the others have no choice")
@pytest.mark.parametrize(
    ("layers", "plan"),
    [
        ([], "windows of up to 256, XLA"),
        ([keras.layers.MaxPooling1D(2)], "windows of up to 256, graph (XLA pools slower on a CPU)"),
        pytest.param(
            [keras.layers.DepthwiseConv1D(3)],
            "windows of up to 256, graph (XLA convolves slower on a CPU)",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [keras.layers.Lambda(lambda x: ops.map(lambda row: ops.conv(row[None], KERNEL)[0], x))],
            "windows of up to 256, graph (XLA convolves slower on a CPU)",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [keras.layers.Conv1D(4, 3, dtype="bfloat16")],
            "windows of up to 256, graph (XLA convolves slower on a CPU)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_xla_compiles_convolutions_with_normalizations_unless_it_is_slow(
    layers: list[Any], plan: str
) -> None:
    def normalizing() -> Classifier:
        first = [keras.layers.Reshape((FEATURES, 1)), keras.layers.Conv1D(4, 3)]
        last = [keras.layers.BatchNormalization(), keras.layers.Flatten(), head()]
        return Classifier([*first, *layers, *last], keras.optimizers.SGD(1e-2))

    with treadle.Loop(normalizing(), console=False) as loop:
        loop.fit(source(EVEN), epochs=1)
        assert loop.plan == plan + ", data on the device"


def test_prefetched_batches_are_neither_lost_nor_counted() -> None:
    given: list[int] = []

    def stream() -> Iterator[Any]:
        for i in range(20):
            given.append(i)
            yield np.full((2, 3), i, "float32")

    class Sees(treadle.Task):
        def __init__(self) -> None:
            self.last = keras.Variable(-1.0)

        def train_step(self, batch: Any) -> Any:
            self.last.assign(batch[0, 0])
            return {"seen": batch[0, 0]}

    iterator = stream()
    with treadle.Loop(Sees(), console=False) as loop:
        seen: list[float] = []
        for call, steps in enumerate((3, 4, 5)):
            loop.fit(iterator, steps=steps)
            assert loop.progress.step == len(loop.history.steps("seen")) == (3, 7, 12)[call]
        seen = loop.history.steps("seen").tolist()
    assert seen == list(range(12))
    assert given == list(range(len(given)))


def test_an_error_of_the_source_waits_for_its_turn() -> None:
    def stream() -> Iterator[Any]:
        for i in range(5):
            yield np.full((2, 3), i, "float32")
        raise OSError("the disk is gone")

    class Sums(treadle.Task):
        def __init__(self) -> None:
            self.sum = keras.Variable(0.0)

        def train_step(self, batch: Any) -> Any:
            self.sum.assign_add(ops.mean(batch))
            return {"mean": ops.mean(batch)}

    task = Sums()
    with treadle.Loop(task, console=False) as loop, pytest.raises(OSError) as caught:
        loop.fit(stream, epochs=1)
    assert loop.progress.step == 5
    assert float(keras.ops.convert_to_numpy(task.sum)) == 0 + 1 + 2 + 3 + 4
    assert any("the source" in note for note in caught.value.__notes__)


def test_a_slow_source_hides_no_step_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    # While a window runs, more is read: on a busy machine, one may run for as long as many reads.
    monkeypatch.setattr("treadle.backends.background.Running.running", lambda window: False)
    looks: list[int] = []

    class Looks(treadle.Hook):
        def steps(self, loop: Any, logs: Any) -> None:
            looks.append(len(logs.values["loss"]))

    def stream() -> Iterator[Any]:
        x, y = labelled(ROWS)
        for _ in range(12):
            time.sleep(0.15)
            yield x[:8], y[:8]

    with treadle.Loop(plain(), console=False, hooks=[Looks()]) as loop:
        loop.fit(stream, epochs=1, until="1 h")
    assert sum(looks) == 12
    assert max(looks) <= 3  # of the 64 that would fit
    assert loop.costs.waiting > 0.5


def test_arrays_are_put_on_the_device_once_for_all_who_read_them() -> None:
    train = source()
    options = treadle.Options()
    prepared = CompiledStep(
        plain(), lambda batch: {"n": ops.sum(batch[0])}, labelled(ROWS), options, "f"
    )
    reader = train.read(0)
    first, second = reader.take(2), reader.take(3)
    assert first.rows.owner is second.rows.owner
    assert first.rows.arrays is second.rows.arrays
    for window in (first, second):
        values, _, _ = prepared.run(prepared.placed(window), 0).fetch()
        sums = window.batches[0].sum((1, 2))
        np.testing.assert_allclose(values["n"], sums, rtol=1e-5, atol=1e-5)


@long_to_compile
@pytest.mark.skipif(keras.config.backend() != "jax", reason="the others need less of it")
@pytest.mark.parametrize("fused", [True, False])
def test_batches_are_made_ready_once(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import treadle.backends.jax.windows as windows

    made: list[int] = []
    original = windows.standard_leaves
    options = treadle.Options(fused=fused, data_on_device=False)
    task = plain()
    prepared = CompiledStep(
        task, task.train_step, source().read(0).take(1).batch(0), options, "step"
    )
    reader = source().read(0)
    prepared.run(prepared.placed(reader.take(5)), 0).fetch()
    monkeypatch.setattr(windows, "standard_leaves", lambda x: made.append(1) or original(x))
    prepared.run(prepared.placed(reader.take(5)), 5).fetch()
    assert sum(made) == (1 if fused else 5)


@long_to_compile
def test_a_data_set_that_is_too_large_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.steps.planning.DEVICE_BYTES", 100)
    _, loop = trained(plain, source(), epochs=1)
    assert "eager" in loop.plan or "data streamed" in loop.plan


@long_to_compile
def test_measuring_changes_nothing_and_says_what_keeps_it() -> None:
    measured, loop = trained(drawing, source(), epochs=1, execution="measure")
    assert "measured, per step: " in loop.plan
    pin = re.search(r"keep it with Options\((.*?)\)", loop.plan)
    assert pin is not None
    options = dict(option.split("=") for option in pin[1].split(", "))
    values = {name: ast.literal_eval(value) for name, value in options.items()}
    pinned, _ = trained(drawing, source(), epochs=1, **values)
    # The plan of `eval_step` is measured by itself.
    np.testing.assert_allclose(pinned.pop("val"), measured.pop("val"), rtol=1e-5)
    same(pinned, measured)


def test_measuring_that_fails_changes_nothing() -> None:
    task = plain()
    prepared = CompiledStep(
        task, task.train_step, tuple(x[:8] for x in labelled(ROWS)), OPTIONS, "step"
    )
    before = prepared.state.arrays()

    class Fails:
        """Runs twice and a bit."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.left = inner, 2

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def run(self, window: Any, first_step: int) -> Any:
            outputs, self.left = self.inner.run(window, first_step), self.left - 1
            if self.left < 0:
                outputs.fetch()
                raise OSError("the device is gone")
            return outputs

    window = prepared.placed(source(shuffle=False).read(0).take(1))
    (made,) = prepared._programs.values()
    make = lambda eager: Fails(prepared._builder.executor(made.program, eager=True))  # noqa: E731
    with pytest.raises(OSError, match="the device is gone"):
        fastest(make, made.executor, window, prepared.state)
    same(prepared.state.arrays(), before)


class Texts(Classifier):
    """XLA has no texts."""

    def train_step(self, batch: Any) -> Any:
        import tensorflow as tf

        results = super().train_step(batch)
        text = tf.strings.as_string(results["loss"], precision=9)
        return {**results, "again": tf.strings.to_number(text)}


def texts() -> Classifier:
    return Texts([dense(), keras.layers.Dropout(0.3, seed=1), head()])


@long_to_compile
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="XLA is a choice")
def test_a_step_that_xla_refuses_is_a_graph() -> None:
    def run(**options: Any) -> tuple[Any, treadle.Loop]:
        return trained(texts, source(EVEN), epochs=1, rows=EVEN, **options)

    expected, loop = run()
    assert loop.plan.startswith("windows of up to 256, graph (XLA: Detected unsupported operations")
    found, loop = run(fused=False, data_on_device=False)
    assert loop.plan.startswith("single steps, graph (XLA: Detected unsupported operations")
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-4, atol=1e-5, err_msg=path)
    with pytest.raises(StepError, match=r"^train_step cannot be compiled: XLA: Detected un"):
        run(jit=True)


@pytest.mark.long
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="XLA is a choice")
def test_measuring_leaves_out_a_plan_that_xla_refuses() -> None:
    _, loop = trained(texts, source(EVEN), epochs=1, rows=EVEN, execution="measure")
    assert "measured, per step: " in loop.plan and "XLA" not in loop.plan


def test_a_step_that_cannot_be_compiled_is_an_error_if_compilation_was_requested() -> None:
    if active().name != "torch":
        pytest.skip("TensorFlow and JAX compile every step that they can trace")

    class Looks(Classifier):
        def eval_step(self, batch: Any) -> Any:
            results = super().eval_step(batch)
            assert results["loss"] < 1e9
            return results

    options = treadle.Options(execution="compiled")
    with (
        treadle.Loop(Looks([head()]), console=False, options=options) as loop,
        pytest.raises(StepError, match=r"^eval_step cannot be compiled: "),
    ):
        loop.fit(source(), validation=source(), epochs=1)
