"""How the steps of rare forms of batch run: by a program of open sizes, or as Python.

A program of open sizes serves all forms that differ in sizes only. On TensorFlow it is a graph,
traced once, as in Keras' `fit`. Python code of a step that reads an open size finds None, so the
program is used only where it computes what Python computes: both run a step from the same state,
and the results are compared. That is done once for all forms; or for each form, if code outside of
Keras and TensorFlow asked for an open shape, or if a size of the form is 0 or 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..backends.base import Executor, active
from ..backends.plans import Plan
from ..backends.window import Window
from ..core.randomness import random_states, set_random_states
from .programs import FormProgram, ProgramBuilder
from .rare_forms import RareForms, name_of
from .state import State

# How many steps of a form a program of open sizes runs before the form is compiled: XLA saves about
# 2 ms of a small step, and takes 1 s to compile it.
OPEN: Final = 512
# How far two runs of a step may differ; see `_agree`.
VALUES, CHANGES, ARRAYS = 1e-3, 0.05, 0.1
Outcome = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass
class _Shared:
    """A program of open sizes.

    Attributes:
        made: The program of the form that it was made from.
        sizes: The sizes that it has.
        executor: Its executor; None if the step needs the sizes.
        reads_sizes: Whether the step may treat forms differently; see `Facts`.
    """

    made: FormProgram
    sizes: Any
    executor: Executor | None
    reads_sizes: bool = False


class RarePrograms:
    """The executors of rare forms.

    Args:
        forms: Counts the steps of the forms.
        builder: Makes executors.
    """

    def __init__(self, forms: RareForms, builder: ProgramBuilder) -> None:
        self.forms, self._builder = forms, builder
        self._shared: _Shared | None = None

    @property
    def programs(self) -> int:
        """The number of compiled programs of open sizes."""
        return self._shared.executor.programs if self._shared and self._shared.executor else 0

    def start_over(self) -> None:
        """Discard the program of open sizes, because the step has changed."""
        self._shared = None

    def left(self, form: Any) -> int:
        """Return how many steps of a form run before it is compiled; 0 if it is not rare."""
        forms, name = self.forms, name_of(form)
        python = self._builder.steps_as_python(forms.compiler) if forms.compiler else 0
        if not python or not forms.left(name, most=OPEN):
            return 0
        if self._may_open(form) and not self._is_made():
            return 1  # it is not known yet
        return forms.left(name, OPEN if self._opened(form) else 0 if forms.loops else python)

    def prepare(self, made: FormProgram, window: Window, state: State) -> bool:
        """Make the program of open sizes for a rare form; return whether it is new.

        It is compared with Python where that was not done.
        """
        form = made.spec.form
        if made.chosen or not self.left(form) or not self._may_open(form):
            return False
        new = not self._is_made()
        if new:
            self._shared = self._traced(made, window)
        agreed, key = self.forms.agreed, self._key(form)
        if self._shared is not None and self._shared.executor is not None and key not in agreed:
            python = self._builder.executor(made.program, eager=True)
            agreed[key] = _compare(self._shared.executor, python, window, state)
        return new

    def executor(self, made: FormProgram) -> Executor:
        """Return the executor of a rare form."""
        python = self._builder.executor
        return self._opened(made.spec.form) or python(made.program, eager=True)

    def covered(self, form: Any) -> FormProgram | None:
        """Return a program for a form that needs no dry run; None if it needs one."""
        opened = self._opened(form) is not None and not self._key(form) and self.left(form)
        if not opened or self._shared is None:
            return None
        return self._builder.build(replace(self._shared.made.spec, form=form))

    def ran(self, form: Any, steps: int) -> Plan:
        """Count steps of a rare form; return how they ran."""
        opened = self._opened(form)
        self.forms.ran(name_of(form), steps)
        if opened is not None:
            why = f"sizes that came in fewer than {OPEN} steps share a program"
            return replace(opened.plan, why=why)
        most = self._builder.steps_as_python(self.forms.compiler)
        return Plan("", False, 1, f"a form is compiled when {most} of its steps have run")

    def _may_open(self, form: Any) -> bool:
        return self._builder.may_open and self.forms.widen(form)

    def _is_made(self) -> bool:
        """Return whether the program is for the sizes that are open, and the present variables."""
        shared = self._shared
        if shared is None or shared.sizes != self.forms.sizes:
            return False
        return shared.made.spec.is_current()

    def _opened(self, form: Any) -> Executor | None:
        """Return the executor of open sizes if it runs a form."""
        usable = self._shared is not None and self._may_open(form) and self._is_made()
        agreed = usable and self.forms.agreed.get(self._key(form))
        return self._shared.executor if agreed and self._shared is not None else None

    def _key(self, form: Any) -> str:
        """Return the key in `RareForms.agreed` that holds for a form."""
        reads = self._shared is not None and self._shared.reads_sizes
        return name_of(form) if reads or self.forms.has_tiny(form) else ""

    def _traced(self, made: FormProgram, window: Window) -> _Shared:
        sizes = self.forms.sizes
        executor = active().open_executor(made.program, *sizes.values())
        if executor is None:
            return _Shared(made, sizes, None)
        try:
            facts = executor.facts(window)
            executor.compile(window)
        except Exception:  # it needs the sizes; a mistake is shown by the form's own program
            return _Shared(made, sizes, None)
        return _Shared(made, sizes, executor, facts.reads_sizes)


def _compare(opened: Executor, python: Executor, window: Window, state: State) -> bool:
    """Return whether two executors compute the same in a step; all state is restored."""
    one = window.split(1)[0] if window.count > 1 else window
    random, kept, before = random_states(), state.keep(), state.arrays()

    def outcome(executor: Executor) -> Outcome:
        try:
            with active().own_random():
                values, weights, _ = executor.run(one, 0, background=False).fetch()
            return {**values, **{f"weight of {x}": n for x, n in weights.items()}}, state.arrays()
        finally:
            state.put_back(kept)
            set_random_states(random)

    expected = outcome(python)
    try:
        found = outcome(opened)
    except Exception:  # such as shapes that fit only where they are fixed
        return False
    return _agree(found, expected, before)


def _agree(one: Outcome, other: Outcome, before: Mapping[str, Any]) -> bool:
    """Return whether two outcomes differ as little as rounding explains.

    Values must be close, and each array must be changed by both or by neither. Nine in ten arrays
    must change by the same: an optimizer such as Adam makes an update of full size from a gradient
    that is zero up to rounding, such as that of the keys' bias in attention.
    """
    (values, after), (values_other, after_other) = one, other
    if values.keys() != values_other.keys() or not all(
        np.allclose(x, values_other[name], rtol=VALUES, atol=1e-6, equal_nan=True)
        for name, x in values.items()
    ):
        return False
    changed = [path for path, x in after.items() if not _equal(x, before[path])]
    if changed != [path for path, x in after_other.items() if not _equal(x, before[path])]:
        return False
    apart = [p for p in changed if not _close(after[p], after_other[p], before[p])]
    return len(apart) <= ARRAYS * len(changed)


def _equal(x: Any, y: Any) -> bool:
    return np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")


def _close(x: Any, y: Any, before: Any) -> bool:
    """Return whether two arrays changed by about the same; exactly, if they are whole numbers."""
    if x.dtype.kind != "f" or _equal(x, y):
        return _equal(x, y)
    x, y, before = (a.astype("float64").ravel() for a in (x, y, before))
    floor = 1e-6 * (np.linalg.norm(before) + 1)
    return bool(np.linalg.norm(x - y) <= CHANGES * np.linalg.norm(y - before) + floor)
