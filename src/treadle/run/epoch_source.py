"""The source that the current epoch is read from: where it began, and whether another is the same.

The position within an epoch belongs to a source. If a call opens another source than that of the
unfinished epoch, it does not continue there: see `Engine.windows`. In a body of `loop.epochs`, each
`loop.steps` is a visit of a source, and a source that was left in the epoch continues.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..data.same_source import describe_source, is_same_source
from ..data.source import Source


@dataclass
class SourceVisit:
    """An earlier visit of a source in this epoch.

    Attributes:
        source: The source; None in a resumed process, until the body opens it.
        batches: How many of its batches were trained on, if it was left and not visited again.
    """

    source: Source | None
    batches: int | None


class EpochSource:
    """The source of the current epoch.

    In one process, a source is the same if it is the same object, or if both consist of arrays and
    have equal descriptions. A checkpoint contains the description only, so that a source of a
    resumed run is the same if its description is equal.

    Attributes:
        began: The number of batches of the epoch that were trained on before this source began.
        earlier: The visits of the epoch before this one, in a body of `loop.epochs`.
        ended: Whether the source has given all batches of the epoch in this visit.
        since: The epoch in which the loop began with this source, or with the first of the body.
    """

    def __init__(self) -> None:
        self.began = self.since = 0
        self.earlier: list[SourceVisit] = []
        self.ended = False
        self._source: Source | None = None
        self._described: Mapping[str, Any] | None = None  # by a checkpoint
        # The source before, and the step after which it was left: a rollback may return to it.
        self._before: tuple[Source | None, int] = None, -1

    @property
    def recorded(self) -> Mapping[str, Any] | None:
        """The description by a checkpoint, while this process does not know the source."""
        return self._described if self._source is None else None

    def is_other(self, source: Source) -> bool:
        """Return whether a source is another one than that of the epoch; not if that is unknown."""
        if self._source is not None:
            return not is_same_source(source, self._source)
        return self._described is not None and describe_source(source) != self._described

    def is_whole(self, batch: int) -> bool:
        """Return whether the epoch is complete after a batch; not if its length is unknown."""
        known = self._described or {}
        length = known.get("length") if self._source is None else self._source.length
        return length is not None and batch - self.began == length

    def use(self, source: Source, step: int) -> None:
        """Read the epoch from a source, after a step."""
        self.ended = False
        if self._source is not source:
            self._before = self._source, step
        self._source, self._described = source, None

    def recognize(self, source: Source) -> None:
        """Take the source of a skipped call for that of the checkpoint, if it is the same."""
        if self._described is not None and describe_source(source) == self._described:
            self._source = source

    def begin_epoch(self) -> None:
        """Begin the next epoch, of the same source or of another one."""
        self.began, self.earlier, self.ended = 0, [], False

    def add(self, source: Source, batch: int) -> None:
        """Let a source follow within the epoch, after `batch` of its batches.

        It continues if it was left in this epoch.
        """
        self.earlier.append(SourceVisit(self._source, None if self.ended else batch - self.began))
        self.began = batch
        for visit in self.earlier:
            known, batches = visit.source, visit.batches
            if known is not None and batches is not None and is_same_source(source, known):
                self.began, visit.batches = batch - batches, None

    def skip(self, source: Source, left: int) -> None:
        """Skip the visit of a source that an earlier process has ended, one of the last `left`."""
        self.earlier[-left].source = source

    def state(self) -> dict[str, Any] | None:
        """Return what `restore` needs, in JSON's types; None before the first source."""
        described = self._described if self._source is None else describe_source(self._source)
        if described is None:
            return None
        return {
            "described": described,
            "began": self.began,
            "earlier": [visit.batches for visit in self.earlier],
            "since": self.since,
        }

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore a state that was saved after a step."""
        before, left_at = self._before
        known = before if step <= left_at else self._source
        self.begin_epoch()
        self.since = 0
        self._source = self._described = None
        if state is not None:
            self.began, self.since = state["began"], state["since"]
            self.earlier = [SourceVisit(None, batches) for batches in state["earlier"]]
            self._described = state["described"]
            if known is not None:  # a rollback within this process
                self.recognize(known)
