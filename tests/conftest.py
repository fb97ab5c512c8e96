"""Settings of all tests: which of them run by default, and what they need not do each time."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from tests import selection

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)

# PyTorch's threads wait for one another, for long on busy cores: these tensors are tiny. And the
# forks of processes that `treadle launch` starts, which sets both, come from the server of others.
if os.environ.get("KERAS_BACKEND") == "torch":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

os.environ["TREADLE_COMPILE_CACHE"] = "off"  # tests write nothing into the user's cache directory


def pytest_addoption(parser):
    """Add `--all`, `--every-backend` and `--accelerator`."""
    parser.addoption("--all", action="store_true", help="run long tests as well")
    parser.addoption(
        "--every-backend",
        action="store_true",
        help="run tests marked `any_backend` on each backend, not on PyTorch alone",
    )
    parser.addoption(
        "--accelerator",
        action="store_true",
        help="run on an accelerator, with deterministic algorithms; fail if there is none",
    )


def pytest_sessionstart(session):
    """Switch deterministic algorithms on, before anything else imports Keras.

    Without them, most of what these tests compare in every bit differs in rounding.
    """
    if not session.config.option.accelerator:
        return
    os.environ["TREADLE_TESTS_FORK"] = "off"  # a device cannot be used in a fork
    import treadle
    from treadle.backends.base import active

    treadle.setup(deterministic=True)
    if active().computes_on()["devices"] == "cpu":
        pytest.exit(f"--accelerator: no accelerator is visible to {active().name}", returncode=4)


def _skip_by_device(config, item):
    """Skip a test that assumes the other kind of device."""
    needed, assumed = item.get_closest_marker("accelerator"), item.get_closest_marker("cpu_only")
    if assumed is not None and config.option.accelerator:
        item.add_marker(pytest.mark.skip(reason=f"assumes a CPU: {assumed.kwargs['reason']}"))
    if needed is not None and not config.option.accelerator:
        reason = "needs an accelerator: run scripts/test --accelerator where there is one"
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_modifyitems(config, items):
    """Deselect long tests, and tests that need not run on this backend.

    Not by `-m` in the configuration: one on the command line would replace it.
    """
    left_out = set()
    if "faults_long" not in config.option.markexpr:
        left_out.add("faults_long")
    if not config.option.all:
        left_out.add("long")
    backend = os.environ.get("KERAS_BACKEND")
    if backend != "torch" and not config.option.all:
        left_out.add("long_to_compile")
    once = backend != "torch" and not config.option.every_backend

    def is_left_out(item):
        if any(item.get_closest_marker(name) for name in left_out):
            return True
        everywhere = item.get_closest_marker("every_backend")
        return once and not everywhere and item.get_closest_marker("any_backend")

    slow = set() if config.option.all else selection.long(backend or "")
    for item in items:
        _skip_by_device(config, item)
        if item.nodeid in slow:
            item.add_marker("long")
    out = [item for item in items if is_left_out(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


@pytest.fixture(scope="module", autouse=True)
def collects_little():
    """Keep the garbage collector from searching imported modules and caches again and again.

    `keras.utils.clear_session` collects garbage, and most tests call it: late in a run of all
    tests, that would take longer than a short training run.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Print the time of processes that no parent counts: `scripts/test` adds it to its own."""
    from tests.forked import processor_seconds

    if seconds := processor_seconds():
        terminalreporter.write_line(f"forked processes: {seconds:.0f} processor seconds")


@pytest.fixture
def started_at_once(monkeypatch):
    """Processes that Treadle itself starts are forks of one that has imported Keras."""
    from tests.forked import python

    monkeypatch.setattr(sys, "executable", python())


def _save_empty(figure, path):
    from treadle.core.folder import Folder

    with Folder.open(Path(path).parent) as folder:
        folder.write(Path(path).name, [])


@pytest.fixture(scope="session", autouse=True)
def state_of_tests(tmp_path_factory):
    """What commands remember of runs is not kept in the user's state folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_runs():
    """Leave out what takes half of the time of a short run; processes that tests start do it.

    An empty file is saved as the plot of a run; `test_hooks_curves.py` tests plots. Files are not
    flushed to the disk, which only a power failure would show; `faults.Disk` simulates it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.hooks.curves.save", _save_empty)
        patch.setattr(os, "fsync", lambda file: None)
        yield
