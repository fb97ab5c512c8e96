"""Conversion of a `tf.data.Dataset` to a source.

A shuffled data set has a different order for each iterator: its shuffles draw the seeds of the next
iterator from generators that exist only in the process. A resumed run therefore first creates as
many iterators of each shuffle as there were before, then its own iterator, and then draws and
discards the batches before its position. In tests in new processes with TensorFlow 2.21, this gives
exactly the same batches, also with several consecutive shuffles, with a shuffle on several paths,
and if a validation reads a part of the same data. `tensorflow_parts` finds the shuffles, and the
causes of inexact resuming that remain.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...core.structures import flatten, mapped
from ...errors import DataError
from ..iterables import forward_only
from ..reader import BatchSource
from ..source import ReadRequest
from ..states import Resumable, tallies_of
from .tensorflow_parts import WHAT, reasons, runs_python, shuffles_of


def from_tensorflow(data: Any) -> BatchSource | None:
    """Convert a `tf.data.Dataset` to a source; return None for other objects.

    Raises:
        DataError: If the data set contains ragged or sparse tensors.
    """
    import tensorflow as tf

    from .tensorflow_windows import DatasetIterator, is_stackable

    if not isinstance(data, tf.data.Dataset):
        return None
    dataset: Any = data
    _require_dense(tf.nest.flatten(dataset.element_spec))
    cardinality = int(dataset.cardinality())
    endless = cardinality == tf.data.INFINITE_CARDINALITY
    try:
        shuffles = shuffles_of(dataset)
        inexact = "; ".join(reasons(dataset, endless)) or None
        # Random states are seeded before each batch for Python code, so it draws them one by one.
        stacks = is_stackable(dataset) and not runs_python(dataset)
    except (AttributeError, TypeError, NotImplementedError):  # private names of another version
        shuffles, inexact, stacks = [], forward_only(WHAT), False

    def made() -> dict[str, Any]:
        """Return the seeds of each shuffle, and the number of iterators created from it."""
        return {
            "seeds": [[int(shuffle._seed), int(shuffle._seed2)] for shuffle, _ in shuffles],
            "iterators": [tallies_of(shuffle)["iterators"] for shuffle, _ in shuffles],
        }

    def batches(reading: ReadRequest) -> Iterator[Any]:
        state = reading.last_state()
        if state is not None:
            _make_as_many([shuffle for shuffle, _ in shuffles], state, made())
        opening = made()
        for shuffle, paths in shuffles:
            tallies_of(shuffle)["iterators"] += paths
        # Either one lets go of the data set when it is closed.
        iterator = DatasetIterator(dataset) if stacks else (x for x in dataset.as_numpy_iterator())
        if not shuffles:
            return iterator
        return Resumable(iterator, made, name=WHAT, lasting=True, opening=opening)

    shapes = [getattr(spec, "shape", None) for spec in flatten(dataset.element_spec)]
    shape = next((x for x in shapes if x is not None and x.rank != 0), None)
    return BatchSource(
        batches,
        cardinality if cardinality >= 0 else None,
        endless=endless,
        batch_examples=shape[0] if shape is not None and shape.rank else None,
        inexact=inexact,
        seeks=False,
        zeros=_zeros_of(dataset),
    )


def _zeros_of(dataset: Any) -> Callable[[int], Any] | None:
    """Return a function that makes a batch of zeros; None if the form of batches is unknown."""
    if not all(map(_has_known_form, flatten(dataset.element_spec))):
        return None

    def zeros(examples: int) -> Any:
        """Return a batch of so many examples, unless the data set fixes their number."""

        def of(spec: Any) -> np.ndarray:
            shape = [examples if size is None else size for size in spec.shape]
            return np.zeros(shape, spec.dtype.as_numpy_dtype)

        return mapped(of, dataset.element_spec)

    return zeros


def _has_known_form(spec: Any) -> bool:
    """Return whether tensors hold numbers, and all but their first axis has a known size."""
    import tensorflow as tf

    if not isinstance(spec, tf.TensorSpec) or spec.dtype in (tf.string, tf.variant):
        return False
    return bool(spec.shape[1:].is_fully_defined())


def _require_dense(specs: list[Any]) -> None:
    import tensorflow as tf

    for spec in specs:
        if isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
            kind = "ragged" if isinstance(spec, tf.RaggedTensorSpec) else "sparse"
            raise DataError(
                f"this tf.data.Dataset gives {kind} tensors ({spec}), which only TensorFlow has: "
                f"map them to dense ones first (padded_batch, .to_tensor(), tf.sparse.to_dense)"
            )


def _make_as_many(shuffles: list[Any], then: dict[str, Any], now: dict[str, Any]) -> None:
    """Create iterators of each shuffle until there are as many as in the saved state.

    Raises:
        DataError: If the seeds of the shuffles differ from those in the state.
    """
    if then["seeds"] != now["seeds"]:
        raise DataError(
            f"this tf.data.Dataset shuffles with other seeds than when the run began: "
            f"{now['seeds']} instead of {then['seeds']}. Give each shuffle a seed, or call "
            f"tf.random.set_seed before the data set is made"
        )
    for shuffle, wanted, found in zip(shuffles, then["iterators"], now["iterators"], strict=True):
        for _ in range(found, wanted):
            iter(shuffle)
        tallies_of(shuffle)["iterators"] = max(found, wanted)
        if found > wanted:
            warnings.warn(
                f"a shuffle of a tf.data.Dataset cannot go back within a process: {found} "
                f"iterators were created from it, but {wanted} at the step from which the run "
                f"resumes, so its batches come in a different order. Resume in a new process",
                stacklevel=2,
            )
