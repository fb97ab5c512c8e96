"""The backend of a command: which one is chosen, and which is missing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401
from treadle.cli import environment
from treadle.core import process_settings
from treadle.errors import BackendError


def choose(monkeypatch, installed, configured=None, backend=None, only=None):
    monkeypatch.setattr(
        process_settings,
        "find_spec",
        lambda name: SimpleNamespace(origin=name) if name in installed else None,
    )
    home = Path("home")
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("KERAS_HOME", str(home))
    if configured is not None:
        (home / "keras.json").write_text(configured)
    return environment.choose(backend, only)


EVERY = ("tensorflow", "jax", "torch")


def test_the_option_wins_over_the_variable(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert choose(monkeypatch, EVERY, backend="torch") == "torch"


def test_the_variable_wins_over_the_configuration(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert choose(monkeypatch, EVERY, '{"backend": "torch"}') == "jax"


@pytest.mark.parametrize(
    ("configured", "backend"),
    [(None, "tensorflow"), ('{"backend": "torch"}', "torch"), ("{", "tensorflow")],
)
def test_then_comes_keras_own_configuration(monkeypatch, configured, backend):
    monkeypatch.delenv("KERAS_BACKEND")
    assert choose(monkeypatch, EVERY, configured) == backend


@pytest.mark.parametrize("configured", [None, '{"backend": "jax"}'])
def test_the_only_installed_backend_is_chosen(monkeypatch, configured):
    monkeypatch.delenv("KERAS_BACKEND")
    assert choose(monkeypatch, ("torch",), configured) == "torch"


def test_several_backends_without_the_configured_one_are_named(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    with pytest.raises(BackendError) as caught:
        choose(monkeypatch, ("jax", "torch"))
    assert str(caught.value) == (
        "Keras is configured for 'tensorflow', which is not installed; installed are jax and "
        "torch. Choose one: set KERAS_BACKEND=jax, call treadle.setup(backend='jax') before "
        "importing keras, or pass --backend jax to the treadle command"
    )


def test_no_backend_says_what_to_install(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    with pytest.raises(BackendError) as caught:
        choose(monkeypatch, ())
    assert str(caught.value) == (
        "no backend is installed: pip install jax, or tensorflow, or torch"
    )


def test_a_task_s_only_backend_is_chosen_unless_another_was_asked_for(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(BackendError, match="KERAS_BACKEND is jax: use --backend tensorflow"):
        choose(monkeypatch, EVERY, only="tensorflow")
    monkeypatch.delenv("KERAS_BACKEND")
    assert choose(monkeypatch, EVERY, only="tensorflow") == "tensorflow"
    with pytest.raises(BackendError) as caught:
        choose(monkeypatch, ("jax",), only="tensorflow")
    assert str(caught.value) == (
        "this task runs on tensorflow only, which is not installed: pip install "
        "tensorflow (installed: jax)"
    )


def test_a_folder_of_a_backend_s_name_is_no_backend(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_settings, "BACKENDS", ("not_a_real_backend",))
    (tmp_path / "not_a_real_backend").mkdir()
    assert process_settings.installed_backends() == ()


def test_run_uses_the_backend_of_the_run_in_the_directory(monkeypatch):
    run_tiny("--quiet", "--directory", "here")
    monkeypatch.delenv("KERAS_BACKEND")
    recorded = json.loads(Path("here/run.json").read_text())["backend"]
    other = next(name for name in EVERY if name != recorded)
    Path("home").mkdir()
    Path("home/keras.json").write_text(json.dumps({"backend": other}))
    monkeypatch.setenv("KERAS_HOME", "home")
    assert json.loads(run_tiny("--directory", "here", "--json").stdout)["finished_before"]


def test_a_run_whose_backend_is_not_installed_is_named(monkeypatch):
    run_tiny("--quiet", "--directory", "here")
    monkeypatch.setattr(process_settings, "find_spec", lambda name: None)
    for command in (["evaluate"], ["resume"], ["replay", "--step", 1]):
        message = treadle(*command, "here", code=2).stderr
        assert "here holds a run on" in message and "is not installed: pip install" in message
