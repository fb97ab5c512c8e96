"""Arrays in files: every dtype, what NumPy reads of them, and what is refused."""

import hashlib
import json
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from treadle.checkpoint.arrays import read_arrays, write_arrays
from treadle.checkpoint.dtypes import dtype_named, name_of
from treadle.checkpoint.format_1 import npy_header
from treadle.checkpoint.npz import DTYPES
from treadle.checkpoint.tensor_file import header, pieces
from treadle.errors import DirectoryError, StateError

NAN = float("nan")


def arrays():
    return {
        "model/layers/0/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model/layers/0/bias": np.array([0.5, NAN, -0.0], ml_dtypes.bfloat16),
        "narrow": np.array([[1, 2]], ml_dtypes.float8_e4m3fn),
        "narrow, and a float to NumPy": np.array([0.5, NAN], ml_dtypes.float8_e5m2),
        "other end first": np.arange(3, dtype=">f4"),
        "scalar": np.array(3, np.int64),
        "bfloat16 scalar": np.array(1.5, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.uint32),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "turned narrow": np.ones((2, 3), ml_dtypes.bfloat16).T,
        "file": np.array([True]),
        "allow_pickle": np.array([1j]),
    }


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_arrays_are_read_back_as_they_were(tmp_path, name):
    write_arrays(tmp_path / name, arrays())
    found = read_arrays(tmp_path / name)
    assert sorted(found) == sorted(arrays())
    for path, array in arrays().items():
        assert found[path].dtype == array.dtype and found[path].shape == array.shape, path
        assert found[path].tobytes() == array.tobytes(), path
        assert found[path].flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_other_tools_read_the_tensors_too(tmp_path):
    path = tmp_path / "a.safetensors"
    kept = {name: array for name, array in arrays().items() if array.dtype.itemsize > 1}
    write_arrays(path, kept)
    found = load_file(path)  # which has no float8
    for name, array in kept.items():
        assert found[name].tobytes() == array.tobytes(), name
    assert found["turned"].shape == (3, 2) and found["turned"].dtype == np.float64
    assert found["other end first"].shape == (3, 4) and found["other end first"].dtype == np.uint8
    write_arrays(path, arrays())
    with safe_open(path, "np") as file:
        assert file.get_slice("narrow").get_dtype() == "F8_E4M3"
        assert file.metadata() == {
            "dtype of other end first": ">f4",
            "dtype of allow_pickle": "<c16",
        }


def test_tensors_of_other_tools_are_read(tmp_path):
    theirs = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(True), "c": np.zeros((0, 2), "i2")}
    save_file(theirs, tmp_path / "a.safetensors", metadata={"format": "np"})
    found = read_arrays(tmp_path / "a.safetensors")
    for name, array in theirs.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_numpy_reads_the_arrays_too(tmp_path):
    write_arrays(tmp_path / "a.npz", arrays())
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert archive["model/layers/0/bias"].dtype == np.uint16
        assert archive[DTYPES].tolist()[0] == ["model/layers/0/bias", "bfloat16"]
    write_arrays(tmp_path / "b.npz", {"a": np.zeros(2)})
    with np.load(tmp_path / "b.npz", allow_pickle=False) as archive:
        assert archive.files == ["a"]


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
@pytest.mark.parametrize("dtype", ["object", [("a", "f4")], "U3", "M8[s]"])
def test_only_numbers_are_written(tmp_path, dtype, name):
    path, array = tmp_path / name, np.zeros(2, dtype)
    write_arrays(path, {"a": np.ones(1)})
    with pytest.raises(StateError) as caught:
        write_arrays(path, {"a": np.zeros(1), "b/c": array})
    assert str(caught.value) == (
        f"b/c of dtype {array.dtype} cannot be written to {path}: only arrays of numbers can. "
        "Nothing was written"
    )
    assert read_arrays(path)["a"] == [1.0]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_objects_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", a=np.array([Bomb()], object))
    np.array([Bomb()], object).dump("b.npz")
    write_arrays("c.npz", {"a": np.ones(3)})
    Path("c.npz").write_bytes(Path("c.npz").read_bytes()[:-40])
    Path("d.npz").write_bytes(b"")
    np.savez("e.npz", a=np.ones(2), **{DTYPES: np.array([("a", "no_such_dtype")])})
    for name in "abcd":
        Path(f"{name}.safetensors").write_bytes(Path(f"{name}.npz").read_bytes())
    for name in [*(f"{name}.npz" for name in "abcde"), *(f"{name}.safetensors" for name in "abcd")]:
        with pytest.raises(
            StateError, match=f"^{name} does not hold arrays as Treadle writes them: "
        ):
            read_arrays(name)
    assert not Path("exploded").exists()


def tensor_file(record, numbers=bytes(8)):
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def one(dtype="F32", shape=(2,), offsets=(0, 8), **metadata):
    array = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return {"a": array, "__metadata__": metadata}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (tensor_file(one(dtype="C64", shape=[1])), "the dtype C64 is not supported"),
        (tensor_file(one(dtype="O")), "unknown variant `O`"),
        (tensor_file(one(shape=[3])), ""),
        (tensor_file(one(shape=[1 << 62, 1 << 62])), ""),
        (tensor_file(one(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0]), b""), "array is too big"),
        (tensor_file(one(offsets=[8, 16]), bytes(16)), ""),
        (tensor_file(one(), bytes(16)), ""),
        (tensor_file(one(), bytes(4)), ""),
        (tensor_file(b"[" * 100_000), ""),
        ((1 << 62).to_bytes(8, "little") + bytes(100), ""),
        (tensor_file(one("U8", [8], **{"dtype of a": "|O"})), "'|O' is not a numeric dtype"),
        (tensor_file(one("U8", [2, 4], **{"dtype of a": "<c16"})), "larger dtype"),
        (tensor_file(one("U8", [8], **{"dtype of a": "<f8"})), None),
    ],
)
def test_tensors_that_contradict_their_header(tmp_path, data, fault):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    if fault is None:
        assert read_arrays(path)["a"].shape == ()
        return
    with pytest.raises(StateError) as caught:
        read_arrays(path)
    start = f"{path} does not hold arrays as Treadle writes them: "
    assert str(caught.value).startswith(start) and fault in str(caught.value)


def test_a_missing_file_is_missing(tmp_path):
    for name in ("a.npz", "a.safetensors"):
        with pytest.raises(FileNotFoundError):
            read_arrays(tmp_path / name)


def bomb(path):
    """A file of 200 KB that takes 200 MB of memory."""
    np.savez_compressed(path, a=np.zeros(200 << 20, np.uint8))


def overlapping(path):
    """One array of a megabyte that a thousand entries claim."""
    array = np.zeros(1 << 20, np.uint8)
    write_arrays(path, {"a": array})
    data = path.read_bytes()
    start = data.index(b"PK\x01\x02")
    entry = data[start : data.index(b"PK\x05\x06")]
    entries = b"".join(entry.replace(b"a.npy", b"%c.npy" % (65 + i)) for i in range(26))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 26, 26, len(entries), start, 0)
    path.write_bytes(data[:start] + entries + end)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (
            bomb,
            r"'a\.npy' in it is compressed\. Write it with numpy\.savez instead of "
            r"numpy\.savez_compressed$",
        ),
        (overlapping, r"its entries claim 27,266,304 bytes, and it has 1,0[0-9,]+$"),
    ],
)
def test_a_file_takes_no_more_memory_than_it_is_large(tmp_path, make, fault):
    path = tmp_path / "a.npz"
    make(path)
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match=f"^{path} does not hold arrays as Tre.*: {fault}"):
            read_arrays(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_write_that_fails_leaves_the_file(tmp_path, monkeypatch, name):
    write_arrays(tmp_path / name, {"a": np.ones(2)})

    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DirectoryError, match=rf"cannot write .*{name}: No space left on device"):
        write_arrays(tmp_path / name, {"a": np.zeros(2)})
    monkeypatch.undo()
    assert read_arrays(tmp_path / name)["a"].tolist() == [1.0, 1.0]


def test_the_same_arrays_give_the_same_bytes():
    def digest():
        return hashlib.sha256(b"".join(pieces(arrays().items()))).hexdigest()

    assert digest() == digest()


def test_arrays_are_aligned_in_the_file():
    kinds = [("a", (3,), np.dtype("u1")), ("b", (3,), np.dtype("f8")), ("c", (1,), np.dtype("f2"))]
    data = b"".join(pieces((name, np.zeros(shape, dtype)) for name, shape, dtype in kinds))
    length = int.from_bytes(data[:8], "little")
    record = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and data[: 8 + length] == header([kinds[1], kinds[2], kinds[0]])
    assert {name: part["data_offsets"] for name, part in record.items()} == {
        "b": [0, 24],
        "c": [24, 26],
        "a": [26, 29],
    }


def test_pieces_are_small_views_of_the_array():
    array = np.zeros(1 << 20)  # 8 MiB
    parts = [piece for piece in pieces([("a", array)]) if len(piece) > 1000]
    assert [len(piece) for piece in parts] == [1 << 20] * 8
    assert all(np.shares_memory(np.asarray(piece), array) for piece in parts)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (1, 2, 3)])
def test_headers_are_those_of_numpy(tmp_path, shape):
    array = np.ones(shape, np.int16)
    data = npy_header(shape, array.dtype) + array.tobytes()
    assert len(npy_header(shape, array.dtype)) % 64 == 0
    (tmp_path / "a.npy").write_bytes(data)
    found = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert found.shape == shape and found.dtype == np.int16


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", ">f8", "complex64"])
def test_dtypes_have_names_of_their_own(dtype):
    dtype = np.dtype(dtype)
    assert dtype_named(name_of(dtype)) == dtype
    assert name_of(np.dtype(ml_dtypes.int4)) == "int4"
    assert dtype_named("int4") == np.dtype(ml_dtypes.int4)


@pytest.mark.parametrize("name", ["O", "|O", "|V8", "<U4", "<f3", "float32", "finfo", "f4,f4", ""])
def test_other_names_are_no_dtypes(name):
    with pytest.raises(ValueError, match=r"^'.*' is not a numeric dtype$"):
        dtype_named(name)


def npz(path, header, numbers=b"", version=b"\x01\x00", name="a.npy"):
    """An archive with one entry, of any header."""
    with zipfile.ZipFile(path, "w") as archive:
        length = len(header).to_bytes(2, "little")
        archive.writestr(name, b"\x93NUMPY" + version + length + header + numbers)


def described(descr="<f4", shape="(2,)", order="False"):
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()


def encrypted(path):
    np.savez(path, a=np.ones(2))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    path.write_bytes(data)


def of_another_version(path):
    np.savez(path, a=np.ones(2))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 99
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), "File is not a zip file"),
        (encrypted, "'a.npy' in it is encrypted"),
        (of_another_version, "zip file version 9.9"),
        (lambda path: np.savez(path, a=np.array([{}], object)), "'|O' is not a numeric dtype"),
        (lambda path: np.savez(path, a=np.zeros(2, "M8[s]")), "'<M8[s]' is not a numeric dtype"),
        (lambda path: np.savez(path, a=np.zeros(2, "U3")), "'<U3' is not a numeric dtype"),
        (
            lambda path: np.savez(path, a=np.zeros(2, [("b", "f4")])),
            "'a.npy' in it is not an array of numbers",
        ),
        (
            lambda path: npz(path, described(shape="(2000000000000,)"), bytes(8)),
            "'a.npy' in it claims 8,000,000,000,000 bytes of numbers, and has 8",
        ),
        (
            lambda path: npz(path, described(shape="(0, " + "9, " * 40 + ")")),
            "'a.npy' in it claims 0 bytes of numbers, and has 0",
        ),
        (lambda path: npz(path, described(), bytes(8), b"\x07\x00"), "'a.npy' in it is not an arr"),
        (lambda path: npz(path, b"open('x', 'w')\n"), "'a.npy' in it is not an array of numbers"),
        (lambda path: npz(path, b"", name="a\x1b[2J.txt"), r"'a\x1b[2J.txt' in it is not an arr"),
    ],
)
def test_an_archive_of_another_kind_is_explained(tmp_path, make, fault):
    path = tmp_path / "state.npz"
    make(path)
    with pytest.raises(StateError) as caught:
        read_arrays(path)
    start = f"{path} does not hold arrays as Treadle writes them: "
    assert str(caught.value).startswith(start + fault) and "pickle" not in str(caught.value)


def test_arrays_of_both_orders_are_read(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    np.savez(tmp_path / "a.npz", c=array, f=np.asfortranarray(array), none=np.zeros((0, 2)), one=3)
    found = read_arrays(tmp_path / "a.npz")
    np.testing.assert_array_equal(found["c"], array)
    np.testing.assert_array_equal(found["f"], array)
    assert found["none"].shape == (0, 2) and found["one"] == 3


def test_only_a_regular_file_is_read(tmp_path):
    real = tmp_path / "real.npz"
    write_arrays(real, {"a": np.ones(2)})
    (tmp_path / "link.npz").symlink_to(real)
    assert read_arrays(tmp_path / "link.npz")["a"].sum() == 2  # the user's choice
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(StateError, match="it is a pipe, and not a file"):
        read_arrays(tmp_path / "pipe.npz")
