"""Worker process that runs trials one after another: `python -m treadle.tuning.worker`.

The protocol is one JSON value per line. The first input line is a list of folders to import from.
Each further line is an order; while a trial runs, each is the answer to the last report: whether to
end the trial, or null if the main process is shutting down and did not record the value. Output
lines are `{"report": [at, value]}` and `{"outcome": …}`. What tasks print goes to `output.txt` in
their run directory. The process exits when its input ends, because the main process is gone.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from .orders import OUTPUT, Order, Outcome


def main() -> None:
    """Run the trials of the orders received on standard input, until it ends."""
    answers, orders = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a task that reads standard input must not consume an order
    os.close(nothing)
    lines: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(orders, lines), daemon=True).start()
    sys.path[:0] = [folder for folder in lines.get() if folder not in sys.path]
    while True:
        order = lines.get()
        _redirect(Path(order["directory"]))
        outcome = _run(order, lines, answers)
        sys.stdout.flush()
        sys.stderr.flush()
        _send(answers, {"outcome": outcome})


def _read(orders: IO[str], lines: "SimpleQueue[Any]") -> None:
    for line in orders:
        lines.put(json.loads(line))
    os._exit(0)  # the main process is gone: release the directory for the next search


def _redirect(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    opened = os.open(directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(opened, target)
    os.close(opened)


def _send(answers: IO[str], message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _run(fields: Mapping[str, Any], lines: "SimpleQueue[Any]", answers: IO[str]) -> Any:
    """Run the trial of an order; the first trial chooses the backend and imports Keras."""
    from ..core.process_settings import choose_backend
    from ..core.trust import remember
    from ..distribute.setup import overriding, setup
    from ..errors import DirectoryError, Terminated, TreadleError
    from ..recipes import make as make_task
    from ..recipes import resolve

    order = Order(**fields)
    try:
        recipe = resolve(order.task)
        if order.backend is not None:
            choose_backend(order.backend)
    except TreadleError as error:
        kind = type(error).__name__
        return asdict(Outcome("failed", error=f"{kind}: {error}", stops=kind))
    import keras

    from .trial import TrialTask, tried

    def make() -> TrialTask:
        keras.backend.clear_session()  # drop the previous trial; layers are numbered from 1 again
        setup(seed=order.seed or 0, precision=order.precision)
        with overriding(order.seed, order.precision, order.backend):
            made = make_task(recipe, order.settings)
        parameters = recipe.parameters or ()
        defaults = {part.name: part.default for part in parameters if part.has_default}
        settings = {**defaults, **order.settings}
        configuration = recipe.configuration(settings, "auto", order.data_dir)
        if order.directory is not None:
            with suppress(DirectoryError):  # `treadle evaluate` will ask for --trust
                remember(Path(order.directory), recipe.source, order.data_dir)
        return TrialTask(made, configuration=configuration)

    def report(at: int, value: float) -> bool:
        _send(answers, {"report": [at, value]})
        answer = lines.get()
        if answer is None:  # the value was not recorded: the resumed trial reports it again
            raise Terminated
        return answer

    return asdict(tried(order, make, report))


if __name__ == "__main__":
    main()
