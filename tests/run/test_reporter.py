"""Warnings about a run come once in each run, and what cannot be resumed is in its log."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import arrays, loop_of

from treadle.errors import TreadleWarning
from treadle.run.reporter import Reporter


def batches() -> Iterator[Any]:
    """A generator, which cannot be resumed exactly."""
    x, y = arrays()
    for _ in range(3):
        yield x[:4], y[:4]


def test_a_text_comes_once_in_a_run_and_in_each_run_of_a_process() -> None:
    for _ in range(2):
        reporter = Reporter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            assert [reporter.warn(text) for text in ("a", "a", "b", "")] == [1, 0, 1, 0]
        assert [str(warning.message) for warning in caught] == ["a", "b"]
        assert caught[0].filename == __file__


def test_users_may_still_turn_warnings_into_errors_or_silence_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreadleWarning)
        with pytest.raises(TreadleWarning, match="a"):
            Reporter().warn("a")
        warnings.simplefilter("ignore", TreadleWarning)
        assert Reporter().warn("a")
    assert Reporter(silent=True).warn("a")


def test_that_a_resume_may_not_be_exact_is_said_in_each_run_and_in_its_log(tmp_path: Path) -> None:
    for name in ("first", "second"):
        loop = loop_of(directory=tmp_path / name)
        with pytest.warns(TreadleWarning, match="a resume of this run may not be exact"), loop:
            loop.fit(batches, epochs=2)
        found = [x.values["warning"] for x in loop.history.records if "warning" in x.values]
        assert len(found) == 1 and found[0].startswith("a resume of this run may not be exact")


def test_a_resumed_run_warns_again_and_does_not_log_it_again(tmp_path: Path) -> None:
    for steps in (4, 6):
        loop = loop_of(directory=tmp_path, override=True)
        with pytest.warns(TreadleWarning, match="a resume of this run may not be exact"), loop:
            loop.fit(batches, steps=steps)
    assert loop.progress.step == 6
    log = (tmp_path / "log.jsonl").read_text()
    assert log.count("a resume of this run may not be exact") == 1
