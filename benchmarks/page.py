"""Tables of what was measured, and docs/benchmarks.md."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .musts import checks, odd_losses
from .timing import Spread, Times, ratio

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
Results = Mapping[str, Any]
BACKENDS = ("tensorflow", "jax", "torch")
WORKLOADS = (
    *("mlp-sgd", "mlp-adam", "bn-dropout", "cifar10-cnn"),
    *("gan", "transformer", "lstm", "streaming"),
)
TABLES = ("speed", "precision", "hooks", "growth", "memory", "startup")
# Whatever else runs may use this share of all processors.
QUIET = 0.05


def ordered(kept: Results) -> dict[str, Any]:
    """Return results in the order of the page."""
    words = (*TABLES, *WORKLOADS, *BACKENDS)

    def place(key: str) -> list[int]:
        return [words.index(word) if word in words else len(words) for word in key.split()]

    return {key: kept[key] for key in sorted(kept, key=place)}


def write(kept: Results, newest_keras: str) -> None:
    """Write the page from all results that were kept."""
    kept = ordered(kept)
    lines = [*_head(kept, newest_keras), *must_show(kept), *_why(), *_how()]
    for key, result in kept.items():
        lines += section(key, result)
    PAGE.write_text("\n".join(lines))


def _head(kept: Results, newest_keras: str) -> list[str]:
    machine = next(iter(kept.values()))["machine"]
    versions: dict[str, str] = {}
    for key, result in kept.items():
        if " keras " not in key:
            versions |= result["versions"]
    told = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    newest = ""
    if newest_keras == versions["keras"]:
        newest = f" Keras {newest_keras} is the newest that pip installs."
    elif newest_keras:
        newest = (
            f" Of Keras, pip would install {newest_keras}: `--keras {newest_keras}` measures it."
        )
    return [
        "# Benchmarks",
        "",
        "Speed of Treadle with all its default hooks, compared with every other way to run the "
        "same steps. Written by\n`scripts/bench speed --write`, which takes about 35 minutes; "
        "`--quick` takes 3, `--workload mlp-sgd --backend jax`\nmeasures a part, `--page` "
        "rewrites this page from `benchmarks/results.json`.",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; "
        f"Python {platform.python_version()}, {told}.{newest}",
        "",
    ]


def _why() -> list[str]:
    return [
        "## Why some of it is not met",
        "",
        "- **Ceilings of the small networks.** Their steps take a tenth of a millisecond, or "
        "less. Compared with a bare loop,\n  Treadle additionally keeps and writes every step's "
        "values, checks before each window whether a constant of the task\n  has changed, "
        "collects the state at each epoch, and shuffles. For `bn-dropout` on JAX a profile "
        "attributed about a\n  third of the difference to this; the rest is in the compiled "
        "loop, and not explained. The 4 to 6 % of the LSTM and of\n  ten times the parameters "
        "on JAX are not explained either.",
        "- **`fit` on JAX.** The bare `lax.scan` is itself less than 1.9 times as fast as `fit` "
        "here (see its table): the\n  arithmetic is the same, and `fit` on JAX has less "
        "overhead than on other backends.",
        "- **The GAN on TensorFlow.** The fastest way is a graph loop around a step compiled by "
        "XLA, which\n  `Options(fused=True, jit=True)` selects (a row of its table). For "
        "`cifar10-cnn` the same way is more than twice as\n  slow as a graph. No rule is known "
        "that distinguishes the two, so the plan stays a graph.\n  "
        '`Options(execution="measure")` does on a quiet machine; on a busy one it chose '
        "differently.",
        "- **The LSTM on PyTorch.** `torch.nn.LSTM` is one operator for the whole sequence. When "
        "this was measured, Keras' LSTM\n  called its cell for each element of it. Now it calls "
        "the operator in a step; in `fit` it still does not.",
        "- **Convolutions on JAX and PyTorch, `bn-dropout` on PyTorch.** The arithmetic is the "
        "same as in a hand-written loop.\n  Treadle takes the same time (within a few percent); "
        "the target was to be faster. Once, when the turns of 13 seconds\n  of the `lax.scan` "
        "of `cifar10-cnn` on JAX were interleaved with those of the others, Treadle was 7 % "
        "slower than the\n  jitted step. Whether they were the cause is not known.",
        "- **Streaming.** Two cores draw, flip and crop the images and train at the same time, "
        "and the pipeline alone needs\n  three fifths of the CPU time. `fit` with "
        "`steps_per_execution` and the raw loop let the graph draw each batch.\n  When this was "
        "measured, Treadle drew them one by one in Python. Now a graph draws and stacks windows: "
        "see [streams](streams.md).",
        "",
    ]


def _how() -> list[str]:
    return [
        "## How it is measured",
        "",
        "- All contestants of a table run in one process and alternate, in a different order "
        "each round. A ratio compares two\n  turns of one round; the tables show its median and "
        "quartiles over the rounds.",
        "- All contestants train the same architecture on the same data with the same optimizer "
        "and batch size, compute the mean\n  loss and the accuracy, and fetch them once an "
        "epoch. The tables contain the mean loss of each one's first epoch.",
        "- A turn is one or more epochs, 0.3 seconds at least. Constructing a contestant and "
        "its first epoch, with all\n  compilation, are timed separately. A contestant that is "
        "more than 8 times slower than Treadle, or needs 4 seconds, has\n  one turn.",
        "- Treadle runs as `Loop(task, directory=…)`: console, JSON lines, CSV, the NaN check, "
        "`run.json`. `fit` has no progress\n  bar and no callback that sees steps, and is timed "
        "between the ends of two epochs, so that its set-up is not counted.\n  Lightning runs "
        "as `Trainer(barebones=True)`. Ignite has no handlers. These three compute only the "
        "metrics of the\n  hand-written loop.",
        "- The ceiling is the fastest hand-written loop, in any form.",
        "- The CPU time per step (µs, all cores together) excludes the time used by other "
        "programs.",
        "",
    ]


def must_show(kept: Results) -> list[str]:
    """Return the lines that Treadle is held to, each with what was measured."""
    rows = [
        "## What it is held to",
        "",
        "| | at least | measured | |",
        "| --- | --- | --- | --- |",
    ]
    for check in checks(ordered(kept)):
        verdict = "met" if check.met else "**not met**"
        rows.append(f"| {check.line} | {check.wanted} | {check.found} | {verdict} |")
    return [*rows, ""]


def section(key: str, result: Results) -> list[str]:
    """Return the tables of one result."""
    table, *where = key.split()
    writer = {
        "speed": _speed,
        "precision": _precision,
        "hooks": _hooks,
        "growth": _growth,
        "memory": _memory,
        "startup": _startup,
    }[table]
    named = ", ".join(where).replace(", keras, ", ", Keras ")
    title = [f"## {TITLES[table]}{named}", ""]
    if result["neighbours"] > QUIET:
        share = f"{result['neighbours']:.0%}"
        title += [f"Others used {share} of the processors meanwhile: not to be trusted.", ""]
    return [*title, *writer(result), ""]


TITLES = {
    "speed": "",
    "precision": "Precision, cifar10-cnn, ",
    "hooks": "Default hooks, mlp-sgd, ",
    "growth": "Growth, mlp-sgd, ",
    "memory": "Many steps, mlp-sgd, ",
    "startup": "Seconds to the first step, mlp-sgd, ",
}


def times_of(result: Results) -> dict[str, Times]:
    """Return the times of all contestants."""
    return {name: Times(**value) for name, value in result["times"].items()}


def _versus(times: Mapping[str, Times], base: str) -> list[str]:
    rows = [
        f"| | times the time of {base} | quartiles | µs per step | quartiles | of processors "
        "| first epoch, s | its loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    ran = {name: one for name, one in times.items() if one.per_step}
    against = {name: ratio(one.per_step, ran[base].per_step) for name, one in ran.items()}
    for name in sorted(ran, key=lambda name: against[name].median):
        one, own = ran[name], Spread.of(ran[name].per_step)
        values = one.values.get("loss"), one.values.get("g_loss")
        loss = next((f"{value:.3f}" for value in values if value is not None), "")
        processor = f"{Spread.of(one.processor).median:,.0f}" if one.processor else ""
        rows.append(
            f"| {name} | {against[name].median:.2f} | {_quartiles(against[name], '.2f')} "
            f"| {own.median:,.0f} | {_quartiles(own, ',.0f')} | {processor} "
            f"| {one.first:.1f} | {loss} |"
        )
    rows += [
        f"| {name} | failed: {one.failed} | | | | | | |"
        for name, one in times.items()
        if one.failed
    ]
    return rows


def _quartiles(spread: Spread, how: str) -> str:
    return f"{spread.low:{how}} – {spread.high:{how}}"


def _speed(result: Results) -> list[str]:
    times = times_of(result)
    about = times["treadle"].about
    told = [
        f"{result['what']}; {result['steps']} steps of {result['batch_size']} in an epoch. "
        f"Treadle's plan: {about['plan']}; {about['programs']} programs compiled in "
        f"{about['compiling']:.1f} s.",
        "",
    ]
    odd = odd_losses(result)
    if odd:
        told = [*told, f"Different training result: {', '.join(odd)}.", ""]
    return [*told, *_versus(times, "treadle")]


def _precision(result: Results) -> list[str]:
    return _versus(times_of(result), "treadle, float32")


def _hooks(result: Results) -> list[str]:
    each = sorted(result["each"].items(), key=lambda item: -item[1])
    return [
        *_versus(times_of(result), "treadle, no hooks"),
        "",
        "| hook | µs per step |",
        "| --- | --- |",
        *(f"| {name} | {microseconds:.2f} |" for name, microseconds in each),
    ]


def _growth(result: Results) -> list[str]:
    return _versus(times_of(result), "treadle")


def _memory(result: Results) -> list[str]:
    rows: Sequence[Any] = result["rows"]
    shown = [rows[0], *rows[len(rows) // 10 :: max(1, len(rows) // 9)], rows[-1]]
    return [
        "| step | MiB | µs per step | programs |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row['step']:,} | {row['mebibytes']:,.0f} | {row['microseconds']:,.0f} "
            f"| {row['programs']} |"
            for row in shown
        ),
    ]


def _startup(result: Results) -> list[str]:
    rows = ["| | seconds | quartiles |", "| --- | --- | --- |"]
    for name, seconds in result["seconds"].items():
        spread = Spread.of(seconds)
        rows.append(f"| {name} | {spread.median:.2f} | {_quartiles(spread, '.2f')} |")
    return rows
