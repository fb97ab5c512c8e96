"""Programs on two workers, compared with one: `scripts/devices agreement`.

Every program trains for two epochs of a few batches and validates after each: in one process, in
two processes, and on JAX also on two virtual devices. The table has the largest differences in the
values of all steps, the logs of all epochs with validation, and all variables at the end. That of
an array with entries above 1 is relative to its largest one.
"""

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Settings that make recipes small; a short batch at the end of an epoch where the data allow it.
SMALL: dict[str, tuple[str, ...]] = {
    "actor-critic": ("environments=4", "rollout_steps=8"),
    "adversarial-training": ("units=8", "attack_steps=2", "batch_size=20"),
    "char-lm": ("width=16", "depth=1", "heads=2", "context_length=16", "batch_size=5"),
    "distillation": ("teacher_steps=2", "units=8", "batch_size=47"),
    "dqn": ("epsilon_decay_steps=10", "environments=2"),
    "maml": ("tasks=4",),
    "reinforce": ("episodes=2",),
    "self-supervised": ("features=16", "projection_size=8", "batch_size=20"),
    "tabular": ("units=8",),
    "teacher-forcing": ("units=8", "batch_size=9"),
    "vae": ("units=16", "batch_size=47"),
    "wgan-gp": ("batch_size=20", "critic_steps=2"),
}
BATCHES, EPOCHS = 4, 2
ONE, PROCESSES, VIRTUAL = "one", "two processes", "two virtual devices"
GROUPS = ("steps", "logs", "state")
Results = dict[str, Any]


def of_task(make: Callable[[], Any], train: Any, validation: Any) -> Results:
    """The values of every step, the logs of every epoch, and all variables at the end."""
    import treadle

    with treadle.Loop(make(), console=False, options=treadle.Options(window=4)) as loop:
        history = loop.fit(train, validation, epochs=EPOCHS)
        return {
            **{f"steps/{name}": history.steps(name) for name in history.step_names},
            **{
                f"logs/{name}": history[name]
                for name in history.names()
                if _is_number(history[name])
            },
            **{f"state/{path}": value for path, value in loop.state.arrays().items()},
        }


def _is_number(values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def of_recipe(name: str) -> Results:
    """Train a recipe on the first batches of each epoch."""
    from treadle import data, recipes
    from treadle.recipes import resolve

    recipe = resolve(name)
    made = recipes.make(recipe, recipe.settings(SMALL.get(name, ())))
    found = made.datasets()
    validation = found.validation
    if validation is not None:
        validation = data.limited(validation, BATCHES)
    return of_task(lambda: made.task, data.limited(found.train, BATCHES), validation)


def programs() -> dict[str, Callable[[], Results]]:
    """All programs by name."""
    from treadle.recipes import find

    from . import agreement_tasks as tasks

    own = {
        "reference": lambda: of_task(tasks.Reference, tasks.rows(51), tasks.rows(333)),
        "accumulator": lambda: of_task(tasks.Accumulating, tasks.rows(51), tasks.rows(333)),
        "token-weighted": lambda: of_task(tasks.Tokens, tasks.texts(51), None),
    }
    import keras

    backend = keras.config.backend()
    recipes = [n for n, recipe in find().items() if recipe.backend in (None, backend)]
    return {**own, **{name: lambda name=name: of_recipe(name) for name in recipes}}


def member(folder: Path, names: list[str]) -> None:
    """Train programs in this process, or together with others; process 0 writes the results."""
    import treadle

    treadle.setup(seed=0, devices=int(os.environ.get("DEVICES", "0")) or None)
    import keras
    import numpy as np

    from treadle.core.processes import is_chief, process_group

    distribution = keras.distribution.distribution()
    vars(process_group())["fail"] = lambda error: None  # programs that are refused end no process
    known = programs()
    for name in names or known:
        keras.backend.clear_session()
        if distribution is not None:
            keras.distribution.set_distribution(distribution)
        treadle.setup(seed=0)
        try:
            found = known[name]()
        except Exception as error:
            traceback.print_exc()
            if is_chief():
                (folder / f"{name}.txt").write_text(f"{type(error).__name__}: {error}")
            continue
        if is_chief():
            arrays = {str(i): np.asarray(value) for i, value in enumerate(found.values())}
            np.savez(folder / f"{name}.npz", names=list(found), **arrays)


def start(how: str, backend: str, names: list[str], folder: Path) -> None:
    """Train programs one way, and wait."""
    launch = ["-m", "treadle", "launch", "--workers", "2", "--"] if how == PROCESSES else []
    script = [str(Path(__file__).with_name("agreement_member.py")), str(folder), *names]
    virtual = {"DEVICES": "2", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        **(virtual if how == VIRTUAL else {}),
    }
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            [sys.executable, *launch, *script], env=environment, stdout=output, stderr=output
        )


def results(folder: Path, name: str) -> Results | str:
    """The results of a program, or why there are none."""
    import numpy as np

    path = folder / f"{name}.npz"
    if not path.exists():
        why = folder / f"{name}.txt"
        return why.read_text() if why.exists() else "did not end; see output.txt"
    with np.load(path, allow_pickle=False) as found:
        return {key: found[str(i)] for i, key in enumerate(found["names"].tolist())}


def difference(found: Results, expected: Results, group: str) -> tuple[float, str]:
    """The largest difference in a group of results, and where it is."""
    import numpy as np

    worst, where = 0.0, ""
    for name, value in expected.items():
        if not name.startswith(f"{group}/") or name.endswith("/seconds"):
            continue
        if name not in found or np.shape(found[name]) != np.shape(value):
            return float("inf"), name
        a, b = np.asarray(found[name]), np.asarray(value)
        if b.dtype.kind == "f":
            same_nan = np.isnan(a) == np.isnan(b)
            size = max(1.0, float(np.nanmax(np.abs(b), initial=0)))
            apart = float(np.nanmax(np.abs(a - b), initial=0)) / size if same_nan.all() else np.inf
        else:
            apart = 0.0 if (a == b).all() else float("inf")
        if apart > worst:
            worst, where = apart, name
    return worst, where


def table(backend: str, names: list[str], folder: Path) -> None:
    """Train in all ways, and print the rows of the table."""
    ways = [ONE, PROCESSES, *([VIRTUAL] if backend == "jax" else [])]
    for how in ways:
        (folder / how).mkdir()
        start(how, backend, names, folder / how)
    ended = sorted({p.stem for p in (folder / ONE).iterdir()} - {"output"})
    for name in names or ended:
        expected = results(folder / ONE, name)
        for how in ways[1:]:
            found = results(folder / how, name)
            row = [name, f"{backend}, {how}"]
            if isinstance(expected, str) or isinstance(found, str):
                why = expected if isinstance(expected, str) else found
                print(
                    f"| {' | '.join([*row, '', '', ''])} | {str(why).splitlines()[0]} |", flush=True
                )
                continue
            worst = [difference(found, expected, group) for group in GROUPS]
            numbers = [f"{apart:.1e}" for apart, _ in worst]
            _, where = max(worst)
            print(f"| {' | '.join([*row, *numbers])} | {where} |", flush=True)


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="scripts/devices agreement", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs; default: all")
    parser.add_argument("--backend", choices=["torch", "jax"], action="append")
    parser.add_argument("--keep", type=Path, help="a folder for results and output")
    chosen = parser.parse_args(arguments)
    print("| program | trained on | steps | logs, validation | variables | largest in |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with TemporaryDirectory() as temporary:
        for backend in chosen.backend or ["torch", "jax"]:
            folder = (chosen.keep or Path(temporary)) / backend
            folder.mkdir(parents=True)
            table(backend, chosen.names, folder)
