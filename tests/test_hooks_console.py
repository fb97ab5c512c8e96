import io
import itertools
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import rich.console

from treadle.core.logs import Record, StepLogs
from treadle.core.progress import Costs, Progress
from treadle.hooks import Console, console
from treadle.hooks.display import Position, Speed
from treadle.hooks.values import clock, line, plain, short

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|(\r)|(\n)|([^\x1b\r\n]+)")


def screen(written):
    """Return the lines that a terminal shows after it was sent this."""
    lines, row, column = [""], 0, 0
    for number, code, back, new, text in CONTROL.findall(written):
        if code == "A":
            row -= int(number)
        elif code == "K":
            lines[row] = ""
        elif back:
            column = 0
        elif new:
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text
            column += len(text)
    return [line.rstrip() for line in lines if line.strip()]


class Clock:
    """Stands for `time.monotonic`: a test says how much time passes."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Run:
    """A loop as a hook sees it, with a console on some file."""

    def __init__(self, clock, to, epochs=2, length=100, end=None, plan="one plan", at=0, **kwargs):
        self.progress, self.reason, self.plan = Progress(step=at), None, plan
        self.unfinished, self.directory = False, None
        self.epochs_planned, self.steps_planned, self.steps_per_epoch = epochs, end, length
        self.asked, self.costs, self.evaluated = 0, Costs(), None
        self.compiling = False
        self.clock, self.began, self.file = clock, clock.now, to.file
        self.hook = Console(to=to, **kwargs)
        self.hook.start(self)

    def metrics(self):
        self.asked += 1
        return {"loss": 0.75, "accuracy": 0.9}

    def window(self, steps=10, seconds=0.0, loss=0.5):
        self.clock.now += seconds
        first = self.progress.step + 1
        self.progress = self.progress.advanced(steps, 64 * steps).after_seconds(
            self.clock.now - self.began
        )
        values = {"loss": np.full(steps, loss, np.float32)}
        self.hook.steps(self, StepLogs(first, values, values, 64, self.progress))

    def record(self, kind, seconds=0.0, **values):
        self.clock.now += seconds
        self.progress = self.progress.after_seconds(self.clock.now - self.began)
        self.hook.record(self, Record(kind, self.progress, values))
        if kind == "epoch":
            self.progress = self.progress.at_epoch(self.progress.epoch + 1)

    def end(self, error=None):
        self.hook.end(self, error)

    @property
    def lines(self):
        return self.file.getvalue().splitlines()

    @property
    def shown(self):
        return screen(self.file.getvalue())


@pytest.fixture
def clock_(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(console, "monotonic", clock)
    # A thread would look at this clock at any moment: tests call what it calls.
    monkeypatch.setattr(console, "_watch", lambda *_: None)
    return clock


@pytest.fixture
def plain_text(clock_):
    return lambda **kwargs: Run(clock_, rich.console.Console(file=io.StringIO()), **kwargs)


@pytest.fixture
def terminal(clock_):
    def make(width=100, color_system="truecolor", **kwargs):
        to = rich.console.Console(
            force_terminal=True,
            force_interactive=True,
            file=io.StringIO(),
            width=width,
            color_system=color_system,
            _environ={"TERM": "xterm-256color"},
        )
        return Run(clock_, to, **kwargs)

    return make


def test_plain_text_is_a_line_per_epoch_and_one_every_ten_seconds(plain_text):
    run = plain_text()
    for _ in range(9):
        run.window(seconds=2.0)
    run.window(seconds=2.0)
    run.record("epoch", seconds=5.0, loss=0.6, accuracy=0.875, val_loss=0.7, val_noisy_loss=1234567)
    run.window(steps=100, seconds=1.0)
    run.record("epoch", loss=0.5, accuracy=0.9)
    run.end()
    assert run.lines == [
        "plan: one plan",
        "epoch 1/2  step 60/100  loss 0.75  accuracy 0.9  320 examples/s  0:28 left",
        "epoch 1/2  25.0 s  loss 0.6  accuracy 0.875  val_loss 0.7  val_noisy_loss 1,234,567",
        "epoch 2/2  step 100/100  loss 0.75  accuracy 0.9  640 examples/s  0:00 left",
        "epoch 2/2  1.00 s  loss 0.5  accuracy 0.9",
        "finished: 200 steps in 26.0 s",
    ]
    assert "\x1b" not in run.file.getvalue() and "\r" not in run.file.getvalue()


def test_long_lines_of_plain_text_are_not_broken(plain_text):
    run = plain_text()
    run.record("log", note="word " * 60)
    assert run.lines[1:] == ["step 0  note: " + "word " * 60]


def test_a_log_record_is_a_line(plain_text):
    run = plain_text()
    run.window(steps=200)
    run.record("log", loss=np.float32(0.512), samples=12800)
    run.record("log", poem="one\ntwo", image=np.zeros((28, 28, 3)), done=True)
    assert run.lines[1:] == [
        "step 200  loss 0.512  samples 12,800",
        "step 200  poem:",
        "one",
        "two  image <ndarray 28x28x3>  done True",
    ]


def test_a_validation_is_told_once(plain_text):
    run = plain_text()
    run.window(steps=50)
    run.record("validation", loss=0.6, val_loss=0.7)
    assert run.lines == ["plan: one plan"]  # an epoch's line may follow that says the same
    run.window(steps=50)
    assert run.lines[1:] == ["step 50  loss 0.6  val_loss 0.7"]
    run.record("validation", loss=0.5, val_loss=0.6)
    run.record("epoch", loss=0.5)
    assert run.lines[2:] == ["epoch 1/2  0.00 s  loss 0.5  val_loss 0.6"]
    run.window(steps=20)
    run.record("validation", val_loss=0.5)
    run.end()
    assert run.lines[3:] == ["step 120  val_loss 0.5", "finished: 120 steps in 0.00 s"]


def test_the_plan_is_told_once_when_it_is_known(plain_text):
    run = plain_text(plan="")
    assert run.lines == []
    run.plan = "8 steps per call"
    run.window()
    run.window(seconds=11)
    assert run.lines[0] == "plan: 8 steps per call"
    assert len(run.lines) == 2


def test_a_run_that_goes_on_says_from_where(plain_text):
    run = plain_text(at=31)
    assert run.lines[0] == "resuming after step 31"


def test_the_last_line_says_why_it_ended(plain_text):
    def last(error=None, reason=None, seconds=0.0):
        run = plain_text()
        run.window(steps=1, seconds=seconds)
        run.reason = reason
        run.end(error)
        return run.lines[-1]

    assert last(seconds=75) == "finished: 1 step in 1:15"
    assert last(reason="enough") == (
        "stopped after step 1, epoch 1, batch 1: enough; 1 step in 0.00 s"
    )
    assert last(KeyboardInterrupt()) == (
        "interrupted after step 1, epoch 1, batch 1; 1 step in 0.00 s"
    )
    assert last(ValueError("boom")) == "ValueError after step 1, epoch 1, batch 1; 1 step in 0.00 s"


def test_quiet_and_unstarted_consoles_show_nothing(plain_text):
    run = plain_text(quiet=True)
    run.window()
    run.record("epoch", loss=1.0)
    run.end()
    assert run.lines == []
    Console().end(run, None)


def test_metrics_are_asked_for_once_a_second_at_most(terminal):
    run = terminal()
    for _ in range(1000):
        run.window(steps=1, seconds=0.01)
    assert 9 <= run.asked <= 10


def test_a_terminal_is_drawn_ten_times_a_second_at_most(terminal, monkeypatch):
    run = terminal()
    drawn = []
    monkeypatch.setattr(console.Live, "refresh", lambda self: drawn.append(run.clock.now))
    for _ in range(1000):
        run.window(steps=1, seconds=0.01)
    assert 90 <= len(drawn) <= 101


def test_a_slow_terminal_slows_no_run(terminal, monkeypatch):
    run = terminal()
    drawn = []

    def refresh(self):
        drawn.append(run.clock.now)
        run.clock.now += 0.01

    monkeypatch.setattr(console.Live, "refresh", refresh)
    for _ in range(1000):
        run.window(steps=1, seconds=0.01)
    assert len(drawn) == 10  # at once, and every second: half of it would be too little rest


def test_a_terminal_goes_on_where_metrics_take_their_time(terminal, monkeypatch):
    run = terminal()
    drawn = []
    monkeypatch.setattr(console.Live, "refresh", lambda self: drawn.append(run.clock.now))
    metrics = run.metrics

    def compiling():
        run.clock.now += 3.0
        return metrics()

    run.metrics = compiling
    for _ in range(20):
        run.window(steps=1, seconds=0.2)
    assert run.asked >= 3
    assert max(b - a for a, b in itertools.pairwise(drawn)) < 3.5


def test_a_sentence_is_printed_without_a_run(plain_text):
    run = plain_text()
    run.hook.print("done before")
    assert run.lines[-1] == "done before"
    Console(quiet=True, to=rich.console.Console(file=run.file)).print("nothing")
    assert run.lines[-1] == "done before"


def test_a_terminal_shows_bars_and_a_table(terminal):
    run = terminal()
    run.window()
    run.window(seconds=2.0, steps=40)
    full = "━" * 40
    assert run.shown[-4:] == [
        f"epoch    1/2  {full}  0:07 left",
        f"step  50/100  {full}  1,280 examples/s",
        "now   loss 0.5000",
        "mean  loss 0.7500  accuracy 0.9000",
    ]
    run.record("epoch", seconds=2.0, loss=0.6, accuracy=0.875)
    run.record("log", samples=3200)
    run.window(seconds=1.0, steps=100)
    run.record("validation", loss=0.5, accuracy=0.9, val_loss=0.55)
    run.record("epoch", loss=0.5, accuracy=0.9, val_loss=0.55)
    run.end()
    assert run.shown == [
        "plan: one plan",
        "epoch   seconds      loss  accuracy",
        "  1/2      4.00    0.6000    0.8750",
        "step 50  samples 3,200",
        "epoch   seconds      loss  accuracy  val_loss",
        "  2/2      1.00    0.5000    0.9000    0.5500",
        "finished: 150 steps in 5.00 s",
    ]


def test_the_first_step_is_waited_for(terminal):
    assert terminal(plan="").shown[-1] == "step  0/100  " + "━" * 40 + "  compiling the first step"
    assert terminal().shown[-1] == "step  0/100  " + "━" * 40


def test_a_bar_without_colors_shows_only_what_is_done(terminal):
    run = terminal(color_system=None)
    run.window(steps=50)
    assert run.shown[-2] == "step  50/100  " + "━" * 20


@pytest.mark.parametrize("error", [None, ValueError(), KeyboardInterrupt()])
def test_a_terminal_is_left_as_it_was(terminal, error):
    run = terminal()
    run.window()
    assert run.file.getvalue().count("\x1b[?25l") == 1  # the cursor is hidden …
    assert "\x1b[?25h" not in run.file.getvalue()
    run.end(error)
    assert run.file.getvalue().count("\x1b[?25h") == 1  # … and shown again
    assert run.shown[0] == "plan: one plan" and len(run.shown) == 2


def test_a_table_too_wide_for_a_terminal_is_written_in_lines(terminal):
    run = terminal(width=50)
    run.window(steps=100)
    run.record("epoch", **{f"a_long_metric_name_{i}": 0.5 for i in range(2)})
    told = ["epoch 1/2  0.00 s  a_long_metric_name_0 0.5", "a_long_metric_name_1 0.5"]
    assert [line for line in run.shown if "a_long" in line] == told


def test_narrow_terminals_get_shorter_bars(terminal):
    run = terminal(width=44)
    run.window(steps=50)
    run.window(seconds=1.0)
    assert max(map(len, run.shown[-4:])) <= 44
    assert "━" in run.shown[-3]


def at(progress, **planned):
    loop = {"epochs_planned": None, "steps_planned": None, "steps_per_epoch": None, **planned}
    return Position(SimpleNamespace(**loop), progress, first_step=100)


def test_position_by_epochs():
    position = at(Progress(step=1150, epoch=2, batch=50), epochs_planned=4, steps_per_epoch=100)
    assert (position.epoch, position.epoch_part) == ("3/4", 0.625)
    assert (position.step, position.step_part) == ("50/100", 0.5)
    assert position.steps_left == 150


def test_position_by_steps():
    position = at(Progress(step=1100, epoch=2, batch=50), steps_planned=2100, steps_per_epoch=100)
    assert (position.epoch, position.epoch_part) == ("3", 0.5)
    assert (position.step, position.step_part) == ("1,100/2,100", 0.5)
    assert position.steps_left == 1000


def test_position_by_whichever_ends_first():
    by = {"epochs_planned": 10, "steps_planned": 200, "steps_per_epoch": 100}
    assert at(Progress(step=150, batch=50), **by).steps_left == 50


def test_position_without_an_end():
    position = at(Progress(step=1234, epoch=1, batch=7))
    assert (position.epoch, position.epoch_part) == ("2", None)
    assert (position.step, position.step_part) == ("1,234", None)
    assert position.steps_left is None


def test_no_end_is_known_and_the_time_passed_is_shown(terminal):
    run = terminal(epochs=None, length=None)
    run.window(steps=1234)
    run.window(steps=1, seconds=65)
    assert run.shown[-4] == "epoch     1  1:05 passed"
    assert run.shown[-3] == "step  1,235  1 examples/s"


def test_pace_knows_nothing_at_first():
    pace = Speed()
    assert pace.examples_per_second is None and pace.seconds_for(5) is None
    pace.look(1.0, Progress(step=1, examples=64))
    assert pace.examples_per_second is None and pace.seconds_for(5) is None


def test_speed_leaves_validation_out_and_the_time_left_does_not():
    pace = Speed()
    pace.look(0.0, Progress(step=10, examples=640))
    pace.lose(8.0)
    pace.look(10.0, Progress(step=20, examples=1280))
    assert pace.examples_per_second == 320
    assert pace.seconds_for(10) == 10


def test_scalars_of_any_kind_are_plain():
    import ml_dtypes
    import tensorflow as tf

    values = [True, np.bool_(True), 3, np.int64(3), tf.constant(3), 0.5, np.float32(0.5)]
    values += [np.float64(0.5), np.asarray(0.5), ml_dtypes.bfloat16(0.5), tf.constant(0.5), "text"]
    found = [plain(value) for value in values]
    assert found == [True, True, 3, 3, 3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, "text"]
    assert [type(x) for x in found] == [bool] * 2 + [int] * 3 + [float] * 6 + [str]
    assert plain(None) is plain([1]) is plain(np.zeros(1)) is plain(np.array(None)) is None


def test_numbers_are_short():
    numbers = [0.0, 0.00012346, 0.012345, 0.98765, 9.9999, 123.456, 12345.6, 1e9, -2.5, 1e-12]
    assert [short(n) for n in numbers] == (
        ["0", "0.0001235", "0.01235", "0.9877", "10", "123.5", "12,346", "1e+09", "-2.5", "1e-12"]
    )
    assert [short(n, fixed=True) for n in (0.0, 0.5, 12.0, 1e-12, float("nan"), 7)] == (
        ["0.000", "0.5000", "12.00", "1.000e-12", "nan", "7"]
    )
    assert [short(x) for x in (float("-inf"), None, np.zeros((2, 3)))] == [
        "-inf",
        "<NoneType>",
        "<ndarray 2x3>",
    ]


def test_lines_and_clocks():
    assert line({"loss": 0.5, "why": "none"}) == "loss 0.5  why: none"
    assert [clock(s) for s in (0.4, 61, 3600)] == ["0:00", "1:01", "1:00:00"]


def test_a_terminal_shows_what_takes_long_and_for_how_long(terminal):
    run = terminal(plan="")
    call = run.hook._call

    def note(bar):
        call.show_activity(run, run.clock.now)
        return run.shown[bar].split("  ")[-1]

    run.clock.now += 4.0
    assert note(-1) == "compiling the first step … 4 s"
    run.window(seconds=1.0)
    run.clock.now += 2.0
    assert "…" not in note(-3)  # steps run, or the body of the user's own for
    run.compiling = True
    assert note(-3) == "compiling … 2 s"
    run.window(seconds=1.0)
    run.hook.validation(run, None)
    run.evaluated = (3, 10)
    run.clock.now += 3.0
    assert note(-3) == "validating 3/10 … 3 s"
    run.evaluated = (4, None)
    assert note(-3) == "validating 4 … 3 s"
    run.hook.validation(run, {})
    run.end()
    assert run.shown[-1].startswith("finished")


def test_plain_text_shows_what_takes_long(plain_text):
    run = plain_text()
    run.hook.validation(run, None)
    run.clock.now += 31
    run.hook._call.show_activity(run, run.clock.now)
    assert run.lines[-1] == "validating … 31 s"


def test_the_thread_of_a_run_ends_with_it(clock_, monkeypatch):
    monkeypatch.undo()
    before = threading.active_count()
    run = Run(Clock(), rich.console.Console(file=io.StringIO()))
    assert threading.active_count() == before + 1
    run.end()
    assert threading.active_count() == before


def test_compiling_counts_for_no_pace(terminal):
    run = terminal(length=1000, epochs=1)
    run.window(steps=10)
    run.clock.now += 50.0
    run.costs = Costs(1, 50.0)
    run.window(steps=90, seconds=9.0)
    assert run.shown[-4].endswith("1:30 left")
    assert run.shown[-3].endswith("640 examples/s")


def test_bars_of_an_older_width_are_erased(terminal, monkeypatch):
    width = [100]
    monkeypatch.setattr(rich.console.Console, "width", property(lambda self: width[0]))
    run = terminal()
    run.window(steps=10, seconds=2.0)
    drawn = run.hook._call._display.drawn
    assert len(drawn) == 4 and max(drawn) > 50
    before = len(run.file.getvalue())
    width[0] = 30
    run.window(seconds=1.0)
    written = run.file.getvalue()[before:]
    rows = sum(-(-length // 30) for length in drawn)
    assert written.startswith(f"\r\x1b[{rows - 1}A\x1b[J\x1b[3B")
    before = len(run.file.getvalue())
    run.window(seconds=1.0)
    assert "\x1b[J" not in run.file.getvalue()[before:]


def test_values_that_do_not_fit_are_left_out(terminal):
    run = terminal(width=44)
    run.metrics = lambda: {f"metric_{number}": 0.5 for number in range(8)}
    run.window()
    run.window(seconds=2.0)
    assert run.shown[-1] == "mean  metric_0 0.5000  metric_1 0.5000  …"


def test_long_sentences_on_a_terminal_are_broken_between_words(terminal):
    run = terminal(width=44)
    run.end(ValueError())
    run.hook.print("one sentence that is far longer than the terminal is wide, with whole words")
    assert run.shown[-2:] == [
        "one sentence that is far longer than the",
        "terminal is wide, with whole words",
    ]


def test_seconds_of_an_epoch_include_its_validation():
    import keras

    import treadle

    keras.backend.clear_session()
    seconds = []

    class Watching(treadle.Hook):
        def validation(self, loop, results):
            seconds.append(loop.progress.seconds)
            time.sleep(0.05)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    data = treadle.data.from_arrays(np.ones((4, 1)), np.ones((4, 1)), batch_size=4)
    loop = treadle.Loop(treadle.Supervised(model, "mse", "sgd"), hooks=[Watching()], console=False)
    history = loop.fit(data, data, epochs=1)
    assert loop.progress.seconds >= seconds[0] + 0.1
    assert history.records[-1].progress.seconds >= seconds[0] + 0.1
