"""The source text that programs share: imports, and the classes and functions that they use.

The text of each feature stands only in programs that use it, so that their scripts stay short.
"""

from .program import Program

HEAD = """\
import shutil
import time

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle.checkpoint import Checkpoints
from treadle.hooks import Checkpoint, FinalModel, KerasCallbacks, LearningCurve, NonFinite
"""

HEAD_BY_HAND = """\
import keras
import numpy as np
from keras import layers

from tests.fuzz import byhand as treadle
from tests.fuzz.byhand import ops
"""

SETTINGS_IMPORTS = """\
from argparse import Namespace
from types import SimpleNamespace
"""

SETTINGS_CLASSES = """

class Settings:
    def __init__(self):
        self.scale, self.name = 1.0, "program"


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0
"""

ALWAYS = """
L2 = keras.regularizers.L2(0.01)
Adam, AdamW, Nadam = keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Nadam
SGD, RMSprop, Adagrad = keras.optimizers.SGD, keras.optimizers.RMSprop, keras.optimizers.Adagrad
falling = keras.optimizers.schedules.CosineDecay


def squares(y, out, sample_weight=None):
    each = ops.mean((ops.tanh(out) - y) ** 2, axis=-1)
    return ops.mean(each if sample_weight is None else each * sample_weight)


class SelfAttention(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        # With a seed: the layer would draw one each time it is built.
        seeded = keras.initializers.GlorotUniform(7)
        self.heads = layers.MultiHeadAttention(2, 3, kernel_initializer=seeded)

    def build(self, shape):
        self.heads.build(shape, shape)

    def call(self, x):
        return self.heads(x, x)


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)
"""

# `packed` gets the arrays by name, the inputs last: no structure has its keys in the order of the
# alphabet. The keys `x`, `y` and so on stand in the innermost dicts.
STRUCTURES = '''

class Named(NamedTuple):
    targets: Any
    nothing: Any
    inputs: Any


@dataclass
class Record:
    targets: Any
    nothing: Any
    inputs: Any


def opened(part):
    """Return the arrays of a structure by name, in the order in which they come."""
    if isinstance(part, dict):
        pairs = list(part.items())
    elif isinstance(part, Record):
        pairs = list(vars(part).items())
    elif isinstance(part, Named):
        pairs = list(zip(part._fields, part))
    else:
        pairs = list(enumerate(part))
    found = {}
    for key, value in pairs:
        if isinstance(value, (dict, list, tuple, Record)):
            found.update(opened(value))
        elif value is not None:
            found[key] = value
    return found


def packed(arrays, kind):
    names = [*arrays][::-1]
    first, last = {k: arrays[k] for k in names[:-1]}, {names[-1]: arrays[names[-1]]}
    return {
        "unsorted": lambda: {**first, **last},
        "ordered": lambda: OrderedDict([*first.items(), *last.items()]),
        "named": lambda: Named(first, None, last),
        "record": lambda: Record([first], None, last),
        "list": lambda: [first, None, [last]],
        "tuple": lambda: ((first, None), last),
        "nested": lambda: {"z": Record(first, {}, None), "b": (None, OrderedDict(last)), "a": None},
        "scalar": lambda: {"share": np.asarray(0.5, "float32"), **first, **last},
    }[kind]()
'''

STRUCTURES_IMPORTS = """\
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple
"""

DERIVED = '''
known = np.random.default_rng(5).normal(1.0, 2.0, size=(16, 4)).astype("float32")


class Scaled(layers.Layer):
    """Divides by the spread of data; keeps the reciprocal as a tensor."""

    def build(self, shape):
        self.spread = self.add_weight(shape=(4,), initializer="ones", trainable=False)
        self.finalize_state()

    def adapt(self, data):
        self.spread.assign(np.std(data, axis=0))
        self.finalize_state()

    def finalize_state(self):
        self.reciprocal = 1.0 / ops.convert_to_tensor(self.spread)

    def call(self, x):
        return x * self.reciprocal
'''

INNER_OPTIMIZERS = '''

class Lookahead(keras.optimizers.Optimizer):
    """After every second update of the inner optimizer, weights are mixed with slow ones."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.3)
        self.inner = inner

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        self.inner.apply(grads, trainable_variables)
        self.iterations.assign_add(1)
        due = self.iterations % 2 == 0
        for variable in trainable_variables:
            slow = self.slow[self._get_variable_index(variable)]
            kept, fast = ops.copy(slow), ops.copy(variable)  # by hand, a read is no value
            rate = ops.cast(self.learning_rate, fast.dtype)
            # Both first: by hand, PyTorch's tensor of a variable shows later assignments.
            mixed = ops.where(due, kept + rate * (fast - kept), kept)
            pulled = ops.where(due, fast + 0.1 * (kept - fast), fast)
            slow.assign(mixed)
            variable.assign(pulled)


class TwoSteps(keras.optimizers.Optimizer):
    """A step of one optimizer up the gradient, and one of another down."""

    def __init__(self, up, down):
        super().__init__(learning_rate=1.0)
        self.inside = {"up": up, "down": [down]}

    def build(self, variables):
        super().build(variables)
        self.inside["up"].build(variables)
        self.inside["down"][0].build(variables)

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        self.inside["up"].apply([-0.3 * g for g in grads], trainable_variables)
        self.inside["down"][0].apply(grads, trainable_variables)
        self.iterations.assign_add(1)
'''


OUTPUTS = """
def squares_of_each(y, out):
    return ops.mean((ops.tanh(out) - y) ** 2, axis=-1)
"""


MEMORIES = '''

class Remember(treadle.Hook):
    """Moves a weight after each of some steps, each time further."""

    def __init__(self, identity, network, place, amount, every, first=0, last=1000):
        self.identity, self.network, self.place, self.amount = identity, network, place, amount
        self.when = When(Span(every, "step"))
        self.steps_due, self.calls = range(first // every * every + every, last + 1, every), 0

    def steps(self, loop, logs):
        if loop.progress.step in self.steps_due:
            self.move(loop)

    def move(self, loop):
        self.calls += 1
        bias = getattr(loop.task, f"net{self.network}").layers[-1].bias
        values = np.array(ops.convert_to_numpy(bias))
        values[self.place] += self.amount * self.calls
        bias.assign(values)

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = state["calls"]
'''


def head(program: Program, task: bool) -> str:
    """Return the first lines of a program: its imports and what it shares with others."""
    lines = HEAD if task else HEAD_BY_HAND
    if program.settings != "attribute":
        lines = SETTINGS_IMPORTS + "\n" + lines
    if program.memories:
        lines += "from treadle.core.triggers import Span, When\n"
    if program.structured:
        lines = STRUCTURES_IMPORTS + "\n" + lines
    lines += f'\nFLOAT = "{"float64" if program.precision == "float64" else "float32"}"' + ALWAYS
    lines += MEMORIES if program.memories else ""
    lines += SETTINGS_CLASSES if program.settings in ("object", "slots") else ""
    lines += STRUCTURES if program.structured else ""
    lines += DERIVED if any(network.adapted for network in program.networks) else ""
    lines += "\n" + OUTPUTS if program.outputs is not None else ""
    nested = any("Lookahead" in x or "TwoSteps" in x for x in program.optimizers)
    return lines + (INNER_OPTIMIZERS if nested else "")
