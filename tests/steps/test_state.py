"""Finding, naming, reading and setting the variables of a task."""

import dataclasses
from collections import UserDict
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.errors import StateError
from treadle.steps.state import State


class Holder(treadle.Task):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def variable(value: Any = 0.0, **kwargs: Any) -> keras.Variable:
    return keras.Variable(value, **kwargs)


def paths(**attributes: Any) -> list[str]:
    """The paths of what a task with these attributes reaches, Keras' own generator left out."""
    found = list(State.discover(Holder(**attributes)).variables)
    assert found.pop() == "random/keras"
    return found


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


# Discovery


def test_containers_of_all_kinds() -> None:
    assert paths(
        bare=variable(),
        listed=[variable(), (variable(),)],
        named={"a": variable(), 3: variable()},
        pair=Pair(variable(), {"deep": [variable()]}),
        nested=Holder(inner=variable()),
        generator=keras.random.SeedGenerator(1),
    ) == [
        "bare",
        "listed/0",
        "listed/1/0",
        "named/a",
        "named/3",
        "pair/first",
        "pair/second/deep/0",
        "nested/inner",
        "generator/state",
    ]


def test_other_objects_are_not_searched() -> None:
    assert paths(other=UserDict(hidden=variable()), function=lambda: variable()) == []


def test_a_variable_held_twice_is_found_once_under_its_first_name() -> None:
    shared, layer = variable(), keras.layers.Dense(1)
    layer.build((None, 2))
    assert paths(a=shared, b=[shared], one=layer, two=Pair(layer, layer)) == [
        "a",
        "one/kernel",
        "one/bias",
    ]


def test_objects_that_refer_to_each_other() -> None:
    inner = Holder(value=variable())
    inner.myself = inner
    inner.circle = [inner]
    assert paths(inner=inner) == ["inner/value"]


def test_equal_names_are_made_unique() -> None:
    assert paths(**{"a/b": variable(), "a": {"b": variable()}}) == ["a/b", "a/b_1"]


def test_models_by_position_and_by_attribute() -> None:
    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self._hidden = keras.layers.Dense(2)
            self.parts = [keras.layers.Dense(2), keras.layers.Dropout(0.5, seed=1)]
            self.scale = self.add_weight(shape=(), name="another_name")
            self.unnamed = self.add_weight(shape=())
            self.several = [self.add_weight(shape=()) for _ in range(2)]
            self.add_weight(shape=(), name="kept_nowhere")
            self.add_weight(shape=())
            self.average = keras.metrics.Mean()

        def call(self, x: Any) -> Any:
            return self.parts[0](self._hidden(x))

    inputs = keras.Input((2,))
    functional = keras.Model(inputs, keras.layers.Dense(1)(Block()(inputs)))
    expected = {
        "model/layers/1/scale",
        "model/layers/1/unnamed",
        "model/layers/1/several/0",
        "model/layers/1/several/1",
        "model/layers/1/hidden/kernel",
        "model/layers/1/hidden/bias",
        "model/layers/1/parts/0/kernel",
        "model/layers/1/parts/0/bias",
        "model/layers/1/parts/1/seed_generator/state",
        "model/layers/1/average/total",
        "model/layers/1/average/count",
        "model/layers/1/kept_nowhere",
        "model/layers/1/variables/5",
        "model/layers/2/kernel",
        "model/layers/2/bias",
    }
    for _ in range(2):  # automatic names count instances; paths do not
        assert set(paths(model=functional)) == expected
        keras.layers.Dense(1)


def test_subclassed_models() -> None:
    class Mine(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.Sequential([keras.layers.Dense(2)])
            self.heads = {"a": keras.layers.Dense(1)}

        def call(self, x: Any) -> Any:
            return self.heads["a"](self.encoder(x))

    model = Mine()
    model(np.ones((1, 2), "float32"))
    assert paths(net=model) == [
        "net/encoder/layers/0/kernel",
        "net/encoder/layers/0/bias",
        "net/heads/a/kernel",
        "net/heads/a/bias",
    ]


def test_optimizers_come_last_and_slots_have_their_variables_names() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    assert paths(optimizer=optimizer, net=model) == [
        "net/layers/0/kernel",
        "net/layers/0/bias",
        "optimizer/iterations",
        "optimizer/learning_rate",
        "optimizer/momentums/net/layers/0/kernel",
        "optimizer/momentums/net/layers/0/bias",
    ]


@pytest.mark.parametrize(
    "name", [n for n in dir(keras.optimizers) if n[0].isupper() and n[:5] != "Optim"]
)
def test_no_optimizer_has_automatic_names(name: str) -> None:
    if name in ("LossScaleOptimizer", "MultiOptimizer"):
        pytest.skip("wraps others")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    found = []
    for _ in range(2):
        optimizer = getattr(keras.optimizers, name)(use_ema=True)
        optimizer.build(model.trainable_variables)
        found.append(paths(model=model, optimizer=optimizer))
        assert len(found[-1]) == 2 + len(optimizer.variables)
    assert found[0] == found[1]
    assert not [path for path in found[0] if "variables/" in path]


def test_metrics_have_their_attributes_names() -> None:
    state = State.discover(
        Holder(
            accuracy=keras.metrics.Mean(),
            more={"accuracy": keras.metrics.Mean(), "top": keras.metrics.Mean()},
        )
    )
    assert list(state.metrics) == ["accuracy", "more/accuracy", "top"]


def test_metrics_in_lists_have_their_paths() -> None:
    means = [keras.metrics.Mean(), keras.metrics.Mean()]
    state = State.discover(Holder(m={"a": means[:1]}, n=means[1:], m_a=keras.metrics.Mean()))
    assert list(state.metrics) == ["m/a/0", "n/0", "m_a"]


def test_seeds_are_known_as_seeds() -> None:
    state = State.discover(
        Holder(generator=keras.random.SeedGenerator(1), drop=keras.layers.Dropout(0.5))
    )
    assert [state.path_of(seed) for seed in state.seeds] == [
        "generator/state",
        "drop/seed_generator/state",
        "random/keras",
    ]


def test_paths_of_variables_within_and_without() -> None:
    inside, outside = variable(), variable(name="outside")
    state = State.discover(Holder(a=[inside]))
    assert inside in state
    assert outside not in state
    assert state.path_of(inside) == "a/0"
    assert state.path_of(outside) == "outside"


# Values


def state_of_two() -> State:
    return State.discover(
        Holder(a=variable([1.0, 2.0]), n=variable(3, dtype="int32", trainable=False))
    )


def test_arrays_are_copies() -> None:
    state = state_of_two()
    before = state.arrays()
    before["a"][0] = 99
    assert state.arrays()["a"].tolist() == [1, 2]
    kept = state.arrays()
    state.variables["a"].assign([5.0, 6.0])
    assert kept["a"].tolist() == [1, 2]


def test_assigning_arrays_again() -> None:
    state = state_of_two()
    before = state.arrays()
    state.variables["a"].assign([5.0, 6.0])
    state.variables["n"].assign(7)
    state.assign(before)
    assert state.arrays()["a"].tolist() == [1, 2]
    assert state.arrays()["n"] == 3
    # Backends differ in how many bits they use.
    state.assign({**before, "n": np.int64(8), "a": np.array([3, 4], "float64")})
    assert state.arrays()["n"] == 8
    assert state.arrays()["a"].dtype == np.float32


def test_all_faults_are_listed_and_nothing_is_changed() -> None:
    state = state_of_two()
    seed = state.arrays()["random/keras"]
    with pytest.raises(StateError) as caught:
        state.assign({"a": np.zeros(3), "n": np.float32(1), "left/over": np.zeros(())})
    assert str(caught.value) == (
        "the values do not fit the task: random/keras has no value; left/over is not in this task; "
        "a has shape (3,), expected (2,); n has dtype float32, expected int32. Nothing was changed"
    )
    with pytest.raises(StateError, match="a has dtype bool, expected float32"):
        state.assign({"a": np.zeros(2, bool), "n": np.int32(9), "random/keras": seed})
    assert state.arrays()["n"] == 3


def test_keeping_and_putting_back() -> None:
    state = state_of_two()
    everything, some = state.keep(), state.keep(["n"])
    for found in (state.variables["a"], state.variables["n"]):
        found.assign(found + 1)
    state.put_back(some)
    assert state.arrays()["n"] == 3
    assert state.arrays()["a"].tolist() == [2, 3]
    state.put_back(everything)
    assert state.arrays()["a"].tolist() == [1, 2]


# Constants


def test_python_values_are_constants() -> None:
    layer = keras.layers.Dense(1)
    large = np.zeros(100_000)
    task = Holder(
        rate=0.5, name="x", flag=True, none=None, table=np.arange(3), large=large, layer=layer,
        nested=Holder(size=3), tables={"a": [np.zeros(2)], "b": (np.ones(2),)},
    )  # fmt: skip
    state = State.discover(task)
    before = state.constants()
    assert {"rate", "name", "flag", "none", "table", "large", "nested/size"} < set(before)
    assert before["nested/size"] == 3
    tables = ["tables/a/0", "tables/b/0"]
    assert set(tables) < set(before)
    assert state.constants() == before
    task.nested.size = 4
    task.table = np.array([0, 1, 3])
    task.tables["a"] = [np.ones(2)]
    task.tables["b"][0][1] = 5
    task.large = large.copy()
    layer.trainable = False
    after = state.constants()
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {"nested/size", "table", "layer/trainable", "large", *tables}
    task.table, task.tables = "gone", None
    after = state.constants()
    assert after["table"] == "gone"
    assert [after[path] for path in tables] == [None, None]


def test_the_learning_rate_of_an_optimizer_is_a_constant() -> None:
    schedule = keras.optimizers.schedules.CosineDecay
    plain, scheduled = keras.optimizers.SGD(0.1), keras.optimizers.SGD(schedule(1.0, 9))
    several = keras.optimizers.MultiOptimizer(lambda _: scheduled)
    several.build([variable()])
    state = State.discover(Holder(a=plain, b=several))
    before = state.constants()
    assert before["b/inner_optimizers/0/learning_rate/decay_steps"] == 9
    plain.learning_rate = 0.5  # assigned to its variable
    assert state.constants() == before
    plain.learning_rate = schedule(1.0, 9)
    scheduled._learning_rate.decay_steps = 10
    after = state.constants()
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {"a/learning_rate", "b/inner_optimizers/0/learning_rate/decay_steps"}


def test_constants_are_set_where_they_are() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    rate = optimizer._learning_rate
    task = Holder(pair=[(1, 2)], optimizer=optimizer, drop=keras.layers.Dropout(0.5))
    constants = State.constants_of(task)
    constants["pair/0/1"].write(3)
    constants["drop/rate"].write(0.25)
    optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(1.0, 9)
    constants["optimizer/learning_rate"].write(rate)
    assert task.pair == [(1, 3)] and task.drop.rate == 0.25
    assert optimizer.learning_rate is rate
    assert [v is rate for v in optimizer.variables].count(True) == 1
