"""The tables of docs/benchmarks.md, and what Treadle is held to, line by line."""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import BACKENDS, DOCS, write_section
from .timing import Spread, Times, ratio

Results = Mapping[str, Any]
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
    """Write the tables of the page from all results that were kept."""
    kept = ordered(kept)
    page = DOCS / "benchmarks.md"
    write_section(page, "bench speed --write: machine", [_machine(kept, newest_keras)])
    write_section(page, "bench speed --write: required", must_show(kept))
    tables = [line for key, result in kept.items() for line in section(key, result)]
    write_section(page, "bench speed --write: tables", tables)


def _machine(kept: Results, newest_keras: str) -> str:
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
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; "
        f"Python {platform.python_version()}, {told}.{newest}"
    )


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


# What Treadle is held to, against what was measured

# Mean losses of first epochs differ by the order of the data and by first weights.
LEARNED_ALIKE = 0.1
STREAMED = ("@tf.function step over tf.data", "the pipeline alone, no training")


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        line: What is measured.
        wanted: The bound, in words.
        found: What was measured, in words.
        met: Whether it holds.
    """

    line: str
    wanted: str
    found: str
    met: bool


def checks(kept: Results) -> Iterator[Check]:
    """Yield every line for which there are results."""
    yield from _check_mlp(kept)
    for key, result in kept.items():
        if key.startswith("speed") and " keras " not in key:
            yield from _check_everywhere(key.removeprefix("speed "), result)
    yield from _check_convolutions(kept)
    streaming = kept.get("speed streaming tensorflow")
    if streaming and ran(streaming, *STREAMED):
        yield _check_streaming(streaming)
    for key, result in kept.items():
        if key.startswith("hooks"):
            yield _check_hooks(key, result)
        if key.startswith("memory"):
            yield from _check_memory(key, result)
        if key.startswith("growth"):
            yield from _check_growth(key, result)


def _check_mlp(kept: Results) -> Iterator[Check]:
    lines = {
        "tensorflow": (
            ("@tf.function step over tf.data", 3.0),
            ("fit", 4.0),
            ("fit, steps_per_execution=32", 1.2),
        ),
        "jax": (("fit", 1.8), ("jitted step over NumPy slices", 1.05)),
        "torch": (("fit", 2.5), ("torch.nn, tensor slices", 1 / 1.3)),
    }
    for backend, wanted in lines.items():
        result = kept.get(f"speed mlp-sgd {backend}")
        for name, least in wanted if result else ():
            if ran(result, name):
                yield _at_least(f"mlp-sgd, {backend}: {name}", least, against(result, name))


def _check_everywhere(where: str, result: Results) -> Iterator[Check]:
    where = ", ".join(where.split())
    for kinds, what, least in (
        (("raw", "hand"), "ceiling", 0.95),
        (("hand",), "fastest hand loop", 1.0),
        (("fit",), "fastest `fit`", 1.0),
    ):
        name = fastest(result, kinds)
        if name:
            yield _at_least(f"{where}: the {what} ({name})", least, against(result, name))


def _check_convolutions(kept: Results) -> Iterator[Check]:
    result = kept.get("speed cifar10-cnn jax")
    if result and ran(result, "raw lax.scan"):
        plan = Times(**result["times"]["treadle"]).about["plan"]
        least = against(result, "raw lax.scan")
        yield Check(
            "cifar10-cnn, jax: never fused into a slower plan (raw lax.scan)",
            "1.00",
            f"{told(least)}; {plan}",
            least.median >= 1,
        )
    result = kept.get("precision tensorflow")
    if result:
        times = {name: Times(**value) for name, value in result["times"].items()}
        found = ratio(times["treadle, float32"].per_step, times["treadle, mixed_bfloat16"].per_step)
        yield _at_least("cifar10-cnn, tensorflow: float32 against mixed_bfloat16", 1.4, found)


def _check_streaming(result: Results) -> Check:
    found, bound = (against(result, name) for name in STREAMED)
    about = Times(**result["times"]["treadle"]).about
    # The pipeline alone, with both cores to itself, bounds any loop over it.
    met = found.median >= 1.5 or bound.median >= 0.9
    return Check(
        "streaming, tensorflow: @tf.function step over tf.data",
        "1.50, or bound by the data",
        f"{told(found)}; the pipeline alone takes {bound.median:.0%} of Treadle's time; "
        f"`costs`: waited {about['waiting']:.1f} s for data",
        met,
    )


def _check_hooks(key: str, result: Results) -> Check:
    times = {name: Times(**value) for name, value in result["times"].items()}
    found = ratio(times["treadle"].per_step, times["treadle, no hooks"].per_step)
    return Check(
        f"{_named(key)}: all default hooks against none",
        "at most 1.03",
        told(found),
        found.median <= 1.03,
    )


def _check_memory(key: str, result: Results) -> Iterator[Check]:
    rows: Sequence[Any] = result["rows"]
    warm = rows[len(rows) // 10 :]
    sizes = [row["mebibytes"] for row in warm]
    grown = max(sizes) / sizes[0] - 1
    yield Check(
        f"{_named(key)}: memory after warm-up, {rows[-1]['step']:,} steps",
        "flat within 2 %",
        f"{grown:+.1%}",
        grown <= 0.02,
    )
    first, last = warm[0]["programs"], warm[-1]["programs"]
    yield Check(
        f"{_named(key)}: compiled programs", "no growth", f"{first} → {last}", first == last
    )
    part = max(1, len(warm) // 10)
    early = Spread.of([row["microseconds"] for row in warm[:part]]).median
    late = Spread.of([row["microseconds"] for row in warm[-part:]]).median
    yield Check(
        f"{_named(key)}: time per step at the end against the start",
        "at most 1.05",
        f"{late / early:.2f}",
        late / early <= 1.05,
    )


def _check_growth(key: str, result: Results) -> Iterator[Check]:
    times = {name: Times(**value) for name, value in result["times"].items()}
    data = ratio(times["treadle, data × 10"].per_step, times["treadle"].per_step)
    yield Check(
        f"{_named(key)}: time per step with ten times the data",
        "at most 1.10",
        told(data),
        data.median <= 1.1,
    )
    plain = f"{result['plain']}, parameters × 10"
    large = ratio(times[plain].per_step, times["treadle, parameters × 10"].per_step)
    yield _at_least(
        f"{_named(key)}: time per step with ten times the parameters ({plain})", 0.95, large
    )


def against(result: Results, name: str) -> Spread:
    """Return a contestant's time as a multiple of Treadle's."""
    times = result["times"]
    return ratio(times[name]["per_step"], times["treadle"]["per_step"])


def ran(result: Results, *names: str) -> bool:
    """Say whether these contestants took part."""
    return all(name in result["times"] and result["times"][name]["per_step"] for name in names)


def fastest(result: Results, kinds: Iterable[str]) -> str | None:
    """Return the name of the fastest contestant of some kinds."""
    wanted = set(kinds)
    names = [name for name, kind in result["kinds"].items() if kind in wanted and ran(result, name)]
    return min(names, key=lambda name: against(result, name).median, default=None)


def odd_losses(result: Results) -> list[str]:
    """Return who learned otherwise in its first epoch, among those that ran all its steps."""
    times = {
        name: Times(**value)
        for name, value in result["times"].items()
        if result["kinds"][name] != "part"
    }
    odd: list[str] = []
    for loss in ("loss", "d_loss", "g_loss"):
        ran = {
            name: one.values[loss]
            for name, one in times.items()
            if one.steps == result["steps"] and loss in one.values
        }
        if ran:
            middle = Spread.of(list(ran.values())).median
            odd += [
                f"{name} ({loss} {value:.3f}, the others {middle:.3f})"
                for name, value in ran.items()
                if abs(value - middle) > LEARNED_ALIKE * middle
            ]
    return odd


def told(spread: Spread) -> str:
    """Say a ratio with its quartiles."""
    return f"{spread.median:.2f} ({spread.low:.2f} – {spread.high:.2f})"


def _at_least(line: str, least: float, found: Spread) -> Check:
    return Check(line, f"{least:.2f}", told(found), found.median >= least)


def _named(key: str) -> str:
    return ", ".join(key.split())
