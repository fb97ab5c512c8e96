"""Every command in an environment where only one backend can be imported.

The other backends are hidden from Python's import system in the process of the command and in
those that it starts, `KERAS_BACKEND` is unset, and Keras is configured for a backend that is not
there.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import keras
import pytest
from executions import once

BACKENDS = ("tensorflow", "jax", "torch")
ONLY = keras.config.backend()
ABSENT = next(name for name in BACKENDS if name != ONLY)

HIDING = """
    import os, sys
    from importlib.machinery import PathFinder

    hidden = set(os.environ["HIDDEN_PACKAGES"].split(","))

    class Visible(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name.partition(".")[0] in hidden:
                return None
            return PathFinder.find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
"""

TASK = """
    import keras
    import numpy as np
    import treadle
    from keras import ops

    class Tiny(treadle.Task):
        epochs = 1

        def __init__(self, rate: float = 0.1):
            self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.SGD(rate)

        def train_step(self, batch):
            def objective():
                return ops.mean((self.model(batch["x"]) - batch["y"]) ** 2)
            return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

        def eval_step(self, batch):
            return {"loss": ops.mean((self.model(batch["x"]) - batch["y"]) ** 2)}

        def datasets(self):
            x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
            data = treadle.data.from_arrays({"x": x, "y": x[:, :1]}, batch_size=4)
            return treadle.Datasets(train=data, validation=data)
"""

TINY = ("__init__", "datasets", "epochs", "eval_step", "train_step")

OPENING_A_RUN = (
    pytest.param(("evaluate", "finished", "--json"), marks=once, id="evaluate"),
    pytest.param(("resume", "finished", "--epochs", "2", "--json"), id="resume"),
    pytest.param(("replay", "finished", "--step", "2", "--json"), marks=once, id="replay"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task, a finished run of it, and a Keras configured for another backend."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "mine.py").write_text(textwrap.dedent(TASK))
    (folder / "hiding").mkdir()
    (folder / "hiding" / "sitecustomize.py").write_text(textwrap.dedent(HIDING))
    (folder / "keras").mkdir()
    (folder / "keras" / "keras.json").write_text(json.dumps({"backend": ABSENT}))
    told = json.loads(command(folder, "run", "mine.py", "--directory", "finished", "--json"))
    assert told["backend"] == ONLY
    return folder


def process(folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python where only one backend can be imported; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment |= {
        "HIDDEN_PACKAGES": ",".join(name for name in BACKENDS if name != ONLY),
        "KERAS_HOME": str(folder / "keras"),
        "PYTHONPATH": str(folder / "hiding"),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(folder: Path, *arguments: str, **variables: str) -> str:
    return process(folder, "-m", "treadle", *arguments, **variables)


@pytest.mark.long
@pytest.mark.parametrize("arguments", OPENING_A_RUN)
def test_commands_that_open_a_run_use_its_backend(folder: Path, arguments: tuple[str, ...]) -> None:
    told: Any = json.loads(command(folder, *arguments, KERAS_BACKEND=ABSENT))
    if arguments[0] == "resume":
        assert told["backend"] == ONLY and told["progress"]["step"] == 8


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [("evaluate",), pytest.param(("replay", "--step", "2"), marks=once)]
)
def test_messages_of_the_import_are_hidden(folder: Path, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    (folder / "script.py").write_text(
        "import os, subprocess, sys\n"
        "os.environ.pop('TF_CPP_MIN_LOG_LEVEL', None)  # which keeps the messages\n"
        f"words = {['-m', 'treadle', command, 'finished', *options]}\n"
        "done = subprocess.run([sys.executable, *words], stderr=subprocess.PIPE, text=True)\n"
        "print('standard error:', done.stderr.strip(), done.returncode)\n"
    )
    told = process(folder, "script.py").partition("standard error: ")[2]
    assert told == f"importing keras and {ONLY} … 0\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("recipes",),
        ("run", "mine.py:Tiny", "--quiet"),
        ("find-lr", "mine.py", "--steps", "10"),
        ("schedule", "mine.py"),
        ("tune", "mine.py", "--search", "rate=0.01..0.1", "--trials", "1"),
        ("certify", "mine.py", "--steps", "2"),
    ],
    ids=lambda arguments: f"{arguments[0]}-{len(arguments)}",
)
def test_every_command_runs(folder: Path, arguments: tuple[str, ...]) -> None:
    assert command(folder, *arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    "lines",
    [
        "import treadle; treadle.setup(seed=1)",
        "import treadle; treadle.Task",
        "import treadle; import keras",
    ],
)
def test_a_script_uses_the_only_installed_backend(folder: Path, lines: str) -> None:
    (folder / "script.py").write_text(f"{lines}\nimport keras\nprint(keras.config.backend())\n")
    assert process(folder, "script.py").split() == [ONLY]


@pytest.mark.long
def test_a_run_with_keras_on_the_path_without_package_metadata(folder: Path) -> None:
    (folder / "copies").mkdir()
    (folder / "copies" / "keras").symlink_to(Path(keras.__file__).parent)
    path = os.pathsep.join(str(folder / name) for name in ("copies", "hiding"))
    assert str(folder) in process(
        folder, "-c", "import treadle, keras; print(keras)", PYTHONPATH=path
    )
    command(folder, "run", "mine.py", "--directory", "copied", "--quiet", PYTHONPATH=path)
    code = json.loads((folder / "copied" / "run.json").read_text())["code"]
    assert sorted(code) == [f"Tiny.{name}" for name in TINY]
