"""`Console` on a terminal: bars, tables, and how often they are drawn."""

import io
import itertools

import pytest
import rich.console

from tests.console_runs import Run, stopped_clock  # noqa: F401
from treadle.core.progress import Costs
from treadle.core.terminal import Waiting
from treadle.hooks import console


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


def test_metrics_are_read_once_a_second_at_most(terminal):
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


def test_a_terminal_is_updated_while_metrics_are_slow(terminal, monkeypatch):
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
    told = ["epoch 1/2  0.00 s  a_long_metric_name_0 0.5", "    a_long_metric_name_1 0.5"]
    assert [line for line in run.shown if "a_long" in line] == told


def test_narrow_terminals_get_shorter_bars(terminal):
    run = terminal(width=44)
    run.window(steps=50)
    run.window(seconds=1.0)
    assert max(map(len, run.shown[-4:])) <= 44
    assert "━" in run.shown[-3]


def test_no_end_is_known_and_the_time_passed_is_shown(terminal):
    run = terminal(epochs=None, length=None)
    run.window(steps=1234)
    run.window(steps=1, seconds=65)
    assert run.shown[-4] == "epoch     1  1:05 passed"
    assert run.shown[-3] == "step  1,235  1 examples/s"


def test_a_terminal_shows_long_activities_and_their_duration(terminal):
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


def test_values_that_do_not_fit_the_width_are_omitted(terminal):
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


def test_a_value_stays_on_the_line_of_its_name(terminal):
    run = terminal(width=44)
    run.window(steps=100)
    run.record("epoch", **{f"val_{name}": 0.5 for name in ("loss", "accuracy", "precision")})
    assert run.shown[1:3] == [
        "epoch 1/2  0.00 s  val_loss 0.5",
        "    val_accuracy 0.5  val_precision 0.5",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_printed_above_an_activity_are_broken_between_values(is_terminal):
    to = rich.console.Console(force_terminal=is_terminal, file=io.StringIO(), width=44)
    line = "trial 0000  val_loss 0.5592  units=64 learning_rate=0.01"
    Waiting("searching", to=to).print(line)
    broken = ["trial 0000  val_loss 0.5592", "    units=64 learning_rate=0.01"]
    assert to.file.getvalue().splitlines() == (broken if is_terminal else [line])
