"""Recipes on 2 and 4 virtual devices, compared with one: `scripts/devices`.

Prints a table of the largest differences over all steps' values and all variables at the end. The
last row of a recipe shows how far one device differs from itself if all weights are changed by
1e-7, which is their rounding: what grows like this cannot agree for long.
"""

import argparse
from typing import Any

import keras
import numpy as np

import treadle
from treadle import recipes
from treadle.recipes import resolve

# The recipe, and settings that make it small.
SMALL = {
    "digits": (),
    "custom-gradients": (),
    "custom-optimizer": (),
    "vae": ("units=16", "batch_size=48"),
    "mnist-gan": (),
    "wgan-gp": ("batch_size=20", "critic_steps=2"),
    "maml": ("tasks=4",),
    "self-supervised": ("features=16", "projection_size=8", "batch_size=20"),
    "distillation": ("teacher_steps=2", "units=8", "batch_size=48"),
    "char-lm": ("width=16", "depth=1", "heads=2", "context_length=16", "batch_size=4"),
    "tabular": ("units=8",),
}


def trained(
    name: str, devices: int, steps: int, change: float = 0.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of every step, and every variable at the end; weights may start changed."""
    keras.backend.clear_session()
    treadle.setup(seed=0, devices=devices)
    recipe = resolve(name)
    made = recipes.make(recipe, recipe.settings(SMALL.get(name, ())))
    with treadle.Loop(made.task, console=False) as loop:
        train = made.datasets().train
        loop.prepare(train)
        for variable in loop.state.variables.values():
            if variable.trainable:
                variable.assign(variable.value * (1 + change))
        history = loop.fit(train, steps=steps)
        values = {key: history.steps(key) for key in history.step_names}
        return values, loop.state.arrays()


def difference(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest difference of floats, and its name; infinite if whole numbers differ.

    That of an array with entries above 1 is relative to its largest one.
    """
    worst, where = 0.0, ""
    for name, value in expected.items():
        a, b = np.asarray(found[name]), np.asarray(value)
        if b.dtype.kind == "f":
            size = max(1.0, float(np.max(np.abs(b), initial=0)))
            apart = float(np.max(np.abs(a - b), initial=0)) / size
        else:
            apart = 0.0 if (a == b).all() else float("inf")
        if not apart <= worst:
            worst, where = apart, name
    return worst, where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="recipes; default: those listed in this file")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    print("| recipe | devices | values of steps | variables | largest in |")
    print("| --- | --- | --- | --- | --- |")
    for name in given.names or SMALL:
        values, state = trained(name, 1, given.steps)
        for devices, change in ((2, 0.0), (4, 0.0), (1, 1e-7)):
            other = trained(name, devices, given.steps, change)
            (steps, _), (ends, where) = difference(other[0], values), difference(other[1], state)
            what = "1, changed by 1e-7" if change else str(devices)
            print(f"| {name} | {what} | {steps:.1e} | {ends:.1e} | {where} |", flush=True)


if __name__ == "__main__":
    main()
