"""The plan: the written rule, the pace of windows, and where they end."""

import numpy as np
import pytest

from treadle import Options
from treadle.backends.plans import XLA, Facts
from treadle.backends.window import Rows, Window, capacity, padded
from treadle.errors import StepError
from treadle.steps.planning import Pace, candidates, choose, places

BOTH = (XLA, "graph")


@pytest.mark.parametrize(
    ("facts", "options", "plan"),
    [
        (Facts("cpu", BOTH), {}, "windows of up to 256, XLA"),
        (Facts("gpu", BOTH, slow="convolves"), {}, "windows of up to 256, XLA"),
        (
            Facts("cpu", BOTH, slow="convolves"),
            {},
            "windows of up to 256, graph (XLA convolves slower on a CPU)",
        ),
        (
            Facts("cpu", BOTH, slow="convolves"),
            {"jit": True},
            "single steps, XLA (XLA convolves slower in a loop on a CPU)",
        ),
        (Facts("cpu", BOTH), {"jit": False, "window": 8}, "windows of up to 8, graph"),
        (
            Facts("cpu", (XLA,), slow="convolves"),
            {},
            "single steps, XLA (XLA convolves slower in a loop on a CPU)",
        ),
        (Facts("cpu", (XLA,), slow="convolves"), {"fused": True}, "windows of up to 256, XLA"),
        (
            Facts("cpu", BOTH, slow="pools"),
            {},
            "windows of up to 256, graph (XLA pools slower on a CPU)",
        ),
        (Facts("cpu", (XLA,)), {"jit": False}, "windows of up to 256, XLA"),
        (Facts("cpu", ()), {}, "eager"),
        (Facts("cpu", (), refusal="it looks at values"), {}, "eager (it looks at values)"),
        (Facts("cpu", BOTH), {"execution": "eager"}, "eager"),
        (
            Facts("cpu", BOTH).without(XLA, "XLA: no kernel"),
            {},
            "windows of up to 256, graph (XLA: no kernel)",
        ),
    ],
)
def test_the_rule(facts: Facts, options: dict[str, object], plan: str) -> None:
    assert str(choose(facts, Options(**options))) == plan


def test_a_requested_compiled_step_that_is_not_available() -> None:
    with pytest.raises(StepError) as caught:
        choose(Facts("cpu", refusal="it looks at values"), Options(execution="compiled"), "forward")
    assert str(caught.value) == (
        "forward cannot be compiled: it looks at values. Let it run as Python with "
        "Options(execution='auto')"
    )


def test_every_possible_plan_is_a_candidate() -> None:
    for facts in (Facts("cpu", BOTH), Facts("cpu", (XLA,), slow="convolves"), Facts("cpu")):
        chosen = choose(facts, Options())
        kinds = [(plan.compiler, plan.fused) for plan in candidates(facts)]
        assert (chosen.compiler, chosen.fused) in kinds
        assert len(set(kinds)) == len(kinds)


def test_data_up_to_2_gib_is_placed_on_the_device() -> None:
    assert places(2**31, Options()) and not places(2**31 + 1, Options())
    assert places(2**40, Options(data_on_device=True))
    assert not places(1, Options(data_on_device=False))


def window(count: int, batch_bytes: int = 8) -> Window:
    return Window(np.zeros((count, batch_bytes), np.uint8), count, 1)


def test_windows_are_padded_with_zeros() -> None:
    x = np.ones((2, 3), np.int64)
    assert padded(x, 2) is x and padded(x, 1) is x
    assert padded(x, 3).tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert padded(x, 3).dtype == np.int64


def test_windows_are_joined_in_order() -> None:
    pieces = [Window((np.full((n, 2), n), None), n, 2) for n in (1, 2, 3)]
    joined = pieces[0].joined(pieces[1:])
    assert (joined.count, joined.examples, joined.batches[1]) == (6, 2, None)
    assert joined.batches[0].tolist() == [[n, n] for n in (1, 2, 2, 3, 3, 3)]
    assert pieces[0].joined([]) is pieces[0]


def test_windows_grow_to_half_a_second() -> None:
    pace, sizes = Pace(None), []
    for _ in range(6):
        sizes.append(pace.size)
        pace.ran(window(pace.size), 0.005 * pace.size, largest=1000)
    assert sizes == [1, 4, 16, 64, 64, 64]  # 100 would fit; programs are made for 64
    pace.ran(window(4), 4 * 2.0, largest=1000)
    assert pace.size == 1


def test_windows_of_rows_have_one_program_whatever_their_size() -> None:
    pace = Pace(None)
    rows = Rows(None, np.zeros((4, 2)), np.zeros((64, 2), np.int64))
    for _ in range(6):
        pace.ran(Window.of_rows(rows), 64 * 0.005, largest=1000)
    assert pace.size == 100


def test_windows_of_large_batches_are_short() -> None:
    pace = Pace(None)
    for _ in range(6):
        pace.ran(window(4, 2**21), 1e-4, largest=256)
    assert pace.size == 8
    for _ in range(6):
        pace.ran(window(1, 2**24 + 1), 1e-4, largest=256)
    assert pace.size == 1


def test_a_requested_size_is_kept() -> None:
    pace = Pace(7)
    pace.ran(window(7), 100.0, largest=7)
    assert pace.size == 7


def test_there_are_few_programs() -> None:
    assert sorted({capacity(count, 256) for count in range(1, 257)}) == [8, 64, 256]
    assert sorted({capacity(count, 32) for count in range(1, 33)}) == [8, 32]
    assert [capacity(1, 1), capacity(300, 256)] == [2, 300]


def test_a_window_of_rows_is_gathered_when_a_batch_is_read() -> None:
    x, y = np.arange(10) * 10, np.arange(10.0)
    rows = Rows(object, {"x": x, "y": y, "none": None}, np.array([[1, 3], [2, 0], [9, 9]]))
    whole = Window.of_rows(rows)
    assert (whole.count, whole.examples, whole.stacked_bytes) == (3, 2, 0)
    assert whole.batch(1)["x"].tolist() == [20, 0]
    first, rest = whole.split(1)
    assert first.batches["y"].tolist() == [[1.0, 3.0]]
    assert rest.batches["x"].tolist() == [[20, 0], [90, 90]]
    assert rest.rows is not None and rest.streamed().rows is None
    assert rest.streamed().batch(0)["none"] is None
    assert first.repeated(3).batches["x"].tolist() == [[10, 30]] * 3
    assert first.streamed().repeated(2).batches["x"].tolist() == [[10, 30]] * 2
    assert rows.nbytes == x.nbytes + y.nbytes
