"""Programs on several virtual devices, compared with the same on one device of the process.

JAX must be started with the virtual devices, so this file is a program of its own, which is given
the names of checks and a folder, and prints their results as JSON:

    python on_devices.py FOLDER reference short-batch-3 …
"""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import runs
from cases import CASES, batches_of
from classifier import cross_entropy
from keras import layers
from process_tasks import CLASSES, FEATURES, Accumulating, Reference, rows, source

import treadle
from treadle import data
from treadle.core.randomness import seed_everything
from treadle.errors import TreadleWarning
from treadle.testing.running import Runner

STEPS = 7
Check = Callable[[Path], Any]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def parallel(batch: int, model: int) -> Any:
    """A distribution that splits the hidden layers of `reference`."""
    names = keras.distribution.list_devices()[: batch * model]
    rules = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh((batch, model), ("batch", "model"), names)
    )
    rules[".*hidden.*kernel"] = (None, "model")
    rules[".*hidden.*bias"] = ("model",)
    rules[".*out.*kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="batch")


def use(devices: Any, **settings: Any) -> None:
    """Start from scratch on these devices: their number, or the shape of a mesh."""
    keras.backend.clear_session()
    chosen = parallel(*devices) if isinstance(devices, tuple) else devices
    treadle.setup(seed=0, devices=chosen, **settings)


def trained(
    devices: Any,
    make: Callable[[], Any] = Reference,
    train: Any = (51, 8),
    settings: Any = None,
    hooks: Any = (),
    whole: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return losses, logs and the whole state after two epochs on some devices.

    If `whole`, also with a validation set and predictions, for which more is compiled.
    """
    use(devices, **(settings or {}))
    options = {"window": 8, **options}
    validation = source(333, 64, shuffle=False) if whole else None
    train = source(*train) if isinstance(train, tuple) else train
    with treadle.Loop(
        make(), console=False, hooks=list(hooks), options=treadle.Options(**options)
    ) as loop:
        history = loop.fit(train, validation, epochs=2)
        logged = [name for name in history.names() if "loss" in name or "accuracy" in name]
        found = {name: np.array(history[name]) for name in logged}
        found |= {"step losses": history.steps("loss"), **loop.state.arrays()}
        if whole:
            found["predictions"] = loop.predict(validation)
        if devices != 1:
            assert " 4 devices" in loop.plan, loop.plan
    return found


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference, infinite where whole numbers differ; NaN equals NaN."""
    assert list(found) == list(expected)
    worst = 0.0
    for name, value in expected.items():
        same, other = np.asarray(found[name]), np.asarray(value)
        assert same.shape == other.shape, name
        if other.dtype.kind == "f":
            assert (np.isnan(same) == np.isnan(other)).all(), name
            worst = max(worst, float(np.nanmax(np.abs(same - other), initial=0)))
        elif not (same == other).all():
            return float("inf")
    return worst


def apart(devices: Any = 4, **how: Any) -> float:
    return difference(trained(devices, **how), trained(1, **how))


@check
def reference(_: Path) -> Any:
    return apart(whole=True)


@check
def draws(_: Path) -> Any:
    """Return the operations of one of four devices for a Dropout, by those of one alone."""

    def operations(devices: int) -> float:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("batch",))
        divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        dropped = jax.jit(
            lambda x: keras.random.dropout(x, 0.5, seed=3),
            in_shardings=divided,
            out_shardings=divided,
        )
        costs = dropped.lower(np.ones((64, 128), "float32")).compile().cost_analysis()
        return (costs[0] if isinstance(costs, list) else costs)["flops"]

    return operations(4) / operations(1)


class Noisy(treadle.Task):
    """Trains on noise alone, one row for each row of the batch."""

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((64,)), layers.Dense(64), layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)
        self.seeds = keras.random.SeedGenerator(3)

    def train_step(self, batch: Any) -> Any:
        noise = keras.random.normal((batch[0].shape[0], 64), seed=self.seeds)
        loss = lambda: keras.ops.mean(keras.ops.square(self.model(noise)))  # noqa: E731
        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}


@check
def noise(_: Path) -> Any:
    """Return the operations of one of four devices for a step, by those of one alone."""
    counts, original = list[float](), jax.stages.Lowered.compile

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        program = original(self, *args, **kwargs)
        costs = program.cost_analysis()
        counts.append((costs[0] if isinstance(costs, list) else costs)["flops"])
        return program

    jax.stages.Lowered.compile = counting  # type: ignore[method-assign]
    try:
        found = []
        for devices in (4, 1):
            counts.clear()
            trained(devices, Noisy, (64, 64), fused=False)
            found.append(max(counts))
    finally:
        jax.stages.Lowered.compile = original  # type: ignore[method-assign]
    return found[0] / found[1]


class DividedByHand(Noisy):
    """Draws in `jax.shard_map`, as many numbers as the batch has rows."""

    def train_step(self, batch: Any) -> Any:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("own",))
        rows = jax.sharding.PartitionSpec("own")
        drawn = lambda x: x + jax.random.normal(jax.random.key(0), (64, 1)).mean()  # noqa: E731
        x = jax.shard_map(drawn, mesh=mesh, in_specs=rows, out_specs=rows)(batch[0])
        return super().train_step((x, batch[1]))


@check
def divided_by_hand(_: Path) -> Any:
    if not hasattr(jax, "shard_map"):  # before JAX 0.6
        return True
    return bool(np.isfinite(trained(4, DividedByHand, (64, 64))["step losses"]).all())


@check
def streamed(_: Path) -> Any:
    return apart(data_on_device=False)


@check
def single_calls(_: Path) -> Any:
    return apart(fused=False)


@check
def eager(_: Path) -> Any:
    # The last batch has 5 rows: statistics of 3 would multiply rounding errors by a hundred.
    return apart(execution="eager", train=(21, 8))


@check
def donated(_: Path) -> Any:
    from treadle.backends.jax import windows

    before, windows.MOST_BYTES_TWICE = windows.MOST_BYTES_TWICE, 0
    try:
        return apart(whole=True)
    finally:
        windows.MOST_BYTES_TWICE = before


@check
def skipped_steps(_: Path) -> Any:
    x, y = rows(64)
    x[17] = np.nan
    make = lambda: data.from_arrays(x, y, batch_size=8)  # noqa: E731
    found, expected = (
        trained(n, train=make(), hooks=[treadle.hooks.NonFinite("skip")]) for n in (4, 1)
    )
    assert np.isnan(expected["step losses"]).sum() == 2
    return difference(found, expected)


@check
def loss_scale(_: Path) -> Any:
    half = {"precision": "mixed_float16"}
    try:
        found, expected = (trained(n, settings=half) for n in (4, 1))
    finally:
        keras.config.set_dtype_policy("float32")
    same = ["loss_scale/scale", "loss_scale/finite_steps", "optimizer/iterations"]
    assert all((found[name] == expected[name]).all() for name in same)
    return float(np.abs(found["loss"] - expected["loss"]).max())


@check
def accumulating(_: Path) -> Any:
    return apart(make=Accumulating)


def short_batch(batch: int, count: int) -> Check:
    return lambda _: apart(train=(count, batch))  # whose epochs end with a short batch


CHECKS |= {
    "short-batch-41": short_batch(64, 64 + 41),
    "fewer-rows-than-devices": short_batch(3, 11),
}


def of_case(name: str) -> Check:
    """Seven steps of one of the conformance cases, with batches of eight rows."""

    def on(devices: int) -> dict[str, Any]:
        use(devices)
        trace = Runner(CASES[name].make(), batches_of(name, 1)[0]).run(
            batches_of(name, STEPS), runs.MIXED
        )
        return {**trace.values, **trace.state}

    return lambda _: difference(on(4), on(1))


CHECKS |= {f"case-{name}": of_case(name) for name in CASES}


@check
def model_parallel(_: Path) -> Any:
    expected = trained(1)
    return {str(shape): difference(trained(shape), expected) for shape in ((2, 2), (1, 4), (4, 1))}


@check
def accumulating_in_parts(_: Path) -> Any:
    return apart((2, 2), make=Accumulating)


@check
def layouts_of_slots(_: Path) -> Any:
    """Optimizer slots, averages and sums of gradients are split as their kernel is."""
    use((2, 2))
    task = Accumulating()
    with treadle.Loop(task, console=False) as loop:
        loop.fit(source(48, 8), epochs=1)
        found = {p: list(v.value.sharding.spec) for p, v in loop.state.variables.items()}
    return {path: spec for path, spec in found.items() if "model" in spec}


@check
def windows_of_any_size(_: Path) -> Any:
    """Windows of 1, 3 and 8 steps, and a loop over single steps, on the same devices."""

    def make() -> Any:
        task = Reference()
        task.optimizer.use_ema = False  # `fit` ends with the averages
        return task

    first = trained(4, make, window=8)
    found = {f"window={size}": difference(trained(4, make, window=size), first) for size in (1, 3)}
    use(4)
    with treadle.Loop(make(), console=False) as loop:
        for _epoch in loop.epochs(2):
            for _logs in loop.steps(source(51, 8)):
                pass
        state = loop.state.arrays()
    return {**found, "single steps": difference(state, {p: first[p] for p in state})}


class Interrupted(Exception):
    pass


def run_in(folder: Path, devices: Any, until: int | None) -> dict[str, Any]:
    """Train in a run directory; an error ends the run after some steps."""
    use(devices)

    def stops(loop: Any) -> None:
        if until is not None and loop.progress.step >= until:
            raise Interrupted

    with (
        warnings.catch_warnings(record=True, category=TreadleWarning) as caught,
        treadle.Loop(
            Reference(),
            folder,
            hooks=[treadle.every("5 steps", stops), treadle.hooks.Checkpoint("5 steps")],
            console=False,
        ) as loop,
    ):
        warnings.simplefilter("always", TreadleWarning)
        with suppress(Interrupted):
            loop.fit(source(80, 8), epochs=2)
        losses = loop.history["loss"] if until is None else []
        found = {"losses": np.array(losses), **loop.state.arrays()}
    told = [str(warning.message) for warning in caught]
    return {"found": found, "warnings": [text for text in told if "bit-for-bit" in text]}


@check
def resumed(folder: Path) -> Any:
    """Resume on the same devices, which gives the same bits; and on 2, then 4, then 1."""
    whole = run_in(folder / "whole", 4, None)["found"]
    run_in(folder / "same", 4, 5)
    same = run_in(folder / "same", 4, None)
    run_in(folder / "moved", 2, 5)
    second = run_in(folder / "moved", 4, 15)
    moved = run_in(folder / "moved", 1, None)
    record = json.loads((folder / "same" / "run.json").read_text())
    return {
        "same devices": difference(same["found"], whole),
        "other devices": difference(moved["found"], whole),
        "warnings on the same devices": same["warnings"],
        "warnings on four": second["warnings"],
        "warnings on one": moved["warnings"],
        "devices": record["devices"],
        "plan": record["plan"],
    }


@check
def seeds_made_before(_: Path) -> Any:
    """Keras' generator of unseeded numbers may exist before the distribution."""
    keras.backend.clear_session()
    seed_everything(0)
    keras.random.normal(())
    treadle.setup(devices=4)
    with treadle.Loop(Reference(), console=False) as loop:
        loop.fit(source(16, 8), epochs=1)
        return list(loop.state.variables["random/keras"].value.sharding.spec)


def message_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except treadle.errors.TreadleError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def fit(task: Any) -> None:
    with treadle.Loop(task, console=False) as loop:
        loop.fit(source(16, 8), epochs=1)


def linear() -> Any:
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES, name="last")])
    return treadle.Supervised(model, cross_entropy(), "sgd")


@check
def errors(_: Path) -> Any:
    names, found = keras.distribution.list_devices(), {}
    keras.backend.clear_session()
    found["too many"] = message_of(lambda: treadle.setup(devices=9))
    use(1)
    task = linear()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=names))
    found["made before"] = message_of(lambda: fit(task))
    task = linear()
    fit(task)
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=names[:2]))
    found["made for others"] = message_of(lambda: fit(task))
    keras.distribution.set_distribution(None)
    found["no longer set"] = message_of(lambda: fit(task))
    use((2, 2))
    found["splits nothing"] = message_of(lambda: fit(linear()))
    return found


def main() -> None:
    # Of one check to the next, most programs are the same.
    jax.config.update("jax_compilation_cache_dir", str(Path(sys.argv[1], "programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    results: dict[str, Any] = {}
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1], name)
        folder.mkdir()
        try:
            results[name] = CHECKS[name](folder)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
