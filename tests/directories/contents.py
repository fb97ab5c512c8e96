"""Changed contents of the files of a run, each in the format of its file."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from treadle.checkpoint.format import digest_line
from treadle.core.directory import encode_record

DEEP = "\0deep"
OVERFLOWS = "\0overflows"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2, 10**15, 10**30, -(10**30), 10**400),
    *(0.5, float("inf"), float("nan")),
    *("", "x", "\x1b[31mred\x1b]0;owned\x07", "x" * 3_000_000, "../../up", "\ud800", "line\nline"),
    *([], [1], {}, {"a": 1}, [[[]]], [None], DEEP, OVERFLOWS),
)


def run_file(path: Path, chance: Random, outside: Path) -> None:
    """Change a value of `run.json`, add one, or remove one; its hash follows, or does not."""
    record = json.loads(path.read_text())
    kind = chance.random()
    if kind < 0.15:  # what names code, data and weights of others
        record["configuration"][chance.choice(("recipe", "data_dir", "weights_from"))] = (
            chance.choice((f"{outside}/evil.py:Evil", f"{outside}/folder", f"{outside}/bombs"))
        )
    elif kind < 0.25:
        record["passed_over"] = chance.choice(VALUES)
    else:
        _edit(record, chance)
    if chance.random() < 0.8:
        record = json.loads(encode_record(record))  # its hash follows
    path.write_text(_text(record))


def manifest(path: Path, chance: Random, outside: Path) -> None:
    """Change a value of a checkpoint's manifest; its hash follows, or does not."""
    record = json.loads(path.read_text())
    _edit(record, chance)
    path.write_text(_text(record))
    if chance.random() < 0.8:
        (path.parent / "manifest.sha256").write_bytes(digest_line(path.read_bytes()))


def log(path: Path, chance: Random, outside: Path) -> None:
    """Change, remove, repeat or insert a line."""
    lines = path.read_text().splitlines()
    number = chance.randrange(len(lines))
    kind = chance.choice(("edit", "edit", "edit", "remove", "repeat", "swap", "insert", "value"))
    if kind == "edit":
        record = json.loads(lines[number])
        _edit(record, chance)
        lines[number] = _text(record)
    elif kind == "value":
        lines[number] = _text(chance.choice(VALUES))
    elif kind == "remove":
        del lines[number : number + chance.choice((1, 3, 99))]
    elif kind == "repeat":
        lines.insert(number, lines[number])
    elif kind == "swap":
        other = chance.randrange(len(lines))
        lines[number], lines[other] = lines[other], lines[number]
    else:
        lines.insert(number, chance.choice(("", "x", "\x1b[2J", "[" * 200_000, '{"step": 1e400}')))
    path.write_text("\n".join(lines) + "\n")


def table(path: Path, chance: Random, outside: Path) -> None:
    """Change a cell, a row or the head of `epochs.csv`."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = chance.randrange(len(rows))
    kind = chance.choice(("cell", "cell", "remove", "repeat", "longer", "shorter"))
    if kind == "cell":
        values = ("", "x", "-1", "1e400", "nan", '"', "\x1b[31m", "9" * 5000, "=1+1")
        rows[row][chance.randrange(len(rows[row]))] = chance.choice(values)
    elif kind == "remove":
        del rows[row]
    elif kind == "repeat":
        rows.insert(row, rows[row])
    elif kind == "longer":
        rows[row] = rows[row] * 3
    else:
        rows[row] = rows[row][:1]
    path.write_text("".join(",".join(row) + "\n" for row in rows))


def tensors(path: Path, chance: Random, outside: Path) -> None:
    """Change a file of tensors: its header, its length; or use another format."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    kind = chance.choice(("edit", "edit", "length", "pickle", "npy", "archive", "duplicate"))
    if kind == "edit":
        record = json.loads(header)
        _edit(record, chance)
        changed = _text(record).encode(errors="surrogatepass")
        data = len(changed).to_bytes(8, "little") + changed + data[8 + length :]
    elif kind == "length":
        claimed = chance.choice((0, 1, length - 1, 1 << 40, (1 << 64) - 1))
        data = claimed.to_bytes(8, "little") + data[8:]
    elif kind == "pickle":
        data = b"\x80\x04cos\nsystem\n(S'true'\ntR."
    elif kind == "npy":
        data = (
            b"\x93NUMPY\1\0" + b"\x76\0" + b"{'descr': '|O', 'fortran_order': False, 'shape': ()}"
        )
    elif kind == "archive":
        return bomb(path, chance, outside)
    else:
        data = data[: 8 + length].replace(b"}", b"} ", 1) + data[8 + length :]
    path.write_bytes(data)
    return None


def bomb(path: Path, chance: Random, outside: Path) -> None:
    """Write an archive with an array that is 1,000 times larger than its file."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x_train.npy", "w", force_zip64=True) as entry,
    ):
        kind = {"descr": "|u1", "fortran_order": False, "shape": (1_500_000, 1000)}
        np.lib.format.write_array_header_1_0(entry, kind)
        zeros = bytes(1 << 20)
        for _ in range(100):  # of 1.5 GB that the header claims
            entry.write(zeros)


CONTENTS: dict[str, Callable[[Path, Random, Path], None]] = {
    "run.json": run_file,
    "manifest.json": manifest,
    "log.jsonl": log,
    "epochs.csv": table,
    ".safetensors": tensors,
    ".npz": bomb,
    ".keras": bomb,
}


def _edit(record: Any, chance: Random) -> None:
    """Change, remove or add one value, at any depth."""
    places = list(_places(record))
    container, key = chance.choice(places) if places else (record, "added")
    kind = chance.random()
    if kind < 0.2 and places:
        del container[key]
    elif kind < 0.3 and isinstance(container, dict):
        container[chance.choice(("added", "\x1b[31m", ""))] = chance.choice(VALUES)
    else:
        container[key] = chance.choice(VALUES)


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(items):
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def _text(record: Any) -> str:
    """Return JSON with what Python's encoder cannot write: depth, and numbers that overflow."""
    text = json.dumps(record)
    text = text.replace(json.dumps(DEEP), "[" * 200_000 + "]" * 200_000)
    return text.replace(json.dumps(OVERFLOWS), "1e400")
