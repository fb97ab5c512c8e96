"""The conformance kit: checks that your own task keeps Treadle's guarantees.

The checks are plain functions that raise `AssertionError`, for use in any test runner:

- `fused_equals_unfused`: the results are bit-for-bit equal, however many steps run as one compiled
  call;
- `compiled_equals_eager`: the compiled step computes the same values as the eager step;
- `resumed_equals_uninterrupted`: a run that is killed and resumed equals an uninterrupted run;
- `accumulated_equals_large_batch`: accumulating gradients over several batches equals one update
  with a large batch;
- `run_steps`, `save_trace`, `load_trace`, `agree`: the task computes the same values on another
  backend, in a separate process, from the same initial weights.

Each check gets a function without arguments (`make_task`) that creates the task, so that it starts
with a fresh one. The random seed is set before each call.

Example:
    >>> import keras, numpy as np, treadle
    >>> from treadle.testing import compiled_equals_eager, fused_equals_unfused
    >>> def make_task():
    ...     model = keras.Sequential([keras.layers.Dense(2)])
    ...     return treadle.Supervised(model, "mean_squared_error", "sgd")
    >>> batches = [(np.full((4, 3), i, "float32"), np.ones((4, 2), "float32")) for i in range(3)]
    >>> fused_equals_unfused(make_task, batches)
    >>> compiled_equals_eager(make_task, batches)
"""

from typing import TYPE_CHECKING

from ..core.lazy import lazy

if TYPE_CHECKING:
    from .checks import accumulated_equals_large_batch as accumulated_equals_large_batch
    from .checks import compiled_equals_eager as compiled_equals_eager
    from .checks import fused_equals_unfused as fused_equals_unfused
    from .resuming import resumed_equals_uninterrupted as resumed_equals_uninterrupted
    from .running import run_steps as run_steps
    from .running import same_start as same_start
    from .trace import Trace as Trace
    from .trace import agree as agree
    from .trace import load_trace as load_trace
    from .trace import save_trace as save_trace

__getattr__, __dir__, __all__ = lazy(__name__)
