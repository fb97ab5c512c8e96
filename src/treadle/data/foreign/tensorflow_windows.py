"""Reading whole windows of batches from a `tf.data` iterator in one call.

A Python loop over the batches of a data set takes 0.3 to 0.6 ms a batch, mostly in TensorFlow's
conversion of structures. It runs at the same time as the steps, but takes a processor from them and
from the functions of the data set. Here, a graph draws the batches of a window and stacks them.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from ..iterables import StackingIterator

Tensor = Any


def is_stackable(dataset: Any) -> bool:
    """Return whether the elements of a data set consist of dense tensors of known rank."""
    specs: list[Any] = tf.nest.flatten(dataset.element_spec)
    dense = all(type(spec) in (tf.TensorSpec,) for spec in specs)
    return bool(specs) and dense and all(spec.shape.rank is not None for spec in specs)


class DatasetIterator(StackingIterator):
    """Iterates over a data set that `is_stackable`, and is released at its end or when closed.

    An iterator has threads and buffers. Releasing it while the iterator of the next epoch fills its
    buffers takes as long as a hundred steps (0.2 to 0.5 s with a shuffle and a parallel map).

    Args:
        dataset: The data set of batches. Its functions must not run Python code, which may draw
            random numbers from generators that are seeded for each batch.
    """

    def __init__(self, dataset: Any) -> None:
        self._spec: Any = dataset.element_spec
        specs: list[Any] = tf.nest.flatten(self._spec)
        self._types = [spec.dtype for spec in specs]
        self._draw = _program(tuple(specs))
        self._failure: Exception | None = None
        with tf.device("cpu"):
            self._pending: Tensor = tf.raw_ops.OptionalNone()
            # Holds the batches of a window until all are drawn, so that none is lost on an error.
            self._queue: Any = tf.queue.FIFOQueue(-1, self._types)
        self._iterator: Any = iter(dataset)

    def __next__(self) -> Any:
        """Return the next batch."""
        leaves, _ = self._stacked(1, 0.0)
        return self._packed([leaf[0] for leaf in leaves])

    def stacked(self, most: int, seconds: float) -> tuple[Any, int]:
        """Return the next batches of equal shapes, stacked, and their number."""
        leaves, count = self._stacked(most, seconds)
        return self._packed(leaves), count

    def close(self) -> None:
        """Release threads and buffers."""
        self._iterator = self._queue = self._pending = None

    def _stacked(self, most: int, seconds: float) -> tuple[list[Any], int]:
        if self._failure is not None:
            raise self._failure
        if self._iterator is None:
            raise StopIteration
        arguments = [
            self._iterator._iterator_resource,
            self._pending,
            self._queue.queue_ref,
            tf.constant(most),
            tf.constant(time.time() + seconds, tf.float64),
        ]
        try:
            count, self._pending, *stacked = self._draw(arguments)
        except Exception as error:
            self._failure = error
            return self._before(error)
        if not int(count):
            self.close()
            raise StopIteration
        return [_view(x) for x in stacked], int(count)

    def _before(self, error: Exception) -> tuple[list[Any], int]:
        """Return the batches drawn before an error, or raise it if there are none."""
        count = int(self._queue.size())
        if not count:
            raise error
        batches = [tf.nest.flatten(self._queue.dequeue()) for _ in range(count)]
        return [_view(tf.stack(column)) for column in zip(*batches, strict=True)], count

    def _packed(self, leaves: Sequence[Any]) -> Any:
        return tf.nest.pack_sequence_as(self._spec, leaves)


def _view(tensor: Tensor) -> Any:
    """Return the values of a tensor without a copy."""
    return tensor.numpy() if tensor.dtype == tf.string else tensor.__array__()


@cache
def _program(specs: tuple[Any, ...]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a compiled function that draws batches of these components and stacks them.

    Its arguments are an iterator, an optional batch to begin with, a queue, the maximum number of
    batches, and the time after which no further batch is drawn. It returns the number of batches,
    an optional batch of other shapes that follows them, and the stacked components.
    """
    resource, variant = tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.variant)
    numbers = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.float64)
    traced = tf.function(_Drawing(specs).window, autograph=False)
    concrete: Any = traced.get_concrete_function(resource, variant, resource, *numbers)
    captured = concrete.captured_inputs
    return lambda arguments: concrete._call_flat(arguments, captured)


class _Drawing:
    """The operations of `_program` on batches of some components."""

    def __init__(self, specs: Sequence[Any]):
        self._specs = specs
        self._shapes = [spec.shape for spec in specs]
        self._types = [spec.dtype for spec in specs]
        self._raw: Any = tf.raw_ops

    @tf.autograph.experimental.do_not_convert
    def window(
        self, iterator: Tensor, pending: Tensor, queue: Tensor, most: Tensor, until: Tensor
    ) -> list[Tensor]:
        """Return the number of batches, what follows them, and the stacked components."""
        with tf.device("cpu"):
            first = tf.cond(
                self._has_value(pending), lambda: pending, lambda: self._following(iterator)
            )
            count, left = self._draw(iterator, first, queue, most, until)
            arrays = tf.cond(count > 0, lambda: self._stacked(queue, count), self._empty)
            return [count, left, *arrays]

    def _draw(
        self, iterator: Tensor, first: Tensor, queue: Tensor, most: Tensor, until: Tensor
    ) -> Any:
        """Put the first batch and those like it into the queue."""
        wanted = tf.cond(
            self._has_value(first),
            lambda: self._shapes_of(first),
            lambda: [tf.zeros([shape.rank], tf.int32) for shape in self._shapes],
        )

        def is_like_first(batch: Tensor) -> Tensor:
            if all(shape.is_fully_defined() for shape in self._shapes):
                return tf.constant(True)
            pairs = zip(self._shapes_of(batch), wanted, strict=True)
            return tf.reduce_all([tf.reduce_all(tf.equal(a, b)) for a, b in pairs])

        def another(count: Tensor, batch: Tensor) -> Tensor:
            fits = tf.cond(self._has_value(batch), lambda: is_like_first(batch), lambda: False)
            return tf.logical_and(count < most, fits)

        def body(count: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
            self._raw.QueueEnqueueV2(handle=queue, components=self._components(batch))
            more = tf.logical_and(count + 1 < most, tf.timestamp() < until)
            following = tf.cond(more, lambda: self._following(iterator), self._raw.OptionalNone)
            return count + 1, following

        return tf.while_loop(another, body, (0, first), parallel_iterations=1)

    def _stacked(self, queue: Tensor, count: Tensor) -> list[Tensor]:
        arrays = [
            tf.TensorArray(spec.dtype, size=count, element_shape=spec.shape, infer_shape=False)
            for spec in self._specs
        ]

        def body(i: Tensor, arrays: Any) -> Any:
            parts = self._raw.QueueDequeueV2(handle=queue, component_types=self._types)
            return i + 1, [array.write(i, x) for array, x in zip(arrays, parts, strict=True)]

        _, arrays = tf.while_loop(lambda i, _: i < count, body, (0, arrays), parallel_iterations=1)
        return [array.stack() for array in arrays]

    def _empty(self) -> list[Tensor]:
        return [tf.zeros([0] * (spec.shape.rank + 1), spec.dtype) for spec in self._specs]

    def _following(self, iterator: Tensor) -> Tensor:
        return self._raw.IteratorGetNextAsOptional(
            iterator=iterator, output_types=self._types, output_shapes=self._shapes
        )

    def _components(self, optional: Tensor) -> list[Tensor]:
        return self._raw.OptionalGetValue(
            optional=optional, output_types=self._types, output_shapes=self._shapes
        )

    def _shapes_of(self, optional: Tensor) -> list[Tensor]:
        return [tf.shape(x) for x in self._components(optional)]

    def _has_value(self, optional: Tensor) -> Tensor:
        return self._raw.OptionalHasValue(optional=optional)
