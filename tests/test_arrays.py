"""Arrays in files: every dtype, what NumPy reads of them, and what is refused."""

import hashlib
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from treadle.checkpoint.arrays import (
    DTYPES,
    Npz,
    dtype_named,
    name_of,
    npy_header,
    read_arrays,
    write_arrays,
)
from treadle.errors import StateError

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


def test_arrays_are_read_back_as_they_were(tmp_path):
    write_arrays(tmp_path / "a.npz", arrays())
    found = read_arrays(tmp_path / "a.npz")
    assert list(found) == list(arrays())
    for name, array in arrays().items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_numpy_reads_the_arrays_too(tmp_path):
    write_arrays(tmp_path / "a.npz", arrays())
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert archive["model/layers/0/bias"].dtype == np.uint16
        assert archive[DTYPES].tolist()[0] == ["model/layers/0/bias", "bfloat16"]
    write_arrays(tmp_path / "b.npz", {"a": np.zeros(2)})
    with np.load(tmp_path / "b.npz", allow_pickle=False) as archive:
        assert archive.files == ["a"]


@pytest.mark.parametrize("dtype", ["object", [("a", "f4")], "U3", "M8[s]"])
def test_only_numbers_are_written(tmp_path, dtype):
    path, array = tmp_path / "a.npz", np.zeros(2, dtype)
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
    for name in ("a.npz", "b.npz", "c.npz", "d.npz", "e.npz"):
        with pytest.raises(
            StateError, match=f"^{name} does not hold arrays as Treadle writes them: "
        ):
            read_arrays(name)
    assert not Path("exploded").exists()


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


def test_a_write_that_fails_leaves_the_file(tmp_path, monkeypatch):
    write_arrays(tmp_path / "a.npz", {"a": np.ones(2)})

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "open", full)
    with pytest.raises(OSError, match="No space left"):
        write_arrays(tmp_path / "a.npz", {"a": np.zeros(2)})
    monkeypatch.undo()
    assert read_arrays(tmp_path / "a.npz")["a"].tolist() == [1.0, 1.0]


def test_the_same_arrays_give_the_same_bytes():
    def digest():
        return hashlib.sha256(b"".join(Npz(arrays().items()).pieces())).hexdigest()

    assert digest() == digest()


def test_checksums_are_those_of_the_file(tmp_path):
    npz = Npz([("a/b", np.arange(1 << 19)), ("c", np.zeros(()))])
    (tmp_path / "a.npz").write_bytes(b"".join(npz.pieces()))
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        found = {info.filename: info.CRC for info in archive.infolist()}
        assert archive.testzip() is None
    assert found == {f"{name}.npy": crc for name, crc in npz.checksums.items()}
    assert sorted(npz.checksums) == ["a/b", "c"]


def test_pieces_are_small_views_of_the_array():
    array = np.zeros(1 << 20)  # 8 MiB
    pieces = [piece for piece in Npz([("a", array)]).pieces() if len(piece) > 1000]
    assert [len(piece) for piece in pieces] == [1 << 20] * 8
    assert all(np.shares_memory(np.asarray(piece), array) for piece in pieces)


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
