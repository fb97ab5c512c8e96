"""The register of the private parts of Keras that Treadle uses, each with the reason.

Keras promises nothing about names below `keras.src`. Treadle reads them only through this module,
and `tests/core/test_keras_internals.py` fails by name when one of them changes. Parts of one of
Keras' backends are in the register of that backend, `backends/<name>/patches.py`.

Attributes of this module are imported when they are first used, since importing Keras fixes its
backend: `keras_internals.global_state` is the module `keras.src.backend.common.global_state`.
"""

import random
import re
import warnings
from functools import cache
from importlib import import_module
from typing import Any

from ..errors import BackendError, TreadleWarning
from . import internals
from .internals import TESTED, Attributes, Internal

_RANGES = "indices and labels out of range are not checked"

INTERNALS: dict[str, Internal] = {
    "global_state": Internal(
        ("keras.src.backend.common.global_state",),
        "scopes, the seed, the call context and automatic names of layers are kept there",
        members=("get_global_attribute", "set_global_attribute"),
    ),
    "seed_generator": Internal(
        ("keras.src.random.seed_generator",),
        "the global seed generator is part of the state of a run",
        members=("global_seed_generator",),
    ),
    "core": Internal(
        ("keras.src.backend:ops.core", "keras.src.backend:core"),
        "patched by `steps/keras_control_flow.py`: branches and loops carry what they assign",
        members=("cond", "switch", "map", "scan", "while_loop", "fori_loop"),
    ),
    "unordered": Internal(
        ("keras.src.backend:ops.core", "keras.src.backend:core"),
        "patched like those of `core`: functions without an order of calls cannot assign",
        members=("vectorized_map", "associative_scan"),
        lost="assignments in keras.ops.vectorized_map and associative_scan are not checked",
    ),
    "exports": Internal(
        ("keras.src.backend:ops", "keras.src.backend"),
        "patched like those of `core`: since Keras 3.16, optimizers call it by this name",
        members=("cond",),
    ),
    "module_utils": Internal(
        ("keras.src.utils.module_utils",),
        "keeps Keras from importing TensorFlow to serialize on another backend",
        members=("tensorflow",),
        loses="speed",
        lost="saving a file imports TensorFlow where it is installed",
    ),
    "symbolic_build": Internal(
        ("keras:Model._symbolic_build",),
        "`fit` builds models, metrics and optimizers with it before the first step",
        ("(self, iterator=None, data_batch=None)",),
        lost="treadle.fit cannot train on JAX",
    ),
    "take": Internal(
        ("keras.src.backend:ops.numpy.take", "keras.src.backend:numpy.take"),
        "patched by `backends/ranges.py`: indices into variables are checked",
        ("(x, indices, axis=None)",),
        lost=_RANGES,
    ),
    "sparse_categorical_crossentropy": Internal(
        (
            "keras.src.backend:ops.nn.sparse_categorical_crossentropy",
            "keras.src.backend:nn.sparse_categorical_crossentropy",
        ),
        "patched by `backends/ranges.py`: labels are checked",
        ("(target, output, from_logits=False, axis=-1)",),
        lost=_RANGES,
    ),
    "loss_call": Internal(
        ("keras.losses:Loss.__call__",),
        "patched by `backends/ranges.py`: labels whose weight is zero are not checked",
        ("(self, y_true, y_pred, sample_weight=None)",),
        lost=_RANGES,
    ),
    "metric_update": Internal(
        ("keras.metrics:MeanMetricWrapper.update_state",),
        "patched by `backends/ranges.py`: labels whose weight is zero are not checked",
        ("(self, y_true, y_pred, sample_weight=None)",),
        lost=_RANGES,
    ),
    "masking": Internal(
        ("keras.src.backend.common.masking",),
        "the mask of predictions, whose labels are not checked where it is False, and which an "
        "examination that changes what a layer returns keeps",
        members=("get_keras_mask", "set_keras_mask"),
        lost=f"treadle.Supervised and treadle doctor cannot be used, and {_RANGES}",
    ),
    "layer_call": Internal(
        ("keras.layers:Layer.__call__",),
        "patched by `backends/records.py`: it records the outputs of layers",
        ("(self, *args, **kwargs)",),
        lost="the outputs of layers are not recorded",
    ),
    "moments": Internal(
        ("keras.src.backend:ops.nn.moments", "keras.src.backend:nn.moments"),
        "patched on several processes: the moments are those of the whole batch",
        ("(x, axes, keepdims=False, synchronized=False)",),
        lost="several processes cannot train together",
    ),
    "masked_moments": Internal(
        ("keras.layers:BatchNormalization._moments",),
        "patched on several processes: with a mask, it computes the moments itself",
        ("(self, inputs, mask)",),
        lost="several processes cannot train together",
    ),
    "promotion": Internal(
        ("keras.src.backend.common.dtypes",),
        "changed by `core/float64.py`: on JAX and PyTorch, what is float64 becomes float32",
        members=("BIT64_TO_BIT32_DTYPE",),
        lost='precision="float64" cannot be used',
    ),
    "backend_numpy": Internal(
        ("keras.src.backend:ops.numpy", "keras.src.backend:numpy"),
        "patched by `core/float64.py`: the mean of integers and booleans is float32",
        members=("mean",),
        lost='precision="float64" cannot be used',
    ),
    "apply": Internal(
        ("keras.optimizers:Optimizer.apply",),
        "patched on several processes: the gradients that they apply are compared, or averaged",
        ("(self, grads, trainable_variables=None)",),
        lost="several processes cannot train together",
    ),
}

ATTRIBUTES: dict[str, Attributes] = {
    "Variable": Attributes(
        ("_value", "_direct_assign"),
        "keras.src.backend.common.variables",
        "`value` depends on scopes, and `assign` checks and casts, which takes longer than a step; "
        "on JAX, `_value` is missing until the array is wanted",
    ),
    "Layer": Attributes(
        (
            *("_trainable_variables", "_non_trainable_variables", "_layers", "_metrics"),
            "_seed_generators",
        ),
        "keras.src.layers.layer",
        "the lists of a layer's own parts, which `core/keras_lists.py` reads: its variables that "
        "were created to be trained, also if it is frozen",
    ),
    "Layer with losses": Attributes(
        ("_loss_ids",),
        "keras.src.layers.layer",
        "losses of `add_loss` keep their layers when a scope hands them on",
    ),
    "Optimizer": Attributes(
        ("_trainable_variables", "_model_variables_moving_average"),
        "keras.src.optimizers.base_optimizer",
        "the variables that it trains, and their averages, in the same order",
    ),
    "Optimizer's settings": Attributes(
        ("_learning_rate", "_use_weight_decay"),
        "keras.src.optimizers.base_optimizer",
        "a schedule, where `learning_rate` is the present value, and what is decayed",
    ),
    "Optimizer of your own": Attributes(
        ("_get_variable_index",),
        "keras.src.optimizers.base_optimizer",
        "finds its slots by it, as Keras' own do",
    ),
    "Metric": Attributes(
        ("_direction",),
        "keras.src.metrics",
        "callbacks with mode='auto' get their mode from it, as under `compile`",
    ),
    "Model": Attributes(
        ("_compile_config",),
        "keras.src.trainers.trainer",
        "files saved by callbacks hold the configuration that `compile` would have stored",
    ),
    "Model's metrics": Attributes(
        ("_compile_metrics", "_compile_loss"),
        "keras.src.trainers.trainer",
        "the losses and metrics that `compile` made, and their classes, with which "
        "`treadle.Supervised` makes its own",
    ),
    "TensorBoard": Attributes(
        ("_should_trace",),
        "keras.src.callbacks.tensorboard",
        "a callback that profiles needs every batch",
    ),
    "SwapEMAWeights": Attributes(
        ("_ema_weights_in_model",),
        "keras.src.callbacks.swap_ema_weights",
        "whether the callback has swapped averages into the weights",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = INTERNALS[name].resolve()
    globals()[name] = found  # later reads do not come here
    return found


@cache
def _attribute() -> Any:
    return INTERNALS["global_state"].resolve().get_global_attribute


def stateless_scope() -> Any:
    """Return the innermost scope that holds values of variables, or None.

    Scopes are nested: an inner one starts with the values of the outer one.
    """
    return _attribute()("stateless_scope")


def in_symbolic_scope() -> bool:
    """Return whether Keras only computes shapes here: branches and loops are its own then."""
    return _attribute()("symbolic_scope") is not None


def device_of_scope() -> Any:
    """Return the device of the innermost `keras.device` on PyTorch, or None."""
    return _attribute()("torch_device")


def random_seed() -> int | None:
    """Return the seed of `keras.utils.set_random_seed`, or None; before Keras 3.10, of `setup`."""
    seed = _attribute()("global_random_seed")
    version = import_module("keras").__version__
    if seed is None and _numbers(version) < (3, 10):
        internals.warn_once(
            f"Keras {version} does not keep the seed of keras.utils.set_random_seed, so the order "
            "of shuffled data does not depend on it: use treadle.setup(seed=…)"
        )
    return seed


def global_seed_generator() -> Any:
    """Return the generator of unseeded `keras.random`; created without drawing from `random`.

    Otherwise models that are created later would start with other weights than without Treadle.
    """
    generator = _attribute()("global_seed_generator")
    if generator is None:
        before = random.getstate()
        generator = INTERNALS["seed_generator"].resolve().global_seed_generator()
        random.setstate(before)
    return generator


def set_random_seed(seed: int) -> None:
    """Set the seed, and let the global seed generator begin with it.

    Before Keras 3.13, `keras.utils.set_random_seed` does not reset the generator, so that unseeded
    `keras.random` would not repeat.
    """
    store = INTERNALS["global_state"].resolve().set_global_attribute
    store("global_random_seed", seed)
    store("global_seed_generator", None)


@cache
def multi_optimizers() -> Any:
    """Return the class `keras.optimizers.MultiOptimizer`, or no class before Keras 3.15."""
    import keras

    return getattr(keras.optimizers, "MultiOptimizer", ())


@cache
def compiled_classes() -> tuple[Any, Any]:
    """Return the classes of the losses and of the metrics that `compile` makes.

    Raises:
        BackendError: The installed version of Keras keeps them in another place.
    """
    import keras

    # With a name, since an automatic one would change those of the user's models.
    model = keras.Sequential(name="compiled")
    model.compile(None, "mse", metrics=["mse"], jit_compile=False)
    names = "_compile_loss", "_compile_metrics"
    if absent := [name for name in names if not hasattr(model, name)]:
        raise BackendError(
            f"Keras {keras.__version__} has no Model.{absent[0]}, so treadle.Supervised cannot be "
            f"used: install a version that Treadle was tested with, keras=={TESTED['keras']}.*"
        )
    loss, metrics = (type(getattr(model, name)) for name in names)
    return loss, metrics


def missing_entries(backend: str) -> list[str]:
    """Return what the installed Keras and framework lack of their registers, as sentences."""
    patches = import_module(f"treadle.backends.{backend}.patches")
    entries = [*INTERNALS.values(), *patches.INTERNALS.values()]
    return [text for entry in entries if (text := entry.missing())]


def warn_if_untested(version: str) -> None:
    """Warn if this version of Keras is newer than the newest one that the tests run with."""
    tested = internals.TESTED["keras"]
    if _numbers(version) > _numbers(tested):
        warnings.warn(
            f"Keras {version} is newer than the versions that Treadle was tested with (up to "
            f"{tested}): it may work differently",
            TreadleWarning,
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))  # also of 3.16rc1
