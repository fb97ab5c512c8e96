"""Verdicts about layers from the statistics of several steps: vanishing, exploding, dead, stuck."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from ..core import schema
from ..core.logs import short

if TYPE_CHECKING:  # it imports Keras
    from ..steps.layer_statistics import LayerStatistics, StepStatistics

Kind = Literal["vanishing", "exploding", "dead", "stuck"]

# A gradient vanishes if it is smaller than that of a later layer by this factor in each of this
# many measured steps. In sound networks, also deep residual ones, the factor is at least 1e-3.
VANISHING: Final = 1e-4
VANISHING_STEPS: Final = 4
# A gradient explodes if it is this many times the norm of its weights in two measured steps, or
# this many times the gradient of a later layer and still several times its weights. Measured in
# sound networks: 10 times the weights, or 300 times a later gradient.
EXPLODING: Final = 1e4
BACKWARD: Final = 1e3
BACKWARD_WEIGHTS: Final = 30.0
EXPLODING_STEPS: Final = 2
EXPLODING_AT_ONCE: Final = 1e6  # in one step: the next one may already end with NaN
# Units are dead, and layers stuck, if that was seen in so many measured steps, over so many steps.
LASTING_STEPS: Final = 5
LASTING_SPAN: Final = 20
ACCUMULATED_SPAN: Final = 200
DEAD_SHARE: Final = 0.9
# Smaller weights, such as biases that start at 0, are taken to have this mean square.
SMALLEST_WEIGHT: Final = 0.01
NAMED: Final = 3  # layers in a message

ADVICE: Final[Mapping[Kind, str]] = {
    "vanishing": "These layers hardly learn. Use residual connections, normalization, an "
    "activation like relu or gelu, or an initialization that keeps the variance, such as he_normal",
    "exploding": "Lower the learning rate, clip gradients (clipnorm=1.0 in the optimizer), add "
    "normalization, or use smaller initial weights",
    "dead": "Dead units get no gradient and stay dead. Lower the learning rate, use leaky_relu, "
    "elu or gelu, or add normalization",
    "stuck": "Check that the loss depends on them, that an optimizer is applied to them, and its "
    "learning rate",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict about some layers.

    Attributes:
        kind: `"vanishing"`, `"exploding"`, `"dead"` or `"stuck"`.
        step: The measured step at which it was reached.
        layers: The paths of the layers.
        text: The verdict as a sentence, with numbers and what to do.
    """

    kind: Kind
    step: int
    layers: tuple[str, ...]
    text: str


class HealthRules:
    """Collects the statistics of measured steps, and reaches each verdict about a layer once."""

    def __init__(self) -> None:
        self._recent: list[_Row] = []
        self._reached: dict[str, set[str]] = {kind: set() for kind in ADVICE}

    def add(self, measured: "StepStatistics") -> list[Verdict]:
        """Add the statistics of a step, and return new verdicts.

        Steps that were undone do not count, since loss scaling undoes steps on purpose.
        """
        if measured.undone:
            return []
        rows = [*self._recent, _Row.of(measured)]
        paths = [layer.path for layer in measured.layers]
        # After layers were unfrozen or created, earlier steps cannot be compared.
        self._recent = [row for row in rows if row.paths == paths][-LASTING_STEPS:]
        found: dict[Kind, dict[str, str]] = {
            "exploding": self._exploding(),
            "vanishing": self._vanishing(),
            "dead": self._dead(measured.layers),
        }
        span = ACCUMULATED_SPAN if measured.accumulates else LASTING_SPAN
        known = {*found["vanishing"], *self._reached["vanishing"]}
        found["stuck"] = {p: text for p, text in self._stuck(span).items() if p not in known}
        verdicts: list[Verdict] = []
        kinds = {layer.path: layer.kind for layer in measured.layers}
        for kind, layers in found.items():
            new = {path: text for path, text in layers.items() if path not in self._reached[kind]}
            self._reached[kind] |= set(new)
            if new:
                text = _text(kind, measured.step, new, kinds)
                verdicts.append(Verdict(kind, measured.step, tuple(new), text))
        return verdicts

    def state(self) -> dict[str, Any]:
        """Return the recent statistics and the verdicts, to be saved in a checkpoint."""
        return {
            "recent": [row.state() for row in self._recent],
            "reached": {kind: sorted(paths) for kind, paths in self._reached.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        schema.mapping(schema.listed(schema.text))(state["reached"], "reached")
        self._recent = [_Row.restored(row) for row in state["recent"]]
        self._reached = {kind: set(state["reached"].get(kind, ())) for kind in ADVICE}

    def _exploding(self) -> dict[str, str]:
        """Return the layers with exploding gradients, each with what was seen."""
        found: dict[str, str] = {}
        recent = self._recent[-EXPLODING_STEPS:]
        for i, path in enumerate(recent[-1].paths):
            last = recent[-1].gradient[i]
            if last is not None and not isfinite(last):
                found[path] = f"the norm of its gradient is {last}"
                continue
            factors = [row.relative(i) for row in recent]
            often = len(recent) == EXPLODING_STEPS and min(factors) > EXPLODING
            if often or factors[-1] > EXPLODING_AT_ONCE:
                found[path] = (
                    f"the norm of its gradient is {short(last)}, {factors[-1]:.1e} times that of "
                    "its weights"
                )
                continue
            backward = [_largest_ratio(row, i) for row in recent]
            grows = min(x for x, _ in backward) > BACKWARD and min(factors) > BACKWARD_WEIGHTS
            if len(recent) == EXPLODING_STEPS and grows:
                ratio, other = backward[-1]
                found[path] = (
                    f"the norm of its gradient is {short(last)}, {ratio:.1e} times that of "
                    f"{recent[-1].paths[other]}, which is nearer to the loss"
                )
        return found

    def _vanishing(self) -> dict[str, str]:
        """Return the layers with vanishing gradients, each with what was seen."""
        recent = self._recent[-VANISHING_STEPS:]
        if len(recent) < VANISHING_STEPS:
            return {}
        found: dict[str, str] = {}
        for i, path in enumerate(recent[-1].paths):
            seen = [_smaller(row, i) for row in recent]
            if all(x is not None for x in seen):
                later = recent[-1].paths[seen[-1] or 0]
                found[path] = (
                    f"the norm of its gradient is {_power(recent[-1].gradient[i])}, and that of "
                    f"{later} is {_power(recent[-1].gradient[seen[-1] or 0])}"
                )
        return found

    def _lasting(self, span: int) -> "list[_Row]":
        """Return the recent rows if there are enough of them, over enough steps; else none."""
        recent = self._recent
        enough = len(recent) == LASTING_STEPS and recent[-1].step - recent[0].step >= span
        return recent if enough else []

    def _dead(self, layers: "Sequence[LayerStatistics]") -> dict[str, str]:
        """Return the layers with dead units, each with what was seen."""
        recent = self._lasting(LASTING_SPAN)
        found: dict[str, str] = {}
        for layer in layers if recent else ():
            flags = [row.units.get(layer.path) for row in recent]
            if layer.units is None or any(x is None or x.shape != layer.units.shape for x in flags):
                continue
            dead = int((~np.any(np.stack([x for x in flags if x is not None]), axis=0)).sum())
            if dead >= DEAD_SHARE * layer.units.size:
                found[layer.path] = (
                    f"{dead} of its {layer.units.size} units were 0 for all examples of "
                    f"{len(recent)} batches, of steps {recent[0].step} to {recent[-1].step}"
                )
        return found

    def _stuck(self, span: int) -> dict[str, str]:
        """Return the layers whose weights do not change, each with what was seen."""
        recent = self._lasting(span)
        found: dict[str, str] = {}
        for i, path in enumerate(recent[-1].paths if recent else ()):
            # Steps that were not measured may have updated the weights: that changes their norm.
            still = all(
                row.update[i] == 0 and row.weight[i] == recent[0].weight[i] for row in recent
            )
            gradients = [row.gradient[i] for row in recent]
            # Without a measured gradient, the update is in a branch, which may not be taken now.
            if still and None not in gradients:
                why = "its gradient is not 0" if any(gradients) else "its gradient is exactly 0"
                steps = f"steps {recent[0].step} to {recent[-1].step}"
                found[path] = f"its weights did not change in {steps}, and {why}"
        return found


@dataclass(frozen=True)
class _Row:
    """The statistics of one step, one number for each layer."""

    step: int
    paths: list[str]
    optimizers: list[str]
    gradient: list[float | None]
    weight: list[float | None]
    update: list[float | None]
    sizes: list[int]
    units: dict[str, Any]

    @classmethod
    def of(cls, measured: "StepStatistics") -> "_Row":
        layers = measured.layers
        return cls(
            measured.step,
            [layer.path for layer in layers],
            [" ".join(layer.optimizers) for layer in layers],
            [layer.gradient for layer in layers],
            [layer.weight for layer in layers],
            [layer.update for layer in layers],
            [layer.size for layer in layers],
            {layer.path: layer.units for layer in layers if layer.units is not None},
        )

    def relative(self, i: int) -> float:
        """Return the norm of a layer's gradient as a multiple of the norm of its weights."""
        gradient, weight = self.gradient[i], self.weight[i]
        if gradient is None or weight is None:
            return 0.0
        return gradient / max(weight, SMALLEST_WEIGHT * sqrt(max(1, self.sizes[i])))

    def state(self) -> dict[str, Any]:
        return {**vars(self)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "_Row":
        row = cls(**state)
        columns = (row.optimizers, row.gradient, row.weight, row.update, row.sizes)
        if any(len(column) != len(row.paths) for column in columns):
            raise ValueError("the statistics of a step have columns of different lengths")
        return row


def _peers(row: _Row, i: int) -> list[int]:
    """Return the later layers with gradients that the same optimizer updates."""
    return [
        j
        for j in range(i + 1, len(row.paths))
        if row.optimizers[j] == row.optimizers[i] and row.gradient[j]
    ]


def _largest_ratio(row: _Row, i: int) -> tuple[float, int]:
    """Return by which factor a layer's gradient is larger than that of a later layer, and which."""
    own = row.gradient[i] or 0.0
    ratios = [(own / (row.gradient[j] or 1.0), j) for j in _peers(row, i)]
    return max(ratios, default=(0.0, i))


def _smaller(row: _Row, i: int) -> int | None:
    """Return the later layer with the largest gradient, if that of layer `i` vanishes next to it.

    A gradient of exactly 0 vanishes only if others nearly do; otherwise the loss may not depend on
    the layer.
    """
    own = row.gradient[i]
    peers = _peers(row, i)
    if own is None or not peers or not isfinite(own):
        return None
    largest = max(peers, key=lambda j: row.gradient[j] or 0.0)
    limit = VANISHING * (row.gradient[largest] or 0.0)
    if own > 0:
        return largest if own < limit else None
    return largest if any((row.gradient[j] or 0.0) < limit for j in peers) else None


def _power(number: float | None) -> str:
    return f"{number or 0.0:.1e}"


def _text(kind: Kind, step: int, layers: Mapping[str, str], kinds: Mapping[str, str]) -> str:
    path, seen = next(iter(layers.items()))
    others = [f"{p} ({kinds[p]})" for p in layers][1:NAMED]
    left = len(layers) - 1 - len(others)
    also = ", ".join(others) + (f" and {left} more" if left else "")
    what = {
        "vanishing": "vanishing gradients in",
        "exploding": "exploding gradients in",
        "dead": "dead units in",
        "stuck": "stuck:",
    }[kind]
    same = f". The same holds for {also}" if others else ""
    return f"{what} {path} ({kinds[path]}) at step {step}: {seen}{same}. {ADVICE[kind]}"
