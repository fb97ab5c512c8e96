"""The data arguments of `fit` of Keras as sources: arrays, splits, class weights, steps."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from math import ceil, floor
from typing import Any, Final

import keras
import numpy as np

from ..backends.window import Window
from ..core import structures
from ..errors import DataError
from .arrays import from_arrays
from .epochs import LimitedSource
from .foreign.keras import from_keras
from .foreign.sources import as_source
from .iterables import type_name
from .leaves import window_of
from .source import DerivedReader, DerivedSource, Reader, ReadRequest, Source, read_from

BATCH_SIZE: Final = 32  # of Keras
NO_ARRAYS: Final = ("RaggedTensor", "BCOO", "BCSR")


class FitData:
    """The data of one call of `fit`, `evaluate` or `predict`.

    Args:
        x: Arrays, structures of arrays, or an object that provides batches.
        y: Arrays of labels.
        sample_weight: Arrays of weights.

    Raises:
        DataError: If `x` provides batches, and `y` or `sample_weight` are given too.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        self.are_arrays = consists_of_arrays(x)
        given = [n for n, v in (("y", y), ("sample_weight", sample_weight)) if v is not None]
        if given and not self.are_arrays:
            raise DataError(
                f"{given[0]} was passed next to x, a {type_name(x)} of batches: let it give "
                "batches (x, y) or (x, y, sample_weight), or pass arrays"
            )
        parts = (x, y, sample_weight) if self.are_arrays else (None, None, None)
        self.x, self.y, self.sample_weight = map(_as_arrays, parts)
        self.batches = None if self.are_arrays else x

    @property
    def can_shuffle(self) -> bool:
        """Whether these are arrays, or batches that have numbers."""
        return self.are_arrays or isinstance(self.batches, keras.utils.PyDataset)

    @classmethod
    def of(cls, data: Any) -> "FitData":
        """Return the data of `validation_data`: a tuple of arrays, or an object of batches."""
        if isinstance(data, (tuple, list)) and consists_of_arrays(data):
            if not 1 <= len(data) <= 3:
                raise DataError(
                    f"validation_data is a {type(data).__name__} of {len(data)} parts: pass "
                    "(x, y) or (x, y, sample_weight)"
                )
            return cls(*data)
        return cls(data)

    def split(self, fraction: float) -> tuple["FitData", "FitData"]:
        """Return the first rows, and the last ones as a fraction for validation.

        Raises:
            DataError: If these are no arrays, or a part has no rows.
        """
        if not self.are_arrays:
            raise DataError(
                f"validation_split={fraction} needs arrays, but x is a {type_name(self.batches)}: "
                "pass validation_data"
            )
        if not 0 < fraction < 1:
            raise DataError(f"validation_split={fraction!r} must be between 0 and 1")
        count = structures.flatten(self.x)[0].shape[0]
        at = floor(count * (1.0 - fraction))
        if at in (0, count):
            raise DataError(
                f"validation_split={fraction} of {count} rows leaves none to "
                f"{'train' if at == 0 else 'validate'} on: change it, or pass validation_data"
            )
        given = (self.x, self.y, self.sample_weight)
        first = [structures.mapped(lambda leaf: leaf[:at], part) for part in given]
        last = [structures.mapped(lambda leaf: leaf[at:], part) for part in given]
        return FitData(*first), FitData(*last)

    def source(
        self,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        steps: int | None = None,
        continues: bool = False,
    ) -> Source:
        """Return the source of batches.

        Args:
            batch_size: The examples in a batch of arrays; 32 by default, or what `steps` requires.
                Objects that give batches ignore it, as in Keras.
            shuffle: Whether to shuffle arrays, or the batches of a `PyDataset`.
            seed: The seed of the order of examples or batches; that of the run by default.
            class_weight: The weight of each class, by its number.
            steps: The most batches in an epoch.
            continues: Whether each epoch begins where the one before has ended.

        Raises:
            DataError: If an argument does not fit the data.
        """
        if class_weight is not None and self.sample_weight is not None:
            raise DataError("class_weight and sample_weight were both passed: pass one of them")
        if self.are_arrays:
            weight = self.sample_weight
            if class_weight is not None:
                weight = _class_weights(self._labels(), class_weight)
            count = structures.flatten(self.x)[0].shape[0]
            batch_size = batch_size or (ceil(count / steps) if steps else BATCH_SIZE)
            batch = keras.utils.pack_x_y_sample_weight(self.x, self.y, weight)
            found: Source = from_arrays(batch, batch_size=batch_size, shuffle=shuffle, seed=seed)
        else:
            shuffled = from_keras(self.batches, shuffle, seed) if shuffle else None
            found = as_source(self.batches) if shuffled is None else shuffled
            if class_weight is not None:
                found = WeightedSource(found, class_weight)
        if steps is None:
            return found
        limited = LimitedSource(found, steps, continues)
        once = hasattr(self.batches, "__next__") and not continues
        return ContinuedSource(limited) if once else limited

    def _labels(self) -> Any:
        labels = structures.flatten(self.y)
        if len(labels) != 1:
            raise DataError(
                f"class_weight needs one array of labels, but y has {len(labels)}: pass "
                "sample_weight, with the structure of y"
            )
        return labels[0]


def consists_of_arrays(data: Any) -> bool:
    """Return whether all leaves of a structure are arrays of examples.

    Example:
        >>> consists_of_arrays({"a": np.ones(3)}), consists_of_arrays(iter([]))
        (True, False)
    """
    if isinstance(data, (tuple, list, Mapping)):
        parts: Iterable[Any] = data.values() if isinstance(data, Mapping) else data
        return len(data) > 0 and all(x is None or consists_of_arrays(x) for x in parts)
    return hasattr(data, "shape") and (hasattr(data, "dtype") or hasattr(data, "dtypes"))


@contextmanager
def writeable_again(*structures_of_arrays: Any) -> Generator[None]:
    """Restore the write flags of arrays at the end of a `with` block: sources make them read-only.

    Args:
        structures_of_arrays: Arrays of the user, in any structures.
    """
    found: dict[int, tuple[Any, bool]] = {}
    for leaf in structures.flatten(list(structures_of_arrays)):
        while isinstance(leaf, np.ndarray):
            found.setdefault(id(leaf), (leaf, bool(leaf.flags.writeable)))
            leaf = leaf.base
    try:
        yield
    finally:
        for array, writeable in reversed(found.values()):  # a base before its views
            with suppress(ValueError):
                array.flags.writeable = writeable


class ContinuedSource(DerivedSource):
    """A source for evaluations, each of which takes the next batches of a generator.

    Args:
        source: The source, whose epochs follow one another.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._epoch = -1

    def open(self, request: ReadRequest) -> Reader:
        """Open a reader of the next epoch."""
        self._epoch += 1
        return read_from(self.source, request.at(self._epoch))


class WeightedSource(DerivedSource):
    """A source whose batches get sample weights from the classes of their labels.

    Args:
        source: A source of batches `(x, y)`.
        class_weight: The weight of each class, by its number; that of others is 1.
    """

    def __init__(self, source: Source, class_weight: Mapping[int, float]) -> None:
        self.source, self._class_weight = source, class_weight

    def open(self, request: ReadRequest) -> Reader:
        """Open a reader of the batches with weights."""
        return _WeightedReader(read_from(self.source, request), self._class_weight)


class _WeightedReader(DerivedReader):
    def __init__(self, reader: Reader, class_weight: Mapping[int, float]) -> None:
        super().__init__(reader)
        self._class_weight = class_weight

    def take(self, most: int) -> Window | None:
        """Return the next batches."""
        window = self._reader.take(most)
        return None if window is None else self._weighted(window)

    def _weighted(self, window: Window) -> Window:
        batches = window.batches
        if not isinstance(batches, (tuple, list)) or len(batches) != 2:
            raise DataError(
                f"class_weight needs batches (x, y), but the source gives {_parts(batches)}: "
                "remove class_weight, or the weights of the batches"
            )
        labels = np.asarray(structures.flatten(batches[1])[0])
        flat = labels.reshape(-1, *labels.shape[2:])
        weights = _class_weights(flat, self._class_weight).reshape(labels.shape[:2])
        return window_of((*batches, weights), window.count)

    def put_back(self, window: Window) -> None:
        """Put back a window; the next `take` returns it again."""
        self._reader.put_back(window_of(tuple(window.batches[:2]), window.count))


def _parts(batch: Any) -> str:
    of_parts = isinstance(batch, (tuple, list))
    return f"{len(batch)} parts" if of_parts else f"a {type(batch).__name__}"


def _class_weights(labels: Any, class_weight: Mapping[int, float]) -> Any:
    """Return the weight of each example by its label: a class number, or a one-hot vector."""
    if labels.ndim > 1:
        one_hot = labels.shape[-1] != 1
        labels = labels.argmax(axis=-1) if one_hot else labels[..., 0]
    classes = np.round(labels).astype("int64")
    weights = np.ones(classes.shape[:1], "float32")
    for number, weight in class_weight.items():
        weights[classes == number] = weight
    return weights


def _as_arrays(structure: Any) -> Any:
    """Convert the pandas objects of a structure to arrays.

    Raises:
        DataError: If an array is sparse or ragged.
    """

    def leaf(value: Any) -> Any:
        kind = type(value)
        ragged = kind.__name__ in NO_ARRAYS or "Sparse" in kind.__name__
        if ragged or kind.__module__.startswith("scipy.sparse"):
            raise DataError(
                f"the data is a {kind.__name__}, and a loop trains on dense arrays: convert it, "
                "for example with toarray() or to_tensor(), or train with model.fit"
            )
        if type(value).__module__.partition(".")[0] == "pandas":
            array = value.to_numpy()
            return array[:, None] if array.ndim == 1 else array
        return value

    return None if structure is None else structures.mapped(leaf, structure)
