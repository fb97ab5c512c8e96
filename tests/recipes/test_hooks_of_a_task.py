"""Where the command line finds the hooks of a task."""

from types import ModuleType
from typing import Any

import treadle
from treadle.recipes._loading import Made


class Plain(treadle.Task):
    """A task without hooks."""


class Stopping(treadle.Task):
    def hooks(self) -> list[Any]:
        return ["of the task"]


def test_hooks_are_those_of_the_task_or_of_its_module() -> None:
    module = ModuleType("mine")
    assert (
        treadle.Task().hooks() == Made(Plain(), None).hooks() == Made(Plain(), module).hooks() == []
    )
    assert Made(Stopping(), None).hooks() == Made(Stopping(), module).hooks() == ["of the task"]
    module.hooks = treadle.hooks  # by `from treadle import hooks`
    assert (
        Made(Stopping(), module).hooks() == ["of the task"] and Made(Plain(), module).hooks() == []
    )
    module.hooks = lambda: ["of the module"]
    assert Made(Plain(), module).hooks() == ["of the module"]
    assert Made(Stopping(), module).hooks() == ["of the task"]
