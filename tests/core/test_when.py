"""When something is due, in steps, examples, epochs and seconds."""

from typing import Any

import pytest

from treadle.core.progress import Progress
from treadle.core.triggers import Span, When, after, at, every
from treadle.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "amount", "of"),
    [
        ("1 step", 1, "step"),
        ("200 steps", 200, "step"),
        ("200steps", 200, "step"),
        ("  7   Epochs ", 7, "epoch"),
        ("1 epoch", 1, "epoch"),
        ("50_000 examples", 50_000, "examples"),
        ("1. step", 1, "step"),
        ("30 s", 30, "seconds"),
        ("0.5 s", 0.5, "seconds"),
        (".5 sec", 0.5, "seconds"),
        ("90 seconds", 90, "seconds"),
        ("10 min", 600, "seconds"),
        ("1 minute", 60, "seconds"),
        ("1.5 h", 5400, "seconds"),
        ("2 HOURS", 7200, "seconds"),
    ],
)
def test_spans_are_read(text: str, amount: float, of: str) -> None:
    assert Span.parse(text) == Span(amount, of)
    assert Span.parse(Span.parse(text)) == Span(amount, of)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (
                text,
                f"cannot read {text!r} as a time or a count: write a number and a unit in quotes, "
                "for example '200 steps'; units are steps, epochs, examples, s, min, h",
            )
            for text in ("", "steps", "200", 200, "-1 steps", "1e3 steps", "1.2.3 s", "_ s", ". s")
        ),
        ("0 steps", "'0 steps' must be more than zero"),
        ("0.0 s", "'0.0 s' must be more than zero"),
        ("1.5 steps", "'1.5 steps' must be a whole number of steps"),
        ("0.5 epoch", "'0.5 epoch' must be a whole number of epoch"),
        (
            "3 epoks",
            "unknown unit 'epoks' in '3 epoks'. Did you mean 'epochs'? Known: steps, epochs, "
            "examples, s, min, h.",
        ),
        (
            "3 batches",
            "unknown unit 'batches' in '3 batches'. A step trains on one batch: write '3 steps'",
        ),
        ("3 weeks", "unknown unit 'weeks' in '3 weeks'."),
    ],
)
def test_invalid_spans_are_refused(text: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Span.parse(text)
    assert str(caught.value).startswith(message)


def test_the_three_words() -> None:
    every_one, at_one, after_one = every("2 steps", print), at("3 epochs", print), after("1 h", id)
    assert every_one.when == When(Span(2, "step"), repeat=True)
    assert at_one.when == When(Span(3, "epoch"), repeat=False)
    assert after_one.when == When(Span(3600, "seconds"), repeat=False)
    assert (every_one.function, after_one.function) == (print, id)


def test_at_takes_no_time() -> None:
    with pytest.raises(ConfigurationError) as caught:
        at("30 min", print)
    assert str(caught.value) == "at('30 min') is a time, not an exact step: use after('30 min', …)"


@pytest.mark.parametrize(
    ("text", "repeat", "step", "expected"),
    [
        ("10 steps", True, 0, 10),
        ("10 steps", True, 9, 1),
        ("10 steps", True, 10, 10),
        ("10 steps", True, 13, 7),
        ("1 step", True, 5, 1),
        ("10 steps", False, 0, 10),
        ("10 steps", False, 9, 1),
        ("10 steps", False, 10, None),
        ("10 steps", False, 11, None),
    ],
)
def test_steps_until_a_step(text: str, repeat: bool, step: int, expected: int | None) -> None:
    rule = When(Span.parse(text), repeat)
    assert rule.steps_until(Progress(step=step, examples=32 * step), 32) == expected


@pytest.mark.parametrize(
    ("examples", "per_batch", "expected"),
    [(0, 32, 4), (96, 32, 1), (99, 32, 1), (100, 32, 4), (0, 200, 1), (0, 1, 100), (0, 0, 100)],
)
def test_steps_until_a_count_of_examples(examples: int, per_batch: int, expected: int) -> None:
    rule = When(Span.parse("100 examples"))
    assert rule.steps_until(Progress(examples=examples), per_batch) == expected


@pytest.mark.parametrize("text", ["1 epoch", "10 s"])
def test_epochs_and_seconds_give_no_number_of_steps(text: str) -> None:
    assert When(Span.parse(text)).steps_until(Progress(), 32) is None


def due(text: str, before: Progress, now: Progress, repeat: bool = True, **ended: bool) -> bool:
    return When(Span.parse(text), repeat).due(before, now, **ended)


def steps(number: int) -> Progress:
    return Progress(step=number)


def test_due_at_each_multiple() -> None:
    found = [n for n in range(1, 31) if due("10 steps", steps(n - 1), steps(n))]
    assert found == [10, 20, 30]
    assert due("10 steps", steps(9), steps(31))
    assert not due("10 steps", steps(10), steps(19))
    assert not due("10 steps", steps(10), steps(10))


def test_due_once() -> None:
    found = [n for n in range(1, 31) if due("10 steps", steps(n - 1), steps(n), repeat=False)]
    assert found == [10]
    assert due("10 steps", steps(3), steps(12), repeat=False)
    assert not due("10 steps", steps(10), steps(12), repeat=False)


def test_due_by_examples_at_the_first_boundary_after() -> None:
    def seen(count: int) -> Progress:
        return Progress(examples=count)

    found = [n for n in range(32, 330, 32) if due("100 examples", seen(n - 32), seen(n))]
    assert found == [128, 224, 320]


def test_due_by_epochs_when_one_has_ended() -> None:
    def ended(text: str, repeat: bool) -> list[int]:
        return [
            n + 1
            for n in range(7)
            if due(text, Progress(epoch=n), Progress(epoch=n), repeat, epoch_ended=True)
        ]

    assert ended("1 epoch", True) == [1, 2, 3, 4, 5, 6, 7]
    assert ended("3 epochs", True) == [3, 6]
    assert ended("3 epochs", False) == [3]
    assert not due("1 epoch", Progress(epoch=0, batch=3), Progress(epoch=0, batch=9))


def test_due_by_time() -> None:
    def at_second(seconds: float) -> Progress:
        return Progress(seconds=seconds)

    assert due("10 s", at_second(9.9), at_second(10.0))
    assert due("10 s", at_second(8), at_second(35))
    assert not due("10 s", at_second(10), at_second(19.9))
    assert due("1 min", at_second(59), at_second(61), repeat=False)
    assert not due("1 min", at_second(61), at_second(200), repeat=False)


def test_windows_that_end_where_steps_until_says_meet_every_event() -> None:
    rules = [When(Span.parse(text)) for text in ("7 steps", "5 steps", "96 examples")]
    progress, met = Progress(), {rule: [] for rule in rules}
    while progress.step < 70:
        size = min(rule.steps_until(progress, 32) or 99 for rule in rules)
        now = progress.advanced(size, 32 * size)
        for rule in rules:
            if rule.due(progress, now):
                met[rule].append(now.step)
        progress = now
    assert met[rules[0]] == list(range(7, 71, 7))
    assert met[rules[1]] == list(range(5, 71, 5))
    assert met[rules[2]] == list(range(3, 71, 3))
