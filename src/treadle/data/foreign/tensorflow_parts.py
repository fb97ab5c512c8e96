"""The parts of a `tf.data.Dataset`: its shuffles, and what a resumed run cannot reproduce.

Most data sets are Python objects that know their inputs. Data sets that functions use, and the
choice of `choose_from_datasets`, exist only as tensors: TensorFlow describes these as graphs.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import tensorflow as tf

from ..iterables import forward_only

WHAT: Final = "a tf.data.Dataset"
PYTHON: Final = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
KEEPING: Final = (
    *("Assign", "Rng", "StatefulUniform", "StatefulStandard", "StatefulTruncated"),
    *("IteratorGetNext", "LookupTableInsert", "LookupTableRemove", "Queue"),
)
"""Name prefixes of operations that change a variable, a generator or another resource."""

THREADS: Final = ("Prefetch", "Parallel", "MapAndBatch")
"""Words in the names of data sets and operations that run in threads of their own."""

SEEDS: Final = (("ShuffleDataset", 2), ("ShuffleAndRepeat", 2), ("GlobalShuffle", 1), ("Random", 0))
"""Name prefixes of operations that create a seeded data set, and the input that is its seed."""

IGNORE: Final = 1  # states outside of a data set, in `DatasetToGraphV2`


def shuffles_of(dataset: Any) -> list[tuple[Any, int]]:
    """Return the parts that draw new seeds for each iterator, and how many of these are created.

    An iterator of the data set creates one iterator of a part for each path that leads to it.
    """
    paths = _paths(dataset, {})
    return [(part, paths[id(part)]) for part in _parts(dataset) if _draws_seeds(part)]


def runs_python(dataset: Any) -> bool:
    """Return whether a function of a data set runs Python code."""
    functions = [function.function for part in _parts(dataset) for function in _functions(part)]
    graphs = [function.graph.as_graph_def() for function in functions]
    return any(node.op in PYTHON for graph in graphs for node in _operations(graph))


def reasons(dataset: Any, endless: bool) -> list[str]:
    """Return the reasons why a data set cannot be resumed exactly, each once."""
    parts = _parts(dataset)
    found = list(_of_order(dataset, parts, endless))
    if dataset.options().deterministic is False or any(map(_is_not_deterministic, parts)):
        found.append(NOT_DETERMINISTIC)
    for part in parts:
        kind = type(part).__name__
        for function in _functions(part):
            graph = function.function.graph.as_graph_def()
            found += _of_graph(graph, any(word in kind for word in THREADS))
            for tensor in function.function.captured_inputs:
                if tensor.dtype == tf.variant:
                    found += _of_hidden(tensor, "a function")
        if kind == "_VariantDataset":
            found += _of_hidden(tf.data.experimental.to_variant(part), "choose_from_datasets")
        elif not type(part).__module__.startswith("tensorflow.") and not _inputs(part):
            found += _of_hidden(tf.data.experimental.to_variant(part), f"the {kind}")
    return list(dict.fromkeys(found))


NOT_DETERMINISTIC: Final = f"{WHAT} with deterministic=False gives what is ready first"
UNSEEDED: Final = (
    f"a shuffle of {WHAT} has no seed: give it one, or call tf.random.set_seed or "
    f"keras.utils.set_random_seed before the data set is made"
)


def _inputs(part: Any) -> list[Any]:
    """Return the inputs of a part, or the data set that it wraps."""
    for name in ("_impl", "_dataset"):
        wrapped = getattr(part, name, None)
        if isinstance(wrapped, tf.data.Dataset):
            return [wrapped]
    return list(part._inputs())


def _functions(part: Any) -> list[Any]:
    """Return the traced functions of a part."""
    return [value for value in vars(part).values() if hasattr(value, "function")]


def _parts(dataset: Any) -> list[Any]:
    """Return a data set and all its inputs, each once."""
    found: dict[int, Any] = {}
    waiting = [dataset]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += _inputs(part)
    return list(found.values())


def _paths(part: Any, known: dict[int, Counter[int]]) -> Counter[int]:
    """Return how many paths lead from a part to each part, by id, and remember this in `known`."""
    if id(part) not in known:
        below = [_paths(each, known) for each in _inputs(part)]
        known[id(part)] = sum(below, Counter({id(part): 1}))
    return known[id(part)]


def _is_seeded(part: Any) -> bool:
    return any(word in type(part).__name__ for word in ("Shuffle", "Random"))


def _draws_seeds(part: Any) -> bool:
    """Return whether a part draws new seeds for each of its iterators."""
    reshuffles = getattr(part, "_reshuffle_each_iteration", None) is not False
    return _is_seeded(part) and reshuffles and bool(getattr(part, "_rerandomize", True))


def _of_order(dataset: Any, parts: list[Any], endless: bool) -> Iterator[str]:
    """Yield the reasons why the seed that a shuffle gets next is unknown."""
    if any(_is_seeded(part) and int(part._seed) == int(part._seed2) == 0 for part in parts):
        yield UNSEEDED
    known: dict[int, Counter[int]] = {}
    paths = _paths(dataset, known)
    # An iterator of a shuffle creates that of its input with its first batch, not at once.
    shuffles = [part for part in parts if "Shuffle" in type(part).__name__]
    late = {id(each) for part in shuffles for each in _parts(part)[1:] if _draws_seeds(each)}
    for part in parts:
        above = any(map(_draws_seeds, _parts(part)[1:]))
        kind = type(part).__name__
        threads = any(word in kind for word in THREADS)
        if threads and any(0 < known[id(part)][each] < paths[each] for each in late):
            yield (
                f"a shuffle of {WHAT} is followed by another shuffle on several paths with threads "
                f"of their own, so that each time another path gets another order: prefetch and "
                f"map in parallel after the paths are joined"
            )
        if "DataService" in kind:
            yield f"the tf.data service of {WHAT} gives what its workers finish first"
        elif above and "Repeat" in kind and not endless:
            yield (
                f"the shuffle before a repeat of {WHAT} draws more than one order in an epoch, and "
                f"a resumed run does not know how many: repeat first, or set epochs in fit instead"
            )
        elif above and ("Cache" in kind or "Snapshot" in kind):
            name = "cache" if "Cache" in kind else "snapshot"
            yield (
                f"the {name} after a shuffle of {WHAT} keeps the order of the first epoch, which "
                f"checkpoints cannot save: {name} before shuffling"
            )
        elif above and "Concatenate" in kind:
            yield (
                f"a shuffle in the second part of a concatenation of {WHAT} may not be reached in "
                f"each epoch, and a resumed run cannot know this: shuffle after concatenating"
            )


def _operations(graph: Any) -> list[Any]:
    """Return the operations of a graph and of the functions that it calls."""
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def _graph_of(tensor: Any) -> Any:
    """Return the graph of a data set, which holds its data, or None if there is none."""
    raw: Any = tf.raw_ops
    try:
        text = raw.DatasetToGraphV2(input_dataset=tensor, external_state_policy=IGNORE)
        return tf.compat.v1.GraphDef.FromString(text.numpy())
    except (tf.errors.OpError, AttributeError):
        return None


def _is_not_deterministic(part: Any) -> bool:
    """Return whether a part gives what is ready first."""
    if type(part).__name__ == "_ParallelInterleaveDataset":  # whose object does not know it
        graph = _graph_of(tf.data.experimental.to_variant(part))
        return graph is None or any(map(_in_any_order, graph.node))
    return getattr(part, "_deterministic", None) == "false"


def _in_any_order(node: Any) -> bool:
    return "deterministic" in node.attr and node.attr["deterministic"].s == b"false"


def _of_hidden(tensor: Any, owner: str) -> Iterator[str]:
    """Yield the reasons why a data set cannot be reproduced of which there is only a tensor."""
    graph = _graph_of(tensor)
    if graph is None:
        yield (
            f"{owner} of {WHAT} uses data of which TensorFlow does not show the parts: if that "
            f"shuffles, a resumed run cannot reproduce its order"
        )
        return
    each = "reshuffle_each_iteration", "rerandomize_each_iteration"
    if any(node.attr[name].b for node in graph.node for name in each if name in node.attr):
        yield (
            f"{owner} of {WHAT} uses another data set that shuffles, and a resumed run cannot "
            f"reproduce its order: pass reshuffle_each_iteration=False to that shuffle"
        )
    yield from _of_graph(graph, parallel=False)


def _of_graph(graph: Any, parallel: bool) -> Iterator[str]:
    """Yield the reasons why the results of a function or a data set cannot be reproduced.

    A data set that a function creates shuffles equally in each call, if it has a seed.
    """
    operations = _operations(graph)
    parallel = parallel or any(node.op.startswith(THREADS[1:]) for node in operations)
    if any(map(_in_any_order, operations)):
        yield NOT_DETERMINISTIC
    if any(map(_lacks_seed, (graph, *graph.library.function))):
        yield UNSEEDED
    drawing = [node.attr for node in operations if "seed2" in node.attr]
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
    if any(node.op in PYTHON for node in operations):
        yield forward_only(f"a Python function in {WHAT}")
    if any(node.op.startswith(KEEPING) for node in operations):
        yield (
            f"a function of {WHAT} keeps something in a variable, a table, a queue, an iterator or "
            f"a tf.random.Generator (as the random layers of Keras do), which checkpoints cannot "
            f"save"
        )


def _lacks_seed(body: Any) -> bool:
    """Return whether a graph or a function creates a data set with constant seeds of zero."""
    nodes = body.node if hasattr(body, "node") else body.node_def
    zeros = {
        node.name
        for node in nodes
        if node.op == "Const"
        and node.attr["dtype"].type == tf.int64.as_datatype_enum
        and not tf.make_ndarray(node.attr["value"].tensor).any()
    }
    return any(
        node.op.startswith(prefix)
        and "Dataset" in node.op
        and all(name.split(":")[0] in zeros for name in node.input[at : at + 2])
        for node in nodes
        for prefix, at in SEEDS
    )
