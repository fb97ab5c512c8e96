"""PyTorch: compiled parts replayed as CUDA graphs, with a stand-in for compiler and graph."""

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import keras
import pytest
from classifier import FEATURES, Classifier, batches, dense, head
from executions import some
from keras import layers, ops
from keras_versions import needs_keras
from own_step import CAPTURED, Steps, learn

import treadle
from treadle.testing import Trace, run_steps
from treadle.testing.trace import compare

if keras.config.backend() != "torch":
    pytest.skip("CUDA graphs of PyTorch", allow_module_level=True)

import torch

from treadle.backends.torch.capture import cuda_graph
from treadle.backends.torch.capture.cuda_graph import GraphReplay
from treadle.backends.torch.capture.proof import _proven
from treadle.backends.torch.patches import INTERNALS

BATCHES = list(zip(*batches(12), strict=True))
INDUCTOR, GRAPH = "windows of up to 256, inductor", "windows of up to 256, cuda-graph"


class Graph:
    """A graph as of CUDA: it reads and writes the addresses that were captured."""

    def __init__(self, function: Callable[..., Any], inputs: list[Any]) -> None:
        self._function, self._inputs = function, inputs
        self._pointers = [x.data_ptr() for x in inputs]
        before = [x.clone() for x in inputs]
        self.outputs = function(*inputs)
        for x, old in zip(inputs, before, strict=True):  # capturing runs nothing
            if 0 not in x.stride():
                x.copy_(old)
        for x in self.outputs:
            x.fill_(torch.nan if x.dtype.is_floating_point else 0)
        self.replays = 0

    def replay(self) -> None:
        assert [x.data_ptr() for x in self._inputs] == self._pointers
        self.replays += 1
        for static, x in zip(self.outputs, self._function(*self._inputs), strict=True):
            static.copy_(x)


class Captures:
    """Captures of a test; a graph that is replayed may compute something else."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.error: Exception | None = None
        self.change: Callable[[Any], Any] = lambda x: x

    def __call__(self, function: Callable[..., Any], inputs: list[Any]) -> tuple[Graph, Any]:
        if self.error is not None:
            raise self.error
        graph = Graph(lambda *x: tuple(map(self.change, function(*x))), list(inputs))
        self.graphs.append(graph)
        return graph, graph.outputs


@pytest.fixture
def captures(monkeypatch: Any) -> Generator[Captures]:
    found = Captures()
    monkeypatch.setattr(cuda_graph, "captured_on_device", found)
    monkeypatch.setattr(cuda_graph, "KIND", "cpu")

    def compiler(graph: Any, inputs: Any, **settings: Any) -> Any:
        return lambda *tensors: graph(*tensors)

    with INTERNALS["standalone_compile"].replaced(compiler):
        yield found


def trace(make: Any, compiler: Any = "cuda-graph", windows: tuple[int, ...] = (5, 1)) -> Trace:
    keras.utils.set_random_seed(3)
    return run_steps(make(), BATCHES, treadle.Options(compiler=compiler), windows)


def adam() -> Any:
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 10))
    parts = [dense(), layers.BatchNormalization(), layers.Dropout(0.5), head()]
    return Classifier([keras.Input((FEATURES,)), *parts], optimizer)


def in_parts() -> Any:
    """A step of two compiled parts, with a draw between them that depends on the first one."""

    def step(task: Any, x: Any, y: Any) -> Any:
        for _ in range(10):
            x = ops.tanh(x * 1.1 + 0.1)
        chosen = keras.random.categorical(x, 1, seed=task.seed)
        return {"loss": learn(task, x, y), "chosen": ops.mean(ops.cast(chosen, "float32"))}

    return Steps(step, seed=keras.random.SeedGenerator(1))


@pytest.mark.parametrize("make", some([adam, in_parts]))
def test_replays_have_the_bits_of_the_compiled_step(make: Any, captures: Captures) -> None:
    expected = trace(make, "inductor")
    assert not captures.graphs
    for windows in ((5, 1), (12,)):
        found = trace(make, windows=windows)
        assert (expected.plan, found.plan) == (INDUCTOR, GRAPH)
        compare(found, expected, "replayed", "compiled", tolerance=None)
    assert all(graph.replays > len(BATCHES) for graph in captures.graphs)


def test_a_capture_that_fails_leaves_the_compiled_step(captures: Captures) -> None:
    captures.error = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    found = trace(adam)
    assert found.plan == (
        f"{INDUCTOR} (not replayed as a CUDA graph: RuntimeError: CUDA error: operation not "
        "permitted when stream is capturing)"
    )
    compare(found, trace(adam, "inductor"), "fallen back", "compiled", tolerance=None)


def test_a_graph_that_computes_something_else_is_not_used(captures: Captures) -> None:
    needs_keras("3.14", "a sparse cross-entropy that Inductor compiles")
    captures.change = lambda x: x * 1.0001 if x.dtype.is_floating_point else x
    found = trace(adam)
    assert found.plan == (
        f"{INDUCTOR} (not replayed as a CUDA graph: when replayed twice, it returns a different "
        "'loss', in step 1 of the proof)"
    )
    compare(found, trace(adam, "inductor"), "fallen back", "compiled", tolerance=None)


def test_a_graph_that_the_proof_did_not_call_is_not_used() -> None:
    graph = GraphReplay(added, [False, True], [False, True])
    compiled: Any = SimpleNamespace(is_graph=False, refusal="")
    trials: Any = SimpleNamespace(difference=lambda *_: "")
    batches: Any = None
    assert _proven(compiled, [graph], trials, batches) == ""
    assert not compiled.is_graph
    assert compiled.refusal == "not replayed as a CUDA graph: it was not captured"
    assert graph.refusal


def test_on_a_cpu_there_is_no_graph(captures: Captures, monkeypatch: Any) -> None:
    monkeypatch.setattr(cuda_graph, "KIND", "cuda")
    why = "not replayed as a CUDA graph: it computes with a tensor on the cpu"
    assert trace(adam).plan == f"{INDUCTOR} ({why})"


def test_a_step_that_is_not_compiled_gives_that_reason(captures: Captures) -> None:
    def fails(graph: Any, inputs: Any, **settings: Any) -> Any:
        raise OSError("disk full")

    with INTERNALS["standalone_compile"].replaced(fails):
        plan = trace(adam).plan
    assert plan == f"{CAPTURED} (not compiled by Inductor: OSError: disk full)"


@pytest.mark.parametrize("fails", ["capture_begin", "capture_end"])
def test_a_capture_that_fails_leaves_the_stream_of_the_thread(fails: str, monkeypatch: Any) -> None:
    class Stream:
        device = torch.device("cuda:0")

    class Failing:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **named: Any) -> None:
                assert streams[-1] is not own
                if name == fails:
                    raise RuntimeError("CUDA error: operation failed due to a previous error")

            return call

    own = Stream()
    streams = [own]
    replaced = {
        "CUDAGraph": Failing,
        "Stream": Stream,
        "current_stream": lambda device=None: streams[-1],
        "set_stream": streams.append,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "_get_device_index": lambda *_: 0,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    with pytest.raises(RuntimeError, match="previous error"):
        cuda_graph.captured_on_device(lambda x: (x,), [torch.zeros(1)])
    assert len(streams) > 1 and streams[-1] is own


def added(x: Any, total: Any) -> tuple[Any]:
    total.add_(x.sum())
    return (x * 2,)


def test_the_first_call_runs_and_later_ones_replay(captures: Captures) -> None:
    total, replay = torch.zeros(()), GraphReplay(added, [False, True], [False, True])
    kept = []
    for i in range(4):
        kept.append(replay(torch.full((2,), float(i)), total)[0])
        assert len(captures.graphs) == (1 if i else 0)
    assert total.item() == 12.0
    assert [x[0].item() for x in kept] == [0, 2, 4, 6]  # not overwritten by later replays


def test_new_memory_of_a_variable_is_captured_again(captures: Captures) -> None:
    total, replay = torch.zeros(()), GraphReplay(added, [False, True], [False, True])
    for _ in range(2):
        replay(torch.ones(2), total)
    memory = total.data  # keeps the address in use
    total.data = torch.tensor(10.0)
    replay(torch.ones(2), total)
    assert (total.item(), memory.item(), len(captures.graphs)) == (12.0, 4.0, 2)


def test_a_batch_of_another_shape_is_not_repeated_to_fit(captures: Captures) -> None:
    total, replay = torch.zeros(()), GraphReplay(added, [False, True], [False, True])
    for _ in range(2):
        replay(torch.ones(2), total)
    with pytest.raises(ValueError, match=r"expected an input of shape .*\[2\].*\[1\]"):
        replay(torch.ones(1), total)


def test_inputs_that_are_changed_and_those_that_repeat_elements(captures: Captures) -> None:
    def halved(mask: Any, wide: Any) -> tuple[Any]:
        mask.mul_(0.5)
        return (mask + wide,)

    replay = GraphReplay(halved, [False, False], [True, False])
    for i in range(3):
        mask = torch.full((2, 3), 4.0)
        found = replay(mask, torch.full((2, 1), float(i)).expand(2, 3))[0]
        assert mask.eq(2.0).all()
        assert found.eq(2.0 + i).all()
    assert captures.graphs[0].replays == 2
