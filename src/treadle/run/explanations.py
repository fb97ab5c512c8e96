"""Explanations: of exceptions raised in steps, and of compiling a step again."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ..backends import hints
from ..backends.base import active
from ..backends.window import Window
from ..checkpoint.arrays import dtype_named
from ..checkpoint.batch_forms import described, structure
from ..core.history import History
from ..core.progress import Progress
from ..core.structures import with_paths
from ..core.tracebacks import put_note
from ..data.leaves import named
from ..errors import TreadleError
from ..hooks.run_record import RunRecord

MOST_FORMS: Final = 8  # that are logged
RECOMPILED: Final = "another form of batch: "
UNEQUAL: Final = "the arrays of a batch differ in length ("


class explaining:
    """A context manager that adds explanatory notes to exceptions, except to Treadle's own.

    Args:
        window: The batches passed to the step.
    """

    __slots__ = ("_window",)

    def __init__(self, window: Window | None = None) -> None:
        self._window = window

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the notes."""
        if isinstance(error, Exception):
            explain(error, self._window)


def explain(error: Exception, window: Window | None = None) -> None:
    """Add explanatory notes to an exception, unless it is one of Treadle's own.

    Args:
        error: The exception.
        window: The batches passed to the step.
    """
    if isinstance(error, TreadleError):
        return
    lost = hints.DEVICE_LOST if hints.device_lost(error) else ""
    cause = lost or active().explain(error)
    mismatch = _length_mismatch(window) if window and cause != hints.DTYPES else ""
    for note in filter(None, [cause, mismatch]):
        if note not in getattr(error, "__notes__", ()):
            put_note(error, note)


def _length_mismatch(window: Window) -> str:
    """Describe two arrays of a batch that differ in length, if any; this may be intended."""
    found = _different_lengths(window)
    if found is None:
        return ""
    (first, expected), (name, length) = found
    return (
        f"{first[0].upper()}{first[1:]} of the batch has {expected} rows, but {name} has {length}: "
        "they must match if both contain one row per example"
    )


def _different_lengths(window: Window) -> list[tuple[str, int]] | None:
    """Return the name and length of the first array of a batch, and of one that differs, if any."""
    leaves = with_paths(window.batch(0))
    lengths = [(named(path), len(leaf)) for path, leaf in leaves if leaf.ndim]
    other = next((pair for pair in lengths if pair[1] != lengths[0][1]), None)
    return None if other is None else [lengths[0], other]


def examples_note(window: Window, history: History) -> str:
    """Return a note for the log that the arrays of a batch differ in length, and which one counts.

    Args:
        window: The batches.
        history: The history, which holds the notes so far.

    Returns:
        The note; empty if the lengths do not differ, or if such a note is logged already.
    """
    found = _different_lengths(window)
    if found is None or any(
        str(record.values.get("note", "")).startswith(UNEQUAL) for record in history.records
    ):
        return ""
    (first, expected), (name, length) = found
    return (
        f"{UNEQUAL}{first} has {expected} rows, {name} has {length}), so the rows of {first} "
        "count as its examples. To count others, put their array first, or return "
        "treadle.weighted(value, count) from the step"
    )


def left_out_warning(at: Progress, length: int | None, record: RunRecord | None) -> str:
    """Return a warning that an epoch ends early, since the run is resumed with another source.

    Args:
        at: The progress at the last batch of the epoch.
        length: The number of batches of the epoch, or None if it is unknown.
        record: The record of the run, which knows what differs.
    """
    changes = "; ".join(record.overridden) if record is not None else ""
    return (
        f"epoch {at.epoch + 1} ends after batch {at.batch}{f' of {length}' if length else ''}, "
        f"because the run is resumed with another source{f' ({changes})' if changes else ''}: its "
        "other batches are left out, and it is none of the epochs of this call"
    )


def new_form_note(forms: Sequence[Any], window: Window, history: History) -> str:
    """Return a note for the log that a step is compiled for another form of batch, and why.

    Args:
        forms: Descriptions of earlier forms; the first one is that of the run's first batch.
        window: Batches of a form that the step was not compiled for in this process.
        history: The history, which holds the notes so far.

    Returns:
        The note; empty if it is logged already (also by a process before a resume), if there is no
        other form, if the batch only has fewer rows, as the last one of an epoch, or after eight
        notes.
    """
    first, now = forms[0] if forms else None, described(window.batch(0))
    found = form_changes(first, now)
    if not found or _has_fewer_rows(first, now):
        return ""
    notes = [str(r.values["note"]) for r in history.records if "note" in r.values]
    notes = [note for note in notes if note.startswith(RECOMPILED)]
    note = RECOMPILED + "; ".join(found)
    if len(notes) >= MOST_FORMS or any(x.startswith(note) for x in notes):
        return ""
    return f"{note}. Further forms are not logged" if len(notes) == MOST_FORMS - 1 else note


def _has_fewer_rows(old: Any, new: Any) -> bool:
    """Return whether a form differs from another one only by a smaller number of rows."""
    before, after = list(_arrays(old)), list(_arrays(new))
    if [path for path, *_ in before] != [path for path, *_ in after]:
        return False
    return all(
        one == other or (one[1:] and one[2:] == other[2:] and other[1] < one[1])
        for (_, *one), (_, *other) in zip(before, after, strict=True)
    )


def form_changes(old: Any, new: Any) -> list[str]:
    """Describe how two forms of batch differ: arrays with other shapes or dtypes, or the structure.

    Args:
        old: The description of a form by `checkpoint.batch_forms.described`, or None.
        new: That of the other form, or None.

    Example:
        >>> full, short = ["array", "<f4", [8, 2]], ["array", "<f4", [3, 2]]
        >>> form_changes(["dict", [["x", full]]], ["dict", [["x", short]]])
        ["the array 'x' changed from (8, 2) float32 to (3, 2) float32"]
    """
    if old is None or new is None:
        return []
    if structure(old) != structure(new):
        return [f"its structure changed from {structure(old)} to {structure(new)}"]
    before = {path: _text(*form) for path, *form in _arrays(old)}
    after = {path: _text(*form) for path, *form in _arrays(new)}
    return [
        f"{named(path)} changed from {text} to {after[path]}"
        for path, text in before.items()
        if text != after[path]
    ]


def _text(name: str, *shape: int) -> str:
    return f"{shape} {dtype_named(name)}"


def _arrays(description: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each array of a form, its dtype, and its dimensions."""
    match description:
        case ["array", str(name), list(shape)]:
            yield path, name, *shape
        case ["dict", list(items)] | ["object", _, _, list(items)]:
            for key, part in items:
                yield from _arrays(part, (*path, key))
        case ["list" | "tuple", list(parts)]:
            for i, part in enumerate(parts):
                yield from _arrays(part, (*path, i))
        case _:
            pass


def unsaved_warning(paths: Sequence[str]) -> str:
    """Return a warning that values changed in containers that the task does not hold."""
    return (
        f"the items of {', '.join(paths)} changed, which only functions reach, so that no "
        "checkpoint holds them: a resumed run begins with those of the script. Keep what changes "
        "as an attribute of the task"
    )


def left_out_note(paths: Sequence[str]) -> str:
    """Return a note that values changed while steps ran, so that compiled steps keep them."""
    return (
        f"{', '.join(paths)} changed while steps ran, as what a callback changes does: compiled "
        "steps keep what they were compiled with, and are not compiled again if it changes"
    )
