"""The hook `GradientHealth`, which measures gradients, updates and dead units of each layer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from ..core import schema
from ..core.directory import HEALTH
from ..core.folder import Folder
from ..core.hook import DetailedHook, LoopView
from ..core.logs import StepLogs
from ..core.triggers import Span, When
from ..errors import ConfigurationError, listed
from .health_rules import HealthRules, Verdict
from .lines import strict
from .log_tail import cut_after

if TYPE_CHECKING:  # it imports Keras
    from ..steps.layer_statistics import StepStatistics

# Most faults show in the first steps, so these are measured more often; intervals double. A
# measured step of a small network takes as long as 10 to 30 of its steps.
EARLY: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
MEASURED: Final = ("gradient", "weight", "update", "dead")
MOST_BYTES: Final = 256 << 20
LONGEST_LINE: Final = 4 << 20
MOST_VALUES: Final = 100_000  # of a line

_step = schema.whole(0, 10**15)
_values = schema.listed(schema.anything)
_layer = schema.record({"path": schema.text, "class": schema.text}, required=("path",))
_line = {
    "layers": schema.record(
        {"step": _step, "layers": schema.listed(_layer), "notes": schema.listed(schema.text)},
        required=("layers",),
    ),
    "health": schema.complete({"step": _step, **dict.fromkeys(MEASURED, _values)}),
    "verdict": schema.complete(
        {"step": _step, "verdict": schema.text, "layers": _values, "text": schema.text}
    ),
}


class GradientHealth(DetailedHook):
    """Measures each layer's gradient, update and dead units, and warns if a layer does not learn.

    In measured steps (1, 2, 3, 4, 6, 8, 12, 16, 24 and so on up to 768, and one in every `every`),
    the step runs once more, compiled with further outputs, from the same state with the same batch.
    The state is restored afterwards, so training gives the same bits as without the hook. A step
    that runs as Python is measured while it runs.

    For each layer the file `health.jsonl` in the run directory gets the norm of its gradient
    (before clipping, without the loss scale), the norm of its weights, the norm of their update,
    and the share of its units that were 0 for all examples of the batch. Only layers with an
    activation that can be exactly 0, such as relu, have dead units.

    A warning is logged once for each verdict about a layer:

    - `vanishing`: in 4 measured steps, the gradient is less than 1e-4 of that of a later layer.
    - `exploding`: the gradient is NaN or infinite, or in one measured step a million times the
      weights, or in two measured steps 10,000 times the weights (or 30 times the weights and
      1,000 times the gradient of a later layer).
    - `dead`: in 5 measured steps, at least 90 % of the units are 0 for all examples.
    - `stuck`: in 5 measured steps, the weights are the same to the bit.

    Not measured: gradients that are computed in a branch of `treadle.cond` or a function of
    `treadle.for_each`, and steps that call Python functions from compiled code.

    Args:
        every: The interval between measured steps, in steps.

    Attributes:
        when: The triggers at which windows end for this hook.
        latest: The statistics of the step that was measured last, or None.
        verdicts: All verdicts of this process, in order.

    Raises:
        ConfigurationError: If `every` is not a number of steps.

    Example:
        >>> import treadle
        >>> health = treadle.hooks.GradientHealth(every="500 steps")
    """

    chief_only = True  # several processes measure nothing

    def __init__(self, every: str = "1000 steps") -> None:
        span = Span.parse(every)
        if span.of != "step":
            raise ConfigurationError(
                f"GradientHealth measures single steps, so every={every!r} must be a number of "
                "steps, such as '1000 steps'"
            )
        self._every = int(span.amount)
        # A window ends before each measured step, from whose state the step runs twice.
        early = [When(Span(step - 1, "step"), repeat=False) for step in EARLY if step > 1]
        self.when = [*early, When(span)]
        self.latest: StepStatistics | None = None
        self.verdicts: list[Verdict] = []
        self._rules = HealthRules()
        self._folder: Folder | None = None
        self._file: BinaryIO | None = None
        self._size: int | None = None
        self._started, self._resumed, self._noted = False, False, False
        self._described = ""  # the line that describes the layers, as it was written last

    def start(self, loop: LoopView) -> None:
        """Open the file, after removing lines of later steps."""
        size, self._size = self._size, None
        if not self._resumed and loop.progress.step == 0:
            self._rules, self.latest, self.verdicts = HealthRules(), None, []
            self._noted, self._described = False, ""
        self._resumed, self._started = False, True
        if loop.directory is not None:
            self._folder = Folder.open(loop.directory, create=True)
            self._file = self._folder.append_to(HEALTH)
            cut_after(self._folder, self._file, loop.progress.step, size)

    def before(self, loop: LoopView) -> None:
        """Request a measurement if the next step is due."""
        step = loop.progress.step + 1
        if step in EARLY or (step - 1) % self._every == 0:
            loop.measure_next_step()

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Write the statistics of the measured step, and warn."""
        if loop.unmeasured and not self._noted:
            self._noted = True
            loop.log({"note": f"GradientHealth: {loop.unmeasured}"})
        self._add(loop)

    def _add(self, loop: LoopView) -> None:
        """Write the newest statistics, unless that is done already, and warn."""
        measured: StepStatistics | None = loop.measured
        if measured is None or (self.latest is not None and self.latest.step == measured.step):
            return
        self.latest = measured
        verdicts = self._rules.add(measured)
        self.verdicts += verdicts
        if self._file is not None:
            self._write(measured, verdicts)
        for verdict in verdicts:
            loop.log({"warning": verdict.text})

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Add the last measured step, which an error may have kept from it, and close the file."""
        if self._started:
            self._add(loop)
        self._started = False
        file, folder = self._file, self._folder
        self._file = self._folder = None
        if file is not None and folder is not None:
            with folder, file:
                folder.flush(file)

    def state(self) -> dict[str, Any]:
        """Flush the file, and return its size and what verdicts are based on."""
        found = {"rules": self._rules.state(), "noted": self._noted, "described": self._described}
        if self._file is None or self._folder is None:
            return found
        self._folder.flush(self._file)
        return {**found, "size": self._file.tell()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Truncate the file to the saved size when the run resumes."""
        schema.optional(schema.whole())(state.get("size"), "size")
        schema.flag(state["noted"], "noted")
        schema.text(state["described"], "described")
        self._described = state["described"]
        self._rules.restore(state["rules"])
        self._size, self._noted, self._resumed = state.get("size"), state["noted"], True

    def _write(self, measured: "StepStatistics", verdicts: list[Verdict]) -> None:
        """Append the lines of a measured step."""
        lines: list[dict[str, Any]] = []
        layers = [
            {
                "path": layer.path,
                "class": layer.kind,
                "optimizers": list(layer.optimizers),
                "units": None if layer.units is None else int(layer.units.size),
            }
            for layer in measured.layers
        ]
        description = {"layers": layers, "notes": _notes(measured)}
        if json.dumps(description) != self._described:
            self._described = json.dumps(description)
            lines.append({"kind": "layers", "step": measured.step, **description})
        row: dict[str, Any] = {"kind": "health", "step": measured.step}
        for name in MEASURED:
            row[name] = [_number(getattr(layer, name)) for layer in measured.layers]
        lines.append(row | ({"undone": True} if measured.undone else {}))
        for verdict in verdicts:
            line = {"kind": "verdict", "step": verdict.step, "verdict": verdict.kind}
            lines.append({**line, "layers": list(verdict.layers), "text": verdict.text})
        assert self._file is not None and self._folder is not None
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        self._folder.append(self._file, text.encode())


def read_health(directory: str | Path) -> list[dict[str, Any]]:
    """Return the lines of `health.jsonl` in a run directory, in order; none if there is no file.

    Lines that are incomplete or invalid are left out, such as the last one of a killed process.

    Args:
        directory: The run directory.

    Raises:
        DirectoryError: There is no such directory, or the file is not a regular file.
    """
    with Folder.open(Path(directory)) as folder:
        return list(health_lines(folder)) if folder.kind(HEALTH) is not None else []


def health_lines(folder: Folder) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of the file in an open run directory."""
    read = 0
    with folder.opened(HEALTH) as (file, _):
        while (text := file.readline(LONGEST_LINE)) and read < MOST_BYTES:
            read += len(text)
            try:
                found = schema.parse(text, MOST_VALUES)
                schema.mapping(schema.anything)(found, "")
                _line[found["kind"]](found, "")
            except (ValueError, KeyError, TypeError):
                continue
            yield cast(dict[str, Any], found)


def _number(value: float | None) -> Any:
    """Return a number with six digits, as strict JSON."""
    return None if value is None else strict(float(f"{value:.6g}"))


def _notes(measured: "StepStatistics") -> list[str]:
    """Return sentences about what is not measured."""
    notes: list[str] = []
    without = [x.path for x in measured.layers if x.gradient is None and x.weight is not None]
    if without:
        notes.append(
            f"No gradient was measured of {listed(without, 3)}: it is computed in a branch or a "
            "mapped function, or by the step itself."
        )
    if measured.accumulates:
        notes.append(
            "Gradients are accumulated: those of one call of the step are shown, and the update is "
            "0 in a measured step that ends no accumulation."
        )
    return notes
