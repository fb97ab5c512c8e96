"""The validation sets of a call that trains, and when they are evaluated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..core.identity import source_facts
from ..core.progress import Progress
from ..core.triggers import Span, When
from ..data import as_source
from ..data.source import Source
from ..steps.results import merged


class Validation:
    """The validation sets and their schedule.

    Attributes:
        when: The schedule.
    """

    def __init__(self, when: When, sets: Mapping[str, Source]) -> None:
        self.when = when
        self._sets = sets
        self._last: tuple[int, dict[str, float]] = (-1, {})

    @classmethod
    def of(cls, validation: Any, every: str) -> "Validation | None":
        """Return the validation for the arguments of `fit`, or None without a validation set.

        Args:
            validation: A source, a dict of named sources, or None.
            every: The interval, such as `"1 epoch"`.
        """
        named = validation if isinstance(validation, dict) else {"": validation}
        sets = {str(name): as_source(part) for name, part in named.items() if part is not None}
        return cls(When(Span.parse(every)), sets) if sets else None

    def facts(self) -> dict[str, Any]:
        """Return the facts about the sets that need no reading, and the schedule."""
        sets = {name or "validation": source_facts(part) for name, part in self._sets.items()}
        return {"validation": sets, "validate_every": asdict(self.when.span)}

    def due(self, before: Progress, after: Progress, epoch_ended: bool = False) -> bool:
        """Return whether a validation became due between two progress values."""
        return self.when.due(before, after, epoch_ended)

    def run(self, evaluate: Callable[[Any], dict[str, float]], at: Progress) -> dict[str, float]:
        """Evaluate every set, and return results named `val_loss` or `val_<set>_loss`.

        Raises:
            StepError: Results of two sets have the same name.
        """
        results: dict[str, float] = {}
        for name, source in self._sets.items():
            prefix = f"val_{name}_" if name else "val_"
            found = {f"{prefix}{key}": value for key, value in evaluate(source).items()}
            results = merged(results, found, "another validation set", f"the set {name!r}")
        self._last = at.step, results
        return results

    @property
    def last(self) -> tuple[int, dict[str, float]]:
        """The step of the last results, and these results."""
        return self._last

    def restore(self, last: Sequence[Any]) -> None:
        """Restore the value of `last` from a checkpoint."""
        self._last = last[0], dict(last[1])

    def results_of(self, step: int) -> dict[str, float]:
        """Return the results of a step, or an empty dict if there are none."""
        return self._last[1] if self._last[0] == step else {}
