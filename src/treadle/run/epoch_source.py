"""The source that the current epoch is read from: where it began, and whether another is the same.

The position within an epoch belongs to a source. If a call opens another source than that of the
unfinished epoch, it does not continue there: see `Session.open`.
"""

from collections.abc import Mapping
from typing import Any

from ..data.same_source import describe_source, is_same_source
from ..data.source import Source


class EpochSource:
    """The source of the current epoch.

    In one process, a source is the same if it is the same object, or if both consist of arrays and
    have equal descriptions. A checkpoint contains the description only, so that a source of a
    resumed run is the same if its description is equal.

    Attributes:
        began: The number of batches of the epoch that were trained on before this source began.
        earlier: The number of sources of the epoch before this one, in a body of `loop.epochs`.
        since: The epoch in which the loop began with this source, or with the first of the body.
    """

    def __init__(self) -> None:
        self.began = self.earlier = self.since = 0
        self._source: Source | None = None
        self._described: Mapping[str, Any] | None = None  # by a checkpoint
        # The source before, and the step after which it was left: a rollback may return to it.
        self._before: tuple[Source | None, int] = None, -1

    def is_other(self, source: Source) -> bool:
        """Return whether a source is another one than that of the epoch; not if that is unknown."""
        if self._source is not None:
            return not is_same_source(source, self._source)
        return self._described is not None and describe_source(source) != self._described

    def use(self, source: Source, step: int) -> None:
        """Read the epoch from a source, after a step."""
        if self._source is not source:
            self._before = self._source, step
        self._source, self._described = source, None

    def recognize(self, source: Source) -> None:
        """Take the source of a skipped call for that of the checkpoint, if it is the same."""
        if self._described is not None and describe_source(source) == self._described:
            self._source = source

    def begin_epoch(self) -> None:
        """Begin the next epoch, of the same source or of another one."""
        self.began = self.earlier = 0

    def add(self, batch: int) -> None:
        """Let another source follow within the epoch, after `batch` of its batches."""
        self.began, self.earlier = batch, self.earlier + 1

    def state(self) -> dict[str, Any] | None:
        """Return what `restore` needs, in JSON's types; None before the first source."""
        described = self._described if self._source is None else describe_source(self._source)
        if described is None:
            return None
        return {
            "described": described,
            "began": self.began,
            "earlier": self.earlier,
            "since": self.since,
        }

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore a state that was saved after a step."""
        before, left_at = self._before
        known = before if step <= left_at else self._source
        self.began = self.earlier = self.since = 0
        self._source = self._described = None
        if state is not None:
            self.began, self.earlier = state["began"], state["earlier"]
            self.since = state["since"]
            self._described = state["described"]
            if known is not None:  # a rollback within this process
                self.recognize(known)
