"""Reading `run.json`: types, bounds, and what may lie in its place."""

import json
import os

import pytest

from tests.run_content import write_record
from treadle.core import directory, schema
from treadle.core.directory import read_run
from treadle.errors import DirectoryError

COMMAND = {
    "recipe": "digits",
    "settings": {"units": 8},
    "seed": 0,
    "backend": "jax",
    "precision": "float32",
    "execution": "auto",
}
PROGRESS = {"step": 3, "epoch": 1, "batch": 0, "examples": 12, "seconds": 0.5}
RUN = {"format": 1, "configuration": COMMAND, "progress": PROGRESS, "finished": "2026-01-01"}


def with_value(path, value):
    """The content of a `run.json` with one value replaced."""
    run = json.loads(json.dumps(RUN))
    *parents, last = path.split(".")
    place = run
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return run


def fault(path, directory):
    with pytest.raises(DirectoryError) as caught:
        read_run(directory)
    start = f"{directory / 'run.json'} is damaged, or is not the record of a run: "
    text = str(caught.value)
    assert text.startswith(start) and text.endswith(". Restore a copy of it"), text
    return text.removeprefix(start).removesuffix(". Restore a copy of it")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("progress", 3, "progress is 3; expected an object"),
        ("progress", {"step": 3}, "progress.epoch is missing"),
        ("progress.step", -1, "progress.step is -1; expected a whole number from 0 to"),
        ("progress.step", "3", "progress.step is '3'; expected a whole number from 0 to"),
        ("progress.epoch", 10**15, "progress.epoch is 1000000000000000; expected a whole number"),
        ("progress.seconds", float("inf"), "progress.seconds is inf; expected a finite number"),
        ("progress.seconds", -0.5, "progress.seconds is -0.5; expected a finite number of at"),
        ("calls", {}, "calls is an object; expected a list"),
        ("calls", [3], "calls[0] is 3; expected an object"),
        ("calls", [{"epochs": "three"}], "calls[0].epochs is 'three'; expected a whole"),
        ("calls", [{"validate_every": {"of": "epoch"}}], "calls[0].validate_every.amount is miss"),
        ("code", ["a"], "code is a list; expected an object"),
        ("code", {"Task.step": 3}, "code.'Task.step' is 3; expected a text"),
        ("configuration", None, "configuration is None; expected an object"),
        ("configuration.settings", [1], "configuration.settings is a list; expected an object"),
        ("configuration.recipe", 3, "configuration.recipe is 3; expected a text"),
        ("configuration.recipe", "a\0.py:T", "configuration.recipe is 'a\\x00.py:T'; expected"),
        ("configuration.data_dir", 3, "configuration.data_dir is 3; expected a text"),
        ("configuration.weights_from", ["a"], "configuration.weights_from is a list; expected a"),
        ("configuration.seed", 10**30, "configuration.seed is 1000000000000000000000000000000; e"),
        ("configuration.epochs", 10**15, "configuration.epochs is 1000000000000000; expected a w"),
        ("passed_over", {"epoch": 0}, "passed_over is an object; expected a list"),
        ("passed_over", [{"epoch": 0, "batch": 1, "step": 2}], "passed_over[0].why is missing"),
        ("options", {"execution": ["eager"]}, "options.execution is a list; expected a text"),
        ("options", {"fused": 1}, "options.fused is 1; expected true or false"),
        ("overridden", "a", "overridden is 'a'; expected a list"),
        ("error", {"a": 1}, "error is an object; expected a text"),
        ("format", 2, "its format is 2, and this version of Treadle reads format 1: use the vers"),
    ],
)
def test_a_value_of_another_type_or_out_of_bounds_is_named(tmp_path, path, value, message):
    (tmp_path / "run.json").write_text(json.dumps(with_value(path, value)))
    assert fault(path, tmp_path).startswith(message)


def test_numbers_out_of_range_are_found_before_they_are_used(tmp_path):
    for digits, message in (
        ("9" * 401, "it holds a whole number of 401 digits; at most 300 are allowed"),
        ("-" + "9" * 5000, "it holds a whole number of 5,001 digits; at most 300 are allowed"),
        ("1e999", "it holds '1e999', which is too large for a number"),
    ):
        for value in (digits, f"[{digits}]", f'{{"nested": {digits}}}'):
            text = json.dumps({"configuration": {"any": "@"}}).replace('"@"', value)
            (tmp_path / "run.json").write_text(text)
            assert fault("", tmp_path) == message


def test_checks_of_numbers_name_a_whole_number_of_any_length():
    for check in (schema.amount, schema.number, schema.whole()):
        with pytest.raises(ValueError, match=r"^it is a whole number of 20,001 bits; expected a "):
            check(1 << 20_000, "")


def test_missing_values_are_named(tmp_path):
    file = tmp_path / "run.json"
    file.write_text("{}")
    assert fault("", tmp_path) == "configuration is missing"
    file.write_text(json.dumps({"configuration": {"recipe": "digits"}}))
    assert fault("", tmp_path) == "configuration.settings is missing"
    file.write_text(json.dumps({"configuration": {}, "finished": "2026-01-01"}))
    assert fault("", tmp_path) == "progress is missing, although the run is finished"
    file.write_text(json.dumps(RUN))
    assert fault("", tmp_path) == "files is missing, although the run is finished"
    file.write_text(json.dumps({"configuration": {}}))
    assert fault("", tmp_path) == "id is missing"
    file.write_text(json.dumps({"configuration": {}, "id": "0a"}))
    assert fault("", tmp_path) == "sha256 is missing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not JSON: Expecting value in line 1, column 1"),
        (b"[" * 200_000, "it is nested more than 50 levels deep"),
        (b'{"configuration": ' + b'{"a":' * 60 + b"1" + b"}" * 61, "it is nested more than 50"),
        (b'{"configuration": {}, "seed": 1' + b"0" * 5000 + b"}", "it holds a whole number of"),
        (b"\xff\xfe", "it is not"),
        (b"[" + b"0," * 3_000_000 + b"0]", "it holds about 3,000,001 values; at most 2,000,000"),
        (b"[1]", "it is a list; expected an object"),
    ],
)
def test_text_that_is_not_a_record_is_explained(tmp_path, content, message):
    (tmp_path / "run.json").write_bytes(content)
    assert fault("", tmp_path).startswith(message)


def test_a_run_of_a_script_may_have_settings_of_any_names_and_types(tmp_path):
    configuration = {"epochs": "ten", "seed": None, "settings": 3, "rate": float("nan")}
    write_record(tmp_path, {"id": "0a", "configuration": configuration})
    assert read_run(tmp_path)["configuration"]["epochs"] == "ten"


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(DirectoryError, match=r"run.json has 10,737,418,240 bytes; at most"):
        read_run(tmp_path)


def test_only_a_regular_file_is_read(tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(RUN))
    file = tmp_path / "run.json"
    for place, why in (
        (lambda: os.mkfifo(file), "it is a pipe, and not a file. Move it away"),
        (lambda: file.symlink_to(other), "it is a symbolic link, which is not followed"),
        (lambda: file.symlink_to(tmp_path / "nothing"), "it is a symbolic link, which is not fo"),
        (lambda: file.mkdir(), "it is a folder, and not a file. Move it away"),
    ):
        place()
        with pytest.raises(DirectoryError) as caught:
            read_run(tmp_path)
        assert str(caught.value).startswith(f"cannot read {file}: {why}")
        file.rmdir() if file.is_dir() else file.unlink()
    with pytest.raises(DirectoryError, match=r"holds no run: there is no run\.json in it"):
        read_run(tmp_path)
    with pytest.raises(DirectoryError, match="holds no run: there is no such folder"):
        read_run(tmp_path / "nowhere")


def test_progress_is_that_of_the_record():
    run = directory.decode_record(directory.encode_record({**RUN, "id": "0a", "files": {}}))
    assert directory.progress_of(run).step == 3
    assert directory.progress_of({"configuration": {}}).step == 0


def test_values_of_files_are_shortened_and_escaped():
    assert schema.shown("\x1b[2J") == r"'\x1b[2J'"
    assert len(schema.shown("a b" * 100)) == 78
