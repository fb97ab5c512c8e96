"""Trials of a captured PyTorch step: one step both ways from the same state.

The state is restored afterwards. Copies of it are in main memory, so a device holds no second one.
The comparison is bit for bit, since a learning rate that became
a constant would change only the last bits. Of some scalars a step may read the value in a way that
recording cannot see, such as a NumPy view of a counter. They are therefore advanced, so that a
dependence on them becomes visible.

| trial | batch | step number | state |
| --- | --- | --- | --- |
| 1 | first | 0 | as it is |
| 2 | second | 1 | after trial 1 |
| 3 | second | far | after trial 2, with the counters of optimizers advanced |
| 4 | second | far | the same, with all other scalars advanced that are not trained |

A step that Inductor compiled is compared within what rounding does to the eager step (`rounding`).

A step that fails eagerly in a trial is not captured: in training it then fails as it would
uncompiled. Only in trial 4, whose state training may never reach, may it fail both ways.

Equal operations give equal bits on a CPU. On another device, trials use PyTorch's deterministic
algorithms, and each eager step runs twice: if the two runs differ, nothing can be proven, and the
step is not captured. There, trial 4 leaves integers as they are, since an index out of range ends
the process. Tests set the kind of the device on a CPU; these rules were not run on a device.
"""

import math
import random
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ....core import structures
from ....core.tracebacks import in_one_line
from ...eager import run_step
from ...plans import RefusedError
from ...program import Program
from ...types import StepResult
from ..patches import get_device, variables_made
from .rounding import COMPILED, EXACT, FEW, MANY, Disturbance, Sizes, agree, larger, sizes

FAR, NEAR = 1000, 10  # by how much trials 3 and 4 advance; near, if the step fails far away
DIFFERENT = "computes a different "
Around = Callable[[Program], AbstractContextManager[Any]]
Replay = Callable[[Sequence[Any], Sequence[Any], Any], StepResult]


class _DifferentError(Exception):
    """A step and its replay differ; the message is a clause."""


class _FailedError(_DifferentError):
    """A step fails eagerly, and its replay fails too."""


class _BeyondRoundingError(_DifferentError):
    """A compiled step differs by more than the disturbed steps so far."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The effects of a step.

    Attributes:
        result: What it returned.
        state: The variables' values after it, by path.
        before: Their values before it.
        generators: The states of PyTorch's generators after it.
        drawn: Another generator from which it drew, or an empty string.
    """

    result: StepResult
    state: dict[str, Any]
    before: dict[str, Any]
    generators: list[Any]
    drawn: str

    def before_of(self, what: str) -> Any:
        """Return the value before the step of what a clause of `tensors` names, or None."""
        return self.before.get(what.removeprefix(DIFFERENT))

    @property
    def tensors(self) -> dict[str, Any]:
        """The variables' values and what the step returned, by a clause for one that differs."""
        found = {f"{DIFFERENT}{path}": x for path, x in self.state.items()}
        parts = {"": self.result.values, "weight of ": self.result.weights}
        for kind, part in {**parts, "check of ": self.result.broken}.items():
            found |= {f"returns a different {kind}{name!r}": x for name, x in part.items()}
        return found


class ReplayTrials:
    """Compares eager steps with their replays.

    Args:
        program: The step.
        around: A function that returns the context manager for each eager step.
    """

    def __init__(self, program: Program, around: Around) -> None:
        self._program, self._around = program, around
        self._state = [variable._value for variable in program.variables]
        self._paths = list(program.new_context(0).variables)
        self._device = device()

    def difference(self, replay: Replay, batches: Sequence[Any], how: str = EXACT) -> str:
        """Return the first difference, as a clause, or an empty string; the state is restored.

        Args:
            replay: The captured step.
            batches: One or two batches, of tensors.
            how: What may differ: `EXACT`, `SUMMED` or `COMPILED`.
        """
        trial, before = 0, list[Any]()
        with undone(self._program), nullcontext() if self._device == "cpu" else repeatable():
            try:
                for trial in (1, 2):
                    before = [x.detach().clone() if x.numel() == 1 else None for x in self._state]
                    batch = batches[(trial - 1) % len(batches)]
                    outcome = self._compare(replay, batch, trial - 1, how)
                    _set(self._state, outcome.state.values())
                trial, counters = 3, self._counters()
                self._compare_far(replay, batches[-1], how, counters)
                others = self._other_scalars(before)
                if others:
                    trial = 4
                    self._compare_far(replay, batches[-1], how, {**others, **counters})
            except RefusedError as refused:
                return str(refused)
            except _FailedError as failed:
                return "" if trial == 4 else f"{failed}, in step {trial} of the proof"
            except _DifferentError as different:
                return f"{different}, in step {trial} of the proof"
        return ""

    def _counters(self) -> dict[int, float]:
        """Return the positions of the counters of optimizers, and what a step adds to each."""
        return {i: 1 for i, v in enumerate(self._program.variables) if v.name == "iteration"}

    def _other_scalars(self, before: Sequence[Any]) -> dict[int, float]:
        """Return the positions of other scalars that are not trained, and what a step adds to each.

        Args:
            before: The scalars before the last step, with None for other variables.
        """
        found: dict[int, float] = {}
        for i, variable in enumerate(self._program.variables):
            new, old = self._state[i], before[i]
            if new.numel() != 1 or variable.trainable or new.dtype == torch.bool:
                continue
            if new.dtype.is_floating_point:
                found[i] = new.item() - old.item()
            elif self._device == "cpu":  # elsewhere, an index out of range ends the process
                found[i] = 1
        return {i: added for i, added in found.items() if i not in self._counters()}

    def _compare_far(
        self, replay: Replay, batch: Any, how: str, added: Mapping[int, float]
    ) -> None:
        """Compare a step far from here, or nearer if it fails there.

        Raises:
            _DifferentError: They differ, or the step fails wherever it was tried.
        """
        for distance in (FAR, NEAR):
            with undone(self._program):
                for i, step in added.items():
                    self._state[i].data.fill_(_advanced(self._state[i], step, distance))
                try:
                    self._compare(replay, batch, distance, how)
                    return
                except _FailedError:
                    if distance == NEAR:
                        raise

    def _compare(self, replay: Replay, batch: Any, number: int, how: str) -> _Outcome:
        """Run a step both ways, compare all its effects, and return those of the eager one.

        Raises:
            _DifferentError: They differ, or the eager step fails.
        """

        def replayed() -> StepResult:
            return replay(self._state, tensors_of(batch), step_number(number))

        try:
            eager = self._outcome(lambda: self._run(batch, number))
        except Exception as error:
            failed = f"it fails when it runs eagerly: {in_one_line(error)}"
            try:
                self._outcome(replayed)
            except Exception:
                raise _FailedError(failed) from error
            raise _DifferentError(failed) from error
        if eager.drawn:
            raise RefusedError(
                f"it draws from {eager.drawn}, which a captured step would do only once"
            )
        if self._device != "cpu":
            again = self._outcome(lambda: self._run(batch, number))
            self._check_equal(f"run twice on {self._device}", eager, again)
        if how != COMPILED:
            self._check_replay(replayed, eager, how)
            return eager
        disturbed: dict[str, Sizes] = {}
        for seeds in (FEW, MANY):
            try:
                for seed in seeds:
                    self._disturb(disturbed, eager, batch, number, seed)
            except Exception as error:
                failed = f"it fails from numbers with other last bits: {in_one_line(error)}"
                raise _DifferentError(failed) from error
            try:
                self._check_replay(replayed, eager, how, disturbed)
                break
            except _BeyondRoundingError:
                if seeds is MANY:
                    raise
        return eager

    def _disturb(
        self, found: dict[str, Sizes], eager: _Outcome, batch: Any, number: int, seed: int
    ) -> None:
        """Run an eager step with other last bits, and keep by how much its results differ.

        Args:
            found: Gets the sizes of the differences, by what differs, where they are larger.
            eager: The outcome of the eager step.
            batch: The batch.
            number: The step's number.
            seed: Determines the bits.
        """
        disturbance = Disturbance(seed)

        def run() -> StepResult:
            with disturbance:
                return self._run(changed, number)

        with undone(self._program):
            _set(self._state, map(disturbance.of, self._state))  # one by one, to save memory
            changed = structures.mapped(disturbance.of, batch)
            other = self._outcome(run)
        olds = eager.tensors
        for what, x in other.tensors.items():
            old = olds[what]
            if x.dtype.is_floating_point and x.shape == old.shape:
                difference = sizes(x, old, other.before_of(what), eager.before_of(what))
                found[what] = larger(found.get(what, (0.0, 0.0)), difference)

    def _check_replay(
        self,
        replayed: Callable[[], StepResult],
        eager: _Outcome,
        how: str,
        disturbed: Mapping[str, Sizes] | None = None,
    ) -> None:
        """Replay a step, compare its effects with those of the eager one, and restore the state.

        A compiled step runs twice, since its own order of sums must repeat.

        Raises:
            _DifferentError: They differ, or the replay fails.
        """
        with undone(self._program):  # compared before that: to copy the state takes memory
            try:
                result = replayed()
            except Exception as error:
                raise _DifferentError(in_one_line(error)) from error
            found = _Outcome(result, self._named(self._state), eager.before, _generators(), "")
            self._check_equal("replayed", eager, found, how, disturbed)
            if how == COMPILED:
                found = replace(found, state=self._named(_copies(self._state)))
        if how == COMPILED:
            self._check_equal("replayed twice", found, self._outcome(replayed))

    def _run(self, batch: Any, number: int) -> StepResult:
        with self._around(self._program):
            return run_step(self._program, batch, number)

    def _outcome(self, run: Callable[[], StepResult]) -> _Outcome:
        """Run a step, and restore the state."""
        with undone(self._program):
            drawn, before = _RandomStates(), self._named(_copies(self._state))
            found = run()
            parts = (found.values, found.weights, found.broken)
            copies = ({name: on_host(x.detach()) for name, x in part.items()} for part in parts)
            state = self._named(_copies(self._state))
            return _Outcome(StepResult(*copies), state, before, _generators(), drawn.moved())

    def _named(self, state: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._paths, state, strict=True))

    def _check_equal(
        self,
        when: str,
        old: _Outcome,
        new: _Outcome,
        how: str = EXACT,
        disturbed: Mapping[str, Sizes] | None = None,
    ) -> None:
        """Raise an error for the first difference.

        Args:
            when: When the new outcome was computed, for the message.
            old: The outcome of an eager step, or of an earlier replay.
            new: The outcome of a replay.
            how: What may differ.
            disturbed: By how much disturbed eager steps differ.

        Raises:
            _DifferentError: They differ.
        """
        olds, news = old.tensors, new.tensors
        if list(olds) != list(news):
            names = [[*x.result.values, *x.result.weights] for x in (old, new)]
            raise _DifferentError(f"it returns {names[1]} first and then {names[0]}")
        for what, x in olds.items():
            if not agree(news[what], x, how, (disturbed or {}).get(what), old.before_of(what)):
                kind = _DifferentError if disturbed is None else _BeyondRoundingError
                raise kind(f"when {when}, it {what}")
        if not all(map(torch.equal, old.generators, new.generators)):
            raise _DifferentError(f"when {when}, it draws different random numbers")


@contextmanager
def undone(program: Program) -> Generator[list[tuple[Any, Any]]]:
    """Restore every variable of a program and every random state afterwards.

    Variables that are created inside are reset to their initial values: Python code that depends
    on values may take a branch that the dry run did not, and build an optimizer in it.

    The context gets the created variables, with their initial values.
    """
    state = [variable._value for variable in program.variables]
    before = _copies(state)
    states = _RandomStates()
    with variables_made() as made:
        try:
            with torch.random.fork_rng():
                yield made
        finally:
            states.put_back()
            _set(state, before)
            _set([variable._value for variable, _ in made], [value for _, value in made])


@contextmanager
def repeatable() -> Generator[None]:
    """Use deterministic algorithms, where PyTorch has them.

    Sums then do not depend on the order in which threads finish. Operations without one run as
    usual: runs that differ are found by comparing them.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.use_deterministic_algorithms(True, warn_only=not before or only_warns)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        torch.backends.cudnn.benchmark = benchmark


def _advanced(tensor: Any, added: float, distance: int) -> float:
    """Return a scalar's value after many steps.

    Args:
        tensor: The scalar.
        added: What one step adds. A float that no step changes is halved instead, or set to 1 if
            it is 0.
        distance: The number of steps.
    """
    value = tensor.item()
    if not tensor.dtype.is_floating_point:
        return min(value + int(added * distance), torch.iinfo(tensor.dtype).max)
    far = value + added * distance if added else value / 2 or 1.0
    return far if math.isfinite(far) else value


class _RandomStates:
    """The random states of Python and NumPy."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def moved(self) -> str:
        """Return the generator whose state has changed, or an empty string."""
        if random.getstate() != self._python:
            return "Python's random"
        now: Any = np.random.get_state()
        if not all(map(np.array_equal, now, self._numpy)):
            return "numpy.random"
        return ""

    def put_back(self) -> None:
        """Restore both states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _generators() -> list[Any]:
    """Return the states of PyTorch's generators."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpus]


def _copies(tensors: Sequence[Any]) -> list[Any]:
    """Return copies in main memory, which is larger than that of a device."""
    return [on_host(tensor.detach()) for tensor in tensors]


def on_host(tensor: Any) -> Any:
    """Return a copy of a tensor in main memory."""
    return tensor.to("cpu", copy=True)


def device() -> str:
    """Return the type of the device of Keras' variables, such as `"cpu"` or `"cuda"`."""
    return str(get_device()).partition(":")[0]


def step_number(step: int) -> Any:
    """Return a step's number as a tensor."""
    return torch.tensor(step, dtype=torch.int32, device=get_device())


def tensors_of(batch: Any) -> list[Any]:
    """Return the tensors of a batch as a flat list, without None."""
    return structures.flatten(batch)


def _set(tensors: Sequence[Any], values: Iterable[Any]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
