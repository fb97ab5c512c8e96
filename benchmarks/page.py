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
        "Treadle with all its default hooks beside every other way to run the same steps. Written "
        "by `scripts/bench speed\n--write`, which takes about 35 minutes; `--quick` takes 3, "
        "`--workload mlp-sgd --backend jax` measures a part, `--page`\nwrites this page again from "
        "`benchmarks/results.json`.",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; "
        f"Python {platform.python_version()}, {told}.{newest}",
        "",
    ]


def _why() -> list[str]:
    return [
        "## Why some of it is not met",
        "",
        "- **Ceilings of the small networks.** Their steps take a tenth of a millisecond, or less. "
        "Beside them Treadle keeps every step's values,\n  writes them down, looks after each "
        "window whether a constant of the task has changed, finds the state anew at each epoch, "
        "and\n  shuffles; a bare loop does not. Of `bn-dropout` on JAX a profile found about a "
        "third of the difference there; the rest is in the\n  compiled loop, and not explained. "
        "Nor are the 4 to 6 % of the LSTM and of ten times the parameters on JAX.",
        "- **`fit` on JAX.** The bare `lax.scan` is itself less than 1.9 times as fast as `fit` "
        "here (its table says how much): the arithmetic is\n  the same, and `fit` on JAX wastes "
        "less than elsewhere.",
        "- **The GAN on TensorFlow.** The fastest way is a graph's loop around a step that XLA has "
        "compiled, which\n  `Options(fused=True, jit=True)` asks for (a row of its table). For "
        "`cifar10-cnn` the same way is more than twice as slow as a graph.\n  No rule is known "
        "that tells the two apart, so the plan stays a graph. "
        '`Options(execution="measure")` does on a\n  quiet machine; '
        "on a busy one it chose otherwise.",
        "- **The LSTM on PyTorch.** `torch.nn.LSTM` is one kernel for the whole sequence; Keras' "
        "LSTM calls its cell for each element of it.\n  With the same cells, `fit` takes twice as "
        "long as Treadle.",
        "- **Convolutions on JAX and PyTorch, `bn-dropout` on PyTorch.** The same arithmetic as by "
        "hand. Treadle takes as long as a hand-written\n  loop, within a few hundredths on either "
        "side, and is held to being ahead. Once, while the `lax.scan` of `cifar10-cnn` on\n  JAX "
        "had all its turns of 13 seconds between those of the others, Treadle was 7 % behind the "
        "jitted step; whether because of them\n  was not found out.",
        "- **Streaming.** Two cores draw, flip and crop the images and train at the same time, and "
        "the pipeline alone needs three fifths of\n  the processors' time. `fit` with "
        "`steps_per_execution` and the raw loop let the graph draw each batch; Treadle, like any "
        "loop in Python,\n  draws them one by one, and stacks windows of them, which it can count "
        "and resume: that takes a tenth to a quarter more of the processors.",
        "",
    ]


def _how() -> list[str]:
    return [
        "## How it is measured",
        "",
        "- All contestants of a table run in one process and take turns, in another order each "
        "round. A ratio is that of two\n  turns of one round; the tables show its median and "
        "quartiles over the rounds.",
        "- Everybody trains the same architecture on the same data with the same optimizer and "
        "batch size, counts the mean loss\n  and the accuracy, and fetches them once an epoch. The "
        "mean loss of each one's first epoch is in the tables.",
        "- A turn is one or more epochs, 0.3 seconds at least. Making a contestant and its first "
        "epoch, with all compilation, are\n  timed apart; what is more than "
        "8 times slower than Treadle, or needs 4 seconds, has one turn.",
        "- Treadle runs as `Loop(task, directory=…)`: console, JSON lines, CSV, the guard against "
        "NaN, the run's record. `fit` has\n  no progress bar and no callback that sees steps, and "
        "is timed between the ends of two epochs, so that its set-up is\n  not counted. Lightning "
        "runs as `Trainer(barebones=True)`. Ignite has no handlers. These three count nothing but "
        "what the\n  hand-written loop counts.",
        "- The ceiling is the fastest loop driven by hand, whatever it looks like.",
        "- What the processors spent per step (µs, all cores together) does not count the time in "
        "which other programs had them.",
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
        told = [*told, f"Learned otherwise than the others: {', '.join(odd)}.", ""]
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
