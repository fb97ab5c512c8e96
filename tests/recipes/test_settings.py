"""Tasks found in files without running them, and settings read by their types."""

import ast
import subprocess
import sys
import textwrap

import pytest

from tests.waiting import WATCHDOG
from treadle.errors import ConfigurationError
from treadle.recipes import find, resolve

ALL = sorted(find())


def written(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


TYPED = """
    raise SystemExit("this file must not be run")
    from typing import Literal, Optional, Union
    import treadle

    class Mine(treadle.Task):
        \"\"\"What it does.

        More.
        \"\"\"
        backend = "jax"

        def __init__(
            self,
            units: int = 64,
            rate: "float" = 1e-3,
            bias: bool = True,
            name: str = "x",
            limit: float | None = None,
            depth: Optional[int] = 3,
            kind: Literal["relu", "tanh", 2] = "relu",
            either: Union[int, str] = 0,
            untyped=5,
            layers: list[int] = (),
            *,
            last: int = 2 * 3,
        ):
            pass
"""


@pytest.fixture
def typed(tmp_path):
    return resolve(str(written(tmp_path, TYPED)))


def test_a_file_is_read_and_not_run(typed):
    assert (typed.name, typed.description, typed.backend) == ("Mine", "What it does.", "jax")


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("units=8", "units", 8),
        ("rate=2", "rate", 2.0),
        ("rate=1e-4", "rate", 1e-4),
        ("bias=no", "bias", False),
        ("bias=True", "bias", True),
        ("name=a=b", "name", "a=b"),
        ("name=", "name", ""),
        ("limit=none", "limit", None),
        ("limit=0.5", "limit", 0.5),
        ("depth=None", "depth", None),
        ("kind=tanh", "kind", "tanh"),
        ("kind=2", "kind", 2),
        ("either=7", "either", 7),
        ("either=seven", "either", "seven"),
        ("untyped=6", "untyped", 6),
        ("last=1", "last", 1),
    ],
)
def test_a_text_is_read_by_its_type(typed, given, name, value):
    settings = typed.settings([given])
    assert settings[name] == value
    assert type(settings[name]) is type(value)


def test_known_defaults_are_settings_too(typed):
    settings = typed.settings(["units=1", "units=2"])
    assert settings["units"] == 2  # the later wins
    assert settings["rate"] == 1e-3
    assert "last" not in settings  # computed: known to Python only


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("unit=8", "Mine has no setting 'unit'. Did you mean 'units'?"),
        ("epochs=8", r"Mine has no setting 'epochs'\. `treadle run` has an option --epochs\."),
        ("units=8.5", "units=8.5: expected int, found '8.5'"),
        ("units=none", "expected int"),
        ("rate=fast", "expected float, found 'fast'"),
        ("bias=1", r"expected bool, found '1'"),
        ("limit=x", r"expected float \| None"),
        ("kind=rel", "expected Literal.* Did you mean 'relu'?"),
        ("layers=3", r"layers is of type list\[int\], which the command line cannot set"),
        ("units", "write it as name=value"),
        ("=3", "write it as name=value"),
    ],
)
def test_values_that_do_not_fit_are_refused(typed, given, message):
    with pytest.raises(ConfigurationError, match=message):
        typed.settings([given])


def test_a_parameter_without_default_is_needed(tmp_path):
    path = written(tmp_path, "class Mine(Task):\n    def __init__(self, units: int): ...\n")
    recipe = resolve(str(path))
    with pytest.raises(ConfigurationError, match="needs a value for 'units', of type int"):
        recipe.settings([])
    assert recipe.settings(["units=3"]) == {"units": 3}


def test_annotations_and_defaults_that_python_rejects_are_no_error_before_it(tmp_path):
    text = "class Mine(Task):\n    def __init__(self, a: 'b['=1, b: 'x'[9]=1, c={[]: 1}): ...\n"
    parameters = resolve(str(written(tmp_path, text))).known_parameters()
    assert [parameter.accepts for parameter in parameters] == [(), (), ()]
    text = "class Mine(Task):\n    def __init__(self, a: Annotated[int, Range('x'[9], 2)]): ...\n"
    with pytest.raises(ConfigurationError, match="use literal values, as Range"):
        resolve(str(written(tmp_path, text)))


def test_signatures_are_inherited_from_readable_files(tmp_path):
    written(tmp_path, "class Base(Task):\n    def __init__(self, a: int = 1): ...\n", "base.py")
    path = written(
        tmp_path,
        """
        from base import Base
        from elsewhere import Other
        from treadle.recipes.digits import Digits

        class Near(Base):
            def train_step(self, batch): ...

        class Mine(Digits):
            pass

        class Far(Other):
            pass
        """,
    )
    assert resolve(f"{path}:Near").settings(["a=2"]) == {"a": 2}
    assert resolve(f"{path}:Mine").settings(["units=2"])["units"] == 2
    assert resolve(f"{path}:Far").settings([]) == {}
    with pytest.raises(ConfigurationError, match="inherits its __init__ from elsewhere"):
        resolve(f"{path}:Far").settings(["a=2"])


def test_objects_and_functions_count_when_they_are_named(tmp_path):
    path = written(
        tmp_path,
        """
        \"\"\"A script.\"\"\"
        def step(x): ...
        def make(units: int = 2): ...
        line = treadle.task(step)
        """,
    )
    assert resolve(str(path)).target == "line"
    assert resolve(str(path)).description == "A script."
    assert resolve(f"{path}:make").settings(["units=4"]) == {"units": 4}


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        (None, "", "there is no file"),
        ("x = (", "", "is not valid Python: line 1"),
        ("x = 1", "", "holds no task"),
        (
            "from far.away import Base\nclass Odd: ...\nclass Mine(Base): ...",
            "",
            r"no class that visibly inherits from treadle\.Task: its classes are Odd, Mine\. "
            r"If one inherits from a task in another file, name it, as mine\.py:Mine",
        ),
        ("class A(Task): ...\nclass B(A): ...", "", "holds several tasks: name one.*A, B"),
        ("class Mine(Task): ...", ":Mina", "no class, function or object 'Mina'. Did you mean"),
    ],
)
def test_missing_tasks_are_reported(tmp_path, text, target, message):
    if text is not None:
        written(tmp_path, text)
    with pytest.raises(ConfigurationError, match=message):
        resolve(f"{tmp_path / 'mine.py'}{target}")


def test_a_task_may_inherit_from_one_in_a_file_in_the_same_folder(tmp_path):
    written(tmp_path, "class Base(Task):\n    def __init__(self, units: int = 3): ...", "base.py")
    path = written(tmp_path, "from base import Base\nclass Odd: ...\nclass Mine(Base): ...")
    assert resolve(str(path)).target == "Mine"
    assert resolve(str(path)).settings(["units=4"]) == {"units": 4}


def test_an_unknown_recipe_is_reported():
    with pytest.raises(ConfigurationError, match=r"no recipe 'digit'\. Did you mean 'digits'\?"):
        resolve("digit")


@pytest.mark.parametrize("name", ALL)
def test_recipes_are_described_and_portable(name):
    recipe = find()[name]
    assert recipe.description
    assert recipe.parameters is not None
    tree = ast.parse(recipe.path.read_text())
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported & {"tensorflow", "jax", "torch"} <= {recipe.backend}


def test_nothing_is_imported_before_a_command_is_understood():
    code = """
        import sys
        from typer.testing import CliRunner
        from treadle.cli import app
        for arguments in (["--help"], ["run", "--help"], ["recipes"], ["run", "digit"],
                          ["run", "digits", "--set", "unit=3"], ["run", "digits", "--epochs", "0"],
                          ["run", "digits", "--until", "20 steps"],
                          ["run", "digits", "--precision", "float17"],
                          ["run", "digits", "--backend", "numpy"],
                          ["run", "linear-native", "--backend", "jax"],
                          ["evaluate", "nowhere"], ["resume", "nowhere"],
                          ["replay", "nowhere", "--step", "1"], ["replay", "nowhere"],
                          ["certify", "--help"], ["certify", "digit"],
                          ["certify", "digits", "--set", "unit=3"],
                          ["find-lr", "--help"], ["find-lr", "digits", "--plot", "rate.gif"],
                          ["tune", "--help"], ["tune", "digit"], ["tune", "linear"],
                          ["tune", "digits", "--search", "units=9..3"],
                          ["schedule", "--help"], ["schedule", "digit"],
                          ["schedule", "cyclic(1,,)"]):
            CliRunner().invoke(app, arguments)
            found = {"keras", "tensorflow", "jax", "torch", "numpy"} & set(sys.modules)
            assert not found, (arguments, found)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=WATCHDOG)
