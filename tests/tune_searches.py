"""What the tests of hyperparameter search share: a search without training, and a small task."""

from typing import Annotated, Literal

import keras
import numpy as np
import pytest
import sqlalchemy
from keras import ops

import treadle
from treadle import Choice, Range
from treadle.tuning.orders import Configuration, Order, Outcome
from treadle.tuning.study import Study

SPACES = {"rate": Range(1e-4, 1.0, log=True), "units": Range(8, 64), "kind": Choice("a", "b")}


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Let databases not wait for the disk: no power is cut here."""

    def connected(connection, record):
        connection.execute("pragma synchronous = off")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", connected)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", connected)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())


def wanted(**more):
    shared = {
        "task": "mine",
        "settings": {"name": "x"},
        "lasts": {"epochs": 6},
        "monitor": "val_loss",
        "direction": "min",
        "seed": 0,
    }
    asked = {
        "spaces": SPACES,
        "others": {"bias": True},
        "defaults": {"rate": 0.5, "units": 16, "kind": "a"},
        "pruning": True,
        "data": {},
    }
    shared |= {name: value for name, value in more.items() if name in shared}
    asked |= {name: value for name, value in more.items() if name in asked}
    return Configuration(Order(**shared), **asked)


def values(order):
    """Six values that fall, to a height that follows from the settings."""
    settings = order.settings
    height = (
        np.log10(settings["rate"] / 0.01) ** 2 + settings["units"] / 64 + (settings["kind"] == "a")
    )
    return [float(height + 1 / (at + 1)) for at in range(6)]


class Killed(Exception):
    pass


def go_through(trials, folder=None, kill=None, **more):
    """Search as a process would, which may be killed in trial N at report K, or before or after."""
    number, at_last = kill or (None, None)
    found = Study(wanted(**more), trials, folder, fresh=False)
    try:
        while (order := found.next()) is not None:
            if (order.number, "begun") == kill:
                raise Killed
            ended, value = "complete", None
            for at, value in enumerate(values(order)):
                stop = found.report(order.number, at, value)
                assert type(stop) is bool  # it is sent as JSON
                if order.number == number and at == at_last:
                    raise Killed
                if stop:
                    ended = "pruned"
                    break
            found.end(order.number, Outcome(ended, value, seed=0))
        return found.results()
    finally:
        found.close()


def facts(trials):
    return [(t.number, t.ended, t.value, dict(t.parameters), t.reports) for t in trials]


class Line(treadle.Task):
    """A slope that is to become 2."""

    epochs = 3

    def __init__(
        self,
        rate: Annotated[float, Range(0.01, 0.5, log=True)] = 0.01,
        fails: Literal["", "made", "nan"] = "",
    ) -> None:
        if fails == "made":
            raise KeyError("my own mistake")
        self.slope = keras.Variable(0.0)
        self.optimizer = keras.optimizers.SGD(np.nan if fails == "nan" else rate)

    def _loss(self, batch):
        x, y = batch
        return ops.mean((self.slope * x - y) ** 2)

    def train_step(self, batch):
        loss = treadle.minimize(lambda: self._loss(batch), [self.slope], self.optimizer)
        return {"loss": loss}

    def eval_step(self, batch):
        return {"loss": self._loss(batch)}

    def datasets(self):
        x = np.linspace(-1, 1, 32, dtype="float32")
        train = treadle.data.from_arrays(x, 2 * x, batch_size=8)
        held_out = treadle.data.from_arrays(x[::3], 2 * x[::3], batch_size=11, shuffle=False)
        return treadle.Datasets(train=train, validation=held_out)
