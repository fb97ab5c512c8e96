"""`treadle export`: which weights it writes, where, and what is wrong with the arguments."""

import json
from pathlib import Path

import pytest

from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401

# The format keras is the same on every backend; tests/conformance/test_export.py has the others.


def export(*arguments, code=0):
    return treadle("export", *arguments, code=code)


def kernel(path):
    import keras

    model = keras.saving.load_model(path)
    return keras.ops.convert_to_numpy(model.weights[0]).tolist()


def test_the_weights_of_a_run_are_written_and_compared():
    run_tiny("--quiet", "--directory", "here")
    printed = export("here", "--format", "keras").stdout
    assert "here/Tiny-predict.keras: Keras model, " in printed
    assert "  takes inputs: float32 (batch, 2)\n  returns outputs: float32 (batch, 1)" in printed
    assert "compared with predict in Keras 3" in printed
    assert "(tolerance 1e-04)" in printed
    again = export("here", "--format", "keras", code=2).stderr
    path = "here/Tiny-predict.keras"
    assert f"{path} exists: choose another path, or replace it with overwrite=True" in again
    found = json.loads(export("here", "--output", path, "--force", "--json").stdout)
    assert found["format"] == "keras"
    assert found["difference"] <= found["tolerance"]
    export("here", "--checkpoint", "newest", "--output", "newest.keras")
    export("here", "--checkpoint", "0", "--output", "first.keras")
    assert kernel("newest.keras") == kernel(path)
    assert kernel("first.keras") != kernel(path)
    from treadle import load_run

    assert load_run("here").models == ("model",)  # the exported file is none of the task


def test_an_unfinished_run_is_exported_with_its_newest_checkpoint():
    run_tiny("--set", "fails=late", "--directory", "here", code=1)
    result = export("here", "--output", "new/tiny.keras")
    assert "here holds a run that did not finish" in result.stderr
    assert "exporting its weights after step 0" in result.stderr
    assert Path("new/tiny.keras").is_file()


def test_what_cannot_be_exported_is_said_first():
    run_tiny("--quiet", "--directory", "here")
    cases = {
        "format='onix': there is no such format. Did you mean 'onnx'?": ["--format", "onix"],
        "an export needs a format: write format='keras' (--format), or another of keras, sav": [],
        "the format litert cannot be written on the backend torch: Keras writes LiteRT on": [
            *("--format", "litert")
        ],
        "the format torch cannot be written on the backend jax: a program of torch.export": [
            *("--format", "torch", "--backend", "jax")
        ],
        "no optimizer of Tiny has averaged weights": ["--format", "keras", "--averages"],
        "--checkpoint last: expected newest, best or a step": [
            *("--format", "keras", "--checkpoint", "last")
        ],
        "--checkpoint 3: here has no such valid checkpoint. It has checkpoints of the steps: 0": [
            *("--format", "keras", "--checkpoint", "3")
        ],
    }
    for message, arguments in cases.items():
        assert message in " ".join(export("here", *arguments, code=2).stderr.split())
    assert "holds no run" in export("nowhere", "--format", "keras", code=2).stderr
    assert not list(Path("here").glob("*Tiny*"))


def test_further_files_replace_no_file_of_something_else(tmp_path):
    from treadle.errors import ConfigurationError
    from treadle.exporting.formats import install

    def write():
        folder = tmp_path / "new"
        folder.mkdir(exist_ok=True)
        (folder / "a.onnx").write_text("graph")
        (folder / "a.onnx.data").write_text("weights")
        install(folder / "a.onnx", tmp_path / "a.onnx")

    other = tmp_path / "a.onnx.data"
    other.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"a.onnx.data exists, and the exported file"):
        write()
    assert other.read_text() == "mine" and not (tmp_path / "a.onnx").exists()
    other.unlink()
    write()
    write()  # an earlier export is replaced; check_free has allowed it
    assert other.read_text() == "weights"
