"""The SHA-256 and size of a file, computed while it is written."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from .tensor_file import PIECE, Piece


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


def digest_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the hash and the size of pieces."""
    digest = Digest()
    for _ in digest.update_from(iter(pieces)):
        pass
    return digest.result()


def digest_of_file(file: BinaryIO) -> dict[str, Any]:
    """Return the hash and the size of an open file, from its position on."""
    return digest_of(iter(lambda: file.read(PIECE), b""))
