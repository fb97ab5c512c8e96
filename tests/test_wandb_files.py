"""The last step in the files of Weights & Biases, also after its process was killed.

The package is not installed here: a record of these files is JSON. `scripts/trackers` reads real
ones.
"""

import io
import json
import struct
from types import SimpleNamespace

import pytest

from treadle.hooks import wandb_files
from treadle.hooks.wandb_files import BLOCK, FIRST, FULL, HEADER, LAST, MIDDLE, last_step, records

pytestmark = pytest.mark.any_backend


class DecodeError(Exception):
    pass


class Record:
    """Stands for the package's message: a row of a step, or another record."""

    def __init__(self, step):
        items = [SimpleNamespace(key="", nested_key=["_step"], value_json=json.dumps(step))]
        self.step, self.history = step, SimpleNamespace(item=items)

    @classmethod
    def FromString(cls, data):
        try:
            return cls(json.loads(data)["step"])
        except ValueError as error:
            raise DecodeError from error

    def HasField(self, name):
        return name == "history" and self.step is not None


@pytest.fixture(autouse=True)
def package(monkeypatch):
    modules = {
        "wandb.proto.wandb_internal_pb2": SimpleNamespace(Record=Record),
        "google.protobuf.message": SimpleNamespace(DecodeError=DecodeError),
    }
    importing = SimpleNamespace(import_module=lambda name: modules[name])
    monkeypatch.setattr(wandb_files, "importlib", importing)


def written(rows):
    """Return a file in LevelDB's log format, with a row of each step and the given length."""
    data = bytearray(b":W&B\0\0\0")
    for step, length in rows:
        left = json.dumps({"step": step, "text": "x" * length}).encode()
        first = True
        while first or left:
            room = BLOCK - len(data) % BLOCK
            if room < HEADER:
                data += bytes(room)
                continue
            part, left = left[: room - HEADER], left[room - HEADER :]
            kind = (FIRST if left else FULL) if first else (MIDDLE if left else LAST)
            data += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    return bytes(data)


@pytest.fixture
def saved(tmp_path):
    def save(content, time="20260101_000000", run="abc"):
        folder = tmp_path / "wandb" / f"offline-run-{time}-{run}"
        folder.mkdir(parents=True)
        (folder / f"run-{run}.wandb").write_bytes(content)
        return tmp_path

    return save


@pytest.mark.parametrize("length", [0, 100, BLOCK - 31, BLOCK - 26, BLOCK, 3 * BLOCK])
def test_rows_are_read_across_blocks(length):
    rows = [(step, length) for step in range(1, 40)]
    assert [record.step for record in records(io.BytesIO(written(rows)))] == [*range(1, 40)]


def test_a_row_that_is_cut_is_left_out(saved):
    whole = written([(step, 100) for step in range(1, 1000)])
    directory = saved(whole[:BLOCK])
    found = [record.step for record in records(io.BytesIO(whole[:BLOCK]))]
    assert found == [*range(1, len(found) + 1)] and 200 < len(found) < 300
    assert last_step(directory, "abc") == len(found)


def test_only_the_end_of_a_large_file_is_read_unless_it_holds_no_row(saved, monkeypatch):
    rows = [(step, 5000) for step in range(1, 200)]
    directory = saved(written(rows))
    monkeypatch.setattr(wandb_files, "TAIL", 2 * BLOCK)
    assert last_step(directory, "abc") == 199
    directory = saved(written([*rows, (None, 4 * BLOCK)]), time="20260101_000001")
    assert last_step(directory, "abc") == 199


def test_the_newest_file_with_a_row_counts(saved):
    saved(written([(1, 0), (2, 0)]))
    saved(written([(3, 0)]), time="20260102_000000")
    saved(b":W&B\0\0\0", time="20260103_000000")
    saved(b"other", time="20260104_000000")
    directory = saved(written([(9, 0)]), time="20260105_000000", run="other")
    assert last_step(directory, "abc") == 3


def test_a_file_is_read_up_to_a_damaged_record(saved):
    content = written([(1, 0), (2, 0), (3, 0)]).replace(b'"step": 3', b"damaged!!")
    assert last_step(saved(content), "abc") == 2


def test_a_row_with_a_damaged_step_is_left_out(saved):
    assert last_step(saved(written([(1, 0), (2, 0), ("two", 0), ([3], 0)])), "abc") == 2


def test_without_a_file_nothing_is_known(saved, tmp_path):
    assert last_step(tmp_path, "abc") is None
    saved(b"", run="other")
    assert last_step(tmp_path, "abc") is None and last_step(tmp_path, "../abc") is None
    assert last_step(tmp_path, "other") == 0


def test_links_are_not_followed(saved, tmp_path):
    directory = saved(written([(5, 0)]), run="real")
    real = directory / "wandb" / "offline-run-20260101_000000-real"
    (directory / "wandb" / "offline-run-20260101_000000-abc").symlink_to(real)
    assert last_step(directory, "abc") is None
    (real / "run-real.wandb").rename(tmp_path / "elsewhere")
    (real / "run-real.wandb").symlink_to(tmp_path / "elsewhere")
    assert last_step(directory, "real") == 0
