import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.forging import Bomb
from treadle import datasets
from treadle.errors import DataError

SHAPES = {"mnist": (28, 28), "cifar10": (32, 32, 3)}
LOADERS = {"mnist": datasets.mnist, "cifar10": datasets.cifar10}
NAMES = sorted(SHAPES)
REAL_DATA = os.environ.get("TREADLE_DATA")


@pytest.fixture(autouse=True)
def no_outside(monkeypatch):
    """No folder from outside and no download, unless a test asks for them."""

    def refuse():
        raise Exception("URL fetch failure on https://example.org: no connection")

    import keras

    monkeypatch.delenv("TREADLE_DATA", raising=False)
    monkeypatch.setattr(keras.datasets.mnist, "load_data", refuse)
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", refuse)


def small(name, column=False, **changes):
    arrays = {}
    for split, rows in (("train", 5), ("test", 3)):
        arrays[f"x_{split}"] = np.full((rows, *SHAPES[name]), rows, np.uint8)
        arrays[f"y_{split}"] = np.arange(rows, dtype=np.uint8).reshape((rows, 1) if column else -1)
    arrays |= changes
    return {key: value for key, value in arrays.items() if value is not None}


def write(folder: Path, name, **changes):
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", **small(name, **changes))
    return folder


def test_digits_has_the_published_shapes_and_counts():
    data = datasets.digits()
    assert data.x_train.shape == (1437, 8, 8) and data.x_test.shape == (360, 8, 8)
    assert data.y_train.shape == (1437,) and data.y_test.shape == (360,)
    assert data.x_train.dtype == data.x_test.dtype == np.uint8
    assert data.y_train.dtype == data.y_test.dtype == np.int64
    x = np.concatenate([data.x_train, data.x_test])
    y = np.concatenate([data.y_train, data.y_test])
    assert (x.min(), x.max(), x.sum(dtype=np.int64)) == (0, 16, 561718)
    # The counts of the test set in the description of the data set.
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(data.y_test).tolist() == [27, 35, 36, 29, 30, 40, 44, 39, 39, 41]


def test_digits_rows_are_in_the_documented_order():
    data = datasets.digits()
    permuted = np.concatenate([data.y_test, data.y_train])
    original = np.empty_like(permuted)
    original[np.random.RandomState(0).permutation(1797)] = permuted
    # The source begins with the ten digits in turn, three times.
    assert original[:30].tolist() == list(range(10)) * 3


def test_wines_have_the_published_grades():
    wines = datasets.wine()
    assert wines.x_train.shape == (3169, 11) and wines.x_test.shape == (792, 11)
    assert wines.x_train.dtype == wines.x_test.dtype == np.float32
    assert wines.y_train.dtype == wines.y_test.dtype == np.int64
    assert len(wines.columns) == 11
    x, y = (
        np.concatenate(parts)
        for parts in ((wines.x_test, wines.x_train), (wines.y_test, wines.y_train))
    )
    # Those of the source without rows that repeat an earlier one.
    assert np.bincount(y).tolist() == [0, 0, 0, 20, 153, 1175, 1788, 689, 131, 5]
    assert len(np.unique(np.column_stack([x, y]), axis=0)) == 3961
    original = np.empty_like(x)
    original[np.random.RandomState(0).permutation(3961)] = x
    first = [7, 0.27, 0.36, 20.7, 0.045, 45, 170, 1.001, 3, 0.45, 8.8]
    np.testing.assert_allclose(original[0], first, rtol=1e-6)


def test_the_book_is_whole_and_plain():
    book = datasets.alice()
    assert book.isascii() and len(book) == 148_425
    assert book.split("\n", 1)[0].strip() == "ALICE'S ADVENTURES IN WONDERLAND"
    assert [f"CHAPTER {n}\n" in book for n in ("I", "VI", "XII")] == [True] * 3
    assert book.endswith("THE END\n")
    assert "\r" not in book and " \n" not in book
    assert "EDITION" not in book and "Gutenberg" not in book


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_named_folder(tmp_path, name, column):
    data = LOADERS[name](write(tmp_path, name, column=column))
    assert data.x_train.shape == (5, *SHAPES[name]) and data.x_test.shape == (3, *SHAPES[name])
    assert data.x_train.dtype == np.uint8
    assert data.y_train.dtype == data.y_test.dtype == np.int64
    assert data.y_train.tolist() == [0, 1, 2, 3, 4] and data.y_test.tolist() == [0, 1, 2]


def test_named_folder_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data", "mnist")
    assert len(datasets.mnist("~/data").x_train) == 5


@pytest.mark.parametrize("name", NAMES)
def test_folder_of_the_environment(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TREADLE_DATA", str(write(tmp_path, name)))
    assert len(LOADERS[name]().x_train) == 5


def test_named_folder_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_DATA", str(tmp_path / "absent"))
    assert len(datasets.mnist(write(tmp_path / "named", "mnist")).x_train) == 5


@pytest.mark.parametrize("name", NAMES)
def test_named_folder_without_the_file_is_an_error_and_nothing_else_is_tried(
    tmp_path, monkeypatch, name
):
    monkeypatch.setenv("TREADLE_DATA", str(write(tmp_path / "good", name)))
    with pytest.raises(DataError) as caught:
        LOADERS[name](tmp_path)
    message = str(caught.value)
    assert f"{name} was not found" in message
    assert f"the given folder: {tmp_path / name}.npz does not exist" in message
    assert "Keras' cache and download" not in message
    assert "--data-dir FOLDER" in message and "TREADLE_DATA" in message


@pytest.mark.parametrize("name", NAMES)
def test_download_is_used_where_no_folder_has_the_file(tmp_path, monkeypatch, name):
    import keras

    arrays = small(name, column=True)
    splits = ((arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"]))
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", lambda: splits)
    monkeypatch.setenv("TREADLE_DATA", str(tmp_path))
    assert LOADERS[name]().y_train.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", NAMES)
def test_one_message_says_all_that_was_tried(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.npz").mkdir()
    monkeypatch.setenv("TREADLE_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        LOADERS[name]()
    assert str(caught.value) == (
        f"{name} was not found. Tried\n"
        f"  - TREADLE_DATA: {tmp_path / name}.npz is not a file\n"
        "  - Keras' cache and download: URL fetch failure on https://example.org: no connection\n"
        f"Name a folder that holds {name}.npz with --data-dir FOLDER (data_dir= in Python) or in "
        "the environment variable TREADLE_DATA, or run once with a connection: Keras then "
        "downloads it into its cache."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "no array y_test. Expected x_train, y_train, x_test, y_test; found "),
        (
            {"x_train": np.zeros((5, 28, 28), np.float32)},
            r"x_train is float32 \(5, 28, 28\); expected uint8 \(n, 28, 28\)",
        ),
        (
            {"x_test": np.zeros((3, 784), np.uint8)},
            r"x_test is uint8 \(3, 784\); expected uint8 \(n, 28, 28\)",
        ),
        ({"x_train": np.zeros((0, 28, 28), np.uint8)}, r"x_train is uint8 \(0, 28, 28\)"),
        ({"x_train": np.uint8(3)}, r"x_train is uint8 \(\)"),
        (
            {"y_train": np.zeros(4, np.uint8)},
            r"y_train is uint8 \(4,\); expected integers \(5,\), one label for each image",
        ),
        ({"y_test": np.zeros(3, np.float64)}, r"y_test is float64 \(3,\); expected integers"),
        ({"y_test": np.array([0, 10, 3])}, "y_test holds labels 0 to 10; expected 0 to 9"),
        ({"x_train": np.array([None] * 5)}, "cannot be read as an .npz archive of plain arrays"),
    ],
)
def test_file_with_wrong_content_is_refused(tmp_path, changes, message):
    write(tmp_path, "mnist", **changes)
    with pytest.raises(DataError, match=message) as caught:
        datasets.mnist(tmp_path)
    assert str(tmp_path / "mnist.npz") in str(caught.value)


def test_pickle_is_never_executed(tmp_path):
    write(tmp_path, "mnist", y_train=np.array([Bomb(tmp_path / "executed")] * 5))
    with pytest.raises(DataError):
        datasets.mnist(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\x03\x04 cut short"])
def test_file_that_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "mnist.npz").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        datasets.mnist(tmp_path)


def test_damaged_archive_is_refused(tmp_path):
    path = write(tmp_path, "mnist") / "mnist.npz"
    content = bytearray(path.read_bytes())
    content[400] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        datasets.mnist(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "compression", "message"),
    [
        (
            {"x_train": np.broadcast_to(np.uint8(0), (400_000, 28, 28))},
            zipfile.ZIP_DEFLATED,
            "bytes and its arrays claim 313,600,128; a compressed file may hold at most "
            "268,435,456. Write larger arrays with numpy.savez",
        ),
        (
            {"x_train": np.zeros((10, 28, 28), np.uint8)},
            zipfile.ZIP_LZMA,
            "'x_train.npy' in it is compressed in another way than by numpy.savez_compressed",
        ),
    ],
)
def test_a_bomb_is_refused_before_it_is_read(tmp_path, monkeypatch, arrays, compression, message):
    with zipfile.ZipFile(tmp_path / "mnist.npz", "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array_header_1_0(
                    entry,
                    np.lib.format.header_data_from_array_1_0(array[:0]) | {"shape": array.shape},
                )
                for row in array[:: len(array) // 10]:
                    entry.write(bytes(row.nbytes * (len(array) // 10)))
    assert (tmp_path / "mnist.npz").stat().st_size < 1 << 20
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    with pytest.raises(DataError, match=re.escape(message)):
        datasets.mnist(tmp_path)


def entry_of(header, content=b"", version=1):
    length = len(header).to_bytes(2, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + content


CLAIM = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%s,), }\n"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            entry_of(CLAIM % b"8000000000000", bytes(10)),
            "'x_train.npy' in it claims 8,000,000,000,000 bytes of numbers, and has 10",
        ),
        (entry_of(CLAIM % (b"0, 1" + b"0" * 30)), "cannot be read as an .npz archive"),
        (entry_of(b"-" * 9_000 + b"1\n"), "cannot be read as an .npz archive"),
        (
            entry_of(b"{'descr': '|O', 'fortran_order': False, 'shape': (), }\n", b"x" * 8),
            "'x_train.npy' in it holds Python objects",
        ),
        (entry_of(b"{}", version=9), "'x_train.npy' in it has the unknown format version (9, 0)"),
        (b"text", "cannot be read as an .npz archive"),
    ],
    ids=["8 TB", "overflow", "nested", "objects", "version", "text"],
)
def test_a_false_header_is_refused(tmp_path, entry, message):
    with zipfile.ZipFile(tmp_path / "mnist.npz", "w") as archive:
        archive.writestr("x_train.npy", entry)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        datasets.mnist(tmp_path)
    assert str(tmp_path / "mnist.npz") in str(caught.value)
    assert "allow_pickle" not in str(caught.value)


def test_an_encrypted_archive_is_refused(tmp_path):
    path = write(tmp_path, "mnist") / "mnist.npz"
    content = bytearray(path.read_bytes())
    for start, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(start) + flags] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read as an \.npz archive .* is encrypted"):
        datasets.mnist(tmp_path)


def test_a_compressed_file_is_read(tmp_path):
    np.savez_compressed(tmp_path / "mnist.npz", **small("mnist"))
    assert len(datasets.mnist(tmp_path).x_train) == 5


def test_single_array_is_refused(tmp_path):
    with (tmp_path / "mnist.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="one array, not an"):
        datasets.mnist(tmp_path)


@pytest.mark.skipif(not REAL_DATA, reason="TREADLE_DATA names no folder with the real data")
@pytest.mark.parametrize(("name", "rows"), [("mnist", 60_000), ("cifar10", 50_000)])
def test_real_data(name, rows):
    data = LOADERS[name](REAL_DATA)
    assert data.x_train.shape == (rows, *SHAPES[name])
    assert data.x_test.shape == (10_000, *SHAPES[name])
    assert np.bincount(data.y_train).min() >= rows // 12
