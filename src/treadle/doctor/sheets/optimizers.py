"""Facts about optimizers: rates, what they apply, clipping, decay, averages and accumulation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from ...steps.probes import APPLY, BRANCH, CLIP
from ..numbers import Array, apart, as_floats, norm_of
from ..recording import Event
from ..trials import Trials
from .lines import NUMBER, SETTING, WIRING, Line, Lines, names_of, short

MOST_STEPS: Final = 16
"""The most steps that are run until accumulated gradients are applied."""

EARLY: Final = 10
NEAR: Final = 0.045
"""How far two gradients of one direction are apart at most: a cosine of 0.999."""
SAME: Final = 0.01
"""The largest relative difference of sizes that are taken for equal."""


def optimizer_facts(trials: Trials, steps: int | None) -> list[Line]:
    """Return facts about each optimizer; `steps` is the planned length of the run, if known."""
    lines, state = Lines("optimizers"), trials.state
    applied, accumulated = trials.base[0].of(APPLY), False
    if not applied and trials.applied and trials.last.of(BRANCH):
        applied, accumulated = _accumulation(lines, trials), True
    applied = applied or trials.last.of(APPLY)
    for path, optimizer in state.optimizers.items():
        events = [event for event in applied if event.call.path == path]
        lines.add(path, "class", type(optimizer).__name__, "object")
        _rates(lines, path, optimizer, steps)
        used = id(optimizer) in trials.applied
        mark = "" if used else "never applied"
        text = f"{len(events)} in a step" if used else "never"
        text = "once in several steps" if used and accumulated else text
        lines.add(path, "updates", text, "dry run", WIRING, mark)
        paths = [p for event in events for p in event.by_path]
        if paths:
            text = [*names_of([p.partition("/")[0] for p in paths]), f"{len(paths)} variables"]
            lines.add(path, "trains", text, "recorded", WIRING)
        _settings(lines, path, optimizer, trials, steps)
        for event in [] if accumulated else events[:1]:
            _direction(lines, path, event, trials)
    rates = [getattr(o, "_learning_rate", None) for o in state.all_optimizers.values()]
    for name, value in vars(trials.task).items():
        if isinstance(value, LearningRateSchedule):
            used = any(rate is value for rate in rates)
            lines.add(name, "is the rate of an optimizer", used, "object", WIRING)
    return lines.found


def _rates(lines: Lines, path: str, optimizer: Any, steps: int | None) -> None:
    rate = getattr(optimizer, "_learning_rate", None)
    if not isinstance(rate, LearningRateSchedule):
        value = float(ops.convert_to_numpy(optimizer.learning_rate))
        lines.add(path, "rate", value, "object", SETTING)
        return
    places = [0, EARLY, *([steps - 1] if steps and steps > EARLY else [])]
    schedule: Any = rate
    steps_at = [ops.convert_to_tensor(i, "int32") for i in places]
    values = [float(ops.convert_to_numpy(schedule(step))) for step in steps_at]
    text = ", ".join(f"{short(x)} at step {i}" for i, x in zip(places, values, strict=True))
    end = "" if steps else " (the length of the run is unknown)"
    mark = "" if any(values) else "zero throughout"
    lines.add(path, "rate", f"{text}{end}", "object", SETTING, mark)
    lines.add(path, "schedule", type(rate).__name__, "object")


def _settings(lines: Lines, path: str, optimizer: Any, trials: Trials, steps: int | None) -> None:
    """Add clipping, decay, averages and accumulation of an optimizer."""
    for name in ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"):
        value = getattr(optimizer, name, None)
        if value is not None:
            lines.add(path, name, float(value), "object")
    decay = getattr(optimizer, "weight_decay", None)
    if decay:
        decayed = [v for v in optimizer._trainable_variables if optimizer._use_weight_decay(v)]
        kinds = names_of(sorted({v.name for v in decayed}))
        lines.add(path, "decay", f"{short(float(decay))} of {', '.join(kinds)}", "object")
        if any(len(v.shape) < 2 for v in decayed):
            lines.add(path, "decays biases or scales", True, "object")
    count = getattr(optimizer, "gradient_accumulation_steps", None)
    if count:
        scheduled = isinstance(getattr(optimizer, "_learning_rate", None), LearningRateSchedule)
        mark = "its schedule counts each batch" if scheduled else ""
        lines.add(path, "accumulates", f"{count} batches", "object", SETTING, mark)
    if getattr(optimizer, "use_ema", False):
        momentum = float(optimizer.ema_momentum)
        lines.add(path, "averages weights with momentum", momentum, "object")
        if steps:
            share, fact = momentum**steps, "initial weights in the final average"
            mark = "mostly the initial weights" if share > 0.5 else ""
            lines.add(path, fact, short(share), "object", NUMBER, mark)


def _direction(lines: Lines, path: str, event: Event, trials: Trials) -> None:
    """Add how the gradients that are applied relate to those that were computed."""
    trial = trials.base[0] if trials.base[0].of(APPLY) else trials.last
    computed = {p: as_floats(x) for p, x in trial.gradients.items()}
    given = {p: as_floats(x) for p, x in event.by_path.items() if x.any()}
    others = names_of([f"{p} gets that of {q}" for p, q in exchanged(given, computed, NEAR)], 2)
    pairs = [(x, computed[p]) for p, x in given.items() if p in computed]
    if not (others or pairs):
        return
    text, mark = "another direction than the gradient", ""
    if others:
        text, mark = others, "gradients of other variables"
    elif all(apart(x, y) < NEAR for x, y in pairs):
        scale = _scale(pairs)
        text = "the gradient" if abs(scale - 1) < 1e-3 else f"{short(scale)} × the gradient"
    elif all(apart(x, -y) < NEAR for x, y in pairs):
        text, mark = "the gradient with the other sign", "ascent"
    lines.add(path, "applies", text, "recorded", WIRING, mark)


def _scale(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Return the summed norms of the first arrays, divided by those of the second ones."""
    return sum(norm_of(x) for x, _ in pairs) / sum(norm_of(y) for _, y in pairs)


def exchanged(
    given: Mapping[str, Array], computed: Mapping[str, Array], near: float
) -> Iterator[tuple[str, str]]:
    """Yield variables that get a multiple of the gradient of another, and not of their own.

    Args:
        given: The gradients that an optimizer gets.
        computed: Those that were computed.
        near: How far parallel arrays are apart at most; see `apart`.
    """
    for path, x in given.items():
        if path not in computed or x.size == 1 or apart(x, computed[path]) <= near:
            continue
        for other, y in computed.items():
            if other != path and y.shape == x.shape and apart(x, y) <= near:
                yield path, other


def _accumulation(lines: Lines, trials: Trials) -> Sequence[Event]:
    """Run steps until gradients are applied, and add how they were accumulated."""
    done = trials.base if trials.last.applied else trials.until_applied(MOST_STEPS)
    if not done or not done[-1].applied:
        return []
    computed: dict[str, Array] = {}
    for trial in done:
        for path, x in trial.gradients.items():
            computed[path] = computed.get(path, np.zeros_like(x)) + x
    applied = done[-1].applied
    pairs = [(x, computed[p]) for p, x in applied.items() if p in computed and computed[p].any()]
    events = done[-1].of(APPLY)
    path = events[0].call.path
    lines.add(path, "an update takes", f"{len(done)} steps", "recorded", WIRING)
    if pairs and all(apart(x, y) < NEAR for x, y in pairs):
        scale = _scale(pairs)
        mean = abs(scale * len(done) - 1) < SAME
        text = "the mean of their gradients" if mean else f"{short(scale)} × their sum"
        lines.add(path, "accumulates", text, "recorded", WIRING)
    clipped = sum(bool(trial.of(CLIP)) for trial in done)
    if clipped:
        name = next(event.call.path for trial in done for event in trial.of(CLIP))
        text = f"in {clipped} of {len(done)} steps of an update"
        lines.add(name, "called", text, "recorded", WIRING)
    for p, x in done[-1].after.items():
        is_sum = p not in applied and x.dtype.kind == "f" and not p.startswith(path) and x.size > 1
        if is_sum and done[0].changed(p):
            text, mark = ("not zero", "kept for the next update") if x.any() else ("zero", "")
            name = p.rpartition("/")[0] or p
            lines.add(name, "after an update", text, "recorded", WIRING, mark)
            break
    return events
