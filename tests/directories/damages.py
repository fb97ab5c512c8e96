"""What is done to one file or folder of a run directory, drawn by chance."""

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random

from .contents import CONTENTS

SECRET = "the-secret-of-another-file"
HUGE = 1 << 36  # bytes, none of which is written

# Names that a run writes for a moment, and names that commands may look for.
PASSING = (
    *("run.json.partial", "epochs.csv.partial", "state.safetensors.partial", ".writable"),
    *("model.partial.keras", "model.keras.partial", ".lock"),
    *("images/picture-24.png", "images/picture-24.png.partial", "checkpoints/.partial-x"),
    *("checkpoints/step-000000000099", "checkpoints/step-000000000024", "curves.png"),
)

Damage = Callable[[Path, Random, Path], None]


def truncated(path: Path, chance: Random, outside: Path) -> None:
    os.truncate(path, chance.choice((0, 1, max(path.stat().st_size - 1, 0), _middle(path, chance))))


def flipped(path: Path, chance: Random, outside: Path) -> None:
    data = bytearray(path.read_bytes() or b" ")
    for _ in range(chance.choice((1, 1, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def extended(path: Path, chance: Random, outside: Path) -> None:
    more = chance.choice((b"\0" * 5000, b"}{", b"\n\n", b"\x1b[2J\x1b]0;owned\x07", os.urandom(99)))
    path.write_bytes(path.read_bytes() + more)


def replaced(path: Path, chance: Random, outside: Path) -> None:
    texts = (b"", b"\xff\xfe", b"null", b"{}", b"[]", b"[" * 200_000, b"PK\3\4" + bytes(99))
    path.write_bytes(chance.choice(texts))


def another(path: Path, chance: Random, outside: Path) -> None:
    """Replace it by another file of the directory."""
    others = [file for file in path.parent.iterdir() if file != path and file.is_file()]
    if others:
        data = chance.choice(sorted(others)).read_bytes()
        path.write_bytes(data)


def huge(path: Path, chance: Random, outside: Path) -> None:
    os.truncate(path, HUGE)


def changed(path: Path, chance: Random, outside: Path) -> None:
    """Change what the file says, in its own format."""
    CONTENTS.get(path.name, CONTENTS.get(path.suffix, flipped))(path, chance, outside)


def removed(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)


def folder(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)
    path.mkdir()
    if chance.random() < 0.5:
        (path / "mine.txt").write_text("a file of the user")


def file(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)
    path.write_text("a file of the user")


def pipe(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)
    os.mkfifo(path)


def socket_file(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)
    listening, before = socket.socket(socket.AF_UNIX), os.getcwd()
    os.chdir(path.parent)  # the paths of sockets are short
    try:
        listening.bind(path.name)
    finally:
        os.chdir(before)
        listening.close()


def device(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except OSError:  # without privileges
        os.mkfifo(path)


def linked(path: Path, chance: Random, outside: Path) -> None:
    """Move it out of the directory, with a link in its place."""
    target = outside / f"moved-{path.name}"
    if path.exists():
        path.rename(target)
    else:
        target.write_text("a file of the user")
        path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


def linked_elsewhere(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)
    names = ("secret.txt", "folder", "absent", "absent/deeper", "/dev/zero", "/dev/stdin")
    path.symlink_to(outside / chance.choice(names))


def linked_inside(path: Path, chance: Random, outside: Path) -> None:
    _cleared(path)
    path.symlink_to(chance.choice((path.name, ".", "run.json", "log.jsonl", "checkpoints")))


def hard_linked(path: Path, chance: Random, outside: Path) -> None:
    target = outside / f"hard-{path.name}"
    if path.is_file():
        shutil.copy(path, target)
        path.unlink()
    elif path.exists():
        return linked(path, chance, outside)
    else:
        target.write_text("a file of the user")
        path.parent.mkdir(exist_ok=True)
    return os.link(target, path)


def inhabited(path: Path, chance: Random, outside: Path) -> None:
    """Put something that is not of the run into a folder."""
    name = chance.choice(("other", "step-x", ".partial-step", "step-000000000099", "a-1.png"))
    chance.choice((folder, file, pipe, linked_elsewhere, hard_linked))(path / name, chance, outside)


OF_FILES: dict[str, Damage] = {
    "truncated": truncated,
    "bits flipped": flipped,
    "bytes appended": extended,
    "replaced by nonsense": replaced,
    "replaced by another file": another,
    "huge": huge,
    "content changed": changed,
    "deleted": removed,
    "a folder": folder,
    "a pipe": pipe,
    "a socket": socket_file,
    "a device": device,
    "moved and linked": linked,
    "a link elsewhere": linked_elsewhere,
    "a link inside": linked_inside,
    "a hard link": hard_linked,
}
OF_FOLDERS: dict[str, Damage] = {
    "deleted": removed,
    "a file": file,
    "a pipe": pipe,
    "moved and linked": linked,
    "a link elsewhere": linked_elsewhere,
    "a link inside": linked_inside,
    "foreign content": inhabited,
}
OF_PASSING: dict[str, Damage] = {
    "a file": file,
    "a folder": folder,
    "a pipe": pipe,
    "moved and linked": linked,
    "a link elsewhere": linked_elsewhere,
    "a link inside": linked_inside,
    "a hard link": hard_linked,
}
MOST_FREQUENT = ("content changed",)


def drawn(directory: Path, chance: Random, in_turn: int | None = None) -> tuple[str, str, Damage]:
    """Draw a file or folder of a run directory, or take the next file; draw what is done to it."""
    paths = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    # Files that hold more kinds of content are drawn more often.
    often = [name for name in ("run.json", "log.jsonl", "run.json") if name in paths]
    name = chance.choice(chance.choice((paths, paths, often, PASSING)))
    if in_turn is not None:
        files = [path for path in paths if (directory / path).is_file()]
        name = files[in_turn % len(files)]
    path = directory / name
    kinds = OF_PASSING if not path.exists() else OF_FOLDERS if path.is_dir() else OF_FILES
    names = [*kinds, *(kind for kind in MOST_FREQUENT if kind in kinds for _ in range(6))]
    kind = chance.choice(names)
    return name, kind, kinds[kind]


def _middle(path: Path, chance: Random) -> int:
    return chance.randrange(max(path.stat().st_size, 1))


def _cleared(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
