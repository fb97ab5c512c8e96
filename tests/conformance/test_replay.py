"""Going back to a step of a past run: the same bits, and the origin of what is not finite."""

import hashlib
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from cases import CLASSES, FEATURES, Classifier, dense, head
from keras import ops
from mistakes import arrays, source
from typer.testing import CliRunner

import treadle
from treadle import cli, data
from treadle.checkpoint import Checkpoints
from treadle.checkpoint.arrays import read_arrays
from treadle.doctor import Replay, replay, replaying
from treadle.doctor.numbers import Numbers, farthest
from treadle.errors import (
    CheckpointError,
    ConfigurationError,
    DirectoryError,
    NonFiniteError,
    TreadleError,
)
from treadle.hooks import Checkpoint, JSONLines, NonFinite
from treadle.hooks.lines import read_log

pytestmark = pytest.mark.any_backend

ROUNDING = 1e-4
STEPS = 15


def noisy() -> Classifier:
    """A task whose steps draw random numbers and move statistics."""
    normalized, dropped = keras.layers.BatchNormalization(), keras.layers.Dropout(0.4)
    return Classifier([dense(8), normalized, dropped, head()], keras.optimizers.Adam(1e-2))


def plain() -> Classifier:
    return Classifier([keras.Input((FEATURES,)), dense(), head()], keras.optimizers.SGD(0.1))


def train(
    make: Callable[[], Any],
    directory: Path | None,
    hooks: Sequence[Any] = (),
    sources: Sequence[Any] | None = None,
    **how: Any,
) -> treadle.Loop:
    """Train as a script does, which makes a call of the loop for each source."""
    keras.utils.set_random_seed(0)
    options = how.pop("options", None)
    checkpoint = [Checkpoint(every="2 steps", keep_every="6 steps")] if directory else []
    task = make()
    with treadle.Loop(
        task, directory, [*checkpoint, *hooks], options=options, console=False
    ) as loop:
        for part in sources or [source()]:
            loop.fit(part, **{"epochs": 3, **how})
    return loop


def visit(make: Callable[[], Any], *args: Any, **kwargs: Any) -> Replay:
    """Replay a step as another process would: with a new task."""
    keras.utils.set_random_seed(0)
    return replay(make(), *args, **kwargs)


def hashes(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def logged(directory: Path) -> dict[int, Any]:
    return {line["step"]: line for line in read_log(directory / "log.jsonl")[0]}


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noisy") / "run"
    train(noisy, directory, validation=source())
    return directory


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "step",  # of the epochs' five: first, midst, last
    [
        1,
        pytest.param(3, marks=pytest.mark.long_to_compile),
        6,
        pytest.param(8, marks=pytest.mark.long_to_compile),
        STEPS,
    ],
)
def test_a_step_visited_again_equals_the_log_bit_for_bit(noisy_run: Path, step: int) -> None:
    before = hashes(noisy_run)
    found = visit(noisy, source(), noisy_run, step)
    assert hashes(noisy_run) == before
    assert (found.step, found.epoch, found.batch_number) == (
        step,
        (step - 1) // 5 + 1,
        (step - 1) % 5 + 1,
    )
    assert found.values["loss"] == logged(noisy_run)[step]["loss"]
    assert found.agreement.exact
    assert found.agreement.compared == step - found.checkpoint
    assert "compiled: equal to the log bit for bit" in str(found)
    assert found.eager_distance < ROUNDING
    assert found.origin == (
        "all values are finite: batch, activations, returned values, gradients, updates"
    )


def test_the_task_is_left_as_it_was_after_the_step(noisy_run: Path) -> None:
    keras.utils.set_random_seed(0)
    task = noisy()
    replay(task, source(), noisy_run, STEPS)
    kept = Checkpoints(noisy_run / "checkpoints").latest()
    assert kept is not None and kept.progress.step == STEPS
    kernel = kept.state["model/layers/0/kernel"]
    assert keras.ops.convert_to_numpy(task.model.layers[0].kernel).tobytes() == kernel.tobytes()


def test_what_is_shown_is_what_the_step_computed(tmp_path: Path) -> None:
    train(plain, tmp_path / "run")
    found = visit(plain, source(), tmp_path / "run", 7)
    file = tmp_path / "step.npz"
    found.save(file)
    kept = read_arrays(file)
    x, y = arrays()
    rows = kept["rows"]
    assert found.rows == tuple(rows.tolist())
    np.testing.assert_array_equal(kept["batch/0"], x[rows])
    np.testing.assert_array_equal(kept["batch/1"], y[rows])
    kernels = [kept[f"before/model/layers/{i}/kernel"] for i in (0, 1)]
    biases = [kept[f"before/model/layers/{i}/bias"] for i in (0, 1)]
    hidden = np.tanh(x[rows] @ kernels[0] + biases[0])
    logits = hidden @ kernels[1] + biases[1]
    for name, expected in (("layers/0", hidden), ("layers/1", logits), ("", logits)):
        path = f"activations/model/{name}".rstrip("/")
        np.testing.assert_allclose(kept[path], expected, rtol=1e-4, atol=1e-5)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    slope = hidden.T @ (chances - np.eye(CLASSES)[y[rows]]) / len(rows)
    by_path = {variable.path: variable for variable in found.variables}
    np.testing.assert_allclose(kept["gradients/model/layers/1/kernel"], slope, rtol=1e-3, atol=1e-5)
    for path in ("model/layers/0/kernel", "model/layers/1/bias"):
        gradient = by_path[path].gradient
        assert gradient is not None
        assert gradient.norm == pytest.approx(np.linalg.norm(kept[f"gradients/{path}"]))
        assert by_path[path].update.norm == pytest.approx(0.1 * gradient.norm, rel=1e-3)
    first = found.batch[0]
    assert (first.least, first.shape, first.dtype) == (x[rows].min(), (8, FEATURES), "float32")
    assert first.mean == pytest.approx(x[rows].mean())
    shown = str(found)
    for word in ("the first array", "model/layers/1", "Dense", "gradient", "rows of the data set"):
        assert word in shown
    told = json.loads(json.dumps(found.as_dict()))
    assert told["values"] == found.values
    assert told["agreement"]["exact"]
    assert [layer["class"] for layer in told["layers"]] == ["Dense", "Dense", "Sequential"]


def test_a_run_of_several_calls_on_several_sources(tmp_path: Path) -> None:
    x, y = arrays(seed=3)
    sources = [source(), data.from_arrays(x, y, batch_size=10)]
    train(noisy, tmp_path, sources=sources, epochs=1)  # 5 steps, and then 4
    for step in (2, 6, 8):
        found = visit(noisy, dict(enumerate(sources)), tmp_path, step)
        assert found.agreement.exact
    assert found.batch[0].shape == (10, FEATURES)
    with pytest.raises(DirectoryError, match=r"there is no source for call 1: pass a dict"):
        visit(noisy, {0: sources[0]}, tmp_path, 8)
    with pytest.raises(
        DirectoryError,
        match=r"call 1 of the loop in .* other data: train\.length was 4, now 5;.* Its 2 calls",
    ):
        visit(noisy, sources[0], tmp_path, 8)


def halve(loop: Any) -> None:
    loop.task.optimizer.learning_rate.assign(0.05)


def test_hooks_that_change_how_it_trains_run_again(tmp_path: Path) -> None:
    hooks = [treadle.at("3 steps", halve), treadle.at("1 epochs", halve)]
    run = tmp_path / "run"
    train(plain, run, hooks=hooks)
    for later in sorted((run / "checkpoints").glob("step-*"))[1:]:  # so that both hooks run again
        shutil.rmtree(later)
    elsewhere = JSONLines(run / "mine.jsonl")
    before = hashes(run)
    found = visit(plain, source(), run, 5, hooks=[*hooks, elsewhere, Checkpoint()])
    assert found.agreement.exact
    assert hashes(run) == before  # hooks that write are left out
    without = visit(plain, source(), run, 5)
    assert not without.agreement.exact
    assert without.agreement.difference.startswith("loss of step 5 is ")
    assert "NOT equal to the log: loss of step 5 is" in str(without)
    assert "pass the run's hooks as hooks=[…]" in str(without.agreement)


def test_steps_that_are_eager_or_measured_are_so_again(tmp_path: Path) -> None:
    eager = treadle.Options(execution="eager")
    train(plain, tmp_path / "eager", options=eager, epochs=1)
    found = visit(plain, source(), tmp_path / "eager", 4)
    assert found.agreement.exact and found.plan == "eager"
    assert found.eager_distance == 0
    assert "eagerly: the same bits" in str(found)
    measured = treadle.Options(execution="measure")
    train(plain, tmp_path / "measured", options=measured, epochs=1)
    found = visit(plain, source(), tmp_path / "measured", 4)
    recorded = json.loads((tmp_path / "measured" / "run.json").read_text())["plan"]
    assert found.plan.partition(" (")[0].split(", data")[0] in recorded
    assert found.agreement.exact


class Critic(Classifier):
    """Differentiates twice, once within the other, and calls its model twice."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.model(x)), x)
            return self.loss(y, self.model(x, training=True)) + ops.mean(slope**2)

        loss = treadle.minimize(objective, self.model, self.optimizer)
        chosen = treadle.cond(loss > 0, lambda: ops.sum(self.model(x)), lambda: loss)
        return {"loss": loss, "chosen": chosen}


def test_activations_of_gradients_within_gradients(tmp_path: Path) -> None:
    train(Critic, tmp_path, epochs=1)
    found = visit(Critic, source(), tmp_path, 3)
    assert found.agreement.exact
    paths = [layer.path for layer in found.layers]
    outer = ["model/layers/0", "model/layers/1", "model"]
    assert paths == [*outer, *(f"{path}#2" for path in outer)]  # none of the branch
    both = [found.arrays[f"activations/model{which}"] for which in ("", "#2")]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-5, atol=1e-6)
    assert all(v.gradient for v in found.variables if v.path.startswith("model/"))


class Native(Classifier):
    """Trains without `treadle.gradients`: by a rule that needs none."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), head()])

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss = self.loss(y, self.model(x))
        bias = self.model.layers[0].bias
        bias.assign(bias * 0.5 + ops.mean(x))
        return {"loss": loss}


def test_a_step_without_gradients_says_so(tmp_path: Path) -> None:
    train(Native, tmp_path, epochs=1)
    found = visit(Native, source(), tmp_path, 3)
    assert found.agreement.exact
    assert all(variable.gradient is None for variable in found.variables)
    assert {v.path: v.update.norm > 0 for v in found.variables}["model/layers/0/bias"]
    assert "without treadle.gradients, so its gradients cannot be seen" in str(found)


class Spiking(Classifier):
    """A classifier whose loss is multiplied where the first feature of a row is large."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])

    def train_step(self, batch: Any) -> Any:
        x, _ = batch
        logs = super().train_step(batch)
        return {"loss": logs["loss"] * ops.where(ops.max(x[:, 0]) > 50, 100.0, 1.0)}


def spiked() -> Any:
    x, y = arrays()
    x[17, 0] = 60.0
    return data.from_arrays(x, y, batch_size=8)


def test_bisect_finds_a_spike_in_the_log(tmp_path: Path) -> None:
    train(Spiking, tmp_path, sources=[spiked()])
    expected = min(step for step, line in logged(tmp_path).items() if line["loss"] > 20)
    found = visit(Spiking, spiked(), tmp_path, bisect="loss > 20")
    assert found.step == expected
    assert found.found_by.startswith(
        f"loss > 20: first holds at step {expected} of the log: loss is"
    )
    assert found.batch[0].most == 60.0
    assert found.rows is not None and 17 in found.rows


def test_bisect_finds_where_a_variable_begins_to_be(noisy_run: Path) -> None:
    found = visit(noisy, source(), noisy_run, bisect="optimizer/iterations >= 9")
    assert found.step == 9
    assert found.found_by == ("optimizer/iterations >= 9: first holds after step 9")
    assert found.agreement.exact


def dip(loop: Any) -> None:
    """Make a variable large for two steps."""
    bias = loop.task.model.layers[1].bias
    bias.assign(bias + (100.0 if loop.progress.step == 3 else -100.0))


def test_bisect_finds_what_no_checkpoint_has_seen(tmp_path: Path) -> None:
    hooks = [treadle.at("3 steps", dip), treadle.at("5 steps", dip)]
    train(plain, tmp_path, hooks=hooks)
    for step in range(1, 6):  # one that became due while another was written came later
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:012}", ignore_errors=True)
    path = "model/layers/1/bias"
    found = visit(plain, source(), tmp_path, bisect=f"norm({path}) > 50", hooks=hooks)
    assert found.step == 4
    assert found.found_by.endswith("first holds before step 4")


def ruined() -> Any:
    x, y = arrays()
    x[35, 2] = np.nan
    return data.from_arrays(x, y, batch_size=8)


def stopped(make: Callable[[], Any], directory: Path, *args: Any, **kwargs: Any) -> tuple[str, int]:
    """Train until it ends for a value that is not finite; returns the message, and its step."""
    with pytest.raises(NonFiniteError) as caught:
        train(make, directory, *args, **kwargs)
    message = str(caught.value)
    call = re.search(r"To inspect the step: print\((.*), step=(\d+)\)\)$", message)
    assert call is not None, message
    assert call[1] == f"treadle.doctor.replay(task, train, {str(directory)!r}"
    return message, int(call[2])


@pytest.mark.every_backend
def test_nan_in_a_batch_is_traced_to_its_rows(tmp_path: Path) -> None:
    _, step = stopped(plain, tmp_path, sources=[ruined()])
    found = visit(plain, ruined(), tmp_path, step)
    assert found.agreement.exact
    assert found.rows is not None
    row = found.rows.index(35)
    assert found.batch[0].rows == (row,)
    assert found.origin == (
        f"first non-finite value: 1 of 48 numbers of the first array of the batch, row {row} "
        "(of the data set: 35)"
    )
    assert visit(plain, ruined(), tmp_path, bisect="isnan(loss)").step == step


def test_steps_that_were_skipped_are_skipped_again(tmp_path: Path) -> None:
    train(plain, tmp_path, hooks=[NonFinite(action="skip")], sources=[ruined()])
    step = min(step for step, line in logged(tmp_path).items() if line["undone"])
    found = visit(plain, ruined(), tmp_path, step)
    assert found.agreement.exact and found.values["undone"] == 1.0
    assert "(of the data set: 35)" in found.origin
    assert {v.path: v.update.norm for v in found.variables}["model/layers/0/kernel"] == 0
    assert visit(plain, ruined(), tmp_path, step + 6).agreement.exact


class Root(keras.layers.Layer):
    """Of what is larger than 6, it returns NaN."""

    def call(self, inputs: Any) -> Any:
        return ops.sqrt(6.0 - inputs)


def rooted() -> Classifier:
    normalized = keras.layers.BatchNormalization()
    return Classifier([keras.Input((FEATURES,)), Root(), dense(), normalized, head()])


def large() -> Any:
    x, y = arrays()
    x[11, 4] = 7.0
    return data.from_arrays(x, y, batch_size=8)


def test_nan_in_a_layer_is_traced_to_the_layer_and_its_rows(tmp_path: Path) -> None:
    _, step = stopped(rooted, tmp_path, sources=[large()])
    found = visit(rooted, large(), tmp_path, step)
    assert found.rows is not None
    assert found.origin == (
        "first non-finite value: 1 of 48 numbers of the output of model/layers/0 (Root), row "
        f"{found.rows.index(11)} (of the data set: 11), while its variables, the batch and the "
        "layers before it are finite"
    )
    assert "model/layers/0" in str(found) and found.batch[0].not_finite == 0


SLOT = "optimizer/momentums/model/layers/0/kernel"


def adam() -> Classifier:
    return Classifier([keras.Input((FEATURES,)), dense(), head()], keras.optimizers.Adam(1e-2))


def spoil(loop: Any) -> None:
    slot = loop.state.variables[SLOT]
    value = np.array(ops.convert_to_numpy(slot))
    value[2, 3] = np.nan
    slot.assign(value)


def test_nan_in_a_slot_is_traced_to_what_set_it(tmp_path: Path) -> None:
    hooks = [treadle.at("7 steps", spoil)]
    _, step = stopped(adam, tmp_path, hooks=hooks)
    assert step > 8
    later = visit(adam, source(), tmp_path, step, hooks=hooks)
    assert re.fullmatch(
        rf"first non-finite value: 1 of 30 numbers of model/layers/0/kernel, before step "
        rf"{step} began: an earlier step set it. --bisect 'not isfinite\(model/layers/0/kernel"
        r"\)' finds that step",
        later.origin,
    )
    made = visit(
        adam, source(), tmp_path, bisect="not isfinite(model/layers/0/kernel)", hooks=hooks
    )
    assert made.step == 8 and made.found_by.endswith("first holds after step 8")
    assert made.origin == (
        f"first non-finite value: 1 of 30 numbers of {SLOT}, before step 8 began, but not "
        "when step 7 ended: a hook or the script set it between the two steps"
    )
    between = visit(adam, source(), tmp_path, bisect=f"isnan({SLOT})", hooks=hooks)
    assert between.step == 8 and between.found_by.endswith("first holds before step 8")
    finite = next(v for v in made.variables if v.path == "model/layers/0/kernel")
    assert finite.gradient is not None
    assert (finite.value.not_finite, finite.gradient.not_finite) == (0, 0)
    assert finite.update.not_finite == 1


class Rooted(Classifier):
    """Its loss is finite, and its gradient is not, where a weight is zero."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.scale = keras.Variable(0.0)

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return self.loss(y, self.model(x)) + ops.sqrt(self.scale * self.scale)

        variables = [*self.model.trainable_variables, self.scale]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}


def test_a_gradient_that_is_not_finite_is_told_from_its_loss(tmp_path: Path) -> None:
    _, step = stopped(Rooted, tmp_path)
    assert step == 2  # the first one that is seen to be NaN
    found = visit(Rooted, source(), tmp_path, 1)
    assert found.origin.startswith(
        "first non-finite value: 1 of 1 numbers of the gradient of scale, while the loss is "
        "finite: look for a root"
    )


class Divided(Classifier):
    """Its loss is not finite though all layers' outputs are; or what it assigns is not; or none."""

    def __init__(self, what: str = "loss") -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.what = what
        self.memory = keras.Variable(1.0, trainable=False)

    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        nothing = ops.zeros_like(logs["loss"])
        if self.what == "loss":
            return {"loss": logs["loss"] / nothing}
        if self.what == "memory":
            self.memory.assign(logs["loss"] / nothing)
        return logs


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("loss", "loss, which train_step returned, while all activations are finite"),
        ("memory", "1 of 1 numbers of the update of memory, while its gradient is finite"),
    ],
)
def test_what_is_made_of_finite_numbers_is_told(tmp_path: Path, what: str, told: str) -> None:
    def make() -> Divided:
        return Divided(what)

    train(make, tmp_path, hooks=[NonFinite(action="stop")], epochs=1)
    found = visit(make, source(), tmp_path, 1)
    assert found.origin.startswith(f"first non-finite value: {told}")


def test_weights_ruined_at_an_unknown_step_are_searched_for(tmp_path: Path) -> None:
    def spoil_memory(loop: Any) -> None:
        loop.task.memory.assign(float("nan"))

    hooks = [treadle.at("3 steps", spoil_memory)]
    with pytest.raises(NonFiniteError) as caught:
        train(lambda: Divided("nothing"), tmp_path, hooks=hooks)
    assert str(caught.value).endswith(
        f"To inspect the step: print(treadle.doctor.replay(task, train, {str(tmp_path)!r}, "
        "bisect='not isfinite(memory)'))"
    )


def test_without_a_directory_there_is_no_step_to_go_back_to() -> None:
    with pytest.raises(NonFiniteError) as caught:
        train(plain, None, sources=[ruined()])
    assert "replay" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({}, ConfigurationError, r"specify the step: either its number, such as step=120, or"),
        ({"step": 1, "bisect": "loss > 5"}, ConfigurationError, "specify the step"),
        ({"step": 0}, ConfigurationError, "step must be at least 1, not 0"),
        ({"step": 16}, DirectoryError, r"there is no step 16 in .*: its steps are 1 to 15"),
        ({"bisect": "loss > 1e9"}, ConfigurationError, "'loss > 1e9' holds for none of the 15 st"),
        (
            {"bisect": "los > 5"},
            ConfigurationError,
            "'los > 5' names 'los', which is neither a value that steps returned nor the path of a "
            r"variable\. Did you mean 'loss'\?",
        ),
        (
            {"bisect": "loss > norm(model/layers/0/kernel)"},
            ConfigurationError,
            "compares 'loss', which steps returned, with a variable: .* Compare each with a number",
        ),
        (
            {"bisect": "model/layers/0/kernel > 5"},
            ConfigurationError,
            r"is an array of shape \(6, 8\), .* write norm\(model/layers/0/kernel\)",
        ),
        (
            {"bisect": "norm(model/layers/0/kernel) >= 0"},
            ConfigurationError,
            "holds already in the first checkpoint, after step 0",
        ),
        (
            {"bisect": "isnan(model/layers/0/kernel)"},
            ConfigurationError,
            r"holds after none of the 15 steps",
        ),
        ({"bisect": "loss"}, ConfigurationError, "cannot read the condition 'loss': compare"),
    ],
)
def test_what_cannot_be_meant(
    noisy_run: Path, asked: Any, kind: type[TreadleError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        visit(noisy, source(), noisy_run, **asked)


def test_the_run_of_another_task_is_refused(noisy_run: Path, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="holds no run"):
        visit(noisy, source(), tmp_path, 1)
    with pytest.raises(DirectoryError, match=r"of another task: task was 'Classifier', now 'Crit"):
        visit(Critic, source(), noisy_run, 1)
    keras.utils.set_random_seed(1)
    with pytest.raises(DirectoryError, match="of another task: seed was 0, now 1"):
        replay(noisy(), source(), noisy_run, 1)
    other = data.from_arrays(*arrays(seed=9), batch_size=8)
    with pytest.raises(DirectoryError, match=r"call 0 .* other data: train.fingerprint was"):
        visit(noisy, other, noisy_run, 1)


def test_a_run_without_checkpoints_is_told(noisy_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(noisy_run, copy)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint at or before step 6"):
        visit(noisy, source(), copy, 7)


def test_batches_of_one_s_own_cannot_be_drawn_again(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    with treadle.Loop(plain(), tmp_path, console=False) as loop:
        loop.step(arrays())
    with pytest.raises(DirectoryError, match=r"holds a run of loop\.step\(batch\) alone"):
        visit(plain, source(), tmp_path, 1)


def test_a_run_that_goes_on_meanwhile_can_be_looked_into(tmp_path: Path) -> None:
    seen: list[Replay] = []

    def look(loop: Any) -> None:
        loop.save()  # and the checkpoint of the start before
        seen.append(visit(plain, source(), tmp_path, 4))

    train(plain, tmp_path, hooks=[treadle.at("8 steps", look)])
    assert seen[0].agreement.exact
    train(plain, tmp_path / "alone")
    assert logged(tmp_path) == logged(tmp_path / "alone")


def test_numbers_of_an_array() -> None:
    x = np.array([[3.0, 4.0], [np.inf, np.nan]], "float32")
    found = Numbers.of("x", x)
    assert (found.norm, found.least, found.most, found.mean) == (5.0, 3.0, 4.0, 3.5)
    assert (found.not_finite, found.rows, found.shape) == (2, (1,), (2, 2))
    assert Numbers.of("huge", np.full(4, 1e300)).norm == pytest.approx(2e300)
    assert farthest({"a": x}, {"a": x}, whole=True) == (0.0, "")
    assert farthest({"a": np.zeros(1)}, {"a": x[1, 1:]}, whole=True) == (np.inf, "a")


FILE = """
    import keras
    import numpy as np
    import treadle
    from keras import ops

    class Mine(treadle.Task):
        epochs = 3

        def __init__(self, bad: int = 13):
            self.model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.2),
                                           keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.Adam(0.01)
            self.bad = bad

        def train_step(self, batch):
            x, y = batch
            def objective():
                return ops.mean((self.model(x, training=True) - y) ** 2)
            return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

        def datasets(self):
            x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
            if self.bad >= 0:
                x[self.bad, 1] = np.nan
            return treadle.Datasets(train=treadle.data.from_arrays(x, x[:, :1], batch_size=8))

        def hooks(self):
            return [treadle.hooks.Checkpoint(every="2 steps"), treadle.at("3 steps", slower)]

    def slower(loop):
        loop.task.optimizer.learning_rate.assign(0.001)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())
    monkeypatch.delenv("TREADLE_DATA", raising=False)
    Path("mine.py").write_text(textwrap.dedent(FILE))

    def call(*arguments: Any, code: int = 0) -> Any:
        keras.backend.clear_session()
        found = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        assert found.exit_code == code, found.output
        return found

    return call


def test_the_command_that_ends_the_message_names_the_row(mine: Callable[..., Any]) -> None:
    text = mine("run", "mine.py", "--directory", "a run", "-q", code=1).output
    command = shlex.split(text[text.index("treadle replay") :].splitlines()[0])
    assert command[:4] == ["treadle", "replay", "a run", "--step"]
    before = hashes(Path("a run"))
    shown = mine(*command[1:]).output
    assert "equal to the log bit for bit" in shown
    assert "of the first array of the batch, row " in shown
    assert "(of the data set: 13)" in shown
    assert hashes(Path("a run")) == before


def test_the_command_in_the_second_epoch(mine: Callable[..., Any]) -> None:
    mine("run", "mine.py", "--directory", "run", "--set", "bad=-1", "--quiet")
    found = mine("replay", "run", "--step", 9, "--json", "--save", "step.npz")
    told = json.loads(found.stdout)
    assert told["agreement"]["exact"] and told["epoch"] == 2
    assert told["values"]["loss"] == logged(Path("run"))[9]["loss"]
    kept = read_arrays("step.npz")
    assert kept["gradients/model/layers/0/kernel"].shape == (3, 4)
    least = min(line["loss"] for line in logged(Path("run")).values())
    shown = mine("replay", "run", "--bisect", f"loss <= {least}").output
    step = next(step for step, line in logged(Path("run")).items() if line["loss"] == least)
    assert f"first holds at step {step} of the log" in shown
    for arguments, message in (
        ([], "specify the step: either --step N, or a condition"),
        (["--bisect", "loss >"], "cannot read the condition 'loss >'"),
        (["--step", 99], "there is no step 99 in run: its steps are 1 to 15"),
        (["--step", 1, "--save", "none/x.npz"], "--save none/x.npz: there is no folder none"),
    ):
        assert message in mine("replay", "run", *arguments, code=2).output


def test_the_command_sends_scripts_to_python(mine: Callable[..., Any]) -> None:
    train(plain, Path("script"), epochs=1)
    told = mine("replay", "script", "--step", 3, code=2).output
    assert (
        "script holds a run of a script, whose task cannot be made again here: call "
        "treadle.doctor.replay(task, train, 'script', step=3) in Python, with the task and the "
        "source that the script makes"
    ) in told
    told = mine("replay", "script", "--bisect", "isnan(loss)", code=2).output
    assert "'script', bisect='isnan(loss)') in Python" in told


def test_a_measured_plan_is_replayed_as_the_plan_that_was_chosen() -> None:
    times = "measured, per step: windows of up to 64, graph 91 µs, windows of up to 64, XLA 99 µs"
    facts = {
        "options": {"execution": "measure"},
        "plan": f"windows of up to 64, graph ({times}), data streamed",
    }
    found = replaying._options(facts)
    assert (found.execution, found.fused, found.jit) == ("compiled", True, False)
