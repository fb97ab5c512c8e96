"""Pictures as values of a log: what is one, where it goes, and what the log says of it."""

import io
import json
import re
import unicodedata
import warnings

import keras
import numpy as np
import pytest
from PIL import Image as Reader

import treadle
from treadle import hooks
from treadle.core.file_names import file_name
from treadle.core.images import Image
from treadle.errors import ConfigurationError, TreadleWarning

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (5, 7), "uint8")
COLOR = RANDOM.integers(0, 256, (5, 7, 3), "uint8")


def read(png):
    """What another program reads of a file's bytes."""
    return np.asarray(Reader.open(io.BytesIO(png) if isinstance(png, bytes) else png))


@pytest.mark.parametrize("pixels", [GREY, GREY[..., None], COLOR], ids=["HxW", "HxWx1", "HxWx3"])
def test_a_png_holds_the_pixels(pixels):
    picture = Image(pixels)
    assert picture.shape == (5, 7, pixels.shape[2] if pixels.ndim == 3 else 1)
    found = read(picture.png())
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found.reshape(pixels.shape), pixels)
    assert picture._repr_png_() == picture.png()


def test_floats_from_0_to_1_are_shades():
    picture = Image([[0.0, 0.5, 1.0, -1e-4, 1.0001]])
    assert picture.pixels.ravel().tolist() == [0, 128, 255, 0, 255]
    assert Image(np.array([[True, False]])).pixels.ravel().tolist() == [255, 0]
    tensor = keras.ops.cast(keras.ops.ones((4, 4)), "bfloat16")
    assert Image(tensor).pixels.min() == 255


def test_floats_slightly_outside_are_clipped_with_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for low in (-0.05, -0.5):  # of an epoch each: one line of code warns once
            samples = np.array([[[low, 0.5]], [[1.0, 1.5]]])
            grid = Image.grid(samples, columns=1)
            assert grid.pixels.ravel().tolist() == [0, 128, 255, 255]
        assert Image(samples[0]).pixels.ravel().tolist() == [0, 128]
    assert [str(warning.message).partition(":")[0] for warning in caught] == [
        "Image.grid takes floats from 0 to 1, and clipped values slightly outside",
        "an Image takes floats from 0 to 1, and clipped values slightly outside",
    ]
    assert all(warning.category is TreadleWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    with pytest.raises(ConfigurationError, match=r"these are from -0\.51 to 1: rescale them"):
        Image([[-0.51, 1.0]])


def test_an_image_is_its_own():
    array = GREY.copy()
    picture = Image(array)
    array[:] = 0
    np.testing.assert_array_equal(picture.pixels[..., 0], GREY)
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[0] = 0


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(784), r"or \(height, width, 3\), not \(784,\)"),
        (np.zeros((8, 8, 2)), r"not \(8, 8, 2\): use treadle.Image.grid for several images"),
        (np.zeros((0, 8)), r"not \(0, 8\)"),
        (np.array([[0.0, 255.0]]), r"these are from 0 to 255: rescale them, for .* \(x \+ 1\) / 2"),
        (np.array([[-1.0, 1.0]]), "these are from -1 to 1"),
        (np.array([[np.nan, 1.0]]), "these are from nan to nan"),
        (np.array([[0, 255]]), r"or uint8, not int64: .* made uint8 by x.astype\('uint8'\)"),
    ],
)
def test_invalid_pictures_are_refused(array, message):
    with pytest.raises(ConfigurationError, match=f"an Image .*{message}"):
        Image(array)


def test_a_grid_is_filled_row_by_row():
    samples = np.stack([np.full((2, 3), i, "uint8") for i in range(1, 6)])
    grid = Image.grid(samples, columns=2)
    assert grid.shape == (6, 6, 1)
    assert grid.pixels[::2, ::3, 0].tolist() == [[1, 2], [3, 4], [5, 0]]
    whole = Image.grid(np.stack([COLOR, COLOR]), columns=2)
    np.testing.assert_array_equal(whole.pixels[:, 7:], COLOR)


@pytest.mark.parametrize(
    ("samples", "columns", "message"),
    [
        (np.zeros((10, 784)), 5, r"not \(10, 784\): reshape flat ones, as samples.reshape"),
        (np.zeros((0, 8, 8)), 5, r"not \(0, 8, 8\)"),
        (np.zeros((2, 8, 8)), 0, "columns"),
        (
            np.full((2, 8, 8), 2.0),
            1,
            "Image.grid takes floats from 0 to 1, and these are from 2 to",
        ),
    ],
)
def test_invalid_grids_are_refused(samples, columns, message):
    with pytest.raises(ConfigurationError, match=message):
        Image.grid(samples, columns)


# In a run


class Draws(treadle.Task):
    def __init__(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "sigmoid")])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_step(self, batch):
        return treadle.minimize(
            lambda: keras.ops.mean(self.model(batch) ** 2), self.model, self.optimizer
        )

    def squares(self, batch):
        return keras.ops.reshape(self.model(batch), (-1, 2, 2))


BATCH = np.ones((6, 3), "float32")


def grid(loop):
    return {
        "squares/made": Image.grid(loop.call(loop.task.squares, BATCH), columns=3),
        "samples": len(BATCH),
    }


def train(directory=None, epochs=2, **arguments):
    keras.backend.clear_session()
    treadle.setup(seed=0)
    scheduled = [treadle.every("1 epoch", grid)]
    arguments = {"hooks": scheduled, "console": False, **arguments}
    with treadle.Loop(Draws(), directory, **arguments) as loop:
        loop.fit([BATCH] * 5, epochs=epochs)
    return loop


def test_pictures_become_files_and_the_log_has_their_paths(tmp_path):
    loop = train(tmp_path)
    pictures = loop.history["squares/made"]
    assert [picture.shape for picture in pictures] == [(4, 6, 1)] * 2
    assert "squares/made" not in loop.history.last
    names = ["squares%2fmade-5.png", "squares%2fmade-10.png"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(names)
    for name, picture in zip(names, pictures, strict=True):
        np.testing.assert_array_equal(read(tmp_path / "images" / name), picture.pixels[..., 0])
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    logged = [line for line in lines if line.get("kind") == "log"]
    assert [line["squares/made"] for line in logged] == [f"images/{name}" for name in names]
    assert [line["samples"] for line in logged] == [6, 6]
    again = train(tmp_path)  # a finished run: its history is that of the log
    assert again.history["squares/made"] == [f"images/{name}" for name in names]


ODD = (
    *("a/b", "a_b", "a b", "A_b", "a_B", "a%2fb", "a%252fb", "a\\b", "a:b", "a*b", "\0"),
    *(".", "..", "", "%", "con", "-9", "\u00e9", "e\u0301", "\ud800"),
    *("x" * 300, "x" * 299 + "y", "x" * 299 + "/"),
)


def test_each_name_has_a_file_of_its_own(tmp_path):
    found = [file_name(name) for name in ODD]
    # Some file systems distinguish neither case nor forms of Unicode.
    assert len({unicodedata.normalize("NFD", name).casefold() for name in found}) == len(ODD)
    for name in found:
        assert re.fullmatch(r"[a-z0-9_%-][a-z0-9_.%-]{0,149}", name)
    images = {name: Image(np.full((1, 1), i, "uint8")) for i, name in enumerate(ODD)}
    with treadle.Loop(Draws(), tmp_path, console=False) as loop:
        for _ in loop.epochs(1):
            for _ in loop.steps([BATCH]):
                pass
            loop.log(images)
    logged = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-2])
    for name, image in images.items():
        assert read(tmp_path / logged[name])[0, 0] == image.pixels[0, 0, 0]
    saved = treadle.load_run(tmp_path).images
    assert {image.name for image in saved} == set(ODD)
    assert all(image.png() for image in saved)


def test_without_a_directory_pictures_are_in_the_history_alone(tmp_path):
    log = hooks.JSONLines(tmp_path / "log.jsonl")
    loop = train(hooks=[log, treadle.every("1 epoch", grid)])
    assert [picture.shape for picture in loop.history["squares/made"]] == [(4, 6, 1)] * 2
    assert "squares" not in (tmp_path / "log.jsonl").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_picture_needs_a_name():
    with pytest.raises(ConfigurationError, match=r"returned Image\(5x7, grey\) without a name"):
        train(hooks=[treadle.every("1 epoch", lambda loop: Image(GREY))])


def test_a_console_names_a_picture(capsys):
    train(hooks=[treadle.every("1 epoch", grid)], console=True, epochs=1)
    assert "squares/made <Image 4x6x1>" in capsys.readouterr().out
