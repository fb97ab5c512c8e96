"""The likely cause of a difference between two processes, in a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...core.directory import differences
from .attributes import differing, root_of
from .comparing import Difference, RunArtifacts

NAMED: Final = 4
OWN: Final = ("id", "score", "run")
"""What a checkpoint says about its run that may differ between equal runs."""


def cause(
    found: Sequence[Difference],
    first: int,
    inexact: str | None,
    about: Mapping[str, Any],
    about_other: Mapping[str, Any],
) -> str:
    """Return the likely cause of the first difference.

    Args:
        found: Differences in the order of steps, at least one.
        first: The step of the checkpoint; 0 if both processes started from scratch.
        inexact: The source's own warning that its position cannot be restored exactly, or None.
        about: Backend, plan, devices, threads and versions of one process.
        about_other: Those of the other process.
    """
    own = dict.fromkeys(OWN)
    other = differences({**about, **own}, {**about_other, **own})
    if other:
        return f"the two processes ran under different conditions: {'; '.join(other)}"
    kinds = {d.kind for d in found}
    kind, step = found[0].kind, found[0].step
    fresh = not first
    if kind == "start" and fresh:
        return (
            "the initial values depend on something that no seed controls: the time, or a "
            "generator without a seed"
        )
    if kind == "start":
        return (
            "a hook changed it in its start method; or it was not restored, which is a bug in "
            "Treadle: please report it"
        )
    if kind == "batch":
        if inexact:
            return f"the source cannot be restored exactly: {inexact}"
        if fresh:
            return (
                "the data depends on something that no seed controls: the time, a generator "
                "without a seed, the order of a set"
            )
        return (
            "the data depends on something that is not part of the checkpoint: a counter, a list, "
            "a separate random generator. Give the object that makes it state() and "
            "restore(state), or draw from the generator that treadle.data.from_function passes"
        )
    if kind in ("value", "metrics", "variable"):
        begun = "the batches are equal" if "batch" not in kinds else f"step {step} had equal data"
        if fresh:
            return (
                f"{begun}, and the step depends on something that no seed controls: the time, or a "
                "generator without a seed"
            )
        return (
            f"{begun}, and the step depends on something that is not part of the checkpoint: a "
            "hook's attribute or a global variable. Keep it as an attribute of the task, or give "
            "the hook state() and restore(state)"
        )
    if kind == "record":
        return (
            "training is equal, but the records differ: validation, or what a hook logs, depends "
            "on something that is not part of the checkpoint"
        )
    return (
        "all values are equal, but a global generator was drawn from outside of training: by a "
        "hook, or by a source that draws batches in advance"
    )


def suspects(
    a: RunArtifacts, b: RunArtifacts, between: tuple[int, int], found: Sequence[Difference]
) -> list[str]:
    """Describe the user's plain Python values that differ, the likely causes first.

    Args:
        a: The uninterrupted run.
        b: The other process.
        between: The steps of the checkpoints between which they were compared.
        found: The differences.
    """
    first, last = between
    if first:
        these, those = a.noted(first), b.noted(last)["begun"]
        names = f"at step {first} of the straight run", "when the resumed run started"
    else:
        these, those = a.noted(last), b.noted(last)
        names = f"at step {last} of the first process", "in the other one"
    if not those:
        return []
    data = found[0].kind == "batch"
    order = ("train", "task", "hooks", "validation")
    order = order if data else ("task", "hooks", "train", "validation")
    changed = sorted(
        differing(these["attributes"], those["attributes"]),
        key=lambda d: order.index(root_of(d[0])),
    )
    lines = [f"{path} was {x} {names[0]}, and {y} {names[1]}" for path, x, y in changed[:NAMED]]
    if len(changed) > NAMED:
        lines.append(f"and {len(changed) - NAMED} more")
    calls = sorted(these["calls"].items(), key=lambda call: order.index(root_of(call[0])))
    return lines + [f"{path} calls {functions}" for path, functions in calls[:NAMED]]
