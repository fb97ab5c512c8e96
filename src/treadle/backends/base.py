"""The backend interface, and the selection of the running backend.

`Backend` is everything that Treadle needs from a framework, as six protocols: the operations and
the control flow of steps, the execution of programs, the steps of Keras models, the values of
variables, facts about devices.
Methods with a body do what suffices where a framework needs nothing of that kind.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import keras

from ..core.keras_internals import warn_if_untested
from ..core.options import Options
from ..core.process_settings import is_deterministic
from ..errors import ConfigurationError
from .plans import Facts, Plan
from .program import Program
from .scope import Scope
from .step_context import StepContext
from .types import Branch, Condition, IndexedBody, LoopBody, Losses, Tensor, Variable
from .window import Following, Window


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
    def calls_python(self) -> bool:
        """Whether each run calls Python functions, whose effects cannot be undone."""
        ...

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

    def transfer(self, window: Window) -> None:
        """Start to copy the batches of the next window to an accelerator, while another one runs.

        Without an accelerator, or if a window holds row indices, this does nothing.
        """
        ...

    def run(
        self,
        window: Window,
        first_step: int,
        background: bool = True,
        following: Following | None = None,
    ) -> Outputs:
        """Start running the window's batches; those of `rows` are gathered on the device.

        Args:
            window: The batches.
            first_step: The number of steps before them.
            background: Whether the calling thread has other work meanwhile. Otherwise no other
                thread is used: handing a window over costs 50 to 100 µs.
            following: Returns the next batches. An executor may run their steps too, if the
                state stays that after the steps that were asked for.
        """
        ...


@dataclass(frozen=True)
class RefusedDistribution:
    """A reason why a loop cannot train as variables, or a context, are distributed over devices.

    Attributes:
        fault: What is wrong, for messages: a clause whose subject is the variable or training.
        remedy: What to do instead, for messages.
        variable: The variable; None if a context or a setting is at fault.
    """

    fault: str
    remedy: str
    variable: Variable | None = None


class Transformations(Protocol):
    """Differentiation and recomputation: operations that steps call."""

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Run `function(inputs)` once and differentiate each loss it returns.

        The losses, and scalars in what else it returns, may be `Weighted`.

        `groups` maps each loss to the indices in `[*variables, *inputs]` to differentiate it by. A
        gradient is None if the loss does not depend on that variable or input.
        """
        ...

    def undifferentiated(self) -> AbstractContextManager[Any]:
        """Return a context in which no intermediate results are stored for a backward pass.

        Where they are only stored inside of a differentiation, it is empty.
        """
        return nullcontext()

    def reads_of(self, written: frozenset[int]) -> AbstractContextManager[Any]:
        """Return a context in which what the user reads of these variables does not change later.

        Where tensors never change, it is empty.

        Args:
            written: The ids of the variables that a step assigns.
        """
        return nullcontext()

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of the whole batch for a tensor with the rows of this process.

        It can be differentiated. The rows of one process are the whole batch.
        """
        return x

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the processes of a tensor that each computes from its rows.

        It is not differentiated.
        """
        return x

    def place(self) -> Any:
        """Return what identifies the trace that records operations now; None outside of traces.

        A tensor of one trace cannot be used in an outer one.
        """
        ...

    def remat(
        self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run a function of tensors whose intermediate results the backward pass recomputes.

        Its assignments take effect once; the recomputation uses the variables' earlier values.
        """
        ...


Step = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""A function of what a scan carries and of a row, which returns both after it."""


class ControlFlow(Protocol):
    """Branches and loops, in which functions may assign variables: changes carry over."""

    def cond(self, predicate: Tensor, then: Branch, otherwise: Branch) -> list[Tensor]:
        """Run one of two branches; both return as many tensors."""
        ...

    def switch(self, index: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
        """Run one of several branches; an index out of range selects the first or the last one."""
        ...

    def scan(
        self,
        function: Step,
        carry: list[Tensor],
        inputs: list[Tensor],
        count: int,
        reverse: bool = False,
        unroll: int | bool = 1,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a function for each row of inputs, in order, and stack what it returns.

        Args:
            function: Returns what is carried to the next row, and tensors to stack.
            carry: What the first row gets.
            inputs: Tensors with the same first dimension.
            count: The number of rows.
            reverse: Whether to begin with the last row.
            unroll: How many rows an iteration of a compiled loop may take.
        """
        ...

    def while_loop(
        self, condition: Condition, body: LoopBody, values: list[Tensor], maximum: int | None
    ) -> list[Tensor]:
        """Run `body` while `condition` is true, at most `maximum` times."""
        ...

    def fori_loop(
        self, lower: Any, upper: Any, body: IndexedBody, values: list[Tensor]
    ) -> list[Tensor]:
        """Run `body` for the integers from `lower` to `upper`, without that one."""
        ...


Fetch = Callable[[], Any]
"""A function that waits for a call's outputs, and returns them as NumPy arrays."""


def start_each(start: Callable[[Any, int], Fetch], window: Window) -> Callable[[], list[Any]]:
    """Start a call for each batch of a window; see `Caller.start_window`."""
    running = [start([batch], 0) for batch in window.views()]
    # Waiting once, for the last of them, is enough: they run in order.
    return lambda: [fetch() for fetch in reversed(running)][::-1]


class Caller(Protocol):
    """A compiled function, whose assignments are discarded."""

    def start(self, inputs: Any, stream: int) -> Fetch:
        """Start a call.

        Args:
            inputs: A structure of NumPy arrays, which must not change before the outputs are
                fetched, and which are never written to.
            stream: Selects the random numbers that the function draws.
        """
        ...

    def start_window(self, window: Window) -> Callable[[], list[Any]]:
        """Start a call for each batch of a window, all with the same random numbers.

        Args:
            window: Batches of equal form, each the only input of a call.

        Returns:
            A function that waits for the outputs of all calls, and returns them in order.
        """
        return start_each(self.start, window)


class StepExecution(Protocol):
    """The dry runs of steps, and the execution of programs.

    Attributes:
        compilers: The names that `Options(compiler=…)` may have besides `"auto"`.
        rare_steps: How many steps of a new form of batch run as Python before it is compiled, by
            the compiler. Without one, each form is compiled at once.
        opens_sizes: Whether it has executors for batches that differ in sizes.
    """

    compilers: Sequence[str] = ()
    rare_steps: Mapping[str, int] = MappingProxyType({})
    opens_sizes: bool = False

    def open_executor(
        self, program: Program, sizes: Sequence[Sequence[int | None]]
    ) -> Executor | None:
        """Return an executor for batches that differ in sizes, or None if the backend has none.

        Args:
            program: The step.
            sizes: The shapes of the arrays of a batch, with None for a size that is not fixed.
        """
        return None

    def compiler(self, steps: int | None) -> str:
        """Return the compiler for `Options(compiler="auto")`, or `"auto"` to use that of the plan.

        Args:
            steps: How many steps the first call of the loop trains for, or None if unknown.
        """
        return "auto"

    def fewer_rows(self, batch: Any, error: Exception) -> Any:
        """Return the rows of a batch with which a dry run that failed is repeated, or None."""
        return None

    def abstract_run(self, function: Callable[[Any], Any], batch: Any, step: StepContext) -> Scope:
        """Run a step once to create its variables, and discard all assignments.

        Returns:
            The scope of the run, which knows the variables that were read and assigned.
        """
        ...

    def abstract_update(
        self, function: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]
    ) -> Scope:
        """Run an optimizer's `apply` once in an abstract run, without changing variables.

        Args:
            function: A function of the gradients.
            tensors: The gradients, each a tensor or None.

        Returns:
            The scope of the call, which knows the variables that were read and assigned.
        """
        ...

    def executor(self, program: Program, options: Options) -> Executor:
        """Return an executor for a program; nothing is compiled yet."""
        ...

    def caller(
        self, program: Program, reads: Sequence[Variable] | None = None, soon: bool = True
    ) -> Caller:
        """Compile a function of inputs; its assignments are discarded.

        Args:
            program: The function.
            reads: The variables that the function reads, if it assigns none and draws no random
                numbers. Then a compilation may take longer.
            soon: Whether the function is called for many batches, so that such a compilation pays
                at once, or else only after some calls.
        """
        ...

    def own_random(self) -> AbstractContextManager[Any]:
        """Return a context that restores the framework's own random state at its end.

        Where Keras draws from its own seeds only, it is empty.
        """
        return nullcontext()

    def explain(self, error: Exception) -> str:
        """Return the likely cause of a step's exception and what to do, or an empty string.

        It is shown below the framework's message.
        """
        ...

    def trace(self, directory: Path) -> AbstractContextManager[None]:
        """Return a context in which the framework's profiler records.

        At its end `directory` holds `trace.json.gz`, which Perfetto opens. If the framework writes
        files for TensorBoard, they are in `plugins`.
        """
        ...


class VariableOps(Protocol):
    """The values of variables and tensors, and the framework's own variables."""

    def is_native_variable(self, thing: Any) -> bool:
        """Return whether this is a framework variable that is not a Keras variable."""
        return False

    def native_children(self, thing: Any) -> Mapping[str, Any] | None:
        """Return the attributes of a framework module, or None for anything else.

        PyTorch's modules are wrapped in `keras.layers.TorchModuleWrapper`, and need none.
        """
        return None

    def read(self, variable: Variable) -> Any:
        """Return a copy of a variable's value as a NumPy array."""
        ...

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable from a NumPy array or a return value of `keep`.

        If it is split among processes, also from `StoredParts`.
        """
        ...

    def stage(self, variable: Variable, buffer: Any) -> Any:
        """Return a variable's value as a NumPy array that later steps do not change.

        If it is split among processes, return the `OwnParts` of this process.

        Args:
            variable: The variable.
            buffer: An array of its shape and dtype that may be overwritten, or None. Copying into
                existing memory costs a tenth of copying into new memory.
        """
        ...

    def keep(self, variable: Variable) -> Any:
        """Return a copy of a variable's value, on the device if that is cheap."""
        ...

    def is_split(self, variables: Iterable[Variable]) -> bool:
        """Return whether this process holds only a part of a variable.

        Then `read` and `finite` must be called in all processes.
        """
        return False

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Return for each float variable whether all its values are finite, in one fetch."""
        ...

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        ...

    def to_device(self, array: Any) -> Tensor:
        """Return an array as a tensor, with Keras' default float type for wider floats."""
        ...


class Models(Protocol):
    """The steps that a compiled Keras model has itself."""

    def build_model(self, model: Any, batch: Any) -> None:
        """Create the variables of a model, its metrics and its optimizer, as Keras' `fit` does.

        Args:
            model: A compiled model.
            batch: A batch of NumPy arrays.
        """
        ...

    def model_step(self, model: Any, name: str, batch: Any) -> Any:
        """Call a model's own step as Keras' `fit` does, and return what it returns.

        Args:
            model: A compiled model.
            name: `"train_step"`, `"test_step"` or `"predict_step"`.
            batch: A batch of tensors.
        """
        ...


class Devices(Protocol):
    """Facts about the devices that a step runs on.

    Attributes:
        name: The name of the backend.
        bfloat16_pays: Whether bfloat16 is faster than float32 on a CPU that supports it.
    """

    name: str
    bfloat16_pays: bool

    def computes_on(self) -> dict[str, Any]:
        """Return `devices` and `threads`, on which the bits of results depend."""
        ...

    def use_deterministic_algorithms(self, late: bool) -> None:
        """Compute the same bits again on an accelerator, from now on.

        Args:
            late: Whether Keras was imported before the environment variables for this were set.

        Raises:
            ConfigurationError: The framework has already started without them on an accelerator.
        """
        ...

    def use_float64(self, on: bool) -> None:
        """Let the framework compute in float64, or not, and drop data sets placed before."""
        ...

    def distribute(self, devices: Any) -> None:
        """Train on several devices: variables are created for them, and batches split.

        Args:
            devices: Their number, of at least 2, or a `keras.distribution` object.

        Raises:
            ConfigurationError: There are fewer devices, or the backend trains on one only.
        """
        raise ConfigurationError(
            f"devices={devices!r}: Treadle trains on several devices on JAX only, and this process "
            f"runs on {self.name}. Use treadle.setup(backend='jax', devices=…) before Keras is "
            "imported, or one device"
        )

    def refused_distribution(
        self, variables: Sequence[Variable], built: bool
    ) -> RefusedDistribution | None:
        """Return why a loop cannot train as variables or settings are distributed, or None.

        Args:
            variables: The variables of a task, without the states of seed generators.
            built: Whether all variables of a training step exist.
        """
        return None


class Backend(Transformations, ControlFlow, StepExecution, Models, VariableOps, Devices, Protocol):
    """The operations that Treadle needs from a framework."""


_backends: dict[str, Backend] = {}


def active() -> Backend:
    """Return the backend that Keras runs on."""
    name = keras.config.backend()
    if name not in _backends:
        warn_if_untested(keras.__version__)
        module = importlib.import_module(f"treadle.backends.{name}.backend")
        _backends[name] = module.BACKEND
    return _backends[name]


def use(backend: Backend) -> None:
    """Set the active backend: that of several processes wraps the backend of one."""
    _backends[backend.name] = backend


def repeats_exactly() -> bool:
    """Return whether the same step from the same state gives the same bits again.

    On an accelerator, sums are added in a varying order unless algorithms are deterministic.
    """
    return is_deterministic() or "cpu" in active().computes_on()["devices"]


if keras.config.backend() == "jax":  # as soon as possible, since initial weights are compiled too
    _compiling = importlib.import_module("treadle.backends.jax.compile_cache")
    _compiling.compile_fast()
    _compiling.enable_compile_cache()
