"""A writer of checkpoints of format 1, which Treadle reads and no longer writes."""

import hashlib
import json
import zipfile
from dataclasses import asdict

from tests.faults import read
from treadle.checkpoint.dtypes import name_of
from treadle.checkpoint.format import SECTIONS, Name, digest_line
from treadle.checkpoint.format_1 import npy_header
from treadle.checkpoint.structure import encode


class Sink:
    """What a ZipFile writes, and cannot seek in."""

    def __init__(self):
        self.data = b""

    def write(self, piece):
        self.data += piece
        return len(piece)

    def flush(self):
        pass


def npy(array):
    return npy_header(array.shape, array.dtype) + array.tobytes()


def npz(described):
    """The archive of some arrays; completes how the manifest describes each."""
    sink = Sink()
    with zipfile.ZipFile(sink, "w") as archive:
        for array, record in described:
            info = zipfile.ZipInfo(f"{record['entry']}.npy")
            with archive.open(info, "w", force_zip64=True) as entry:
                entry.write(npy(array))
            record["crc32"] = info.CRC
    return sink.data


def write_format_1(folder, checkpoint):
    """Write a checkpoint, and return its folder."""
    nested = []
    record = {"format": 1, "progress": encode(asdict(checkpoint.progress), "progress", nested)}
    record |= {name: encode(getattr(checkpoint, name), name, nested) for name in SECTIONS}
    files, state = {"fixed": [], "arrays": []}, {}
    for number, (path, array) in enumerate(checkpoint.state.items()):
        entry = f"state/{path}" if path.isascii() and ".." not in path else f"unnamed/{number}"
        file = "fixed" if path in checkpoint.fixed else "arrays"
        state[path] = described(array, file, entry)
        files[file].append((array, state[path]))
    parts = [described(array, "arrays", f"nested/{i}") for i, array in enumerate(nested)]
    files["arrays"] += zip(nested, parts, strict=True)
    target = folder / str(Name(checkpoint.progress.step))
    target.mkdir(parents=True)
    record["files"] = {}
    for name, arrays in files.items():
        if arrays or name == "arrays":
            data = npz(arrays)
            sha256 = hashlib.sha256(data).hexdigest()
            path = folder / "fixed" / f"{sha256}.npz" if name == "fixed" else target / "arrays.npz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            record["files"][name] = {"sha256": sha256, "size": len(data)}
    data = json.dumps({**record, "state": state, "nested": parts}).encode()
    (target / "manifest.json").write_bytes(data)
    (target / "manifest.sha256").write_bytes(digest_line(data))
    return target


def described(array, file, entry):
    dtype = name_of(array.dtype)
    return {"file": file, "entry": entry, "shape": list(array.shape), "dtype": dtype}


def to_format_1(folder):
    """Write all checkpoints of a folder again, as if an older version had saved them."""
    saved = [read(path) for path in sorted(folder.glob("step-*"))]
    for path in (*folder.glob("step-*/*"), *folder.glob("fixed/*")):
        path.unlink()
    for path in folder.glob("step-*"):
        path.rmdir()
    for checkpoint in saved:
        write_format_1(folder, checkpoint)
