"""The loop's hooks: when they run, and what they are called with."""

from pathlib import Path
from typing import Any

import pytest
from loops import arrays, loop_of, source

import treadle


def test_hooks_run_when_they_are_due_and_their_dicts_are_logged() -> None:
    moments: dict[str, list[int]] = {
        "every": [],
        "at": [],
        "after": [],
        "epochs": [],
        "examples": [],
    }

    def note(name: str) -> Any:
        def hook(loop: Any) -> Any:
            moments[name].append(loop.progress.step)
            return {f"seen_{name}": loop.progress.examples}

        return hook

    hooks = [
        treadle.every("5 steps", note("every")),
        treadle.at("7 steps", note("at")),
        treadle.after("60 examples", note("after")),
        treadle.every("2 epochs", note("epochs")),
        treadle.every("40 examples", note("examples")),
    ]
    with loop_of(hooks=hooks) as loop:
        history = loop.fit(source(), epochs=4)
    assert moments["every"] == [5, 10, 15, 20]
    assert moments["at"] == [7]
    assert moments["after"] == [8]  # an epoch is 6 steps of 44 examples
    assert moments["epochs"] == [12, 24]
    assert moments["examples"] == [5, 11, 16, 22]  # the first boundary at or after each 40
    assert history["seen_at"] == [52]


class Counted(treadle.Hook):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, loop: Any) -> None:
        self.calls.append("start")

    def end(self, loop: Any, error: Any) -> None:
        self.calls.append(error)


def test_hooks_start_and_end_once_for_each_call_of_fit_and_once_for_the_parts() -> None:
    hook = Counted()
    with loop_of(hooks=[hook]) as loop:
        loop.fit(source(), steps=2)
        assert hook.calls == ["start", None]
        x, y = arrays()
        loop.step((x[:8], y[:8]))
        loop.step((x[:8], y[:8]))
        for _ in loop.steps(source()):
            pass
        assert hook.calls == ["start", None, "start"]
    assert hook.calls == ["start", None, "start", None]
    error, hook = ValueError("in the body"), Counted()
    with pytest.raises(ValueError, match="in the body"), loop_of(hooks=[hook]) as loop:
        for _ in loop.steps(source()):
            raise error
    assert hook.calls == ["start", error]


class Detailed(treadle.DetailedHook):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def before(self, loop: Any) -> None:
        self.calls.append(loop.progress.step)

    def validation(self, loop: Any, results: Any) -> None:
        self.calls.append("validation" if results is None else set(results))

    def evaluation(self, loop: Any, results: Any) -> None:
        self.calls.append("evaluation" if results is None else set(results))


class WithoutBase(treadle.Hook):
    """A hook that defines a method of `DetailedHook` without that base class."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def before(self, loop: Any) -> None:
        self.calls.append(loop.progress.step)


def test_detailed_hooks_are_called_before_windows_and_around_evaluations() -> None:
    hook, other = Detailed(), WithoutBase()
    evaluating = treadle.at("2 steps", lambda loop: loop.evaluate(source(1)) and None)
    with loop_of(hooks=[hook, other, evaluating]) as loop:
        loop.fit(source(), validation=source(1), steps=4, validate_every="4 steps")
        loop.evaluate(source(1))  # after training
    results = {"loss", "accuracy"}
    validated = {f"val_{name}" for name in results}
    assert other.calls[0] == 0 and 2 in other.calls  # a window ends before the evaluation
    at = hook.calls.index("evaluation")
    assert hook.calls[at - 1] < 2 and hook.calls[at : at + 3] == ["evaluation", results, 2]
    assert hook.calls[-2:] == ["validation", validated]
    assert [call for call in hook.calls if isinstance(call, int)] == other.calls


def test_a_stop_is_reported_and_ends_the_run_at_the_window_boundary() -> None:
    hooks = [treadle.every("3 steps", lambda loop: loop.stop("seen enough"))]
    with loop_of(hooks=hooks) as loop:
        loop.fit(source(), epochs=5)
    assert loop.progress.step == 3
    assert loop.reason == "seen enough"
    with loop_of() as loop:
        loop.fit(source(), epochs=10_000, until="0.01 s")
    assert loop.reason == "time limit reached"


def test_hooks_get_each_record_that_is_added_before_they_start_once(tmp_path: Path) -> None:
    with loop_of(directory=tmp_path, hooks=[treadle.hooks.CSV()]) as loop:
        loop.fit(source(), epochs=1)
        for epoch in loop.epochs(2):
            if epoch == 1:  # its record comes before the first step of this call
                continue
            for _ in loop.steps(source()):
                pass
    rows = (tmp_path / "epochs.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["1", "2", "3"]


def test_a_hook_at_the_end_of_an_epoch_sees_its_record() -> None:
    seen: list[float] = []

    def last(loop: Any) -> None:
        seen.append(loop.history.last["val_loss"])

    with loop_of(hooks=[treadle.every("1 epoch", last)]) as loop:
        loop.fit(source(), epochs=3, validation=source())
    assert seen == list(loop.history["val_loss"])


def test_a_state_saved_by_a_hook_at_the_end_of_an_epoch_has_its_record(tmp_path: Path) -> None:
    def save(loop: Any) -> None:
        loop.save()
        if loop.progress.epoch == 1:
            raise RuntimeError("ends here")

    def trained(*hooks: Any) -> Any:
        with loop_of(hooks=hooks, directory=tmp_path / f"{len(hooks)}") as loop:
            return loop.fit(source(), epochs=3, validation=source())

    expected = trained()
    hook = treadle.every("1 epoch", save)
    with pytest.raises(RuntimeError, match="ends here"):
        trained(hook)
    hook = treadle.every("1 epoch", lambda loop: loop.save())
    found = trained(hook)
    assert found.epochs == expected.epochs and len(found.epochs) == 3
