"""Structures keep the order of their keys and the classes of their containers everywhere."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from executions import EAGER, long_to_compile, once
from keras import ops

import treadle
from tests.dying import Dying
from treadle import data
from treadle.errors import StepError

EXECUTIONS = ("compiled", EAGER)
EAGER_ONCE = ("compiled", pytest.param("eager", marks=once))
ROWS = 4
MANY = range(6, 26 if keras.config.backend() == "torch" else 11)  # XLA compiles each
SEEDS = [
    0,
    pytest.param(range(1, 6), marks=long_to_compile, id="some"),
    pytest.param(MANY, marks=pytest.mark.long, id="many"),
]


class Pair(NamedTuple):
    second: Any
    first: Any


@dataclass
class Open:
    y: Any
    a: Any


@dataclass(frozen=True)
class Frozen:
    z: Any
    c: Any = None


class Own(dict[str, Any]):
    """A dict of a class of its own."""


def random_structure(rng: np.random.Generator, depth: int = 0) -> Any:
    """Return a structure whose leaves are 0, and that is a container."""

    def part() -> Any:
        kind = rng.integers(8)
        if kind == 0:
            return None
        return random_structure(rng, depth + 1) if kind < 4 and depth < 2 else 0

    def items() -> list[tuple[Any, Any]]:
        keys = rng.choice(["z", "b", "m", "a", "q"], size=rng.integers(1, 4), replace=False)
        return [(str(key), part()) for key in keys]

    made: list[Callable[[], Any]] = [
        lambda: dict(items()),
        lambda: OrderedDict(items()),
        lambda: defaultdict(list, items()),
        lambda: Own(items()),
        lambda: Pair(part(), part()),
        lambda: Open(part(), part()),
        lambda: Frozen(part(), part()),
        lambda: [part() for _ in range(rng.integers(1, 3))],
        lambda: (part(), part()),
    ]
    return made[rng.integers(len(made))]()


def structures_of(seed: Any) -> Iterator[Any]:
    """Yield a dict whose keys are not sorted, and random structures."""
    for number in seed if isinstance(seed, range) else [seed]:
        if number == 0:
            yield {
                "z": 0,
                "b": OrderedDict(y=0, none=None, a=Pair(0, Frozen(0))),
                "a": [Open(0, 0)],
            }
        rng, found = np.random.default_rng(number), None
        while found is None or len(list(walked(found))) < 3:
            found = random_structure(rng)
        yield found


def parts_of(x: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and parts of a container, found without Treadle."""
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, (list, tuple)):
        return list(enumerate(x))
    if is_dataclass(x):
        return [(field.name, getattr(x, field.name)) for field in fields(x)]
    return None


def walked(x: Any) -> Iterator[Any]:
    parts = parts_of(x)
    if parts is None:
        yield from () if x is None else (x,)
        return
    for _, part in parts:
        yield from walked(part)


def described(x: Any) -> Any:
    """Return the classes and keys of a structure, in order."""
    parts = parts_of(x)
    if parts is None:
        return None if x is None else "leaf"
    factory = [x.default_factory] if isinstance(x, defaultdict) else []
    return [type(x), *factory, *((key, described(part)) for key, part in parts)]


def filled(structure: Any, leaf: Callable[[], Any]) -> Any:
    """Return a structure with other leaves, made without Treadle."""
    parts = parts_of(structure)
    if parts is None:
        return None if structure is None else leaf()
    made = [filled(part, leaf) for _, part in parts]
    if isinstance(structure, defaultdict):
        return defaultdict(structure.default_factory, zip(structure, made, strict=True))
    if isinstance(structure, dict):
        return type(structure)(zip(structure, made, strict=True))
    if isinstance(structure, Pair) or is_dataclass(structure):
        return type(structure)(*made)
    return type(structure)(made)


def batch_of(structure: Any, step: int) -> Any:
    """Return a batch whose leaf number `i` holds `step + i + 1`, and the row."""
    numbers = iter(range(100))
    return filled(
        structure, lambda: np.arange(ROWS, dtype="float32") / 8 + next(numbers) + 1 + step
    )


def told(structure: Any) -> Any:
    """Return a scalar that depends on the order of the leaves."""
    return sum(10.0**-i * ops.mean(x) for i, x in enumerate(walked(structure)))


def told_of(batch: Any) -> float:
    return sum(10.0**-i * np.mean(x) for i, x in enumerate(walked(batch)))


class Passing(treadle.Task):
    """Passes structures through every function that takes or returns some."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.w = keras.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.0)
        self._see = lambda name, x: (seen.setdefault(name, []).append(described(x)), x)[1]

    def train_step(self, batch: Any) -> Any:
        see = self._see
        found = {"batch": see("batch", batch)}
        loss = lambda: (self.w * 2.0, batch)  # noqa: E731
        found["gradients"] = see("gradients", treadle.gradients(loss, [self.w])[0][1])
        found["minimize"] = see("minimize", treadle.minimize(loss, [self.w], self.optimizer)[1])
        x = next(walked(batch))
        aux = treadle.input_gradients(lambda x: (ops.sum(x**2), batch), x)[0][1]
        found["input_gradients"] = see("input_gradients", aux)
        found["cond"] = see("cond", treadle.cond(ops.mean(x) > 0, lambda: batch, lambda: batch))
        rows = treadle.for_each(lambda row: see("row", row), batch)
        found["for_each"] = see("for_each", rows)
        found["remat"] = see("remat", treadle.remat(lambda x: see("inside", x))(batch))
        found["gathered"] = see("gathered", treadle.gathered(batch))
        return {name: told(x) for name, x in found.items()}


@pytest.mark.parametrize("execution", EAGER_ONCE)
@pytest.mark.parametrize("seed", SEEDS)
def test_steps_get_and_functions_return_the_structures_they_were_given(
    seed: Any, execution: str
) -> None:
    for structure in structures_of(seed):
        seen: dict[str, Any] = {}
        batches = [batch_of(structure, step) for step in range(3)]
        loop = treadle.Loop(
            Passing(seen), console=False, options=treadle.Options(execution=execution)
        )
        history = loop.fit(batches, epochs=1)
        names = ["batch", "gradients", "minimize", "input_gradients", "cond", "for_each"]
        assert set(seen) == {*names, "row", "inside", "remat", "gathered"}
        for name, found in seen.items():
            assert all(x == described(structure) for x in found), name
        for name in [*names, "remat", "gathered"]:
            expected = [told_of(batch) for batch in batches]
            np.testing.assert_allclose(history.steps(name), expected, rtol=1e-5, err_msg=name)


class Reading(treadle.Task):
    """Returns a value for each array of its batch, in order."""

    def __init__(self, seen: list[Any]) -> None:
        self._see = lambda x: seen.append(described(x))

    def train_step(self, batch: Any) -> Any:
        self._see(batch)
        return {"told": told(batch), "first": ops.mean(next(walked(batch)))}

    def predict_step(self, batch: Any) -> Any:
        self._see(batch)
        return batch

    def both(self, x: Any, y: Any) -> Any:
        self._see(x)
        return {"z": y, "b": x}


def sources_of(structure: Any) -> dict[str, tuple[Any, list[Any], Any]]:
    """Return sources of each kind, their batches, and the structure of these."""
    batches = [batch_of(structure, step) for step in range(4)]
    numbers = iter(range(100))
    rows = filled(structure, lambda: np.arange(8, dtype="float32") + next(numbers))
    halves = [iter([x[part] for x in walked(rows)]) for part in (slice(4), slice(4, 8))]
    pieces = [filled(structure, half.__next__) for half in halves]
    pairs = [(a, b) for a, b in zip(batches[::2], batches[1::2], strict=True)]
    zipped = [{"real": x, "noise": x} for x in batches]
    return {
        "list": (batches, batches, structure),
        "generator": (lambda: iter(batches), batches, structure),
        "arrays": (data.from_arrays(rows, batch_size=4, shuffle=False), pieces, structure),
        "function": (data.from_function(lambda rng: batches[0], 2), batches[:1] * 2, structure),
        "groups": (data.groups(batches, 2), pairs, (structure, structure)),
        "zipped": (
            data.zipped(real=batches, noise=batches),
            zipped,
            {"real": structure, "noise": structure},
        ),
        "limited": (data.limited(batches, 2), batches[:2], structure),
    }


@pytest.mark.parametrize("execution", EAGER_ONCE)
@pytest.mark.parametrize("seed", SEEDS)
def test_batches_of_every_source_have_their_structure(seed: Any, execution: str) -> None:
    for structure in structures_of(seed):
        sources = sources_of(structure)
        few = execution == "compiled" and seed != 0
        for kind in ("list", "arrays", "zipped") if few else sources:
            source, batches, expected = sources[kind]
            seen: list[Any] = []
            options = treadle.Options(execution=execution)
            loop = treadle.Loop(Reading(seen), console=False, options=options)
            history = loop.fit(source, epochs=1)
            assert seen and all(x == described(expected) for x in seen), kind
            np.testing.assert_allclose(
                history.steps("told"), [told_of(batch) for batch in batches], 1e-5, err_msg=kind
            )


@pytest.mark.parametrize("execution", EAGER_ONCE)
@pytest.mark.parametrize("seed", SEEDS)
def test_predict_and_call_return_the_structures_of_their_functions(
    seed: Any, execution: str
) -> None:
    for structure in structures_of(seed):
        batches = [batch_of(structure, step) for step in range(2)]
        seen: list[Any] = []
        options = treadle.Options(execution=execution)
        loop = treadle.Loop(Reading(seen), console=False, options=options)
        for source in (batches, rows_of(batches)):
            columns = zip(*(walked(batch) for batch in batches), strict=True)
            found = loop.predict(source)
            assert described(found) == described(structure)
            for leaf, parts in zip(walked(found), columns, strict=True):
                np.testing.assert_array_equal(leaf, np.concatenate(parts))
        called = loop.call(loop.task.both, *batches)
        assert all(x == described(structure) for x in seen)
        assert described(called) == described({"z": structure, "b": structure})
        for leaf, value in zip(walked(called), walked((batches[1], batches[0])), strict=True):
            np.testing.assert_array_equal(leaf, value)


def rows_of(batches: list[Any]) -> Any:
    """Return a source of the rows of batches, which are on the device."""
    leaves = zip(*(walked(batch) for batch in batches), strict=True)
    rows = filled(batches[0], lambda: np.concatenate(next(leaves)))
    return data.from_arrays(rows, batch_size=ROWS, shuffle=False)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_losses_and_gradients_are_in_the_order_of_the_variables(execution: str) -> None:
    seen: list[Any] = []

    class TwoLosses(treadle.Task):
        def __init__(self) -> None:
            self.first, self.second = keras.Variable(1.0), keras.Variable(2.0)

        def train_step(self, batch: Any) -> Any:
            def losses() -> Any:
                found = OrderedDict(z=3.0 * self.first, b=5.0 * self.second)
                return found, {"y": batch, "a": 2.0 * self.first}

            (found, aux), grads = treadle.gradients(losses, {"z": [self.first], "b": [self.second]})
            seen.append([described(x) for x in (found, aux, grads)])
            return {"z": grads["z"][0], "b": grads["b"][0], "a": aux["a"]}

    options = treadle.Options(execution=execution)
    loop = treadle.Loop(TwoLosses(), console=False, options=options)
    history = loop.fit([np.ones(2, "float32")] * 2, epochs=1)
    losses = described(OrderedDict(z=0, b=0))
    expected = [losses, described({"y": 0, "a": 0}), described({"z": [0], "b": [0]})]
    assert all(x == expected for x in seen)
    assert list(history.records[0].values) == ["z", "b", "a"]
    assert history.records[0].values == {"z": 3.0, "b": 5.0, "a": 2.0}


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_functional_model_takes_a_dict_batch_in_any_order(execution: str) -> None:
    z, b = keras.Input((2,), name="z"), keras.Input((3,), name="b")
    outputs = {"sum": keras.layers.Concatenate()([z, b]), "b": 2.0 * b}
    model = keras.Model({"z": z, "b": b}, outputs)

    class Called(treadle.Task):
        def __init__(self) -> None:
            self.model = model

        def predict_step(self, batch: Any) -> Any:
            return self.model(batch)

    loop = treadle.Loop(Called(), console=False, options=treadle.Options(execution=execution))
    arrays = {"z": np.ones((4, 2), "float32"), "b": 3 * np.ones((4, 3), "float32")}
    for batch in (arrays, dict(reversed(arrays.items()))):
        found = loop.predict([batch])
        np.testing.assert_array_equal(found["sum"], [[1, 1, 3, 3, 3]] * 4)
        np.testing.assert_array_equal(found["b"], np.full((4, 3), 6.0))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_branches_may_return_their_keys_in_another_order(execution: str) -> None:
    class Branches(treadle.Task):
        def train_step(self, x: Any) -> Any:
            found = treadle.cond(
                ops.mean(x) > 1,
                lambda: {"z": ops.mean(x), "b": 10 * ops.mean(x)},
                lambda: {"b": 20 * ops.mean(x), "z": 2 * ops.mean(x)},
            )
            return {"z": found["z"], "b": found["b"]}

    options = treadle.Options(execution=execution)
    loop = treadle.Loop(Branches(), console=False, options=options)
    history = loop.fit([np.full(2, x, "float32") for x in (1, 2, 1)], epochs=1)
    assert history.steps("z").tolist() == [2.0, 2.0, 2.0]
    assert history.steps("b").tolist() == [20.0, 20.0, 20.0]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_branches_of_different_structures_are_refused(execution: str) -> None:
    class Different(treadle.Task):
        def train_step(self, x: Any) -> Any:
            mean = ops.mean(x)
            treadle.cond(mean > 1, lambda: {"a": (mean, mean)}, lambda: {"a": mean})
            return mean

    options = treadle.Options(execution=execution)
    loop = treadle.Loop(Different(), console=False, options=options)
    with pytest.raises(StepError) as caught:
        loop.fit([np.ones(2, "float32")], epochs=1)
    assert str(caught.value).startswith(
        "both branches of cond must always return the same structure: ['a'] is a tuple of 2 in "
        "one, and an array in the other"
    )


def test_for_each_needs_a_tensor() -> None:
    with pytest.raises(StepError, match=r"^for_each got no tensor: pass a structure of tensors"):
        treadle.for_each(lambda row: row, {"x": None})


def test_predictions_of_different_structures_are_refused() -> None:
    class Different(treadle.Task):
        def predict_step(self, x: Any) -> Any:
            return {"y": x} if x.shape[0] == 4 else [x]

    loop = treadle.Loop(Different(), console=False)
    with pytest.raises(StepError) as caught:
        loop.predict([np.ones(4, "float32"), np.ones(3, "float32")])
    assert str(caught.value) == (
        "predict_step must return the same structure for every batch: it is a dict with 'y' in "
        "one, and a list of 1 in the other"
    )


def differing(history: Any) -> list[str]:
    """Return the notes that arrays differ in length."""
    notes = [r.values["note"] for r in history.records if "note" in r.values]
    return [note for note in notes if "differ in length" in note]


class Mean(treadle.Task):
    def train_step(self, batch: Any) -> Any:
        return {"mean": ops.mean(batch["x"])}


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_scalar_in_a_batch_is_no_number_of_examples(execution: str) -> None:
    def batches() -> Iterator[Any]:
        x = np.arange(1, 11, dtype="float32")
        yield {"x": x[:8], "alpha": np.float32(0.5)}
        yield {"alpha": np.float32(0.5), "x": x[8:]}

    loop = treadle.Loop(Mean(), console=False, options=treadle.Options(execution=execution))
    history = loop.fit(batches, epochs=1)
    assert history["mean"] == [5.5]
    assert loop.progress.examples == 10
    assert differing(history) == []


def test_the_first_array_counts_if_lengths_differ_and_one_note_says_so(tmp_path: Path) -> None:
    def graphs() -> list[Any]:
        sizes = (6, 2, 6, 2)
        return [{"x": np.full(n, n, "float32"), "edges": np.zeros((9, 2), "int32")} for n in sizes]

    with pytest.raises(OSError, match="killed"):
        loop = treadle.Loop(Mean(), directory=tmp_path / "run", hooks=[Dying(6)], console=False)
        loop.fit(graphs(), epochs=2)
    loop = treadle.Loop(Mean(), directory=tmp_path / "run", console=False)
    history = loop.fit(graphs(), epochs=2)
    assert history.records[0].progress.step == 0  # of the process that ended
    assert history["mean"] == [5.0, 5.0]
    assert loop.progress.examples == 32
    assert differing(history) == [
        "the arrays of a batch differ in length (the array 'x' has 6 rows, the array 'edges' has "
        "9), so the rows of the array 'x' count as its examples. To count others, put their array "
        "first, or return treadle.weighted(value, count) from the step"
    ]
