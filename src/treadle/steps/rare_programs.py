"""How the steps of rare forms of batch run: by a program of open sizes, or as Python.

A program of open sizes serves all forms that differ in sizes only. On TensorFlow it is a graph,
traced once, as in Keras' `fit`. Python code of a step that reads an open size finds None, and may
go another way than for the size itself. So the program is not used if code outside of Keras and
TensorFlow asked for an open shape. And as Keras reads sizes too, each form has its dry run, in
which Keras finds mistakes, and must return the same values by the program for its first batch.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..backends.base import Executor, active
from ..backends.plans import Plan
from ..backends.window import Window
from ..core import structures
from ..core.randomness import random_states, set_random_states
from .programs import FormProgram, ProgramBuilder
from .rare_forms import RareForms, name_of
from .spec import StepSpec
from .state import State

# How many steps of a form a program of open sizes runs before the form is compiled: XLA saves about
# 2 ms of a small step, and takes 1 s to compile it.
OPEN: Final = 512
CLOSE, ZERO = 1e-3, 1e-6  # the relative and the absolute difference that rounding explains


@dataclass
class SharedProgram:
    """A program of open sizes.

    Attributes:
        spec: The findings of the dry run of the form that it was made from.
        sizes: The sizes that it has.
        executor: Its executor; None if the step needs the sizes.
    """

    spec: StepSpec
    sizes: Any
    executor: Executor | None = None


class RarePrograms:
    """The executors of rare forms.

    Args:
        forms: Counts the steps of the forms.
        builder: Makes executors.

    Attributes:
        shared: The program of open sizes; None before there is one.
    """

    def __init__(self, forms: RareForms, builder: ProgramBuilder) -> None:
        self.forms, self._builder = forms, builder
        self.shared: SharedProgram | None = None

    def start_over(self) -> None:
        """Discard the program of open sizes, because the step has changed."""
        self.shared = None

    def compiled(self, form: Any, compiler: str, loops: bool) -> None:
        """Note that a form is compiled, and whether its step has loops."""
        self.forms.compile(name_of(form), compiler, loops)
        if active().opens_sizes:
            self.forms.widen(form)

    def left(self, form: Any) -> int:
        """Return how many steps of a form run before it is compiled; 0 if it is not rare."""
        forms, name = self.forms, name_of(form)
        python = self._builder.steps_as_python(forms.compiler) if forms.compiler else 0
        if not python or not forms.left(name, most=OPEN):
            return 0
        agreed = forms.agreed.get(name) if self._may_open(form) else False
        if agreed is None:
            return 1  # it is not known yet
        return forms.left(name, OPEN if agreed else python if forms.as_python else 0)

    def is_undecided(self, made: FormProgram) -> bool:
        """Return whether the dry run of a form must decide how it runs."""
        form = made.spec.form
        open_later = not made.chosen and self._may_open(form) and self.left(form)
        return bool(open_later) and name_of(form) not in self.forms.agreed

    def decide(self, made: FormProgram, batch: Any, state: State) -> None:
        """Decide whether a form runs by the program of open sizes, after its dry run with a batch.

        That is done once: a checkpoint holds the answer.
        """
        window = Window(structures.mapped(lambda x: np.asarray(x)[None], batch), 1, 1)
        opened = self._made_for(made, window)
        agreed = opened is not None and _agrees(opened, made, window, state)
        self.forms.agreed[name_of(made.spec.form)] = agreed

    def executor(self, made: FormProgram, window: Window) -> Executor:
        """Return the executor of a rare form."""
        form, opened = made.spec.form, None
        if self._may_open(form) and self.forms.agreed.get(name_of(form)):
            opened = self._made_for(made, window)
            self.forms.agreed[name_of(form)] = opened is not None  # the step may have changed
        return opened or self._builder.executor(made.program, eager=True)

    def ran(self, form: Any, steps: int, plan: Plan) -> Plan:
        """Count steps of a rare form that ran by a plan, and return it with the reason."""
        self.forms.ran(name_of(form), steps)
        if plan.compiler:
            why = f"sizes that came in fewer than {OPEN} steps share a program"
            return replace(plan, why=why)
        most = self._builder.steps_as_python(self.forms.compiler)
        return Plan("", False, 1, f"a form is compiled when {most} of its steps have run")

    def _may_open(self, form: Any) -> bool:
        return active().opens_sizes and self.forms.widen(form)

    def _made_for(self, made: FormProgram, window: Window) -> Executor | None:
        """Return the executor of open sizes; None if the step needs the sizes."""
        shared, sizes = self.shared, self.forms.sizes
        if shared is None or shared.sizes != sizes or not shared.spec.is_current():
            shared = self.shared = SharedProgram(made.spec, sizes)
            executor = active().open_executor(made.program, *sizes.values())
            with suppress(Exception):  # a mistake is shown by the form's own program
                if executor is not None and not executor.facts(window).reads_sizes:
                    executor.compile(window)
                    shared.executor = None if executor.calls_python else executor
        return shared.executor


def _agrees(opened: Executor, made: FormProgram, window: Window, state: State) -> bool:
    """Return whether a program gives the values that the dry run of a form gave; undo its step.

    Values that are not finite, or all zero, prove nothing.
    """
    random, kept = random_states(), state.keep()
    try:
        with active().own_random():
            values, _, broken = opened.run(window, 0, background=False).fetch()
    except Exception:  # such as shapes that fit only where they are fixed
        return False
    finally:
        state.put_back(kept)
        set_random_states(random)
    computed: dict[str, Any] = {}
    for returned in made.spec.dry_values:  # a trace computes nothing
        computed.update({n: x.numpy() for n, x in returned.items() if hasattr(x, "numpy")})
    pairs = [(values[name][0], x) for name, x in computed.items()]
    close = all(np.isfinite(y).all() and np.allclose(x, y, CLOSE, ZERO) for x, y in pairs)
    return close and not broken and any(np.any(np.abs(y) > ZERO) for _, y in pairs)
