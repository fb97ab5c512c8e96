"""PyTorch: a captured step compiled by Inductor computes the same within roundings, or falls back.

Compiling takes seconds. Most tests replace the compiler by one that runs the graph it is given.
"""

import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, batches, dense, head
from executions import some
from keras import layers, ops
from keras_versions import needs_keras
from loops import WithEverything, loop_of, make, same, source
from own_step import CAPTURED, Steps, learn

import treadle
from tests.dying import killed
from treadle.testing import Trace, run_steps
from treadle.testing.trace import Tolerance, compare

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's compiler", allow_module_level=True)

import torch

from treadle.backends.torch.patches import INTERNALS

COMPILED = "windows of up to 256, inductor"
BATCHES = list(zip(*batches(12), strict=True))
CLOSE = Tolerance(rtol=1e-4, atol=1e-5)

Make = Callable[[], Any]


class Compilers:
    """Compilers of a test, in the place of Inductor."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.error: Exception | None = None
        self.change: Callable[[Any], Any] = lambda outputs: outputs

    def __call__(self, graph: Any, inputs: Any, **settings: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.graphs.append(graph)
        return lambda *tensors: self.change(graph(*tensors))


@pytest.fixture
def compiler() -> Generator[Compilers]:
    """A compiler that runs graphs as they are."""
    found = Compilers()
    with INTERNALS["standalone_compile"].replaced(found):
        yield found


def trace(make: Make, compiler: str = "inductor", windows: tuple[int, ...] = (5, 1)) -> Trace:
    keras.utils.set_random_seed(3)
    return run_steps(make(), BATCHES, treadle.Options(compiler=compiler), windows)  # type: ignore[arg-type]


def reason(plan: str) -> str:
    found = re.fullmatch(re.escape(CAPTURED) + r" \(not compiled by Inductor: (.*)\)", plan)
    assert found is not None, plan
    return found[1]


def one_graph() -> None:
    """Skip the rest of a test of a step that older versions of Keras compile in two parts."""
    needs_keras("3.14", "a sparse cross-entropy that Inductor compiles")


def of(*parts: Any, optimizer: Any = None) -> Make:
    def make() -> Any:
        made = [part() for part in parts]
        return Classifier([keras.Input((FEATURES,)), *made, head()], optimizer and optimizer())

    return make


def drawing(task: Any, x: Any, y: Any) -> Any:
    noise = keras.random.normal(x.shape, seed=task.seed)
    return {"loss": learn(task, x + 0.1 * noise, y), "noise": ops.mean(noise)}


def conditional(task: Any, x: Any, y: Any) -> Any:
    loss = learn(task, x, y)
    task.often.assign_add(1.0)
    treadle.cond(
        task.often > 4.0, lambda: task.often.assign(0.0), lambda: task.often.assign_add(0.5)
    )
    return {"loss": loss * 2.0}


def image(units: int) -> list[Make]:
    return [
        lambda: layers.Reshape((FEATURES, 1)),
        lambda: layers.Conv1D(units, 3, padding="same", activation="relu"),
        lambda: layers.MaxPooling1D(2),
        layers.Flatten,
    ]


MODELS: dict[str, Make] = {
    "adam": of(dense, optimizer=lambda: keras.optimizers.Adam(1e-2)),
    "norm-dropout": of(
        dense,
        layers.BatchNormalization,
        lambda: layers.Dropout(0.5),
        lambda: layers.Dropout(0.3, seed=4),
        optimizer=lambda: keras.optimizers.AdamW(1e-2),
    ),
    "accumulated": of(
        dense, optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    ),
    "convolution": of(*image(4)),
    "recurrent": of(lambda: layers.Reshape((FEATURES, 1)), lambda: layers.LSTM(4)),
    "draws": lambda: Steps(drawing, seed=keras.random.SeedGenerator(4)),
    "global-draws": lambda: Steps(drawing, seed=None),
    "cond": lambda: Steps(conditional, often=keras.Variable(0.0, trainable=False)),
}


@pytest.mark.parametrize("name", some(MODELS))
def test_graphs_compute_what_was_captured(name: str, compiler: Compilers) -> None:
    captured, compiled = trace(MODELS[name], "captured"), trace(MODELS[name])
    assert (captured.plan, compiled.plan) == (CAPTURED, COMPILED)
    compare(compiled, captured, "compiled", "captured", Tolerance(rtol=1e-6, atol=1e-7))
    assert compiled.changed
    one_graph()
    assert len(compiler.graphs) == 1


def test_random_numbers_are_drawn_outside_and_are_the_same(compiler: Compilers) -> None:
    for name in ("norm-dropout", "draws"):
        trace(MODELS[name])
    drawn = [str(node.target) for graph in compiler.graphs for node in graph.graph.nodes]
    assert "aten.mm.default" in drawn
    assert not any("bernoulli" in name or "rand" in name for name in drawn)
    noise = [trace(MODELS["draws"], which).values["noise"] for which in ("captured", "inductor")]
    np.testing.assert_array_equal(*noise)


def test_masks_of_large_layers_are_drawn_before_the_one_part(compiler: Compilers) -> None:
    one_graph()
    compiled = trace(of(lambda: dense(90), lambda: layers.Dropout(0.5), lambda: dense(90)))
    assert compiled.plan == COMPILED
    assert len(compiler.graphs) == 1


def test_attention_is_compiled_unless_it_drops(compiler: Compilers) -> None:
    one_graph()

    def attending(rate: float) -> Make:
        def make() -> Any:
            inputs = keras.Input((FEATURES,))
            x = layers.Reshape((2, FEATURES // 2))(inputs)
            x = layers.MultiHeadAttention(2, 4, dropout=rate)(x, x)
            model = keras.Model(inputs, head()(layers.Flatten()(x)))
            return Classifier([model])

        return make

    for rate in (0.0, 0.3):
        found = [trace(attending(rate), which) for which in ("inductor", "captured")]
        assert [x.plan for x in found] == [COMPILED, CAPTURED]
        compare(found[0], found[1], "compiled", "captured", CLOSE)
    drawing = [
        sum("attention" in str(node.target) for node in graph.graph.nodes)
        for graph in compiler.graphs
    ]
    assert drawing[0] == 2  # forward and backward
    assert len(drawing) > 1


# Compiled for real

BOTH = of(
    dense,
    layers.BatchNormalization,
    lambda: layers.Dropout(0.5, seed=4),
    optimizer=lambda: keras.optimizers.Adam(1e-2),
)


def reads_then_writes(write: Callable[[Any, Any], Any]) -> Make:
    """Return a maker of a step that reads a variable, and then writes it, in two parts.

    The read waits for a draw, which waits for the first part. Its inputs alone would let the write
    run in that first part.

    Args:
        write: Changes the variable in place, from the first part's values.
    """

    def chained(x: Any) -> Any:
        for _ in range(10):  # operations enough for a part
            x = ops.tanh(x * 1.1 + 0.1)
        return x

    def step(task: Any, x: Any, y: Any) -> Any:
        start = chained(x)
        noise = ops.cast(keras.random.categorical(start, 1, seed=task.seed), "float32")
        read = chained(task.held.value + noise)
        write(task, chained(start))
        return {"read": ops.mean(read), "held": ops.mean(task.held.value)}

    def make() -> Any:
        held = keras.Variable(np.ones(FEATURES, "float32"))
        return Steps(step, held=held, seed=keras.random.SeedGenerator(1))

    return make


def added(task: Any, x: Any) -> None:
    task.held.assign_add(ops.mean(x, axis=0))


def replaced(task: Any, x: Any) -> None:
    task.held.assign(ops.mean(x, axis=0))


@pytest.mark.parametrize("write", [added, replaced])
def test_a_write_runs_after_earlier_reads_in_other_parts(write: Any, compiler: Compilers) -> None:
    make = reads_then_writes(write)
    expected, found = trace(make, "captured"), trace(make)
    assert found.plan.startswith(COMPILED), found.plan  # the proof would refuse another order
    assert len(compiler.graphs) == 2
    compare(found, expected, "compiled", "captured", tolerance=CLOSE)


@pytest.mark.long
def test_a_compiled_step_computes_the_same_within_roundings() -> None:
    compiled, captured = trace(BOTH), trace(BOTH, "captured")
    assert compiled.plan == COMPILED
    compare(compiled, captured, "compiled", "captured", Tolerance(rtol=1e-3, atol=1e-3))
    for name in compiled.values:
        np.testing.assert_allclose(compiled.values[name], captured.values[name], rtol=1e-4)
    # One program for single steps and windows: the bits agree.
    compare(compiled, trace(BOTH, windows=(1,)), "in windows", "step by step", tolerance=None)
    compare(compiled, trace(BOTH, windows=(12,)), "in windows", "in one", tolerance=None)


# What falls back


def test_a_compiler_that_fails_names_the_operation_and_its_line(compiler: Compilers) -> None:
    compiler.error = RuntimeError("LoweringException: no such thing\n  target: aten.tanh.default")
    found = reason(trace(MODELS["adam"]).plan)
    assert found == (
        "aten.tanh.default failed, at classifier.py:37: logits = self.model(x, training=True): "
        "RuntimeError: LoweringException: no such thing target: aten.tanh.default"
    )


@pytest.mark.long
def test_without_a_cpp_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import config, cpp_builder

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(config.cpp, "cxx", (None, "g++"))
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        found = reason(trace(of(lambda: dense(3))).plan)
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()
    assert found == (
        "there is no C++ compiler: install g++, or name one in the environment variable CXX"
    )


def test_a_compiled_step_that_computes_something_else(compiler: Compilers) -> None:
    one_graph()
    compiler.change = lambda outputs: tuple(x * 1.001 for x in outputs)
    found = reason(trace(MODELS["adam"]).plan)
    assert found == "when replayed, it returns a different 'loss', in step 1 of the proof"


def rounded_late(x: Any) -> Any:
    """Return what a program computes that does not round to half precision in between."""
    return x * (1 + 2e-3 * torch.sign(torch.sin(1e4 * x.float())).to(x.dtype))


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a factor": lambda x: x * 1.5,
    "a sign": lambda x: -x,
    "no update": torch.zeros_like,
    "rows in another order": lambda x: x.flip(0),
}


@contextmanager
def changed_product(last: Any, others: Any = None) -> Generator[None]:
    """Replace the compiler by one that changes the products of a step, the last one by itself."""
    from torch.fx import Interpreter

    def compile_(graph: Any, inputs: Any, **settings: Any) -> Any:
        products = [n for n in graph.graph.nodes if n.target is torch.ops.aten.mm.default]

        class Changing(Interpreter):
            def run_node(self, n: Any) -> Any:
                change = last if n is products[-1] else others if n in products else None
                found = super().run_node(n)
                return found if change is None else change(found)

        return lambda *tensors: Changing(graph).run(*tensors)

    with INTERNALS["standalone_compile"].replaced(compile_):
        yield


@pytest.mark.parametrize("wrong", some([None, *WRONG]))
def test_half_precision_allows_its_own_rounding_and_no_more(wrong: str | None) -> None:
    """One product of a gradient is wrong; Adam would hide its size in the variable itself."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with changed_product(WRONG[wrong] if wrong else rounded_late, rounded_late):
            plan = trace(MODELS["adam"]).plan
    finally:
        keras.config.set_dtype_policy("float32")
    if wrong is None:
        assert plan == COMPILED
    else:
        assert re.match("when replayed, it computes a different ", reason(plan)), plan


@pytest.mark.parametrize("wrong", [None, "a sign", "no update"])
def test_a_small_update_hides_no_wrong_gradient(wrong: str | None) -> None:
    """Each step changes weights by a few units in their last place, without moments."""
    small = of(dense, optimizer=lambda: keras.optimizers.SGD(1e-5))
    with changed_product(WRONG[wrong] if wrong else None):
        plan = trace(small).plan
    if wrong is None:
        assert plan == COMPILED
    else:
        assert re.match("when replayed, it computes a different ", reason(plan)), plan


def test_labels_that_are_floats_hide_no_wrong_gradient() -> None:
    """A step that casts them would get other labels from other last bits."""

    labels_as_floats = [(x, y.astype("float32")) for x, y in BATCHES]
    options = treadle.Options(compiler="inductor")
    plans: list[str] = []
    for factor in (1.0, 1.05):
        keras.utils.set_random_seed(3)
        with changed_product(lambda x, factor=factor: factor * x):
            plans.append(run_steps(MODELS["adam"](), labels_as_floats, options, (5, 1)).plan)
    assert plans[0] == COMPILED
    assert re.match("when replayed, it computes a different ", reason(plans[1])), plans[1]


def test_a_compiled_step_that_does_not_repeat(compiler: Compilers) -> None:
    one_graph()
    turns = iter(range(1000))
    compiler.change = lambda outputs: tuple(x * (1 + 2e-7 * (next(turns) % 2)) for x in outputs)
    found = reason(trace(MODELS["adam"]).plan)
    assert found == "when replayed twice, it returns a different 'loss', in step 1 of the proof"


def test_a_step_of_which_nothing_can_be_compiled() -> None:
    @torch.library.custom_op("treadle_tests::grown", mutates_args=())
    def grown(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Grows(treadle.Task):
        def __init__(self) -> None:
            self.weight = keras.Variable(1.0)

        def train_step(self, batch: Any) -> Any:
            self.weight.assign(grown(self.weight.value))
            return {"weight": self.weight.value}

    found = reason(trace(Grows).plan)
    assert re.fullmatch(
        r"no part of it can be compiled: treadle_tests.grown.default is not an operator of PyTorch "
        r"itself, at test_inductor.py:\d+: self.weight.assign\(grown\(self.weight.value\)\)",
        found,
    ), found


def test_a_step_of_many_parts(compiler: Compilers) -> None:
    @torch.library.custom_op("treadle_tests::passed", mutates_args=())
    def passed(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def step(task: Any, x: Any, y: Any) -> Any:
        for _ in range(5):
            for _ in range(4):
                x = ops.tanh(x * 1.1)
            x = passed(x)
        return {"loss": learn(task, x, y)}

    found = reason(trace(lambda: Steps(step)).plan)
    assert found.startswith("it has 6 parts, and 4 at most pay: treadle_tests.passed.default is ")
    assert not compiler.graphs


def test_other_operators_run_between_the_parts(compiler: Compilers) -> None:
    @torch.library.custom_op("treadle_tests::through", mutates_args=())
    def through(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def step(task: Any, x: Any, y: Any) -> Any:
        for _ in range(5):
            x = ops.tanh(x * 1.1)
        return {"loss": learn(task, through(x), y)}

    compiled, captured = (trace(lambda: Steps(step), which) for which in ("inductor", "captured"))
    assert compiled.plan == COMPILED
    compare(compiled, captured, "compiled", "captured", CLOSE)
    assert len(compiler.graphs) == 2


# Options, records and resuming


def test_by_default_a_cpu_captures() -> None:
    from treadle.backends.torch.capture.inductor import STEPS_THAT_PAY, pays

    with loop_of() as loop:
        loop.fit(source(), steps=2)
        assert "captured" in loop.plan and "inductor" not in loop.plan
    assert pays("cuda", STEPS_THAT_PAY) and not pays("cuda", STEPS_THAT_PAY - 1)
    assert not pays("cuda", None) and not pays("cpu", STEPS_THAT_PAY)


@pytest.mark.long
def test_long_calls_compile_by_default_on_a_gpu(
    compiler: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def pays(device: str, steps: int | None) -> bool:
        asked.append(steps)
        return steps is not None and steps >= 12

    monkeypatch.setattr("treadle.backends.torch.backend.pays", pays)
    for lasts, name in (({"steps": 11}, "captured"), ({"epochs": 2}, "inductor")):
        with loop_of() as loop:
            loop.fit(source(), **lasts)
            assert f", {name}" in loop.plan
    assert asked == [11, 12]


def trained(directory: Path | None, compiler: str, ends: int | None = None) -> Any:
    options = treadle.Options(compiler=compiler)  # type: ignore[arg-type]
    hooks: list[Any] = [treadle.at(f"{ends} steps", killed)] if ends else []
    hooks += [treadle.hooks.Checkpoint(every="3 steps")] if directory else []
    with loop_of(make(WithEverything), directory=directory, options=options, hooks=hooks) as loop:
        loop.fit(source(), epochs=3)
        return loop.plan, loop.state.arrays()


def test_a_resumed_run_computes_the_same_bits(compiler: Compilers, tmp_path: Path) -> None:
    _, whole = trained(None, "inductor")
    with pytest.raises(OSError, match="killed"):
        trained(tmp_path, "inductor", ends=8)
    recorded = json.loads((tmp_path / "run.json").read_text())
    assert recorded["options"]["compiler"] == "inductor" and ", inductor" in recorded["plan"]
    plan, resumed = trained(tmp_path, "inductor")
    assert ", inductor" in plan
    same(whole, resumed)


def trained_on_two_forms(directory: Path | None, ends: int | None = None) -> Any:
    """Train on batches of 8 rows, and of 5 at the end of each epoch."""
    keras.backend.clear_session()
    treadle.setup(seed=0)
    x, y = batches(4)
    train = [(x[i], y[i]) for i in range(3)] + [(x[3][:5], y[3][:5])]
    hooks: list[Any] = [treadle.at(f"{ends} steps", killed)] if ends else []
    hooks += [treadle.hooks.Checkpoint(every="5 steps")] if directory else []
    options = treadle.Options(compiler="inductor")
    task = of(dense, optimizer=lambda: keras.optimizers.Adam(1e-2))()
    with treadle.Loop(task, directory, hooks, options, console=False) as loop:
        loop.fit(train, epochs=4)
        return loop.plan, loop.state.arrays()


@pytest.mark.parametrize("fails", some([1, 2]))
def test_each_form_of_batch_keeps_its_compiler_when_a_run_resumes(
    fails: int, compiler: Compilers, tmp_path: Path
) -> None:
    """The compiler fails for the first or the second form, but not when the run resumes."""
    one_graph()

    def sometimes(graph: Any, inputs: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == fails:
            raise OSError("disk full")
        compiled = compiler(graph, inputs)  # rounds as the captured step, which would show nothing
        return lambda *tensors: [
            x * (1 + 1e-6) if x.dtype.is_floating_point and x.ndim == 2 else x
            for x in compiled(*tensors)
        ]

    calls: list[int] = []
    with INTERNALS["standalone_compile"].replaced(sometimes):
        plan, whole = trained_on_two_forms(None)
        assert len(calls) == 2 and len(compiler.graphs) == 1
        calls.clear()
        with pytest.raises(OSError, match="killed"):
            trained_on_two_forms(tmp_path, ends=7)
        del compiler.graphs[:]
        fails = 0
        resumed_plan, resumed = trained_on_two_forms(tmp_path)
    assert len(compiler.graphs) == 1
    assert resumed_plan.partition(" (")[0] == plan.partition(" (")[0]
    same(whole, resumed)


@pytest.mark.long
def test_a_run_compiled_by_default_stays_compiled(
    compiler: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr("treadle.backends.torch.backend.pays", lambda device, steps: True)
        trained(tmp_path, "auto", ends=8)
    plan, _ = trained(tmp_path, "auto")
    assert ", inductor" in plan


def test_branches_that_return_the_memory_of_a_variable_are_not_compiled(
    compiler: Compilers,
) -> None:
    """The other branch would run on memory that the recorded one does not use."""

    class Chooses(treadle.Task):
        def __init__(self) -> None:
            self.a = keras.Variable(np.full(200, 1.0, "float32"))
            self.b = keras.Variable(np.full(200, 2.0, "float32"))
            self.seed = keras.random.SeedGenerator(3)

        def train_step(self, batch: Any) -> Any:
            x, flag = batch
            chosen = treadle.cond(flag, lambda: self.b.value, lambda: self.a.value)
            for _ in range(10):
                x = ops.tanh(x * 1.1 + 0.1)
            drawn = keras.random.categorical(ops.reshape(x, (1, -1)), 1, seed=self.seed)
            chosen = chosen * (1 + 0 * ops.cast(drawn[0, 0], "float32"))
            for _ in range(10):
                chosen = chosen * 1.0 + 0.0
            self.b.assign_add(ops.ones(200) * 10)
            return {"loss": ops.mean(chosen)}

    flags = (0, 0, 0, 0, 1, 1, 0, 1)
    data = [(np.full(200, 0.3, "float32"), np.array(flag, bool)) for flag in flags]
    found = run_steps(Chooses(), data, treadle.Options(compiler="inductor"), (4, 1))
    assert reason(found.plan).startswith("cond returns the memory of a variable, at ")
    assert list(found.values["loss"]) == [1, 1, 1, 1, 42, 52, 1, 72]


def test_a_number_of_the_task_that_changes_is_an_input(compiler: Compilers) -> None:
    class Scaled(treadle.Task):
        def __init__(self) -> None:
            self.total = keras.Variable(np.ones(20, "float32"))
            self.scale = ops.convert_to_tensor(1.0)

        def train_step(self, x: Any) -> Any:
            for _ in range(10):
                x = ops.tanh(x * 1.1 + 0.1)
            self.total.assign_add(x * 0.01)
            return {"loss": self.scale * (1 + 0 * ops.mean(x))}

    task = Scaled()
    hooks = [treadle.at("3 steps", lambda loop: task.scale.fill_(0.5))]
    options = treadle.Options(compiler="inductor")
    with treadle.Loop(task, console=False, options=options, hooks=hooks) as loop:
        history = loop.fit([np.full(20, 0.1, "float32")] * 6, epochs=1)
    assert loop.plan.startswith(COMPILED) and len(compiler.graphs) == 1
    assert list(history.steps("loss")) == [1, 1, 1, 0.5, 0.5, 0.5]


def test_an_error_while_splitting_falls_back(
    compiler: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise ValueError("no parts")

    monkeypatch.setattr("treadle.backends.torch.capture.inductor.split", fails)
    assert reason(trace(of(dense)).plan) == "ValueError: no parts"
