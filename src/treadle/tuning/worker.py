"""A process that tries settings, one after another: `python -m treadle.tuning.worker`.

Its first line of input is a list of folders to import from. Each further one is an order, in JSON;
while a trial runs, each is the answer to the report before: whether to end, or null where the value
was not taken. What it writes to its output is `{"report": [at, value]}` and `{"outcome": …}`. What
tasks print goes into `output.txt` beside their runs. It ends where its input does: nobody is there
to take what it would find.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from .orders import OUTPUT, Order, Outcome


def main() -> None:
    """Do what comes, until nothing more does."""
    answers, orders = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a task that reads its input must not take an order
    os.close(nothing)
    lines: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(orders, lines), daemon=True).start()
    sys.path[:0] = [folder for folder in lines.get() if folder not in sys.path]
    while True:
        order = lines.get()
        _redirect(Path(order["directory"]))
        outcome = _tried(order, lines, answers)
        sys.stdout.flush()
        sys.stderr.flush()
        _say(answers, {"outcome": outcome})


def _read(orders: IO[str], lines: "SimpleQueue[Any]") -> None:
    for line in orders:
        lines.put(json.loads(line))
    os._exit(0)  # whoever asked is gone: the directory is to be free for the next one


def _redirect(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    opened = os.open(directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(opened, target)
    os.close(opened)


def _say(answers: IO[str], what: Mapping[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _tried(asked: Mapping[str, Any], lines: "SimpleQueue[Any]", answers: IO[str]) -> Any:
    """Try what is asked for; the first one chooses the backend and imports Keras."""
    from ..core.backend_choice import choose_backend
    from ..core.options import backend_name, overriding, precision_name, run_seed, setup
    from ..errors import Terminated, TreadleError
    from ..recipes import make as make_task
    from ..recipes import resolve

    order = Order(**asked)
    try:
        recipe = resolve(order.task)
        if order.backend is not None:
            choose_backend(order.backend)
    except TreadleError as error:
        kind = type(error).__name__
        return asdict(Outcome("failed", error=f"{kind}: {error}", stops=kind))
    import keras

    from .trial import Subject, tried

    def make() -> Subject:
        keras.backend.clear_session()  # of the trial before; layers are numbered from 1 again
        setup(seed=order.seed or 0, precision=order.precision)
        with overriding(order.seed, order.precision, order.backend):
            made = make_task(recipe, order.settings)
        parameters = recipe.parameters or ()
        defaults = {part.name: part.default for part in parameters if part.has_default}
        configuration = {
            "recipe": recipe.source,
            "settings": {**defaults, **order.settings},
            "seed": run_seed(),
            "backend": backend_name(),
            "precision": precision_name(),
            "execution": "auto",
            "data_dir": order.data_dir,
        }
        return Subject(made, configuration=configuration)

    def report(at: int, value: float) -> bool:
        _say(answers, {"report": [at, value]})
        answer = lines.get()
        if answer is None:  # nobody took the value: it is to be told again, by who goes on
            raise Terminated
        return answer

    return asdict(tried(order, make, report))


if __name__ == "__main__":
    main()
