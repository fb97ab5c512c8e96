"""The SHA-256 and size of a file, computed while it is written."""

import hashlib
from collections.abc import Iterator
from typing import Any

from .tensor_file import Piece


class Digest:
    """Computes the SHA-256 and size of pieces as they are written."""

    def __init__(self) -> None:
        self._hash, self._size = hashlib.sha256(), 0

    def update_from(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the pieces, and include them."""
        for piece in pieces:
            self._hash.update(piece)
            self._size += len(piece)
            yield piece

    def result(self) -> dict[str, Any]:
        """Return the hash and the size, as a manifest has them."""
        return {"sha256": self._hash.hexdigest(), "size": self._size}
