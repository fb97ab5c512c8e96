"""`tf.data.Dataset` as a source.

A data set that shuffles has another order for each iterator that is made of it: its shuffles draw
the seeds of the next one from generators of their own, which live in the process. A resumed run
therefore makes as many iterators of each shuffle as there were, before it makes its own and draws
and discards the batches before its position. Measured in fresh processes with TensorFlow 2.21,
this gives the very batches, also with several shuffles behind one another, and where a validation
reads a part of the same data. What remains is found in the data set's structure, and named.
"""

import warnings
from collections.abc import Iterator
from typing import Any, Final

from ...errors import DataError
from ..iterables import forward_only
from ..reader import BatchSource
from ..reading import Reading
from ..states import Resumable, tallies_of

WHAT: Final = "a tf.data.Dataset"
PYTHON: Final = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
KEEPING: Final = ("Assign", "Rng", "StatefulUniform", "StatefulStandard", "StatefulTruncated")
"""What the names of operations begin with that change a variable or a generator."""


def from_tensorflow(data: Any) -> BatchSource | None:
    """Return a `tf.data.Dataset` as a source; None for what is none.

    Raises:
        DataError: It gives ragged or sparse tensors.
    """
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
    endless = cardinality == tf.data.INFINITE_CARDINALITY
    try:
        parts = _parts(dataset)
        shuffles = [part for part in parts if _draws_seeds(part)]
        told = "; ".join(_inexact(parts, endless, dataset.options())) or None
    except (AttributeError, TypeError):  # another TensorFlow, with other names inside
        shuffles, told = [], forward_only(WHAT)

    def made() -> dict[str, Any]:
        """Return the shuffles' seeds, and how many iterators were made of each."""
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
        iterator = _letting_go(dataset.as_numpy_iterator())
        if not shuffles:
            return iterator
        return Resumable(iterator, made, name=WHAT, lasting=True, opening=opening)

    shape = getattr(specs[0], "shape", None) if specs else None
    return BatchSource(
        batches,
        cardinality if cardinality >= 0 else None,
        endless=endless,
        batch_examples=shape[0] if shape is not None and shape.rank else None,
        inexact=told,
        seeks=False,
    )


def _letting_go(iterator: Iterator[Any]) -> Iterator[Any]:
    """Give what an iterator gives, and let go of it at its end, or when this is closed.

    It has threads and buffers: where the next epoch's already fills its own, letting go of it takes
    as long as a hundred steps (measured: 0.2 to 0.5 s with a shuffle and a parallel map).
    """
    yield from iterator


def _make_as_many(shuffles: list[Any], then: dict[str, Any], now: dict[str, Any]) -> None:
    """Make as many iterators of each shuffle as were made before.

    Raises:
        DataError: The shuffles are others than they were.
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
                f"iterators were made of it, and {wanted} had been where the run goes on, so that "
                f"its batches come in another order than they did. Resume in a new process",
                stacklevel=2,
            )


def _parts(dataset: Any) -> list[Any]:
    """Return a data set and all those that it is made of, each once."""
    found: dict[int, Any] = {}
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += part._inputs()
    return list(found.values())


def _is_seeded(part: Any) -> bool:
    """Say whether a part is one that has seeds."""
    return any(word in type(part).__name__ for word in ("Shuffle", "Random"))


def _draws_seeds(part: Any) -> bool:
    """Say whether a part draws new seeds for each iterator that is made of it."""
    each = getattr(part, "_reshuffle_each_iteration", True), getattr(part, "_rerandomize", True)
    return _is_seeded(part) and all(each)


def _inexact(parts: list[Any], endless: bool, options: Any) -> list[str]:
    """Say what of a data set does not come again as it was."""
    told: list[str] = []
    if any(_is_seeded(part) and int(part._seed) == int(part._seed2) == 0 for part in parts):
        told.append(
            f"a shuffle of {WHAT} has no seed: give it one, or call tf.random.set_seed or "
            f"keras.utils.set_random_seed before the data set is made"
        )
    for part in parts:
        above = {type(each).__name__ for each in _parts(part)[1:] if _draws_seeds(each)}
        kind = type(part).__name__
        if above and "Repeat" in kind and not endless:
            told.append(
                f"the shuffle before a repeat of {WHAT} draws more than one order in an epoch, and "
                f"a resumed run does not know how many: repeat first, or leave the epochs to fit"
            )
        elif above and "Cache" in kind:
            told.append(
                f"the cache after a shuffle of {WHAT} keeps the order of the first epoch, which no "
                f"checkpoint holds: cache first"
            )
        elif above and "Concatenate" in kind:
            told.append(
                f"a shuffle in the second part of a concatenation of {WHAT} may not be reached in "
                f"each epoch, and a resumed run does not know: shuffle the whole"
            )
    if options.deterministic is False or any(
        getattr(part, "_deterministic", None) == "false" for part in parts
    ):
        told.append(f"{WHAT} with deterministic=False gives what is ready first")
    for part in parts:
        for function in part._functions():
            told += _inexact_function(function.function, hasattr(part, "_num_parallel_calls"))
    return list(dict.fromkeys(told))


def _inexact_function(function: Any, parallel: bool) -> Iterator[str]:
    """Say what of a mapped function's results does not come again as it was."""
    graph = function.graph.as_graph_def()
    operations = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    drawing = [operation.attr for operation in operations if "seed2" in operation.attr]
    if any(attr["seed"].i == attr["seed2"].i == 0 for attr in drawing):
        yield (
            f"tf.random is drawn from without a seed in a function of {WHAT}: give it one, or call "
            f"tf.random.set_seed before the data set is made"
        )
    elif drawing and parallel:
        yield (
            f"tf.random is drawn from in a function of {WHAT} that runs in parallel, so that it "
            f"comes otherwise each time: use tf.random.stateless_uniform and its like"
        )
    if any(operation.op in PYTHON for operation in operations):
        yield forward_only(f"a Python function in {WHAT}")
    if any(operation.op.startswith(KEEPING) for operation in operations):
        yield (
            f"a function of {WHAT} keeps something in a variable or a tf.random.Generator (as the "
            f"random layers of Keras do), which no checkpoint holds"
        )
    if any(str(tensor.dtype) == "<dtype: 'variant'>" for tensor in function.captured_inputs):
        yield (
            f"a function of {WHAT} uses another data set: if that shuffles, a resumed run does not "
            f"know how often it did"
        )
