"""Whether two sources read the same data in the same order."""

from typing import Any

from ..core.identity import in_json_types, source_facts
from .source import Source, parts_of


def describe_source(source: Source) -> dict[str, Any]:
    """Return what is known about a source without reading it, in JSON's types.

    Described are its class, its length, the size and order of its batches, a hash of a sample of
    its arrays, and the sources that it combines.

    Example:
        >>> import numpy as np, treadle
        >>> describe_source(treadle.data.from_arrays(np.zeros(8), batch_size=4))["length"]
        2
    """
    found = {"class": type(source).__name__, **source_facts(source)}
    counts = {name: getattr(source, name, None) for name in ("n", "batches")}
    found |= {name: count for name, count in counts.items() if isinstance(count, int)}
    parts = [describe_source(part) for part in parts_of(source)]
    return in_json_types({**found, "parts": parts} if parts else found)


def is_same_source(one: Source, other: Source) -> bool:
    """Return whether two sources of one process read the same data in the same order.

    They do if they are the same object, or if both consist of arrays and have equal descriptions.
    Other data is only compared by object: a description says too little about it.

    Example:
        >>> import numpy as np
        >>> from treadle.data import as_source, from_arrays
        >>> is_same_source(*(from_arrays(np.ones(8), batch_size=4) for _ in range(2)))
        True
        >>> is_same_source(*(as_source([np.ones(8)]) for _ in range(2)))
        False
    """
    if one is other:
        return True
    consist_of_arrays = _consists_of_arrays(one) and _consists_of_arrays(other)
    return consist_of_arrays and describe_source(one) == describe_source(other)


def _consists_of_arrays(source: Source) -> bool:
    parts = parts_of(source)
    if parts:
        return all(map(_consists_of_arrays, parts))
    return getattr(source, "fingerprint", None) is not None
