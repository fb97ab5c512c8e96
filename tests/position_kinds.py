"""Sources of every kind, created as a script creates them: once per process."""

import itertools
import json
import random
from typing import Any

import keras
import numpy as np

from treadle.core.progress import Progress
from treadle.data import (
    as_source,
    bucketed,
    closed_loop,
    from_arrays,
    from_function,
    groups,
    limited,
    packed,
    padded,
    zipped,
)
from treadle.run.prefetch import Feed

EPOCHS = 3
LOOP: Any = object()  # stands for the running loop
X = np.arange(22, dtype=np.float32).reshape(11, 2)
Y = np.arange(11)


def batches():
    return [(X[i : i + 2], Y[i : i + 2]) for i in range(0, 10, 2)]


class Noise:
    """Draws from a generator of its own, which goes on for ever."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __call__(self, _):
        return self.generator.random(2)

    def state(self):
        return self.generator.bit_generator.state

    def restore(self, state):
        self.generator.bit_generator.state = state


class Environment(Noise):
    """What a method gives belongs to its object; the state has all that a state may have."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.python = random.Random(1)

    def act(self, loop):
        self.seen.append(self.python.random())
        return np.array([self.seen[-1], len(self.seen)]) + self(loop)

    def state(self):
        seen = np.array(self.seen)
        return {"seen": seen, "python": self.python.getstate(), 3: b"x", "own": super().state()}

    def restore(self, state):
        assert state[3] == b"x"
        self.seen = state["seen"].tolist()
        self.python.setstate(state["python"])
        super().restore(state["own"])


class Own:
    """A source of a user's, of before there were positions."""

    length, endless, batch_examples, inexact, closed_loop = 4, False, 1, None, False

    def read(self, epoch, start=0, *, seed=0, loop=None, ordered=False):
        return OwnReader(epoch, start)


class OwnReader:
    def __init__(self, epoch, start):
        self.inner = as_source([np.array([epoch, i]) for i in range(4)]).read(epoch, start)

    def take(self, most):
        return self.inner.take(most)

    def put_back(self, window):
        self.inner.put_back(window)

    def close(self):
        self.inner.close()


class Dataset(keras.utils.PyDataset):
    @property
    def num_batches(self):
        return 5

    def __getitem__(self, index):
        return X[index : index + 2] + np.random.rand()


class Shuffling(Dataset):
    """Shuffles when an epoch ends, with the global generator."""

    def __init__(self):
        super().__init__()
        self.order = list(range(5))
        self.offset = 0

    def on_epoch_begin(self):
        self.offset += np.random.randint(1000)

    def on_epoch_end(self):
        np.random.shuffle(self.order)

    def __getitem__(self, index):
        return X[self.order[index]] + self.offset


class Keeping(Shuffling):
    """Shuffles with a generator of its own, and keeps what it needs."""

    def __init__(self):
        super().__init__()
        self.generator = random.Random(5)

    def on_epoch_end(self):
        self.generator.shuffle(self.order)

    def state_dict(self):
        return {"order": self.order, "offset": self.offset, "own": self.generator.getstate()}

    def load_state_dict(self, state):
        self.order, self.offset = state["order"], state["offset"]
        self.generator.setstate(state["own"])


class Growing(Shuffling):
    """Grows when an epoch ends, from three batches."""

    num_batches = property(lambda self: len(self.order))

    def __init__(self, step=1):
        super().__init__()
        self.order, self.step = list(range(3 if step > 0 else 7)), step

    def on_epoch_end(self):
        n = len(self.order)
        self.order = [*self.order, *range(n, n + self.step)][: n + self.step]
        super().on_epoch_end()


def drawing():
    """Draws from all global generators, and ends after five batches."""
    start = random.random()
    for i in range(5):
        yield np.array([start, i, random.random(), np.random.rand(), np.random.randint(9)])


def counted():
    return (np.array([i, np.random.rand()]) for i in itertools.count())


def arrays(**arguments):
    return from_arrays(X, Y, batch_size=2, **arguments)


def grain_stream():
    import grain

    class Plus(grain.transforms.RandomMap):
        def random_map(self, element, rng):
            return element + rng.random()

    data = grain.MapDataset.source(Y).shuffle(seed=1).to_iter_dataset()
    return data.random_map(Plus(), seed=2).batch(2)


def grain_loader():
    import grain

    class Unnamed(list):  # tells its address, where a `__repr__` might stand
        __repr__ = object.__repr__

    return grain.DataLoader(
        data_source=Unnamed(Y),
        sampler=grain.samplers.IndexSampler(11, shuffle=True, seed=3, num_epochs=1),
        operations=[grain.transforms.Batch(2)],
        worker_count=0,
    )


def torch_loader(make=None, **arguments):
    import torch
    from torch.utils.data import DataLoader

    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return 11

        def __getitem__(self, index):
            drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
            return torch.tensor([index, *drawn], dtype=torch.float64)

    return (make or DataLoader)(Augmented(), batch_size=2, **arguments)


def torch_generator():
    import torch

    return torch.Generator().manual_seed(7)


def torch_sampler():
    import torch
    from torch.utils.data import WeightedRandomSampler

    return WeightedRandomSampler(torch.ones(11), 11, generator=torch_generator())


def torch_stateful():
    """A loader with a state of its own, as torchdata's is."""
    from torch.utils.data import DataLoader

    class Stateful(DataLoader):
        first = at = 0

        def __iter__(self):
            at, self.first = self.first, 0
            for index in range(at, 5):
                self.at = index + 1
                yield X[index : index + 2] + np.random.rand()
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.first = state["at"]

    return torch_loader(Stateful)


def torchdata_loader(**arguments):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return torch_loader(StatefulDataLoader, **arguments)


def tensorflow_base():
    import tensorflow as tf

    tf.random.set_seed(1)
    return tf.data.Dataset.from_tensor_slices(Y)


def tensorflow_shuffled():
    return tensorflow_base().shuffle(11).batch(2).prefetch(1)


def tensorflow_shuffled_twice():
    return tensorflow_base().shuffle(4, seed=3).map(lambda y: y + 1).shuffle(6).batch(2)


def tensorflow_random():
    import tensorflow as tf

    data = tensorflow_base().map(lambda y: tf.cast(y, tf.float32) + tf.random.uniform([]))
    return data.cache().shuffle(5).batch(2)


def tensorflow_kept_order():
    return tensorflow_base().shuffle(11, reshuffle_each_iteration=False).batch(2)


def tensorflow_endless():
    return limited(tensorflow_base().shuffle(11).repeat().batch(2), 4)


def texts():
    """Examples of lengths 1 to 4."""
    return [(np.arange(i, i + i % 4 + 1), float(i)) for i in range(11)]


def tokens():
    return [tokens for tokens, _ in texts()]


class Words(Noise):
    """Examples with noise from a generator of its own."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return {"words": np.arange(index % 4 + 1), "noise": self.generator.random(2)}

    state, restore = None, None


def tensorflow_examples():
    import tensorflow as tf

    tf.random.set_seed(1)
    numbers = tf.data.Dataset.range(11).shuffle(5)
    return numbers.map(lambda i: tf.range(i, i + i % 4 + 1))


KINDS = {
    "arrays": arrays,
    "arrays in order": lambda: arrays(shuffle=False),
    "function": lambda: from_function(lambda rng: rng.random(2), 5),
    "function with a state": lambda: from_function(Noise(), 5),
    "closed with a state": lambda: closed_loop(Environment().act, 5),
    "list": batches,
    "generator function": lambda: drawing,
    "own source": Own,
    "limited list": lambda: limited(batches(), 3),
    "limited function with a state": lambda: limited(from_function(Noise(), 5), 3),
    "limited endless": lambda: limited(closed_loop(Environment().act), 4),
    "limited stream": lambda: limited(counted, 4),
    "limited stream that ends": lambda: limited(drawing, 3),
    "limited iterator": lambda: limited(counted(), 4),
    "groups": lambda: groups(arrays(), 2),
    "groups of a stream": lambda: groups(limited(drawing, 3), 2),
    "groups of what is closed": lambda: groups(closed_loop(Environment().act, 5), 2),
    "groups of unknown length": lambda: groups(drawing, 2),
    "groups of unequal ones": lambda: groups([np.zeros(i % 3 + 1) for i in range(9)], 2),
    "pair": lambda: zipped(arrays(), limited(drawing, 3)),
    "pair with what is closed": lambda: zipped(a=closed_loop(Environment().act), b=arrays()),
    "pair of states": lambda: zipped(from_function(Noise(), 4), limited(counted, 4)),
    "limited groups of a stream": lambda: limited(groups(counted, 2), 3),
    "PyDataset": Dataset,
    "PyDataset that shuffles": Shuffling,
    "limited PyDataset that shuffles": lambda: limited(Shuffling(), 3),
    "PyDataset with a state": Keeping,
    "PyDataset that grows": Growing,
    "PyDataset that shrinks": lambda: Growing(-2),
    "groups of a PyDataset that grows": lambda: groups(Growing(), 2),
    "pair of a PyDataset that grows": lambda: zipped(Growing(), closed_loop(Environment().act)),
    "limited PyDataset that grows": lambda: limited(Growing(), 4),
    "short list and endless stream": lambda: zipped(batches()[:4], closed_loop(Noise())),
    "short stream and endless one": lambda: zipped(drawing, closed_loop(Noise())),
    "list and longer limited stream": lambda: zipped(batches()[:3], limited(counted, 5)),
    "groups and an endless stream": lambda: zipped(groups(batches(), 2), closed_loop(Noise())),
    "list and endless groups": lambda: zipped(batches()[:3], groups(closed_loop(Noise()), 2)),
    "groups of a longer limited stream": lambda: groups(limited(closed_loop(Noise()), 5), 2),
    "Grain stream": grain_stream,
    "Grain loader": grain_loader,
    "limited Grain stream": lambda: limited(grain_stream(), 4),
    "groups of a Grain stream": lambda: groups(grain_stream(), 2),
    "DataLoader": torch_loader,
    "DataLoader that shuffles": lambda: torch_loader(shuffle=True),
    "DataLoader with a generator": lambda: torch_loader(shuffle=True, generator=torch_generator()),
    "limited DataLoader with a generator": lambda: limited(
        torch_loader(shuffle=True, generator=torch_generator()), 3
    ),
    "DataLoader with a sampler": lambda: torch_loader(sampler=torch_sampler()),
    "DataLoader with a state": torch_stateful,
    "tf.data": lambda: tensorflow_base().batch(2),
    "tf.data shuffled": tensorflow_shuffled,
    "tf.data shuffled twice": tensorflow_shuffled_twice,
    "tf.data with random numbers": tensorflow_random,
    "tf.data shuffled once": tensorflow_kept_order,
    "tf.data without end": tensorflow_endless,
    "padded": lambda: padded(texts(), 2, to=(2, 4), mask=True),
    "buckets": lambda: bucketed(texts(), (2, 4), 2, in_a_row=2),
    "buckets with a generator": lambda: bucketed(Words(), (2, 4), tokens=4, fixed=["noise"]),
    "packed": lambda: packed(tokens(), 6, 2),
    "padded stream": lambda: padded(drawing, 2),
    "padded limited stream": lambda: padded(limited(counted, 5), 2, multiple_of=4),
    "buckets of tf.data": lambda: bucketed(tensorflow_examples(), (2, 4), (3, 2)),
    "packed stream": lambda: packed(lambda: iter(tokens()), 6, 2),
    "limited buckets of a stream": lambda: limited(bucketed(lambda: iter(texts()), (2, 4), 2), 4),
}
TORCHDATA = {
    "StatefulDataLoader": lambda: torchdata_loader(),
    "StatefulDataLoader that shuffles": lambda: torchdata_loader(shuffle=True),
    "StatefulDataLoader with a generator": lambda: torchdata_loader(
        shuffle=True, generator=torch_generator()
    ),
}


def told(window):
    """Return the batches of a window as what `==` compares."""
    from keras import tree

    return [
        [(path, leaf[i].dtype.str, leaf[i].shape, leaf[i].tobytes()) for path, leaf in leaves]
        for leaves in [tree.flatten_with_path(window.batches)]
        for i in range(window.count)
    ]


def plain(position):
    """Return a position as a checkpoint holds it; anything else than it can hold is an error."""
    found = []

    def reference(value):
        assert isinstance(value, np.ndarray) and not value.dtype.hasobject, value
        found.append(value.copy())
        return {"array": len(found) - 1}

    def back(value):
        return found[value["array"]] if list(value) == ["array"] else value

    return json.loads(json.dumps(position, default=reference), object_hook=back)


def read(source, epoch=0, batch=0, position=None, *, ahead=False, most=2, visit=None):
    """Read the rest of all epochs as a loop does, and return each batch.

    Args:
        source: What is read.
        epoch: The first epoch.
        batch: The first batch in it.
        position: The source's position there.
        ahead: Read each window before its turn.
        most: The most batches in a window.
        visit: Called at every boundary with the epoch, the batch and the feed.
    """
    feed, found = Feed(), []
    for number in range(epoch, EPOCHS):
        feed.open(source, Progress(epoch=number, batch=batch), LOOP, position)
        while (window := feed.take(most, Progress())) is not None:
            if ahead:
                feed.read_ahead(lambda: most, lambda window: window, lambda: True)
            batch += window.count
            found += told(window)
            if visit is not None:
                visit(number, batch, feed, len(found))
        batch, position = 0, None
        if visit is not None and number + 1 < EPOCHS:
            visit(number + 1, 0, feed, len(found))
    return found
