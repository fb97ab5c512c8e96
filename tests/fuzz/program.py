"""A random program: a plain description of a task, its data, and how it is run."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

FEATURES = CLASSES = 4  # equal, so that any network may follow another one
ROWS = 4
TOKENS = 6

# One row per network input: what stands before the layers that the grammar draws.
FRONTS = {
    "vector": (),
    "tokens-flat": (f"layers.Embedding({TOKENS}, 3)", "layers.Flatten()"),
    "tokens-mean": (f"layers.Embedding({TOKENS}, 3)", "layers.GlobalAveragePooling1D()"),
    "convolution": (
        "layers.Reshape((4, 1))",
        'layers.Conv1D(3, 2, activation="tanh")',
        "layers.Flatten()",
    ),
    "image": (
        "layers.Reshape((2, 2, 1))",
        'layers.Conv2D(3, 2, padding="same", activation="softplus")',
        "layers.Flatten()",
    ),
    "lstm": ("layers.Reshape((4, 1))", "layers.LSTM(3)"),
    "gru": ("layers.Reshape((4, 1))", "layers.GRU(3)"),
    "attention": ("layers.Reshape((4, 1))", "SelfAttention()", "layers.Flatten()"),
}

LOSSES = {
    "mean-square": "keras.losses.MeanSquaredError()",
    "cross-entropy": "keras.losses.CategoricalCrossentropy(from_logits=True)",
    "huber": "keras.losses.Huber(0.5)",
    "own": "squares",
}

PREDICATES = {
    "every-second": "treadle.step() % 2 == 0",
    "but-each-third": "self.count % 3 != 1",
    "data": "ops.sum(batch[KEY][0]) > 0",
}

# How the batch of a form differs from {"x": float32 (rows, features), "y": int32 (rows,)}.
FORMS = {
    "plain": '"x" in batch and "w" not in batch and dtype_of(batch["x"]) == FLOAT',
    "renamed": '"z" in batch',
    "narrow": '"x" in batch and "w" not in batch and dtype_of(batch["x"]) == "float16"',
    "whole": '"x" in batch and "w" not in batch and dtype_of(batch["x"]) == "int32"',
    "weighted": '"w" in batch',
    "wide": '"d" in batch',
}

# What the arrays of a batch are in, and the test of its class. See `helpers.STRUCTURES`.
STRUCTURES = {
    "unsorted": "type(whole) is dict",
    "ordered": "type(whole) is OrderedDict",
    "named": "type(whole) is Named and whole.nothing is None",
    "record": "type(whole) is Record and type(whole.targets) is list",
    "list": "type(whole) is list and type(whole[2]) is list",
    "tuple": "type(whole) is tuple and whole[0][1] is None",
    "nested": '[*whole] == ["z", "b", "a"] and type(whole["b"][1]) is OrderedDict',
    "scalar": "type(whole) is dict and whole['share'].shape == ()",
}

# Functions of `keras.ops` that call a function with state, and where: before the objectives, or
# inside of them, where loops whose length may be any have no gradient on JAX.
CONTROLS = {
    "cond": ("outside", "inside"),
    "switch": ("outside", "inside"),
    "scan": ("outside", "inside"),
    "map": ("outside", "inside"),
    "fori_loop": ("outside",),
    "while_loop": ("outside",),
}
# What that function changes: a variable, the seed of a layer, a metric.
CONTROLLED = ("variable", "dropout", "metric")

# Keras callbacks, whose model and optimizer are those of network 0.
CALLBACKS = {
    "falling-rate": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)",
    "plateau": 'keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.1)',
    "stopping": 'keras.callbacks.EarlyStopping("loss", min_delta=0.2, restore_best_weights=True)',
    "averages": "keras.callbacks.SwapEMAWeights()",
}


@dataclass(frozen=True)
class Network:
    """A `keras.Sequential` from (rows, features) to (rows, classes).

    Attributes:
        front: A key of `FRONTS`.
        body: The layers between, as source text.
        built: It has an Input; else its first call builds it.
        frozen: The first layer that has weights is not trainable.
        regularized: The last layer has a kernel regularizer, whose loss the objective adds.
        average: A frozen copy of it follows by `treadle.blend`.
        adapted: `Normalization` or `Scaled`: it begins with such a layer, which has tensors that it
            derives from its variables.
    """

    front: str = "vector"
    body: tuple[str, ...] = ()
    built: bool = True
    frozen: bool = False
    regularized: bool = False
    average: bool = False
    adapted: str | None = None

    @property
    def layers(self) -> list[str]:
        last = f"layers.Dense({CLASSES}{', kernel_regularizer=L2' if self.regularized else ''})"
        shape = [f"keras.Input(({FEATURES},){self._dtype})"] if self.built else []
        first = {None: [], "Normalization": ["layers.Normalization()"], "Scaled": ["Scaled()"]}
        return [*shape, *first[self.adapted], *FRONTS[self.front], *self.body, last]

    @property
    def of_tokens(self) -> bool:
        return self.front.startswith("tokens")

    @property
    def _dtype(self) -> str:
        return ', dtype="int32"' if self.of_tokens else ""

    def has(self, *words: str) -> bool:
        return any(word in layer for layer in self.layers for word in words)


@dataclass(frozen=True)
class Part:
    """Something that a step does: nearly always, how a network learns.

    Attributes:
        kind: `minimize`, `gradients`, `penalty`, `inner`, `rows`, `accumulate`, `chain`, `parts`.
        network: Its number. With `chain`, the next one follows it.
        loss: A key of `LOSSES`.
        only: A key of `PREDICATES`: elsewhere the network is only looked at.
        by_keras: With `only`: the branches are those of `keras.ops.cond`.
        structured: Functions of the step take and return structures, not tensors.
    """

    kind: str = "minimize"
    network: int = 0
    loss: str = "mean-square"
    only: str | None = None
    by_keras: bool = False
    structured: bool = False


@dataclass(frozen=True)
class Control:
    """A function of `keras.ops` that calls a function with state.

    Attributes:
        kind: A key of `CONTROLS`.
        place: `outside` changes the inputs, `inside` the outputs within the first objective.
        content: One of `CONTROLLED`.
    """

    kind: str = "cond"
    place: str = "outside"
    content: str = "variable"


@dataclass(frozen=True)
class Outputs:
    """A model of two outputs that learns by `treadle.Supervised.train_step`.

    Attributes:
        kind: `list` or `dict`: what the model returns.
        losses: `one` for all outputs, one for `each`, or for `some`, with None in a list.
        optimizer: Its source text.
        weights: There are loss weights.
        metrics: None, `plain` or `weighted`.
        sample_weights: Batches hold sample weights.
        regularized: A layer adds a loss.
    """

    kind: str = "dict"
    losses: str = "each"
    optimizer: str = "SGD(0.1)"
    weights: bool = False
    metrics: str | None = None
    sample_weights: bool = False
    regularized: bool = False


@dataclass(frozen=True)
class Form:
    """One structure of batches, and what the step does with it.

    Attributes:
        kind: A key of `FORMS`.
        parts: What is done.
        noise: `seeded`, `unseeded`, or None: random numbers that the step draws.
        structure: A key of `STRUCTURES`; None for a dict whose keys are in order.
        controls: Functions of `keras.ops` that the step calls.
    """

    kind: str = "plain"
    parts: tuple[Part, ...] = (Part(),)
    noise: str | None = None
    structure: str | None = None
    controls: tuple[Control, ...] = ()


# Where the task holds the factor of its losses: the statement that makes it, and its path.
SETTINGS = {
    "attribute": ("self.scale = 1.0", "scale"),
    "namespace": ("self.settings = SimpleNamespace(scale=1.0)", "settings.scale"),
    "arguments": ("self.settings = Namespace(scale=1.0)", "settings.scale"),
    "object": ("self.settings = Settings()", "settings.scale"),
    "slots": ("self.settings = Slotted()", "settings.scale"),
    "dict": ('self.settings = {"scale": 1.0}', 'settings["scale"]'),
    "nested": (
        'self.settings = [SimpleNamespace(inner={"scale": 1.0})]',
        'settings[0].inner["scale"]',
    ),
}


@dataclass(frozen=True)
class Change:
    """What a hook changes after a step.

    Attributes:
        step: After this one, from 1.
        code: A statement about `task`.
        constant: It changes a Python value, not a variable.
    """

    step: int
    code: str
    constant: bool


@dataclass(frozen=True)
class Memory:
    """A hook with a state: it moves a weight of a last layer, each time further.

    Attributes:
        identity: What distinguishes it from the others.
        network: The number of the network.
        amount: How far it moves the weight the first time.
        every: After so many steps.
        present: `always`; only `before` the process is killed; only `after` that.
    """

    identity: str
    network: int = 0
    amount: float = 0.01
    every: int = 1
    present: str = "always"


@dataclass(frozen=True)
class Second:
    """A second source of the loop, in calls of their own or in the body of `loop.epochs`.

    Attributes:
        order: For each batch of an epoch the number of its form and its rows.
        source: As that of the program.
        shuffled: With `arrays`: each epoch has its own order.
    """

    order: tuple[tuple[int, int], ...] = ((0, ROWS),) * 2
    source: str = "list"
    shuffled: bool = False


@dataclass(frozen=True)
class Visit:
    """Where a step gets its batch from.

    Attributes:
        call: The number of the call.
        source: 0, or 1 for the second one.
        epoch: The number of the epoch.
        batch: The number of the batch in an epoch of the source.
    """

    call: int
    source: int
    epoch: int
    batch: int


@dataclass(frozen=True)
class Program:
    """A task, its data, and how it is run.

    Attributes:
        seed: Of weights, data and everything drawn.
        networks: What learns.
        optimizers: One for each network, as source text.
        forms: The structures of batches.
        order: For each batch of an epoch the number of its form and its rows.
        source: `list`, `function`, or `arrays` (of the first form, all rows joined).
        shuffled: With `arrays`: each epoch has its own order.
        second: Another source, or None.
        changing: With `arrays`: they are given with `changing=True`, and change between calls, or
            in each epoch where `looped`.
        retried: With `function`: it raises an error once, at this batch, and the call is repeated.
        calls: One after the other: how long and on which source. ("epochs", 2, 0) and
            ("steps", 5, 0) are calls of `fit`; ("break", 3, 0) is a loop over `loop.steps` that
            ends after three steps, or with the epoch; ("both", 1, 0) one over `loop.epochs` whose
            body reads this source and then the other one.
        looped: `loop.epochs` and `loop.steps` train instead of `fit`.
        changes: What hooks change.
        memories: Hooks with a state, which may be added and removed when the run is resumed.
        moved: In the process that is killed, hooks with a state are in the opposite order, behind
            `Checkpoint`.
        callback: A key of `CALLBACKS`, or None.
        bad: Batches that hold NaN, by their position in an epoch.
        nonfinite: `skip` or `rollback`; None: nothing is expected to be NaN.
        precision: A dtype policy.
        scale: The first loss scale, with `mixed_float16`.
        settings: A key of `SETTINGS`.
        outputs: A model of several outputs that learns in each step, too.
        validated: There is validation after each epoch.
        window: `Options(window=…)` of the first run.
        other: The same of the run that it is held against.
        on_device: `Options(data_on_device=…)`.
        jit: `Options(jit=…)`, on TensorFlow.
        every: A checkpoint is saved after so many steps.
        killed: The run is killed after this step, from 1.
    """

    seed: int = 0
    networks: tuple[Network, ...] = (Network(),)
    optimizers: tuple[str, ...] = ("SGD(0.1)",)
    forms: tuple[Form, ...] = (Form(),)
    order: tuple[tuple[int, int], ...] = ((0, ROWS),) * 3
    source: str = "list"
    shuffled: bool = False
    second: Second | None = None
    changing: bool = False
    retried: int | None = None
    calls: tuple[tuple[str, int, int], ...] = (("epochs", 2, 0),)
    looped: bool = False
    changes: tuple[Change, ...] = ()
    memories: tuple[Memory, ...] = ()
    moved: bool = False
    callback: str | None = None
    bad: tuple[int, ...] = ()
    nonfinite: str | None = None
    precision: str = "float32"
    scale: float = 2.0**10
    settings: str = "attribute"
    outputs: Outputs | None = None
    validated: bool = False
    window: int | None = None
    other: int | None = 1
    on_device: bool | None = None
    jit: bool | None = None
    every: int = 2
    killed: int = 3

    @property
    def steps(self) -> int:
        """The number of steps if no batch is skipped."""
        return len(self.visits_of_steps)

    @property
    def saved(self) -> int:
        """The newest step that is saved when hooks run after the step of the kill, if all is well.

        That is, if no batch is skipped.
        """
        return (self.killed - 1) // self.every * self.every

    @property
    def visits_of_steps(self) -> list[Visit]:
        """Where each step gets its batch from, if every epoch has all batches of its source."""
        lengths = [len(source.order) for source in self.sources]
        return self.visits(lambda source, _: lengths[source])

    @property
    def sources(self) -> "list[Program | Second]":
        """What has an order, a kind of source, and shuffles."""
        return [self] if self.second is None else [self, self.second]

    def visits(self, length: Callable[[int, int], int]) -> list[Visit]:
        """Return where each step gets its batch from.

        The same source continues where it was. Another one ends the unfinished epoch.

        Args:
            length: The number of batches of a source in an epoch.
        """
        found: list[Visit] = []
        epoch = at = last = 0
        for number, (unit, count, first) in enumerate(self.calls):
            by_steps = unit in ("steps", "break")
            if at and first != last:
                epoch, at = epoch + 1, 0
            while count:
                for last in (first, 1 - first) if unit == "both" else (first,):
                    whole = length(last, epoch)
                    taken = min(whole - at, count) if by_steps else whole - at
                    found += [Visit(number, last, epoch, at + i) for i in range(taken)]
                    at = (at + taken) % whole
                count -= taken if by_steps else 1
                epoch += at == 0
                if unit == "break":
                    break
        return found

    @property
    def half(self) -> bool:
        """Whether layers compute in half precision."""
        return self.precision.startswith("mixed")

    @property
    def structured(self) -> bool:
        """Whether there are structures other than dicts whose keys are in order."""
        return any(
            form.structure is not None or any(part.structured for part in form.parts)
            for form in self.forms
        )

    def used(self) -> set[int]:
        """The networks that are trained."""
        parts = [part for form in self.forms for part in form.parts]
        following = {part.network + 1 for part in parts if part.kind == "chain"}
        return {part.network for part in parts} | following

    def kinds_of(self, network: int) -> set[str]:
        """The kinds of the parts that train a network."""
        parts = [part for form in self.forms for part in form.parts]
        following = {
            "chain" for part in parts if part.kind == "chain" and part.network + 1 == network
        }
        return {part.kind for part in parts if part.network == network} | following


def shown(program: Any) -> str:
    """Return a description as Python text, without what has its default."""
    if isinstance(program, tuple):
        inner = ", ".join(shown(part) for part in program)
        return f"({inner}{',' if len(program) == 1 else ''})"
    if not is_dataclass(program):
        return repr(program)
    given = [
        f"{field.name}={shown(getattr(program, field.name))}"
        for field in fields(program)
        if getattr(program, field.name) != field.default
    ]
    return f"{type(program).__name__}({', '.join(given)})"
