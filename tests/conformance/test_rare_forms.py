"""Forms of batch that are rare run as Python or share a program, and are compiled later."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile
from keras import ops
from loops import same

import treadle
from tests.dying import killed
from treadle.backends.base import active
from treadle.hooks import Checkpoint, NonFinite
from treadle.steps import rare_forms, rare_programs
from treadle.steps.rare_forms import RareForms

RARE = 3
BACKEND = keras.config.backend()
ORDER = [4, 5, 6, 6, 7, 6, 8, 6, 6, 7, 4]  # lengths of sentences, in each of two epochs
"""The first two are built at once, 6 and 7 when they come for the fourth time, 8 not."""

pytestmark = pytest.mark.skipif(
    BACKEND == "jax", reason="a step as Python compiles its operations one by one"
)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = active()
    monkeypatch.setattr(backend, "rare_steps", dict.fromkeys(backend.rare_steps, RARE))
    monkeypatch.setattr(rare_programs, "OPEN", RARE)


def batches(order: list[int]) -> list[Any]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 20, (4, length)).astype("int32") for length in order]
    return [(x, rng.integers(0, 2, 4).astype("int32")) for x in tokens]


class Sentences(treadle.Task):
    """Classifies sentences, with dropout and a metric."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        self.embedding = keras.layers.Embedding(20, 4)
        self.dropout = keras.layers.Dropout(0.2, seed=1)
        self.head = keras.layers.Dense(2)
        self.optimizer = keras.optimizers.Adam(0.1)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.bound = keras.Variable(np.inf, trainable=False)  # no step changes it

    def outputs(self, x: Any) -> Any:
        return self.head(self.dropout(ops.mean(self.embedding(x), axis=1), training=True))

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            outputs = self.outputs(x)
            self.accuracy.update_state(y, outputs)
            return self.loss(y, outputs)

        model = [self.embedding, self.head]
        return {"loss": treadle.minimize(objective, model, self.optimizer)}


def fitted(order: list[int], task: Any = None, *hooks: Any, **how: Any) -> treadle.Loop:
    directory, options = how.pop("directory", None), treadle.Options(**how)
    loop = treadle.Loop(task or Sentences(), directory, hooks=hooks, console=False, options=options)
    loop.fit(batches(order), epochs=2)
    return loop


def compiled_forms(loop: treadle.Loop) -> int:
    return len(loop._run.training.rare_forms.compiled)


def equal(one: treadle.Loop, other: treadle.Loop) -> None:
    np.testing.assert_array_equal(one.history.steps("loss"), other.history.steps("loss"))
    same(one.state.arrays(), other.state.arrays())


@long_to_compile
def test_rare_forms_train_as_all_forms_compiled() -> None:
    found = fitted(ORDER, None, NonFinite("skip"))
    compiled = fitted(ORDER, None, NonFinite("skip"), execution="compiled")
    assert found._run.training.prepared is not None
    assert "bound" not in found._run.training.prepared.written
    np.testing.assert_allclose(
        found.history.steps("loss"), compiled.history.steps("loss"), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(found.history["accuracy"], compiled.history["accuracy"], rtol=1e-6)
    assert compiled_forms(found) == 4
    python = f"as Python for some batches: a form is compiled when {RARE} of its steps have run"
    shared = f"graph for some batches: sizes that came in fewer than {RARE} steps share a program"
    opened = active().opens_sizes
    assert (shared if opened else python) in found.plan
    assert found.costs.programs == 4 + opened and compiled.costs.programs == 5
    if BACKEND == "torch":
        equal(found, compiled)


def test_a_form_is_built_when_it_has_come_back() -> None:
    with treadle.Loop(Sentences(), console=False) as loop:
        programs = []
        for batch in batches([4, 5, 6, 6, 6, 6, 7, 6]):
            loop.step(batch)
            programs.append(loop.costs.programs)
    if not active().opens_sizes:
        assert programs == [1, 2, 2, 2, 2, 3, 3, 3]
    else:  # one more serves the third form and the fourth
        assert programs == [1, 2, 3, 3, 3, 4, 4, 4]


@long_to_compile
@pytest.mark.parametrize("window", [1, 7])
def test_the_size_of_windows_changes_no_bit(window: int) -> None:
    order = [4, 4, 5, 5, 6, 6, 6, 6, 6, 6, 7, 7, 4]
    equal(fitted(order, window=window), fitted(order, window=4))


class Late(Sentences):
    """Trains another layer, with its own optimizer, on sentences of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.other = keras.layers.Dense(2), keras.optimizers.Adam(0.1)
        self.seen = keras.metrics.Mean()

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        if x.shape[1] == 7:
            inputs = ops.mean(self.embedding(x), axis=1)
            loss = treadle.minimize(
                lambda: self.loss(y, self.extra(inputs)), self.extra, self.other
            )
            self.seen.update_state(loss)
        return super().train_step(batch)


@pytest.mark.parametrize("step", [pytest.param(5, marks=long_to_compile), 14])
def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path, step: int) -> None:
    """A rare form builds a layer, an optimizer and a metric."""
    every = Checkpoint(every="1 step")
    expected = fitted(ORDER, Late())
    with pytest.raises(OSError, match="killed"):
        fitted(ORDER, Late(), every, treadle.at(f"{step} steps", killed), directory=tmp_path)
    found = fitted(ORDER, Late(), every, directory=tmp_path)
    assert "other/momentums/extra/kernel" in found.state.arrays()
    equal(found, expected)
    assert found.history["seen"] == expected.history["seen"]
    assert found._run.training.rare_forms == expected._run.training.rare_forms
    assert "warning" not in found.history.names()
    if BACKEND == "torch":
        equal(found, fitted(ORDER, Late(), execution="eager"))


def test_a_hook_that_stops_the_run_does_so_where_a_form_is_compiled() -> None:
    class Stop(treadle.hooks.Hook):
        def steps(self, loop: Any, logs: Any) -> None:
            if loop.progress.step == 7:
                loop.stop("at 7")

    loop = fitted([4, 4, 5, 5, *[6] * 8], None, Stop(), window=4)
    assert loop.progress.step == 7  # three steps of sentences of 6 ran as Python


@long_to_compile
def test_measured_layers_change_no_bit() -> None:
    measured = fitted(ORDER, None, treadle.hooks.GradientHealth(every="3 steps"))
    equal(measured, fitted(ORDER))
    assert compiled_forms(measured) == 4


@long_to_compile
def test_options_of_a_resumed_run_decide(tmp_path: Path) -> None:
    every = Checkpoint(every="1 step")
    with pytest.raises(OSError, match="killed"):
        fitted(ORDER, None, every, treadle.at("9 steps", killed), directory=tmp_path)
    found = fitted(ORDER, None, every, directory=tmp_path, execution="compiled")
    assert compiled_forms(found) == 5


opens = pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has open sizes")


class Loops(Sentences):
    """Reads sentences with a loop, which is slow as Python."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = keras.layers.SimpleRNN(4)

    def outputs(self, x: Any) -> Any:
        return self.head(self.recurrent(self.embedding(x)))


@opens
def test_steps_with_loops_share_a_program_or_are_compiled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fitted([4, 5, 6, 7, 8], Loops()).costs.programs == 3
    monkeypatch.setattr(active(), "opens_sizes", False)
    assert fitted([4, 5, 6], Loops()).costs.programs == 3


@opens
@long_to_compile
def test_rare_forms_run_as_python_where_no_program_serves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = fitted(ORDER)
    monkeypatch.setattr(active(), "opens_sizes", False)
    python = fitted(ORDER)
    np.testing.assert_allclose(
        shared.history.steps("loss"), python.history.steps("loss"), rtol=1e-5, atol=1e-6
    )
    assert "as Python for some batches" in python.plan


class ReadsSize(Sentences):
    """Does something else with sentences of 7 words, by Python that sees no open size."""

    def outputs(self, x: Any) -> Any:
        return super().outputs(x) * (3.0 if x.shape[1] == 7 else 1.0)


class ReadsInKeras(Sentences):
    """Does the same by Python that seems to be of Keras, which is trusted but for the values."""

    def outputs(self, x: Any) -> Any:
        space = {"x": x, "__name__": "keras.src.layers"}
        return super().outputs(x) * eval("3.0 if x.shape[1] == 7 else 1.0", space)


@opens
@pytest.mark.parametrize(("task", "shared"), [(ReadsSize, []), (ReadsInKeras, [6, 8])])
def test_python_that_reads_a_size_decides(task: type[Sentences], shared: list[int]) -> None:
    losses: list[list[float]] = []
    for execution in ("auto", "eager"):
        options = treadle.Options(execution=execution)
        with treadle.Loop(task(), console=False, options=options) as loop:
            order = batches([4, 5, 6, 7, 8])
            losses.append([float(loop.step(batch)["loss"]) for batch in order])
            agreed = [*loop._run.training.rare_forms.agreed.values()]
            if execution == "auto":
                assert agreed == [length in shared for length in (6, 7, 8)]
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)


@opens
def test_keras_finds_mistakes_in_sizes() -> None:
    class Pools(Sentences):
        def outputs(self, x: Any) -> Any:
            return keras.layers.AveragePooling1D(4)(self.embedding(x))

        def train_step(self, batch: Any) -> Any:
            x, targets = batch
            loss = keras.losses.BinaryCrossentropy()

            def objective() -> Any:
                return loss(targets, ops.mean(ops.sigmoid(self.outputs(x)), axis=-1))

            return {"loss": treadle.minimize(objective, [self.embedding], self.optimizer)}

    def batch(length: int, targets: int) -> Any:
        return np.ones((4, length), "int32"), np.ones((4, targets), "float32")

    with treadle.Loop(Pools(), console=False) as loop:
        for length in (8, 12, 16, 20):
            loop.step(batch(length, length // 4))
        assert [*loop._run.training.rare_forms.agreed.values()] == [True, True]
        with pytest.raises(ValueError, match="must have the same shape"):
            loop.step(batch(7, 6))


@opens
def test_values_that_are_not_finite_prove_nothing() -> None:
    class NotFinite(Sentences):
        def train_step(self, batch: Any) -> Any:
            return {"loss": super().train_step(batch)["loss"] * float("inf")}

    with treadle.Loop(NotFinite(), console=False, hooks=[NonFinite("skip")]) as loop:
        for one in batches([4, 5, 6]):
            loop.step(one)
        assert [*loop._run.training.rare_forms.agreed.values()] == [False]


@opens
def test_a_changed_step_is_traced_again() -> None:
    class Phases(Sentences):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def outputs(self, x: Any) -> Any:
            return super().outputs(x) * self.factor

    losses: list[list[float]] = []
    for execution in ("auto", "eager"):
        options = treadle.Options(execution=execution)
        with treadle.Loop(Phases(), console=False, options=options) as loop:
            losses.append([float(loop.step(one)["loss"]) for one in batches([4, 5, 6, 7])])
            loop.task.factor = 2.0
            losses[-1] += [float(loop.step(one)["loss"]) for one in batches([6, 7])]
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)


class Breaks(Sentences):
    """Has a loss that is not finite for sentences with the last word."""

    def outputs(self, x: Any) -> Any:
        return super().outputs(x) / ops.cast(ops.all(x < 19), "float32")


@opens
@long_to_compile
def test_a_rollback_decides_as_a_resumed_process_does(tmp_path: Path) -> None:
    data = [(np.minimum(x, 18), y) for x, y in batches([4, 5, 6, 7, 6, 6, 7, 6, 6])]
    data[3][0][0, 0] = 19  # skipped after the rollback, and the first of 7 words

    def trained(directory: Path, *hooks: Any) -> treadle.Loop:
        hooks = (Checkpoint(every="2 steps"), NonFinite("rollback"), *hooks)
        loop = treadle.Loop(Breaks(), directory, hooks=hooks, console=False)
        loop.fit(data, epochs=1)
        return loop

    rolled_back = trained(tmp_path / "one")
    with pytest.raises(OSError, match="killed"):
        trained(tmp_path / "two", treadle.at("5 steps", killed))
    resumed = trained(tmp_path / "two")
    equal(rolled_back, resumed)
    assert rolled_back._run.training.rare_forms == resumed._run.training.rare_forms


@opens
def test_a_form_that_was_built_earlier_is_decided_when_it_comes() -> None:
    loop = treadle.Loop(Evaluated(), console=False)
    validation = {"first": batches([4, 5, 6]), "second": batches([9, 4, 9])}
    loop.fit(batches([4, 4]), epochs=1, validation=validation)
    assert len(loop._run.evaluation.rare_forms.agreed) == 2  # of 6 and 9 words


@opens
def test_a_step_that_needs_its_sizes_runs_as_python() -> None:
    class Divides(Sentences):
        def outputs(self, x: Any) -> Any:
            return super().outputs(x) / x.shape[1]

    with treadle.Loop(Divides(), console=False) as loop:
        for batch in batches([4, 5, 6, 7]):
            loop.step(batch)
        assert "as Python for some batches" in loop.plan


@opens
def test_a_step_that_acts_shares_no_program(capfd: pytest.CaptureFixture[str]) -> None:
    class Prints(Sentences):
        def train_step(self, batch: Any) -> Any:
            import tensorflow as tf

            tf.print("step", batch[0].shape[1])
            return super().train_step(batch)

    with treadle.Loop(Prints(), console=False) as loop:
        for batch in batches([4, 5, 6, 7]):
            loop.step(batch)
    assert capfd.readouterr().err.split() == ["step", "4", "step", "5", "step", "6", "step", "7"]


class Evaluated(Sentences):
    """Is validated on sentences of several lengths."""

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        outputs = self.head(ops.mean(self.embedding(x), axis=1))
        self.accuracy.update_state(y, outputs)
        return {"loss": self.loss(y, outputs)}


@long_to_compile
def test_an_evaluation_has_rare_forms_too(tmp_path: Path) -> None:
    def trained(directory: Path | None = None, *hooks: Any) -> treadle.Loop:
        loop = treadle.Loop(Evaluated(), directory, hooks=hooks, console=False)
        data = batches([4] * 3)
        loop.fit(data, epochs=3, validation=batches([4, 5, 6, 7, 8, 6]))
        return loop

    expected, every = trained(), Checkpoint(every="1 step")
    forms = expected._run.evaluation.rare_forms
    # With open sizes also the form of 6 words, which came twice in each epoch.
    assert len(forms.compiled) == (3 if active().opens_sizes else 5)
    eager = treadle.Loop(
        expected.task, console=False, options=treadle.Options(execution="eager")
    ).evaluate(batches([4, 5, 6, 7, 8, 6]))
    assert expected.history["val_loss"][-1] == pytest.approx(eager["loss"], rel=1e-5)
    with pytest.raises(OSError, match="killed"):
        trained(tmp_path, every, treadle.at("7 steps", killed))
    found = trained(tmp_path, every)
    assert found.history["val_loss"] == expected.history["val_loss"]
    assert found._run.evaluation.rare_forms == forms
    equal(found, expected)


def test_sizes_open_where_forms_differ() -> None:
    def form(*sizes: int) -> Any:
        return ["tuple", [["array", "<f4", list(sizes)], ["array", "<i4", [sizes[0]]]]]

    forms = RareForms()
    for sizes in [(4, 8, 3), (4, 9, 3)]:
        assert forms.widen(form(*sizes))
    assert [*forms.sizes.values()] == [[[4, None, 3], [4]]]
    forms.agreed["a"] = True
    assert forms.widen(form(4, 1, 3)) and forms.agreed["a"]
    assert not forms.widen(form(2, 8, 3))  # another number of examples
    assert not forms.widen(["array", "<f4", [4, 8, 3]]) and not forms.widen(form(4, 8))
    assert forms.widen(form(4, 8, 2)) and not forms.agreed["a"]  # for another program
    again = RareForms()
    again.restore(forms.saved())
    assert again == forms


def test_the_forms_that_are_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rare_forms, "MOST", 2)
    forms = RareForms(compiled=["a", "b"])
    for name in "cdce":  # d came least recently
        forms.ran(name, 1)
    assert [forms.left(name, most=2) for name in "abcde"] == [0, 0, 0, 2, 1]
