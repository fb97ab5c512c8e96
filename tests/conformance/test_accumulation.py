"""Several batches and one update: equal to a large batch, and nothing of it is ever lost."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, FEATURES, labelled
from executions import long_to_compile, once
from keras import ops
from loops import same

import treadle
from treadle import data
from treadle.errors import ConfigurationError, StepError
from treadle.hooks import NonFinite
from treadle.testing import accumulated_equals_large_batch, run_steps


def number(x: Any) -> float:
    return float(ops.convert_to_numpy(ops.cast(x, "float32")))


def cut(x: Any, y: Any, sizes: Any) -> list[Any]:
    """Batches of these sizes, again and again."""
    found, first = [], 0
    while first < len(x):
        size = sizes[len(found) % len(sizes)]
        found.append((x[first : first + size], y[first : first + size]))
        first += size
    return found


def schedule() -> Any:
    return keras.optimizers.schedules.CosineDecay(2e-2, 12)


OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(
        schedule(),
        weight_decay=0.1,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    ),
    "sgd": lambda: keras.optimizers.SGD(
        schedule(), momentum=0.9, nesterov=True, weight_decay=0.1, clipnorm=0.2, use_ema=True
    ),
}


class Classifier(treadle.Task):
    """Learns from `steps` batches at a time; None is the plain large batch."""

    def __init__(self, optimizer: Any, steps: int | None) -> None:
        self.model = keras.Sequential(
            [keras.layers.Dense(8, "tanh"), keras.layers.Dense(CLASSES)]  # not built
        )
        self.average = keras.Variable(np.zeros((FEATURES, 8)), trainable=False)
        self.optimizer = optimizer
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accumulator = None if steps is None else treadle.Accumulator(steps)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss, grads = treadle.gradients(
            lambda: self.loss(y, self.model(x, training=True)), self.model.trainable_variables
        )

        def update(grads: Any) -> None:
            variables = self.model.trainable_variables
            grads, _ = treadle.clip_by_global_norm(grads, 0.25)
            self.optimizer.apply(grads, variables)
            treadle.blend([self.average], variables[:1], 0.1)

        if self.accumulator is None:
            update(grads)
        else:
            self.accumulator.add(grads, update)
        return {"loss": loss}


def end(kind: str, steps: int | None, batches: Any, **how: Any) -> dict[str, np.ndarray]:
    """The state after some batches, without what accumulates."""
    trace = run_steps(Classifier(OPTIMIZERS[kind](), steps), batches, start=0, **how)
    return {p: v for p, v in trace.state.items() if not p.startswith("accumulator")}


def refuse_difference(found: Any, expected: Any, atol: float) -> None:
    assert list(found) == list(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k == "sgd" else (pytest.mark.long, once)) for k in OPTIMIZERS],
)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((16,), id="equal"),
        pytest.param((20, 20, 20, 4), id="weighted by examples", marks=long_to_compile),
    ],
)
def test_four_batches_equal_one_of_64(kind: str, sizes: tuple[int, ...]) -> None:
    x, y = labelled(8 * 64)
    large = end(kind, None, cut(x, y, (64,)))
    accumulated = end(kind, 4, cut(x, y, sizes), windows=(5, 1))
    refuse_difference(accumulated, large, atol=1e-6)
    assert accumulated["optimizer/iterations"] == 8  # updates, which the schedule goes by
    start = run_steps(Classifier(OPTIMIZERS[kind](), None), cut(x, y, (64,))[:1], start=0).start
    moved = np.abs(large["model/layers/0/kernel"] - start["model/layers/0/kernel"]).max()
    assert moved > 0.01  # so that 1e-6 says something


def test_keras_averages_weights_after_each_accumulated_batch() -> None:
    """As the page about gradients says; after each update, 0.9, 0.8, 0.7, it would be 0.775."""
    w = keras.Variable(1.0)
    averaging: Any = {"use_ema": True, "ema_momentum": 0.5}
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, **averaging)
    for _ in range(6):  # the averages are 1, 0.9; 0.9, 0.85; 0.825, 0.7625
        optimizer.apply([ops.ones(())], [w])
    assert number(optimizer._model_variables_moving_average[0]) == pytest.approx(0.7625)


def test_steps_and_updates_are_counted_apart_and_per_optimizer() -> None:
    class Pair(treadle.Task):
        def __init__(self) -> None:
            self.w = {"often": keras.Variable(1.0), "seldom": keras.Variable(1.0)}
            self.optimizers = {name: keras.optimizers.SGD(0.1) for name in self.w}
            self.accumulators = {"often": treadle.Accumulator(2), "seldom": treadle.Accumulator(5)}

        def train_step(self, batch: Any) -> Any:
            losses, grads = treadle.gradients(
                lambda: {name: w * ops.mean(batch) for name, w in self.w.items()},
                {name: [w] for name, w in self.w.items()},
            )
            updated = {}
            for name, accumulator in self.accumulators.items():
                with treadle.phase(name, owns=[self.w[name], self.optimizers[name], accumulator]):
                    updated[f"{name}_updated"] = accumulator.add(
                        grads[name],
                        lambda mean, name=name: self.optimizers[name].apply(mean, [self.w[name]]),
                    )
            return {"step": treadle.step(), **losses, **updated}

    task = Pair()
    batches = [np.full(3, i, "float32") for i in range(8)]
    trace = run_steps(task, batches, treadle.Options(checked=True), windows=(3,))
    assert trace.values["step"].tolist() == list(range(8))
    assert trace.values["often_updated"].tolist() == [i % 2 == 1 for i in range(8)]
    assert trace.values["seldom_updated"].tolist() == [i == 4 for i in range(8)]
    counts = {name: number(o.iterations) for name, o in task.optimizers.items()}
    assert counts == {"often": 4, "seldom": 1}
    assert number(task.w["often"]) == pytest.approx(1 - 0.1 * (0.5 + 2.5 + 4.5 + 6.5))
    assert number(task.w["seldom"]) == pytest.approx(1 - 0.1 * 2)
    assert number(task.accumulators["seldom"].filled) == 3
    assert number(task.accumulators["seldom"].weight) == 9


def test_several_losses_have_one_update() -> None:
    a, b = keras.Variable(1.0), keras.Variable(1.0)
    optimizers = {"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.SGD(0.2)}
    accumulator, seen = treadle.Accumulator(2), []

    def update(grads: Any) -> None:
        seen.append(sorted(grads))
        optimizers["a"].apply(grads["a"], [a])
        optimizers["b"].apply(grads["b"], [b])

    for x in (1.0, 3.0):
        _, grads = treadle.gradients(lambda x=x: {"a": x * a, "b": 2 * x * b}, {"a": [a], "b": [b]})
        accumulator.add(grads, update)
    assert seen[-1] == ["a", "b"]
    assert (number(a), number(b)) == pytest.approx((1 - 0.1 * 2, 1 - 0.2 * 4))


def test_half_precision_is_added_up_in_32_bits() -> None:
    accumulator, seen = treadle.Accumulator(300), []
    grads = [ops.ones((1,), "bfloat16")]
    for _ in range(300):  # bfloat16 would stay at 256
        accumulator.add(grads, seen.extend)
    assert keras.backend.standardize_dtype(seen[0].dtype) == "bfloat16"
    assert number(seen[0][0]) == 1
    assert {v.dtype for v in accumulator.sums} == {"float32"}


@pytest.mark.parametrize("kind", [float, ops.convert_to_tensor])
def test_a_group_whose_weights_sum_to_0_makes_no_update(kind: Any) -> None:
    accumulator, seen = treadle.Accumulator(2), []

    def add(slope: float, weight: float) -> bool:
        return bool(accumulator.add({"w": [ops.array(slope)]}, seen.append, weight=kind(weight)))

    assert [add(1.0, 0.0), add(2.0, 0.0)] == [False, False] and not seen
    assert [number(v) for v in accumulator.variables] == [0, 0, 1, 0]  # one skipped
    # A gradient of weight 0 is often the NaN of an empty mean.
    assert [add(float("nan"), 0.0), add(3.0, 2.0), add(1.0, 1.0), add(4.0, 2.0)] == [
        *(False, True),
        *(False, True),
    ]
    assert [number(mean["w"][0]) for mean in seen] == [3, 3]
    assert number(accumulator.skipped) == 1


def test_a_group_that_ends_early_is_applied() -> None:
    accumulator, seen = treadle.Accumulator(4), []
    assert not bool(accumulator.apply(seen.append))  # it was never used
    for slope, weight in ((1.0, 3), (5.0, 1)):
        accumulator.add({"a": [ops.array(slope, "float16")]}, seen.append, weight=weight)
    assert bool(accumulator.apply(seen.append)) and not bool(accumulator.apply(seen.append))
    assert list(seen[0]) == ["a"] and number(seen[0]["a"][0]) == 2
    assert keras.backend.standardize_dtype(seen[0]["a"][0].dtype) == "float16"
    assert [number(v) for v in accumulator.variables] == [0, 0, 0, 0]
    accumulator.add({"a": [ops.array(1.0, "float16")]}, seen.append, weight=0)
    assert not bool(accumulator.apply(seen.append)) and number(accumulator.skipped) == 1


class Masked(treadle.Task):
    """Learns from the mean of the numbers that a mask keeps, in groups of two batches."""

    def __init__(self) -> None:
        self.w = keras.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.1)
        self.accumulator = treadle.Accumulator(2)

    def update(self, mean: Any) -> None:
        self.optimizer.apply(mean, [self.w])

    def train_step(self, batch: Any) -> Any:
        x, mask = batch
        count = ops.sum(mask)
        loss, grads = treadle.gradients(lambda: ops.sum(self.w * x * mask) / count, [self.w])
        self.accumulator.add(grads, self.update, weight=count)
        return {"count": count, "loss_or_0": ops.where(count > 0, loss, 0.0)}


SKIPPED = "accumulator has skipped 1 group of 2 batches whose weights sum to 0: they made no update"
UNFILLED = (
    "accumulator holds the gradients of 1 batch, and makes an update for each 2: they were not "
    "applied. The next call continues the group; Accumulator.apply, in a hook at the end of each "
    "epoch, makes an update of them"
)


def test_skipped_and_unfilled_groups_are_in_the_log(tmp_path: Path) -> None:
    x = np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]], "float32")
    mask = np.array([[1], [1], [0], [0], [0], [1], [1]], "float32")
    source, ends = data.from_arrays((x, mask), batch_size=1, shuffle=False), []

    def run(epochs: int, *hooks: Any, directory: Path | None = None) -> tuple[Masked, list[str]]:
        task = Masked()
        with treadle.Loop(task, directory, hooks=hooks, console=False) as loop:
            history = loop.fit(source, epochs=epochs)
        notes = [record.values["note"] for record in history.records if "note" in record.values]
        return task, notes

    task, notes = run(1, directory=tmp_path / "run")
    # Batches 1 and 2 make an update of 1.5; 3 and 4 none; 5 and 6 one of 6, 7 waits.
    assert number(task.w) == pytest.approx(1 - 0.1 * (1.5 + 6))
    assert notes == [SKIPPED, UNFILLED] and number(task.accumulator.filled) == 1
    again, later = run(1, directory=tmp_path / "run")  # all was done
    assert later == notes and number(again.accumulator.skipped) == 1

    def apply(loop: Any) -> None:
        ends.append(bool(loop.task.accumulator.apply(loop.task.update)))

    task, notes = run(2, treadle.every("1 epoch", apply))
    assert number(task.w) == pytest.approx(1 - 2 * 0.1 * (1.5 + 6 + 7))
    assert notes == [SKIPPED, SKIPPED.replace("1 group", "2 groups")] and ends == [True, True]


@long_to_compile
def test_pending_sums_are_not_weights_and_a_finished_run_restores_them(tmp_path: Path) -> None:
    class Built(Classifier):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["sgd"](), 4)
            self.model.build((None, FEATURES))

        def eval_step(self, batch: Any) -> Any:
            return {"loss": self.loss(batch[1], self.model(batch[0], training=False))}

    def run() -> tuple[Any, Any]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        source, task = data.from_arrays(*labelled(48), batch_size=8), Built()
        with treadle.Loop(task, tmp_path, console=False) as loop:
            for _ in loop.epochs(1):
                for _ in loop.steps(source, every="auto"):
                    pass
            return task, loop.evaluate(source)

    first, expected = run()
    assert number(first.accumulator.filled) == 6 % 4
    again, found = run()  # all was done
    assert number(again.accumulator.filled) == 6 % 4
    for mine, theirs in zip(again.accumulator.sums, first.accumulator.sums, strict=True):
        pair = [ops.convert_to_numpy(x).tobytes() for x in (mine, theirs)]
        assert pair[0] == pair[1]
    assert found == expected
    assert [path for path in treadle.warm_start(first, tmp_path) if "accumulator" in path] == []


@long_to_compile
def test_a_skipped_batch_is_not_part_of_the_window() -> None:
    x, y = labelled(40)
    bad = x.copy()
    bad[17] = np.nan  # batch 3

    def run(batches: Any) -> treadle.Loop:
        keras.utils.set_random_seed(0)
        task = Classifier(OPTIMIZERS["sgd"](), 4)
        hooks = [NonFinite(action="skip")]
        with treadle.Loop(task, hooks=hooks, console=False) as loop:
            loop.fit(batches, epochs=1)
        return loop

    skipped = run(cut(bad, y, (8,)))
    without = run([batch for i, batch in enumerate(cut(x, y, (8,))) if i != 2])
    assert number(skipped.task.optimizer.iterations) == 1
    same(skipped.state.arrays(), without.state.arrays())


def test_gradients_of_other_shapes_are_refused() -> None:
    accumulator = treadle.Accumulator(2)
    accumulator.add([ops.ones((2,)), ops.ones(())], lambda mean: None)
    with pytest.raises(StepError) as caught:
        accumulator.add([ops.ones((2,))], lambda mean: None)
    assert str(caught.value) == (
        "an Accumulator began with 2 gradients of shapes [(2,), ()], and was now given 1 of shapes "
        "[(2,)]: use one for each list of variables"
    )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (0, "steps must be at least 1, not 0"),
        (2.0, "steps must be a whole number, not 2.0: write steps=2"),
    ],
)
def test_steps_is_a_whole_number(steps: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        treadle.Accumulator(steps)
    assert str(caught.value) == message


class Spoiled(Classifier):
    """Moves an average in each step, as if it were an update."""

    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        treadle.blend([self.average], self.model.trainable_variables[:1], 0.5)
        return logs


@long_to_compile
def test_the_kit_finds_a_step_that_differs_from_a_large_batch() -> None:
    batches = cut(*labelled(64), (16,))
    accumulated_equals_large_batch(
        lambda steps: Classifier(OPTIMIZERS["adamw"](), steps), batches, steps=4
    )
    with pytest.raises(AssertionError, match=r"average\[.*\] is .* in 4 batches, but .* in one"):
        accumulated_equals_large_batch(
            lambda steps: Spoiled(OPTIMIZERS["sgd"](), steps), batches, steps=4
        )


def test_the_kit_needs_whole_windows() -> None:
    with pytest.raises(ConfigurationError) as caught:
        accumulated_equals_large_batch(
            lambda steps: Classifier(OPTIMIZERS["sgd"](), steps), cut(*labelled(48), (16,)), steps=2
        )
    assert str(caught.value) == (
        "3 batches are not a multiple of steps=2: the last update would be incomplete"
    )
