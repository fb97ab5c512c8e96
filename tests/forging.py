"""Checkpoints that were made to harm: whole by all their hashes, and not what they say."""

import hashlib
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from functools import partial

import numpy as np

from tests.faults import write
from tests.format_1 import npy, write_format_1
from treadle.checkpoint import Checkpoint
from treadle.checkpoint.format import digest_line
from treadle.checkpoint.tensor_file import header
from treadle.core.progress import Progress

LINKED = "it is a symbolic link, which is not followed. Put a file itself in its place"


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def honest(folder, version):
    folder.mkdir(parents=True)
    state = {"a": np.zeros(4, np.float32), "b": np.ones(3)}
    saved = Checkpoint(Progress(3), state, frozenset(["b"]), hooks={"h": {"c": np.ones(2)}})
    return write_format_1(folder, saved) if version == 1 else write(folder, saved)


def forge(folder, edit=lambda record: None, arrays=None, raw=None, version=1):
    """Change the manifest's record, the bytes of the arrays, or the manifest's; hashes follow."""
    folder = honest(folder, version)
    record = json.loads((folder / "manifest.json").read_bytes())
    if arrays is not None:
        (folder / ("arrays.npz" if version == 1 else NUMBERS)).write_bytes(arrays)
        digest = hashlib.sha256(arrays).hexdigest()
        record["files"]["arrays"] = {"sha256": digest, "size": len(arrays)}
    edit(record)
    data = raw if raw is not None else json.dumps(record).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_bytes(digest_line(data))
    return folder


NUMBERS = "arrays.safetensors"
newer = partial(forge, version=2)


def archive(*entries, kind=zipfile.ZIP_STORED):
    """A zip of names and bytes."""
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", kind) as file:
        warnings.filterwarnings("ignore", "Duplicate name")
        for name, data in entries:
            file.writestr(zipfile.ZipInfo(name), data, kind)
    return target.getvalue()


A, C = npy(np.zeros(4, np.float32)), npy(np.ones(2))
STATE, NESTED = ("state/a.npy", A), ("nested/0.npy", C)


def declared(**changes):
    """Change what the manifest says of `a`."""
    return lambda record: record["state"]["a"].update(changes)


def checksummed(data):
    return declared(crc32=zipfile.crc32(data))


def linked(name, target, forge=forge):
    def make(folder):
        found = forge(folder)
        (found / name).unlink()
        (found / name).symlink_to(target)
        return found

    return make


def folder_linked(folder):
    found = newer(folder)
    found.rename(folder / "moved")
    found.symlink_to(folder / "moved")
    return found


def fixed_linked(folder, forge=forge):
    found = forge(folder)
    [shared] = (folder / "fixed").iterdir()
    shared.rename(folder / "moved")
    shared.symlink_to(folder / "moved")
    return found


def pipe(folder, forge=forge, name="arrays.npz"):
    found = forge(folder)
    (found / name).unlink()
    os.mkfifo(found / name)
    return found


def object_array():
    target = io.BytesIO()
    np.lib.format.write_array(target, np.array([Bomb()], object), allow_pickle=True)
    return target.getvalue()


def many_entries(count):
    """A directory of many empty entries, as Python's zipfile reads it."""
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, *[0] * 15)
    entry = entry[:28] + struct.pack("<H", 1) + entry[30:] + b"x"
    directory = entry * count
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, len(directory), 0, 0)
    return directory + end


def giant_header():
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }".ljust(60 << 20)
    return b"\x93NUMPY\x02\x00" + struct.pack("<L", len(text)) + text + bytes(16)


def sparse(folder):
    """A terabyte that takes no space; its hash would take an hour."""
    found = forge(
        folder, lambda r: (declared(shape=[1 << 38])(r), r["files"]["arrays"].update(size=1 << 20))
    )
    os.truncate(found / "arrays.npz", 1 << 40)
    return found


MISPLACED = archive(("../../evil.npy", A), NESTED)
OBJECTS = object_array()


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
    "object dtype declared": (
        lambda f: forge(f, declared(dtype="|O")),
        "manifest.json is not a checkpoint's: '|O' is not a numeric dtype",
    ),
    "pickled objects": (
        lambda f: forge(f, checksummed(OBJECTS), archive(("state/a.npy", OBJECTS), NESTED)),
        "arrays.npz does not hold what its manifest says: state/a has another size or CRC-32",
    ),
    "pickled objects of the right size": (
        lambda f: forge(
            f,
            checksummed(OBJECTS[:144].ljust(144)),
            archive(("state/a.npy", OBJECTS[:144].ljust(144)), NESTED),
        ),
        "arrays.npz does not hold what its manifest says: state/a is not an array of float32 and "
        "shape (4,)",
    ),
    "a pickle": (
        lambda f: forge(f, arrays=pickle.dumps([Bomb(), "x" * 1000])),
        "arrays.npz does not hold what its manifest says: File is not a zip file",
    ),
    "a name that climbs, in the archive": (
        lambda f: forge(f, arrays=MISPLACED),
        "arrays.npz does not hold what its manifest says: it holds '../../evil.npy' as well",
    ),
    "a name that climbs, in both": (
        lambda f: forge(f, declared(entry="../../evil"), MISPLACED),
        "manifest.json is not a checkpoint's: an entry is called '../../evil', which is not a "
        "valid name",
    ),
    "an absolute name": (
        lambda f: forge(f, declared(entry="/etc/evil")),
        "manifest.json is not a checkpoint's: an entry is called '/etc/evil', which is not a "
        "valid name",
    ),
    "another file": (
        lambda f: forge(f, declared(file="../other.npz")),
        "manifest.json is not a checkpoint's: the file of state/a is '../other.npz'",
    ),
    "a path as a hash": (
        lambda f: forge(f, lambda r: r["files"]["fixed"].update(sha256="../" * 21 + "x")),
        f"manifest.json is not a checkpoint's: the SHA-256 of fixed is {'../' * 21 + 'x'!r}",
    ),
    "more files": (
        lambda f: forge(f, lambda r: r["files"].update(more=r["files"]["arrays"])),
        "manifest.json is not a checkpoint's: its files are 'fixed, arrays, more'",
    ),
    "a link for the arrays": (
        linked("arrays.npz", "/dev/zero"),
        f"arrays.npz: {LINKED}",
    ),
    "a link for the manifest": (
        linked("manifest.json", "/etc/passwd", newer),
        f"manifest.json: {LINKED}",
    ),
    "a link for the folder": (folder_linked, " is not a folder, so it holds no checkpoint"),
    "a link for what is shared": (
        fixed_linked,
        f".npz: {LINKED}",
    ),
    "a pipe": (pipe, "arrays.npz: it is a pipe, and not a file. Move it away"),
    "a bomb of zeros": (
        lambda f: forge(
            f,
            lambda r: r["state"]["a"].update(shape=[50 << 20], crc32=0),
            archive(("state/a.npy", bytes(200 << 20)), NESTED, kind=zipfile.ZIP_DEFLATED).ljust(
                1 << 18
            ),
        ),
        "manifest.json is not a checkpoint's: state/a of shape (52428800,) and dtype float32 does "
        "not fit into its file of 262,144 bytes",
    ),
    "a compressed entry": (
        lambda f: forge(
            f, arrays=archive(STATE, ("nested/0.npy", C), kind=zipfile.ZIP_DEFLATED) + bytes(200)
        ),
        "arrays.npz does not hold what its manifest says: state/a is compressed or encrypted",
    ),
    "a giant header": (
        lambda f: forge(f, arrays=archive(("state/a.npy", giant_header()), NESTED)),
        "arrays.npz does not hold what its manifest says: 62,914,952 bytes for 2 arrays of 288",
    ),
    "a giant shape": (
        lambda f: forge(f, declared(shape=[1 << 40, 1 << 40])),
        "manifest.json is not a checkpoint's: state/a of shape (1099511627776, 1099511627776) and "
        "dtype float32 does not fit into its file of 596 bytes",
    ),
    "a negative shape": (
        lambda f: forge(f, declared(shape=[-4])),
        "manifest.json is not a checkpoint's: the shape of state/a is -4",
    ),
    "a shape of nothing, and yet giant": (
        lambda f: forge(f, declared(shape=[0, 1 << 62, 1 << 62])),
        "arrays.npz does not hold what its manifest says: state/a has another size or CRC-32",
    ),
    "very many dimensions": (
        lambda f: forge(f, declared(shape=[1] * 100_000)),
        "manifest.json is not a checkpoint's: state/a of shape ("
        + "1, " * 25
        + "1… and dtype float32 does not fit into its file of 596 bytes",
    ),
    "an entry twice": (
        lambda f: forge(f, arrays=archive(STATE, STATE, NESTED)),
        "arrays.npz does not hold what its manifest says: it names the entry 'state/a.npy' twice",
    ),
    "an entry named twice": (
        lambda f: forge(f, lambda r: r["state"].update(z=r["state"]["a"])),
        "manifest.json is not a checkpoint's: it names the entry 'state/a' twice",
    ),
    "an entry too few": (
        lambda f: forge(f, arrays=archive(STATE, ("other", C))),
        "arrays.npz does not hold what its manifest says: it holds 'other' as well",
    ),
    "an entry missing": (
        lambda f: forge(f, arrays=archive(STATE) + bytes(200)),
        "arrays.npz does not hold what its manifest says: it does not hold 'nested/0'",
    ),
    "another entry's numbers": (
        lambda f: forge(f, declared(dtype="<i4")),
        "arrays.npz does not hold what its manifest says: state/a is not an array of int32 and "
        "shape (4,)",
    ),
    "numbers under another's checksum": (
        lambda f: forge(f, arrays=archive(STATE, NESTED).replace(A, A[:-1] + b"\1")),
        "arrays.npz does not hold what its manifest says: Bad CRC-32 for file 'state/a.npy'",
    ),
    "an encrypted entry": (
        lambda f: forge(
            f,
            arrays=archive(STATE, NESTED).replace(
                b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"
            ),
        ),
        "arrays.npz does not hold what its manifest says: state/a is compressed or encrypted",
    ),
    "entries without end": (
        lambda f: forge(f, arrays=many_entries(1_000_000)),
        "arrays.npz does not hold what its manifest says: 47,000,022 bytes for 2 arrays of 288",
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
        "manifest.json is not a checkpoint's: loop is not an object",
    ),
    "a giant digest": (
        lambda f: (found := forge(f), os.truncate(found / "manifest.sha256", 1 << 40))[0],
        "manifest.sha256 has 1,099,511,627,776 bytes; at most 200 are expected",
    ),
    "no object": (json_of(b"[]"), "manifest.json is not a checkpoint's: it is not an object"),
    "a section that is no object": (
        lambda f: forge(f, lambda r: r.update(hooks={"!float": "7ff0000000000000"})),
        "manifest.json is not a checkpoint's: hooks is not an object",
    ),
    "a progress of something else": (
        lambda f: forge(f, lambda r: r["progress"].update(step=-1)),
        "manifest.json is not a checkpoint's: its progress has an invalid 'step': -1",
    ),
    "a progress of unknown things": (
        lambda f: forge(f, lambda r: r["progress"].update({"\x1b[2J" * 30: 1})),
        "manifest.json is not a checkpoint's: its progress has an invalid "
        + ascii("\x1b[2J" * 30)[:77]
        + "…: 1",
    ),
    "another format": (
        lambda f: forge(f, lambda r: r.update(format=[1])),
        "manifest.json is of format [1], and this version of Treadle reads formats 1 to 3: use the "
        "version that wrote it",
    ),
    "tensors: object dtype declared": (
        lambda f: newer(f, declared(dtype="|O")),
        "manifest.json is not a checkpoint's: '|O' is not a numeric dtype",
    ),
    "tensors: a pickle": (
        lambda f: newer(f, arrays=pickle.dumps([Bomb()]).ljust(1000)),
        f"{NUMBERS} does not hold what its manifest says: 1,000 bytes for 2 arrays of 168",
    ),
    "tensors: a pickle of the right size": (
        lambda f: newer(f, arrays=pickle.dumps([Bomb()]).ljust(168)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "tensors: another name": (
        lambda f: newer(f, arrays=tensors(another_name)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "tensors: numbers that overlap": (
        lambda f: newer(f, arrays=tensors(overlapping)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "tensors: a giant header": (
        lambda f: newer(f, arrays=tensors(length=1 << 62)),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "tensors: more behind the numbers": (
        lambda f: newer(f, arrays=tensors(more=bytes(8))),
        f"{NUMBERS} does not hold what its manifest says: 176 bytes for 2 arrays of 168",
    ),
    "tensors: another dtype declared": (
        lambda f: newer(f, declared(dtype="<i4")),
        f"{NUMBERS} does not hold what its manifest says: its header describes other arrays",
    ),
    "tensors: a dtype of no file declared": (
        lambda f: newer(f, declared(dtype=">f4")),
        f"{NUMBERS} does not hold what its manifest says: 168 bytes for 2 arrays of 208",
    ),
    "tensors: another shape declared": (
        lambda f: newer(f, declared(shape=[2])),
        f"{NUMBERS} does not hold what its manifest says: 168 bytes for 2 arrays of 160",
    ),
    "tensors: a giant shape": (
        lambda f: newer(f, declared(shape=[1 << 40, 1 << 40])),
        "manifest.json is not a checkpoint's: state/a of shape (1099511627776, 1099511627776) and "
        "dtype float32 does not fit into its file of 168 bytes",
    ),
    "tensors: a negative shape": (
        lambda f: newer(f, declared(shape=[-4])),
        "manifest.json is not a checkpoint's: the shape of state/a is -4",
    ),
    "tensors: a shape of nothing, and yet giant": (
        lambda f: newer(f, declared(shape=NOTHING), tensors(shape=NOTHING)),
        f"{NUMBERS} does not hold what its manifest says: array is too big; `arr.size * "
        "arr.dtype.itemsize` is larger than the maximum possible size.",
    ),
    "tensors: another file": (
        lambda f: newer(f, declared(file="../other")),
        "manifest.json is not a checkpoint's: the file of state/a is '../other'",
    ),
    "tensors: a path as a hash": (
        lambda f: newer(f, lambda r: r["files"]["fixed"].update(sha256="../" * 21 + "x")),
        f"manifest.json is not a checkpoint's: the SHA-256 of fixed is {'../' * 21 + 'x'!r}",
    ),
    "tensors: a link for the arrays": (
        linked(NUMBERS, "/dev/zero", newer),
        f"{NUMBERS}: {LINKED}",
    ),
    "tensors: a link for what is shared": (
        partial(fixed_linked, forge=newer),
        f".safetensors: {LINKED}",
    ),
    "tensors: a pipe": (
        partial(pipe, forge=newer, name=NUMBERS),
        f"{NUMBERS}: it is a pipe, and not a file. Move it away",
    ),
    "tensors: an archive": (
        lambda f: newer(f, arrays=archive(STATE, NESTED)),
        f"{NUMBERS} does not hold what its manifest says: 508 bytes for 2 arrays of 168",
    ),
    "tensors: of format 1": (
        lambda f: newer(f, lambda r: r.update(format=1)),
        "manifest.json is not a checkpoint's: an entry is called None, which is not a valid name",
    ),
}
