"""The context of the running step: its number, its batch, and what is recorded about it."""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ConfigurationError
from .types import Tensor, Variable


class Store(Protocol):
    """State that a step keeps in something else than a variable, and that can be saved."""

    handle: Any

    def read(self) -> dict[str, Any]:
        """Return its contents in types that checkpoints store."""
        ...

    def write(self, saved: Mapping[str, Any]) -> None:
        """Replace its contents by what `read` returned."""
        ...


@dataclass
class Effects:
    """What a step does besides computing and changing variables.

    Attributes:
        name: The step's name, for messages.
        acts: Whether it acts on something else: prints, writes files, calls Python.
        stores: State in something else than variables, in the order in which the step changes it.
        inexact: Why a resumed run may differ, as clauses that begin with the name of the step.
        repeated: Why it acts more often than it trains, as a sentence that is not yet shown.
        news: Warnings about a resume that are not yet shown.
        paused: Whether nothing is recorded now.
        saved: The contents of all stores in the checkpoint of a resumed run.
    """

    name: str = "the step"
    acts: bool = False
    stores: list[Store] = field(default_factory=lambda: [])
    inexact: list[str] = field(default_factory=lambda: [])
    repeated: str = ""
    news: list[str] = field(default_factory=lambda: [])
    paused: bool = False
    saved: Sequence[Mapping[str, Any]] = ()

    def refuse(self, reason: str) -> None:
        """Record why a resumed run may differ."""
        if reason not in self.inexact:
            self.inexact.append(reason)
            self.news.append(f"a resume of this run may not be exact: {reason}")

    def keep(self, store: Store) -> None:
        """Record state that checkpoints must hold."""
        if any(store.handle is other.handle for other in self.stores):
            return
        if len(self.stores) < len(self.saved):
            self.paused = True
            store.write(self.saved[len(self.stores)])
            self.paused = False
        self.stores.append(store)

    def contents(self) -> list[Mapping[str, Any]]:
        """Return the contents of all stores, also of those in the checkpoint that wait for use."""
        return [*(store.read() for store in self.stores), *self.saved[len(self.stores) :]]

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the contents of all stores, also of those that the step uses first later."""
        self.saved = saved
        for store, contents in zip(self.stores, saved, strict=False):
            store.write(contents)


@dataclass
class Build:
    """The findings of an abstract run of a step.

    Attributes:
        applied: Optimizers whose `apply` was called, each with its variables and the number of
            gradients.
        read: Variables that were read, by id.
        written: Variables that were assigned, by id.
        differentiated: Whether `gradients` was called, so that the step is portable, not native.
        branches: Whether compiled Python may branch by values, and assign other variables.
        skips_branches: Whether the run does not enter branches that the batch does not take.
        enters_branches: Whether the run must enter these too, to build what they use.
        settled: Ids of variables that the step already uses for batches of other shapes: they must
            not be replaced.
        limits: The ranges of the indices and labels that the step uses.
        effects: What the step does besides computing and changing variables.
    """

    applied: list[tuple[Any, list[Variable], int]] = field(default_factory=lambda: [])
    read: dict[int, Variable] = field(default_factory=lambda: {})
    written: dict[int, Variable] = field(default_factory=lambda: {})
    differentiated: bool = False
    branches: bool = False
    skips_branches: bool = False
    enters_branches: bool = False
    settled: frozenset[int] = frozenset()
    limits: "Sequence[Limit]" = ()
    effects: Effects = field(default_factory=Effects)


@dataclass(frozen=True, slots=True)
class Limit:
    """The range of the integers that a lookup or a sparse loss allows.

    Attributes:
        name: The path of the variable, or the name of the loss.
        size: The number of rows, or of classes.
        is_labels: Whether the integers are the labels of a loss.
    """

    name: str
    size: int
    is_labels: bool

    @property
    def least(self) -> int:
        """The smallest valid integer: Keras counts negative indices of rows from the end."""
        return 0 if self.is_labels else -self.size

    @property
    def text(self) -> str:
        """A text that is different for each limit."""
        return f"{self.name} takes {'labels' if self.is_labels else 'indices'} below {self.size}"


@dataclass
class Ranges:
    """The checks of indices and labels in the running step; see `backends.ranges`.

    Attributes:
        name_of: A function that returns the path of a loss or a metric, or an empty string.
        raises: Whether a dry run checks the integers, and not only finds the limits.
        variables: Where a step stores violations; a dry run has none.
        limits: The limits that a dry run has found.
        used: Limits, each with the smallest and the largest integer of the batch of a dry run.
        place: The trace that records the step's operations now; see `Backend.place`.
        owners: The enclosing calls of losses and metrics, each with its masks and weights.
        unsure: Whether the operations are in a branch that may not be taken.
    """

    name_of: Callable[[Any], str]
    raises: bool = True
    variables: Mapping[Limit, Variable] = field(default_factory=lambda: {})
    limits: dict[Limit, None] = field(default_factory=lambda: {})
    used: list[tuple[Limit, Tensor]] = field(default_factory=lambda: [])
    place: Any = None
    owners: list[tuple[Any, Sequence[Any]]] = field(default_factory=lambda: [])
    unsure: bool = False


class Recorder(Protocol):
    """Records what a step calls; see `steps.probes.Probe`.

    Some frameworks have no concrete values inside an objective. Records made there are returned
    from the differentiation as auxiliary outputs, which makes their values concrete.

    Attributes:
        is_fast: Whether an objective may run as one program that is reused where its operations are
            the same. Otherwise an uncompiled step runs it as Python, with concrete values.
    """

    is_fast: bool

    def begin(self) -> None:
        """Start the record of an objective."""
        ...

    def taken(self) -> Any:
        """Return the record since `begin`: a structure of tensors and strings."""
        ...

    def give(self, met: Any) -> None:
        """Add a record returned by `taken`, now with concrete values."""
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
        recorder: The probe that sees the step's calls, or None.
        ranges: The checks of indices and labels, or None.
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
    ranges: Ranges | None = None


_running = threading.local()


def context() -> StepContext:
    """Return the running step's context, or a default one outside of a loop."""
    stack: list[StepContext] = getattr(_running, "stack", [])
    if stack:
        return stack[-1]
    if not hasattr(_running, "bare"):  # one object per thread: nested gradients count their depth
        _running.bare = StepContext()
    return _running.bare


def is_running() -> bool:
    """Return whether a step runs in this thread."""
    return bool(getattr(_running, "stack", None))


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
    """Attach a recorder to the running step, or else to those of this thread in this context.

    Raises:
        ConfigurationError: There is a recorder already.
    """
    holder: Any = context() if is_running() else _running
    if (other := getattr(holder, "recorder", None)) is not None:
        raise ConfigurationError(
            f"a probe already sees the steps of this thread, a {type(other).__name__}, so a "
            f"{type(recorder).__name__} cannot see them: leave its `with probing(...)` first, or "
            "let one probe do the work of both"
        )
    holder.recorder = recorder
    try:
        yield
    finally:
        holder.recorder = None


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
