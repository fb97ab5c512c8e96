"""Exact conversion of nested Python values to JSON and back: floats bit for bit, any integer size.

`encode` converts values of JSON types, NumPy arrays and tuples to JSON, and collects the arrays in
a list. Tuples become lists. The states of data sources may also contain tuples, bytes and tensors
that are restored as such, and change with the next batch: `snapshot` first copies a state into JSON
types and NumPy arrays, which are the position of the source in memory. `decode` and `from_snapshot`
are the inverse functions. Nothing is pickled, so reading runs no code.

A value that JSON lacks becomes an object with one key. This is the format of all checkpoints:

    {"!float": "7ff0000000000000"}     encode: the bits of NaN or an infinity
    {"!int": "1f"}                     encode: the hexadecimal digits of a very large integer
    {"!array": 3}                      encode: the array with this number
    {"!!key": …}                       encode: a key that starts with "!", after another one
    {"(tuple)": […]}                   snapshot: a tuple
    {"(bytes)": array}                 snapshot: bytes, as an array of uint8
    {"(tensor)": array}                snapshot: a torch tensor
    {"(dict)": [[key, value], …]}      snapshot: a dict with keys other than strings, or starting
                                       with "("
"""

import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..errors import CheckpointError, DataError
from .arrays import Array, name_of

# Limits on input, so that a malicious file cannot exhaust memory: Python values take up to 30 times
# the size of their JSON. Longer lists must be stored as arrays.
MOST_BYTES = 8 << 20
MOST_VALUES = 400_000
DEEPEST = 60
_TUPLE, _BYTES, _TENSOR, _PAIRS = "(tuple)", "(bytes)", "(tensor)", "(dict)"
# For larger integers, Python rejects decimal digits or takes quadratic time to parse them.
_LARGE = 1 << 2048


def encode(value: Any, where: str, arrays: list[Array], depth: int = 0) -> Any:
    """Convert a value to JSON types, and append its arrays to `arrays`.

    Args:
        value: None, bool, int, float, str, NumPy scalars and arrays of numbers; lists, tuples and
            dicts (with str keys) of these.
        where: The name of the value, for error messages.
        arrays: The list to which arrays are appended.
        depth: The current nesting depth.

    Raises:
        CheckpointError: If the value contains other types, or is nested too deeply.

    Example:
        >>> encode({"best": math.inf, "seen": (1, 2)}, "hooks", [])
        {'best': {'!float': '7ff0000000000000'}, 'seen': [1, 2]}
    """
    if isinstance(value, np.generic) and name_of(value.dtype) is not None:
        value = value.item()
    if depth > DEEPEST:
        raise CheckpointError(
            f"{where} is nested more than {DEEPEST} levels deep, or contains itself"
        )
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGE else {"!int": format(int(value), "x")}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": struct.pack(">d", value).hex()}
    if isinstance(value, np.ndarray) and name_of(value.dtype) is not None:
        arrays.append(value)
        return {"!array": len(arrays) - 1}
    if isinstance(value, (list, tuple)):
        parts = cast(Sequence[Any], value)
        return [encode(part, f"{where}[{i}]", arrays, depth + 1) for i, part in enumerate(parts)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        items = cast(Mapping[str, Any], value).items()
        return {
            f"!{key}" if key.startswith("!") else key: encode(
                part, f"{where}[{key!r}]", arrays, depth + 1
            )
            for key, part in items
        }
    raise CheckpointError(
        f"{where} is {_kind(value)}, which a checkpoint cannot hold: only None, bool, int, float, "
        "str and NumPy arrays of numbers, and lists, tuples and dicts (by str) of these"
    )


def decode(value: Any, arrays: Sequence[Array], depth: int = 0) -> Any:
    """Restore a value from the result of `encode`. Lists and dicts are changed in place.

    Raises:
        ValueError: If `value` is not a result of `encode`.
    """
    if depth > DEEPEST:
        raise ValueError(f"values are nested more than {DEEPEST} levels deep")
    if isinstance(value, list):
        parts = cast(list[Any], value)
        for i, part in enumerate(parts):
            parts[i] = decode(part, arrays, depth + 1)
    elif isinstance(value, dict):
        items = cast(dict[str, Any], value)
        tag = next(iter(items), "")
        if len(items) == 1 and tag.startswith("!") and not tag.startswith("!!"):
            return _untagged(tag, items[tag], arrays)
        for key, part in items.items():
            items[key] = decode(part, arrays, depth + 1)
        if any(key.startswith("!") for key in items):
            return {_unescaped(key): part for key, part in items.items()}
    return value


def snapshot(state: Any, name: str, path: str = "") -> Any:
    """Copy the state of a data source into JSON types and NumPy arrays.

    Args:
        state: Numbers, strings, bytes, None, arrays, and lists, tuples and dicts of these.
        name: The owner of the state, for messages.
        path: The path within the state, for messages.

    Raises:
        DataError: If the state contains other types.

    Example:
        >>> snapshot({"at": (1, None)}, "Buffer")
        {'at': {'(tuple)': [1, None]}}
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, np.generic):
        return snapshot(state.item(), name, path)
    if isinstance(state, np.ndarray):
        array = cast("np.ndarray[Any, Any]", state)
        if not array.dtype.hasobject:
            return array.copy()
    if isinstance(state, bytes):
        return {_BYTES: np.frombuffer(state, np.uint8)}
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        tensor: Any = state
        return {_TENSOR: tensor.detach().cpu().numpy().copy()}
    if isinstance(state, list | tuple):
        items = cast("list[Any]", state)
        parts = [snapshot(part, name, f"{path}[{i}]") for i, part in enumerate(items)]
        return parts if isinstance(state, list) else {_TUPLE: parts}
    if isinstance(state, Mapping):
        pairs = cast("Mapping[Any, Any]", state)
        parts = {key: snapshot(part, name, f"{path}[{key!r}]") for key, part in pairs.items()}
        plain = all(isinstance(key, str) and not key.startswith("(") for key in parts)
        return (
            parts if plain else {_PAIRS: [[snapshot(k, name, path), v] for k, v in parts.items()]}
        )
    raise DataError(
        f"the state of {name} holds a {type(state).__name__}{' at ' + path if path else ''}, which "
        f"cannot be saved in checkpoints: a state may contain numbers, strings, None, arrays, and "
        f"lists, tuples and dicts of these"
    )


def from_snapshot(state: Any) -> Any:
    """Restore a state from the result of `snapshot`, as a new copy.

    Example:
        >>> from_snapshot(snapshot({"at": (1, None)}, "Buffer"))
        {'at': (1, None)}
    """
    if isinstance(state, list):
        return [from_snapshot(part) for part in cast("list[Any]", state)]
    if isinstance(state, np.ndarray):
        return cast("np.ndarray[Any, Any]", state).copy()
    if not isinstance(state, Mapping):
        return state
    parts = cast("Mapping[str, Any]", state)
    kind, value = next(iter(parts.items()), ("", cast("Any", None)))
    if kind == _TUPLE:
        return tuple(from_snapshot(part) for part in value)
    if kind == _BYTES:
        return value.tobytes()
    if kind == _TENSOR:
        return sys.modules["torch"].from_numpy(np.array(value))
    if kind == _PAIRS:
        return {from_snapshot(key): from_snapshot(part) for key, part in value}
    return {key: from_snapshot(part) for key, part in parts.items()}


def to_json(value: Any, where: str) -> bytes:
    """Serialize a result of `encode` as ASCII JSON.

    Raises:
        CheckpointError: If it exceeds the limits of `parse_json`.
    """
    data = json.dumps(value, allow_nan=False).encode("ascii")
    fault = _too_large(data)
    if fault:
        raise CheckpointError(
            f"{where} {fault}. Convert long lists in the states of hooks and sources to NumPy "
            "arrays, which are stored in another file"
        )
    return data


def parse_json(data: bytes) -> Any:
    """Parse ASCII JSON in bounded memory.

    Raises:
        ValueError: If it is not valid JSON, or exceeds the limits.
    """
    fault = _too_large(data)
    if fault:
        raise ValueError(fault)
    try:
        return json.loads(data.decode("ascii"), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"values are nested more than {DEEPEST} levels deep") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _untagged(tag: str, part: Any, arrays: Sequence[Array]) -> Any:
    if tag == "!float" and isinstance(part, str) and len(part) == 16:
        return struct.unpack(">d", bytes.fromhex(part))[0]
    if tag == "!int" and isinstance(part, str):
        return int(part, 16)
    if tag == "!array" and type(part) is int and 0 <= part < len(arrays):
        return arrays[part]
    raise ValueError(f"a value has the invalid tag {tag[:40]!a}")


def _unescaped(key: str) -> str:
    if key.startswith("!") and not key.startswith("!!"):
        raise ValueError(f"a value has the invalid tag {key[:40]!a}")
    return key.removeprefix("!")


def _too_large(data: bytes) -> str:
    if len(data) > MOST_BYTES:
        return f"takes {len(data):,} bytes of JSON; at most {MOST_BYTES:,} are allowed"
    values = sum(data.count(sign) for sign in (b",", b"[", b"{"))
    if values > MOST_VALUES:
        return f"holds about {values:,} values; at most {MOST_VALUES:,} are allowed"
    return ""


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of dtype {cast(Array, value).dtype}"
    if isinstance(value, Mapping):
        odd = next(key for key in cast(Mapping[Any, Any], value) if not isinstance(key, str))
        return f"a dict with the key {odd!r}"
    return f"a {type(value).__name__}"  # type: ignore[reportUnknownArgumentType]
