"""Runs scripts and commands in forks of one process that has imported Keras with PyTorch.

Importing takes most of the time of a short script. PyTorch has nothing that a fork would break: no
thread of its own as long as it computes with one.

Usage: python forked.py, with a line of JSON on standard input for each program: its folder and its
arguments, of which the first is a script or `treadle`. It answers with a line of JSON: the exit
code, and what the program wrote to its two outputs.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings

LIMIT = 240  # seconds that a program may take


class Forks:
    """The process that forks; it starts with the first program.

    Args:
        options: Options of Python, such as `-W error`.
        environment: Environment variables, which must choose PyTorch and one thread.
    """

    def __init__(self, options, environment):
        self._command = [sys.executable, *options, __file__]
        self._environment = environment
        self._process = None

    def run(self, folder, arguments):
        """Run a program in a folder; return its exit code and its two outputs."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,  # so that a program that hangs is killed with it
            )
        timer = threading.Timer(LIMIT, os.killpg, [self._process.pid, signal.SIGKILL])
        timer.start()
        try:
            self._process.stdin.write(json.dumps([str(folder), arguments]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            timer.cancel()
        assert answer, (
            f"{arguments[0]} did not end within {LIMIT} s, or ended the process that forks"
        )
        return json.loads(answer)

    def close(self):
        """End the process."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


def serve():
    """Answer to requests until standard input ends."""
    import keras  # noqa: F401

    import treadle
    from treadle.cli import main

    for name in treadle.__all__:  # each is imported on its first use
        getattr(treadle, name)
    for line in sys.stdin:
        folder, arguments = json.loads(line)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            with warnings.catch_warnings():
                # Python warns of forks in a process with threads: those of NumPy, which allow it.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.chdir(folder)
                sys.argv, sys.path[0] = arguments, folder
                if arguments[0] == "treadle":
                    main()
                else:
                    runpy.run_path(arguments[0], run_name="__main__")
                sys.exit()  # as a program ends: with what was registered for it
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
        print(json.dumps([code, *texts]), flush=True)


if __name__ == "__main__":
    serve()
