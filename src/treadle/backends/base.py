"""The backend interface, and the selection of the running backend.

Defines the protocol `Backend`, and what all backends share: `Scope`, in which variables take other
values temporarily, and `StepContext`, the information about the running step.
"""

import importlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import keras
from keras import ops

from ..core.keras_internals import get_stateless_scope, warn_if_untested
from ..core.options import Options
from .plans import Facts, Plan
from .window import Window

Variable = Any  # a keras.Variable, or the framework's own variable in a native task
Tensor = Any
Losses = dict[str, Tensor]


class Scope(keras.StatelessScope):
    """A stateless scope: variables take its values, and assignments stay inside it.

    Scopes nest: a value that a scope does not hold is looked up in the enclosing scope, and finally
    in the variable itself. Nested `keras.StatelessScope`s do not do this.

    Attributes:
        assigned: Variables that were assigned inside, by id.
        foreign: Variables that were read but are in no scope, by id: they would be constants of a
            compiled step.
        losses: The losses that layers passed to `add_loss`, here or in the enclosing scope.
    """

    def __init__(
        self,
        values: Iterable[tuple[Variable, Tensor]] = (),
        differentiated: bool = False,
    ) -> None:
        super().__init__(collect_losses=True)
        pairs = list(values)
        self._holds = {id(variable): variable for variable, _ in pairs}  # keeps the ids alive
        self.state_mapping = {id(variable): value for variable, value in pairs}
        self._leaves = dict(self.state_mapping) if differentiated else {}
        self.assigned: dict[int, Variable] = {}
        self.foreign: dict[int, Variable] = {}

    def __enter__(self) -> "Scope":
        """Make this the current scope."""
        super().__enter__()
        if self.original_scope is not None:
            self.losses = list(self.original_scope.losses)
        return self

    def get_current_value(self, variable: Variable) -> Tensor:
        """Return the innermost value of a variable; unlike in Keras' own scope, never None."""
        value = self._held(variable)
        if value is not None:
            return value
        self.foreign[id(variable)] = variable
        if (
            variable._value is None
        ):  # created in this scope: Keras initializes it at the scope's end
            return variable._initializer(variable.shape, dtype=variable._dtype)
        return variable._value

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        """Store an assigned value.

        A variable that is being differentiated keeps its gradient if the objective assigns it, as
        spectral normalization does: the loss is then differentiated at the new value, as with
        in-place assignments.
        """
        variable, value = update
        value = ops.stop_gradient(value)  # in-place assignments carry no gradient either
        leaf = self._leaves.get(id(variable))
        if leaf is not None:
            value = value + (leaf - ops.stop_gradient(leaf))
        self._holds[id(variable)] = variable
        self.assigned[id(variable)] = variable
        self.state_mapping[id(variable)] = value

    def changed(self) -> dict[int, tuple[Variable, Tensor]]:
        """Return `{id: (variable, value)}` of the variables that were assigned inside."""
        return {key: (v, self.state_mapping[key]) for key, v in self.assigned.items()}

    def held(self) -> list[tuple[Variable, Tensor]]:
        """Return all `(variable, value)` pairs of this scope and the enclosing ones."""
        outer = self.original_scope
        found = {id(v): (v, x) for v, x in outer.held()} if isinstance(outer, Scope) else {}
        found |= {key: (v, self.state_mapping[key]) for key, v in self._holds.items()}
        return list(found.values())

    def _held(self, variable: Variable) -> Tensor | None:
        value = self.state_mapping.get(id(variable))
        outer = self.original_scope
        if value is None and isinstance(outer, Scope):
            value = outer._held(variable)
        return value


def hand_outward(changed: Mapping[int, tuple[Variable, Tensor]], keep: Iterable[int] = ()) -> None:
    """Assign an inner scope's changes in the enclosing scope or to the variables, except `keep`."""
    kept = set(keep)
    for key, (variable, value) in changed.items():
        if key not in kept:
            variable.assign(value)


def hand_losses(inner: Scope) -> None:
    """Pass the `add_loss` losses of an inner scope to the enclosing one, or to their layers."""
    outer = get_stateless_scope()
    if outer is not None:
        outer.losses[:] = inner.losses
        return
    for loss in inner.losses:
        for layer in context().layers:
            if id(loss) in layer._loss_ids:
                layer._losses.append(loss)


@dataclass
class Build:
    """The findings of an abstract run of a step.

    Attributes:
        applied: Optimizers whose `apply` was called, each with its variables and the number of
            gradients.
        read: Variables that were read, by id.
        written: Variables that were assigned, by id.
        differentiated: Whether `gradients` was called, so that the step is portable, not native.
        settled: Ids of variables that the step already uses for batches of other shapes: they must
            not be replaced.
    """

    applied: list[tuple[Any, list[Variable], int]] = field(default_factory=lambda: [])
    read: dict[int, Variable] = field(default_factory=lambda: {})
    written: dict[int, Variable] = field(default_factory=lambda: {})
    differentiated: bool = False
    settled: frozenset[int] = frozenset()


class Recorder(Protocol):
    """Records gradients and the outputs of layers, in steps that run eagerly.

    Some frameworks have no concrete values inside an objective. Records made there are returned
    from the differentiation as auxiliary outputs, which makes their values concrete.
    """

    def begin(self) -> None:
        """Start the record of an objective."""
        ...

    def taken(self) -> Any:
        """Return the record since `begin`: a structure of tensors and strings."""
        ...

    def give(self, met: Any) -> None:
        """Add a record returned by `taken`, now with concrete values."""
        ...

    def gradients(self, paths: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Record the gradients that `treadle.gradients` returns for these variables."""
        ...


@dataclass
class StepContext:
    """Information about the running step.

    Attributes:
        number: The step's number, an integer tensor.
        examples: The number of examples in its batch.
        build: The object that collects the findings of an abstract run; None in a real run.
        layers: All layers of the state, to which `add_loss` losses belong.
        path_of: A function that returns a variable's path.
        checked: Whether to check the ownership of phases.
        unowned: Ids of unowned variables, which any phase may change: metrics, seeds.
        violations: Messages of violated checks, each with a boolean tensor that is true if the
            violation happened.
        depth: The number of enclosing `gradients` calls.
        inside: The number of enclosing objectives, branches and mapped functions.
        loss_scale: The `treadle.LossScale` that losses are multiplied by, or None.
        recorder: The recorder of gradients and layer outputs, or None.
    """

    number: Any = 0
    examples: int = 1
    build: Build | None = None
    layers: Sequence[Any] = ()
    variables: Mapping[str, Variable] = field(default_factory=lambda: {})
    path_of: Callable[[Variable], str] = lambda variable: str(variable.path)
    checked: bool = False
    unowned: frozenset[int] = frozenset()
    violations: list[tuple[str, Tensor]] = field(default_factory=lambda: [])
    depth: int = 0
    inside: int = 0
    loss_scale: Any = None
    recorder: Recorder | None = None


_running = threading.local()


def context() -> StepContext:
    """Return the running step's context, or a default one outside of a loop."""
    stack: list[StepContext] = getattr(_running, "stack", [])
    if stack:
        return stack[-1]
    if not hasattr(_running, "bare"):  # one object per thread: nested gradients count their depth
        _running.bare = StepContext()
    return _running.bare


def in_step() -> bool:
    """Return whether a step is running in this thread."""
    return bool(getattr(_running, "stack", []))


@contextmanager
def running(step: StepContext) -> Generator[StepContext]:
    """Make `step` the running step's context."""
    if not hasattr(_running, "stack"):
        _running.stack = []
    step.recorder = getattr(_running, "recorder", None)
    _running.stack.append(step)
    try:
        yield step
    finally:
        _running.stack.pop()


@contextmanager
def recorded_by(recorder: Recorder) -> Generator[None]:
    """Attach a recorder to the steps that run uncompiled in this thread inside this context."""
    _running.recorder = recorder
    try:
        yield
    finally:
        _running.recorder = None


@contextmanager
def unrecorded() -> Generator[None]:
    """Pause recording: branches and mapped functions may be traced, without concrete values."""
    step = context()
    recorder, step.recorder = step.recorder, None
    try:
        yield
    finally:
        step.recorder = recorder


@contextmanager
def deeper() -> Generator[bool]:
    """Enter a `gradients` call; yields whether it is nested in another one."""
    step = context()
    step.depth += 1
    try:
        yield step.depth > 1
    finally:
        step.depth -= 1


class Outputs(Protocol):
    """The outputs of a window's steps, which may still be running."""

    @property
    def seconds(self) -> float:
        """The duration of the steps; valid after `fetch`."""
        ...

    @property
    def ended(self) -> float:
        """The time when the steps ended, by the monotonic clock; valid after `fetch`."""
        ...

    def running(self) -> bool:
        """Return whether the steps are still running."""
        ...

    def fetch(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Wait, and return values and explicit weights per name, each (steps,), and violations.

        Until it returns, the state is undefined; afterwards it is the state after the last step.
        """
        ...


@dataclass(frozen=True)
class Distribution:
    """A strategy that distributes training over devices.

    Attributes:
        strategy: The name of its class.
        remedy: What to do instead, for messages.
        variable: A variable that was created under the strategy; None if it comes from a context
            or a setting.
    """

    strategy: str
    remedy: str
    variable: Variable | None = None


class Executor(Protocol):
    """Runs a step, compiled or not, for the batches of a window in order.

    All batches have equal structure, shapes and dtypes.

    Attributes:
        plan: The execution plan; it is set before anything is compiled.
        whole: Whether a window that fails leaves the state unchanged.
    """

    plan: Plan
    whole: bool

    @property
    def programs(self) -> int:
        """The number of programs compiled so far."""
        ...

    def facts(self, window: Window) -> Facts:
        """Trace the step, and return the facts that determine the plan for batches like these."""
        ...

    def compile(self, window: Window) -> bool:
        """Compile the program for windows like this one; return False if it already exists."""
        ...

    def run(self, window: Window, first_step: int) -> Outputs:
        """Start running the window's batches; those of `rows` are gathered on the device."""
        ...


class Backend(Protocol):
    """The operations that Treadle needs from a framework."""

    name: str

    def is_native_variable(self, thing: Any) -> bool:
        """Return whether this is a framework variable that is not a Keras variable."""
        ...

    def native_children(self, thing: Any) -> Mapping[str, Any] | None:
        """Return the attributes of a framework module, or None for anything else."""
        ...

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Run `function(inputs)` once and differentiate each loss it returns.

        `groups` maps each loss to the indices in `[*variables, *inputs]` to differentiate it by. A
        gradient is None if the loss does not depend on that variable or input.
        """
        ...

    def undifferentiated(self) -> AbstractContextManager[Any]:
        """Return a context in which no intermediate results are stored for a backward pass."""
        ...

    def remat(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """Run a function of tensors whose intermediate results the backward pass recomputes.

        Its assignments take effect once; the recomputation uses the variables' earlier values.
        """
        ...

    def cond(self, predicate: Tensor, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Run one of two branches; both may assign variables."""
        ...

    def for_each(self, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Map a function over the first axis, in order; state changes carry over."""
        ...

    def abstract_run(self, function: Callable[[Any], Any], batch: Any, step: StepContext) -> Any:
        """Run a step once to create its variables, and discard all assignments."""
        ...

    def executor(self, program: "Program", options: Options) -> Executor:
        """Return an executor for a program; nothing is compiled yet."""
        ...

    def read(self, variable: Variable) -> Any:
        """Return a copy of a variable's value as a NumPy array."""
        ...

    def stage(self, variable: Variable, buffer: Any) -> Any:
        """Return a variable's value as a NumPy array that later steps do not change.

        Args:
            variable: The variable.
            buffer: An array of its shape and dtype that may be overwritten, or None. Copying into
                existing memory costs a tenth of copying into new memory.
        """
        ...

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable from a NumPy array or from a return value of `keep`."""
        ...

    def keep(self, variable: Variable) -> Any:
        """Return a copy of a variable's value, on the device if that is cheap."""
        ...

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Return for each float variable whether all its values are finite, in one fetch."""
        ...

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        ...

    def to_device(self, array: Any) -> Tensor:
        """Return an array as a tensor, with Keras' default float type for wider floats."""
        ...

    def caller(self, program: "Program") -> Callable[[Any, int], Any]:
        """Compile a function of `(inputs, stream)` whose assignments are discarded.

        `stream` selects the random numbers that it draws.
        """
        ...

    def explain(self, error: Exception) -> str:
        """Return the likely cause of a step's exception and what to do, or an empty string.

        It is shown below the framework's message.
        """
        ...

    def bfloat16_pays(self) -> bool:
        """Return whether the device is a CPU on which bfloat16, if supported, is faster."""
        ...

    def distribution(self, variables: Sequence[Variable]) -> Distribution | None:
        """Return the strategy that distributes training over devices, or None."""
        ...

    def computes_on(self) -> dict[str, Any]:
        """Return `devices` and `threads`, on which the bits of results depend."""
        ...

    def trace(self, directory: Path) -> AbstractContextManager[None]:
        """Return a context in which the framework's profiler records.

        At its end `directory` holds `trace.json.gz`, which Perfetto opens. If the framework writes
        files for TensorBoard, they are in `plugins`.
        """
        ...

    def own_random(self) -> AbstractContextManager[Any]:
        """Return a context that restores the framework's own random state at its end."""
        ...


@dataclass
class Program:
    """A step ready to be compiled: a function of a batch over a state.

    Attributes:
        function: `function(batch)`: returns values, explicit weights and violations.
        variables: The state, in order.
        seeds: The variables that are states of seed generators.
        new_context: A function that creates the context of one step from its number.
        name: The step's name, for messages.
        native: Whether the step is written with the framework itself and computes its own
            gradients.
        number: The number of programs that the step has for batches of other shapes.
    """

    function: Callable[..., Any]
    variables: Sequence[Variable]
    seeds: Sequence[Variable]
    new_context: Callable[[Any], StepContext]
    name: str
    native: bool = False
    number: int = 0


def scope_of_call(program: Program, stream: Any) -> Scope:
    """Return a scope in which every seed generator draws from the selected random stream."""
    offset = ops.cast(stream, "int32") * 7919 + 1
    return Scope(
        (seed, seed + ops.cast(ops.stack([offset, ops.zeros_like(offset)]), seed.dtype))
        for seed in program.seeds
    )


_backends: dict[str, Backend] = {}


def active() -> Backend:
    """Return the backend that Keras runs on."""
    name = keras.config.backend()
    if name not in _backends:
        warn_if_untested(keras.__version__)
        module = importlib.import_module(f"treadle.backends.{name}.backend")
        _backends[name] = module.BACKEND
    return _backends[name]
