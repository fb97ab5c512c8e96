"""Arrays in files: every dtype, what NumPy reads of them, and what is refused."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.forging import Bomb
from treadle.checkpoint.arrays import (
    dtype_named,
    header,
    name_of,
    pieces,
    read_arrays,
    write_arrays,
)
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


def test_arrays_are_read_back_as_they_were(tmp_path):
    write_arrays(tmp_path / "a.safetensors", arrays())
    found = read_arrays(tmp_path / "a.safetensors")
    assert sorted(found) == sorted(arrays())
    for path, array in arrays().items():
        assert found[path].dtype == array.dtype and found[path].shape == array.shape, path
        assert found[path].tobytes() == array.tobytes(), path
        assert found[path].flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


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


@pytest.mark.parametrize("dtype", ["object", [("a", "f4")], "U3", "M8[s]"])
def test_only_numbers_are_written(tmp_path, dtype):
    path, array = tmp_path / "a.safetensors", np.zeros(2, dtype)
    write_arrays(path, {"a": np.ones(1)})
    with pytest.raises(StateError) as caught:
        write_arrays(path, {"a": np.zeros(1), "b/c": array})
    assert str(caught.value) == (
        f"b/c of dtype {array.dtype} cannot be written to {path}: only arrays of numbers can. "
        "Nothing was written"
    )
    assert read_arrays(path)["a"] == [1.0]


@pytest.mark.parametrize("name", ["a.npz", "a", "a.safetensors.bak"])
def test_another_suffix_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"of the user")
    for call in (lambda: write_arrays(path, {"a": np.ones(1)}), lambda: read_arrays(path)):
        with pytest.raises(StateError) as caught:
            call()
        assert str(caught.value) == (
            f"{path} is not the name of a file of arrays: expected a name that ends in "
            f".safetensors, but found {path.suffix or 'no suffix'!r}. Use "
            f"{path.stem + '.safetensors'!r}"
        )
    assert path.read_bytes() == b"of the user"


def test_objects_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "d"):
        path = Path(f"{name}.safetensors")
        with path.open("wb") as file:
            if name == "a":
                np.savez(file, a=np.array([Bomb()], object))
            elif name == "b":
                np.array([Bomb()], object).dump(file)
        if name == "c":
            write_arrays(path, {"a": np.ones(3)})
            path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(
            StateError, match=f"^{path} does not hold arrays as Treadle writes them: "
        ):
            read_arrays(path)
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
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "a.safetensors")


def test_a_write_that_fails_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_arrays(path, {"a": np.ones(2)})

    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DirectoryError, match=rf"cannot write {path}: No space left on device"):
        write_arrays(path, {"a": np.zeros(2)})
    monkeypatch.undo()
    assert read_arrays(path)["a"].tolist() == [1.0, 1.0]


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


def test_only_a_regular_file_is_read(tmp_path):
    real = tmp_path / "real.safetensors"
    write_arrays(real, {"a": np.ones(2)})
    (tmp_path / "link.safetensors").symlink_to(real)
    assert read_arrays(tmp_path / "link.safetensors")["a"].sum() == 2  # the user's choice
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(StateError, match="it is a pipe, and not a file"):
        read_arrays(tmp_path / "pipe.safetensors")
