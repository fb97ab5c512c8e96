"""Forms of batch that are rare so far: how their steps run until they have come back often.

Texts, graphs and clouds of points have another shape in nearly every batch, and to compile a step
for a form takes as long as many of its steps. So a rare form runs in one of two ways:

- By one program for all forms that differ in sizes only, if the backend has one (TensorFlow) and
  it gives the same values; see `rare_programs`.
- Else as Python, until as many steps have run as compiling takes. Where the number is right, that
  takes at most twice the time of the better choice, and no rule that does not know the batches to
  come can promise less (A. Karlin, M. Manasse, L. Rudolph, D. Sleator: "Competitive snoopy
  caching", Algorithmica 3, 1988). The number is fixed, so it is wrong for some networks.

How a step runs depends on the batches alone. Checkpoints hold the counts, so that a resumed run
gives the same bits also where compiled steps round differently.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ..checkpoint.batch_forms import text_of

AT_ONCE = 2  # forms that are compiled at once: the batches of an epoch, and a shorter last one
MOST = 1000  # forms that are counted; then the one that did not come for the longest is forgotten
_ARRAY = re.compile(r'(\["array","[^"]*",)\[([\d,]*)\]')  # in the text of a form
Sizes = Sequence[Sequence[int | None]]


@dataclass
class RareForms:
    """How often forms of batch came that are not compiled.

    Attributes:
        compiler: The compiler of the newest compiled form; empty before there are `AT_ONCE`.
        as_python: Whether steps run as Python that the program of open sizes does not run. Steps
            with loops are slow so, and evaluations are compiled instead.
        compiled: The names of the forms that are compiled, in order.
        counts: The steps of each other form, by its name, the newest last.
        sizes: The shapes of the arrays of the first form, by a text of what it is besides its
            sizes, with None for sizes in which a later form differs.
        agreed: Whether the program of open sizes runs the form of this name, which got the same
            values by it as in its dry run.

    Example:
        >>> forms = RareForms(compiled=["b1", "0a"])
        >>> forms.ran("c7", 3)
        >>> forms.left("c7", most=16), forms.left("0a", most=16)
        (13, 0)
    """

    compiler: str = ""
    as_python: bool = True
    compiled: list[str] = field(default_factory=list[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    sizes: dict[str, Sizes] = field(default_factory=dict[str, Sizes])
    agreed: dict[str, bool] = field(default_factory=dict[str, bool])

    def left(self, name: str, most: int) -> int:
        """Return how many further steps of a form run before it is compiled, of `most` in all."""
        known = not name or name in self.compiled
        return 0 if known else max(0, most - self.counts.get(name, 0))

    def ran(self, name: str, steps: int) -> None:
        """Count steps of a form that is not compiled."""
        self.counts[name] = self.counts.pop(name, 0) + steps
        if len(self.counts) > MOST:
            oldest = next(iter(self.counts))
            del self.counts[oldest]
            self.agreed.pop(oldest, None)

    def compile(self, name: str, compiler: str, loops: bool) -> None:
        """Note that a form is compiled, and whether its step has loops."""
        self.counts.pop(name, None)
        self.agreed.pop(name, None)
        if name and name not in self.compiled:
            self.compiled.append(name)
            self.as_python &= not loops
            if len(self.compiled) >= AT_ONCE:
                self.compiler = compiler

    def widen(self, form: Any) -> bool:
        """Open the sizes in which a form differs from all before; return whether only they do.

        The number of examples stays closed: Keras averages differently if it is unknown.
        """
        text, sizes, wider = text_of(form), list[Any](), list[Any]()
        for _, shape in _ARRAY.findall(text):
            sizes.append([*map(int, filter(None, shape.split(",")))])
        kind = _ARRAY.sub(r"\1", text)
        known = self.sizes.get(kind, ()) if self.sizes else sizes
        if len(known) != len(sizes):
            return False
        for now, before in zip(sizes, known, strict=True):
            if len(now) != len(before) or now[:1] != before[:1]:
                return False
            wider.append([n if n == m else None for n, m in zip(now, before, strict=True)])
        if wider != known:  # the program will be another one
            self.agreed = dict.fromkeys(self.agreed, False)
        self.sizes = {kind: wider}
        return True

    def saved(self) -> dict[str, Any]:
        """Return a copy of all attributes, as a checkpoint holds them."""
        return deepcopy(vars(self))

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the attributes that a checkpoint holds."""
        for name, default in vars(RareForms(as_python=self.as_python)).items():
            setattr(self, name, deepcopy(saved.get(name, default)))


def name_of(form: Any) -> str:
    """Return a short name of a form that `described` returned; empty if there is none."""
    text = text_of(form)
    return text and blake2b(text.encode(), digest_size=8).hexdigest()
