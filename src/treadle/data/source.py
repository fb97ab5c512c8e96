"""The protocols of data sources and their readers, and the request that opens a reader."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

from ..backends.window import Window
from ..checkpoint.structure import from_snapshot
from ..core.hook import LoopView
from ..errors import DataError, TreadleWarning

USUAL = 10_000  # batches of an epoch of training of unknown length

Position = Mapping[str, Any]
"""The state of a reader in addition to (epoch, batch): JSON types and NumPy arrays."""


class Reader(Protocol):
    """Reads one epoch."""

    def take(self, most: int) -> Window | None:
        """Return up to `most` batches with equal shapes and dtypes; None at the end of the epoch.

        A window may have fewer than `most` batches although more follow. The caller may modify the
        arrays of a window.
        """
        ...

    def put_back(self, window: Window) -> None:
        """Put back a window that was not trained on; the next `take` returns it first.

        Only the batches taken last can be put back.
        """
        ...

    def position(self, ahead: int = 0) -> Position | None:
        """Return the state needed, in addition to (epoch, batch), to continue in another process.

        This also works at the end of the epoch and after `close`, since the next epoch may need the
        position. A reader without this method needs no position.

        Args:
            ahead: The number of batches taken last that were only prefetched and count as not
                taken.

        Returns:
            The `position` argument for `Source.read`, which must not be modified; None if (epoch,
            batch) is sufficient.

        Raises:
            DataError: If a state contains values that cannot be stored in checkpoints.
        """
        ...

    def close(self) -> None:
        """Release threads and files."""
        ...


@runtime_checkable
class Source(Protocol):
    """A source of batches, read epoch by epoch, from any position."""

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch; None if unknown or endless."""
        ...

    @property
    def endless(self) -> bool:
        """Whether an epoch is known never to end."""
        ...

    @property
    def batch_examples(self) -> int | None:
        """The number of examples in a full batch; None if unknown."""
        ...

    @property
    def inexact(self) -> str | None:
        """The reason why the source cannot be resumed exactly, as a clause; None if it can."""
        ...

    @property
    def closed_loop(self) -> bool:
        """Whether batches depend on the state of the run, so that they cannot be prefetched."""
        ...

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
        position: Position | None = None,
    ) -> Reader:
        """Read an epoch, starting at batch `start`.

        The arguments are fields of `ReadRequest`. `position` is passed only if it is not None.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What to read from a source: an epoch, its first batch, and the state of the run.

    The loop creates one request for each reader that it opens. Sources that combine other sources
    derive the requests for these with `at`.

    Attributes:
        epoch: The number of the epoch, from 0; the order depends on it and on `seed`.
        start: The number of batches to skip.
        seed: The seed of the run, used if the source has no seed.
        loop: The running loop, for sources that depend on its state; None outside a loop.
        ordered: Return examples in stored order, if the source shuffles them. Predictions then have
            the order of the data.
        position: The position that a reader returned at this batch or at the end of the previous
            epoch; None if there is none.
        since: The epoch in which the loop began with this source, after other data.
        first: The number of the first batch to draw; batches from `first` to `start` are discarded.
    """

    epoch: int
    start: int = 0
    seed: int = 0
    loop: LoopView | None = None
    ordered: bool = False
    position: Position | None = None
    since: int = 0
    first: int = 0

    def at(self, epoch: int, start: int = 0, position: Position | None = None) -> "ReadRequest":
        """Return the same request for another place."""
        return replace(self, epoch=epoch, start=start, position=position)

    def drawn(self, seeks: bool = False) -> "ReadRequest":
        """Return the same request with the first batch to draw, and validate its position.

        Args:
            seeks: Whether the source can start at any batch. A position of this epoch contains its
                own first batch.

        Raises:
            DataError: If the position is of a later batch than `start`.
        """
        first, at = self.start if seeks else 0, self.position
        if at is not None and at["epoch"] == self.epoch:
            first = at["batch"]
            if first > self.start and not at.get("ended"):
                raise DataError(
                    f"the source's position is of batch {first} of epoch {self.epoch + 1}, but "
                    f"only {self.start} were trained on: it belongs to a later step of the run"
                )
        return replace(self, first=first)

    def state(self) -> Any:
        """Return the state within this epoch from which to continue, or None."""
        at = self.position
        return from_snapshot(at["state"]) if at is not None and at["epoch"] == self.epoch else None

    def ended(self) -> bool:
        """Return whether the iterator of this epoch was already exhausted."""
        at = self.position
        return at is not None and at["epoch"] == self.epoch and bool(at.get("ended"))

    def last_state(self) -> Any:
        """Return the state within this epoch or at the end of an earlier one, or None."""
        at = self.position
        if at is None or at["epoch"] == self.epoch:
            return self.state()
        return from_snapshot(at.get("after", at["state"]))


class BaseSource(ABC):
    """Base class of Treadle's sources: `read` collects its arguments into one `ReadRequest`."""

    @property
    def length_varies(self) -> bool:
        """Whether the data itself may change its length between epochs."""
        return any(getattr(part, "length_varies", False) for part in parts_of(self))

    @property
    def intact(self) -> bool:
        """Whether no array of the source may have changed since it was opened."""
        return all(getattr(part, "intact", True) for part in parts_of(self))

    @abstractmethod
    def open(self, request: ReadRequest) -> Reader:
        """Open a reader for a request."""

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
        position: Position | None = None,
        since: int = 0,
    ) -> Reader:
        """Read an epoch, starting at batch `start`; see `ReadRequest` for the arguments."""
        return self.open(ReadRequest(epoch, start, seed, loop, ordered, position, since))


class DerivedSource(BaseSource):
    """Base class of sources that read from one other source, whose attributes they have too."""

    source: Source

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch; None if unknown or endless."""
        return self.source.length

    @property
    def endless(self) -> bool:
        """Whether an epoch is known never to end."""
        return self.source.endless

    @property
    def batch_examples(self) -> int | None:
        """The number of examples in a full batch; None if unknown."""
        return self.source.batch_examples

    @property
    def inexact(self) -> str | None:
        """The reason why the source cannot be resumed exactly, or None."""
        return self.source.inexact

    @property
    def closed_loop(self) -> bool:
        """Whether the source's batches depend on the state of the run."""
        return self.source.closed_loop


class DerivedReader:
    """Base class of readers that pass on to one other reader what they do not change."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def position(self, ahead: int = 0) -> Position | None:
        """Return the position of the other reader."""
        return position_of(self._reader, ahead)

    def finish(self) -> None:
        """End the epoch of the other reader."""
        finish(self._reader)

    def close(self) -> None:
        """Close the other reader."""
        self._reader.close()


def read_from(source: Source, request: ReadRequest) -> Reader:
    """Open a reader of any source: the only place where a request becomes arguments of `read`.

    A user's `read` may lack the argument `position`, which most sources do not need, and has no
    `since`.
    """
    more: dict[str, Any] = {} if request.position is None else {"position": request.position}
    if request.since and isinstance(source, BaseSource):
        more["since"] = request.since
    return source.read(
        request.epoch,
        request.start,
        seed=request.seed,
        loop=request.loop,
        ordered=request.ordered,
        **more,
    )


def parts_of(source: Any) -> list[Source]:
    """Return the sources that a source combines."""
    if isinstance(inner := getattr(source, "source", None), Source):
        return [inner]
    if isinstance(inner := getattr(source, "sources", None), dict):
        return list(inner.values())  # type: ignore[reportUnknownArgumentType]
    return list(inner) if isinstance(inner, tuple) else []  # type: ignore[reportUnknownArgumentType]


def check_it_ends(source: Source, what: str) -> Source:
    """Return a source that is read to its end.

    Args:
        source: The source.
        what: What reads it, for the message.

    Raises:
        DataError: It is known never to end.
    """
    if source.endless:
        raise DataError(
            f"{what} reads its data to the end, but this source never ends: choose how many "
            "batches with treadle.data.limited(source, batches)"
        )
    return source


class EndExpected:
    """Warns once if a source of unknown length has given very many batches.

    Args:
        what: What reads it, for the message.
        length: The source's number of batches if that is known.
        usual: The number of batches of an epoch of training, if that is known.

    Attributes:
        length: The source's number of batches if that is known.
    """

    def __init__(self, what: str, length: int | None, usual: int | None) -> None:
        self.length, self._what, self._count = length, what, 0
        self._most = None if length is not None else 10 * (usual or USUAL)

    def add(self, count: int) -> None:
        """Count batches."""
        self._count += count
        if self._most is not None and self._count >= self._most:
            warnings.warn(
                f"{self._what} has read {self._count:,} batches of a source of unknown length, and "
                "reads to its end: if it never ends, choose how many batches with "
                "treadle.data.limited(source, batches)",
                TreadleWarning,
                stacklevel=2,
            )
            self._most = None


def shards_of(source: Any) -> int | None:
    """Return into how many shares a source is divided, of which each process reads one, or None.

    A user's source may have an attribute `shards` too, such as the names of its files.
    """
    return getattr(source, "shards", None) if isinstance(source, BaseSource) else None


def finish(reader: Reader) -> None:
    """End the epoch of a reader, which may have further batches, if the reader has this method.

    Data sets that are notified of the end of an epoch get it also if another source ends the epoch.
    """
    end = cast("Callable[[], None] | None", getattr(reader, "finish", None))
    if callable(end):
        end()


def position_of(reader: Reader, ahead: int = 0) -> Position | None:
    """Return the position of a reader, or None if it has no `position` method."""
    ask = cast("Callable[[int], Position | None] | None", getattr(reader, "position", None))
    return ask(ahead) if callable(ask) else None
