"""Images that can be logged by hooks and `loop.log`, and grids of samples."""

import struct
import warnings
import zlib
from typing import Any, Final

import numpy as np

from ..errors import ConfigurationError, TreadleWarning, whole_number

ROUNDING: Final = 1e-3
"""Tolerance for floats outside of [0, 1], as (tanh(x) + 1) / 2 may be if it saturates."""

CLIPPED: Final = 0.5
"""How far outside of [0, 1] floats are clipped with a warning, such as the output of a decoder
without a sigmoid. Values further outside probably have another scale, and are an error."""

COLOR_TYPES: Final = {1: 0, 3: 2}
"""PNG's color types for grey and RGB, by the number of channels."""


MAGIC: Final = b"\x89PNG\r\n\x1a\n"
"""The first bytes of a PNG file."""


class Image:
    """An image that can be logged.

    If the run has a directory, the image is saved there as a file: see `treadle.hooks.Images`. A
    notebook displays it.

    Args:
        array: An array or tensor of any library, of shape (height, width), (height, width, 1) or
            (height, width, 3): floats from 0 (black) to 1, bools, or uint8 from 0 to 255. Other
            floats from -0.5 to 1.5 are clipped, with a warning.

    Attributes:
        pixels: A read-only uint8 array of shape (height, width, 1) or (height, width, 3).

    Raises:
        ConfigurationError: Another shape, another dtype, or floats outside of [-0.5, 1.5].

    Example:
        >>> picture = Image(np.eye(28))
        >>> picture, picture.shape, int(picture.pixels.max())
        (Image(28x28, grey), (28, 28, 1), 255)
    """

    __slots__ = ("pixels",)

    def __init__(self, array: Any) -> None:
        values = _array(array)
        if values.ndim == 2:
            values = values[..., None]
        if values.ndim != 3 or values.shape[2] not in COLOR_TYPES or 0 in values.shape:
            raise ConfigurationError(
                "an Image is of shape (height, width), (height, width, 1) or (height, width, 3), "
                f"not {np.shape(array)}: use treadle.Image.grid for several images"
            )
        self.pixels: np.ndarray[Any, np.dtype[np.uint8]] = _as_bytes(values, "an Image")
        self.pixels.flags.writeable = False

    def __repr__(self) -> str:
        """Return the size and whether the image is grey or in color."""
        height, width, channels = self.shape
        return f"Image({height}x{width}, {'grey' if channels == 1 else 'color'})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width, channels = self.pixels.shape
        return height, width, channels

    def png(self, source: str = "") -> bytes:
        r"""Return the image as a PNG file with 8 bits per channel (https://www.w3.org/TR/png-3/).

        Args:
            source: A text that the file holds, too, which `png_fault` compares.

        Example:
            >>> Image(np.zeros((8, 8))).png()[:4]
            b'\x89PNG'
        """
        height, width, channels = self.shape
        header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
        # Each row begins with the number of its filter: 0 for no filter.
        rows = np.zeros((height, 1 + width * channels), "uint8")
        rows[:, 1:] = self.pixels.reshape(height, -1)
        text = [(b"tEXt", _text(source))] if source else []
        data = (b"IDAT", zlib.compress(rows.tobytes(), 9))
        parts = [(b"IHDR", header), *text, data, (b"IEND", b"")]
        return MAGIC + b"".join(_chunk(kind, content) for kind, content in parts)

    def _repr_png_(self) -> bytes:
        """Return the PNG file that IPython displays in a notebook."""
        return self.png()

    @classmethod
    def grid(cls, samples: Any, columns: int) -> "Image":
        """Arrange images in a grid, row by row; the remainder of the last row is black.

        Args:
            samples: Images of shape (n, height, width), (n, height, width, 1) or (n, height, width,
                3), with the dtypes and values that `Image` accepts.
            columns: The number of images per row.

        Raises:
            ConfigurationError: Another shape or dtype, floats outside of [-0.5, 1.5], or `columns`
                is not a whole number of at least 1.

        Example:
            >>> Image.grid(np.random.default_rng(0).random((10, 28, 28)), columns=4)
            Image(84x112, grey)
        """
        columns = whole_number("columns", columns, ConfigurationError)
        values = _array(samples)
        if values.ndim == 3:
            values = values[..., None]
        if values.ndim != 4 or values.shape[3] not in COLOR_TYPES or 0 in values.shape:
            raise ConfigurationError(
                "Image.grid takes samples of shape (n, height, width), (n, height, width, 1) or "
                f"(n, height, width, 3), not {np.shape(samples)}: reshape flat ones, as "
                "samples.reshape(-1, 28, 28)"
            )
        values = _as_bytes(values, "Image.grid")
        n, height, width, channels = values.shape
        rows = -(-n // columns)
        cells = np.zeros((rows * columns, height, width, channels), "uint8")
        cells[:n] = values
        grid = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
        return cls(grid.reshape(rows * height, columns * width, channels))


def png_fault(data: bytes, source: str = "") -> str:
    """Return what is wrong with a PNG file that a run wrote, as a clause; "" if nothing.

    Args:
        data: The content of the file.
        source: The text that the file must hold, see `Image.png`; "" for any.

    Example:
        >>> data = Image(np.zeros((8, 8))).png("run 1")
        >>> png_fault(data, "run 1"), png_fault(data, "run 2"), png_fault(data[:-1])
        ('', 'it is of another run, or another image', 'it is cut off')
    """
    if not data.startswith(MAGIC):
        return "it is not a PNG file"
    place, texts = len(MAGIC), list[bytes]()
    while len(check := data[(end := place + 8 + _size(data, place)) : end + 4]) == 4:
        kind, content = data[place + 4 : place + 8], data[place + 8 : end]
        if zlib.crc32(kind + content).to_bytes(4) != check:
            return "it is damaged: a CRC-32 in it is wrong"
        texts += [content] if kind == b"tEXt" else []
        if kind == b"IEND":
            is_right = not source or _text(source) in texts
            return "" if is_right else "it is of another run, or another image"
        place = end + 4
    return "it is cut off"


def _size(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4])


def _text(source: str) -> bytes:
    return b"Source\0" + source.encode("latin-1", "backslashreplace")


def _array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Convert an array or tensor of any library to a NumPy array."""
    if isinstance(value, (np.ndarray, list, tuple)):
        return np.asarray(value)
    from keras import ops  # late: importing it chooses the backend

    return ops.convert_to_numpy(value)


def _as_bytes(
    values: np.ndarray[Any, np.dtype[Any]], what: str
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Convert pixels to uint8, in a new array."""
    if values.dtype == np.uint8:
        return values.copy()
    if values.dtype.kind not in "fVb":  # V: bfloat16 and the other narrow floats
        raise ConfigurationError(
            f"{what} takes floats from 0 to 1, or uint8, not {values.dtype}: pixels from 0 to 255 "
            "are made uint8 by x.astype('uint8')"
        )
    floats = values.astype("float32")
    low, high = float(floats.min()), float(floats.max())
    if not (low >= -CLIPPED and high <= 1 + CLIPPED):  # NaN is neither
        raise ConfigurationError(
            f"{what} takes floats from 0 to 1, and these are from {low:.4g} to {high:.4g}: rescale "
            "them, for example by (x + 1) / 2 after a tanh"
        )
    if low < -ROUNDING or high > 1 + ROUNDING:
        # Without the values, since Python shows only equal warnings from one line of code once.
        warnings.warn(
            f"{what} takes floats from 0 to 1, and clipped values slightly outside: end the "
            "decoder with a sigmoid, or rescale its output",
            TreadleWarning,
            stacklevel=3,
        )
    return np.rint(floats.clip(0, 1) * 255).astype("uint8")


def _chunk(kind: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG file: length, type, content and checksum."""
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
