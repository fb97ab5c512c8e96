"""Checkpoints that were made to harm: whole by all their hashes, and not what they say."""

import hashlib
import io
import json
import os
import pickle

import numpy as np

from tests.faults import write
from treadle.checkpoint import SavedState
from treadle.checkpoint.arrays import header
from treadle.checkpoint.format import digest_line
from treadle.core.progress import Progress

LINKED = "it is a symbolic link, which is not followed. Put a file itself in its place"


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path="exploded"):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


NUMBERS = "arrays.safetensors"


def forge(folder, edit=lambda record: None, arrays=None, raw=None):
    """Change the manifest's record, the bytes of the arrays, or the manifest's; hashes follow."""
    folder.mkdir(parents=True)
    state = {"a": np.zeros(4, np.float32), "b": np.ones(3)}
    saved = SavedState(Progress(3), state, frozenset(["b"]), hooks={"h": {"c": np.ones(2)}})
    folder = write(folder, saved)
    record = json.loads((folder / "manifest.json").read_bytes())
    if arrays is not None:
        (folder / NUMBERS).write_bytes(arrays)
        digest = hashlib.sha256(arrays).hexdigest()
        record["files"]["arrays"] = {"sha256": digest, "size": len(arrays)}
    edit(record)
    data = raw if raw is not None else json.dumps(record).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_bytes(digest_line(data))
    return folder


def declared(**changes):
    """Change what the manifest says of `a`."""
    return lambda record: record["state"]["a"].update(changes)


def linked(name, target):
    def make(folder):
        found = forge(folder)
        (found / name).unlink()
        (found / name).symlink_to(target)
        return found

    return make


def folder_linked(folder):
    found = forge(folder)
    found.rename(folder / "moved")
    found.symlink_to(folder / "moved")
    return found


def fixed_linked(folder):
    found = forge(folder)
    [shared] = (folder / "fixed").iterdir()
    shared.rename(folder / "moved")
    shared.symlink_to(folder / "moved")
    return found


def pipe(folder):
    found = forge(folder)
    (found / NUMBERS).unlink()
    os.mkfifo(found / NUMBERS)
    return found


def archive():
    target = io.BytesIO()
    np.savez(target, a=np.zeros(4, np.float32))
    return target.getvalue()


def sparse(folder):
    """A terabyte that takes no space; its hash would take an hour."""
    found = forge(
        folder, lambda r: (declared(shape=[1 << 38])(r), r["files"]["arrays"].update(size=1 << 20))
    )
    os.truncate(found / NUMBERS, 1 << 40)
    return found


def deep(record):
    value = 0
    for _ in range(100):
        value = [value]
    record["loop"] = {"x": value}


def nested_objects():
    """Many values in few bytes: each takes 20 times its size as Python's."""
    chain = b'{"":' * 150 + b"0" + b"}" * 150
    return b'{"format": 1, "loop": [' + b",".join([chain] * 2_600) + b"]}"


NOTHING = (0, 1 << 62, 1 << 62)


def tensors(edit=lambda header: None, length=None, more=b"", shape=(4,)):
    """A file of tensors with a changed header, or with a header that claims another length."""
    kinds = [("nested/0", (2,), np.dtype("f8")), ("state/a", shape, np.dtype("f4"))]
    text = header(kinds)[8:]
    record = json.loads(text)
    edit(record)
    changed = json.dumps(record, separators=(",", ":")).encode().ljust(len(text))
    start = (len(changed) if length is None else length).to_bytes(8, "little") + changed
    return start + np.ones(2).tobytes() + bytes(0 if shape == NOTHING else 16) + more


def another_name(record):
    record["state/b"] = record.pop("state/a")


def overlapping(record):
    record["state/a"]["data_offsets"] = [0, 16]


def json_of(text):
    return lambda folder: forge(folder, raw=text)


# What is made, and what is said of it behind the path of the file at fault.
CASES = {
    "more files": (
        lambda f: forge(f, lambda r: r["files"].update(more=r["files"]["arrays"])),
        "manifest.json is not a checkpoint's: its files are 'fixed, arrays, more'",
    ),
    "a link for the manifest": (linked("manifest.json", "/etc/passwd"), f"manifest.json: {LINKED}"),
    "a link for the folder": (folder_linked, " is not a folder, so it holds no checkpoint"),
    "very many dimensions": (
        lambda f: forge(f, declared(shape=[1] * 100_000)),
        "manifest.json is not a checkpoint's: state/a of shape ("
        + "1, " * 25
        + "1… and dtype float32 does not fit into its file of 168 bytes",
    ),
    "an array too many": (
        lambda f: forge(f, lambda r: r["state"].update(z=r["state"]["a"])),
        f"{NUMBERS} does not hold what its manifest says: 168 bytes for 3 arrays of 240",
    ),
    "a terabyte": (
        sparse,
        "manifest.json is not a checkpoint's: state/a of shape (274877906944,) and dtype float32 "
        "does not fit into its file of 1,048,576 bytes",
    ),
    "deep values": (
        lambda f: forge(f, deep),
        "manifest.json is not a checkpoint's: values are nested more than 60 levels deep",
    ),
    "brackets without end": (
        json_of(b"[" * 300_000),
        "manifest.json is not a checkpoint's: values are nested more than 60 levels deep",
    ),
    "a giant manifest": (
        json_of(b'{"format": 1}'.ljust(100 << 20)),
        "manifest.json has 104,857,600 bytes; at most 8,388,608 are expected",
    ),
    "too many values": (
        json_of(b"[" + b"[]," * 500_000 + b"[]]"),
        "manifest.json is not a checkpoint's: holds about 1,000,002 values; at most 400,000 are "
        "allowed",
    ),
    "many values in few bytes": (
        json_of(nested_objects()),
        "manifest.json is not a checkpoint's: source is missing",
    ),
    "a giant digest": (
        lambda f: (found := forge(f), os.truncate(found / "manifest.sha256", 1 << 40))[0],
        "manifest.sha256 has 1,099,511,627,776 bytes; at most 200 are expected",
    ),
    "no object": (
        json_of(b"[]"),
        "manifest.json is not a checkpoint's: it is a list; expected an object",
    ),
    "a section that is no object": (
        lambda f: forge(f, lambda r: r.update(hooks={"!float": "7ff0000000000000"})),
        "manifest.json is not a checkpoint's: hooks is inf; expected an object",
    ),
    "a progress of something else": (
        lambda f: forge(f, lambda r: r["progress"].update(step=-1)),
        "manifest.json is not a checkpoint's: progress.step is -1; expected a whole number "
        "from 0 to 1,000,000,000,000",
    ),
    "a progress without a step": (
        lambda f: forge(f, lambda r: r["progress"].pop("step")),
        "manifest.json is not a checkpoint's: progress.step is missing",
    ),
    "another format": (
        lambda f: forge(f, lambda r: r.update(format=[1])),
        "manifest.json is of format [1], and this version of Treadle reads format 1: use the "
        "version that wrote it",
    ),
    "a later format": (
        lambda f: forge(f, lambda r: r.update(format=2)),
        "manifest.json is of format 2, and this version of Treadle reads format 1: use the version "
        "that wrote it",
    ),
    "object dtype declared": (
        lambda f: forge(f, declared(dtype="|O")),
        "manifest.json is not a checkpoint's: '|O' is not a numeric dtype",
    ),
    "a pickle": (
        lambda f: forge(f, arrays=pickle.dumps([Bomb()]).ljust(1000)),
        f"{NUMBERS} does not hold what its manifest says: 1,000 bytes for 2 arrays of 168",
    ),
    "a pickle of the right size": (
        lambda f: forge(f, arrays=pickle.dumps([Bomb()]).ljust(168)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "another name": (
        lambda f: forge(f, arrays=tensors(another_name)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "numbers that overlap": (
        lambda f: forge(f, arrays=tensors(overlapping)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "a giant header": (
        lambda f: forge(f, arrays=tensors(length=1 << 62)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "more behind the numbers": (
        lambda f: forge(f, arrays=tensors(more=bytes(8))),
        f"{NUMBERS} does not hold what its manifest says: 176 bytes for 2 arrays of 168",
    ),
    "another dtype declared": (
        lambda f: forge(f, declared(dtype="<i4")),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "a dtype of no file declared": (
        lambda f: forge(f, declared(dtype=">f4")),
        f"{NUMBERS} does not hold what its manifest says: 168 bytes for 2 arrays of 208",
    ),
    "another shape declared": (
        lambda f: forge(f, declared(shape=[2])),
        f"{NUMBERS} does not hold what its manifest says: 168 bytes for 2 arrays of 160",
    ),
    "a giant shape": (
        lambda f: forge(f, declared(shape=[1 << 40, 1 << 40])),
        "manifest.json is not a checkpoint's: state/a of shape (1099511627776, 1099511627776) and "
        "dtype float32 does not fit into its file of 168 bytes",
    ),
    "a negative shape": (
        lambda f: forge(f, declared(shape=[-4])),
        "manifest.json is not a checkpoint's: state.a.shape[0] is -4; expected a whole number "
        "from 0 to 9,223,372,036,854,775,807",
    ),
    "a shape of nothing, and yet giant": (
        lambda f: forge(f, declared(shape=NOTHING), tensors(shape=NOTHING)),
        f"{NUMBERS} does not hold what its manifest says: array is too big; `arr.size * "
        "arr.dtype.itemsize` is larger than the maximum possible size.",
    ),
    "another file": (
        lambda f: forge(f, declared(file="../other")),
        "manifest.json is not a checkpoint's: the file of state/a is '../other'",
    ),
    "a path as a hash": (
        lambda f: forge(f, lambda r: r["files"]["fixed"].update(sha256="../" * 21 + "x")),
        "manifest.json is not a checkpoint's: files.fixed.sha256 is "
        f"{'../' * 21 + 'x'!r}; expected a SHA-256",
    ),
    "a link for the arrays": (linked(NUMBERS, "/dev/zero"), f"{NUMBERS}: {LINKED}"),
    "a link for what is shared": (fixed_linked, f".safetensors: {LINKED}"),
    "a pipe": (pipe, f"{NUMBERS}: it is a pipe, and not a file. Move it away"),
    "an archive": (
        lambda f: forge(f, arrays=archive()),
        f"{NUMBERS} does not hold what its manifest says: 272 bytes for 2 arrays of 168",
    ),
}
