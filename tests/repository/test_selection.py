"""The default run leaves out slow tests, except few that are chosen by hand."""

import pytest

from tests import selection
from tests.selection.__main__ import differences, main, measured

RUN = """\
== tensorflow-2: tests/conformance --ignore-glob=*/conformance/test_[a-l]*.py
============================= slowest durations =============================
2.50s call     tests/conformance/test_a.py::test_x[with a space]
0.70s setup    tests/conformance/test_a.py::test_y
0.40s call     tests/conformance/test_a.py::test_y
== general-2: tests
0.90s call     tests/test_b.py::test_z
"""


def test_few_slow_tests_are_kept_on_each_backend():
    kept = selection.kept()
    assert len(kept) == len({*kept}) <= selection.MOST_KEPT
    assert {backend for backend, _ in kept} == {"jax", "tensorflow", "torch"}


def test_a_run_is_read_with_the_time_of_fixtures():
    assert measured(RUN) == {
        ("tensorflow", "tests/conformance/test_a.py::test_x[with a space]"): 2.5,
        ("tensorflow", "tests/conformance/test_a.py::test_y"): pytest.approx(1.1),
        ("torch", "tests/test_b.py::test_z"): 0.9,
    }


def test_differences_are_slow_tests_that_are_not_listed_and_listed_ones_that_are_gone():
    assert differences({("jax", "a"): 1.5, ("jax", "b"): 0.5}, {("jax", "c"): 2.0}) == [
        "1.5 s, not listed: jax a",
        "listed, below 1 s or gone: jax c",
    ]


def test_a_file_without_durations_is_refused(tmp_path, monkeypatch, capsys):
    file = tmp_path / "output.txt"
    file.write_text("1 passed in 2.0s")
    monkeypatch.setattr("sys.argv", ["slow-tests", str(file)])
    assert main() == 2
    assert capsys.readouterr().err == f"error: {file} names no test of 1 s or more; see --help\n"
