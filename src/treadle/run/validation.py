"""The validation sets of a call that trains, and when they are evaluated."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from ..core.identity import source_facts
from ..core.progress import Progress
from ..core.triggers import Span, When
from ..data import as_source
from ..data.source import Source, check_it_ends
from ..steps.results import merged

T = TypeVar("T")


class Validation:
    """The validation sets and their schedule."""

    def __init__(self, when: When, sets: Mapping[str, Source]) -> None:
        self.when = when
        self._sets = sets
        self._last: tuple[int, dict[str, float]] = (-1, {})

    @classmethod
    def of(cls, validation: Any, every: str | When) -> "Validation | None":
        """Return the validation for the arguments of `fit`, or None without a validation set.

        Args:
            validation: A source, a dict of named sources, or None.
            every: The interval, such as `"1 epoch"`, or a trigger.
        """
        named = validation if isinstance(validation, dict) else {"": validation}
        sets = {
            str(name): check_it_ends(as_source(part), "validation")
            for name, part in named.items()
            if part is not None
        }
        when = every if isinstance(every, When) else When(Span.parse(every))
        return cls(when, sets) if sets else None

    def facts(self) -> dict[str, Any]:
        """Return the facts about the sets that need no reading, and the schedule."""
        sets = {name or "validation": source_facts(part) for name, part in self._sets.items()}
        return {"validation": sets, "validate_every": self.when.facts()}

    def due(self, before: Progress, after: Progress, epoch_ended: bool = False) -> bool:
        """Return whether a validation became due between two progress values."""
        return self.when.due(before, after, epoch_ended)

    @property
    def sources(self) -> Collection[Source]:
        """The validation sets."""
        return self._sets.values()

    def run(
        self, evaluate: Callable[[Any], dict[str, float]], at: Progress, trained: Collection[str]
    ) -> dict[str, float]:
        """Evaluate every set, and return results named `val_loss` or `val_<set>_loss`.

        Args:
            evaluate: A function that evaluates a source.
            at: The current progress.
            trained: The names of the values of the train step.

        Raises:
            StepError: Results of two sets have the same name.
        """
        results = self.named(evaluate, trained)
        self._last = at.step, results
        return results

    def named(
        self, results_of: Callable[[Any], Mapping[str, float]], trained: Collection[str]
    ) -> dict[str, float]:
        """Return the results of every set by the names under which they are recorded.

        A value that `eval_step` names `val_loss` keeps this name, unless the train step has it too.

        Raises:
            StepError: Results of two sets have the same name.
        """
        results: dict[str, float] = {}
        for name, source in self._sets.items():
            prefix, found = f"val_{name}_" if name else "val_", _of_set(name, results_of, source)
            short = {key: key.removeprefix("val_") for key in found}
            new = {
                prefix + (key if short[key] in found or key in trained else short[key]): value
                for key, value in found.items()
            }
            results = merged(results, new, "another validation set", f"the set {name!r}")
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


def _of_set(name: str, results_of: Callable[[Any], T], source: Source) -> T:
    """Return the results of a set; errors get a note with its name, if it has one."""
    try:
        return results_of(source)
    except Exception as error:
        if name:
            error.add_note(f"in the validation set {name!r}")
        raise
