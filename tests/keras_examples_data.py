"""Replaces what Keras' examples load by small random data, for `keras_examples.py`.

Data sets of Keras and of TensorFlow Datasets, folders of images and texts, files, tables,
pretrained weights, and packages that are not installed. Files are written to the working directory.
"""

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

FLAT = {"mnist": (28, 28), "fashion_mnist": (28, 28)}
COLUMNS = {"cifar10": ((32, 32, 3), 10), "cifar100": ((32, 32, 3), 100)}
SHORT = 10_000  # rows of the second part
IMAGES = 40  # of a folder, or of a part of TensorFlow Datasets
SETS = {"cifar": (32, 32, 3), "stl10": (96, 96, 3), "omniglot": (105, 105, 3)}
LARGER = (128, 128, 3)
TABLE_ROWS = 6000
NUMBER = "a number"
KINDS = ["a", "b", "c"]
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "nrst"]


def _columns(names: str, kind: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(","), kind)


# The columns of the tables, by a part of the file's name: numbers, integers below a number, or one
# of some texts.
TABLES: dict[str, dict[str, Any]] = {
    "adult": {
        **_columns("age,fnlwgt,education_num,capital_gain,capital_loss,hours_per_week", 90),
        **_columns("workclass,education,marital_status,occupation,relationship,race", KINDS),
        **_columns("gender,native_country", KINDS),
        "income_bracket": [" <=50K", " >50K"],
    },
    "heart": {
        **_columns("age,trestbps,chol,thalach,oldpeak,slope", NUMBER),
        **_columns("sex,cp,fbs,restecg,exang,ca", 3),
        "thal": ["fixed", "normal", "reversible"],
        "target": 2,
    },
    "ratings": {"userId": 50, "movieId": 80, "rating": 6, "timestamp": 1000},
    "movies": {"movieId": 80, "title": KINDS, "genres": KINDS},
    "art_daily": {"timestamp": ["2014-04-01 00:00:00"], "value": NUMBER},
    "creditcard": _columns(",".join(f"V{i}" for i in range(30)), NUMBER) | {"Class": 2},
    "jena_climate": {
        "Date Time": ["01.01.2009 00:10:00"],
        **_columns("p (mbar),T (degC),Tpot (K),Tdew (degC),rh (%),VPmax (mbar)", NUMBER),
        **_columns("VPact (mbar),VPdef (mbar),sh (g/kg),H2OC (mmol/mol)", NUMBER),
        **_columns("rho (g/m**3),wv (m/s),max. wv (m/s),wd (deg)", NUMBER),
    },
    "PeMSD7": _columns(",".join(str(i) for i in range(228)), NUMBER),
}


def replace_all(packages: set[str]) -> None:
    """Replace all sources of data, and let `packages` be importable if they are not installed."""
    sys.meta_path.append(Absent(packages))
    _replace_keras_datasets()
    _replace_files()
    _replace_tables()
    _write_reviews()
    _replace_pretrained()
    sys.modules["tensorflow_datasets"] = MagicMock(load=_load_of_tensorflow_datasets)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, where they are not installed, as objects that accept every call.

    Others stay missing: PyTorch asks for many packages, and uses those that it finds.
    """

    def __init__(self, packages: set[str]):
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return a module of one of the packages, if it is not a part of an installed one."""
        package = name.partition(".")[0]
        whole = sys.modules.get(package)
        if package not in self.packages or not isinstance(whole, MagicMock | None):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        """Return the object."""
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


def _replace_keras_datasets() -> None:
    import keras

    def loader(shape: tuple[int, ...], kinds: int, long: int, column: bool) -> Any:
        def part(count: int) -> Any:
            rng = np.random.default_rng(count)
            labels = rng.integers(0, kinds, size=(count, 1) if column else count)
            return rng.integers(0, 256, size=(count, *shape), dtype="uint8"), labels.astype("uint8")

        return lambda *_, **__: (part(long), part(SHORT))

    for name, shape in FLAT.items():
        getattr(keras.datasets, name).load_data = loader(shape, 10, 60_000, False)
    for name, (shape, kinds) in COLUMNS.items():
        getattr(keras.datasets, name).load_data = loader(shape, kinds, 50_000, True)

    def reviews(*_: Any, num_words: int | None = 1000, **__: Any) -> Any:
        rng = np.random.default_rng(0)

        def part(count: int) -> Any:
            texts = np.empty(count, object)
            texts[:] = [rng.integers(1, num_words or 1000, size=20).tolist() for _ in range(count)]
            return texts, rng.integers(0, 2, size=count)

        return part(1000), part(1000)

    def houses(*_: Any, **__: Any) -> Any:
        rng = np.random.default_rng(0)
        return tuple((rng.normal(size=(n, 13)), rng.uniform(5, 50, n)) for n in (404, 102))

    keras.datasets.imdb.load_data = reviews
    keras.datasets.boston_housing.load_data = houses


def _sentences(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, size=rng.integers(3, 9))) for _ in range(count)]


def _write_reviews() -> None:
    """Write the folders of the IMDB data set, with one sentence in each file."""
    for folder in ("train/pos", "train/neg", "test/pos", "test/neg"):
        place = Path("aclImdb", folder)
        place.mkdir(parents=True)
        for number, text in enumerate(_sentences(IMAGES)):
            (place / f"{number}.txt").write_text(text)


def table_file(file: Any, names: Any = None, header: bool = True) -> Any:
    """Write the table that has the name of this file, if there is one, and return its path.

    Args:
        file: The path or the address of the table.
        names: The order of the columns, if it is not that of `TABLES`.
        header: Whether the first line has the names of the columns.
    """
    name = str(file).rpartition("/")[2]
    table = next((TABLES[part] for part in TABLES if name.startswith(part)), None)
    if table is None:
        return file
    rng = np.random.default_rng(0)

    def column(kind: Any) -> Any:
        if kind == NUMBER:
            return rng.uniform(1, 100, TABLE_ROWS).round(3)
        return rng.choice(kind, TABLE_ROWS)

    columns = {name: column(kind) for name, kind in table.items()}
    lines = [",".join(table)] if header else []
    rows = zip(*(columns[name] for name in (table if names is None else names)), strict=True)
    lines += [",".join(map(str, row)) for row in rows]
    place = Path(name).absolute()
    place.write_text("\n".join(lines) + "\n")
    return place


def open_table(file: Any, *rest: Any, **named: Any) -> Any:
    """Open a file, or the table that has its name."""
    return builtins.open(table_file(file), *rest, **named)


def _replace_tables() -> None:
    """Let Pandas, if it is installed, read the tables."""
    if importlib.util.find_spec("pandas") is None:
        return
    import pandas

    read: Any = pandas.read_csv

    def read_csv(file: Any, *rest: Any, **named: Any) -> Any:
        header = named.get("header", "infer") is not None
        return read(table_file(file, named.get("names"), header), *rest, **named)

    pandas.read_csv = read_csv


def _replace_files() -> None:
    import keras

    def text_file(fname: Any = None, *_: Any, **__: Any) -> str:
        """Write a file of sentences, three in a line; its ending does not matter."""
        lines = _sentences(3 * 400)
        with open("sentences.txt", "w") as file:
            for i in range(0, len(lines), 3):
                file.write("\t".join(lines[i : i + 3]) + "\n")
        return "sentences.txt"

    def image_folder(
        *_: Any,
        label_mode: str | None = "int",
        image_size: tuple[int, int] = (256, 256),
        batch_size: int | None = 32,
        color_mode: str = "rgb",
        subset: str | None = None,
        **__: Any,
    ) -> Any:
        shape = (*image_size, {"rgb": 3, "grayscale": 1, "rgba": 4}[color_mode])
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, size=(IMAGES, *shape)).astype("float32")
        labels = rng.integers(0, 2, size=IMAGES).astype("int32")
        return _folder(images, labels if label_mode else None, batch_size, subset)

    def text_folder(*_: Any, batch_size: int | None = 32, subset: Any = None, **__: Any) -> Any:
        labels = np.random.default_rng(0).integers(0, 2, size=4 * IMAGES).astype("int32")
        return _folder(np.array(_sentences(4 * IMAGES)), labels, batch_size, subset)

    def numbers(*_: Any, **__: Any) -> Any:
        """Return rows of numbers, the first of which is -1 or 1."""
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(400, 101))
        rows[:, 0] = 2 * rng.integers(0, 2, size=400) - 1
        return rows

    for module in (keras.utils, keras.preprocessing):
        module.image_dataset_from_directory = image_folder
        module.text_dataset_from_directory = text_folder
    keras.utils.get_file = text_file
    np.loadtxt = np.genfromtxt = numbers


def _folder(features: Any, labels: Any, batch_size: int | None, subset: str | None) -> Any:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(features if labels is None else (features, labels))
    data = data if batch_size is None else data.batch(batch_size)
    return (data, data) if subset == "both" else data


def _replace_pretrained() -> None:
    """Let networks of `keras.applications` begin with random weights."""
    import keras

    def random_weights(make: Any) -> Any:
        return lambda *rest, **named: make(*rest, **{**named, "weights": None})

    for name, make in list(vars(keras.applications).items()):
        if isinstance(make, type(random_weights)):
            setattr(keras.applications, name, random_weights(make))
            for module in vars(keras.applications).values():
                if isinstance(module, type(sys)) and vars(module).get(name) is make:
                    setattr(module, name, getattr(keras.applications, name))


def _load_of_tensorflow_datasets(
    name: str,
    *,
    split: Any = None,
    as_supervised: bool = False,
    with_info: bool = False,
    batch_size: int | None = None,
    **_: Any,
) -> Any:
    """Return data sets of images with labels, in the place of those with this name."""
    import tensorflow as tf

    shape = next((shape for part, shape in SETS.items() if name.startswith(part)), LARGER)

    def part(number: int) -> Any:
        rng = np.random.default_rng(number)
        images = rng.integers(0, 256, size=(IMAGES, *shape)).astype("uint8")
        labels = rng.integers(0, 2, size=IMAGES)
        rows = (images, labels) if as_supervised else {"image": images, "label": labels}
        data = tf.data.Dataset.from_tensor_slices(rows)
        return data if batch_size is None else data.batch(batch_size)

    if split is None:
        names = ("train", "test", "validation", "trainA", "trainB", "testA", "testB")
        found: Any = {name: part(number) for number, name in enumerate(names)}
    else:
        several = isinstance(split, (list, tuple))
        found = [part(number) for number in range(len(split))] if several else part(0)
    label = SimpleNamespace(num_classes=2, names=["a", "b"])
    features = {"label": label, "image": SimpleNamespace(shape=shape)}
    one = SimpleNamespace(num_examples=IMAGES)
    splits = {"train": one, "test": one, "validation": one}
    info = SimpleNamespace(features=features, splits=splits)
    return (found, info) if with_info else found
