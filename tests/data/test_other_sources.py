"""Calls of the loop with one source after another: each begins at its first batch."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
from executions import EXECUTIONS

import treadle
from treadle import data
from treadle.errors import DataError


class Values(treadle.Task):
    """Returns the first number of each batch, and counts the steps in a variable."""

    def __init__(self):
        self.count = keras.Variable(0.0)

    def train_step(self, batch):
        self.count.assign_add(1.0)
        while isinstance(batch, tuple | list):
            batch = batch[0]
        return {"value": keras.ops.mean(batch[:1])}


def batches(first, length):
    return [np.full((2, 1), float(first + i), "float32") for i in range(length)]


def generated(first, length):
    def train():
        yield from batches(first, length)

    return train


def arrays(first, length):
    return data.from_arrays(np.concatenate(batches(first, length)), batch_size=2, shuffle=False)


class Counted(keras.utils.PyDataset):
    def __init__(self, first, length):
        super().__init__()
        self.batches = batches(first, length)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def tensorflow(first, length):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(np.stack(batches(first, length)))


def loader(first, length):
    import torch

    rows = torch.tensor(np.concatenate(batches(first, length)))
    return torch.utils.data.DataLoader(rows, batch_size=2)


EAGER = treadle.Options(execution="eager")  # capturing a step would take most of the time

KINDS = {
    "arrays": arrays,
    "list": batches,
    "generator function": generated,
    "generator": lambda first, length: generated(first, length)(),
    "stream": lambda first, _: lambda: (batches(i, 1)[0] for i in itertools.count(first)),
    "tf.data": tensorflow,
    "DataLoader": loader,
    "PyDataset": Counted,
    "zipped": lambda *at: data.zipped(arrays(*at), generated(*at)),
    "groups": lambda first, length: data.groups(
        [x for x in batches(first, length) for _ in range(2)], 2
    ),
    "limited": lambda first, length: data.limited(generated(first, 99), length),
}


def stop_at(step, why):
    """Return a hook that ends the call after a step."""

    def ended(loop):
        if loop.progress.step == step:
            if isinstance(why, str):
                loop.stop(why)
            else:
                raise why

    return treadle.every("1 step", ended)


def left(loop, source):
    for logs in loop.steps(source):
        if logs.step == 3:
            break


def raised(error):
    def call(loop, source):
        with pytest.raises(type(error)):
            loop.fit(source, steps=9)

    return call


# By name: a call that trains on three batches, and its hooks.
ENDINGS = {
    "steps": (lambda loop, source: loop.fit(source, steps=3), []),
    "until": (lambda loop, source: loop.fit(source, until="1 h"), [stop_at(3, "late")]),
    "stop": (lambda loop, source: loop.fit(source, steps=9), [stop_at(3, "enough")]),
    "break": (left, []),
    "exception": (raised(ValueError()), [stop_at(3, ValueError("3"))]),
    "Ctrl-C": (raised(KeyboardInterrupt()), [stop_at(3, KeyboardInterrupt())]),
}


def check(first, second, ending, options=None):
    call, hooks = ENDINGS[ending]
    loop = treadle.Loop(Values(), hooks=hooks, options=options, console=False)
    a, b = KINDS[first](0, 4), KINDS[second](100, 4)
    call(loop, a)
    loop.fit(b, **({"steps": 4} if second == "stream" else {"epochs": 1}))
    assert loop.history.steps("value").tolist() == [0, 1, 2, 100, 101, 102, 103]
    partial, last = [r for r in loop.history.records if r.kind in ("partial", "epoch")][:2] + (
        [r for r in loop.history.records if second == "stream"][-1:]
    )
    assert (partial.kind, partial.progress.epoch, partial.progress.batch) == ("partial", 0, 3)
    assert partial.values == {"value": 1.0}
    assert last.values == {"value": 101.5}


PAIRS = [(kind, "list") for kind in KINDS] + [("list", kind) for kind in KINDS if kind != "list"]


def with_endings(chosen):
    """Return parameters: each choice with each ending, of which one in three runs by default."""
    return [
        pytest.param(*one, ending, marks=pytest.mark.long if (i + j) % 3 else ())
        for i, one in enumerate(chosen)
        for j, ending in enumerate(ENDINGS)
    ]


@pytest.mark.parametrize(("first", "second", "ending"), with_endings(PAIRS))
def test_another_source_begins_at_its_first_batch(first, second, ending):
    check(first, second, ending, EAGER)


@EXECUTIONS
def test_another_source_in_compiled_and_eager_steps(execution):
    check("arrays", "list", "steps", treadle.Options(execution=execution))


@pytest.mark.parametrize(
    ("kind", "ending"), with_endings([(kind,) for kind in KINDS if kind != "stream"])
)
def test_the_same_source_continues(kind, ending):
    call, hooks = ENDINGS[ending]
    loop = treadle.Loop(Values(), hooks=hooks, options=EAGER, console=False)
    source = KINDS[kind](0, 4)
    call(loop, source)
    loop.fit(source, epochs=1)
    assert loop.history.steps("value").tolist() == [0, 1, 2, 3]
    assert loop.history.epochs == [{"value": 1.5}]
    if kind != "generator":
        loop.fit(source, steps=1)
        assert loop.history.steps("value")[-1] == (4 if kind == "limited" else 0)


@pytest.mark.parametrize("ending", ["steps", pytest.param("break", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["list", "generator function", "limited"])
def test_a_call_that_ended_with_the_epoch_leaves_no_empty_epoch(tmp_path, kind, ending):
    """Also where nothing told at the last batch that it was the last one; resumed at any step."""
    expected = [0, 1, 2, *([3, 4, 5, 6, 7, 8] if kind == "limited" else [0, 1, 2] * 2)]
    for step in (None, 3, 4, 6, 8):
        source, kinds = KINDS[kind](0, 3), []
        for interrupted in (True, False):
            hooks = [treadle.every("1 epoch", lambda loop, to=kinds: to.append(loop.progress.step))]
            hooks += [treadle.hooks.Checkpoint("1 step")]
            hooks += [stop_at(step, RuntimeError("killed"))] if interrupted and step else []
            loop = treadle.Loop(Values(), tmp_path / str(step), hooks, options=EAGER, console=False)
            try:
                with loop:
                    ENDINGS[ending][0](loop, source)
                    loop.fit(source, epochs=2)
            except RuntimeError:
                assert interrupted
        assert loop.history.steps("value").tolist() == expected, step
        epochs = [record.progress.step for record in loop.history.records if record.kind == "epoch"]
        assert epochs == [3, 6, 9], step
        assert sorted(set(kinds)) == [3, 6, 9], step


def test_arrays_with_equal_descriptions_are_the_same_source():
    loop = treadle.Loop(Values(), console=False)
    loop.fit(arrays(0, 4), steps=1)
    loop.fit(arrays(0, 4), steps=1)
    loop.fit(data.groups(arrays(0, 4), 1), steps=1)
    loop.fit(data.groups(arrays(0, 4), 1), steps=1)
    loop.fit(data.groups(arrays(0, 4), 2), steps=1)
    loop.fit(data.groups(arrays(1, 4), 2), steps=1)
    loop.fit(data.from_arrays(np.zeros((8, 1)), batch_size=2, shuffle=False), steps=1)
    loop.fit(data.from_arrays(np.zeros((8, 1)), batch_size=4, shuffle=False), steps=1)
    assert loop.history.steps("value").tolist() == [0, 1, 0, 1, 0, 1, 0, 0]
    assert [record.kind for record in loop.history.records].count("partial") == 5


def test_a_list_that_grew_is_another_source():
    loop, source = treadle.Loop(Values(), console=False), batches(0, 4)
    loop.fit(source, steps=3)
    source.append(source[0])
    loop.fit(source, epochs=1)
    assert loop.history.steps("value").tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


def test_an_epoch_left_at_its_last_batch_is_whole():
    loop = treadle.Loop(Values(), console=False)
    loop.fit(batches(0, 4), steps=4)
    loop.fit(batches(100, 2), epochs=1)
    kinds = [(r.kind, r.progress.batch) for r in loop.history.records if r.kind != "validation"]
    assert kinds == [("epoch", 4), ("epoch", 2)]


def test_a_prepared_source_leaves_the_unfinished_epoch():
    loop, source = treadle.Loop(Values(), console=False), batches(0, 4)
    loop.fit(source, steps=3)
    loop.prepare(batches(100, 2))
    loop.fit(source, epochs=1)
    assert loop.history.steps("value").tolist() == [0, 1, 2, 3]


def several(loop, a, b):
    """Train on other data in several calls, and on two sources in each epoch of one."""
    loop.fit(a, steps=3)
    loop.fit(b, epochs=1)
    for epoch in loop.epochs(2):
        for _ in loop.steps(a, every="1 step"):
            if loop.progress.batch == 2 and epoch == 3:
                break
        for _ in loop.steps(b, every="2 steps"):
            pass
    loop.fit(a, steps=2)
    loop.fit(b, steps=3)


SEVERAL = [0, 1, 2, *range(100, 104), *range(4), *range(100, 104), 0, 1, *range(100, 104)]
SEVERAL += [0, 1, 100, 101, 102]


@pytest.mark.parametrize(
    ("first", "second", "every", "steps"),
    [
        ("list", "arrays", 2, range(1, len(SEVERAL), 4)),
        pytest.param("list", "arrays", 1, range(1, len(SEVERAL)), marks=pytest.mark.long),
        pytest.param("list", "list", 3, range(2, len(SEVERAL), 2), marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_continues_with_the_right_source(tmp_path, first, second, every, steps):
    a, b = KINDS[first](0, 4), KINDS[second](100, 4)
    for step in steps:
        directory = tmp_path / str(step)
        for interrupted in (True, False):
            hooks = [treadle.hooks.Checkpoint(f"{every} steps")]
            hooks += [stop_at(step, RuntimeError("killed"))] if interrupted else []
            loop = treadle.Loop(Values(), directory, hooks, options=EAGER, console=False)
            try:
                with loop:
                    several(loop, a, b)
            except RuntimeError:
                assert interrupted
        assert loop.history.steps("value").tolist() == SEVERAL, step
        kinds = [(r.kind, r.progress.step) for r in loop.history.records if r.kind != "log"]
        assert [at for kind, at in kinds if kind == "partial"] == [3, 23], step
        assert [at for kind, at in kinds if kind == "epoch"] == [7, 15, 21], step


def visited(loop, source, until=None):
    """Train on a source in the body of `loop.epochs`, until a batch of the epoch."""
    for _ in loop.steps(source):
        if loop.progress.batch == until:
            break


def returning(loop, a, b, epochs=2):
    """Leave two sources, and return to them twice."""
    for _ in loop.epochs(epochs):
        for source, until in ((a, 2), (b, 3), (a, 5), (b, 7), (a, None), (b, None)):
            visited(loop, source, until)


RETURNING = [0, 1, 100, 2, 3, 101, 102, 4, 5, 103]
AGAIN = {"limited": [x + 6 * (x < 100) for x in RETURNING]}  # a stream continues
RETURNED = [(kind, "list") for kind in KINDS if kind not in ("list", "stream", "generator")]


@pytest.mark.parametrize(("first", "second"), [*RETURNED, ("list", "arrays")])
def test_a_source_that_returns_in_a_body_continues(first, second):
    loop = treadle.Loop(Values(), options=EAGER, console=False)
    returning(loop, KINDS[first](0, 6), KINDS[second](100, 4))
    assert loop.history.steps("value").tolist() == RETURNING + AGAIN.get(first, RETURNING)
    kinds = [record.kind for record in loop.history.records if record.kind != "log"]
    assert kinds == ["epoch", "epoch"]
    assert loop.history.epochs[0] == {"value": pytest.approx(np.mean(RETURNING))}


def test_a_generator_object_returns_in_one_body():
    loop = treadle.Loop(Values(), console=False)
    returning(loop, KINDS["generator"](0, 6), batches(100, 4), epochs=1)
    assert loop.history.steps("value").tolist() == RETURNING


def test_a_source_that_has_ended_begins_again_in_a_body():
    a, b = batches(0, 2), batches(100, 2)
    loop = treadle.Loop(Values(), console=False)
    for _ in loop.epochs(1):
        for source in (a, a, b, a):
            visited(loop, source)
    assert loop.history.steps("value").tolist() == [0, 1, 0, 1, 100, 101, 0, 1]


@pytest.mark.parametrize(
    "first",
    ["limited", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("list", "DataLoader"))],
)
def test_a_resumed_run_returns_to_the_sources_of_a_body(tmp_path, first):
    for step in (2, 5, 6, 7, 8, 9, 10, 11, 15, 19):
        for interrupted in (True, False):
            hooks = [treadle.hooks.Checkpoint("1 step")]
            hooks += [stop_at(step, RuntimeError("killed"))] if interrupted else []
            loop = treadle.Loop(Values(), tmp_path / str(step), hooks, options=EAGER, console=False)
            with contextlib.suppress(RuntimeError), loop:
                returning(loop, KINDS[first](0, 6), batches(100, 4))
        expected = RETURNING + AGAIN.get(first, RETURNING)
        assert loop.history.steps("value").tolist() == expected, step


def test_a_replay_repeats_calls_with_other_data(tmp_path):
    a, b = batches(0, 4), batches(100, 4)
    with treadle.Loop(Values(), tmp_path, console=False) as loop:
        left(loop, a)
        loop.fit(b, epochs=1)
    for step in (3, 4, 7):
        found = treadle.doctor.replay(Values(), {0: a, 1: b}, tmp_path, step)
        assert "equal to the log bit for bit" in str(found.agreement)


class Flaky:
    """Raises an error once, at a number, and goes on afterwards."""

    def __init__(self, at=2):
        self.at, self.index, self.fails = at, 0, True

    def check(self, index):
        if index == self.at and self.fails:
            self.fails = False
            raise OSError("connection lost")

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == 4:
            raise StopIteration
        self.check(self.index)
        self.index += 1
        return batches(self.index - 1, 1)[0]


def flaky_function():
    flaky = Flaky()

    def train():
        for index in range(4):
            flaky.check(index)
            yield batches(index, 1)[0]

    return train


class FlakyDataset(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.flaky = Flaky()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.flaky.check(index)
        return batches(index, 1)[0]


def flaky_loader():
    import torch

    class Rows(torch.utils.data.Dataset):
        flaky = Flaky()

        def __len__(self):
            return 4

        def __getitem__(self, index):
            self.flaky.check(index)
            return batches(index, 1)[0][0]

    return torch.utils.data.DataLoader(Rows(), batch_size=1)


RETRIED = {
    "iterator": Flaky,
    "generator function": flaky_function,
    "PyDataset": FlakyDataset,
    "DataLoader": flaky_loader,
    "zipped": lambda: data.zipped(Flaky(), Flaky(at=9)),
    "zipped with an iterator": lambda: data.zipped(Flaky(at=9), Flaky()),
    "groups": lambda: data.groups(Flaky(at=1), 2),
    "limited": lambda: data.limited(flaky_function(), 4),
    "limited iterator": lambda: data.limited(Flaky(), 4),
}


@pytest.mark.parametrize("kind", RETRIED)
def test_a_source_is_read_again_after_its_error(kind):
    loop, source = treadle.Loop(Values(), options=EAGER, console=False), RETRIED[kind]()
    with pytest.raises(OSError, match="connection lost"):
        loop.fit(source, epochs=1)
    loop.fit(source, epochs=1)
    expected = [0, 2] if kind == "groups" else [0, 1, 2, 3]
    assert loop.history.steps("value").tolist() == expected


def again(loop, call, source):
    """Make a call, and once more after an error of its source."""
    with contextlib.suppress(OSError):
        call(loop, source)
        return
    call(loop, source)


def by_loops(loop, source):
    for _ in loop.epochs(2):
        for _ in loop.steps(source, every="2 steps"):
            pass


CALLS = {"fit": lambda loop, source: loop.fit(source, epochs=2), "epochs": by_loops}


@pytest.mark.parametrize(
    ("call", "fails_again"),
    [
        ("fit", False),
        ("epochs", True),
        pytest.param("fit", True, marks=pytest.mark.long),
        pytest.param("epochs", False, marks=pytest.mark.long),
    ],
)
def test_a_run_resumes_in_and_after_a_call_that_was_repeated(tmp_path, call, fails_again):
    """The repeated call is the same call: a script that does not fail makes it once."""
    # A repeated call counts its epochs from where it begins: the error is in the first epoch.
    for step in (1, 2, 3, 9, 10, 11) if fails_again else (1, 2, 3, 5, 9, 10, 11):
        for interrupted in (True, False):
            hooks = [treadle.every("1 step", lambda loop: loop.save())]  # waits for the disk
            hooks += [stop_at(step, RuntimeError("killed"))] if interrupted else []
            fails = interrupted or fails_again
            source = flaky_function() if fails else generated(0, 4)
            loop = treadle.Loop(Values(), tmp_path / str(step), hooks, options=EAGER, console=False)
            try:
                with loop:
                    again(loop, CALLS[call], source)
                    loop.fit(batches(100, 4), steps=3)
            except RuntimeError:
                assert interrupted
        assert loop.history.steps("value").tolist() == [0, 1, 2, 3] * 2 + [100, 101, 102], step


def test_a_call_after_an_error_that_its_body_handled_is_another_call(tmp_path):
    for step in (9, None):
        hooks = [treadle.hooks.Checkpoint("1 step")]
        hooks += [stop_at(step, RuntimeError("killed"))] if step else []
        with (
            contextlib.suppress(RuntimeError),
            treadle.Loop(Values(), tmp_path, hooks, console=False) as loop,
        ):
            source = flaky_function()
            for _ in loop.epochs(1):
                again(loop, lambda loop, source: list(loop.steps(source)), source)
            for number in range(2):
                for _ in loop.epochs(1):
                    list(loop.steps(batches(100 * number + 100, 4)))
    expected = [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]
    assert loop.history.steps("value").tolist() == expected


def test_a_call_with_other_data_after_an_error_is_another_call(tmp_path):
    a, b = batches(0, 4), batches(100, 4)
    for step in (5, None):
        hooks = [treadle.hooks.Checkpoint("1 step"), stop_at(2, ValueError("2"))]
        hooks += [stop_at(step, RuntimeError("killed"))] if step else []
        loop = treadle.Loop(Values(), tmp_path, hooks, console=False)
        try:
            with contextlib.suppress(ValueError):
                loop.fit(a, epochs=1)
            loop.fit(b, epochs=1)
        except RuntimeError:
            assert step
    assert loop.history.steps("value").tolist() == [0, 1, 100, 101, 102, 103]


def failing_hook(loop):
    if loop.progress.step == 2:
        raise OSError("disk full")


PLACES = ("hook", "validation", "body")


@pytest.mark.parametrize(
    ("kind", "where"),
    [(kind, PLACES[i % 3]) for i, kind in enumerate(kind for kind in KINDS if kind != "stream")],
)
def test_an_error_elsewhere_leaves_the_source_readable(kind, where):
    class Failing(Values):
        def eval_step(self, batch):
            raise OSError("disk full")

    task = Failing() if where == "validation" else Values()
    hooks = [treadle.every("1 step", failing_hook)] if where == "hook" else []
    source = KINDS[kind](0, 4)
    loop = treadle.Loop(task, hooks=hooks, options=EAGER, console=False)
    with pytest.raises(OSError, match="disk full"):
        if where == "body":
            for _ in loop.steps(source):
                failing_hook(loop)
        elif where == "hook":
            loop.fit(source, epochs=1)
        else:
            loop.fit(source, batches(0, 1), epochs=1, validate_every="2 steps")
    loop.fit(source, epochs=1)
    assert loop.history.steps("value").tolist() == [0, 1, 2, 3]


def test_a_generator_that_is_spent_says_so():
    loop, source = treadle.Loop(Values(), console=False), generated(0, 4)()
    loop.fit(source, epochs=1)
    spent = r"gives its batches once: 4 of them are spent, and batch 1 of epoch \d cannot be .*"
    with pytest.raises(DataError, match=spent + "or cut one long stream into epochs with"):
        loop.fit(source, epochs=1)
    loop.fit(batches(100, 4), epochs=1)
    advice = "or train on one long stream and on other data in the body of one loop.epochs, where"
    with pytest.raises(DataError, match=spent + advice):
        loop.fit(source, epochs=1)
