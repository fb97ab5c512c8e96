"""Streamed windows are copied to an accelerator while the one before runs; here a CPU stands in."""

import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, dense, head
from executions import long_to_compile
from loops import WithEverything, loop_of, make, same, source

import treadle
from treadle.backends.window import Window

BACKEND = keras.config.backend()
WHERE = {
    "jax": "treadle.backends.jax.windows",
    "tensorflow": "treadle.backends.tensorflow.windows",
    "torch": "treadle.backends.torch.capture.windows",
}[BACKEND]
STREAMED = treadle.Options(data_on_device=False, window=2)


class StandIn:
    """A stream of copies on a CPU, which notes what happens to each tensor."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self._events = 0

    @contextmanager
    def active(self) -> Generator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def copied(self, array: Any) -> Any:
        import torch

        self.log.append("copy")
        return torch.from_numpy(np.array(array))

    def event(self) -> int:
        self._events += 1
        self.log.append(("event", self._events))
        return self._events

    def wait(self, event: int, tensors: list[Any]) -> None:
        self.log.append(("wait", event, len(tensors)))


@pytest.fixture
def accelerator(monkeypatch: Any) -> StandIn:
    """Copy windows ahead, as on an accelerator."""
    found = StandIn()
    monkeypatch.setattr(f"{WHERE}.on_accelerator", lambda: True)
    if BACKEND == "torch":
        monkeypatch.setattr("treadle.backends.torch.capture.transfers.copy_stream", lambda: found)
    return found


def seeded() -> Any:
    """Return a task that does not draw from PyTorch's global generator: it runs in a thread."""
    return Classifier([keras.Input((FEATURES,)), dense(), head()])


def trained(
    task: Any = WithEverything, steps: int = 11
) -> tuple[dict[str, Any], list[float], list[Any]]:
    """Return the state, the losses and where a checkpoint of each step would resume."""
    places: list[Any] = []
    loop = loop_of(make(task), options=STREAMED)
    with loop:
        for _ in loop.epochs():
            for _ in loop.steps(source(rows=40), every="2 steps"):
                places.append(
                    (loop.progress.epoch, loop.progress.batch, loop.view.capture({}).source)
                )
                if loop.progress.step >= steps:
                    loop.stop("enough")
    return loop.state.arrays(), loop.history.steps("loss").tolist(), places


@long_to_compile
def test_windows_copied_ahead_change_no_bit_and_no_position(accelerator: StandIn) -> None:
    state, losses, places = trained()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{WHERE}.on_accelerator", lambda: False)
        expected, same_losses, same_places = trained()
    same(state, expected)
    assert (losses, places) == (same_losses, same_places)


def test_the_next_window_is_copied_once_and_before_the_results_are_fetched(
    accelerator: StandIn, monkeypatch: Any
) -> None:
    kinds = {"jax": "JaxExecutor", "tensorflow": "TensorFlowExecutor", "torch": "CaptureExecutor"}
    kind = getattr(importlib.import_module(WHERE), kinds[BACKEND])
    log: list[tuple[str, int]] = []
    numbers: dict[int, tuple[int, Window]] = {}
    run, transfer = kind.run, kind.transfer

    def number(window: Window) -> int:
        return numbers.setdefault(id(window), (len(numbers), window))[0]

    def noted_run(self: Any, window: Window, *arguments: Any, **named: Any) -> Any:
        log.append(("run", number(window)))
        outputs = run(self, window, *arguments, **named)
        fetch = outputs.fetch

        def fetched() -> Any:
            log.append(("fetch", number(window)))
            return fetch()

        monkeypatch.setattr(outputs, "fetch", fetched)
        return outputs

    def noted_transfer(self: Any, window: Window) -> None:
        log.append(("transfer", number(window)))
        transfer(self, window)

    monkeypatch.setattr(kind, "run", noted_run)
    monkeypatch.setattr(kind, "transfer", noted_transfer)
    trained()
    copied = [i for what, i in log if what == "transfer"]
    assert len(copied) >= 3
    for i in copied:
        at = log.index(("transfer", i))
        before = log[at - 1]  # a window that runs
        assert before[0] == "run" and log[at + 1] == ("fetch", before[1])
        assert ("run", i) not in log or log.index(("run", i)) == at + 2
    assert len(copied) == len(set(copied))


@pytest.mark.skipif(BACKEND != "jax", reason="what JAX puts on the device")
def test_the_arrays_that_were_put_on_the_device_are_those_that_a_window_uses(
    accelerator: StandIn, monkeypatch: Any
) -> None:
    import jax

    from treadle.backends.jax.windows import JaxExecutor

    puts: list[Any] = []
    used: list[Any] = []
    put, first = jax.device_put, JaxExecutor._call

    def noted(tree: Any, *arguments: Any) -> Any:
        puts.append(put(tree, *arguments))
        return puts[-1]

    def call(self: Any, window: Window, *arguments: Any) -> Any:
        inputs = self._first_inputs(window)[0]
        used.extend(x for x in puts if x is inputs)
        return first(self, window, *arguments)

    monkeypatch.setattr(jax, "device_put", noted)
    monkeypatch.setattr(JaxExecutor, "_call", call)
    trained()
    assert len(puts) >= 3
    assert len(used) >= len(puts) - 1  # the last one may be of an epoch that was not trained on


@pytest.mark.skipif(BACKEND != "torch", reason="streams of PyTorch")
def test_steps_wait_for_the_event_behind_the_copies_of_their_batches(accelerator: StandIn) -> None:
    trained()
    log = accelerator.log
    copies = [i for i, entry in enumerate(log) if entry == "enter"]
    assert len(copies) >= 3
    for number, i in enumerate(copies, 1):
        assert log[i + 1 : i + 4] == ["copy", "copy", ("event", number)]
        assert log[i + 4] == "leave"
    waits = [entry for entry in log if entry[0] == "wait"]
    assert [event for _, event, _ in waits] == sorted({event for _, event, _ in waits})
    assert all(count == 2 for *_, count in waits)
    for entry in waits:
        assert log.index(("event", entry[1])) < log.index(entry)


@pytest.mark.skipif(BACKEND != "torch", reason="types of PyTorch")
def test_other_types_are_converted_as_without_a_stream_of_copies(accelerator: StandIn) -> None:
    import torch

    from treadle.backends.torch.backend import BACKEND as backend
    from treadle.backends.torch.capture.transfers import start_copies

    arrays = {
        "double": np.ones(3),
        "none": None,
        "words": np.ones(2, "int32"),
        "wide": np.ones(2, "uint16"),
    }
    held, arrive = start_copies(arrays, backend.to_device)
    arrive()
    expected = {k: None if x is None else backend.to_device(x) for k, x in arrays.items()}
    assert held["none"] is None
    for name in ("double", "words", "wide"):
        assert held[name].dtype == expected[name].dtype
        assert torch.equal(held[name], expected[name])
    assert accelerator.log.count("copy") == 2


class Stream:
    """A stream of CUDA, which notes in which thread it is made to wait, and for which tensors."""

    def __init__(self, device: Any) -> None:
        import torch

        self.device, self.waits, self.tensors = torch.device(device), list[Any](), list[Any]()

    def wait_event(self, event: Any) -> None:
        self.waits.append(threading.current_thread())


class Cuda(threading.local):
    """Two devices; each thread has a current one, which is the first at its start, and streams."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = [Stream("cuda:0"), Stream("cuda:1")]

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: Any = None) -> Stream:
        import torch

        index = None if device is None else torch.device(device).index
        return self.streams[self.device if index is None else index]

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        index = stream.device.index
        before, self.device = (self.device, self.streams[index]), index
        self.streams[index] = stream
        yield
        self.device, self.streams[index] = before


@pytest.mark.skipif(BACKEND != "torch", reason="streams of PyTorch")
@pytest.mark.parametrize("where", ["cuda", "cuda:1"])
def test_steps_in_the_background_use_the_device_and_the_stream_of_the_loop(
    where: str, monkeypatch: Any
) -> None:
    import torch

    from treadle.backends.torch.capture import transfers

    expected = trained(seeded)
    cuda = Cuda()
    if where == "cuda":  # the loop's device is the current one of its thread
        cuda.device = 1
    own = cuda.streams[1]
    copies: list[Any] = []

    def copied(self: Any, array: Any) -> Any:
        copies.append((self._device, cuda.current_stream()))
        return torch.from_numpy(np.array(array))

    for name in ("current_device", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(transfers.CopyStream, "copied", copied)
    monkeypatch.setattr(transfers.CopyStream, "event", lambda self: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, on: on.tensors.append(x))
    monkeypatch.setattr(transfers, "get_device", lambda: where)
    for module in (WHERE, transfers.__name__):
        monkeypatch.setattr(f"{module}.on_accelerator", lambda: True)
    transfers._streams.cache_clear()
    try:
        state, *found = trained(seeded)
    finally:
        transfers._streams.cache_clear()
    same(state, expected[0])
    assert found == list(expected[1:])
    assert len(own.waits) >= 3
    assert threading.current_thread() not in own.waits
    assert len(own.tensors) == 2 * len(own.waits)
    assert {device for device, _ in copies} == {torch.device("cuda:1")}
    assert len({stream for _, stream in copies}) == 1 and copies[0][1] is not own
