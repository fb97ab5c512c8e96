"""Every kind of source goes on from every batch as if it had never been interrupted."""

import numpy as np
import pytest
import tensorflow as tf
import torch
from executions import some
from torch.utils.data import DataLoader

from tests import position_kinds as kinds
from treadle.checkpoint.structure import from_snapshot, snapshot
from treadle.core.progress import Progress
from treadle.data import as_source, closed_loop, from_arrays, from_function, groups, limited, zipped
from treadle.data import reader as batch_reader
from treadle.data.states import generators_of
from treadle.errors import DataError
from treadle.run.prefetch import Feed


def straight(make, **how):
    """Read a source to its end; return its batches, and where it stood at each boundary."""
    places = []

    def visit(epoch, batch, feed, count):
        places.append((epoch, batch, kinds.plain(feed.position()), count))

    return kinds.read(as_source(make()), visit=visit, **how), places


LONG = ("tf.data shuffled twice", "tf.data with random numbers")  # they build a pipeline for each
OFTEN = [name for name in kinds.KINDS if name not in LONG][::4]


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        *(pytest.param(n, True, marks=() if n in OFTEN else pytest.mark.long) for n in kinds.KINDS),
        *(pytest.param(n, False, marks=pytest.mark.long) for n in list(kinds.KINDS)[::3]),
    ],
)
def test_all_that_follows_is_the_same(name, ahead):
    check(kinds.KINDS[name], ahead)


def check(make, ahead):
    expected, places = straight(make, ahead=ahead)
    assert len(places) > kinds.EPOCHS
    for epoch, batch, position, count in places:
        found = kinds.read(as_source(make()), epoch, batch, position, most=3)
        assert found == expected[count:], (epoch, batch, position)


@pytest.mark.parametrize("name", some(kinds.KINDS, 6))
def test_a_position_is_one_of_any_boundary(name):
    make = kinds.KINDS[name]
    expected, places = straight(make, most=1)
    epoch, batch, position, count = places[-2]
    assert kinds.read(as_source(make()), epoch, batch, position) == expected[count:]
    # Resumed and interrupted again.
    again = []

    def visit(epoch, batch, feed, count):
        again.append((epoch, batch, kinds.plain(feed.position()), count))

    epoch, batch, position, before = places[1]
    kinds.read(as_source(make()), epoch, batch, position, visit=visit)
    for epoch, batch, position, count in again[:3]:
        found = kinds.read(as_source(make()), epoch, batch, position)
        assert found == expected[before + count :]


@pytest.mark.filterwarnings("ignore:.set_vital:UserWarning")
@pytest.mark.parametrize("name", kinds.TORCHDATA)
def test_loaders_of_torchdata(name):
    pytest.importorskip("torchdata")
    check(kinds.TORCHDATA[name], ahead=True)


def test_validation_in_between_reads_a_part_of_the_same_shuffle():
    def run(epoch, position=None):
        data = kinds.tensorflow_shuffled()
        feed, part = Feed(), as_source(data.take(2))
        found = []
        for number in range(epoch, 4):
            feed.open(as_source(data), Progress(epoch=number), kinds.LOOP, position)
            position = None
            while (window := feed.take(9, Progress())) is not None:
                found.append(kinds.told(window))
            reader = part.read(0)
            while reader.take(1) is not None:
                pass
            places.append((kinds.plain(feed.position()), len(found)))
        return found

    places = []
    expected = run(0)
    position, count = places[1]
    assert position["after"]["iterators"] == [4]  # two of them for the validation
    assert run(2, position) == expected[count:]


def unseeded():
    return without_seed(lambda: tf.data.Dataset.range(3).shuffle(3))


def unseeded_numbers():
    return without_seed(lambda: tf.data.Dataset.range(3).map(lambda y: tf.random.uniform([])))


def without_seed(make):
    """Make a data set as a script does that sets no seed."""
    from tensorflow.python.eager import context

    before = context.context()._seed
    context.context()._seed = None
    try:
        return make()
    finally:
        context.context()._seed = before


def unseeded_in_a_function():
    def created(row):
        return tf.data.Dataset.range(row).shuffle(3)

    return without_seed(lambda: tf.data.Dataset.range(3).interleave(created))


class Opaque(tf.data.Dataset):
    """A data set of another library, which shows no inputs."""

    def __init__(self, data):
        self._spec = data.element_spec
        super().__init__(data._variant_tensor)

    element_spec = property(lambda self: self._spec)

    def _inputs(self):
        return []


class OfDataService(Opaque):
    """Stands for a data set of the tf.data service, which needs its servers."""


class Generated(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 1


class OwnSampler(torch.utils.data.Sampler):
    def __iter__(self):
        yield 1


class Loader(torch.utils.data.DataLoader):
    """Keeps a state, which no checkpoint can hold."""

    def state_dict(self):
        return {"at": [Loader]}

    def load_state_dict(self, state):
        raise AssertionError


BASE = kinds.tensorflow_base()
INNER = BASE.shuffle(3)
PRESENT = tf.experimental.Optional.from_value(tf.constant(1, tf.int64))
GENERATOR = tf.random.Generator.from_seed(1)
INEXACT = {
    "a shuffle of a tf.data.Dataset has no seed: give it one": unseeded,
    "the shuffle before a repeat of a tf.data.Dataset draws more": lambda: INNER.repeat(2),
    "the cache after a shuffle of a tf.data.Dataset keeps": lambda: INNER.cache(),
    "a shuffle in the second part of a concatenation": lambda: BASE.concatenate(INNER),
    "a tf.data.Dataset with deterministic=False gives": lambda: BASE.map(
        abs, num_parallel_calls=2, deterministic=False
    ),
    "tf.random is drawn from without a seed in a function": unseeded_numbers,
    "tf.random is drawn from in a function of a tf.data.Dataset that runs in": lambda: BASE.map(
        lambda y: tf.random.uniform([]), num_parallel_calls=2
    ),
    "a Python function in a tf.data.Dataset cannot seek": lambda: BASE.map(
        lambda y: tf.py_function(abs, [y], tf.int64)
    ),
    "a function of a tf.data.Dataset keeps something": lambda: BASE.map(
        lambda y: GENERATOR.normal([])
    ),
    "a function of a tf.data.Dataset uses another": lambda: BASE.flat_map(lambda y: INNER),
    "a function of a tf.data.Dataset uses data of which": lambda: BASE.map(
        lambda y: tf.experimental.Optional.from_value(y).get_value() + PRESENT.get_value()
    ),
    "the Opaque of a tf.data.Dataset uses another data set that shuffles": lambda: Opaque(INNER),
    "the tf.data service of a tf.data.Dataset gives": lambda: OfDataService(BASE),
    "a shuffle of a tf.data.Dataset has no seed": unseeded_in_a_function,
    "on_epoch_begin and on_epoch_end of Shuffling may change": kinds.Shuffling,
    "the Generated of a DataLoader cannot seek": lambda: DataLoader(Generated()),
    "the OwnSampler of a DataLoader cannot seek": lambda: kinds.torch_loader(sampler=OwnSampler()),
    "a DataLoader with in_order=False gives": lambda: kinds.torch_loader(
        num_workers=1, in_order=False
    ),
    "persistent workers of a DataLoader continue": lambda: kinds.torch_loader(
        num_workers=1, persistent_workers=True
    ),
    "the state of a Loader does not hold the random": lambda: kinds.torch_loader(
        Loader, num_workers=1
    ),
    "the batches of a closed-loop source depend on the state": lambda: closed_loop(print),
    "the function drawing cannot seek: a resumed run": lambda: kinds.drawing,
}


@pytest.mark.parametrize("message", INEXACT)
def test_what_is_not_exact_is_said(message):
    assert as_source(INEXACT[message]()).inexact.startswith(message)


# These repeat here, which cannot be known of any function, iterator or hook.
UNSURE = {
    *("padded stream", "padded limited stream", "packed stream", "limited buckets of a stream"),
    "generator function",
    "limited stream",
    "limited stream that ends",
    "limited iterator",
    "limited groups of a stream",
    "groups of a stream",
    "groups of unknown length",
    "pair",
    "pair of states",
    "PyDataset that shuffles",
    "limited PyDataset that shuffles",
    "PyDataset that grows",
    "PyDataset that shrinks",
    "groups of a PyDataset that grows",
    "pair of a PyDataset that grows",
    "limited PyDataset that grows",
    "short stream and endless one",
    "list and longer limited stream",
}


def test_what_is_exact_is_said_to_be():
    told = {name: as_source(make()).inexact for name, make in kinds.KINDS.items()}
    assert {name for name, inexact in told.items() if inexact is not None} == UNSURE


def test_a_shuffle_cannot_go_back_within_a_process():
    data = kinds.tensorflow_shuffled()
    _, places = straight(lambda: data)
    epoch, batch, position, _ = places[1]
    with pytest.warns(UserWarning, match=r"^a shuffle of a tf.data.Dataset cannot go back within"):
        as_source(data).read(epoch, batch, position=position).take(1)


def test_other_seeds_are_refused():
    epoch, batch, position, _ = straight(kinds.tensorflow_shuffled)[1][1]
    tf.random.set_seed(5)
    other = as_source(tf.data.Dataset.range(11).shuffle(11).batch(2))
    with pytest.raises(DataError, match=r"shuffles with other seeds than when the run began: \[\["):
        other.read(epoch, batch, position=position)


def test_other_generators_are_refused():
    generators = [np.random.default_rng(1)]
    position = from_function(lambda rng: generators[0].random(2), 5).read(0)
    position.take(2)
    generators.append(np.random.default_rng(2))
    again = from_function(lambda rng: generators[0].random(2), 5)
    with pytest.raises(DataError, match=r"^the source uses 2 random generators of its own, but us"):
        again.read(0, 2, position=position.position())


def test_generators_that_are_not_those_of_a_source():
    import random

    def shared():
        return random.random() + np.random.rand() + torch.rand(1), late

    assert generators_of(shared, np.random.rand, [random.Random(1)] * 65, len) is None
    late = 1
    assert shared()[1] == late


def test_positions_of_another_place_are_refused():
    source = from_function(kinds.Noise(), 5)
    reader = source.read(0)
    reader.take(3)
    with pytest.raises(DataError, match=r"^the source's position is of batch 3 of epoch 1, but on"):
        source.read(0, 2, position=reader.position())


class Odd(kinds.Noise):
    def state(self):
        return {"seen": [1, {2}]}


def test_states_that_no_checkpoint_can_hold():
    with pytest.raises(DataError, match=r"^the state of Odd holds a set at \['seen'\]\[1\], which"):
        from_function(Odd(), 5).read(0).take(1)
    with pytest.warns(UserWarning, match=r"^the state of Loader holds a type at .* draws and disc"):
        reader = as_source(kinds.torch_loader(Loader)).read(0)
        reader.take(1)
    assert reader.position() is None


def test_states_come_back_as_they_were():
    import random

    state = {
        "python": random.Random(3).getstate(),
        "numpy": np.random.default_rng(1).bit_generator.state,
        "bytes": b"ab",
        "tensor": torch.arange(3),
        1: [None, True, -0.5, np.float32(2), ()],
        "(odd)": {},
    }
    found = from_snapshot(kinds.plain(snapshot(state, "Test")))
    assert found.pop("tensor").tolist() == state.pop("tensor").tolist()
    assert found == state
    # The format of every checkpoint written so far.
    written = {"(dict)": [[1, {"(tuple)": [{"(bytes)": np.frombuffer(b"ab", np.uint8)}]}]]}
    assert from_snapshot(written) == {1: (b"ab",)}
    assert str(snapshot({1: (b"ab",)}, "Test")) == str(written)
    array = np.zeros(2)
    kept = snapshot({"array": array}, "Test")
    from_snapshot(kept)["array"] += 1
    array += 1
    assert kept["array"].tolist() == [0, 0]


def test_feed_without_and_with_a_position():
    feed = Feed()
    assert feed.position() is None
    source = from_function(kinds.Noise(), 5)
    feed.open(source, Progress(), kinds.LOOP)
    assert feed.position() is None
    feed.take(2, Progress())
    feed.read_ahead(lambda: 2, lambda window: window, lambda: True)
    assert feed.position()["batch"] == 2
    feed.close()  # what was read ahead is put back
    assert feed.position()["batch"] == 2
    feed.open(source, Progress(batch=2), kinds.LOOP, feed.position())
    feed.read_ahead(lambda: 2, lambda window: 1 / 0, lambda: True)  # as is what could not be placed
    assert feed.position()["batch"] == 2
    with pytest.raises(ZeroDivisionError):
        feed.take(2, Progress())
    feed.open(from_arrays(kinds.Y, batch_size=2), Progress(), kinds.LOOP)
    assert feed.position() is None


def test_costly_states_are_seldom_asked_for():
    class Costly(kinds.Noise):
        asked = 0

        def state(self):
            self.asked += 1
            return super().state()

    function = Costly()
    feed = Feed()
    feed.open(closed_loop(function, 9), Progress(), kinds.LOOP)
    while feed.take(4, Progress()) is not None:
        pass
    assert function.asked == 1
    feed.position()
    assert function.asked == 2


def test_few_states_are_kept_however_much_is_read_ahead(monkeypatch):
    monkeypatch.setattr(
        batch_reader, "DRAWING_SECONDS", 60.0
    )  # all that is asked for in one window
    expected = kinds.told(from_function(kinds.Noise(), 1000).read(0).take(1000))
    reader = from_function(kinds.Noise(), 1000).read(0)
    for _ in range(225):
        reader.take(4)
    assert len(reader._states) <= 12
    for ahead in (0, 1, 7, 100, 500, 899):
        position = reader.position(ahead)
        start = 900 - ahead
        assert start - position["batch"] <= ahead + 4
        again = from_function(kinds.Noise(), 1000).read(0, start, position=kinds.plain(position))
        assert kinds.told(again.take(3)) == expected[start : start + 3]


def test_fingerprints_tell_other_data():
    x = np.arange(6000, dtype=np.float32).reshape(1000, 6)
    source = from_arrays({"x": x, "none": None}, batch_size=9)
    found = source.fingerprint
    assert len(found) == 16 and found == source.fingerprint
    assert from_arrays({"x": np.asfortranarray(x), "none": None}, batch_size=4).fingerprint == found
    for other in (x + 1, x[:-1], x.astype("float64"), x.reshape(1000, 2, 3)):
        assert from_arrays({"x": other, "none": None}, batch_size=9).fingerprint != found
    assert from_arrays(x, batch_size=9).fingerprint != found
    assert groups(source, 2).fingerprint == limited(source, 2).fingerprint == found
    assert zipped(source, kinds.batches()).fingerprint == f"{found}+-"
    assert zipped(kinds.batches()).fingerprint is groups(kinds.batches(), 2).fingerprint is None


def test_fingerprints_read_little_of_what_is_mapped(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40_000).reshape(10_000, 4))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    whole = from_arrays(np.asarray(mapped), batch_size=9).fingerprint
    assert from_arrays(mapped, batch_size=9).fingerprint == whole
