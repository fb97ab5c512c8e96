"""Options of the command, and `treadle.setup` in the file of the task."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401

SETS_UP = "import keras, treadle\nkeras.backend.clear_session()\n"


def setting_up(line, *arguments, code=0):
    Path("sets_up.py").write_text(
        SETS_UP + line + "\nfrom mine import Tiny as Base\n"
        "class Own(Base):\n    def train_step(self, batch):\n"
        "        return super().train_step(batch)\n"
    )
    result = run_tiny("--json", *arguments, task="sets_up.py:Own", code=code)
    if code:
        return result.stderr
    told = json.loads(result.stdout)
    run = json.loads(Path(told["directory"], "run.json").read_text())
    return told["last"], run["configuration"]["seed"], run["seed"]


def test_evaluate_uses_the_settings_of_the_command():
    last, _, _ = setting_up("treadle.setup(seed=1)", "--seed", 3)
    results = json.loads(treadle("evaluate", "runs/Own-1", "--json").stdout)
    assert results["validation/easy"]["loss"] == last["val_easy_loss"]


def test_the_precision_of_the_command_wins_over_that_of_the_file():
    import keras

    try:
        setting_up("treadle.setup(precision='mixed_bfloat16')", "--precision", "float32")
    finally:
        keras.config.set_dtype_policy("float32")
    run = json.loads(Path("runs/Own-1/run.json").read_text())
    assert run["configuration"]["precision"] == "float32"


def test_the_backend_of_the_command_wins_over_that_of_the_file():
    import keras

    backend = keras.config.backend()
    other = "jax" if backend != "jax" else "torch"
    line = f"treadle.setup(backend={other!r})"
    setting_up(line, "--backend", backend)
    assert f"Keras already runs on {backend!r}" in setting_up(line, code=2)


def test_a_seed_that_keras_own_function_sets_over_the_command_is_refused():
    line = "keras.utils.set_random_seed(1)"
    assert setting_up(line)[1:] == (1, 1)
    assert (
        "--seed 3 has no effect, since the file itself sets the seed 1 with Keras' own function: "
        "write treadle.setup(seed=1) there"
    ) in setting_up(line, "--seed", 3, code=2)
    assert setting_up("treadle.setup(seed=1)", "--seed", 2)[1:] == (2, 2)  # nothing is left behind


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_a_command_imports_no_framework_that_it_does_not_use(backend):
    code = """if True:
        import sys
        from treadle.cli import environment
        environment.prepare(environment.Setup(backend=sys.argv[1], quiet=True))
        print(*(name for name in ("tensorflow", "jax", "torch", "matplotlib.pyplot")
                if name in sys.modules))
        import keras, numpy as np
        keras.visualization.plot_image_gallery(np.zeros((2, 4, 4, 3)), path="plot.png", rows=1,
                                               cols=2, value_range=(0, 1))
        import jax, matplotlib.pyplot
    """
    command = [sys.executable, "-c", code, backend]
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [backend]
    assert Path("plot.png").is_file()
