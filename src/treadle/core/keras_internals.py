"""The register of the private parts of Keras that Treadle uses, each with the reason.

Keras promises nothing about names below `keras.src`. Treadle reads them only through this module,
and `tests/test_keras_internals.py` fails by name when one of them changes. Parts of one of Keras'
backends are in the register of that backend, `backends/<name>/patches.py`.

Attributes of this module are imported when they are first used, since importing Keras fixes its
backend: `keras_internals.global_state` is the module `keras.src.backend.common.global_state`.
"""

import re
import warnings
from typing import Any

from ..errors import TreadleWarning
from . import internals
from .internals import KERAS, Attribute, Internal

INTERNALS: dict[str, Internal] = {
    "plot_image_gallery": Internal(
        "keras.src.visualization.plot_image_gallery",
        "commands import Matplotlib where Keras uses it, and not already with Keras",
        f"{KERAS}/visualization/plot_image_gallery.py",
        members=("plt",),
    ),
    "get_stateless_scope": Internal(
        "keras.src.backend.common.stateless_scope:get_stateless_scope",
        "scopes are nested: an inner one starts with the values of the outer one",
        f"{KERAS}/backend/common/stateless_scope.py",
        "()",
    ),
    "in_stateless_scope": Internal(
        "keras.src.backend.common.stateless_scope:in_stateless_scope",
        "variables are read from a scope if there is one",
        f"{KERAS}/backend/common/stateless_scope.py",
        "()",
    ),
    "in_symbolic_scope": Internal(
        "keras.src.backend.common.symbolic_scope:in_symbolic_scope",
        "branches and loops are Keras' own where it only computes shapes",
        f"{KERAS}/backend/common/symbolic_scope.py",
        "()",
    ),
    **{
        f"core.{name}": Internal(
            f"keras.src.backend:core.{name}",
            "patched by `steps/keras_control_flow.py`: variables that are assigned are carried",
            f"{KERAS}/ops/core.py",
            signature,
        )
        for name, signature in {
            "cond": "(pred, true_fn, false_fn)",
            "switch": "(index, branches, *operands)",
            "map": "(f, xs)",
            "scan": "(f, init, xs=None, length=None, reverse=False, unroll=1)",
            "while_loop": "(cond, body, loop_vars, maximum_iterations=None)",
            "fori_loop": "(lower, upper, body_fun, init_val)",
            "vectorized_map": "(function, elements)",
            "associative_scan": "(f, elems, reverse=False, axis=0)",
        }.items()
    },
    "global_state": Internal(
        "keras.src.backend.common.global_state",
        "the call context and the automatic names of layers are kept there",
        f"{KERAS}/backend/common/global_state.py",
        members=("get_global_attribute", "set_global_attribute"),
    ),
    "KerasVariable": Internal(
        "keras.src.backend.common:KerasVariable",
        "variables that a step creates while it is captured are recorded",
        f"{KERAS}/backend/common/variables.py",
        "(initializer, shape=None, dtype=None, trainable=True, autocast=True, "
        "aggregation='none', synchronization='auto', name=None, layout=None, **kwargs)",
    ),
    "seed_generator": Internal(
        "keras.src.random.seed_generator",
        "the global seed generator is part of the state of a run",
        f"{KERAS}/random/seed_generator.py",
        members=("GLOBAL_SEED_GENERATOR", "draw_seed", "global_seed_generator"),
    ),
    "rng_utils": Internal(
        "keras.src.utils.rng_utils",
        "seeding without importing TensorFlow, which `keras.utils.set_random_seed` does",
        f"{KERAS}/utils/rng_utils.py",
        members=("GLOBAL_RANDOM_SEED", "get_random_seed"),
    ),
    "module_utils": Internal(
        "keras.src.utils.module_utils",
        "keeps Keras from importing TensorFlow to serialize on another backend",
        f"{KERAS}/utils/module_utils.py",
        members=("tensorflow",),
    ),
    "compile_utils": Internal(
        "keras.src.trainers.compile_utils",
        "the losses and metrics of `treadle.Supervised` are those that `compile` makes",
        f"{KERAS}/trainers/compile_utils.py",
        members=("CompileLoss", "CompileMetrics", "get_loss"),
    ),
    "SerializableDict": Internal(
        "keras.src.saving.serialization_lib:SerializableDict",
        "files saved by callbacks hold the configuration that `compile` would have stored",
        f"{KERAS}/saving/serialization_lib.py",
        "(**config)",
    ),
    "core": Internal(
        "keras.src.backend:core",
        "patched by `steps/keras_control_flow.py`, see `core.cond`",
        f"{KERAS}/ops/core.py",
    ),
    "ops": Internal(
        "keras.src.ops",
        "patched by `doctor/preflight`: an examination records the cross-entropies that the "
        "classes and functions of `keras.losses` call here",
        f"{KERAS}/ops/nn.py",
        members=(
            "sparse_categorical_crossentropy",
            "categorical_crossentropy",
            "binary_crossentropy",
        ),
    ),
    "take": Internal(
        "keras.src.backend:numpy.take",
        "patched by `backends/ranges.py`: indices into variables are checked",
        f"{KERAS}/ops/numpy.py",
        "(x, indices, axis=None)",
    ),
    "sparse_categorical_crossentropy": Internal(
        "keras.src.backend:nn.sparse_categorical_crossentropy",
        "patched by `backends/ranges.py`: labels are checked",
        f"{KERAS}/ops/nn.py",
        "(target, output, from_logits=False, axis=-1)",
    ),
    "loss_call": Internal(
        "keras.src.losses.loss:Loss.__call__",
        "patched by `backends/ranges.py`: labels whose weight is zero are not checked",
        f"{KERAS}/losses/loss.py",
        "(self, y_true, y_pred, sample_weight=None)",
    ),
    "metric_update": Internal(
        "keras.src.metrics.reduction_metrics:MeanMetricWrapper.update_state",
        "patched by `backends/ranges.py`: labels whose weight is zero are not checked",
        f"{KERAS}/metrics/reduction_metrics.py",
        "(self, y_true, y_pred, sample_weight=None)",
    ),
    "get_keras_mask": Internal(
        "keras.src.backend:get_keras_mask",
        "the mask of predictions, whose labels are not checked where it is False",
        f"{KERAS}/backend/common/masking.py",
        "(x)",
    ),
    "set_keras_mask": Internal(
        "keras.src.backend:set_keras_mask",
        "an examination that changes what a layer returns keeps its mask",
        f"{KERAS}/backend/common/masking.py",
        "(x, mask)",
    ),
    "layer_call": Internal(
        "keras.src.layers.layer:Layer.__call__",
        "patched by `backends/records.py`: it records the outputs of layers",
        f"{KERAS}/layers/layer.py",
        "(self, *args, **kwargs)",
    ),
    "masked_moments": Internal(
        "keras.src.layers.normalization.batch_normalization:BatchNormalization._moments",
        "patched on several processes: with a mask, it computes the moments itself",
        f"{KERAS}/layers/normalization/batch_normalization.py",
        "(self, inputs, mask)",
    ),
    "promotion": Internal(
        "keras.src.backend.common.dtypes",
        "changed by `core/float64.py`: on JAX and PyTorch, what is float64 becomes float32",
        f"{KERAS}/backend/common/dtypes.py",
        members=("BIT64_TO_BIT32_DTYPE",),
    ),
    "backend_numpy": Internal(
        "keras.src.backend:numpy",
        "patched by `core/float64.py`: the mean of integers and booleans is float32",
        f"{KERAS}/ops/numpy.py",
        members=("mean",),
    ),
    "apply": Internal(
        "keras.src.optimizers.base_optimizer:BaseOptimizer.apply",
        "patched on several processes: the gradients that they apply are compared, or averaged",
        f"{KERAS}/optimizers/base_optimizer.py",
        "(self, grads, trainable_variables=None)",
    ),
}

_VARIABLE = f"{KERAS}/backend/common/variables.py"
_LAYER = f"{KERAS}/layers/layer.py"
_OPTIMIZER = f"{KERAS}/optimizers/base_optimizer.py"

ATTRIBUTES: dict[str, Attribute] = {
    "_value": Attribute(
        "Variable", "`value` reads from a scope, and this the variable itself", _VARIABLE
    ),
    "_initializer": Attribute(
        "Variable", "the value of a variable that is created inside a scope", _VARIABLE
    ),
    "_layout": Attribute(
        "Variable", "where the value lies on several devices, which Keras sets once", _VARIABLE
    ),
    "_reduction_axes": Attribute(
        "BatchNormalization",
        "the axes over which several processes compute the moments of a masked batch",
        f"{KERAS}/layers/normalization/batch_normalization.py",
    ),
    "_dtype": Attribute("Variable", "`dtype` depends on the autocast scope", _VARIABLE),
    "_loss_ids": Attribute(
        "Layer", "losses of `add_loss` keep their layers when a scope hands them on", _LAYER
    ),
    "_losses": Attribute(
        "Layer", "losses of `add_loss` keep their layers when a scope hands them on", _LAYER
    ),
    "_layers": Attribute("Layer", "layers that no attribute holds", _LAYER),
    "_flatten_layers": Attribute("Layer", "the layers inside of a layer, at any depth", _LAYER),
    "_metrics": Attribute("Layer", "metrics that no attribute holds", _LAYER),
    "_seed_generators": Attribute("Layer", "seed generators that no attribute holds", _LAYER),
    "_non_trainable_variables": Attribute(
        "Layer", "the layer's own variables, without those of inner layers", _LAYER
    ),
    "_trainable_variables": Attribute(
        "Layer and Optimizer",
        "a layer's own variables, and the variables that an optimizer was built with",
        _LAYER,
    ),
    "_operations": Attribute(
        "Functional",
        "distinguishes functional models from other layers without importing their class",
        f"{KERAS}/ops/function.py",
    ),
    "_nodes": Attribute(
        "Functional",
        "ids of the operations, which `frozen_copy` replaces in a copy",
        f"{KERAS}/ops/function.py",
    ),
    "_autocast": Attribute("Variable", "copies of variables cast alike", _VARIABLE),
    "_learning_rate": Attribute(
        "Optimizer", "`learning_rate` gives the current value, and this the schedule", _OPTIMIZER
    ),
    "_use_weight_decay": Attribute(
        "Optimizer", "which variables are decayed, after exclusions", _OPTIMIZER
    ),
    "_iterations": Attribute(
        "Optimizer", "`iterations` of a wrapping optimizer is that of the inner one", _OPTIMIZER
    ),
    "_model_variables_moving_average": Attribute(
        "Optimizer", "averages of weights have no public name", _OPTIMIZER
    ),
    "_tracker": Attribute(
        "Optimizer", "unlocked to set a learning rate that was a variable before", _OPTIMIZER
    ),
    "_track_variable": Attribute(
        "Optimizer", "registers a learning rate that was a variable before", _OPTIMIZER
    ),
    "_get_variable_index": Attribute(
        "Optimizer", "an optimizer of your own finds its slots by it, as Keras' own do", _OPTIMIZER
    ),
    "_compile_config": Attribute(
        "Model",
        "files saved by callbacks hold the configuration that `compile` would have stored",
        f"{KERAS}/trainers/trainer.py",
    ),
    "_direction": Attribute(
        "Metric",
        "callbacks with mode='auto' get their mode from it, as under `compile`",
        f"{KERAS}/metrics/metric.py",
    ),
    "_fn": Attribute(
        "MeanMetricWrapper",
        "`accuracy` of a loss by name is one of several functions",
        f"{KERAS}/metrics/reduction_metrics.py",
    ),
    "_fn_kwargs": Attribute(
        "MeanMetricWrapper",
        "the threshold of an accuracy",
        f"{KERAS}/metrics/reduction_metrics.py",
    ),
    "_built": Attribute(
        "AUC",
        "whether a metric has made its variables, which a branch may be the first to do",
        f"{KERAS}/metrics/confusion_metrics.py",
    ),
    "_from_logits": Attribute(
        "AUC", "whether its outputs are logits", f"{KERAS}/metrics/confusion_metrics.py"
    ),
    "_should_trace": Attribute(
        "TensorBoard",
        "a callback that profiles needs every batch",
        f"{KERAS}/callbacks/tensorboard.py",
    ),
    "_is_default": Attribute(
        "Callback method",
        "Keras marks its own empty methods, which need not be called",
        f"{KERAS}/utils/python_utils.py",
    ),
    "_ema_weights_in_model": Attribute(
        "SwapEMAWeights",
        "whether the callback has swapped averages into the weights",
        f"{KERAS}/callbacks/swap_ema_weights.py",
    ),
    "_inner_optimizers": Attribute(
        "MultiOptimizer",
        "the optimizers of a `keras.optimizers.MultiOptimizer`",
        f"{KERAS}/optimizers/multi_optimizer.py",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = INTERNALS[name].resolve()
    globals()[name] = found  # later reads do not come here
    return found


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
