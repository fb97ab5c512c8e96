"""Which code is the user's own, wherever Python, Keras and other libraries lie."""

import importlib
import importlib.util
import shutil
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from treadle.core.identity import described
from treadle.core.user_code import Project, code_of, import_root, is_library

TASK = """
import treadle
{imports}

class Mine(treadle.Task):
    def train_step(self, batch):
        return {{"loss": {uses}}}
"""
LIBRARY = "def used(batch):\n    return batch\n"


@pytest.fixture(autouse=True)
def imports_apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forget the modules that a test imports."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith(("lib_", "own_")):
            del sys.modules[name]


def own_code(folder: Path, monkeypatch: pytest.MonkeyPatch, imports: str, uses: str) -> set[str]:
    """The names of the own code of a task in a folder, without the task's class itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_task.py").write_text(TASK.format(imports=imports, uses=uses))
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    found = set(code_of(importlib.import_module("own_task").Mine()))
    assert "Mine.train_step" in found
    return found - {"Mine.train_step"}


def library(folder: Path, name: str, installed: bool) -> None:
    """Write a package, as an installer leaves it or as a bare copy."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(LIBRARY)
    if installed:
        (folder / f"{name}-1.0.dist-info").mkdir()
        record = folder / f"{name}-1.0.dist-info" / "RECORD"
        record.write_text(f"{name}/__init__.py,sha256=abc,42\n")


@pytest.mark.parametrize(
    ("place", "installed", "own"),
    [
        ("elsewhere", True, False),  # pip install --user, --target, conda
        ("elsewhere", False, False),  # a copy that a .pth file or PYTHONPATH names
        ("project/.venv/lib/python3/site-packages", False, False),
        ("project/deps", True, False),  # pip install --target deps
        ("project", True, False),  # pip install --target .
        ("project", False, True),  # a package of the project itself
        ("project/tools", False, True),
    ],
)
def test_a_package_is_own_by_where_the_task_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, installed: bool, own: bool
) -> None:
    library(tmp_path / place, "lib_placed", installed)
    monkeypatch.syspath_prepend(tmp_path / place)
    found = own_code(tmp_path / "project", monkeypatch, "import lib_placed", "lib_placed.used(1)")
    assert found == ({"used"} if own else set())


def test_the_project_folder_is_the_nearest_with_a_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path / "src", "lib_beside", installed=False)
    monkeypatch.syspath_prepend(tmp_path / "src")
    (tmp_path / "pyproject.toml").touch()
    uses = "lib_beside.used(1)"
    assert own_code(tmp_path / "experiments", monkeypatch, "import lib_beside", uses) == {"used"}


def test_a_zipped_package_elsewhere_is_not_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as file:
        file.writestr("lib_zipped/__init__.py", LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "packed.zip")
    uses = "lib_zipped.used(1)"
    assert own_code(tmp_path / "project", monkeypatch, "import lib_zipped", uses) == set()


def test_a_copy_of_keras_in_the_project_is_not_own(tmp_path: Path) -> None:
    import keras

    (tmp_path / "keras").symlink_to(Path(keras.__file__).parent)
    namespace = {"__name__": "keras.src.losses", "__file__": str(tmp_path / "keras/src/losses.py")}
    assert import_root(namespace) is None
    assert not Project([]).owns(namespace)


def test_libraries_are_known_where_they_are_installed() -> None:
    import xml.etree.ElementTree as tree

    import numpy
    import rich
    import rich.console

    for module in (numpy, rich, rich.console, tree, types, sys, importlib.util):
        assert is_library(vars(module)), module
    assert not is_library(globals())
    assert import_root(globals()) is not None


def test_a_function_of_a_library_does_not_make_its_folder_a_project() -> None:
    import shutil as library

    assert Project([library.copytree]).folders == ()


def test_attributes_of_lazy_objects_are_never_accessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class LazyObject:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise ImportError(name)

    class LazyModule(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            raise ImportError(name)

    class Proxy:
        @property
        def __class__(self) -> Any:
            asked.append("__class__")
            raise ImportError("__class__")

    stand_ins = types.ModuleType("lib_lazy")
    vars(stand_ins).update(a=LazyObject(), b=LazyModule("b"), c=Proxy())
    monkeypatch.setitem(sys.modules, "lib_lazy", stand_ins)
    imports = "from lib_lazy import a, b, c"
    assert own_code(tmp_path / "project", monkeypatch, imports, "a.x + b.y + c.z") == set()
    assert described(vars(stand_ins)["b"]) == "b"
    assert asked == []


def test_keras_lazy_modules_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = "from keras.src.utils.module_utils import LazyModule\nabsent = LazyModule('no_such')"
    assert own_code(tmp_path / "project", monkeypatch, imports, "absent.anything") == set()


def test_copies_do_not_stay(tmp_path: Path) -> None:
    """A folder that is removed is no error."""
    library(tmp_path / "gone", "lib_gone", installed=True)
    namespace = {"__name__": "lib_gone", "__file__": str(tmp_path / "gone/lib_gone/__init__.py")}
    shutil.rmtree(tmp_path / "gone")
    assert import_root(namespace) == tmp_path / "gone"
