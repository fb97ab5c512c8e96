"""A check, in separate processes, that a task's run resumes bit for bit."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..core.options import backend_name, precision_name
from ..distribute.setup import setup
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from .certify.drill import Subject


def resumed_equals_uninterrupted(
    make_task: Callable[[], Any],
    make_source: Callable[[], Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> None:
    """Check that a run that is killed and resumed equals an uninterrupted run bit for bit.

    One process trains for `2 * steps` steps. A second process saves a checkpoint after `steps`
    steps and is killed; a third process resumes from that checkpoint. Every batch, logged value,
    variable and random state is compared. State that the task or the source keeps outside of
    variables, and that no checkpoint holds, shows up as a difference.

    The functions are imported in other processes, so they must be defined at the top level of a
    file. A script must call this below `if __name__ == "__main__":`. If the task has a method
    `hooks`, as a task for `treadle run` may, its hooks are used.

    Args:
        make_task: Creates a fresh task.
        make_source: Creates the data: a source, or `treadle.Datasets`, whose validation data is
            used too. With None, the task's own `datasets` method is called.
        steps: Steps until the checkpoint; by default 8, or one and a half epochs if an epoch has
            at most 24 batches.
        seed: The seed of the run.

    Raises:
        AssertionError: Something differs. The message is a certificate that names the first step,
            batch, value or variable that differs, and the likely cause where it is known.
        ConfigurationError: Another process cannot import a function, or `steps` is less than one.

    Example:
        >>> def test_my_task_resumes():
        ...     resumed_equals_uninterrupted(make_task, make_source, steps=6)
        >>> test_my_task_resumes()  # doctest: +SKIP
    """
    from .certify.certificate import Maker, certify  # late: they import this package's checks

    arguments = {
        "make_task": _where(make_task, "make_task"),
        "make_source": None if make_source is None else _where(make_source, "make_source"),
        "backend": backend_name(),
        "precision": precision_name(),
        "seed": seed,
    }
    found = certify(Maker(f"{__name__}:make", arguments, make_task.__qualname__), steps, True)
    if not found.exact:
        raise AssertionError("\n".join(found.lines()))


def make(
    make_task: list[str], make_source: list[str] | None, backend: str, precision: str, seed: int
) -> "Subject":
    """Create a task and its data in another process; see `Maker`."""
    setup(seed=seed, precision=precision, backend=backend)
    from ..steps.task import Datasets
    from .certify.drill import Subject  # late: it imports Keras

    again = _found(*make_task)
    task = again()
    data: Any = task.datasets() if make_source is None else _found(*make_source)()
    if not isinstance(data, Datasets):
        data = Datasets(train=data)
    return Subject(task, data.train, again, data.validation, tuple(getattr(task, "hooks", list)()))


def _where(function: Any, argument: str) -> list[str]:
    """Return the module, file and name by which another process can import a function.

    Raises:
        ConfigurationError: Another process cannot import it.
    """
    name = getattr(function, "__qualname__", None)
    module = getattr(function, "__module__", None)
    file = None if name is None else getattr(sys.modules.get(str(module)), "__file__", None)
    if name is None or file is None or "<" in name or inspect.ismethod(function):
        shown = name or repr(function)
        raise ConfigurationError(
            f"{argument} must be a function or a class at the top of a file, so that another "
            f"process can import it, not {shown}"
        )
    return [str(module), str(Path(file).absolute()), name]


def _found(module: str, file: str, name: str) -> Any:
    found: Any = _module(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@cache
def _module(name: str, file: str) -> ModuleType:
    """Import a module by its name, or by its file if this process cannot import the name."""
    try:
        spec = None if name == "__main__" else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).absolute() == Path(file):
        return import_module(name)
    own = f"treadle_drill_{Path(file).stem}"
    by_file = importlib.util.spec_from_file_location(own, file)
    if by_file is None or by_file.loader is None:
        raise ConfigurationError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(by_file)
    sys.modules[own] = module
    by_file.loader.exec_module(module)
    return module
