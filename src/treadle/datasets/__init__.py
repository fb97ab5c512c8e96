"""Small data sets: digits, wine and a text (shipped with the package), MNIST and CIFAR-10.

Files are NumPy `.npz` archives with the keys x_train, y_train, x_test and y_test, and one text
file. Pickled arrays are rejected and sizes are checked before arrays are decompressed, so a file
from an untrusted source runs no code and cannot exhaust the memory.
"""

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path

import numpy as np

from ..errors import DataError

__all__ = ["Arrays", "Table", "alice", "cifar10", "digits", "mnist", "wine"]

_CLASSES = 10
# The largest data set here, CIFAR-10, has 184 MB.
_LARGEST = 256 << 20
_ONE_ARRAY = b"\x93NUMPY"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# RuntimeError: encrypted entries, and headers that are nested too deeply for Python's parser.
_UNREADABLE = (EOFError, ValueError, ArithmeticError, RuntimeError, MemoryError)


@dataclass(frozen=True, eq=False)
class Arrays:
    """A labelled image data set, split into training and test rows.

    Attributes:
        x_train: uint8 images, (n, height, width) or (n, height, width, channels).
        y_train: int64 class labels 0 to 9, (n,).
        x_test: uint8 images, (m, …), shaped like those of `x_train`.
        y_test: int64 class labels 0 to 9, (m,).

    Example:
        >>> found = digits()
        >>> found.x_train.dtype, found.y_test.shape
        (dtype('uint8'), (360,))
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@dataclass(frozen=True, eq=False)
class Table:
    """A table of measurements, split into training and test rows.

    Attributes:
        columns: The names of the columns of `x_train` and `x_test`.
        x_train: float32 measurements, (n, columns), in the units of the source.
        y_train: int64 targets, (n,).
        x_test: float32 measurements, (m, columns).
        y_test: int64 targets, (m,).

    Example:
        >>> found = wine()
        >>> len(found.columns) == found.x_train.shape[1] == found.x_test.shape[1]
        True
    """

    columns: tuple[str, ...]
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


_WINE_COLUMNS = (
    "fixed acidity",
    "volatile acidity",
    "citric acid",
    "residual sugar",
    "chlorides",
    "free sulfur dioxide",
    "total sulfur dioxide",
    "density",
    "pH",
    "sulphates",
    "alcohol",
)


def digits() -> Arrays:
    """Return 1,797 handwritten digits of 8×8 pixels, which are shipped with the package.

    They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
    C. Kaynak (https://doi.org/10.24432/C50P49, licence CC BY 4.0). Test rows are the first 360 of
    `numpy.random.RandomState(0).permutation(1797)`, training rows the other 1,437 in that order.
    This is the same split as scikit-learn's `train_test_split(…, test_size=0.2, random_state=0)`.
    Both splits contain digits of the same 13 writers.

    Returns:
        Images uint8 (1437, 8, 8) and (360, 8, 8), pixels 0 to 16; labels int64 (1437,) and (360,).

    Example:
        >>> data = digits()
        >>> data.x_train.shape, data.x_test.shape, int(data.x_train.max())
        ((1437, 8, 8), (360, 8, 8), 16)
    """
    return _read(Path(__file__).with_name("digits.npz"), (8, 8))


def wine() -> Table:
    """Return 3,961 white wines with eleven measurements and a grade, shipped with the package.

    They are the white wines of "Wine Quality" by P. Cortez, A. Cerdeira, F. Almeida, T. Matos and
    J. Reis (https://doi.org/10.24432/C56S3T, licence CC BY 4.0). Duplicate rows (937 of 4,898) are
    removed, since they could be in both splits. Test rows are the first 792 of
    `numpy.random.RandomState(0).permutation(3961)`, training rows the others in that order.

    The grade is the median grade of at least three experts. The scale is 0 to 10; grades range from
    3 to 9. The classes are imbalanced: 45 % of the wines have grade 6, 3.4 % have grade 8 or 9.

    Returns:
        Measurements float32 (3169, 11) and (792, 11); grades int64 (3169,) and (792,).

    Example:
        >>> wines = wine()
        >>> wines.x_train.shape, wines.columns[-1], int((wines.y_train >= 8).sum())
        ((3169, 11), 'alcohol', 113)
    """
    content = _arrays(Path(__file__).with_name("wine.npz"))
    splits = {name: content[name] for name in ("x_train", "x_test")}
    grades = {name: content[name].astype(np.int64) for name in ("y_train", "y_test")}
    return Table(_WINE_COLUMNS, **splits, **grades)


def alice() -> str:
    r"""Return the text of "Alice's Adventures in Wonderland", which is shipped with the package.

    The book by Lewis Carroll (1865) is in the public domain. The text is the file `alice29.txt` of
    the Canterbury Corpus (https://corpus.canterbury.ac.nz), without the line that names the edition
    and without spaces at the ends of lines.

    Returns:
        The ASCII text, with lines separated by "\n".

    Example:
        >>> text = alice()
        >>> text.split()[:4], len(set(text))
        (["ALICE'S", 'ADVENTURES', 'IN', 'WONDERLAND'], 70)
    """
    return gzip.decompress(Path(__file__).with_name("alice.txt.gz").read_bytes()).decode("ascii")


def mnist(data_dir: str | os.PathLike[str] | None = None) -> Arrays:
    """Return MNIST: 70,000 handwritten digits of 28×28 pixels.

    It is read from `mnist.npz` in `data_dir`, otherwise in the folder given by the environment
    variable TREADLE_DATA, otherwise in Keras' cache, to which Keras downloads it (11 MB).

    Args:
        data_dir: The folder that contains `mnist.npz`. If given, no other location is tried.

    Returns:
        Images uint8 (60000, 28, 28) and (10000, 28, 28), pixels 0 to 255; labels int64 (60000,)
        and (10000,).

    Raises:
        DataError: If the file is not found and cannot be downloaded, or does not contain MNIST.

    Example:
        >>> data = mnist("~/data")  # doctest: +SKIP
        >>> data.x_train.shape  # doctest: +SKIP
        (60000, 28, 28)
    """
    return _find("mnist", (28, 28), data_dir)


def cifar10(data_dir: str | os.PathLike[str] | None = None) -> Arrays:
    """Return CIFAR-10: 60,000 colour photographs of 32×32 pixels in ten classes.

    It is read from `cifar10.npz` in `data_dir`, otherwise in the folder given by the environment
    variable TREADLE_DATA, otherwise in Keras' cache, to which Keras downloads it (170 MB).

    Args:
        data_dir: The folder that contains `cifar10.npz`. If given, no other location is tried.

    Returns:
        Images uint8 (50000, 32, 32, 3) and (10000, 32, 32, 3), pixels 0 to 255; labels int64
        (50000,) and (10000,), also if the file stores them as a column.

    Raises:
        DataError: If the file is not found and cannot be downloaded, or does not contain CIFAR-10.

    Example:
        >>> data = cifar10("~/data")  # doctest: +SKIP
        >>> data.x_train.shape  # doctest: +SKIP
        (50000, 32, 32, 3)
    """
    return _find("cifar10", (32, 32, 3), data_dir)


def _find(name: str, image: tuple[int, ...], data_dir: str | os.PathLike[str] | None) -> Arrays:
    tried: list[str] = []
    for source, folder in (
        ("the given folder", data_dir),
        ("TREADLE_DATA", os.environ.get("TREADLE_DATA") or None),
    ):
        if folder is None:
            continue
        path = Path(folder).expanduser() / f"{name}.npz"
        if path.is_file():
            return _read(path, image)
        tried.append(f"{source}: {path} {'is not a file' if path.exists() else 'does not exist'}")
        if data_dir is not None:
            raise _not_found(name, tried)
    try:
        source = import_module(f"keras.datasets.{name}")
        (x_train, y_train), (x_test, y_test) = source.load_data()
    except Exception as error:  # Keras raises a bare Exception if a download fails
        tried.append(f"Keras' cache and download: {error or type(error).__name__}")
        raise _not_found(name, tried) from error
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    return _checked(arrays, image, "what Keras downloaded")


def _not_found(name: str, tried: list[str]) -> DataError:
    return DataError(
        f"{name} was not found. Tried\n"
        + "".join(f"  - {attempt}\n" for attempt in tried)
        + f"Name a folder that holds {name}.npz with --data-dir FOLDER (data_dir= in Python) or in "
        "the environment variable TREADLE_DATA, or run once with a connection: Keras then "
        "downloads it into its cache."
    )


def _read(path: Path, image: tuple[int, ...]) -> Arrays:
    return _checked(_arrays(path), image, str(path))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            # Not np.load: it believes every size that a header claims.
            if file.read(len(_ONE_ARRAY)) == _ONE_ARRAY:
                raise DataError(f"{path} is one array, not an .npz archive of four.")
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                _check_sizes(entries, path.stat().st_size)
                return {
                    entry.filename.removesuffix(".npy"): _array(archive, entry) for entry in entries
                }
    except (*_UNREADABLE, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read as an .npz archive of plain arrays: {error}"
        ) from error


def _check_sizes(entries: Iterable[zipfile.ZipInfo], size: int) -> None:
    """Check how much memory an archive needs before anything in it is decompressed.

    Raises:
        ValueError: If it needs more than `_LARGEST` and than the file has, or if the compression is
            another one than that of NumPy, whose decompression zipfile does not limit.
    """
    claimed, limit = 0, max(_LARGEST, size)
    for entry in entries:
        claimed += entry.file_size
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{entry.filename[:80]!a} in it is compressed in another way than by "
                "numpy.savez_compressed"
            )
    if claimed > limit:
        raise ValueError(
            f"it has {size:,} bytes and its arrays claim {claimed:,}; a compressed file may hold "
            f"at most {limit:,}. Write larger arrays with numpy.savez"
        )


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """Read an array after checking that its header claims the size that it has in the archive."""
    shown = ascii(entry.filename[:80])
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{shown} in it has the unknown format version {version}")
        shape, _, dtype = _HEADERS[version](file)
        start = file.tell()
    if dtype.hasobject:
        raise ValueError(f"{shown} in it holds Python objects")
    claimed, found = math.prod(shape) * dtype.itemsize, entry.file_size - start
    if claimed != found:
        raise ValueError(f"{shown} in it claims {claimed:,} bytes of numbers, and has {found:,}")
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _checked(arrays: Mapping[str, np.ndarray], image: tuple[int, ...], origin: str) -> Arrays:
    """Return the arrays with int64 label vectors; raise if a shape, dtype or label is invalid."""
    expected = [field.name for field in fields(Arrays)]
    missing = [key for key in expected if key not in arrays]
    if missing:
        raise DataError(
            f"{origin}: no array {', '.join(missing)}. "
            f"Expected {', '.join(expected)}; found {', '.join(arrays) or 'none'}."
        )
    labels: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype != np.uint8 or x.shape[1:] != image or len(x) == 0:
            shape = ", ".join(map(str, ("n", *image)))
            raise DataError(
                f"{origin}: x_{split} is {x.dtype} {x.shape}; expected uint8 ({shape})."
            )
        if y.dtype.kind not in "iu" or y.shape not in ((len(x),), (len(x), 1)):
            raise DataError(
                f"{origin}: y_{split} is {y.dtype} {y.shape}; expected integers ({len(x)},), one "
                f"label for each image of x_{split}."
            )
        if y.min() < 0 or y.max() >= _CLASSES:
            raise DataError(
                f"{origin}: y_{split} holds labels {y.min()} to {y.max()}; expected 0 to "
                f"{_CLASSES - 1}."
            )
        labels[split] = y.reshape(-1).astype(np.int64)
    return Arrays(arrays["x_train"], labels["train"], arrays["x_test"], labels["test"])
