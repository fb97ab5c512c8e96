"""What the tests of hooks share: a loop as hooks see it, and two numbers."""

from types import SimpleNamespace

import numpy as np

from treadle.core.history import History
from treadle.core.logs import Record, StepLogs
from treadle.core.progress import Progress

NAN, INF = float("nan"), float("inf")


class Loop:
    """What a hook sees of a loop, without one."""

    def __init__(self, directory=None, step=0, task=None, batches=None):
        self.directory, self.task, self.batches = directory, task, batches
        self.progress = Progress(step=step, seconds=0.25 * step)
        self.history, self.reason, self.weights = History(), None, 0
        self.unfinished = self.reads_shares = False
        self.state = SimpleNamespace(
            variables={}, arrays=lambda: {"weights": np.array(self.weights)}
        )

    def batch_at(self, step):
        return self.batches[step]

    def stop(self, why):
        self.reason = why

    def log(self, values):
        self.history.add(Record("log", self.progress, values))

    def snapshot(self):
        return {"weights": self.weights}

    def restore(self, snapshot):
        self.weights = int(snapshot["weights"])

    def window(self, hook, **values):
        arrays = {
            n: v if isinstance(v, np.ndarray) else np.array(v, "f4") for n, v in values.items()
        }
        steps = len(next(iter(arrays.values()))) if arrays else 1
        first = self.progress.step + 1
        self.progress = self.progress.advanced(steps, 8 * steps).after_seconds(0.25)
        hook.steps(self, StepLogs(first, arrays, arrays, 8, self.progress))

    def record(self, hook, kind, step=None, **values):
        if step is not None:
            self.progress = Progress(step, step // 10, step % 10, 8 * step, 0.25 * step)
        record = Record(kind, self.progress, values)
        self.history.add(record)
        hook.record(self, record)

    @property
    def warnings(self):
        return [r.values["warning"] for r in self.history.records if "warning" in r.values]
