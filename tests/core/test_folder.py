"""`Folder` writes durably, follows no links, never blocks, and accepts only regular files."""

import errno
import os
import socket

import pytest

from tests.faults import Refuses
from treadle.core import folder_operations as operations
from treadle.core.folder import FileSystem, Folder, partial, written_as
from treadle.core.terminal import clean
from treadle.errors import CheckpointError, DirectoryError


class Recorder(FileSystem):
    """Records the names of operations; fails one of them if asked to."""

    def __init__(self, failing="", number=errno.EIO):
        self.log, self.failing, self.number = [], failing, number

    def perform(self, operation, *arguments):
        self.log.append(operation.__name__)
        if operation.__name__ == self.failing:
            raise OSError(self.number, os.strerror(self.number))
        return operation(*arguments)


@pytest.fixture
def outside(tmp_path):
    """A file outside of the folder, which no operation may change."""
    path = tmp_path / "outside"
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"
    assert path.stat().st_nlink <= 2


@pytest.fixture
def folder(tmp_path):
    with Folder.open(tmp_path / "runs" / "one", create=True) as folder:
        yield folder


def put(folder, kind, outside):
    """Put something that is not a plain file at `x`."""
    path = folder.path / "x"
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "dangling link":
        path.symlink_to(outside.with_name("created"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as it:
            here = os.getcwd()
            os.chdir(folder.path)  # the name of a socket may have about 100 characters
            it.bind("x")
            os.chdir(here)
    else:
        path.hardlink_to(outside)


NOT_FOLLOWED = "it is a symbolic link, which is not followed. Put a file itself in its place"
KINDS = {
    "link": NOT_FOLLOWED,
    "dangling link": NOT_FOLLOWED,
    "pipe": "it is a pipe, and not a file. Move it away",
    "folder": "it is a folder, and not a file. Move it away",
    "socket": "it is a socket, and not a file. Move it away",
    "hard link": "it has 2 hard links, so writing would also change another file. Replace it by a "
    "copy",
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_plain_files_are_appended_to(folder, outside, kind):
    put(folder, kind, outside)
    with pytest.raises(DirectoryError) as caught:
        folder.append_to("x")
    assert str(caught.value) == f"cannot write {folder.path}/x: {KINDS[kind]}"
    assert not outside.with_name("created").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(folder, outside, kind):
    put(folder, kind, outside)
    if kind == "hard link":  # reading changes nothing
        assert folder.read("x", 100) == b"precious"
        return
    with pytest.raises(DirectoryError) as caught:
        folder.read("x", 100)
    assert str(caught.value) == f"cannot read {folder.path}/x: {KINDS[kind]}"
    assert folder.size("x") is None


@pytest.mark.parametrize("kind", KINDS)
def test_writing_replaces_a_link_and_not_its_target(folder, outside, kind):
    put(folder, kind, outside)
    if kind == "folder":
        with pytest.raises(DirectoryError) as caught:
            folder.write("x", [b"new"])
        assert str(caught.value) == f"cannot write {folder.path}/x: {KINDS[kind]}"
    else:
        folder.write("x", [b"new"])
        assert folder.read("x", 100) == b"new"
    assert folder.names() == ["x"]
    assert not outside.with_name("created").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_removing_removes_only_what_is_in_the_folder(folder, outside, kind):
    put(folder, kind, outside)
    folder.remove_folder("x")
    assert folder.names() == []


def test_devices_are_not_read(tmp_path):
    with Folder.open("/dev") as folder, pytest.raises(DirectoryError) as caught:
        folder.read("zero", 100)
    assert str(caught.value) == (
        "cannot read /dev/zero: it is a device, and not a file. Move it away"
    )


def test_a_linked_folder_is_not_entered(folder, tmp_path, outside):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").touch()
    (folder.path / "x").symlink_to(tmp_path / "other")
    for create in (False, True):
        with pytest.raises(DirectoryError) as caught:
            folder.subfolder("x", create=create)
        assert str(caught.value) == (
            f"cannot open the folder {folder.path}/x: it is a symbolic link, which is not "
            "followed. Put a folder itself in its place"
        )
    folder.remove_folder("x")
    assert (tmp_path / "other" / "kept").exists()
    folder.write("y", [])
    with pytest.raises(DirectoryError, match="y: it is a file, and not a folder"):
        folder.subfolder("y")


def test_the_path_of_a_folder_may_contain_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    with Folder.open(tmp_path / "runs" / "one", create=True) as folder:
        folder.write("note", [b"here"])
    with Folder.open(tmp_path / "runs") as folder:
        assert folder.names() == ["one"]
    assert (tmp_path / "disk" / "one" / "note").read_bytes() == b"here"


def test_names_are_those_of_files_in_the_folder(folder):
    for name in ("", ".", "..", "a/b", "/etc/passwd", "a\0"):
        with pytest.raises(DirectoryError) as caught:
            folder.read(name, 100)
        assert str(caught.value).endswith(f": {name!a} is not the name of a file")


def test_a_file_is_written_durably(tmp_path):
    system = Recorder()
    folder = Folder.open(tmp_path, system=system)
    folder.write("note", [b"one ", memoryview(b"two")], size=7)
    assert system.log == [
        *["open_path", "create_file", "append", "append", "sync_file", "replace", "sync_folder"]
    ]
    assert (tmp_path / "note").read_bytes() == b"one two"
    folder.write("note", [b"three"], sync=False)
    assert (tmp_path / "note").read_bytes() == b"three"
    assert system.log.count("sync_file") == system.log.count("sync_folder") == 1


@pytest.mark.parametrize("failing", ["create_file", "append", "sync_file", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, failing):
    (tmp_path / "note").write_bytes(b"old")
    folder = Folder.open(tmp_path, system=Recorder(failing))
    with pytest.raises(DirectoryError, match=r"cannot write .*/note: Input/output error$"):
        folder.write("note", [b"new"])
    assert folder.names() == ["note"] and folder.read("note", 9) == b"old"


def test_a_full_disk_is_reported_with_sizes(tmp_path):
    folder = Folder.open(tmp_path, error=CheckpointError, system=Recorder("append", errno.ENOSPC))
    expected = r"note: the disk is full: it needs about 7,000 bytes, [\d,]+ are free$"
    with pytest.raises(CheckpointError, match=expected):
        folder.write("note", [b"new"], size=7000)


def test_a_log_is_appended_to_and_shortened(folder):
    with folder.append_to("log") as file:
        folder.append(file, b"one\n")
        folder.append(file, b"two\n")
        folder.flush(file)
        assert folder.size("log") == 8
        folder.truncate(file, 4)
        assert file.tell() == 4
        folder.append(file, b"three\n")
    with folder.append_to("log") as file:
        assert file.tell() == 10
    assert folder.read("log", 100) == b"one\nthree\n"


def test_a_function_may_write_the_file(folder):
    folder.write("model", [b"old"])
    folder.write_with("model", lambda path: path.write_bytes(b"new"))
    assert folder.read("model", 9) == b"new" and folder.names() == ["model"]

    def fails(path):
        path.write_bytes(b"half")
        raise ValueError("no configuration")

    with pytest.raises(ValueError, match="no configuration"):
        folder.write_with("model", fails)
    assert folder.read("model", 9) == b"new" and folder.names() == ["model"]


def test_a_file_that_is_too_large_is_not_read(folder):
    folder.write("note", [b"four"])
    assert folder.read("note", 4) == b"four"
    with pytest.raises(DirectoryError) as caught:
        folder.read("note", 3)
    assert str(caught.value) == f"{folder.path}/note has 4 bytes; at most 3 are expected"


def test_removing_does_not_depend_on_depth_and_follows_no_link(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    place = os.open(folder.path, os.O_RDONLY)
    for depth in range(1100):
        os.mkdir("x", dir_fd=place)
        inner = os.open("x", os.O_RDONLY, dir_fd=place)
        if depth % 500 == 0:
            os.symlink(tmp_path / "outside", "link", dir_fd=inner)
            os.mkdir("other", dir_fd=inner)
        os.close(place)
        place = inner
    os.close(place)
    before = len(os.listdir("/dev/fd"))
    folder.remove_folder("x")
    assert not list(folder.path.iterdir()) and len(os.listdir("/dev/fd")) == before
    assert (tmp_path / "outside" / "file").exists()


def test_a_removal_that_is_interrupted_leaves_names_of_incomplete_saves(folder):
    (folder.path / ".partial-run.json-0123abcd" / "/".join("x" * 40)).mkdir(parents=True)
    failing = Folder.open(folder.path, system=Refuses(errno.EIO, "remove_empty"))
    with failing, pytest.raises(DirectoryError, match=r"cannot remove the folder .*: Input"):
        failing.remove_folder(".partial-run.json-0123abcd")
    assert [written_as(name) for name in folder.names()] == ["run.json"] * 2
    for name in folder.names():
        folder.remove_folder(name)
    assert folder.names() == []


def test_folders_are_created_listed_and_removed(folder):
    with folder.subfolder("a", create=True) as a, a.subfolder("b", create=True) as b:
        b.create("new", [b"1"])
        with pytest.raises(DirectoryError, match=r"cannot write .*/a/b/new: File exists"):
            b.create("new", [b"2"])
        b.rename("new", "newer")
        assert b.names() == ["newer"] and b.kind("new") is None
    assert folder.kind("a") == "a folder" and folder.is_folder("a")
    with pytest.raises(DirectoryError, match=r"cannot make the folder .*/a: File exists"):
        folder.make_folder("a")
    with pytest.raises(DirectoryError, match=r"remove the folder .*/a: Directory not empty"):
        folder.remove_empty_folder("a")
    folder.remove_folder("a")
    folder.remove_file("a")
    assert folder.names() == []
    assert folder.free() > 0


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DirectoryError) as caught:
        Folder.open(tmp_path / "none")
    assert str(caught.value) == (
        f"cannot open the folder {tmp_path}/none: No such file or directory"
    )


def test_a_closed_folder_is_not_used(tmp_path):
    folder = Folder.open(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    folder.close()
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(DirectoryError, match="Bad file descriptor"):
        folder.write("note", [])


def test_without_descriptors_paths_are_used(tmp_path, monkeypatch, outside):
    monkeypatch.setattr(operations, "_RELATIVE", False)
    with Folder.open(tmp_path / "a" / "run", create=True) as folder:
        assert folder.descriptor is None
        with folder.subfolder("b", create=True) as b:
            b.write("note", [b"1"])
            assert b.read("note", 9) == b"1" and b.names() == ["note"] and b.size("note") == 1
        (folder.path / "x").symlink_to(tmp_path)
        with pytest.raises(DirectoryError, match="it is a symbolic link"):
            folder.subfolder("x")
        folder.remove_folder("b")
        folder.remove_folder("x")
        assert folder.names() == [] and folder.free() > 0
    with pytest.raises(DirectoryError, match="No such file"):
        Folder.open(tmp_path / "none")


def test_temporary_names_are_random():
    assert partial("a").startswith(".partial-a-") and partial("a") != partial("a")


def test_texts_are_cleaned():
    assert clean("naïve 模型 🙂\u00a0x") == "naïve 模型 🙂\u00a0x"
    assert clean("\x1b]0;title\x07\r\x9b2J") == r"\x1b]0;title\x07\r\x9b2J"
    assert clean("a\u202eb\u2066\udc80") == r"a\u202eb\u2066\udc80"
    assert clean("a\n\tb\x1b", lines=True) == "a\n\tb" + r"\x1b"
    assert clean("a\n\tb") == r"a\n\tb"
    assert clean("x" * 50, limit=5) == "xxxx…" and clean("x" * 5, limit=5) == "xxxxx"
    assert clean(12.5) == "12.5"


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    folder = Folder.open(tmp_path, system=Recorder("append", errno.ENOSPC))
    expected = r"cannot write .*/log: the disk is full: it needs about 3 bytes, [\d,]+ are free$"
    with folder.append_to("log") as file, pytest.raises(DirectoryError, match=expected):
        folder.append(file, b"one")
