"""How many steps the next window may run, and the batches that are read before it begins."""

from collections.abc import Callable, Sequence
from functools import partial

from ..backends.window import Window
from ..core.progress import Progress
from ..core.triggers import Span, When
from .session import Session


class NextWindows:
    """Sizes the windows of an epoch, and reads ahead of the running one.

    A window ends before the next event: a hook, a validation, a yield of the user's `for` loop, a
    batch that a rollback excluded, or the end of the call.

    Args:
        session: The run.
        trigger: When the user's `for` loop is due, or None.
    """

    def __init__(self, session: Session, trigger: When | None) -> None:
        self._session = session
        validation = session.call.validation
        events = list(session.services.hooks.events())
        if validation is not None:
            events.append(validation.when)
        # What is due after every step may read variables or not, as the body of the `for` loop: it
        # does not limit the steps that run ahead.
        self._ahead = [when for when in events if when.span != Span(1, "step")]
        self._all = events if trigger is None else [*events, trigger]

    def size(self, at: Progress) -> int:
        """Return how many steps the window that begins at a progress may run."""
        return self._size(at, self._all)

    def following(self, window: Window, count: int) -> Window | None:
        """Return up to `count` batches after a window, if they are read and no event is due."""
        most = self._size(self._session.progress, self._ahead, window.count + count)
        return self._session.feed.following(most - window.count)

    def prefetch(self, after: Progress, running: Callable[[], bool]) -> None:
        """Read the next window while one runs, unless the call ends after it."""
        session, last = self._session, self._session.call.steps
        if last is None or after.step < last:
            size = partial(self.size, after)
            session.feed.read_ahead(size, session.training.transferred, running)

    def _size(self, at: Progress, triggers: Sequence[When], most: int | None = None) -> int:
        session = self._session
        size = session.training.window_size(at, triggers, session.call.steps, most)
        return session.window_size(at, size)
