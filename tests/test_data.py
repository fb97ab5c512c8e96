import doctest
import gc
import importlib
import random
import subprocess
import sys

import numpy as np
import pytest

import treadle
from treadle.core.progress import Progress
from treadle.data import (
    as_source,
    closed_loop,
    from_arrays,
    from_function,
    groups,
    limited,
    zipped,
)
from treadle.data.source import ReadRequest, Source, is_closed_loop, read_from
from treadle.errors import DataError
from treadle.run.prefetch import Feed


def one(window, i):
    """Return batch `i` of a window as what `==` compares: paths, types, shapes, dtypes, bits."""
    from keras import tree

    def told(leaf):
        return None if leaf is None else (leaf[i].shape, str(leaf.dtype), leaf[i].tobytes())

    leaves = tree.flatten_with_path(window.batches)
    return type(window.batches), [(path, told(leaf)) for path, leaf in leaves]


def all_batches(source, epoch=0, start=0, most=1, count=None, **arguments):
    reader, found = source.read(epoch, start, **arguments), []
    while (count is None or len(found) < count) and (window := reader.take(most)) is not None:
        assert 1 <= window.count <= most
        found += [one(window, i) for i in range(window.count)]
    reader.close()
    return found[:count]


X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.arange(12)

SEEKING = {
    "one array": lambda: from_arrays(X, batch_size=5),
    "a pair": lambda: from_arrays(X, Y, batch_size=4),
    "a pair in order": lambda: from_arrays(X, Y, batch_size=5, shuffle=False),
    "last one dropped": lambda: from_arrays(X, Y, batch_size=5, drop_last=True),
    "larger batch than data": lambda: from_arrays(X, Y, batch_size=50),
    "nested, with None": lambda: from_arrays({"a": X, "b": (Y, None)}, batch_size=3),
    "a seed of its own": lambda: from_arrays(X, batch_size=5, seed=9),
    "function": lambda: from_function(lambda rng: {"z": rng.normal(size=(2, 3))}, 7),
    "function with structure": lambda: from_function(lambda rng: (rng.random(2), None), 4, seed=1),
    "list": lambda: as_source([(X[i : i + 5], Y[i : i + 5]) for i in range(0, 12, 5)]),
    "drawing from global states": lambda: as_source(Drawing()),
}


class Drawing:
    """Indexed, without `__iter__`; draws from the global random states."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.array([random.random(), np.random.rand(), index])


@pytest.mark.parametrize("name", SEEKING)
def test_reading_from_k_equals_skipping_k(name):
    source = SEEKING[name]()
    assert isinstance(source, Source)
    assert source.inexact is None and not source.endless
    for epoch in (0, 3):
        expected = all_batches(source, epoch, seed=5)
        assert len(expected) == source.length
        for start in range(source.length + 1):
            fresh = SEEKING[name]()
            assert all_batches(fresh, epoch, start, most=3, seed=5) == expected[start:]


@pytest.mark.parametrize("name", SEEKING)
@pytest.mark.parametrize("most", [2, 3, 100])
def test_windows_of_any_size_hold_the_same_batches(name, most):
    source = SEEKING[name]()
    assert all_batches(source, 1, most=most) == all_batches(source, 1)


@pytest.mark.parametrize("name", SEEKING)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_what_is_put_back_comes_again(name, most):
    source = SEEKING[name]()
    expected = all_batches(source, 2)
    reader, found = source.read(2), []
    while (window := reader.take(4)) is not None:
        reader.put_back(window)
        window = reader.take(most)
        found += [one(window, i) for i in range(window.count)]
    assert found == expected


@pytest.mark.parametrize("name", SEEKING)
def test_beyond_the_end_is_an_error_and_the_end_is_not(name):
    source = SEEKING[name]()
    assert source.read(0, source.length).take(1) is None
    with pytest.raises(DataError, match=rf"^epoch 1 has {source.length} batches, but"):
        source.read(0, source.length + 1)


def test_shuffled_epochs_hold_every_example_once_in_another_order():
    source = from_arrays(X, Y, batch_size=5)
    orders = []
    for epoch in range(3):
        reader, seen = source.read(epoch, seed=1), []
        while (window := reader.take(9)) is not None:
            x, y = window.batches
            assert np.array_equal(x[..., 0], 2 * y)  # both indexed alike
            assert x.dtype == np.float32 and y.dtype == Y.dtype
            seen += y.ravel().tolist()
        assert sorted(seen) == list(range(12))
        orders.append(seen)
    assert len({tuple(order) for order in orders}) == 3


def test_short_last_batch_is_a_window_of_its_own():
    reader = from_arrays(Y, batch_size=5, shuffle=False).read(0)
    first, last = reader.take(9), reader.take(9)
    assert first.batches.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (first.count, first.examples) == (2, 5)
    assert last.batches.tolist() == [[10, 11]]
    assert (last.count, last.examples) == (1, 2)
    assert reader.take(9) is None


def test_short_last_batch_is_dropped_on_request():
    source = from_arrays(Y, batch_size=5, drop_last=True)
    assert source.length == 2
    assert len(all_batches(source)) == 2
    assert from_arrays(Y, batch_size=4, drop_last=True).length == 3


def test_batch_examples_and_length():
    assert from_arrays(Y, batch_size=5).batch_examples == 5
    assert from_arrays(Y, batch_size=50).batch_examples == 12
    assert from_arrays(Y, batch_size=50).length == 1


def test_structures_and_sample_weights():
    weights = np.linspace(0, 1, 12)
    window = from_arrays(X, Y, weights, batch_size=4).read(0).take(3)
    x, y, w = window.batches
    assert (x.shape, y.shape, w.shape) == ((3, 4, 2), (3, 4), (3, 4))
    assert w.dtype == np.float64 and np.allclose(w, y / 11)
    window = from_arrays({"x": X, "y": None}, Y, batch_size=4).read(0).take(2)
    (features, labels) = window.batches
    assert features["y"] is None and features["x"].shape == (2, 4, 2) and labels.shape == (2, 4)
    assert window.examples == 4


def test_seeds_of_run_and_source():
    run = from_arrays(Y, batch_size=12)
    own = from_arrays(Y, batch_size=12, seed=3)
    assert all_batches(run, seed=1) != all_batches(run, seed=2)
    assert all_batches(own, seed=1) == all_batches(own, seed=2) == all_batches(run, seed=3)


def test_ordered_reading_is_as_stored():
    source = from_arrays(Y, batch_size=5)
    assert all_batches(source, ordered=True) == all_batches(
        from_arrays(Y, batch_size=5, shuffle=False)
    )


def test_indices_are_those_of_the_windows():
    source = from_arrays(X, Y, batch_size=5)
    assert source.arrays[1] is Y
    for start in range(4):
        indices = source.indices(2, start, 4, seed=7)
        window = source.read(2, start, seed=7).take(4)
        if window is None:
            assert indices.shape == (0, 5)
        else:
            assert np.array_equal(source.arrays[1][indices], window.batches[1])
    assert source.indices(0, 0, 9, ordered=True).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_windows_do_not_share_memory_with_the_arrays():
    stored = np.zeros((4, 2))
    for source in (from_arrays(stored, batch_size=2, shuffle=False), as_source([stored])):
        source.read(0).take(1).batches[:] = 1
    assert not stored.any()


def test_tensors_and_memory_maps_as_arrays(tmp_path):
    import tensorflow as tf
    import torch

    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4, 2))
    mapped[:] = 3
    batches = from_arrays(
        mapped, torch.ones(4), tf.constant([1, 2, 3, 4]), batch_size=4, shuffle=False
    )
    x, ones, numbers = batches.read(0).take(1).batches
    assert (x == 3).all() and (ones == 1).all() and numbers.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: from_arrays(batch_size=1), r"^from_arrays got no arrays: call it as"),
        (lambda: from_arrays(None, batch_size=1), r"^from_arrays got no arrays: call it as"),
        (
            lambda: from_arrays(X[:0], Y[:0], batch_size=1),
            r"^the first array holds no examples: its shape is \(0, 2\)$",
        ),
        (
            lambda: from_arrays({"x": X, "y": Y[:9]}, batch_size=1),
            r"^the array 'y' has 9 examples, but the array 'x' has 12: all arrays must be of one",
        ),
        (
            lambda: from_arrays(X, (Y, Y[:9]), batch_size=1),
            r"^the array \[1\]\[1\] has 9 examples, but the first array has 12:",
        ),
        (lambda: from_arrays(X, batch_size=0), r"^batch_size must be at least 1, not 0$"),
        (
            lambda: from_arrays(X, batch_size=13, drop_last=True),
            r"^12 examples make no full batch of 13, and drop_last drops shorter batches: use",
        ),
        (lambda: from_arrays(X, batch_size=1, seed=-1), r"^seed must be at least 0, not -1$"),
        (
            lambda: from_arrays(X, batch_size=1, seed=1.5),
            r"^seed must be a whole number, not 1\.5$",
        ),
        (
            lambda: from_arrays(X, np.array(["a"] * 12, object), batch_size=1),
            r"^the second array is a ndarray of dtype object: batches are arrays of numbers",
        ),
        (
            lambda: from_arrays(np.array(["a"]), batch_size=1),
            r"^the batch is a ndarray of dtype <U",
        ),
        (
            lambda: from_arrays([1, 2], batch_size=1),
            r"^the first array is a number, not an ar",
        ),
        (lambda: from_function(lambda rng: 0, 0), r"^length must be at least 1, not 0$"),
        (lambda: from_function(lambda rng: 0, 2.0), r"^length must be .*2\.0: write length=2$"),
        (lambda: from_function(lambda rng: 0, 1, seed=-1), r"^seed must be at least 0, not -1$"),
        (lambda: from_function(lambda rng: 0, 1, seed="1"), r"^seed must be .*'1': write seed=1$"),
        (lambda: closed_loop(lambda loop: 0, 0), r"^length must be at least 1, not 0$"),
        (lambda: closed_loop(lambda loop: 0, 1.5), r"^length must be a whole number, not 1\.5$"),
        (
            lambda: closed_loop(lambda loop: 0).read(0).take(1),
            r"^a closed-loop source calls its function with the running loop, but no loop is run",
        ),
        (lambda: as_source([]).read(0).take(1), r"^the source gave no batch in epoch 1: is it emp"),
        (lambda: as_source([None]).read(0).take(1), r"^the source gave None where a batch was exp"),
    ],
)
def test_messages(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_function_generators_depend_on_seed_epoch_and_index_alone():
    source = from_function(lambda rng: rng.random(3), 4)
    seen = [all_batches(source, epoch, seed=seed) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(batch) for batches in seen for batch in batches}) == 16
    assert all_batches(source, 1, seed=1) == seen[-1]
    own = from_function(lambda rng: rng.random(3), 4, seed=1)
    assert all_batches(own, 1, seed=0) == seen[-1]


def test_function_never_changes():
    source = from_function(lambda rng: rng.bit_generator.random_raw(2), 2, seed=1)
    assert source.read(3).take(2).batches.tolist() == [
        [11473269591732156432, 9464950590866214932],
        [17766880989420897144, 1344313678706538938],
    ]


class View:
    """Stands for the running loop."""


def test_closed_is_asked_when_needed_and_never_ahead():
    loop, calls = View(), []

    def act(view):
        assert view is loop
        calls.append(len(calls))
        return np.array(calls[-1:])

    source = closed_loop(act)
    assert source.endless and source.length is None
    assert "checkpoint" in source.inexact
    reader = source.read(0, 3, loop=loop)
    assert calls == []
    for step in range(4):
        window = reader.take(100)
        assert window.count == 1 and window.batches.tolist() == [[step]]
        assert len(calls) == step + 1
    reader.put_back(window)
    assert reader.take(100).batches.tolist() == [[3]]
    assert len(calls) == 4


def test_closed_with_a_length_makes_epochs():
    source = closed_loop(lambda loop: np.zeros(2), length=3)
    assert (source.length, source.endless) == (3, False)
    assert len(all_batches(source, 1, loop=View())) == 3
    assert len(all_batches(source, 1, 2, loop=View())) == 1


def test_windows_end_where_the_form_changes():
    forms = [np.zeros(2), np.ones(2), np.ones(3), np.ones(3, np.int32), (np.ones(3),), (None,)]
    reader, counts = as_source(forms).read(0), []
    while (window := reader.take(10)) is not None:
        counts.append(window.count)
    assert counts == [2, 1, 1, 1, 1]


def test_leaves_of_every_kind():
    import jax.numpy as jnp
    import ml_dtypes
    import tensorflow as tf
    import torch

    batch = {
        "bool": True,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "grad": torch.ones(2, requires_grad=True),
        "jax": jnp.ones(2),
        "tuple": (1, 2.5),
        "none": None,
        "numpy": np.float32(3),
        "tf": tf.ones(2),
    }
    window = as_source([batch, batch]).read(0).take(2)
    found = window.batches
    assert window.count == 2 and window.examples == 1  # the first leaf is a scalar
    assert found["none"] is None
    assert found["half"].dtype == ml_dtypes.bfloat16 and (found["half"] == 1).all()
    assert [leaf.tolist() for leaf in found["tuple"]] == [[1, 1], [2.5, 2.5]]
    for name in ("grad", "jax", "tf", "numpy"):
        assert found[name].dtype == np.float32
    assert found["bool"].dtype == np.bool_


def test_arrays_that_are_refilled_are_copied_in_time():
    def refilling():
        buffer = np.zeros(2)
        for i in range(4):
            buffer[:] = i
            yield buffer

    window = as_source(refilling).read(0).take(4)
    assert window.batches[:, 0].tolist() == [0, 1, 2, 3]


def test_exceptions_of_the_source_keep_their_traceback_and_say_where():
    def breaking(start):
        for i in range(start, 9):
            if i == 6:
                raise RuntimeError("disk gone")
            yield np.zeros(2)

    class Breaking(Drawing):
        def __getitem__(self, index):
            return next(breaking(index + 4))

    for data, good in ((lambda: breaking(0), 6), (Breaking(), 2)):
        reader = as_source(data).read(1)
        assert reader.take(9).count == good  # what came before it can be trained on
        for _ in range(2):
            with pytest.raises(RuntimeError, match="disk gone") as caught:
                reader.take(9)
            note = f"while the source was giving batch {good + 1} of epoch 2"
            assert caught.value.__notes__ == [note]
            assert caught.traceback[-1].name == "breaking"


def test_stopping_inside_a_batch_does_not_end_the_epoch():
    source = from_function(lambda rng: next(iter(())), 3)
    with pytest.raises(RuntimeError, match="StopIteration"):
        source.read(0).take(1)


def test_bad_leaves_name_batch_and_path():
    reader = as_source([{"text": np.zeros(1)}, {"text": "a"}]).read(0)
    assert reader.take(2).count == 1
    with pytest.raises(DataError, match=r"^the array 'text' is a str of dtype <U1:") as caught:
        reader.take(2)
    assert caught.value.__notes__ == ["while the source was giving batch 2 of epoch 1"]


def test_global_random_states_are_left_alone_and_keyed():
    import torch

    def drawing():
        for _ in range(4):
            yield np.array([random.random(), np.random.rand(), torch.rand(()).item()])

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    expected = all_batches(as_source(drawing), 1)
    assert states() == before
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert all_batches(as_source(drawing), 1, most=4) == expected
    assert all_batches(as_source(drawing), 1, start=2) == expected[2:]
    assert all_batches(as_source(drawing), 2) != expected
    assert all_batches(as_source(drawing), 1, seed=1) != expected


def test_closing_a_reader_closes_the_generator():
    closed_at = []

    def stream():
        try:
            for i in range(9):
                yield np.array(i)
        finally:
            closed_at.append(i)

    reader = as_source(stream).read(0)
    reader.close()  # nothing was opened yet
    reader.take(2)
    reader.close()
    assert closed_at == [1]
    gc.collect()


def test_importing_data_imports_no_framework():
    code = (
        "import sys, treadle.data; "
        "print([m for m in ('keras', 'tensorflow', 'jax', 'torch', 'grain') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module", ["arrays", "combine", "foreign.sources", "epochs", "functions", "order"]
)
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(importlib.import_module(f"treadle.data.{module}"))
    assert tried and not failed


class Squares:
    """A source as a user writes one."""

    length, endless, batch_examples, inexact = 3, False, 1, None

    def read(self, epoch, start=0, *, seed=0, loop=None, ordered=False, position=None):
        self.asked = epoch, start, seed, loop, ordered, position
        return as_source([np.array([i * i]) for i in range(3)]).read(epoch, start)


class ClosedSquares(Squares):
    closed_loop = True


class OldSquares(Squares):
    closed = True


def test_a_source_of_a_user_gets_the_fields_of_the_request_as_arguments():
    source, loop = ClosedSquares(), View()
    assert isinstance(source, Source) and as_source(source) is source
    request = ReadRequest(1, 2, 3, loop, ordered=True, position={"at": 4})
    assert read_from(source, request).take(5).batches.tolist() == [[4]]
    assert source.asked == (1, 2, 3, loop, True, {"at": 4})
    assert read_from(limited(source, 2), ReadRequest(0)).take(5).batches.tolist() == [[0], [1]]
    assert source.asked == (0, 0, 0, None, False, None)
    assert groups(source, 1).closed_loop and zipped(source, source).closed_loop


def test_old_names_still_work_with_a_warning():
    with pytest.warns(
        DeprecationWarning, match=r"^treadle\.data\.closed was renamed to treadle\.d"
    ):
        assert treadle.data.closed is closed_loop
    source = from_arrays(Y, batch_size=5)
    with pytest.warns(DeprecationWarning, match=r"^ArraySource\.closed was renamed to closed_loop"):
        assert source.closed is False
    message = (
        r"^the attribute closed of (tests\.)?test_data\.OldSquares was renamed to closed_loop: use"
    )
    old = OldSquares()
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert as_source(old) is old
    assert caught[0].filename == __file__  # Python shows it, since Treadle's own code is skipped
    with pytest.warns(DeprecationWarning, match=message):
        assert limited(old, 2).closed_loop
    assert is_closed_loop(old)


def test_a_source_with_the_old_name_is_never_prefetched():
    feed, source = Feed(), OldSquares()
    feed.open(source, Progress(), View())
    feed.take(1, Progress())
    feed.read_ahead(1, lambda window: window, lambda: True)
    assert feed.position() is None and feed._prefetched is None
