"""The values of an epoch or of an evaluation: means of what steps return, results of metrics."""

from collections.abc import Mapping
from typing import Any

from ..core.logs import Array, Means
from ..steps.results import joined, scalars
from ..steps.task import EpochMetrics, Task, adapter

Metrics = Mapping[str, Any]


def epoch_values(task: Task, step: str) -> "EpochValues":
    """Return an object that computes the values of an epoch, or of an evaluation.

    Args:
        task: The task.
        step: The name of the step, for messages.
    """
    own = adapter(task).metrics_of_epoch()
    return EpochValues(step) if own is None else OwnEpochValues(own)


class EpochValues:
    """Means of the values that a step returns, and results of the metrics that it updates.

    Methods take these metrics by name, since batches of a new form may add some.

    Args:
        step: The name of the step, for messages.
    """

    def __init__(self, step: str) -> None:
        self._step, self._means = step, Means()

    def add(self, values: Mapping[str, Array], weights: Mapping[str, Array]) -> None:
        """Add the values of a window of steps."""
        self._means.add(values, weights)

    def result(self, metrics: Metrics) -> dict[str, float]:
        """Return means and metric results since they were last reset."""
        return joined(self._means.result(), self.metric_results(metrics), self._step)

    def metric_results(self, metrics: Metrics) -> dict[str, float]:
        """Return the results of metrics by name, without the means."""
        results: dict[str, float] = {}
        for name, metric in metrics.items():
            found = metric.result()
            parts = found.items() if isinstance(found, Mapping) else [("", found)]
            for part, tensor in parts:
                results |= scalars(f"{name}_{part}" if part else name, tensor)
        return results

    def variables(self, metrics: Metrics) -> list[Any]:
        """Return the variables that `begin` resets."""
        return [variable for metric in metrics.values() for variable in metric.variables]

    def begin(self, metrics: Metrics) -> None:
        """Reset metrics that are updated for the first time."""
        for metric in metrics.values():
            metric.reset_state()

    def reset(self, metrics: Metrics) -> None:
        """Reset means and metrics."""
        self._means = Means()
        self.begin(metrics)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the variables of metrics."""
        return {"epoch": self._means.state()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._means.restore(saved["epoch"])


class OwnEpochValues(EpochValues):
    """The values of an epoch by the metrics of a task that has one object for them."""

    def __init__(self, own: EpochMetrics) -> None:
        super().__init__("")
        self._own, self._last, self._begun = own, dict[str, float](), False

    def add(self, values: Mapping[str, Array], weights: Mapping[str, Array]) -> None:
        """Keep the values of the last step."""
        self._last = {name: float(array[-1]) for name, array in values.items()}

    def result(self, metrics: Metrics) -> dict[str, float]:
        """Return the results of all metrics."""
        return self._own.result(self._last)

    metric_results = result

    def variables(self, metrics: Metrics) -> list[Any]:
        """Return the variables of all metrics."""
        return self._own.variables()

    def begin(self, metrics: Metrics) -> None:
        """Reset all metrics, once."""
        if not self._begun:
            self._own.reset()
        self._begun = True

    def reset(self, metrics: Metrics) -> None:
        """Reset all metrics."""
        self._last = {}
        self._own.reset()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the variables of metrics."""
        return {**super().state(), "returned": self._last}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._last = dict(saved["returned"])
