"""Where compiled programs are kept, and the switches for it."""

import os
from pathlib import Path

import pytest

import treadle as package
from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401 - a fixture
from treadle.core import process_settings
from treadle.errors import ConfigurationError


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """No variable is set; what a test sets is gone afterwards."""
    monkeypatch.setenv(process_settings.COMPILE_CACHE, "off")
    monkeypatch.delenv(process_settings.COMPILE_CACHE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_the_folder_is_in_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert process_settings.compile_cache_folder() == tmp_path / ".cache" / "treadle"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert process_settings.compile_cache_folder() == tmp_path / ".cache" / "treadle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert process_settings.compile_cache_folder() == tmp_path / "xdg" / "treadle"


def test_a_variable_names_another_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(process_settings.COMPILE_CACHE, "~/programs")
    assert process_settings.compile_cache_folder() == tmp_path / "programs"
    monkeypatch.setenv(process_settings.COMPILE_CACHE, "programs")
    assert process_settings.compile_cache_folder() == Path.cwd() / "programs"


@pytest.mark.parametrize("value", ["off", "0", "False", "no"])
def test_a_variable_turns_it_off(monkeypatch, value):
    monkeypatch.setenv(process_settings.COMPILE_CACHE, value)
    assert process_settings.compile_cache_folder() is None


def test_a_user_without_a_home_directory_keeps_no_programs(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert process_settings.compile_cache_folder() is None


def test_setup_turns_it_off_and_on(monkeypatch, tmp_path):
    package.setup(compile_cache=False)
    assert process_settings.compile_cache_folder() is None
    package.setup()
    assert process_settings.compile_cache_folder() is None
    package.setup(compile_cache=True)
    assert process_settings.compile_cache_folder() is not None
    monkeypatch.setenv(process_settings.COMPILE_CACHE, str(tmp_path))
    package.setup(compile_cache=True)
    assert process_settings.compile_cache_folder() == tmp_path


def test_setup_takes_no_folder():
    with pytest.raises(ConfigurationError) as caught:
        package.setup(compile_cache="/tmp/programs")
    assert str(caught.value) == (
        "compile_cache is True or False, not '/tmp/programs': the environment variable "
        "TREADLE_COMPILE_CACHE names another folder"
    )


def test_a_flag_turns_it_off():
    run_tiny("--steps", "1", "--directory", "d", "--quiet")
    assert process_settings.COMPILE_CACHE not in os.environ
    treadle("resume", "d", "--steps", "2", "--no-compile-cache", "--quiet")
    assert os.environ.pop(process_settings.COMPILE_CACHE) == "off"
    run_tiny("--steps", "1", "--no-compile-cache", "--quiet")
    assert os.environ[process_settings.COMPILE_CACHE] == "off"
