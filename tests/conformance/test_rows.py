"""OwnRows of a batch and sums over them on PyTorch and TensorFlow, in one process of a group."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle

if keras.config.backend() == "jax":
    pytest.skip("JAX divides batches by itself", allow_module_level=True)

from treadle.backends.base import active
from treadle.distribute.dividing.moments import combined
from treadle.distribute.dividing.rows import OwnRows, Seen, computing
from treadle.errors import StepError

BACKEND = keras.config.backend()


def process(rank: int) -> Any:
    """The backend of one of two processes, which do not communicate."""
    if BACKEND == "torch":
        from treadle.distribute.torch.backend import TorchGroup as Kind
    else:
        from treadle.distribute.tensorflow.backend import TensorFlowGroup as Kind
    found = Kind(active(), SimpleNamespace(rank=rank, size=2))
    found.is_alone = True
    return found


@pytest.fixture
def rows() -> OwnRows:
    """All rows of a batch of one, of which the second process has none."""
    found = OwnRows(process(0), 1, Seen())
    found.total = lambda x: ops.stop_gradient(x)  # type: ignore[method-assign]
    return found


def test_a_weighted_mean_in_half_precision_of_many_items(rows: OwnRows) -> None:
    loss = treadle.weighted(ops.cast(3.0, "float16"), ops.cast(1e5, "float32"))
    shares = rows.shares({"": loss})
    result, _ = rows.reduced(loss, {"": []}, {"": loss.value}, shares)
    assert float(result.value) == 3.0
    assert keras.backend.standardize_dtype(result.value.dtype) == "float16"


def test_weighted_scalars_that_are_no_tensors(rows: OwnRows) -> None:
    variable = keras.Variable(2.0)
    given = (treadle.weighted(0.5, 3), treadle.weighted(variable, 3), treadle.weighted(7, 3))
    found, _ = rows.reduced(given, {}, {}, {})
    assert [float(x.value) for x in found] == [0.5, 2.0, 7.0]
    # `Accumulator.add(weight=loss.weight)` sums tensors over the processes, and no numbers.
    assert all(ops.is_tensor(x.weight) for x in found)


COUNT = 100_001
AT = {"first": 0}  # the first row of the process that draws
DRAWS = {
    "normal": lambda n, seed: keras.random.normal((n, 3), seed=seed),
    "uniform": lambda n, seed: keras.random.uniform((n, 3), seed=seed),
    "several-blocks": lambda n, seed: keras.random.uniform((2 * n, 3), seed=seed),
    "truncated-normal": lambda n, seed: keras.random.truncated_normal((n, 3), seed=seed),
    "integers": lambda n, seed: keras.random.randint((n, 3), 0, 100, seed=seed),
    "dropout": lambda n, seed: keras.random.dropout(ops.ones((n, 4, 3)), 0.5, seed=seed),
    "dropout-of-channels": lambda n, seed: keras.random.dropout(
        ops.ones((n, 4, 3)), 0.5, (n, 1, 3), seed=seed
    ),
    "gamma": lambda n, seed: keras.random.gamma((n, 3), 2.0, seed=seed),
    "beta": lambda n, seed: keras.random.beta((n, 3), 2.0, 1.5, seed=seed),
    "binomial": lambda n, seed: keras.random.binomial((n, 3), 9.0, 0.3, seed=seed),
    "categorical": lambda n, seed: keras.random.categorical(ops.zeros((n, 3)), 2, seed=seed),
    "not-of-rows": lambda n, seed: keras.random.normal((2, 3), seed=seed),
    "uniform-float64": lambda n, seed: keras.random.uniform((n, 3), dtype="float64", seed=seed),
    "truncated-float16": lambda n, seed: keras.random.truncated_normal(
        (n, 3), dtype="float16", seed=seed
    ),
}
if BACKEND == "torch":
    for name in ("gamma", "beta", "binomial"):  # refused
        del DRAWS[name]
else:
    import tensorflow as tf

    DRAWS["counter-with-carry"] = lambda n, seed: tf.raw_ops.StatelessRandomUniformV2(
        shape=[n, 3],
        key=tf.constant([seed], tf.uint64),
        alg=tf.random.Algorithm.PHILOX.value,
        counter=tf.constant([2**64 - 5, 1], tf.uint64),
    )
    tf_random, columns = tf.random, tf.constant([1.0, 2.0, 3.0])

    def rows_from(n: int) -> Any:
        numbers = np.linspace(1.0, 9.0, 3 * COUNT, dtype="float32").reshape(-1, 3)
        return tf.constant(numbers[AT["first"] :][:n])

    DRAWS["poisson"] = lambda n, seed: tf_random.stateless_poisson([n, 3], [seed, 0], 2.5)
    for name, rates in (("columns", lambda n: columns), ("rows", rows_from)):
        DRAWS[f"poisson-of-{name}"] = lambda n, seed, rates=rates: tf_random.stateless_poisson(
            [n, 3], [seed, 0], rates(n)
        )
        DRAWS[f"gamma-of-{name}"] = lambda n, seed, rates=rates: tf_random.stateless_gamma(
            [n, 3], [seed, 0], rates(n)
        )

    def of_generator(n: int, generator: Any) -> Any:
        """Draw several times, in shapes whose products could be mistaken for one another."""
        for shape in ([n, 16], [n, 8], [64], [2 * n, 4], [n], []):
            generator.normal(shape)
        return generator.uniform([n, 3])

    DRAWS["shape-of-a-tensor"] = lambda n, seed: tf.function(
        lambda x: tf_random.stateless_normal([tf.shape(x)[0], 3], [seed, 0]), autograph=False
    )(tf.zeros([n, 2]))
    DRAWS["last-of-generator"] = lambda n, seed: of_generator(
        n, tf_random.Generator.from_seed(seed, alg="philox")
    )
    DRAWS["generator-of-graph"] = lambda n, seed: tf.function(
        lambda generator: of_generator(n, generator), autograph=False
    )(tf_random.Generator.from_seed(seed, alg="philox"))
    for name in ("normal", "uniform", "truncated-normal"):
        DRAWS[f"{name}-xla"] = lambda n, seed, draw=DRAWS[name]: tf.function(
            lambda: draw(n, seed), jit_compile=True, autograph=False
        )()


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_rows_of_the_draw_for_the_whole_batch(name: str) -> None:
    # Products of shapes are mistaken for one another only if processes have equally many rows.
    draw, backend, noted = DRAWS[name], process(0), Seen()
    count = COUNT - 1 if "generator" in name else COUNT
    AT["first"] = 0
    with backend.patched(), computing(None, noted):
        whole = ops.convert_to_numpy(draw(count, 3))
    found: list[Any] = []
    for rank in (0, 1):  # the first has one row more
        mine = OwnRows(process(rank), count, noted)
        AT["first"] = mine.first
        with backend.patched(), computing(mine):
            found.append(ops.convert_to_numpy(draw(mine.count, 3)))
    if name == "not-of-rows":
        assert (found[0] == whole).all() and (found[1] == whole).all()
        return
    blocks = len(whole) // count
    parts = [x.reshape(blocks, -1, *x.shape[1:]) for x in found]
    np.testing.assert_array_equal(np.concatenate(parts, 1).reshape(whole.shape), whole)


@pytest.mark.parametrize("name", ["uniform", "dropout", "uniform-float64"])
def test_a_process_makes_the_numbers_of_its_rows_only(name: str) -> None:
    noted, count = Seen(), 350_000
    with process(0).patched(), computing(None, noted):
        DRAWS[name](2 * count, 3)
    mine = OwnRows(process(1), 2 * count, noted)

    def draw() -> Any:
        with mine._processes.patched(), computing(mine):
            return DRAWS[name](count, 3)

    own = largest(lambda: DRAWS[name](count, 3))
    assert own <= largest(draw) <= own + 3  # a value of the counter makes four numbers


def largest(draw: Callable[[], Any]) -> int:
    """Return the size of the largest tensor that operators make in a function."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        graph = tf.function(draw, autograph=False).get_concrete_function().graph
        return max(x.shape.num_elements() for op in graph.get_operations() for x in op.outputs)
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            sizes.append(found.numel() if isinstance(found, torch.Tensor) else 0)
            return found

    with Sizes():
        draw()
    return max(sizes)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
@pytest.mark.parametrize(
    "name", ["poisson", "shuffle", "stateless_shuffle", "truncated", "binomial of a generator"]
)
def test_a_draw_that_cannot_be_divided_is_refused(name: str) -> None:
    import tensorflow as tf

    stateless: Any = tf.random.experimental.stateless_shuffle
    calls: dict[str, Callable[[], Any]] = {
        "poisson": lambda: tf.random.poisson([4], 2.0),
        "shuffle": lambda: tf.random.shuffle(tf.zeros([4])),
        "stateless_shuffle": lambda: stateless(tf.zeros([4]), [1, 2]),
        "binomial of a generator": lambda: tf.random.Generator.from_seed(1, alg="philox").binomial(
            [4], 9.0, 0.3
        ),
        "truncated": lambda: tf.random.stateless_parameterized_truncated_normal([4], [1, 2]),
    }
    mine = OwnRows(process(0), 8, Seen())
    with pytest.raises(StepError) as raised, process(0).patched(), computing(mine):
        calls[name]()
    assert str(raised.value) == (
        "the step draws with a function of tf.random that several processes cannot divide: draw "
        "with keras.random, or train with one process"
    )


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
def test_a_draw_whose_shape_depends_on_values() -> None:
    import tensorflow as tf

    from treadle.distribute.tensorflow.replacements import of_parameters

    with pytest.raises(StepError) as raised:
        tf.function(
            lambda n: of_parameters()(tf.zeros, [n]), autograph=False
        ).get_concrete_function(tf.TensorSpec([], tf.int32))
    assert str(raised.value) == (
        "the shape of a random draw depends on values, so that several processes cannot divide "
        "it: draw for a shape that follows from the shapes of the batch"
    )


@pytest.mark.skipif(BACKEND != "tensorflow", reason="PyTorch sends a difference of squares")
def test_moments_of_all_rows_take_one_message(rows: OwnRows) -> None:
    sent = list[Any]()
    rows.total = lambda x: sent.append(x) or ops.stop_gradient(x)  # type: ignore[method-assign]

    def moments(x: Any) -> Any:
        mean, variance = ops.moments(x, [0, 1])
        return ops.sum(mean + ops.sqrt(variance))

    import tensorflow as tf

    x = tf.Variable(np.random.default_rng(0).normal(size=(1, 64, 2)).astype("float32"))
    with rows._processes.patched(), computing(rows), tf.GradientTape() as tape:
        total = moments(x)
    assert len(sent) == 1
    found = tape.gradient(total, x)
    assert len(sent) == 2  # forward and backward
    with tf.GradientTape() as tape:
        total = moments(x)
    np.testing.assert_allclose(found, tape.gradient(total, x), atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_moments_of_two_processes_are_combined(epsilon: float) -> None:
    rng = np.random.default_rng(0)
    parts = [(1e4 + rng.normal(size=(n, 2))).astype("float32") for n in (5, 3)]
    sent = list[Any]()

    def of(part: Any, total: Callable[[Any], Any]) -> Any:
        own = (ops.full((2,), float(len(part))), part.mean(0), part.var(0))
        return combined(*map(ops.convert_to_tensor, own), SimpleNamespace(sum=total), epsilon)

    for part in parts:
        of(part, lambda x: sent.append(x) or x)
    found = [ops.convert_to_numpy(x) for x in of(parts[0], lambda x: sent[0] + sent[1])]
    whole, number = np.concatenate(parts).astype("float64"), 8 + epsilon
    mean = whole.sum(0) / number
    np.testing.assert_allclose(found[0], mean, rtol=1e-6)
    np.testing.assert_allclose(found[1], ((whole - mean) ** 2).sum(0) / number, rtol=1e-3)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras subtracts squares on PyTorch itself")
@pytest.mark.parametrize("keepdims", [True, False])
def test_a_variance_far_from_zero_keeps_its_digits(rows: OwnRows, keepdims: bool) -> None:
    x = (1e4 + np.random.default_rng(0).normal(size=(1, 64, 2))).astype("float32")
    with rows._processes.patched(), computing(rows):
        mean, variance = ops.moments(x, [0, 1], keepdims)
    assert mean.shape == ((1, 1, 2) if keepdims else (2,))
    np.testing.assert_allclose(np.ravel(variance), x.var((0, 1), dtype="float64"), rtol=1e-3)
