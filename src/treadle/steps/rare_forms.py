"""Forms of batch that are rare so far: their steps run as Python until they have come back often.

Texts, graphs and clouds of points have another shape in nearly every batch. To compile a step for a
form takes as long as a number of its steps as Python, so it is compiled when as many have run.
Whatever comes, that takes at most twice the time of the better choice, and no rule that does not
know the batches to come can promise less (A. Karlin, M. Manasse, L. Rudolph, D. Sleator:
"Competitive snoopy caching", Algorithmica 3, 1988).

How a step runs depends on the batches alone. Checkpoints hold the counts, so that a resumed run
gives the same bits also where compiled steps round differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..backends.base import active
from ..checkpoint.batch_forms import text_of
from ..core.options import Options

AT_ONCE = 2  # forms that are compiled at once: the batches of an epoch, and a shorter last one
MOST = 1000  # forms that are counted; then the one that did not come for the longest is forgotten


@dataclass
class RareForms:
    """How often forms of batch came that are not compiled.

    Attributes:
        compiler: The compiler of the newest compiled form; empty before there are `AT_ONCE`, or if
            the step has loops that are slow as Python.
        compiled: The names of the forms that are compiled, in order.
        counts: The steps of each other form, by its name, the newest last.

    Example:
        >>> forms = RareForms(compiled=["b1", "0a"])
        >>> forms.ran("c7", 3)
        >>> forms.left("c7", most=16), forms.left("0a", most=16)
        (13, 0)
    """

    compiler: str = ""
    compiled: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def left(self, name: str, most: int) -> int:
        """Return how many further steps of a form run as Python, of `most` in all."""
        known = not name or name in self.compiled
        return 0 if known else max(0, most - self.counts.get(name, 0))

    def ran(self, name: str, steps: int) -> None:
        """Count steps of a form that ran as Python."""
        self.counts[name] = self.counts.pop(name, 0) + steps
        if len(self.counts) > MOST:
            del self.counts[next(iter(self.counts))]

    def compile(self, name: str, compiler: str) -> None:
        """Note that a form is compiled."""
        self.counts.pop(name, None)
        if name and name not in self.compiled:
            self.compiled.append(name)
            if len(self.compiled) >= AT_ONCE:
                self.compiler = compiler

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the attributes that a checkpoint holds."""
        self.compiler = saved["compiler"]
        self.compiled, self.counts = [*saved["compiled"]], {**saved["counts"]}


def steps_as_python(compiler: str, options: Options) -> int:
    """Return how many steps of a rare form run as Python; 0 if each form is compiled at once.

    Args:
        compiler: The compiler of the other forms.
        options: The options of the loop.
    """
    free = options.execution == "auto" and options.jit is None and not options.checked
    free &= options.compiler in ("auto", compiler)
    return active().rare_steps.get(compiler, 0) if free else 0


def name_of(form: Any) -> str:
    """Return a short name of a form that `described` returned; empty if there is none."""
    text = text_of(form)
    return text and blake2b(text.encode(), digest_size=8).hexdigest()
