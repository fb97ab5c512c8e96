"""`treadle env` and `treadle --version`: what they print, and that they import no framework."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
from typer.testing import CliRunner

from tests.cli_runs import apart, treadle  # noqa: F401
from treadle import __version__
from treadle.cli import app, environment
from treadle.core import installation, process_settings

ROOT = Path(__file__).parents[2]


def installed(monkeypatch, *names):
    monkeypatch.setattr(
        process_settings,
        "find_spec",
        lambda name: SimpleNamespace(origin=name) if name in names else None,
    )


def facts(*arguments):
    return json.loads(treadle("env", "--json", *arguments).stdout)


def test_env_prints_versions_backend_machine_and_variables(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    monkeypatch.setenv("TREADLE_DATA", "")
    text = treadle("env").stdout
    rows = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert rows["treadle"].startswith(f"{__version__} (")
    assert rows["keras"] == keras.__version__
    assert rows["torch"] == metadata.version("torch")
    assert rows["backend"] == f"{keras.config.backend()}, from KERAS_BACKEND"
    assert rows["XLA_FLAGS"] == "--xla_dump_to=x" and rows["TREADLE_DATA"] == "(empty)"
    assert rows["memory"].endswith(" GiB") and "cores available" in rows["processor"]
    assert "devices" not in rows


def test_json_has_the_same_facts():
    found = facts()
    assert found["treadle"] == __version__
    assert found["backends"]["torch"] == metadata.version("torch")
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gib"] > 0
    assert found["backend"] == {
        "name": keras.config.backend(),
        "origin": "KERAS_BACKEND",
        "error": None,
    }
    assert "matplotlib" in found["extras"]["report"]
    assert {"bench", "dev", "docs", "torch"}.isdisjoint(found["extras"])


def test_devices_are_those_of_the_backend():
    from treadle.backends.base import active

    found = facts("--devices")["devices"]
    assert found == {
        "backend": keras.config.backend(),
        **active().computes_on(),
        "switched_off": [],
        "error": None,
    }


def test_devices_of_an_unusable_backend_are_an_error_in_the_output():
    found = facts("--backend", "numpy")["devices"]
    assert found["error"].startswith("BackendError: unknown backend 'numpy'")
    assert "unknown backend 'numpy'" in treadle("env", "--backend", "numpy").stdout


@pytest.mark.parametrize(
    ("names", "configured", "expected"),
    [
        (("jax", "torch"), "torch", ("torch", "Keras' configuration file", None)),
        (("tensorflow", "jax"), None, ("tensorflow", "the default of Keras", None)),
        (("jax",), None, ("jax", "the only one that is installed", None)),
        ((), "numpy", ("numpy", "Keras' configuration file", "numpy is no backend of Keras")),
    ],
)
def test_origin_of_the_backend(monkeypatch, tmp_path, names, configured, expected):
    installed(monkeypatch, *names)
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(process_settings, "_choice_of_import", None)
    if configured:
        (tmp_path / "keras.json").write_text(json.dumps({"backend": configured}))
    found = facts()["backend"]
    assert (found["name"], found["origin"], found["error"]) == expected


def test_a_choice_of_import_treadle_is_no_variable_of_the_user(monkeypatch):
    installed(monkeypatch, "jax")
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.delenv("KERAS_BACKEND")
    process_settings.choose_only_backend()
    try:
        found = facts()
        assert found["backend"]["origin"] == "the only one that is installed"
        assert "KERAS_BACKEND" not in found["environment"]
        monkeypatch.setenv("KERAS_BACKEND", "torch")
        found = facts()
        assert found["backend"]["origin"] == "KERAS_BACKEND"
        assert found["backend"]["error"] == "torch is not installed"
        assert found["environment"]["KERAS_BACKEND"] == "torch"
    finally:
        process_settings._choice_of_import = None


def test_without_a_backend_env_says_what_to_install(monkeypatch, tmp_path):
    installed(monkeypatch)
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    expected = "none: no backend is installed: pip install jax"
    assert expected in treadle("env").stdout
    assert treadle("--version").stdout == f"treadle {__version__} (keras {keras.__version__})\n"


def test_variables_are_listed_without_secrets_and_home(monkeypatch):
    monkeypatch.setenv("TREADLE_TOKEN", "a-secret")
    monkeypatch.setenv("TREADLE_DATA", os.path.expanduser("~/data"))
    monkeypatch.setenv("MY_OWN", "private")
    for name in ("TF_CLI_CONFIG_FILE", "TF_VAR_region", "TF_LOG_PATH"):  # of Terraform
        monkeypatch.setenv(name, "private")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    monkeypatch.setenv("TF_INTRA_OP_PARALLELISM_THREADS", "2")
    text = treadle("env").stdout
    assert "a-secret" not in text and "private" not in text
    found = facts()["environment"]
    assert found["TREADLE_TOKEN"] == "(hidden)"
    assert found["TREADLE_DATA"] == "~/data"
    assert found["TF_ENABLE_ONEDNN_OPTS"] == "0"
    assert found["TF_INTRA_OP_PARALLELISM_THREADS"] == "2"


def test_secrets_in_other_variables_and_in_addresses_are_hidden(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("SLURM_JWT", "TREADLE_PASS", "NCCL_AUTH"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("TF_ADDRESS", "https://me:a-secret@host/x")
    monkeypatch.setenv("TREADLE_OTHER", "/disk/home/me/x:/home/me2:'/home/me'")
    assert "a-secret" not in treadle("env").stdout
    found = facts()["environment"]
    assert found["SLURM_JWT"] == "(hidden)"
    assert found["TF_ADDRESS"] == "https://(hidden)@host/x"
    assert found["TREADLE_OTHER"] == "/disk/home/me/x:/home/me2:'~'"


def test_errors_of_a_framework_name_no_home(monkeypatch):
    def fail(*_, **__):
        raise ImportError("/home/me/env/lib/libx.so: cannot open")

    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(environment, "prepare", fail)
    found = json.loads(treadle("env", "--devices", "--json").stdout)
    assert found["devices"]["error"] == "ImportError: ~/env/lib/libx.so: cannot open"


def test_a_package_under_another_name_is_found(monkeypatch):
    def version(name):
        if name == "tensorflow":
            raise metadata.PackageNotFoundError
        return "2.21.0"

    installed(monkeypatch, "tensorflow")
    monkeypatch.setattr(installation.metadata, "version", version)
    monkeypatch.setattr(
        installation.metadata, "packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]}
    )
    assert installation.package_version("tensorflow") == "2.21.0 (tensorflow-cpu)"
    installed(monkeypatch)
    assert installation.package_version("tensorflow") is None


def test_version_names_keras_and_the_backend():
    backend = keras.config.backend()
    line = (
        f"treadle {__version__} (keras {keras.__version__}, {backend} {metadata.version(backend)})"
    )
    assert treadle("--version").stdout == f"{line}\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("treadle find", "find-lr"),
        ("treadle run mnist-g", "mnist-gan"),
        ("treadle run --weights", "--weights-from"),
        ("treadle run own.p", ""),  # the shell then offers files
    ],
)
def test_a_shell_completes_commands_recipes_and_options(words, offered):
    result = CliRunner().invoke(
        app,
        prog_name="treadle",
        env={
            "_TREADLE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        },
    )
    assert result.stdout.split() == offered.split()


@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"], ["--version"]])
def test_no_framework_is_imported(arguments):
    code = (
        "import sys; from treadle.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print([m for m in ('keras', 'tensorflow', 'jax', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_has_one_source():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    source = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{__version__}"' in source.read_text()
