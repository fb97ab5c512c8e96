"""What Treadle asks of a framework, and the one place where the running backend is chosen.

Three things live here because every backend shares them: `Scope` (variables take other values for a
while), `StepContext` (what a running step knows about itself) and the protocol `Backend`.
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
from keras.src.backend.common.stateless_scope import get_stateless_scope

from ..core.options import Options
from .plans import Facts, Plan
from .window import Window

Variable = Any  # a keras.Variable, or the framework's own where a task is written natively
Tensor = Any
Losses = dict[str, Tensor]


class Scope(keras.StatelessScope):
    """Inside it, variables take the values of the scope, and assignments stay in the scope.

    Scopes nest: what a scope does not hold comes from the one around it, and last from the variable
    itself. That is the difference to `keras.StatelessScope`, whose nested scopes know nothing of
    one another.

    Attributes:
        assigned: Variables that were assigned inside, by id.
        foreign: Variables that were read and that no scope holds, by id: they would be constants of
            a compiled step.
        losses: What layers handed to `add_loss`, inside or before.
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
        """Return the innermost value held for a variable; never None, unlike Keras' own."""
        value = self._held(variable)
        if value is not None:
            return value
        self.foreign[id(variable)] = variable
        if variable._value is None:  # made in this very scope: initialized when the scope ends
            return variable._initializer(variable.shape, dtype=variable._dtype)
        return variable._value

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        """Keep an assigned value.

        A variable that is being differentiated keeps its gradient when its own objective assigns it
        (spectral normalization does): the loss is differentiated at the new value, as it is where
        variables are changed in place.
        """
        variable, value = update
        value = ops.stop_gradient(value)  # as where variables are changed in place
        leaf = self._leaves.get(id(variable))
        if leaf is not None:
            value = value + (leaf - ops.stop_gradient(leaf))
        self._holds[id(variable)] = variable
        self.assigned[id(variable)] = variable
        self.state_mapping[id(variable)] = value

    def changed(self) -> dict[int, tuple[Variable, Tensor]]:
        """Return `{id: (variable, value)}` for what was assigned inside."""
        return {key: (v, self.state_mapping[key]) for key, v in self.assigned.items()}

    def held(self) -> list[tuple[Variable, Tensor]]:
        """Return what this scope and those around it hold: `(variable, value)`."""
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
    """Assign what an inner scope changed, around it or for good; not those in `keep`."""
    kept = set(keep)
    for key, (variable, value) in changed.items():
        if key not in kept:
            variable.assign(value)


def hand_losses(inner: Scope) -> None:
    """Let `add_loss` losses of an inner scope be seen in the one around it, or in their layers."""
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
    """What an abstract run of a step finds out.

    Attributes:
        applied: Optimizers whose `apply` was called, each with the variables that it was given
            and the number of gradients.
        read: Variables that were read, by id.
        written: Variables that were assigned, by id.
        differentiated: `gradients` was called, so the step is portable, not native.
        names: The names of the values that the step returned.
        settled: Ids of the variables that the step already uses for batches of another form: they
            may not be replaced.
    """

    applied: list[tuple[Any, list[Variable], int]] = field(default_factory=lambda: [])
    read: dict[int, Variable] = field(default_factory=lambda: {})
    written: dict[int, Variable] = field(default_factory=lambda: {})
    differentiated: bool = False
    names: list[str] = field(default_factory=lambda: [])
    settled: frozenset[int] = frozenset()


class Recorder(Protocol):
    """Looks into steps that run eagerly: at gradients, and at what layers return.

    Inside an objective some frameworks have no values yet: what is met there is handed through the
    differentiation, as what the objective returned is.
    """

    def begin(self) -> None:
        """Take note that an objective begins."""
        ...

    def taken(self) -> Any:
        """Return what was met since `begin`: a structure of tensors and texts."""
        ...

    def give(self, met: Any) -> None:
        """Take back what `taken` returned, now as it is outside of the objective."""
        ...

    def gradients(self, paths: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Take note of what `treadle.gradients` returns for these variables."""
        ...


@dataclass
class StepContext:
    """What a running step knows about itself.

    Attributes:
        number: The step's number, an integer tensor.
        examples: How many examples its batch has.
        build: Where findings go while the step is run abstractly; None in a real run.
        layers: All layers of the state, to which `add_loss` losses belong.
        path_of: Names a variable by its path.
        checked: Check what phases own.
        owned_by_nobody: Ids of variables that any phase may change: metrics, seeds.
        violations: Messages of broken promises, each with a boolean tensor that says whether it
            happened.
        depth: How many `gradients` are running around this moment.
        inside: How many objectives, branches and mapped functions lie around this moment.
        loss_scale: The `treadle.LossScale` that losses are multiplied by; None where nothing is.
        recorder: What looks into the step; None where nobody does.
    """

    number: Any = 0
    examples: int = 1
    build: Build | None = None
    layers: Sequence[Any] = ()
    variables: Mapping[str, Variable] = field(default_factory=lambda: {})
    path_of: Callable[[Variable], str] = lambda variable: str(variable.path)
    checked: bool = False
    owned_by_nobody: frozenset[int] = frozenset()
    violations: list[tuple[str, Tensor]] = field(default_factory=lambda: [])
    depth: int = 0
    inside: int = 0
    loss_scale: Any = None
    recorder: Recorder | None = None


_running = threading.local()


def context() -> StepContext:
    """Return the running step's context; a bare one where no loop runs."""
    stack: list[StepContext] = getattr(_running, "stack", [])
    if stack:
        return stack[-1]
    if not hasattr(_running, "bare"):  # one and the same: nested gradients count their depth in it
        _running.bare = StepContext()
    return _running.bare


def in_step() -> bool:
    """Say whether a step is running in this thread."""
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
    """Let a recorder look into the steps that run meanwhile, in this thread, uncompiled."""
    _running.recorder = recorder
    try:
        yield
    finally:
        _running.recorder = None


@contextmanager
def unrecorded() -> Generator[None]:
    """Record nothing meanwhile: branches and mapped functions may be traced, without values."""
    step = context()
    recorder, step.recorder = step.recorder, None
    try:
        yield
    finally:
        step.recorder = recorder


@contextmanager
def deeper() -> Generator[bool]:
    """Count one more `gradients` around this moment; tells whether there was one before."""
    step = context()
    step.depth += 1
    try:
        yield step.depth > 1
    finally:
        step.depth -= 1


class Outputs(Protocol):
    """What the steps of one window return, while they run or afterwards."""

    @property
    def seconds(self) -> float:
        """How long the steps took; to be asked for after `fetch`."""
        ...

    @property
    def ended(self) -> float:
        """When they ended, by the monotonic clock; to be asked for after `fetch`."""
        ...

    def running(self) -> bool:
        """Say whether they still run."""
        ...

    def fetch(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Wait, and return values and explicit weights per name, each (steps,), and violations.

        Before it returns, the state may be anything; afterwards it is that after the last step.
        """
        ...


@dataclass(frozen=True)
class Distribution:
    """What distributes training over devices.

    Attributes:
        strategy: The name of its class.
        remedy: What to do instead.
        variable: A variable that was created for it; None where a context or a setting does it.
    """

    strategy: str
    remedy: str
    variable: Variable | None = None


class Executor(Protocol):
    """A step over a state, compiled or not, run for the batches of a window one after another.

    All batches that it runs are of one form.

    Attributes:
        plan: How it runs; set before anything is compiled.
        whole: A window that fails has changed nothing.
    """

    plan: Plan
    whole: bool

    @property
    def programs(self) -> int:
        """How many programs were compiled so far."""
        ...

    def facts(self, window: Window) -> Facts:
        """Return what decides the plan for batches like these; traces the step."""
        ...

    def compile(self, window: Window) -> bool:
        """Make the program for windows of batches like these; False where it was made before."""
        ...

    def run(self, window: Window, first_step: int) -> Outputs:
        """Begin to run the window's batches; those of `rows` are gathered on the device."""
        ...


class Backend(Protocol):
    """What Treadle needs of a framework."""

    name: str

    def is_native_variable(self, thing: Any) -> bool:
        """Say whether this is a variable of the framework's own that Keras does not know."""
        ...

    def native_children(self, thing: Any) -> Mapping[str, Any] | None:
        """Return the attributes of a framework's own module, or None for anything else."""
        ...

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Run `function(inputs)` once and differentiate each loss it returns.

        `groups` says per loss with respect to which of `[*variables, *inputs]`; None stands for a
        gradient of what the loss does not reach.
        """
        ...

    def undifferentiated(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is kept for a backward pass."""
        ...

    def remat(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """Run a function of tensors whose backward pass computes it again instead of keeping it.

        What it assigns is assigned once, and it is computed again with the values that it had.
        """
        ...

    def cond(self, predicate: Tensor, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Run one of two branches; both may assign variables."""
        ...

    def for_each(self, function: Callable[[Any], Any], inputs: Any) -> Any:
        """Map over the first axis, in order; state changes carry over."""
        ...

    def abstract_run(self, function: Callable[[Any], Any], batch: Any, step: StepContext) -> Any:
        """Run once with all assignments discarded, so that variables come into being."""
        ...

    def executor(self, program: "Program", options: Options) -> Executor:
        """Return what runs a program; nothing is compiled yet."""
        ...

    def read(self, variable: Variable) -> Any:
        """Return a variable's value as a NumPy array of its own."""
        ...

    def stage(self, variable: Variable, buffer: Any) -> Any:
        """Return a variable's value as a NumPy array that later steps do not change.

        Args:
            variable: Any.
            buffer: An array of its shape and dtype that may be overwritten, or None: a copy into
                memory that is there already costs a tenth of one into new memory.
        """
        ...

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable from a NumPy array or from what `keep` returned."""
        ...

    def keep(self, variable: Variable) -> Any:
        """Return a copy of a variable's value, on the device where that is cheap."""
        ...

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Say of each variable of a float type whether all its values are finite, in one fetch."""
        ...

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        ...

    def to_device(self, array: Any) -> Tensor:
        """Return an array as a tensor, with Keras' default float type for wider floats."""
        ...

    def caller(self, program: "Program") -> Callable[[Any, int], Any]:
        """Compile a function of `(inputs, stream)` whose assignments are dropped.

        `stream` selects the random numbers that it draws.
        """
        ...

    def explain(self, error: Exception) -> str:
        """Return what an exception of a step is likely to mean and what to do, or nothing.

        It is told below what the framework says.
        """
        ...

    def bfloat16_pays(self) -> bool:
        """Say whether it runs on a CPU, and faster in bfloat16 where the CPU has it."""
        ...

    def distribution(self, variables: Sequence[Variable]) -> Distribution | None:
        """Return what distributes training over devices, or None."""
        ...

    def computes_on(self) -> dict[str, Any]:
        """Return what bits depend on beside the program: `devices` and `threads`."""
        ...

    def trace(self, directory: Path) -> AbstractContextManager[None]:
        """Return a context in which the framework's profiler watches.

        At its end `directory` holds `trace.json.gz`, which Perfetto opens, and below `plugins` what
        TensorBoard does, where the framework writes such.
        """
        ...

    def own_random(self) -> AbstractContextManager[Any]:
        """Return a context after which the framework's own random state is as before."""
        ...


@dataclass
class Program:
    """A step ready to be compiled: a function of a batch over a state.

    Attributes:
        function: `function(batch)`: returns values, explicit weights and violations.
        variables: The state, in order.
        seeds: Those of them that are states of seed generators.
        new_context: Makes the context of one step from its number.
        native: Written against the framework itself, so it looks after its own gradients.
        number: How many programs the step has for batches of other forms.
    """

    function: Callable[..., Any]
    variables: Sequence[Variable]
    seeds: Sequence[Variable]
    new_context: Callable[[Any], StepContext]
    name: str
    native: bool = False
    number: int = 0


def scope_of_call(program: Program, stream: Any) -> Scope:
    """Return a scope in which every seed generator draws from a stream of its own."""
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
        module = importlib.import_module(f"treadle.backends.{name}.backend")
        _backends[name] = module.BACKEND
    return _backends[name]
