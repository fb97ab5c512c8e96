"""Conversion of a `tf.data.Dataset` to a source.

A shuffled data set has a different order for each iterator: its shuffles draw the seeds of the next
iterator from generators that exist only in the process. A resumed run therefore first creates as
many iterators of each shuffle as there were before, then its own iterator, and then draws and
discards the batches before its position. In tests in new processes with TensorFlow 2.21, this gives
exactly the same batches, also with several consecutive shuffles, and if a validation reads a part
of the same data. Causes of inexact resuming that remain are detected in the structure of the data
set and reported.
"""

import warnings
from collections.abc import Iterator
from typing import Any, Final

from ...core.structures import flatten
from ...errors import DataError
from ..iterables import forward_only
from ..reader import BatchSource
from ..reading import Reading
from ..states import Resumable, tallies_of

WHAT: Final = "a tf.data.Dataset"
PYTHON: Final = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
KEEPING: Final = ("Assign", "Rng", "StatefulUniform", "StatefulStandard", "StatefulTruncated")
"""Name prefixes of operations that change a variable or a generator."""


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
    specs: list[Any] = tf.nest.flatten(dataset.element_spec)
    for spec in specs:
        if isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
            kind = "ragged" if isinstance(spec, tf.RaggedTensorSpec) else "sparse"
            raise DataError(
                f"this tf.data.Dataset gives {kind} tensors ({spec}), which only TensorFlow has: "
                f"map them to dense ones first (padded_batch, .to_tensor(), tf.sparse.to_dense)"
            )
    cardinality = int(dataset.cardinality())
    endless = cardinality == tf.data.INFINITE_CARDINALITY
    try:
        parts = _parts(dataset)
        shuffles = [part for part in parts if _draws_seeds(part)]
        inexact = "; ".join(_inexact(parts, endless, dataset.options())) or None
        # Random states are seeded before each batch for Python code, so it draws them one by one.
        stacks = is_stackable(dataset) and not any(map(_runs_python, parts))
    except (AttributeError, TypeError):  # private names changed in another TensorFlow version
        shuffles, inexact, stacks = [], forward_only(WHAT), False

    def made() -> dict[str, Any]:
        """Return the seeds of each shuffle, and the number of iterators created from it."""
        return {
            "seeds": [[int(shuffle._seed), int(shuffle._seed2)] for shuffle in shuffles],
            "iterators": [tallies_of(shuffle)["iterators"] for shuffle in shuffles],
        }

    def batches(reading: Reading) -> Iterator[Any]:
        state = reading.state()
        state = reading.before() if state is None else state
        if state is not None:
            _make_as_many(shuffles, state, made())
        opening = made()
        for shuffle in shuffles:
            tallies_of(shuffle)["iterators"] += 1
        iterator = DatasetIterator(dataset) if stacks else _letting_go(dataset.as_numpy_iterator())
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
    )


def _letting_go(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield from an iterator, and release it as a `DatasetIterator` is released."""
    yield from iterator


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


def _parts(dataset: Any) -> list[Any]:
    """Return a data set and all its inputs, each once."""
    found: dict[int, Any] = {}
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += part._inputs()
    return list(found.values())


def _is_seeded(part: Any) -> bool:
    """Return whether a part has seeds."""
    return any(word in type(part).__name__ for word in ("Shuffle", "Random"))


def _draws_seeds(part: Any) -> bool:
    """Return whether a part draws new seeds for each of its iterators."""
    each = getattr(part, "_reshuffle_each_iteration", True), getattr(part, "_rerandomize", True)
    return _is_seeded(part) and all(each)


def _inexact(parts: list[Any], endless: bool, options: Any) -> list[str]:
    """Return the reasons why a data set cannot be resumed exactly."""
    reasons: list[str] = []
    if any(_is_seeded(part) and int(part._seed) == int(part._seed2) == 0 for part in parts):
        reasons.append(
            f"a shuffle of {WHAT} has no seed: give it one, or call tf.random.set_seed or "
            f"keras.utils.set_random_seed before the data set is made"
        )
    for part in parts:
        above = {type(each).__name__ for each in _parts(part)[1:] if _draws_seeds(each)}
        kind = type(part).__name__
        if above and "Repeat" in kind and not endless:
            reasons.append(
                f"the shuffle before a repeat of {WHAT} draws more than one order in an epoch, and "
                f"a resumed run does not know how many: repeat first, or set epochs in fit instead"
            )
        elif above and "Cache" in kind:
            reasons.append(
                f"the cache after a shuffle of {WHAT} keeps the order of the first epoch, which "
                f"checkpoints cannot save: cache before shuffling"
            )
        elif above and "Concatenate" in kind:
            reasons.append(
                f"a shuffle in the second part of a concatenation of {WHAT} may not be reached in "
                f"each epoch, and a resumed run cannot know this: shuffle after concatenating"
            )
    if options.deterministic is False or any(
        getattr(part, "_deterministic", None) == "false" for part in parts
    ):
        reasons.append(f"{WHAT} with deterministic=False gives what is ready first")
    for part in parts:
        for function in part._functions():
            reasons += _inexact_function(function.function, hasattr(part, "_num_parallel_calls"))
    return list(dict.fromkeys(reasons))


def _runs_python(part: Any) -> bool:
    """Return whether a function of a part runs Python code."""
    graphs = [function.function.graph.as_graph_def() for function in part._functions()]
    return any(operation.op in PYTHON for graph in graphs for operation in _operations(graph))


def _operations(graph: Any) -> list[Any]:
    """Return the operations of a graph and of the functions that it calls."""
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def _inexact_function(function: Any, parallel: bool) -> Iterator[str]:
    """Yield the reasons why the results of a mapped function cannot be reproduced."""
    operations = _operations(function.graph.as_graph_def())
    drawing = [operation.attr for operation in operations if "seed2" in operation.attr]
    if any(attr["seed"].i == attr["seed2"].i == 0 for attr in drawing):
        yield (
            f"tf.random is drawn from without a seed in a function of {WHAT}: give it one, or call "
            f"tf.random.set_seed before the data set is made"
        )
    elif drawing and parallel:
        yield (
            f"tf.random is drawn from in a function of {WHAT} that runs in parallel, so that it "
            f"differs each time: use stateless functions, such as tf.random.stateless_uniform"
        )
    if any(operation.op in PYTHON for operation in operations):
        yield forward_only(f"a Python function in {WHAT}")
    if any(operation.op.startswith(KEEPING) for operation in operations):
        yield (
            f"a function of {WHAT} keeps something in a variable or a tf.random.Generator (as the "
            f"random layers of Keras do), which checkpoints cannot save"
        )
    if any(str(tensor.dtype) == "<dtype: 'variant'>" for tensor in function.captured_inputs):
        yield (
            f"a function of {WHAT} uses another data set: if that shuffles, a resumed run cannot "
            f"reproduce its order"
        )
