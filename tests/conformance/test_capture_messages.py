"""PyTorch: sums over processes in a captured step are joined where none needs another's result."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's tape", allow_module_level=True)

import torch

from treadle.backends.base import active
from treadle.backends.torch.capture.code import Captured
from treadle.backends.torch.capture.passes import simplified
from treadle.backends.torch.capture.recording import recording
from treadle.distribute.dividing.agreement import refusal
from treadle.distribute.dividing.executor import _reduced
from treadle.distribute.dividing.rows import OwnRows, Seen
from treadle.distribute.torch.backend import TorchGroup

State, Batch = torch.Tensor, torch.Tensor


class Doubled:
    """The sum over two processes with equal tensors."""

    acts = adds_elements = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def written(tape: Any, results: list[Any]) -> Captured:
    """Return the function of a tape that returns these tensors."""
    names = [[str(i) for i in range(len(results))], [], []]
    return Captured(tape, simplified(tape, [tape.ref_of(x) for x in results]), names, "step")


def captured(step: Callable[..., list[Any]], state: State, batch: Batch) -> Captured:
    """Record `step(total, state, batch)`, in which `total` is recorded as a sum."""
    with torch.no_grad(), recording([state], [batch], torch.zeros(()), False) as tape:
        doubled = Doubled()
        results = step(lambda x: tape.call(doubled, x), state, batch)
    return written(tape, results)


def counted_before(total: Any, state: State, batch: Batch) -> list[Any]:
    """A sum of what a batch has counted, after a change that waits for the first sum."""
    gradient = total(batch + 1)
    state.sub_(gradient)
    return [total(batch[:2] * 3), gradient * 2]


def counted_afterwards(total: Any, state: State, batch: Batch) -> list[Any]:
    """A sum of what depends on the state after this change."""
    state.sub_(total(batch))
    return [total(state * 3)]


def counted_in_place(total: Any, state: State, batch: Batch) -> list[Any]:
    """A sum of memory that is changed after the first sum has read it, as is its view."""
    counts = batch.clone()
    first = total(counts[1:])
    counts[0].add_(first[0])
    return [total(counts), first + 0]


def drawn(total: Any, state: State, batch: Batch) -> list[Any]:
    """A sum of random numbers, which are drawn after others."""
    state.copy_(total(batch) + torch.rand(3))
    return [total(torch.rand(3))]


def of_several(total: Any, state: State, batch: Batch) -> list[Any]:
    """Sums of another type and of another shape between those of flat tensors."""
    first = total(batch)
    whole = total(batch.to(torch.int64))
    square = total(batch[:, None])
    return [first + 0, whole + 0, square + 0, total(batch[:1]) + 0]


@pytest.mark.parametrize(
    ("step", "messages"),
    [
        (counted_before, ["torch.float32 (5,)"]),
        (counted_afterwards, ["torch.float32 (3,)"] * 2),
        (counted_in_place, ["torch.float32 (2,)", "torch.float32 (3,)"]),
        (drawn, ["torch.float32 (3,)"] * 2),
        (
            of_several,
            [
                "torch.float32 (3,)",
                "torch.int64 (3,)",
                "torch.float32 (3, 1)",
                "torch.float32 (1,)",
            ],
        ),
    ],
)
def test_sums_are_joined_if_no_value_changes(
    step: Callable[..., list[Any]], messages: list[str]
) -> None:
    code = captured(step, torch.zeros(3), torch.ones(3))
    assert code.messages == messages
    states, batch = (torch.zeros(3), torch.zeros(3)), torch.tensor([1.0, 2.0, 5.0])
    torch.manual_seed(0)
    expected = step(Doubled(), states[0], batch.clone())
    torch.manual_seed(0)
    found = code([states[1]], [batch], None).values.values()
    for one, other in zip([*expected, states[0]], [*found, states[1]], strict=True):
        assert torch.equal(one, other)


def test_logged_values_do_not_keep_the_message_with_the_gradients() -> None:
    """Until they are fetched: a window of N steps would hold N copies of the gradients."""
    group: Any = SimpleNamespace(rank=0, size=2)
    processes, counts = TorchGroup(active(), group), SimpleNamespace(changes=lambda: [])
    mine = OwnRows(processes, 4, Seen())
    state, batch = torch.zeros(100), torch.ones(100)
    with processes.alone(), torch.no_grad():
        with recording([state], [batch], torch.zeros(()), False) as tape:
            loss = batch.mean()
            mean, gradients = mine.reduced(loss, {"": [batch]}, {"": loss}, {"": mine.share})
            state.sub_(gradients[""][0])
            values, _ = _reduced(mine, {"loss": mean, "first": batch[0] * 2}, {}, counts)
        eager = list(values.values())
        code = written(tape, eager)
        replayed = list(code([state], [batch], None).values.values())
    assert code.messages == ["torch.float32 (104,)"]
    assert [float(x) for x in replayed] == [1, 2]
    assert {x.untyped_storage().nbytes() for x in [*eager, *replayed]} == {4}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_without_rows_joins_the_same_sums(rank: int) -> None:
    """Although it sums zeros: other processes must wait for the weights before the gradients."""
    group: Any = SimpleNamespace(rank=rank, size=2)
    processes = TorchGroup(active(), group)
    mine = OwnRows(processes, 1, Seen())
    assert mine.is_idle == (rank == 1)
    state, batch = torch.zeros(3), torch.ones(3)
    with processes.alone(), torch.no_grad():
        with recording([state], [batch], torch.zeros(()), False) as tape:
            weight = mine.total(batch[:1] * 2)
            state.sub_(mine.total(batch / weight))
            counted = mine.total(batch[:2] * 3)
        code = written(tape, [counted])
        [found] = code([state], [torch.full((3,), float("nan"))], None).values.values()
    assert code.messages == ["torch.float32 (1,)", "torch.float32 (5,)"]
    assert torch.isnan(found).all() == (rank == 0) and (rank == 0 or (found == 0).all())


def test_what_processes_capture_must_agree() -> None:
    def of(reason: str, *others: list[Any]) -> str:
        group = SimpleNamespace(exchange=lambda mine, at: [mine, *others])
        processes: Any = SimpleNamespace(group=group)
        return refusal(reason, ["float32 (5,)"], processes)

    assert of("", ["", ["float32 (5,)"]]) == ""
    assert of("", ["it reads", []]) == "in process 1, it reads"
    assert of("it reads", ["it reads", []]) == "it reads"
    assert of("", ["", ["float32 (3,)"]]) == "the processes have captured different sums"
