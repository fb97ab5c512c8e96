"""File names for names that users choose: distinct names have distinct files."""

import hashlib

LONGEST = 150  # characters; a suffix follows, and file systems allow 255
_KEPT = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-.")


def file_name(name: str) -> str:
    """Return a file name for a name of any characters and length.

    Other characters than lower-case letters, digits, `_`, `-` and `.` are percent-encoded: also
    upper-case letters, since some file systems do not distinguish them. Long names end in a hash.

    Example:
        >>> file_name("a/b"), file_name("a_b"), file_name("Samples")
        ('a%2fb', 'a_b', '%53amples')
    """
    data = name.encode(errors="surrogatepass")
    found = "".join(chr(byte) if byte in _KEPT else f"%{byte:02x}" for byte in data)
    if found.startswith("."):  # it would be hidden
        found = f"%2e{found[1:]}"
    if len(found) > LONGEST:  # neither "%-" nor a single "%" is part of an encoded name
        return f"{found[: LONGEST - 66]}%-{hashlib.sha256(data).hexdigest()}"
    return found or "%"
