"""How fast are calls that are no `fit`: single steps whose loss is read, evaluation, prediction?

Each backend and network has a process of its own, in which all contestants take turns.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from . import BACKENDS, DOCS, in_process, keep, kept, parser_of, write_section

NETWORKS = {
    "mlp": "784-64-64-10, SGD, MNIST",
    "autoencoder": "784-128-16-128-784, Adam, MNIST",
    "cnn": "the recipe `cifar10-cnn`",
    "lstm": "an LSTM of 64 units over the 28 rows of a digit",
}
TRAINED = ("mlp", "autoencoder", "cnn")
CALLS = ("evaluate", "predict")
EXAMPLES, BATCH = 10_000, 100
FEWER = {"cnn": 2_000}  # a turn over all of them would take many seconds
EVERY_STEP = "treadle, every step"
TREADLE = "treadle"
Times = dict[str, list[float]]


def single_steps(arguments: list[str]) -> None:
    """How fast is a loop that reads its loss after every step?

    `for logs in loop.steps(train)` against what people write instead, all of which read the loss of
    each step: a compiled step with a Python loop around it, and `fit` with a callback for each
    batch. Windows (`every="auto"`) and `every="10 steps"` show what reading seldom saves.

        scripts/bench single_steps --backend jax --workload mlp
    """
    parser = parser_of("single_steps", single_steps.__doc__, 11, "single-steps.md")
    parser.add_argument("--workload", choices=TRAINED, action="append", help="only this network")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_steps_measured(chosen.workload[-1], chosen.rounds)))
        return
    results = kept("single_steps")
    print("\n".join(_head("step")))
    for backend in chosen.backend or BACKENDS:
        for workload in chosen.workload or TRAINED:
            options = ("--workload", workload, "--rounds", str(chosen.rounds))
            found = results[f"{workload} {backend}"] = in_process("single_steps", backend, *options)
            print("\n".join(_rows(workload, backend, found, EVERY_STEP)), flush=True)
    if chosen.write:
        keep("single_steps", results)
        write_section(DOCS / "single-steps.md", "bench single_steps --write", steps_page(results))


def evaluation(arguments: list[str]) -> None:
    """How fast are `loop.evaluate` and `loop.predict`?

    Compared with Keras' `model.evaluate` and `model.predict`, and with loops by hand: a compiled
    forward pass, a Python loop over the batches, and one fetch at the end. Compilation is not
    timed.

        scripts/bench evaluation --backend jax --workload mlp
    """
    parser = parser_of("evaluation", evaluation.__doc__, 11, "evaluation.md")
    parser.add_argument("--workload", choices=NETWORKS, action="append", help="only this network")
    parser.add_argument("--call", choices=CALLS, action="append", help="only this call")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        found = {
            call: _evaluation_measured(call, chosen.workload[-1], chosen.rounds)
            for call in chosen.call
        }
        print(json.dumps(found))
        return
    results = kept("evaluation")
    calls = chosen.call or list(CALLS)
    print("\n".join(_head("batch")))
    for backend in chosen.backend or BACKENDS:
        for workload in chosen.workload or NETWORKS:
            options = ["--workload", workload, "--rounds", str(chosen.rounds)]
            options += [word for call in calls for word in ("--call", call)]
            for call, times in in_process("evaluation", backend, *options).items():
                results[f"{call} {workload} {backend}"] = times
                print("\n".join(_rows(workload, backend, times, call=call)), flush=True)
    if chosen.write:
        keep("evaluation", results)
        write_section(DOCS / "evaluation.md", "bench evaluation --write", evaluation_page(results))


def _head(unit: str) -> list[str]:
    return [
        f"| network | backend | contestant | µs a {unit} | its time by Treadle's (quartiles) |",
        "| --- | --- | --- | --- | --- |",
    ]


def _rows(
    workload: str, backend: str, times: Times, base: str = TREADLE, call: str = ""
) -> list[str]:
    from .timing import Spread, by_base

    rows: list[str] = []
    for name, share in by_base(times, base).items():
        shown = f"treadle, `loop.{call}`" if call and name == TREADLE else name
        median = Spread.of(times[name]).median
        rows.append(f"| {workload} | {backend} | {shown} | {median:,.0f} | {share:.2f} |")
    return rows


def steps_page(results: dict[str, Times]) -> list[str]:
    """Return the lines of the section of `docs/single-steps.md`."""
    from .timing import processor

    lines = [f"{processor()}.", "", *_head("step")]
    for key in (f"{w} {b}" for b in BACKENDS for w in TRAINED):
        if key in results:
            lines += _rows(*key.split(), results[key], EVERY_STEP)
    return lines


def evaluation_page(results: dict[str, Times]) -> list[str]:
    """Return the lines of the section of `docs/evaluation.md`: a table for each call."""
    from .timing import processor

    lines = [f"{processor()}."]
    for call in CALLS:
        lines += ["", f"## `loop.{call}`", "", *_head("batch")]
        for backend in BACKENDS:
            for workload in NETWORKS:
                times = results.get(f"{call} {workload} {backend}")
                lines += _rows(workload, backend, times, call=call) if times else []
    return lines


def _autoencoder() -> Any:
    import keras
    from keras import layers

    import treadle

    model = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(16, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(784, activation="sigmoid"),
        ]
    )
    return treadle.Supervised(model, keras.losses.BinaryCrossentropy(), keras.optimizers.Adam(1e-3))


def _steps_measured(workload: str, rounds: int) -> Times:
    """Return microseconds a step by contestant, a value for each turn."""
    from .timing import per_step

    job = _training_job(workload)
    makers: dict[str, Callable[[], Any]] = {
        EVERY_STEP: partial(stepping, job, "1 step"),
        "compiled step by hand": partial(_by_hand, job),
        "fit with a callback for each batch": partial(_fit, job),
        "treadle, every 10 steps": partial(stepping, job, "10 steps"),
        "treadle, windows": partial(stepping, job, "auto"),
    }
    module = _contestants()
    if workload == "mlp" and hasattr(module, "ten_steps"):  # where a call costs most
        makers["ten steps in one call by hand"] = partial(module.ten_steps, job)
    return per_step(makers, rounds)


def _training_job(workload: str) -> Any:
    import keras

    from .workloads import WORKLOADS, Job, Workload
    from .workloads import job as job_of

    if workload == "cnn":
        return job_of("cifar10-cnn")
    steps = {"tensorflow": 400, "jax": 600, "torch": 300}
    count = steps[keras.config.backend()]
    if workload == "mlp":
        return job_of("mlp-sgd", count)
    arrays_of = WORKLOADS["mlp-sgd"].arrays
    rows = arrays_of(count * 100)[0]
    made = Workload(NETWORKS[workload], _autoencoder, arrays_of, steps, 100, metrics=dict)
    return Job(workload, made, count, (rows, rows))


def stepping(
    job: Any, every: str, check: Callable[[Any], None] = lambda loop: None, **arguments: Any
) -> Any:
    """Return the loop that a user of Treadle writes, without a run directory.

    Args:
        job: What to train.
        every: When the body of the loop reads the loss.
        check: Is called with the loop after each epoch.
        arguments: Further arguments of the loop.
    """
    import treadle

    from .contestants import Contestant

    train = treadle.data.from_arrays(*job.arrays, batch_size=job.batch_size)

    def epochs() -> Iterator[dict[str, float]]:
        with treadle.Loop(job.make(), console=False, **arguments) as loop:
            for _ in loop.epochs():
                total = 0.0
                for logs in loop.steps(train, every=every):
                    total += logs["loss"]
                check(loop)
                yield {"loss": total / job.steps}

    rounds = epochs()
    return Contestant(lambda: next(rounds), job.steps)


def _contestants() -> Any:
    """Return the module of loops by hand on this backend."""
    import keras

    return importlib.import_module(f"benchmarks.contestants_{keras.config.backend()}")


def _by_hand(job: Any) -> Any:
    """Return a Python loop around a compiled step; NumPy batches, the loss read each time."""
    from .contestants import Contestant

    step = _contestants().reading_loss(job)

    def epoch() -> dict[str, float]:
        total = 0.0
        for rows in job.order():
            total += step(*(array[rows] for array in job.arrays))
        return {"loss": total / job.steps}

    return Contestant(epoch, job.steps)


def _fit(job: Any) -> Any:
    """Return `fit` with a callback that reads the loss of each batch."""
    import keras

    from .contestants import Fit, compiled

    class Reading(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.total = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.total += logs["loss"]

    settings = {"batch_size": job.batch_size, "callbacks": [Reading()]}
    return Fit(compiled(job), job.arrays, job.steps, **settings)


def _evaluation_measured(call: str, workload: str, rounds: int) -> Times:
    """Return microseconds a batch by contestant, a value for each turn."""
    from .timing import compared

    found = compared(makers(call, job(workload)), rounds)
    results = {name: times.values for name, times in found.items()}
    for name, values in results.items():
        for key, value in values.items():
            expected = results[TREADLE].get(key, value)  # Keras names its metrics otherwise
            if abs(value - expected) > 1e-3 * abs(expected):
                sys.exit(f"{name} found a {key} of {value}, {TREADLE} one of {expected}")
    return {name: times.per_step for name, times in found.items()}


def job(workload: str, examples: int | None = None) -> Any:
    """Return a network with its data; it has the same initial weights each time it is made."""
    from .workloads import WORKLOADS, Job, Workload

    examples = examples or FEWER.get(workload, EXAMPLES)
    if workload == "autoencoder":
        arrays_of = WORKLOADS["mlp-sgd"].arrays
        made = Workload(NETWORKS[workload], _autoencoder, arrays_of, {}, BATCH, metrics=dict)
        rows = arrays_of(examples)[0]
        arrays = rows, rows
    else:
        name = {"mlp": "mlp-sgd", "cnn": "cifar10-cnn", "lstm": "lstm"}[workload]
        made = replace(WORKLOADS[name], batch_size=BATCH)
        arrays = made.arrays(examples)
    return Job(workload, made, examples // BATCH, arrays)


def makers(call: str, job: Any) -> dict[str, Callable[[], Any]]:
    """Return a function for each contestant of evaluation or prediction that makes it."""
    module = _contestants()
    by_hand: dict[str, Any] = module.EVALUATING if call == "evaluate" else module.PREDICTING
    return {
        TREADLE: partial(evaluate if call == "evaluate" else _predict, job),
        f"`model.{call}`": partial(_keras_evaluate if call == "evaluate" else _keras_predict, job),
        **{name: partial(make, job) for name, make in by_hand.items()},
    }


def evaluate(job: Any) -> Any:
    """Return `loop.evaluate` as a contestant."""
    import treadle

    from .contestants import Contestant

    source = treadle.data.from_arrays(*job.arrays, batch_size=job.batch_size, shuffle=False)
    loop = treadle.Loop(job.make(), console=False)
    return Contestant(lambda: loop.evaluate(source), job.steps)


def _predict(job: Any) -> Any:
    import treadle

    from .contestants import Contestant, checked

    source = treadle.data.from_arrays(job.arrays[0], batch_size=job.batch_size, shuffle=False)
    loop = treadle.Loop(job.make(), console=False)
    return Contestant(lambda: checked(loop.predict(source)), job.steps)


def _keras_evaluate(job: Any) -> Any:
    from .contestants import Contestant, compiled

    model = compiled(job)

    def run() -> dict[str, float]:
        return model.evaluate(*job.arrays, batch_size=job.batch_size, verbose=0, return_dict=True)

    return Contestant(run, job.steps)


def _keras_predict(job: Any) -> Any:
    from .contestants import Contestant, checked, compiled

    model = compiled(job)

    def run() -> dict[str, float]:
        return checked(model.predict(job.arrays[0], batch_size=job.batch_size, verbose=0))

    return Contestant(run, job.steps)
