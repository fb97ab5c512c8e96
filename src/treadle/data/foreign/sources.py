"""Converting data sets of other libraries and iterables to sources.

A library is only considered if it is already imported: otherwise none of its objects can exist, and
importing it would cost time.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final
from weakref import WeakValueDictionary

from ...errors import DataError
from ..iterables import forward_only, length_of, type_name
from ..reader import BatchReader, BatchSource, lasting
from ..source import BaseSource, ReadRequest, Source
from ..states import Resumable, generators_of
from .keras import from_keras

ACCEPTED: Final = (
    "treadle.data.from_arrays(…) and its like, tf.data.Dataset, PyTorch DataLoader, "
    "keras.utils.PyDataset, Grain's MapDataset, IterDataset and DataLoader, a list of batches, a "
    "generator function, and any iterable of batches"
)

_sources: Final[WeakValueDictionary[int, Source]] = WeakValueDictionary()
"""Sources in use by the id of their data, which they keep alive so that ids stay unique. If data is
passed again while the loop is in the middle of it, the same source continues reading it."""


def as_source(data: Any) -> Source:
    """Convert an object that provides batches to a source.

    Args:
        data: A source; a `tf.data.Dataset`, PyTorch `DataLoader`, `keras.utils.PyDataset` or Grain
            data set of batches; a sequence of batches; a function that returns an iterator of
            batches, called for each epoch; an iterable, iterated for each epoch; or an iterator,
            which can be read only once.

    Raises:
        DataError: If `data` is arrays that are not divided into batches, or is not supported.

    Example:
        >>> import numpy as np
        >>> as_source([np.zeros(2), np.ones(2)]).length
        2
    """
    if isinstance(data, Source):
        return data
    known = _sources.get(id(data))
    if known is not None and (known.inexact is not None or not getattr(known, "seeks", False)):
        return known  # a stream, which is opened once
    refuse_arrays(data)
    for make in (from_keras, _from_tensorflow, _from_torch, _from_grain, _from_python):
        source = make(data)
        if source is not None:
            same_length = known is not None and known.length == source.length
            if known is not None and (same_length or getattr(known, "length_varies", False)):
                return known
            _sources[id(data)] = source
            return source
    raise DataError(f"cannot read batches from a {type_name(data)}. Accepted are: {ACCEPTED}")


def is_indexed(examples: Any) -> bool:
    """Return whether an object gives single examples by their numbers; otherwise it is a stream.

    Raises:
        DataError: If it is a PyTorch data set without a length, or without an index.
    """
    torch: Any = sys.modules.get("torch.utils.data")
    if torch is not None and isinstance(examples, torch.Dataset):
        if isinstance(examples, torch.IterableDataset) or not hasattr(examples, "__len__"):
            raise DataError(
                f"{type_name(examples)} has no length or no index: give "
                "torch.utils.data.DataLoader(dataset, batch_size=None), or a generator function"
            )
        return True
    has_numbers = hasattr(examples, "__getitem__") and hasattr(examples, "__len__")
    return has_numbers and not isinstance(examples, Source | Mapping)


def refuse_arrays(data: Any) -> None:
    """Reject arrays, and tuples and dicts of arrays, which are not divided into batches.

    Raises:
        DataError: If `data` is arrays; the message explains how to make batches.
    """
    parts = data.values() if isinstance(data, Mapping) else data
    if _is_array(data) or (isinstance(data, tuple | Mapping) and any(map(_is_array, parts))):
        kind, predicting = ("", ", without y to predict") if _is_array(data) else ("of arrays ", "")
        raise DataError(
            f"a {type_name(data)} {kind}is not cut into batches: use "
            f"treadle.data.from_arrays(x, y, batch_size=…){predicting}"
        )


def _is_array(data: Any) -> bool:
    return hasattr(data, "__array__") or (hasattr(data, "shape") and hasattr(data, "dtype"))


def _from_tensorflow(data: Any) -> Source | None:
    if "tensorflow" not in sys.modules:
        return None
    from .tensorflow import from_tensorflow

    return from_tensorflow(data)


def _from_torch(data: Any) -> Source | None:
    if "torch" not in sys.modules:
        return None
    from .torch import from_torch

    return from_torch(data)


def _from_grain(data: Any) -> Source | None:
    if "grain" not in sys.modules:
        return None
    import grain

    if isinstance(data, grain.MapDataset):
        dataset: Any = data
        length = len(dataset)
        if length == sys.maxsize:  # repeated endlessly
            return BatchSource(lambda at: _indexed(dataset, at.first, None), None, endless=True)
        return BatchSource(  # indices beyond its length give the orders of later epochs
            lambda at: _indexed(dataset, at.epoch * length + at.first, (at.epoch + 1) * length),
            length,
        )
    if isinstance(data, grain.IterDataset | grain.DataLoader):
        stream: Any = data
        return BatchSource(lambda reading: _opened_grain(stream, reading), None, seeks=False)
    return None


def _opened_grain(stream: Any, reading: ReadRequest) -> Resumable:
    """Return a Grain iterator, which has a state of its own, restored if `reading` has one."""
    iterator, state = iter(stream), reading.state()
    if isinstance(state, bytes):
        # A DataLoader compares the `repr` of its sampler and its data, and rejects a state in which
        # they differ. The default `repr` contains an address, which differs in each process.
        own = json.loads(iterator.get_state())
        current = {name: own[name] for name in ("sampler", "data_source") if name in own}
        state = json.dumps(json.loads(state) | current).encode()
    if state is not None:
        iterator.set_state(state)
    name = f"Grain's {type(stream).__name__}"
    return Resumable(iterator, iterator.get_state, name=name, optional=True)


def _from_python(data: Any) -> Source | None:
    if isinstance(data, str | bytes | bytearray | Mapping | type):
        return None
    if hasattr(data, "__next__"):
        return IteratorSource(data)
    if isinstance(data, Sequence) or (
        hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "__iter__")
    ):
        batches: Any = data
        keeper = generators_of(batches)
        found = lasting(lambda at: _indexed(batches, at.first, len(batches)), keeper)
        is_stored = keeper is None and type(data) in (list, tuple)
        count = partial(len, batches)
        return BatchSource(found, count(), is_stored=is_stored, count=count)
    if hasattr(data, "__iter__"):
        iterable: Any = data
        return BatchSource(
            lambda reading: iter(iterable),
            length_of(iterable),
            inexact=forward_only(f"a {type_name(iterable)}"),
            seeks=False,
        )
    if callable(data):
        return BatchSource(
            lambda reading: _called(data),
            None,
            inexact=forward_only(f"the function {getattr(data, '__name__', type_name(data))}"),
            seeks=False,
        )
    return None


def _indexed(batches: Any, start: int, stop: int | None) -> Iterator[Any]:
    index = start
    while stop is None or index < stop:
        yield batches[index]
        index += 1


def _called(function: Callable[[], Any]) -> Iterator[Any]:
    """Call a function that returns an iterator or iterable of batches."""
    made = function()
    if isinstance(made, tuple | Mapping) or _is_array(made) or not hasattr(made, "__iter__"):
        name = getattr(function, "__name__", type_name(function))
        raise DataError(
            f"{name}() returned a {type_name(made)}, not an iterator of batches: make it a "
            f"generator function (yield each batch), or use treadle.data.from_function for a "
            f"function that makes one batch"
        )
    return iter(made)


class IteratorSource(BaseSource):
    """A source of an iterator, which can be read only once, by a single reader."""

    length = batch_examples = None
    endless = closed_loop = False

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.inexact = forward_only(f"a {type_name(iterator)}")
        self._iterator = iterator
        self._reader: BatchReader | None = None
        self._epoch = 0

    def open(self, request: ReadRequest) -> BatchReader:
        """Continue reading the iterator.

        Raises:
            DataError: If the epoch or start requires batches that have already been read.
        """
        epoch, start, reader = request.epoch, request.start, self._reader
        gone = 0 if reader is None else reader.given
        if reader is not None and (epoch != self._epoch or gone != start):
            advice = "cut one long stream into epochs with treadle.data.limited(stream, batches)"
            if epoch == request.since:  # the loop begins with it again, after other data
                advice = (
                    "train on one long stream and on other data in the body of one loop.epochs, "
                    "where a stream that treadle.data.limited cuts into epochs continues"
                )
            raise DataError(
                f"a {type_name(self._iterator)} gives its batches once: {gone} of them are spent, "
                f"and batch {start + 1} of epoch {epoch + 1} cannot be read from it. Pass the "
                f"function that makes it (train, not train()), or {advice}"
            )
        if reader is None:
            iterator = chain(self._iterator)  # has no `close`, since reading may continue later
            reader = self._reader = BatchReader(lambda: iterator, request.drawn())
            self._epoch = epoch
        return reader
