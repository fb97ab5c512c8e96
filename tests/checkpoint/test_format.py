"""What a checkpoint holds comes back as it was; what it cannot hold is refused."""

import enum
import errno
import hashlib
import json
import math
import struct
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults import Quick, Refuses, checkpoint, read, same, write
from tests.part_writers import save_in_parts
from treadle.checkpoint import FORMAT, SavedState
from treadle.checkpoint.format import Name
from treadle.checkpoint.structure import DEEPEST, decode, encode, parse_json, to_json
from treadle.core.progress import Progress
from treadle.errors import CheckpointError

NAN, INF = float("nan"), float("inf")
DATA = Path(__file__).parents[1] / "stored"


class Color(enum.IntEnum):
    RED = 3


def golden():
    """What the files under `data` hold."""
    state = {
        "model/layers/0/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model/layers/0/bias": np.array([0.5, NAN, -0.0], ml_dtypes.bfloat16),
        "optimizer/iterations": np.array(12, np.int64),
        "random/python": np.arange(4, dtype=np.uint64) << 60,
        "mask": np.array([[True], [False]]),
        "empty": np.zeros((0, 2), np.float16),
        "../odd name": np.array([1 + 2j], np.complex64),
        "backbone/kernel": np.array([[1.5, INF]]),
        "backbone/narrow": np.array([0.5, -1.0], ml_dtypes.float8_e4m3fn),
    }
    return SavedState(
        Progress(12, 2, 2, 384, 0.1),
        state,
        frozenset(["backbone/kernel", "backbone/narrow"]),
        loop={"call": 1, "means": {"loss": [0.1, 3, True]}, "best": INF, "none": None},
        source={"state": {"key": [2**127 + 1, -5], "buffer": np.arange(3, dtype=np.uint8)}},
        hooks={"stopping": {"best": -INF, "text": 'ä\n"\U0001f600', "!": {"!float": [NAN]}}},
        about={"score": 0.25, "backend": "torch", "versions": {"numpy": "2.0"}},
    )


def written(tmp_path, saved):
    return read(write(tmp_path, saved, Quick()), Quick())


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    assert same(written(tmp_path, golden()), golden())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fixed", "step-000000000012"]


def test_a_checkpoint_without_variables_is_stored(tmp_path):
    empty = SavedState(Progress(), {})
    assert same(written(tmp_path, empty), empty)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000000"]


@pytest.mark.parametrize("kind", ["whole", "in-parts"])
def test_stored_checkpoints_are_read(kind):
    assert same(read(DATA / f"checkpoint-{kind}" / "step-000000000012", Quick()), golden())


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def write_in_parts(path, saved, monkeypatch):
    """Write a checkpoint in two processes, of which each holds parts of a kernel and a bias."""
    cuts = {
        "model/layers/0/kernel": (((0, 1), (0, 2)), (0, 1, 1, 0)),
        "model/layers/0/bias": (((0, 1),), (1, 0)),
    }
    save_in_parts(path, saved, cuts, monkeypatch).check()


def test_the_format_has_not_changed(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", golden(), Quick())
    write_in_parts(tmp_path / "in-parts", golden(), monkeypatch)
    for kind in ("whole", "in-parts"):
        assert contents(tmp_path / kind) == contents(DATA / f"checkpoint-{kind}"), kind


BITS = np.random.default_rng(3).integers(0, 256, 64, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (1, 2, 2)])
@pytest.mark.parametrize(
    "dtype",
    [
        *["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"],
        *["float16", "float32", "float64", "complex64", "complex128", ">f4", ">i8"],
        *["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "int4"],
    ],
)
def test_every_dtype_is_read_bit_for_bit(tmp_path, dtype, shape):
    dtype, count = np.dtype(dtype), math.prod(shape)
    bits = bytes(count) if dtype.kind == "b" else BITS[: count * dtype.itemsize]
    array = np.frombuffer(bits, dtype).reshape(shape)
    saved = SavedState(Progress(1), {"a": array, "b": array}, frozenset("b"), loop={"c": array})
    assert same(written(tmp_path, saved), saved)


def test_nan_payloads_are_read_bit_for_bit(tmp_path):
    odd = np.array([0x7FF0_0000_0000_0BAD, 0xFFF8_0000_0000_0001, 1 << 63, 1], np.uint64)
    saved = SavedState(Progress(1), {"a": odd.view(np.float64), "b": odd.view(np.float32)})
    assert same(written(tmp_path, saved), saved)


@pytest.mark.parametrize(
    "path",
    ["ä/\u4e2d/\U0001f600", "a\nb\0", '"', "../x", "/x", "", "x" * 300, "\ud800", "nested/0"],
)
def test_any_path_names_a_variable(tmp_path, path):
    saved = SavedState(
        Progress(1), {path: np.ones(2), "nested": np.zeros(1)}, loop={"c": np.ones(3)}
    )
    assert same(written(tmp_path, saved), saved)
    if path != "\ud800":  # no text that UTF-8 has
        folder = tmp_path / "step-000000000001"
        assert load_file(folder / "arrays.safetensors")[f"state/{path}"].tolist() == [1, 1]


def test_large_arrays_are_read_as_they_were_written(tmp_path):
    saved = SavedState(Progress(1), {"a": np.arange(700_001), "b": np.arange(500_000.0)[::-2]})
    found = written(tmp_path, saved).state
    assert same(found["a"], saved.state["a"])
    assert same(found["b"], np.ascontiguousarray(saved.state["b"]))


def test_other_tools_read_and_check_the_files(tmp_path):
    folder = write(tmp_path, golden(), Quick())
    arrays = load_file(folder / "arrays.safetensors")
    assert arrays["state/model/layers/0/kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["state/model/layers/0/bias"].dtype == ml_dtypes.bfloat16
    assert arrays["state/../odd name"].tobytes() == np.array([1 + 2j], np.complex64).tobytes()
    assert arrays["nested/0"].tolist() == [0, 1, 2]
    assert len(arrays) == 8
    command = ["sha256sum", "--check", "manifest.sha256"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "manifest.json: OK\n"
    [fixed] = (tmp_path / "fixed").iterdir()
    assert fixed.name == hashlib.sha256(fixed.read_bytes()).hexdigest() + ".safetensors"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == FORMAT == 1
    assert manifest["state"]["model/layers/0/bias"]["dtype"] == "bfloat16"
    assert manifest["state"]["backbone/kernel"]["file"] == "fixed"


def test_variables_that_do_not_change_are_stored_once(tmp_path):
    files = Quick()
    for step in (1, 2, 3):
        write(tmp_path, checkpoint(step), files)
    assert len(list((tmp_path / "fixed").iterdir())) == 1
    assert files.operations.count("create_file") == 3 * 3 + 1
    # What no step was to change, and yet did, is another file.
    changed = checkpoint(4)
    changed.state["backbone/kernel"][3] = -1.0
    assert same(written(tmp_path, changed), changed)
    assert len(list((tmp_path / "fixed").iterdir())) == 2
    assert same(read(tmp_path / "step-000000000003", files), checkpoint(3))


def test_a_shared_file_that_was_cut_is_written_again(tmp_path):
    write(tmp_path, checkpoint(1), Quick())
    [fixed] = (tmp_path / "fixed").iterdir()
    fixed.write_bytes(fixed.read_bytes()[:100])
    write(tmp_path, checkpoint(2), Quick())
    assert same(read(tmp_path / "step-000000000001", Quick()), checkpoint(1))


def test_a_shared_file_that_was_damaged_is_written_again(tmp_path):
    files, whole = Quick(), set()
    write(tmp_path, checkpoint(1), files, whole)
    [fixed] = (tmp_path / "fixed").iterdir()
    data = fixed.read_bytes()
    fixed.write_bytes(data.replace(np.arange(20.0).tobytes(), np.arange(20.0)[::-1].tobytes()))
    assert fixed.stat().st_size == len(data) and fixed.read_bytes() != data
    for step in (2, 3):
        write(tmp_path, checkpoint(step), files, whole)
    assert [path.read_bytes() for path in (tmp_path / "fixed").iterdir()] == [data]
    for step in (1, 2, 3):
        assert same(read(tmp_path / f"step-{step:012d}", files), checkpoint(step))
    # Once is enough: what is shared may be most of a model.
    opened = files.operations.count("open_file")
    write(tmp_path, checkpoint(4), files, whole)
    assert files.operations.count("open_file") == opened


def test_a_shared_file_that_cannot_be_read_is_written_again(tmp_path):
    write(tmp_path, checkpoint(1), Quick())
    write(tmp_path, checkpoint(2), Refuses(errno.EIO, "open_file", "fixed"))
    assert same(read(tmp_path / "step-000000000001", Quick()), checkpoint(1))
    assert len(list((tmp_path / "fixed").iterdir())) == 1


@pytest.mark.parametrize(
    "name",
    [
        "step-12",
        "step-000000000012-0",
        "step-000000000012-01",
        "step-0000000000012",
        "step-000000000012x",
        "step-٠٠٠٠٠٠٠٠٠٠١٢",
        ".partial-step-000000000012-aa",
        "fixed",
    ],
)
def test_names_of_other_things(name):
    assert Name.parse(name) is None


def test_names_are_ordered_by_step_then_by_how_often():
    names = [Name(12), Name(12, 1), Name(12, 10), Name(1_000_000_000_000), Name(10**13)]
    assert sorted(reversed(names)) == names
    assert [Name.parse(str(name)) for name in names] == names


# Values within


@pytest.mark.parametrize(
    "value",
    [
        *[0.1, -0.0, 5e-324, 1.7976931348623157e308, 1e22, INF, -INF, NAN],
        struct.unpack("d", struct.pack("Q", 0xFFF0_0000_0000_0BAD))[0],  # a NaN with a message
        *[0, -1, 2**64, -(2**128), 2**2048, -(2**100_000) + 1, True, False, None],
        *["", "ä\0\n", "\U0001f600", "\ud800"],
        *[[], {}, [[], [{}]], {"": {"a b": [1, {"!array": 0, "!!": "!"}]}}],
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) else f"{value.bit_length()}",
)
def test_values_survive_exactly(value):
    data = to_json(encode(value, "it", []), "it")
    assert same(decode(parse_json(data), []), value)


def test_tuples_and_scalars_become_plain():
    value = (np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("a"), Color.RED)
    value += (np.float64(NAN), ml_dtypes.bfloat16(1.5), np.uint64(2**64 - 1))
    found = decode(parse_json(to_json(encode(value, "it", []), "it")), [])
    assert same(found[:5], [float(np.float32(0.1)), -3, True, "a", 3])
    assert same(found[6:], [1.5, 2**64 - 1]) and math.isnan(found[5])


def test_nested_arrays_are_read_at_their_path():
    arrays = []
    value = {"a": [np.zeros(2), {"b": np.array(3)}], "c": np.ones((1, 0), ml_dtypes.bfloat16)}
    found = decode(parse_json(to_json(encode(value, "it", arrays), "it")), arrays)
    assert same(found, value) and len(arrays) == 3


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (b"x", "['x']", "a bytes"),
        ({1, 2}, "['x']", "a set"),
        ([0, 1j], "['x'][1]", "a complex"),
        ({"deep": [{}, {3: "a"}]}, "['x']['deep'][1]", "a dict with the key 3"),
        (np.array([None]), "['x']", "an array of dtype object"),
        (np.array(["a"]), "['x']", "an array of dtype <U1"),
        (np.datetime64("2020-01-01"), "['x']", "a datetime64"),
        (np.longdouble(1), "['x']", "a longdouble"),
        (Path("a"), "['x']", "a PosixPath"),
    ],
)
def test_values_that_cannot_be_stored_are_refused_by_path(tmp_path, value, place, kind):
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, checkpoint(3, fixed=False, about={"x": value}), Quick())
    assert str(caught.value) == (
        f"about{place} is {kind}, which a checkpoint cannot hold: only None, bool, int, float, str "
        "and NumPy arrays of numbers, and lists, tuples and dicts (by str) of these"
    )
    assert list(tmp_path.iterdir()) == []


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def test_deep_nesting_is_refused_when_writing_and_reading():
    encode(nested(DEEPEST), "it", [])
    endless = []
    endless.append(endless)
    for value in (nested(DEEPEST + 1), endless):
        with pytest.raises(CheckpointError) as caught:
            encode(value, "it", [])
        lies = f" is nested more than {DEEPEST} levels deep, or contains itself"
        assert str(caught.value) == f"it{'[0]' * (DEEPEST + 1)}{lies}"
    for depth in (DEEPEST + 1, 50_000):
        with pytest.raises(
            ValueError, match=f"^values are nested more than {DEEPEST} levels deep$"
        ):
            decode(parse_json(b"[" * depth + b"0" + b"]" * depth), [])


def test_too_large_values_are_refused_when_writing_and_reading():
    hint = (
        ". Convert long lists in the states of hooks and sources to NumPy arrays, which are "
        "stored in another file"
    )
    many, long = [0] * 400_001, "x" * (8 << 20)
    for value, fault in (
        (many, "holds about 400,001 values; at most 400,000 are allowed"),
        (long, "takes 8,388,610 bytes of JSON; at most 8,388,608 are allowed"),
    ):
        with pytest.raises(CheckpointError) as caught:
            to_json(value, "manifest.json")
        assert str(caught.value) == f"manifest.json {fault}{hint}"
        with pytest.raises(ValueError, match=f"^{fault}$"):
            parse_json(json.dumps(value).encode())
    to_json(many[:-1], "it")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        ('["ä"]'.encode(), "'ascii' codec can't decode"),
        (b"[1", "Expecting ',' delimiter"),
        (b"9" * 5000, "Exceeds the limit"),
        (b'{"!object": 1}', "a value has the invalid tag '!object'"),
        (b'{"!float": "7ff"}', "a value has the invalid tag '!float'"),
        (b'{"!float": "zzzzzzzzzzzzzzzz"}', "non-hexadecimal number"),
        (b'{"!int": "zz"}', "invalid literal for int"),
        (b'{"!array": 1}', "a value has the invalid tag '!array'"),
        (b'{"!array": true}', "a value has the invalid tag '!array'"),
        (b'{"!array": 0, "a": 0}', "a value has the invalid tag '!array'"),
    ],
)
def test_json_that_was_never_written_is_refused(data, fault):
    with pytest.raises(ValueError) as caught:
        decode(parse_json(data), [np.zeros(1)])
    assert str(caught.value).startswith(fault)


def test_fixed_names_what_is_in_the_state(tmp_path):
    wrong = SavedState(Progress(3), {"a": np.zeros(1)}, frozenset(["b"]))
    with pytest.raises(CheckpointError, match=r"^fixed has paths that the state lacks: b$"):
        write(tmp_path, wrong, Quick())


def test_variables_hold_numbers(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, SavedState(Progress(3), {"a": np.array([None])}), Quick())
    assert str(caught.value) == (
        "a of dtype object cannot be in a checkpoint: only arrays of numbers can"
    )
