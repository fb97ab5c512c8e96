import csv
import doctest
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import ml_dtypes
import numpy as np
import pytest

from treadle import hooks
from treadle.checkpoint.arrays import read_arrays
from treadle.core.hook import Hook
from treadle.core.logs import History, Record, StepLogs
from treadle.core.progress import Progress
from treadle.errors import ConfigurationError, DataError, NonFiniteError
from treadle.hooks import curves
from treadle.hooks.lines import read_log
from treadle.run.services import services_of

NAN, INF = float("nan"), float("inf")
MODULES = (
    *("console", "curves", "display", "events", "final", "images", "keras_callbacks", "lines"),
    *("monitor", "nonfinite", "plateau", "profiler", "stopping", "tensorboard", "values"),
)


class Loop:
    """What a hook sees of a loop, without one."""

    def __init__(self, directory=None, step=0, task=None, batches=None):
        self.directory, self.task, self.batches = directory, task, batches
        self.progress = Progress(step=step, seconds=0.25 * step)
        self.history, self.reason, self.weights = History(), None, 0
        self.unfinished = False
        self.state = SimpleNamespace(arrays=lambda: {"weights": np.array(self.weights)})

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


# The package


def test_defaults():
    def names(found):
        return [type(hook).__name__ for hook in found]

    everything = ["Console", "Images", "JSONLines", "CSV", "FinalModel", "NonFinite"]
    everything += ["LearningCurve", "Checkpoint"]
    assert names(hooks.defaults(Path("runs"), quiet=False)) == everything
    assert names(hooks.defaults(Path("runs"), quiet=True)) == everything[1:]
    assert names(hooks.defaults(None, quiet=True)) == ["NonFinite"]


def test_a_hook_replaces_the_default_one_that_it_is_derived_from(tmp_path):
    class Own(hooks.Checkpoint):
        """Two that write into one folder would be in one another's way."""

    class Other(hooks.CSV):
        pass

    given = [Own(every="5 steps"), Other(tmp_path / "other.csv")]
    kinds = [type(hook) for hook in services_of(given, tmp_path, console=False).hooks._hooks]
    assert hooks.Checkpoint not in kinds and hooks.CSV not in kinds
    assert {hooks.JSONLines, hooks.FinalModel, Own, Other} <= {*kinds}


def test_public_names_are_there():
    for name in hooks.__all__:
        assert name in dir(hooks)
        assert name == "defaults" or issubclass(getattr(hooks, name), Hook)
    with pytest.raises(AttributeError, match=r"module 'treadle.hooks' has no attribute 'Consol'"):
        _ = hooks.Consol


def test_importing_the_package_imports_neither_keras_nor_rich():
    code = "import sys, treadle.hooks; print({'keras', 'rich', 'matplotlib'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(f"treadle.hooks.{name}"))
    assert result.attempted and not result.failed


# NonFinite


def nonfinite(loop, action="raise", **values):
    with pytest.raises(NonFiniteError) as caught:
        loop.window(hooks.NonFinite(action), **values)
    return str(caught.value)


def test_nonfinite_names_the_rows_of_the_batch():
    x = np.zeros((8, 3), np.float32)
    x[2, 1], x[5, 0] = NAN, INF
    y = np.zeros(8)
    y[7] = NAN
    loop = Loop(step=20, batches={22: (x, {"label": y, "id": np.arange(8), "none": None})})
    assert nonfinite(loop, loss=[1.0, NAN, NAN]) == (
        "loss is nan at step 22, epoch 1, batch 2. The batch held it already: the first array, "
        "rows 2, 5; the array [1]['label'], row 7. Fix or remove these rows (numbered within "
        "the batch)"
    )


def test_nonfinite_names_a_few_rows_of_many():
    x = np.full((9, 2), NAN, ml_dtypes.bfloat16)
    message = nonfinite(Loop(batches={1: x}), loss=[INF])
    assert message.startswith("loss is inf at step 1, epoch 1, batch 1. ")
    assert "held it already: the batch, rows 0, 1, 2, 3, 4 and 4 more. Fix" in message


def test_nonfinite_names_a_leaf_without_rows():
    message = nonfinite(Loop(batches={1: {"weight": np.float32(NAN)}}), loss=[INF])
    assert "held it already: the array 'weight'. Fix" in message


def test_nonfinite_says_that_it_was_the_step():
    loop = Loop(batches={1: (np.zeros((4, 2)), np.arange(4))})
    assert nonfinite(loop, loss=[-INF]) == (
        "loss is -inf at step 1, epoch 1, batch 1. All inputs of this batch are finite, so the "
        "step caused it. Lower the learning rate, or clip gradients (clipnorm=1.0 in the "
        "optimizer); make sure that labels lie in the range of the classes; "
        'treadle.Options(execution="eager") lets you debug the step'
    )


def test_nonfinite_takes_the_first_step_of_all_values():
    loop = Loop(batches={2: np.zeros(4)})
    message = nonfinite(loop, loss=[1, 2, NAN], norm=[1, INF, INF], count=np.arange(3))
    assert message.startswith("norm is inf at step 2, ")


def test_nonfinite_can_stop():
    loop = Loop(batches={1: np.zeros(4)})
    loop.window(hooks.NonFinite(action="stop"), loss=[NAN])
    assert loop.reason.startswith("loss is nan at step 1, epoch 1, batch 1. All inputs")


def test_nonfinite_lets_numbers_pass():
    loop = Loop()
    largest = np.array([3e38, 3e38], np.float32)  # their sum is infinite
    loop.window(hooks.NonFinite(), loss=largest, count=np.arange(2), flag=np.array([True, False]))
    loop.window(hooks.NonFinite())
    assert loop.reason is None


def test_nonfinite_lets_steps_pass_that_were_undone():
    loop = Loop(batches={2: np.zeros(4)})
    scaling = {"loss_scale": [4.0, 4.0], "undone": [0.0, 1.0]}
    loop.window(hooks.NonFinite(), loss=[1.0, INF], **scaling)
    loop = Loop(batches={2: np.array([0.0, NAN])})
    message = nonfinite(loop, loss=[1.0, NAN], **scaling)
    assert "The batch held it already: the batch, row 1. Fix" in message


def test_nonfinite_says_what_float16_may_have_done():
    loop = Loop(batches={1: np.zeros(4)})
    message = nonfinite(loop, loss=[INF], loss_scale=[4.0], undone=[0.0])
    assert "Compute the loss in float32, since float16 ends at 65,504. Lower the" in message


def test_nonfinite_ends_what_no_scale_can_save():
    smallest = 2.0**-14
    scaling = {"loss_scale": [2 * smallest, smallest], "undone": [1.0, 1.0]}
    assert nonfinite(Loop(batches={}), loss=[1.0, 1.0], **scaling) == (
        "gradients are not finite at step 2, epoch 1, batch 2, not even with a loss scale of "
        "2**-14, so it is not the scale that is too large for float16. Look for a division by "
        "zero, or a logarithm or a root of zero, or train in mixed_bfloat16"
    )


def test_nonfinite_knows_its_actions():
    with pytest.raises(ConfigurationError) as caught:
        hooks.NonFinite(action="stopp")
    assert (
        str(caught.value)
        == "unknown action 'stopp'. Did you mean 'stop'? Known: raise, stop, skip, rollback."
    )


# EarlyStopping


def trained(hook, losses, error=None, loop=None, name="val_loss"):
    """Train: the weights are always the number of the step, one record each."""
    loop = loop or Loop()
    hook.start(loop)
    for loss in losses:
        loop.weights = loop.progress.step + 1
        loop.record(hook, "epoch", step=loop.weights, **{name: loss})
        if loop.reason:
            break
    loop.weights += 100  # steps after the last record
    hook.end(loop, error)
    return loop


ENDS = [None, ValueError("boom"), KeyboardInterrupt(), SystemExit()]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_the_best_weights_are_put_back_on_every_way_out(error):
    loop = trained(hooks.EarlyStopping(), [3, 1, 2], error)
    assert loop.weights == 2 and loop.reason is None
    stopped = trained(hooks.EarlyStopping(patience=2), [3, 1, 2, 4, 0], error)
    assert stopped.weights == 2 and stopped.progress.step == 4
    assert stopped.reason == (
        "val_loss did not improve in the last 2 records: its best is 1, at step 2"
    )
    assert loop.warnings == stopped.warnings == []


def test_the_best_weights_need_not_be_put_back():
    loop = trained(hooks.EarlyStopping(patience=1, restore_best=False), [1, 2])
    assert loop.weights == 102
    assert loop.reason == "val_loss did not improve in the last record: its best is 1, at step 1"
    assert loop.warnings == []


def test_larger_may_be_better_and_better_by_how_much():
    hook = hooks.EarlyStopping("val_accuracy", patience=3, min_delta=0.1)
    loop = trained(hook, [0.5, 0.59, 0.61, 0.7, 0.65, 0.6], name="val_accuracy")
    assert loop.weights == 3 and loop.progress.step == 6


def test_nan_is_never_better():
    assert trained(hooks.EarlyStopping(), [NAN, 2, NAN, 3]).weights == 2
    loop = trained(hooks.EarlyStopping(patience=3), [NAN] * 5)
    assert loop.reason == "val_loss was NaN in the last 3 records" and loop.weights == 103


def test_a_value_counts_once_for_each_step():
    hook, loop = hooks.EarlyStopping(patience=2), Loop()
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
        assert loop.reason is None
        loop.record(hook, "validation", step=step, loss=0.0, val_loss=loss)
        loop.record(hook, "epoch", loss=0.0, val_loss=loss)
        loop.record(hook, "log", val_loss=-1.0)
    assert loop.reason is not None


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("val_loss", "min"),
        ("val_rmse", "min"),
        ("val_mae", "min"),
        ("top_1_error", "min"),
        ("AUC_loss", "min"),
        ("val_accuracy_5", "max"),
        ("val_AUC", "max"),
        ("f1_score", "max"),
        ("val_precision_at_recall", "max"),
    ],
)
def test_the_direction_follows_from_many_names(name, direction):
    better = trained(hooks.EarlyStopping(name), [1, 2], name=name).weights
    assert better == {"min": 1, "max": 2}[direction]


def test_the_direction_must_be_known():
    hooks.EarlyStopping("reward", direction="max")
    with pytest.raises(ConfigurationError) as caught:
        hooks.EarlyStopping("reward")
    assert str(caught.value) == (
        "cannot infer from the name 'reward' whether smaller or larger is better: pass "
        "direction='min' or direction='max'"
    )
    with pytest.raises(ConfigurationError) as caught:
        hooks.EarlyStopping(direction="maximum")
    assert str(caught.value) == (
        "unknown direction 'maximum'. Did you mean 'max'? Known: min, max."
    )


@pytest.mark.parametrize("wrong", [{"patience": -1}, {"min_delta": -0.5}])
def test_patience_and_delta_are_not_negative(wrong):
    values = {"patience": 5, "min_delta": 0.0, **wrong}
    with pytest.raises(ConfigurationError) as caught:
        hooks.EarlyStopping(**wrong)
    assert str(caught.value) == (
        "EarlyStopping needs patience and min_delta of at least 0, not "
        f"{values['patience']} and {values['min_delta']}"
    )


def unknown(name, kind, **values):
    with pytest.raises(ConfigurationError) as caught:
        Loop().record(hooks.EarlyStopping(name), kind, step=1, **values)
    return str(caught.value)


def test_an_unknown_monitor_is_refused_at_the_first_validation():
    assert unknown("val_acuracy_loss", "epoch", loss=1.0, val_accuracy_loss=1.0) == (
        "EarlyStopping cannot find 'val_acuracy_loss'. Did you mean 'val_accuracy_loss'? Known: "
        "loss, val_accuracy_loss."
    )
    assert unknown("val_loss", "validation", other=1.0) == (
        "EarlyStopping cannot find 'val_loss'. Known: other."
    )
    assert unknown("accuracy", "epoch", loss=1.0).endswith("'accuracy'. Known: loss.")


def test_a_validation_may_come_later_than_an_epoch():
    hook, loop = hooks.EarlyStopping(), Loop()
    loop.record(hook, "epoch", step=1, loss=1.0)
    loop.record(hook, "validation", step=2, loss=1.0, val_loss=1.0)
    loop.record(hook, "epoch", step=3, loss=1.0)
    assert hook.state()["best_step"] == 2


def test_a_monitor_that_never_came_is_told_of():
    loop = trained(hooks.EarlyStopping(), [1.0], name="loss")
    assert loop.warnings == [
        "EarlyStopping found no val_loss: pass a validation source to fit, or monitor a value "
        "that is recorded every epoch"
    ]
    assert trained(hooks.EarlyStopping(), [1.0], ValueError(), name="loss").warnings == []


def test_early_stopping_survives_a_restart():
    before = hooks.EarlyStopping(patience=3)
    loop = Loop()
    before.start(loop)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        loop.record(before, "epoch", step=step, val_loss=loss)
    state = before.state()
    assert state["arrays"] == {"weights": np.array(0)}
    told = {name: value for name, value in state.items() if name != "arrays"}
    assert told == {"best": 1.0, "best_step": 2, "last_step": 3, "waited": 1}

    after = hooks.EarlyStopping(patience=3)
    after.restore(state)
    loop = trained(after, [2.0, 2.0, 2.0], loop=Loop(step=3))
    assert loop.progress.step == 5 and loop.weights == 0  # as the first process had them
    assert loop.reason == "val_loss did not improve in the last 3 records: its best is 1, at step 2"
    assert loop.warnings == []


def test_early_stopping_begins_anew_with_each_call():
    hook = hooks.EarlyStopping(patience=2)
    trained(hook, [1, 2, 3])
    loop = trained(hook, [9, 8, 9], loop=Loop(step=10))
    assert loop.weights == 12 and loop.reason is None


# ReduceOnPlateau


def plateau(hook, losses, rate=1.0, loop=None):
    """Tell a hook of losses, one record each; returns the learning rate after each of them."""
    loop = loop or Loop()
    optimizer = keras.optimizers.SGD(rate)
    loop.state = SimpleNamespace(optimizers={"optimizer": optimizer})
    hook.start(loop)
    rates = []
    for loss in losses:
        loop.record(hook, "epoch", step=loop.progress.step + 1, val_loss=loss)
        rates.append(float(np.array(optimizer.learning_rate)))
    return rates


def test_a_rate_is_reduced_where_nothing_improves():
    hook = hooks.ReduceOnPlateau(factor=0.5, patience=2)
    losses = [3, 2, 2, 2.5, 1, NAN, 1, 1, 1]
    assert plateau(hook, losses) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_reduction_is_told():
    loop = Loop()
    plateau(hooks.ReduceOnPlateau(factor=0.5, patience=1), [1, 2], loop=loop)
    assert loop.history.records[-1].values == {
        "optimizer/learning_rate": 0.5,
        "note": "the learning rate of optimizer went from 1 to 0.5, because val_loss did "
        "not improve in the last record: its best is 1, at step 1",
    }


def test_what_follows_a_reduction_may_count_for_nothing():
    hook = hooks.ReduceOnPlateau(factor=0.5, patience=1, cooldown=2)
    assert plateau(hook, [1] * 8) == [1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


def test_a_rate_has_a_minimum():
    loop = Loop()
    hook = hooks.ReduceOnPlateau(factor=0.5, patience=1, minimum=0.375)
    assert plateau(hook, [1] * 5, loop=loop) == [1, 0.5, 0.375, 0.375, 0.375]
    assert len([r for r in loop.history.records if "note" in r.values]) == 2


def test_a_plateau_survives_a_restart():
    losses = [1, 2, 3, 1, 2, 2, 2]
    make = lambda: hooks.ReduceOnPlateau(factor=0.5, patience=2, cooldown=1)  # noqa: E731
    whole = plateau(make(), losses)
    for middle in range(1, len(losses)):
        before, loop = make(), Loop()
        rates = plateau(before, losses[:middle], loop=loop)
        after = make()
        after.restore(json.loads(json.dumps(before.state())))
        rates += plateau(after, losses[middle:], rate=rates[-1], loop=Loop(step=middle))
        assert rates == whole, middle
    again = make()
    plateau(again, [0, 1])
    assert plateau(again, losses) == whole  # each call starts from scratch


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"factor": 1.5},
            "ReduceOnPlateau needs a factor between 0 and 1, not 1.5: the learning rate is "
            "multiplied by it",
        ),
        ({"patience": 0}, "ReduceOnPlateau needs a patience of at least 1, not 0"),
        ({"cooldown": -1}, "ReduceOnPlateau needs a cooldown of at least 0, not -1"),
        ({"minimum": -1.0}, "ReduceOnPlateau needs a minimum of at least 0, not -1.0"),
        ({"min_delta": -1.0}, "ReduceOnPlateau needs a min_delta of at least 0, not -1.0"),
    ],
)
def test_what_a_plateau_cannot_be(wrong, message):
    with pytest.raises(ConfigurationError) as caught:
        hooks.ReduceOnPlateau(**wrong)
    assert str(caught.value) == message


def test_a_schedule_cannot_be_reduced():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    with pytest.raises(ConfigurationError) as caught:
        plateau(hooks.ReduceOnPlateau(), [1], rate=schedule)
    assert str(caught.value) == (
        "the learning rate of optimizer is a schedule (CosineDecay), which ReduceOnPlateau cannot "
        "change: give the optimizer a number, or name another one with "
        "ReduceOnPlateau(optimizer=…)"
    )
    with pytest.raises(ConfigurationError, match="the task has no optimizer 'critic'"):
        plateau(hooks.ReduceOnPlateau(optimizer="critic"), [1])
    with pytest.raises(ConfigurationError, match="ReduceOnPlateau cannot find 'val_los'"):
        plateau(hooks.ReduceOnPlateau("val_los", direction="min"), [1])


# JSONLines


def strict(text):
    def refuse(constant):
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_json_lines_are_strict_and_exact(tmp_path):
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    losses = np.array([0.1, 1 / 3, 1e-45], np.float32)
    loop.window(hook, loss=losses, norm=np.array([NAN, INF, -INF]), n=np.arange(3))
    loop.record(hook, "epoch", loss=1 / 3, val_loss=NAN, note='a "text"\n', image=np.zeros((2, 2)))
    path = tmp_path / "log.jsonl"
    text = path.read_text()  # flushed, though the run goes on
    assert strict(text) == [
        {"step": 1, "loss": float(losses[0]), "norm": "NaN", "n": 0},
        {"step": 2, "loss": float(losses[1]), "norm": "Infinity", "n": 1},
        {"step": 3, "loss": float(losses[2]), "norm": "-Infinity", "n": 2},
        {
            "kind": "epoch",
            "epoch": 1,
            "step": 3,
            "seconds": 0.25,
            "loss": 1 / 3,
            "val_loss": "NaN",
            "note": 'a "text"\n',
        },
    ]
    hook.end(loop, None)
    steps, records = read_log(path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["norm"] for step in steps][1:] == [INF, -INF] and math.isnan(steps[0]["norm"])
    assert [np.float32(step["loss"]) for step in steps] == losses.tolist()
    assert records[0]["loss"] == 1 / 3 and math.isnan(records[0]["val_loss"])


def test_json_lines_of_odd_names_and_values(tmp_path):
    loop, hook = Loop(), hooks.JSONLines(tmp_path / "new" / "folder.jsonl")
    hook.start(loop)
    odd = {'a "b" %d é': [1.0], "step": [2.0], "ok": np.array([True])}
    loop.window(hook, **odd)
    loop.window(hook)
    values = {"kind": 1, "done": np.bool_(False), "none": None}
    hook.record(loop, Record("log", loop.progress, values))
    hook.end(loop, None)
    assert strict((tmp_path / "new" / "folder.jsonl").read_text()) == [
        {"step": 1, 'a "b" %d é': 1.0, "step_": 2.0, "ok": True},
        {"step": 2},
        {"kind": "log", "epoch": 1, "step": 2, "seconds": 0.25, "kind_": 1, "done": False},
    ]


def test_a_window_is_one_write(tmp_path, monkeypatch):
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    hook.end(loop, None)
    written = []
    monkeypatch.setattr(hook, "_file", SimpleNamespace(write=written.append, flush=lambda: None))
    loop.window(hook, loss=np.arange(50.0))
    assert len(written) == 1 and written[0].count(b"\n") == 50


def test_json_lines_need_a_place():
    with pytest.raises(ConfigurationError) as caught:
        hooks.JSONLines().start(Loop())
    assert str(caught.value) == (
        "JSONLines() writes log.jsonl into the run directory, but this run has none: pass "
        "JSONLines('log.jsonl'), or a directory to the loop"
    )


def test_hooks_that_were_never_started_can_end(tmp_path):
    for name in hooks.__all__[:-1]:
        arguments = [[]] if name == "KerasCallbacks" else []
        getattr(hooks, name)(*arguments).end(Loop(), ValueError())
    loop = Loop(tmp_path)
    loop.window(hooks.JSONLines(), loss=[1.0])
    loop.record(hooks.CSV(), "epoch", loss=1.0)
    assert list(tmp_path.iterdir()) == []


LOG = b"""{"step": 1, "loss": 0.5}
{"step": 2, "loss": 0.5}
{"kind": "log", "epoch": 1, "step": 2, "seconds": 1.0, "text": "NaN"}
{"step": 3, "loss": 0.5}
{"kind": "epoch", "epoch": 1, "step": 3, "seconds": 1.0}
"""


def test_a_torn_last_line_is_passed_over(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = LOG.rstrip()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        steps, records = read_log(path)
        complete = whole[: length + 1].count(b"\n") + (length == len(whole))
        assert len(steps) + len(records) == complete, length


def test_a_line_that_is_not_of_a_log_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    for wrong in (b"[1, 2]", b"oh no", b"\xff"):
        path.write_bytes(b'{"step": 1}\n' + wrong + b'\n{"step": 2}\n')
        with pytest.raises(DataError) as caught:
            read_log(path)
        shown = wrong.decode(errors="replace")
        assert str(caught.value) == f"line 2 of {path} is not a line of a log: {shown!r}"


@pytest.mark.parametrize("tail", [b"", b"{", b'{"step": 4, "lo', b"\xff\xfe\x00"])
@pytest.mark.parametrize(("step", "lines"), [(0, 0), (1, 1), (2, 3), (3, 5), (9, 5)])
def test_a_log_goes_on_where_the_run_does(tmp_path, step, lines, tail):
    path = tmp_path / "log.jsonl"
    path.write_bytes(LOG + tail)
    loop, hook = Loop(tmp_path, step=step), hooks.JSONLines()
    hook.start(loop)
    loop.window(hook, loss=[1.0])
    hook.end(loop, None)
    kept = b"".join(LOG.splitlines(keepends=True)[:lines])
    assert path.read_bytes() == kept + b'{"step": %d, "loss": 1.0}\n' % (step + 1)


def test_a_log_whose_last_line_has_no_end_keeps_it(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}')
    hook = hooks.JSONLines()
    hook.start(Loop(tmp_path, step=1))
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 1}\n'
    hook.end(Loop(), None)


# CSV


def test_csv_is_a_row_per_epoch(tmp_path):
    loop, hook = Loop(tmp_path), hooks.CSV()
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=np.float64(1 / 3), note="a, b", image=np.zeros(3))
    loop.record(hook, "validation", step=15, val_loss=1.0)
    loop.record(hook, "log", step=15, other=1.0)
    loop.record(hook, "epoch", step=20, note="c", loss=np.float32(0.5))
    hook.end(loop, None)
    assert (tmp_path / "epochs.csv").read_text() == (
        'epoch,step,seconds,loss,note\n2,10,2.5,0.3333333333333333,"a, b"\n3,20,5.0,0.5,c\n'
    )


def test_csv_grows_columns(tmp_path):
    loop, hook = Loop(), hooks.CSV(tmp_path / "table.csv")
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=2.0)
    loop.record(hook, "epoch", step=20, loss=1.0, val_loss=3.0, step_size=1)
    loop.record(hook, "epoch", step=30, val_loss=2.0, epoch=7)
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["epoch", "step", "seconds", "loss", "val_loss", "step_size", "epoch_"],
        ["2", "10", "2.5", "2.0", "", "", ""],
        ["3", "20", "5.0", "1.0", "3.0", "1", ""],
        ["4", "30", "7.5", "", "2.0", "", "7"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_csv_is_written_anew_once_for_a_column(tmp_path, monkeypatch):
    loop, hook = Loop(tmp_path), hooks.CSV()
    replaced, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (replaced.append(b), replace(a, b)))
    hook.start(loop)
    for step in range(1, 9):
        loop.record(hook, "epoch", step=step, loss=1.0, **({"val_loss": 1.0} if step > 4 else {}))
    assert len(replaced) == 2


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (10, 1), (19, 1), (20, 2), (99, 2)])
@pytest.mark.parametrize("tail", ["", "4,3", "4,30,1.0,0.5,0."])
def test_csv_goes_on_where_the_run_does(tmp_path, step, kept, tail):
    table = "epoch,step,seconds,loss,val_loss\n2,10,2.5,2.0,\n3,20,5.0,1.0,3.0\n"
    path = tmp_path / "epochs.csv"
    path.write_text(table + tail)
    loop, hook = Loop(tmp_path, step=step), hooks.CSV()
    hook.start(loop)
    loop.record(hook, "epoch", step=100, loss=0.0)
    rows = "".join(table.splitlines(keepends=True)[: kept + 1])
    expected = f"{rows}11,100,25.0,0.0,\n" if kept else "epoch,step,seconds,loss\n11,100,25.0,0.0\n"
    assert path.read_text() == expected


def test_csv_is_no_other_table(tmp_path):
    path = tmp_path / "epochs.csv"
    path.write_text("name,price\nbread,3\n")
    with pytest.raises(ConfigurationError) as caught:
        hooks.CSV().start(Loop(tmp_path))
    assert str(caught.value) == (
        f"{path} is not a table of epochs: its first line is 'name,price'. Choose another path, or "
        "move it away"
    )
    assert path.read_text() == "name,price\nbread,3\n"


def test_csv_needs_a_place():
    with pytest.raises(
        ConfigurationError, match=r"CSV\(\) writes epochs.csv into the run directory"
    ):
        hooks.CSV().start(Loop())


# FinalModel


class Twice(keras.Model):
    """Keras cannot save it: it does not know how it was made."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.function = keras.layers.Dense(2), function

    def call(self, x):
        return self.function(self.dense(x))


def dense():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])


def test_final_model_writes_what_was_learnt(tmp_path):
    task = SimpleNamespace(model=dense(), critic=dense(), units=3, optimizer=keras.optimizers.SGD())
    loop = Loop(tmp_path, step=5, task=task)
    loop.weights = 7
    (tmp_path / "state.npz").touch()  # as an older version called it
    hooks.FinalModel().end(loop, None)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["critic.keras", "model.keras", "state.safetensors"]
    assert read_arrays(tmp_path / "state.safetensors") == {"weights": 7}
    loaded = keras.models.load_model(tmp_path / "critic.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], task.critic.get_weights()[0])
    assert loop.warnings == []


def test_final_model_tells_of_a_model_that_cannot_be_saved(tmp_path):
    odd = Twice(lambda x: x)
    odd(np.zeros((1, 2), np.float32))
    loop = Loop(tmp_path, step=5, task=SimpleNamespace(odd=odd, model=dense()))
    hooks.FinalModel().end(loop, None)
    assert loop.warnings == [
        "odd.keras was not written: Keras cannot save it. Object Twice was created by passing "
        "non-serializable argument values in `__init__()`, and therefore the object must override "
        "`get_config()` in order to be serializable. Please implement `get_config()`. Its weights "
        "are in state.safetensors"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "state.safetensors"]


def test_final_model_writes_nothing_where_nothing_was_learnt(tmp_path):
    task = SimpleNamespace(model=dense())
    hooks.FinalModel().end(Loop(tmp_path, task=task), KeyboardInterrupt())
    hooks.FinalModel().end(Loop(tmp_path, task=task), None)
    hooks.FinalModel().end(Loop(step=5, task=task), None)
    assert list(tmp_path.iterdir()) == []


def test_what_is_to_go_on_leaves_no_final_model(tmp_path):
    loop = Loop(tmp_path, step=5, task=SimpleNamespace(model=dense()))
    hooks.FinalModel().end(loop, KeyboardInterrupt())
    loop.unfinished = True
    hooks.FinalModel().end(loop, None)
    assert list(tmp_path.iterdir()) == []
    loop.unfinished = False
    hooks.FinalModel().end(loop, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "state.safetensors"]


# LearningCurve


def history(epochs=3, length=50, scale=1.0, first=1):
    found = History()
    for epoch in range(epochs):
        steps = np.arange(first + epoch * length, first + (epoch + 1) * length)
        values = {"loss": (scale / steps + 1).astype("f4")}
        progress = Progress(int(steps[-1]), epoch, length)
        found.add_steps(StepLogs(int(steps[0]), values, values, 8, progress))
        means = {"loss": 1.0, "accuracy": 0.5, "val_loss": 1.2, "val_far_accuracy": 0.4}
        found.add(Record("validation", progress, means))
        found.add(Record("epoch", progress, {**means, "text": "no number"}))
    return found


def test_curves_are_drawn_without_touching_pyplot(tmp_path):
    # In a process without Keras, which imports pyplot itself.
    code = (
        "import sys; from treadle.hooks.curves import *; from treadle.core.logs import *\n"
        "record = Record('epoch', Progress(step=9), {'loss': 0.5, 'accuracy': 0.6})\n"
        "assert draw(History([record]), 'curves.png')\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    run = [sys.executable, "-W", "error", "-c", code]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr
    width, height = np.frombuffer((tmp_path / "curves.png").read_bytes()[16:24], ">u4")
    assert width == 1590 and height == 540


def test_learning_curve_draws_however_training_ended(tmp_path):
    loop = Loop(tmp_path)
    hooks.LearningCurve().end(loop, None)
    assert list(tmp_path.iterdir()) == []  # there is nothing to draw
    loop.history = history()
    hooks.LearningCurve().end(loop, ValueError())
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_learning_curve_is_left_out_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loop = Loop(tmp_path)
    loop.history = history()
    hooks.LearningCurve().end(loop, None)
    assert list(tmp_path.iterdir()) == []


def test_panels_put_training_beside_validation():
    loss, accuracy = curves._panels(history())
    assert (loss.name, accuracy.name) == ("loss", "accuracy")
    assert loss.noisy[0].tolist() == list(range(1, 151))
    assert loss.points == {"validation": {50: 1.2, 100: 1.2, 150: 1.2}}
    assert accuracy.points == {
        "training": {50: 0.5, 100: 0.5, 150: 0.5},
        "validation, far": {50: 0.4, 100: 0.4, 150: 0.4},
    }
    assert not len(accuracy.noisy[0])


def test_panels_of_a_resumed_run_begin_where_it_did():
    assert curves._panels(history(first=101))[0].noisy[0][0] == 101


def test_panels_of_an_endless_epoch_take_training_from_validations():
    found = History()
    found.add(Record("validation", Progress(5), {"accuracy": 0.5, "val_accuracy": 0.4}))
    (panel,) = curves._panels(found)
    assert panel.points == {"training": {5: 0.5}, "validation": {5: 0.4}}


def test_panels_pass_over_what_is_no_number():
    found = History()
    values = {"loss": np.array([1.0, NAN, 3.0])}
    found.add_steps(StepLogs(1, values, values, 8, Progress(3)))
    found.add(Record("epoch", Progress(3), {"loss": 2.0, "text": "a", "gone": NAN}))
    (panel,) = curves._panels(found)
    assert [part.tolist() for part in panel.noisy] == [[1, 3], [1.0, 3.0]]


def test_a_smooth_line_is_a_moving_mean():
    steps = np.arange(1.0, 401.0)
    panel = curves._Panel("loss", (steps, steps % 2))
    middles, means = panel.smooth
    assert len(middles) == len(means) == 391 and middles[0] == 6
    np.testing.assert_allclose(means, 0.5)


@pytest.mark.parametrize(("scale", "expected"), [(10.0, "linear"), (1e5, "log")])
def test_a_loss_over_more_than_two_decades_has_a_logarithmic_scale(scale, expected):
    from matplotlib.figure import Figure

    loss = curves._panels(history(scale=scale))[0]
    axes = Figure().add_subplot()
    curves._draw_panel(axes, loss)
    assert axes.get_yscale() == expected
    assert axes.get_title(loc="left") == axes.get_ylabel() == "loss"
    assert axes.get_xlabel() == "step"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training", "validation"]
