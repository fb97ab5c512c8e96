"""Pictures that a hook may return or `loop.log` may take, and grids of samples."""

import struct
import warnings
import zlib
from typing import Any, Final

import numpy as np

from ..errors import ConfigurationError, TreadleWarning, whole_number

ROUNDING: Final = 1e-3
"""By how much a float may lie beyond 0 and 1: (tanh(x) + 1) / 2 does where it saturates."""

CLIPPED: Final = 0.5
"""By how much a float may lie beyond 0 and 1 to be clipped with a warning, as a decoder's output
without a sigmoid does. What lies further out probably has another scale."""

COLOR_TYPES: Final = {1: 0, 3: 2}
"""PNG's numbers for grey and for red, green and blue."""


class Image:
    """A picture, as a value of a log.

    Where the run has a directory, it becomes a file there: see `treadle.hooks.Images`. A notebook
    shows it by itself.

    Args:
        array: Of shape (height, width), (height, width, 1) or (height, width, 3), of any library:
            floats from 0 (black) to 1, bools, or uint8 from 0 to 255. Floats from -0.5 to 1.5 are
            clipped, with a warning.

    Attributes:
        pixels: uint8, of shape (height, width, 1) or (height, width, 3); nobody may change them.

    Raises:
        ConfigurationError: Another shape, another type, or floats that are not in [-0.5, 1.5].

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
                f"not {np.shape(array)}: for several pictures there is treadle.image_grid"
            )
        self.pixels: np.ndarray[Any, np.dtype[np.uint8]] = _as_bytes(values, "an Image")
        self.pixels.flags.writeable = False

    def __repr__(self) -> str:
        """Say how large it is."""
        height, width, channels = self.shape
        return f"Image({height}x{width}, {'grey' if channels == 1 else 'color'})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width, channels = self.pixels.shape
        return height, width, channels

    def png(self) -> bytes:
        r"""Return it as a PNG file, of 8 bits a channel (https://www.w3.org/TR/png-3/).

        Example:
            >>> Image(np.zeros((8, 8))).png()[:4]
            b'\x89PNG'
        """
        height, width, channels = self.shape
        header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
        # Each row begins with the number of its filter: 0, the bytes as they are.
        rows = np.zeros((height, 1 + width * channels), "uint8")
        rows[:, 1:] = self.pixels.reshape(height, -1)
        parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)

    def _repr_png_(self) -> bytes:
        """Let a notebook show it."""
        return self.png()


def image_grid(samples: Any, columns: int) -> Image:
    """Return many pictures as one, row after row; what is left of the last row is black.

    Args:
        samples: Pictures of shape (n, height, width), (n, height, width, 1) or
            (n, height, width, 3), of the types that `Image` takes.
        columns: How many stand beside one another.

    Raises:
        ConfigurationError: Another shape or type, floats that are not in [-0.5, 1.5], or columns
            that are no whole number from 1.

    Example:
        >>> image_grid(np.random.default_rng(0).random((10, 28, 28)), columns=4)
        Image(84x112, grey)
    """
    columns = whole_number("columns", columns, ConfigurationError)
    values = _array(samples)
    if values.ndim == 3:
        values = values[..., None]
    if values.ndim != 4 or values.shape[3] not in COLOR_TYPES or 0 in values.shape:
        raise ConfigurationError(
            "image_grid takes samples of shape (n, height, width), (n, height, width, 1) or "
            f"(n, height, width, 3), not {np.shape(samples)}: reshape flat ones, as "
            "samples.reshape(-1, 28, 28)"
        )
    values = _as_bytes(values, "image_grid")
    n, height, width, channels = values.shape
    rows = -(-n // columns)
    cells = np.zeros((rows * columns, height, width, channels), "uint8")
    cells[:n] = values
    grid = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return Image(grid.reshape(rows * height, columns * width, channels))


def _array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy array of what may be a tensor."""
    if isinstance(value, (np.ndarray, list, tuple)):
        return np.asarray(value)
    from keras import ops  # late: importing it chooses the backend

    return ops.convert_to_numpy(value)


def _as_bytes(
    values: np.ndarray[Any, np.dtype[Any]], what: str
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return pixels as uint8, in an array of their own."""
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
            "them, as (x + 1) / 2 what comes out of a tanh"
        )
    if low < -ROUNDING or high > 1 + ROUNDING:
        # Without the values: Python shows a text once for each line of code that it is about.
        warnings.warn(
            f"{what} takes floats from 0 to 1, and clips others that are close: end the decoder "
            "with a sigmoid, or rescale its output",
            TreadleWarning,
            stacklevel=3,
        )
    return np.rint(floats.clip(0, 1) * 255).astype("uint8")


def _chunk(kind: bytes, content: bytes) -> bytes:
    """Return a part of a PNG file: its length, its kind, its bytes, and a check of both."""
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
