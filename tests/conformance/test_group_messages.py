"""What is said where several processes cannot be connected, or cannot do what one can."""

import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import keras
import numpy as np
import pytest

import treadle
from treadle.backends.base import active
from treadle.core import processes
from treadle.core.identity import versions
from treadle.distribute import Place, join_processes
from treadle.distribute.channel import Channel, connect, free_port, receive
from treadle.errors import ConfigurationError, ProcessError, StepError

BACKEND = keras.config.backend()
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")


class Echo:
    """A group whose other member does what this one does."""

    rank, size, local_rank, local_size, failed = 0, 2, 0, 2, False

    def exchange(self, value: Any, at: str) -> list[Any]:
        return [value, value]

    def fail(self, error: BaseException) -> None: ...


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_group", Echo())


def fitted(*hooks: Any, directory: Path | None = None) -> treadle.Loop:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x = np.ones((8, 2), "float32")
    task = treadle.Supervised(model, "mse", "sgd")
    with treadle.Loop(task, directory, hooks=hooks, console=False) as loop:
        loop.fit(treadle.data.from_arrays(x, x[:, :1], batch_size=4), epochs=1)
    return loop


def test_a_process_with_other_versions_is_refused() -> None:
    port, answers = free_port(), list[Any]()

    def other() -> None:
        first = {"rank": 1, "size": 2, "backend": "none", "versions": {"keras": "2.0"}}
        with connect("127.0.0.1", port, first) as link:
            answers.append(receive(link)["fault"])

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ConfigurationError) as raised:
        join_processes(Place(0, 2, "127.0.0.1", port, "a test"), active())
    thread.join()
    text = str(raised.value)
    assert text.startswith(
        f"process 1 differs from process 0: backend is none there, and {BACKEND}"
    )
    assert f"; keras is 2.0 there, and {keras.__version__} here" in text
    assert text.endswith("Start all processes with equal settings, in equal environments")
    assert answers == [text]
    assert processes.process_group().size == 1


def test_a_process_whose_framework_cannot_join_is_no_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_group", processes.process_group())
    monkeypatch.setenv("TREADLE_JOINED", "")
    port, failures = free_port(), list[str]()

    def other() -> None:
        first = {"rank": 1, "size": 2, "backend": BACKEND, "versions": versions()}
        link = connect("127.0.0.1", port, first)
        receive(link)
        member = Channel(1, 2, {0: link}, leave=lambda why: None)
        with pytest.raises(ProcessError) as raised:
            member.exchange(0.0, "reading the clock")
        failures.append(str(raised.value))
        link.close()

    thread = threading.Thread(target=other)
    thread.start()
    late = MagicMock(join_processes=MagicMock(side_effect=ConfigurationError("it has started")))
    late.name = BACKEND
    with pytest.raises(ConfigurationError, match=r"^it has started$"):
        join_processes(Place(0, 2, "127.0.0.1", port, "a test"), late)
    thread.join()
    assert processes.process_group().size == 1
    [failure] = failures
    assert failure.startswith("process 0 failed: ConfigurationError: it has started. This process")


def test_a_process_that_leaves_with_an_error_may_go_on_alone() -> None:
    """A script that catches the error of `treadle.setup` is not ended because the others are."""
    here, there = socket.socketpair()
    members: list[Channel] = []
    thread = threading.Thread(
        target=lambda: members.append(Channel(1, 2, {0: there}, leave=lambda why: None))
    )
    thread.start()
    chief = Channel(0, 2, {1: here}, leave=lambda why: None)
    thread.join()
    there.shutdown(socket.SHUT_RDWR)  # as if it was killed
    with pytest.raises(ProcessError, match="process 1 has ended without a message"):
        chief.exchange(0, "a test")
    while (timer := chief._timer) is None:  # the thread that listens starts it
        time.sleep(0.01)
    chief.abandon(ValueError("planted"))
    assert timer.finished.is_set()  # it is cancelled
    members[0].abandon(ValueError("planted"))
    chief._failure = None  # a failure that comes later starts none
    chief._timer = None
    chief._failed(1, "killed")
    assert chief._timer is None
    here.close()
    there.close()


@pytest.mark.usefixtures("together")
def test_layers_are_not_measured_in_several_processes() -> None:
    assert fitted(treadle.hooks.GradientHealth()).history["note"] == [
        "GradientHealth: the layers were not measured: that is possible in one process, and 2 "
        "train together"
    ]


def test_a_model_that_is_split_among_processes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(active()), "is_split", lambda *_: True)
    loop = fitted(directory=tmp_path / "run")
    assert loop.history["warning"] == [
        "model.keras was not written: Keras cannot save it. Its weights are split among processes. "
        "Its weights are in state.safetensors"
    ]
    assert not (tmp_path / "run" / "model.keras").exists()


@on_jax
def test_jax_that_was_connected_by_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ConfigurationError) as raised:
        fitted()
    assert (
        "runs in 2 processes, which were not connected by Treadle: call treadle.setup, which "
        "connects them, instead of jax.distributed.initialize" in str(raised.value)
    )


@on_jax
@pytest.mark.usefixtures("together")
def test_jax_without_a_distribution_over_the_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ConfigurationError) as raised:
        fitted()
    assert (
        "runs in 2 processes, but no keras.distribution is set: do not call "
        "keras.backend.clear_session or set_distribution after treadle.setup" in str(raised.value)
    )


@on_jax
def test_fewer_devices_than_the_processes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("keras.distribution.list_devices", lambda: [f"cpu:{i}" for i in range(4)])
    with pytest.raises(ConfigurationError) as raised:
        active().distribute(2)
    assert str(raised.value) == (
        "devices=2, but the 2 processes have 4 together: leave it out, and all of them are used"
    )


@on_jax
def test_jax_that_has_started_cannot_join() -> None:
    import jax

    keras.ops.ones(1)
    before = jax.config.jax_cpu_collectives_implementation
    try:
        with pytest.raises(ConfigurationError) as raised:
            active().join_processes(Echo(), f"127.0.0.1:{free_port()}")
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)
    assert str(raised.value) == (
        "treadle.setup joins the other processes, and must come before JAX computes anything: "
        "move it to the top of the script"
    )


@on_torch
def test_pytorch_that_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def store(*_: Any) -> None:
        raise RuntimeError("the address is in use")

    monkeypatch.setattr(sys.modules["treadle.backends.torch.processes.engine"], "TCPStore", store)
    with pytest.raises(ConfigurationError) as raised:
        active().join_processes(Echo(), "10.0.0.1:7000")
    assert str(raised.value) == (
        "process 0 of 2 cannot connect to the others at 10.0.0.1:7000 with torch.distributed "
        "(gloo): the address is in use. Check that this address of process 0 can be reached from "
        "each machine, and that its port is free"
    )


@on_torch
def test_pytorch_that_was_connected_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.raises(ConfigurationError) as raised:
        active().join_processes(Echo(), "10.0.0.1:7000")
    assert str(raised.value) == (
        "torch.distributed was initialized as process 2 of 3, but this is process 0 of 2: leave "
        "the initialization to Treadle, or give both the same environment variables"
    )


@on_tensorflow
def test_tensorflow_that_has_started_cannot_join() -> None:
    keras.ops.ones(1)
    with pytest.raises(ConfigurationError) as raised:
        active().join_processes(Connecting(), "127.0.0.1:7000")
    assert str(raised.value) == (
        "treadle.setup joins the other processes, and must come before TensorFlow computes "
        "anything: move it to the top of the script"
    )


@on_tensorflow
def test_tensorflow_that_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.backends.tensorflow.processes import engine

    def enable(_: Any) -> None:
        raise RuntimeError("the address is in use")

    context = MagicMock(config=None, enable_collective_ops=enable)
    monkeypatch.setattr(engine, "eager_context", lambda: context)
    monkeypatch.setattr("tensorflow.config.threading.get_inter_op_parallelism_threads", lambda: 4)
    with pytest.raises(ConfigurationError) as raised:
        active().join_processes(Connecting(), "127.0.0.1:7000")
    text = str(raised.value)
    assert text.startswith("process 0 of 2 cannot connect to the others at 127.0.0.1:")
    assert text.endswith(
        "with TensorFlow: the address is in use. Check that the machines can reach one another"
    )


class Connecting(Echo):
    """A group whose other member has another address."""

    def exchange(self, value: Any, at: str) -> list[Any]:
        return [value, f"127.0.0.1:{free_port()}"]


@on_tensorflow
def test_processes_of_tensorflow_do_not_wait_forever() -> None:
    import tensorflow as tf

    from treadle.backends.tensorflow.processes.engine import TIMEOUT, TensorFlowEngine

    traced = tf.function(TensorFlowEngine(Echo()).sum).get_concrete_function(tf.TensorSpec([3]))
    [sums] = [x for x in traced.graph.get_operations() if x.type == "CollectiveReduceV2"]
    assert sums.get_attr("timeout_seconds") == TIMEOUT > 0


@on_tensorflow
def test_sums_in_a_loop_of_tensorflow_are_differentiated() -> None:
    import tensorflow as tf

    from treadle.backends.tensorflow.processes.engine import TensorFlowEngine

    engine = TensorFlowEngine(Echo())

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, h: (i + 1, tf.tanh(engine.differentiable(engine.sum, False, h))),
                (0, x),
            )[1]
        return tape.gradient(found, x)

    traced = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([3]))
    bodies = traced.graph.as_graph_def().library.function
    sums = [sum(n.op == "CollectiveReduceV2" for n in f.node_def) for f in bodies]
    assert sorted(sums)[-2:] == [1, 1]  # forward and backward


class Unlike(Echo):
    """A group whose other member has traced nothing."""

    def exchange(self, value: Any, at: str) -> list[Any]:
        return [value, []]


@on_tensorflow
def test_graphs_that_communicate_in_different_ways() -> None:
    import tensorflow as tf

    from treadle.backends.tensorflow.processes.engine import TensorFlowEngine

    engine = TensorFlowEngine(Unlike())
    processes: Any = SimpleNamespace(group=Unlike(), rank=0)
    with pytest.raises(StepError) as raised, engine.preparing(processes):
        tf.function(engine.sum).get_concrete_function(tf.TensorSpec([3]))
    assert str(raised.value) == (
        "the step that was traced in process 1 sums 0 messages, and that of process 0 1 or "
        "others: what a step computes must not depend on the process"
    )
    with engine.preparing(processes):  # of nothing, no process needs to know
        pass
