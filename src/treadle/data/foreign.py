"""Everything that is accepted as a source as it stands: other libraries' data sets, and iterables.

Libraries are looked for among the modules that are loaded already: an object of theirs cannot
exist otherwise, and no user pays for importing what they do not use.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final
from weakref import WeakValueDictionary

from ..errors import DataError
from ..hook import LoopView
from .reader import BatchReader, BatchSource, Reading
from .source import Position, Source

ACCEPTED: Final = (
    "treadle.data.from_arrays(…) and its like, tf.data.Dataset, PyTorch DataLoader, "
    "keras.utils.PyDataset, Grain's MapDataset, IterDataset and DataLoader, a list of batches, a "
    "generator function, and any iterable of batches"
)

_streams: Final[WeakValueDictionary[int, Source]] = WeakValueDictionary()
"""Sources in use by the id of what they read (which they hold, so that no id comes twice): a stream
that is passed again while it is being read goes on, as nothing else can make it do."""


def as_source(data: Any) -> Source:
    """Return anything that gives batches as a source.

    Args:
        data: A source; a `tf.data.Dataset`, PyTorch `DataLoader`, `keras.utils.PyDataset` or Grain
            data set that gives batches; a sequence of batches; a function that returns an iterator
            of batches, called anew for each epoch; an iterable, iterated anew for each epoch; an
            iterator, which can be read once.

    Raises:
        DataError: Arrays, which have no batches yet, and what cannot be read as batches.

    Example:
        >>> import numpy as np
        >>> as_source([np.zeros(2), np.ones(2)]).length
        2
    """
    if isinstance(data, Source):
        return data
    known = _streams.get(id(data))
    if known is not None:
        return known
    refuse_arrays(data)
    for make in (_from_keras, _from_tensorflow, _from_torch, _from_grain, _from_python):
        source = make(data)
        if source is not None:
            if source.inexact is not None:
                _streams[id(data)] = source
            return source
    raise DataError(f"cannot read batches from a {_type_name(data)}. Accepted are: {ACCEPTED}")


def refuse_arrays(data: Any) -> None:
    """Refuse arrays, and tuples and dicts of them, which nobody has cut into batches.

    Raises:
        DataError: Says how to make batches of them.
    """
    parts = data.values() if isinstance(data, Mapping) else data
    if _is_array(data) or (isinstance(data, tuple | Mapping) and any(map(_is_array, parts))):
        raise DataError(
            f"a {_type_name(data)} {'' if _is_array(data) else 'of arrays '}is not cut into "
            f"batches: use treadle.data.from_arrays(x, y, batch_size=…)"
        )


def _is_array(data: Any) -> bool:
    return hasattr(data, "__array__") or (hasattr(data, "shape") and hasattr(data, "dtype"))


def _type_name(data: Any) -> str:
    kind: type = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _forward_only(what: str) -> str:
    return (
        f"{what} cannot seek: a resumed run draws and discards the batches before its position, "
        f"which is exact only if they come in the same order again"
    )


def _from_keras(data: Any) -> Source | None:
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(data, keras.utils.PyDataset):
        return None
    dataset: Any = data
    length: int | None = dataset.num_batches

    def batches(reading: Reading) -> Iterator[Any]:
        dataset.on_epoch_begin()
        index = reading.first
        while length is None or index < length:
            yield dataset[index]
            index += 1
        dataset.on_epoch_end()

    base, kind = keras.utils.PyDataset, type(dataset)
    hooks = [n for n in ("on_epoch_begin", "on_epoch_end") if getattr(kind, n) != getattr(base, n)]
    told = " and ".join(hooks)
    return BatchSource(
        batches,
        length,
        endless=length is None,
        inexact=f"{told} of {kind.__name__} may change its data or their order, and no checkpoint "
        f"holds that"
        if hooks
        else None,
    )


def _from_tensorflow(data: Any) -> Source | None:
    if "tensorflow" not in sys.modules:
        return None
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        return None
    dataset: Any = data
    specs: list[Any] = tf.nest.flatten(dataset.element_spec)
    for spec in specs:
        if isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
            kind = "ragged" if isinstance(spec, tf.RaggedTensorSpec) else "sparse"
            raise DataError(
                f"this tf.data.Dataset gives {kind} tensors ({spec}), which only TensorFlow knows: "
                f"map them to dense ones first (padded_batch, .to_tensor(), tf.sparse.to_dense)"
            )
    cardinality = int(dataset.cardinality())
    shape = getattr(specs[0], "shape", None) if specs else None
    return BatchSource(
        lambda reading: dataset.as_numpy_iterator(),
        cardinality if cardinality >= 0 else None,
        endless=cardinality == tf.data.INFINITE_CARDINALITY,
        batch_examples=shape[0] if shape is not None and shape.rank else None,
        inexact=_forward_only("a tf.data.Dataset"),
        seeks=False,
    )


def _from_torch(data: Any) -> Source | None:
    if "torch" not in sys.modules:
        return None
    from torch.utils.data import DataLoader, Dataset

    if isinstance(data, Dataset):
        raise DataError(
            f"a {_type_name(data)} gives single examples: wrap it in "
            f"torch.utils.data.DataLoader(dataset, batch_size=…), with batch_size=None where its "
            f"items are batches already"
        )
    if not isinstance(data, DataLoader):
        return None
    loader: Any = data
    return BatchSource(
        lambda reading: iter(loader),
        _length(loader),
        batch_examples=loader.batch_size,
        inexact=_forward_only("a PyTorch DataLoader"),
        seeks=False,
    )


def _from_grain(data: Any) -> Source | None:
    if "grain" not in sys.modules:
        return None
    import grain

    if isinstance(data, grain.MapDataset):
        dataset: Any = data
        length = len(dataset)
        if length == sys.maxsize:  # repeated without end
            return BatchSource(lambda at: _indexed(dataset, at.first, None), None, endless=True)
        return BatchSource(  # beyond its length a MapDataset goes on with other epochs' orders
            lambda at: _indexed(dataset, at.epoch * length + at.first, (at.epoch + 1) * length),
            length,
        )
    if isinstance(data, grain.IterDataset | grain.DataLoader):
        stream: Any = data
        return BatchSource(
            lambda reading: iter(stream),
            None,
            inexact=_forward_only(f"a Grain {_type_name(stream).rpartition('.')[2]}"),
            seeks=False,
        )
    return None


def _from_python(data: Any) -> Source | None:
    if isinstance(data, str | bytes | bytearray | Mapping | type):
        return None
    if hasattr(data, "__next__"):
        return IteratorSource(data)
    if isinstance(data, Sequence) or (
        hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "__iter__")
    ):
        batches: Any = data
        return BatchSource(lambda at: _indexed(batches, at.first, len(batches)), len(batches))
    if hasattr(data, "__iter__"):
        iterable: Any = data
        return BatchSource(
            lambda reading: iter(iterable),
            _length(iterable),
            inexact=_forward_only(f"a {_type_name(iterable)}"),
            seeks=False,
        )
    if callable(data):
        return BatchSource(
            lambda reading: _called(data),
            None,
            inexact=_forward_only(f"the function {getattr(data, '__name__', _type_name(data))}"),
            seeks=False,
        )
    return None


def _indexed(batches: Any, start: int, stop: int | None) -> Iterator[Any]:
    index = start
    while stop is None or index < stop:
        yield batches[index]
        index += 1


def _length(iterable: Any) -> int | None:
    """Return the number of batches, or None where an iterable does not know it."""
    try:
        return len(iterable)
    except TypeError:  # also what a DataLoader over an iterable data set raises
        return None


def _called(function: Callable[[], Any]) -> Iterator[Any]:
    """Call a function that returns an iterator, or an iterable, of batches."""
    made = function()
    if isinstance(made, tuple | Mapping) or _is_array(made) or not hasattr(made, "__iter__"):
        name = getattr(function, "__name__", _type_name(function))
        raise DataError(
            f"{name}() returned a {_type_name(made)}, not an iterator of batches: make it a "
            f"generator function (yield each batch), or use treadle.data.from_function for a "
            f"function that makes one batch"
        )
    return iter(made)


class IteratorSource:
    """An iterator: it gives its batches once, so there is one reader, which goes on.

    Args:
        iterator: Gives batches.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.length: int | None = None
        self.endless = False
        self.batch_examples: int | None = None
        self.inexact: str | None = _forward_only(f"a {_type_name(iterator)}")
        self.closed = False
        self._iterator = iterator
        self._reader: BatchReader | None = None

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
        position: Position | None = None,
    ) -> BatchReader:
        """Read on from where the iterator stands.

        Raises:
            DataError: Batches that are gone are asked for again.
        """
        reader = self._reader
        gone = 0 if reader is None else reader.given
        if epoch > 0 or (reader is not None and gone != start):
            raise DataError(
                f"a {_type_name(self._iterator)} gives its batches once: {gone} of them are spent, "
                f"and batch {start + 1} of epoch {epoch + 1} cannot be had from it. Pass the "
                f"function that makes it (train, not train()), or cut one long stream into epochs "
                f"with treadle.data.limited(stream, batches)"
            )
        if reader is None:
            iterator = chain(self._iterator)  # has no `close`: reading may go on later
            reading = Reading.of(epoch, start, seed, loop, position)
            reader = self._reader = BatchReader(lambda: iterator, reading)
        return reader
