"""What Treadle is held to, line by line, against what was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .timing import Spread, Times, ratio

Results = Mapping[str, Any]

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
    yield from _mlp(kept)
    for key, result in kept.items():
        if key.startswith("speed") and " keras " not in key:
            yield from _everywhere(key.removeprefix("speed "), result)
    yield from _convolutions(kept)
    streaming = kept.get("speed streaming tensorflow")
    if streaming and ran(streaming, *STREAMED):
        yield _streaming(streaming)
    for key, result in kept.items():
        if key.startswith("hooks"):
            yield _hooks(key, result)
        if key.startswith("memory"):
            yield from _memory(key, result)
        if key.startswith("growth"):
            yield from _growth(key, result)


def _mlp(kept: Results) -> Iterator[Check]:
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


def _everywhere(where: str, result: Results) -> Iterator[Check]:
    where = ", ".join(where.split())
    for kinds, what, least in (
        (("raw", "hand"), "ceiling", 0.95),
        (("hand",), "fastest hand loop", 1.0),
        (("fit",), "fastest `fit`", 1.0),
    ):
        name = fastest(result, kinds)
        if name:
            yield _at_least(f"{where}: the {what} ({name})", least, against(result, name))


def _convolutions(kept: Results) -> Iterator[Check]:
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


def _streaming(result: Results) -> Check:
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


def _hooks(key: str, result: Results) -> Check:
    times = {name: Times(**value) for name, value in result["times"].items()}
    found = ratio(times["treadle"].per_step, times["treadle, no hooks"].per_step)
    return Check(
        f"{_named(key)}: all default hooks against none",
        "at most 1.03",
        told(found),
        found.median <= 1.03,
    )


def _memory(key: str, result: Results) -> Iterator[Check]:
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


def _growth(key: str, result: Results) -> Iterator[Check]:
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
