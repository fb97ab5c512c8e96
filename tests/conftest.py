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
    """Add `--all` and `--accelerator`."""
    parser.addoption("--all", action="store_true", help="run long tests as well")
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


def pytest_terminal_summary(terminalreporter):
    """Print the time of processes that no parent counts: `scripts/test` adds it to its own."""
    from tests.forked import processor_seconds

    if seconds := processor_seconds():
        terminalreporter.write_line(f"forked processes: {seconds:.0f} processor seconds")


@pytest.fixture
def accelerator(pytestconfig):
    """Skip a test that needs an accelerator."""
    if not pytestconfig.option.accelerator:
        pytest.skip("needs an accelerator: run scripts/test --accelerator where there is one")


@pytest.fixture
def assumes_cpu(pytestconfig):
    """Skip a test that would fail on an accelerator, for the reason that its comment gives."""
    if pytestconfig.option.accelerator:
        pytest.skip("assumes a CPU")


def _check_kept(config, items, kept):
    """End if a test that must run by default has another name now, and would not run unnoticed."""
    if any("::" in argument for argument in config.args):
        return
    files, names = {item.nodeid.partition("::")[0] for item in items}, {x.nodeid for x in items}
    gone = sorted(x for x in kept if x.partition("::")[0] in files and x not in names)
    if gone:
        raise pytest.UsageError(f"{selection.KEPT} names tests that are gone: {', '.join(gone)}")


@pytest.hookimpl(tryfirst=True)  # before `-k` deselects some
def pytest_collection_modifyitems(config, items):
    """Deselect long tests.

    Not by `-m` in the configuration: one on the command line would replace it.
    """
    if config.option.all:
        return
    slow, kept = selection.of(os.environ.get("KERAS_BACKEND", ""))
    _check_kept(config, items, kept)
    out = [
        item
        for item in items
        if item.nodeid not in kept and (item.nodeid in slow or item.get_closest_marker("long"))
    ]
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


@pytest.fixture(autouse=True)
def has_no_seed_of_another_test():
    """The order of data is that of a script that sets no seed, until a test sets one."""
    if keras := sys.modules.get("keras"):
        keras.src.backend.common.global_state.set_global_attribute("global_random_seed", None)


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

    An empty file is saved as the plot of a run; `hooks/test_curves.py` tests plots. Files are not
    flushed to the disk, which only a power failure would show; `faults.Disk` simulates it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.hooks.final.save", _save_empty)
        patch.setattr(os, "fsync", lambda file: None)
        yield
