"""Converting a `keras.utils.PyDataset` to a source."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import random_states
from ..order import Permutation
from ..reader import BatchSource, lasting
from ..source import ReadRequest, Source
from ..states import Keeper, generators_of, keeper_of, tallies_of


def from_keras(data: Any, shuffle: bool = False, seed: int | None = None) -> Source | None:
    """Convert a `keras.utils.PyDataset` to a source; None for anything else.

    Its number of batches is read at the start of each epoch, after `on_epoch_begin`.

    Args:
        data: The data set.
        shuffle: Whether its batches come in another order in each epoch, if their number is known.
        seed: The seed of these orders; that of the run by default.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(data, keras.utils.PyDataset):
        return None
    dataset: Any = data
    length: int | None = dataset.num_batches
    hooks, kind = _Hooks(dataset), type(dataset)

    def batches(reading: ReadRequest) -> Iterator[Any]:
        hooks.calls["seed"] = reading.seed
        begun = reading.first > 0 and hooks.calls["begin"] > hooks.calls["end"]
        if reading.state() is None and not begun:
            hooks.call("begin")
            source.length = dataset.num_batches
        order = None
        if shuffle and source.length:
            order = Permutation(
                source.length, reading.seed if seed is None else seed, reading.epoch
            )
        return _Epoch(hooks, reading, source.length, order)

    base, keeper = keras.utils.PyDataset, keeper_of(dataset)
    names = [n for n in ("on_epoch_begin", "on_epoch_end") if getattr(kind, n) != getattr(base, n)]
    inexact = None
    if names and keeper is None:
        keeper = Keeper(kind.__name__, hooks.state, hooks.call_again)
        inexact = (
            f"{' and '.join(names)} of {kind.__name__} may change its data or their order: a "
            f"resumed run calls them as often as they were called before, which is exact only if "
            f"they are deterministic, or if {kind.__name__} has state() and restore(state)"
        )
    keeper = keeper or generators_of(dataset)
    source = BatchSource(
        lasting(batches, keeper),
        length,
        endless=length is None,
        inexact=inexact,
        count=None if length is None else lambda: dataset.num_batches,
        varies=bool(names) and length is not None,
    )
    return source


class _Hooks:
    """Calls `on_epoch_begin` and `on_epoch_end` of a data set, and counts the calls."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.calls = tallies_of(dataset)

    def call(self, hook: str) -> None:
        """Call a hook: `begin` or `end`."""
        getattr(self.dataset, f"on_epoch_{hook}")()
        self.calls[hook] += 1

    def state(self) -> dict[str, int]:
        """Return the number of calls, and the seed of the run."""
        return {name: self.calls[name] for name in ("begin", "end", "seed")}

    def call_again(self, state: Mapping[str, int]) -> None:
        """Call the hooks of earlier epochs again with their original random states."""
        calls = self.calls
        while True:
            hook = "end" if calls["end"] < min(calls["begin"], state["end"]) else "begin"
            if calls[hook] >= state[hook]:
                return
            batch = 0 if hook == "begin" else self.dataset.num_batches or 0
            random_states.seed_for_batch(state["seed"], calls[hook], batch)
            self.call(hook)


class _Epoch(Iterator[Any]):
    """The batches of an epoch.

    Args:
        hooks: The data set and its hooks.
        reading: The epoch, and the number of its first batch.
        length: The number of batches of this epoch; None if it never ends.
        order: The order of the batches; None for that of their numbers.
    """

    def __init__(
        self, hooks: _Hooks, reading: ReadRequest, length: int | None, order: Permutation | None
    ) -> None:
        self._hooks, self._reading, self._order = hooks, reading, order
        self._length, self._number, self._ended = length, reading.first, False

    def __next__(self) -> Any:
        if self._length is not None and self._number >= self._length:
            self.finish()
            raise StopIteration
        number = self._number
        self._number += 1
        return self._hooks.dataset[
            number if self._order is None else int(self._order(np.array(number)))
        ]

    def finish(self) -> None:
        """Call `on_epoch_end`, with the random states of the end of the epoch."""
        if not self._ended:
            self._ended = True
            seed, epoch = self._reading.seed, self._reading.epoch
            random_states.seed_for_batch(seed, epoch, self._length or 0)
            self._hooks.call("end")
