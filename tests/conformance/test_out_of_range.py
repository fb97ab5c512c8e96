"""Indices and labels out of range: one error on every backend, and no false alarms."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, long_to_compile
from keras import ops
from loops import same

import treadle
from treadle import data
from treadle.errors import DataError
from treadle.testing import running

ROWS, WORDS, CLASSES, LENGTH = 4, 20, 3, 5
CHECKED = treadle.Options(checked=True)
LOSS = "loss (sparse_categorical_crossentropy)"
INDICES = (
    "indices must be from 0 to 19, since model/layers/0/embeddings has 20 rows, but they are from "
    "0 to 25. Correct the data, or give the layer 26 rows (input_dim=26 of an Embedding)"
)
LABELS = (
    f"labels must be from 0 to 2, since the predictions that {LOSS} gets have 3 classes, but they "
    "are from 0 to 3. Number the classes from 0, give the model 4 outputs, or pass ignore_class=3 "
    "to the loss to leave such labels out"
)


class Words(treadle.Task):
    """Classifies sentences; `around` is what the objective is called with."""

    def __init__(self, around: Callable[[Any], Any] = lambda run: run(), **loss: Any) -> None:
        self.model = keras.Sequential(
            [keras.layers.Embedding(WORDS, 4), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
        )
        self.optimizer = keras.optimizers.SGD(0.1)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **loss)
        self.around = around

    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return self.around(lambda: self.cost(batch))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    def cost(self, batch: Any) -> Any:
        words, labels, *weights = batch
        return self.loss(labels, self.model(words, training=True), *weights)

    def eval_step(self, batch: Any) -> Any:
        return {"loss": self.cost(batch)}

    def predict_step(self, batch: Any) -> Any:
        return self.model(batch[0])


def arrays(batches: int = 6) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORDS, (batches * ROWS, LENGTH)).astype("int32")
    labels = rng.integers(0, CLASSES, batches * ROWS).astype("int32")
    words[::ROWS, 0], labels[::ROWS] = 0, 0
    words[1::ROWS, 0] = WORDS - 1
    return words, labels


def source(word: tuple[int, int] = (0, 0), label: tuple[int, int] = (0, 0)) -> Any:
    """Batches, where a batch (from 0) has this index, and one this label."""
    words, labels = arrays()
    words[word[0] * ROWS, 1], labels[label[0] * ROWS] = word[1], label[1]
    return data.from_arrays(words, labels, batch_size=ROWS, shuffle=False)


def error(train: Any, task: Any = None, options: Any = None, validation: Any = None) -> str:
    with treadle.Loop(task or Words(), options=options, console=False) as loop:
        with pytest.raises(DataError) as caught:
            loop.fit(train, validation, epochs=1)
        assert (loop.progress.step == 0) == (options is None)
    return str(caught.value)


def runs(train: Any, task: Any = None, options: Any = CHECKED) -> None:
    with treadle.Loop(task or Words(), options=options, console=False) as loop:
        loop.fit(train, epochs=1)


def test_the_first_batch_is_checked() -> None:
    assert error(source(word=(0, 25))) == f"train_step, first batch: {INDICES}"
    assert error(source(label=(0, 3))) == f"train_step, first batch: {LABELS}"
    assert error(source(label=(0, -1))) == (
        f"train_step, first batch: labels must be from 0 to 2, since the predictions that {LOSS} "
        "gets have 3 classes, but they are from -1 to 2. Number the classes from 0, or pass "
        "ignore_class=-1 to the loss to leave such labels out"
    )


def test_the_first_batch_of_each_form_is_checked() -> None:
    words, labels = arrays(1)
    short = words[:2].copy()
    short[1, 1] = 25
    with treadle.Loop(Words(), console=False) as loop:
        loop.step((words, labels))
        with pytest.raises(DataError, match="train_step, first batch: indices must be from 0"):
            loop.step((short, labels[:2]))
        assert loop.progress.step == 1


def test_evaluation_and_prediction_check_their_first_batch() -> None:
    with treadle.Loop(Words(), console=False) as loop:
        loop.prepare(source())
        for method, name in ((loop.evaluate, "eval_step"), (loop.predict, "predict_step")):
            with pytest.raises(DataError) as caught:
                method(source(word=(0, 25)))
            assert str(caught.value) == f"{name}, first batch: {INDICES}"


@EXECUTIONS
def test_checked_steps_check_every_batch(execution: Any) -> None:
    options = treadle.Options(checked=True, execution=execution)
    assert error(source(word=(4, 25)), options=options) == f"train_step, step 5: {INDICES}"
    assert error(source(label=(4, 3)), options=options) == f"train_step, step 5: {LABELS}"


@long_to_compile
def test_a_checked_evaluation_checks_every_batch() -> None:
    found = error(source(), options=CHECKED, validation=source(label=(4, 3)))
    assert found == f"eval_step, batch 5: {LABELS}"


def test_training_goes_on_after_an_error() -> None:
    words, labels = arrays(1)
    wrong = words.copy()
    wrong[0, 1] = 25
    with treadle.Loop(Words(), options=CHECKED, console=False) as loop:
        for batch, is_wrong in ((words, False), (wrong, True), (words, False)):
            if not is_wrong:
                loop.step((batch, labels))
                continue
            with pytest.raises(DataError, match="train_step, step 2: indices must be from 0 to 19"):
                loop.step((batch, labels))


def in_a_branch(run: Any) -> Any:
    return treadle.cond(ops.convert_to_tensor(True), run, lambda: ops.zeros(()))


def recomputed(run: Any) -> Any:
    return treadle.remat(lambda x: run() * x)(ops.ones(()))


def for_each_row(run: Any) -> Any:
    return ops.sum(treadle.for_each(lambda x: run() * x, ops.ones((2,))))


@long_to_compile
@pytest.mark.parametrize("around", [in_a_branch, recomputed, for_each_row])
def test_checks_continue_in_functions_that_treadle_runs(around: Any) -> None:
    assert error(source(word=(4, 25)), Words(around), CHECKED) == f"train_step, step 5: {INDICES}"


@long_to_compile
def test_checks_change_no_bit() -> None:
    words, labels = arrays()
    batches = [(words[i : i + ROWS], labels[i : i + ROWS]) for i in range(0, len(words), ROWS)]
    plain, checked = (
        running.run_steps(Words(), batches, options, windows=(2,), start=0)
        for options in (None, CHECKED)
    )
    np.testing.assert_array_equal(plain.values["loss"], checked.values["loss"])
    same(checked.state, plain.state)


def test_only_checked_steps_contain_the_checks() -> None:
    def variables(options: Any) -> int:
        words, labels = arrays(1)
        runner = running.Runner(Words(), (words, labels), options)
        (made,) = runner._prepared._programs.values()
        assert len(made.program.variables) - len(made.program.ranges) == len(runner.state.variables)
        return len(made.program.ranges)

    assert (variables(treadle.Options()), variables(CHECKED)) == (0, 2)


# No false alarms


@long_to_compile
def test_an_ignored_class_is_no_violation() -> None:
    runs(source(label=(0, -1)), Words(ignore_class=-1))
    runs(source(label=(3, 255)), Words(ignore_class=255))


@long_to_compile
def test_labels_without_weight_are_no_violation() -> None:
    words, labels = arrays()
    weights = np.ones(len(labels), "float32")
    labels[[0, 17]], weights[[0, 17]] = -1, 0
    train = data.from_arrays(words, labels, weights, batch_size=ROWS, shuffle=False)
    runs(train)
    weights = weights.copy()
    weights[17] = 0.5
    train = data.from_arrays(words, labels, weights, batch_size=ROWS, shuffle=False)
    assert error(train, options=CHECKED).startswith("train_step, step 5: labels must be")


class Tagger(Words):
    """Predicts a class for each word, except where the word is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.model = keras.Sequential(
            [keras.layers.Embedding(WORDS, 4, mask_zero=True), keras.layers.Dense(CLASSES)]
        )
        self.metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)

    def cost(self, batch: Any) -> Any:
        words, labels = batch
        predictions = self.model(words)
        self.metric.update_state(labels, predictions)
        return self.loss(labels, predictions)


@long_to_compile
def test_labels_where_the_mask_is_false_are_no_violation() -> None:
    words, _ = arrays()
    tags = np.where(words == 0, -1, words % CLASSES).astype("int32")
    runs(data.from_arrays(words, tags, batch_size=ROWS), Tagger())
    words, tags = words.copy(), tags.copy()
    tags[-1, 0], words[-1, 0] = CLASSES, 1
    train = data.from_arrays(words, tags, batch_size=ROWS, shuffle=False)
    assert error(train, Tagger(), CHECKED).startswith("train_step, step 6: labels must be")


def test_negative_indices_count_from_the_end_as_in_keras() -> None:
    runs(source(word=(0, -WORDS)))
    assert "but they are from -21 to 19" in error(source(word=(0, -21)))


@pytest.mark.parametrize(
    "dtype",
    [
        "int64",
        *(pytest.param(x, marks=long_to_compile) for x in ("uint8", "int8", "float32", "bool")),
    ],
)
def test_labels_of_other_dtypes(dtype: str) -> None:
    words, labels = arrays()
    labels = (labels % 2).astype(dtype)
    for execution in ("auto", "eager"):
        options = treadle.Options(checked=True, execution=execution)
        runs(data.from_arrays(words, labels, batch_size=ROWS), options=options)


@long_to_compile
def test_integers_of_few_bits_and_many_classes() -> None:
    class Large(Words):
        def __init__(self) -> None:
            super().__init__()
            self.model = keras.Sequential(
                [keras.layers.Embedding(300, 4), keras.layers.Flatten(), keras.layers.Dense(300)]
            )

        def cost(self, batch: Any) -> Any:
            words, labels = batch
            logits = self.model(words)
            return ops.mean(ops.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    words, labels = arrays()
    for dtype in ("uint8", "int8"):
        train = data.from_arrays(words.astype(dtype), labels.astype(dtype), batch_size=ROWS)
        runs(train, Large())


@long_to_compile
def test_a_branch_that_is_not_taken_is_no_violation() -> None:
    def around(run: Any) -> Any:
        return treadle.cond(ops.convert_to_tensor(False), run, lambda: ops.zeros(()))

    task = Words(lambda run: run() * 0 + around(lambda: wrong(task)))

    def wrong(task: Any) -> Any:
        return ops.sum(ops.take(task.model.layers[0]._embeddings, ops.array([99]), axis=0))

    runs(source(), task)


@long_to_compile
def test_lookups_in_transformations_of_keras_are_left_out() -> None:
    class Cell(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.state_size = keras.layers.Embedding(WORDS, 4), 4

        def build(self, shape: Any) -> None:
            self.table.build()

        def call(self, inputs: Any, states: Any, **_: Any) -> Any:
            state = states[0] + self.table(ops.cast(inputs[:, 0], "int32"))
            return state, [state]

    class Recurrent(Words):
        def __init__(self) -> None:
            super().__init__()
            self.model = keras.Sequential([keras.layers.RNN(Cell()), keras.layers.Dense(CLASSES)])
            self.scores = keras.Variable(np.ones(WORDS, "float32"))

        def cost(self, batch: Any) -> Any:
            words, labels = batch
            rows = ops.vectorized_map(lambda x: ops.take(self.scores, x), words)
            words = words + ops.cast(0 * rows, "int32")
            return super().cost((ops.cast(words[..., None], "float32"), labels))

    words, labels = arrays()
    runs(data.from_arrays(words, labels, batch_size=ROWS), Recurrent())
