"""What the exact values of a run depend on, besides its configuration."""

from collections.abc import Mapping
from typing import Any

from ..backends.base import active
from ..backends.plans import Execution
from ..core.directory import differences
from ..core.identity import versions
from ..core.options import backend_name


def circumstances() -> dict[str, Any]:
    """Return what the exact values of a run depend on, in addition to its configuration."""
    return {"backend": backend_name(), **active().computes_on(), "versions": versions()}


def changes(before: Mapping[str, Any], executed: Mapping[str, Any] | None) -> list[str]:
    """Describe what has changed since a run was recorded, of all that its bits depend on.

    Args:
        before: The recorded circumstances and the recorded `execution`, if any.
        executed: How the steps are executed now; see `Execution.facts`.
    """
    now = circumstances()
    found = differences({name: before.get(name) or now[name] for name in now}, now)
    recorded = before.get("execution")  # not known before the first step
    if recorded and executed and recorded != executed:
        was, now = Execution.of(recorded), Execution.of(executed)
        found.append(f"plan was {str(was)!r}, now {str(now)!r}")
    return found


def lost_guarantee(before: Mapping[str, Any], executed: Mapping[str, Any] | None) -> str:
    """Return a warning if a resumed run may not be bit-for-bit exact, or "".

    Args:
        before: The circumstances and the execution in the checkpoint.
        executed: How the steps are executed now; see `Execution.facts`.
    """
    found = changes(before, executed)
    if not found:
        return ""
    moved = before.get("devices") not in (None, circumstances()["devices"])
    same = ", and the batches are the same" if moved else ""
    shards, shards_now = (
        (facts or {}).get("shards", 1) for facts in (before.get("execution"), executed)
    )
    if moved and shards != shards_now:
        same = (
            ", but the batches differ from here on, since treadle.data.sharded divides the data "
            "among another number of processes"
        )
    return (
        f"this run resumes, but may not be bit-for-bit exact: {'; '.join(found)}. All values were "
        f"restored exactly from the checkpoint{same}; later steps may round differently"
    )
