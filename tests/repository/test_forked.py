"""Processes that start at once behave as those of the interpreter itself."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import python
from tests.waiting import WATCHDOG, until

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.path[0], __name__)",
    "directory and variables": (
        "import os; os.umask(os.umask(0o777) + 0); print(os.getcwd(), os.environ['FAULT'])\n"
        "print(sorted(n for n in os.environ if 'TREADLE' in n))"
    ),
    "standard input": "print(input() + '!'); print(input())",
    "streams": (
        "import os, sys\nprint([os.isatty(n) for n in range(3)], sys.stdout.encoding)\n"
        "print(sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stderr.errors)"
    ),
    "exit code": "raise SystemExit(7)",
    "exit message": "import sys; sys.exit('it failed: ä')",
    "exception": (
        "def inner():\n    raise ValueError('planted')\ntry:\n    1 / 0\nfinally:\n    inner()"
    ),
    "interrupt": "import signal; signal.raise_signal(signal.SIGINT)",
    "killed": "import os; print('lost'); os.kill(os.getpid(), 9)",
    "terminated": "import os; print('shown', flush=True); os.kill(os.getpid(), 15)",
    "aborted": "import os; os.abort()",
    "left at once": "import os; print('lost'); os._exit(5)",
    "end": (
        "import atexit, threading, time\natexit.register(print, 'atexit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
    ),
    "exception in a thread": (
        "import threading\nthread = threading.Thread(target=lambda: 1 / 0, name='own')\n"
        "thread.start(); thread.join(); print('goes on')"
    ),
    "processes": (
        "import subprocess, sys\n"
        "print(subprocess.check_output([sys.executable, '-c', 'print(3)']), flush=True)\n"
        "subprocess.run(['echo', 'inherited'])"
    ),
    "forks": (
        "import os\nif os.fork():\n    print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "else:\n    os._exit(3)"
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __name__, __spec__.name)\nraise ValueError(3)\n"
    )
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(sys.argv, sys.path[0], __file__, __name__, __spec__)\n"
        "import package\n"
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    a: 'int' = 1\nprint(A())\n"
        "undefined\n"
    )
    return tmp_path


def outcome(executable: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [executable, *arguments],
        cwd=folder,
        env={**os.environ, "FAULT": "own"},
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *[pytest.param(("-c", code, "-x", "b"), id=name) for name, code in PROGRAMS.items()],
        pytest.param(("-m", "package", "-x"), id="module"),
        pytest.param(("script.py", "-x"), id="script"),
    ],
)
def test_a_program_behaves_the_same(folder: Path, arguments: tuple[str, ...]) -> None:
    expected = outcome(sys.executable, folder, *arguments)
    assert outcome(python(), folder, *arguments) == expected


def test_warnings_are_filtered_by_the_options_of_each_process(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    code = """
import warnings
for kind in (UserWarning, DeprecationWarning):
    try:
        warnings.warn("planted", kind, stacklevel=1)
        warnings.warn("of numpy", kind, stacklevel=1)
    except Warning as error:
        print("raised", type(error).__name__, error)
"""
    for variable in ("", "ignore::UserWarning", "error,ignore:planted"):
        monkeypatch.setenv("PYTHONWARNINGS", variable)
        for options in ([], ["-W", "error"], ["-W", "always", "-W", "error:of numpy:UserWarning"]):
            arguments = (*options, "-c", code)
            expected = outcome(sys.executable, folder, *arguments)
            assert outcome(python(), folder, *arguments) == expected, (variable, options)


def test_keras_is_there_and_random_numbers_are_fresh(folder: Path) -> None:
    code = "import sys; print('keras' in sys.modules); import numpy; print(numpy.random.rand())"
    (code1, first, _), (code2, second, _) = (outcome(python(), folder, "-c", code) for _ in "ab")
    assert (code1, code2) == (0, 0)
    assert first.splitlines()[0] == second.splitlines()[0] == "True"
    assert first != second


def waiting(folder: Path, code: str) -> tuple["subprocess.Popen[str]", int]:
    """Start a program that prints its process, and waits."""
    # Not one long sleep: a signal just before it would be handled after it.
    sleep = "for _ in range(1000): time.sleep(1)"
    code = f"import os, signal, time\n{code}\nprint(os.getpid(), flush=True)\n{sleep}"
    process = subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_signals_are_passed_on(folder: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), exit(143)))"
    process, _ = waiting(folder, code)
    process.terminate()
    assert process.communicate(timeout=WATCHDOG)[0] == "saved\n"
    assert process.returncode == 143


def test_a_killed_process_is_gone_with_what_it_ran(folder: Path) -> None:
    process, inner = waiting(folder, "")
    process.kill()
    process.communicate(timeout=WATCHDOG)
    assert process.returncode == -signal.SIGKILL
    until(lambda: not exists(inner), "the end of the forked process")


@pytest.mark.long
@pytest.mark.parametrize("variables", [{"PYTHONHASHSEED": "5"}, {"OMP_NUM_THREADS": "2"}])
def test_variables_of_the_import_have_a_server_of_their_own(
    monkeypatch: pytest.MonkeyPatch, folder: Path, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "import torch; print(hash('a') if HASH else torch.get_num_threads())"
    code = f"HASH = {'PYTHONHASHSEED' in variables}\n{code}"
    assert outcome(python(), folder, "-c", code) == outcome(sys.executable, folder, "-c", code)
