"""The benchmark's own arithmetic, and that those who are compared learn the same."""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import benchmarks
from benchmarks import (
    accelerator,
    agreement,
    calls,
    chart,
    contestants_tensorflow,
    devices,
    messages,
    page,
)
from benchmarks.__main__ import MODULES, run
from benchmarks.timing import (
    HOPELESS,
    LONGEST,
    Neighbours,
    Spread,
    Times,
    ratio,
    rotated,
    take_turns,
)
from benchmarks.workloads import WORKLOADS, Job
from treadle.recipes import find

STEPS, BATCH = 30, 64


class Fake:
    """A contestant that takes as long as it is set to."""

    def __init__(self, name: str, seconds: float, turns: list[tuple[str, int]]) -> None:
        self.name, self.seconds, self.turns = name, seconds, turns

    def round(self, epochs: int = 1) -> Any:
        self.turns.append((self.name, epochs))
        return SimpleNamespace(seconds=epochs * self.seconds, steps=epochs * 10, values={"loss": 1})

    def about(self) -> dict[str, Any]:
        return {"name": self.name}

    def close(self) -> None:
        self.turns.append((self.name, 0))


def test_spread_and_ratio_are_taken_round_by_round() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    # The machine was twice as slow in the second round: the ratio does not see it.
    assert ratio([3.0, 6.0], [1.0, 2.0]) == Spread(3.0, 3.0, 3.0)


def test_every_contestant_has_every_place_in_the_order() -> None:
    names = ["a", "b", "c"]
    for number in range(6):
        assert sorted(rotated(names, number)) == names
    assert {rotated(names, number)[0] for number in range(3)} == {"a", "b", "c"}


def test_turns_are_long_enough_and_much_slower_contestants_have_one() -> None:
    turns: list[tuple[str, int]] = []
    makers: dict[str, Callable[[], Fake]] = {
        "treadle": lambda: Fake("treadle", 0.1, turns),
        "slow": lambda: Fake("slow", 0.1 * (HOPELESS + 1), turns),
        "usual": lambda: Fake("usual", 0.2, turns),
    }
    times = take_turns(makers, rounds=3, shortest=0.3)
    assert times["treadle"].per_step == pytest.approx([1e4, 1e4, 1e4])
    assert times["usual"].per_step == pytest.approx([2e4, 2e4, 2e4])
    assert len(times["slow"].per_step) == 1
    assert turns[6:9] == [("treadle", 3), ("slow", 1), ("usual", 2)]
    assert turns[-3:] == [("treadle", 0), ("slow", 0), ("usual", 0)]  # all are closed
    assert times["usual"].about == {"name": "usual"}


def test_contestants_that_take_too_long_have_one_turn() -> None:
    turns: list[tuple[str, int]] = []
    makers: dict[str, Callable[[], Fake]] = {
        "treadle": lambda: Fake("treadle", LONGEST / 2, turns),
        "long": lambda: Fake("long", LONGEST, turns),
    }
    times = take_turns(makers, rounds=3, shortest=0.3)
    assert [len(one.per_step) for one in times.values()] == [3, 1]


def test_neighbours_are_other_processes() -> None:
    neighbours = Neighbours()
    started = time.process_time()
    while time.process_time() - started < 0.5:  # busy ourselves
        pass
    assert 0 <= neighbours.share() <= 1
    neighbours._before = (0.0, 0.0, 0.0)
    neighbours._clocks = lambda: (60.0, 20.0, 100.0)
    assert neighbours.share() == pytest.approx(0.4)


def test_failing_contestants_are_named_but_treadle_must_not_fail() -> None:
    def fails() -> Fake:
        raise ValueError("no convolutions\nhere")

    makers = {"treadle": lambda: Fake("treadle", 1.0, []), "other": fails}
    times = take_turns(makers, rounds=1)
    assert times["other"].failed == "ValueError: no convolutions"
    with pytest.raises(ValueError, match="no convolutions"):
        take_turns({"treadle": fails}, rounds=1)


def result(**factors: float) -> dict[str, Any]:
    """What was measured where each contestant takes so many times Treadle's time."""
    kinds = {"treadle": "treadle", "raw in-graph loop": "raw", "fit": "fit"}
    kinds |= {"@tf.function step over tf.data": "hand", "fit, steps_per_execution=32": "fit"}
    about = {"plan": "windows of up to 256, graph", "programs": 1, "compiling": 0.5, "waiting": 0.1}
    times = {
        name: Times(
            1.0, 10, {"loss": 0.5}, [100 * factors[name.split()[0]]] * 3, [150.0] * 3, about
        )
        for name in kinds
    }
    return {
        "what": "an MLP",
        "steps": 10,
        "batch_size": 64,
        "kinds": kinds,
        "times": {name: asdict(one) for name, one in times.items()},
        "neighbours": 0.0,
        "machine": {"cpu": "some", "cores": 2, "memory": "8 GiB"},
        "versions": {"keras": "3"},
    }


def test_lines_are_met_or_not() -> None:
    good = result(**{"treadle": 1, "raw": 0.96, "fit": 4.5, "@tf.function": 3.2, "fit,": 4.5})
    found = list(page.checks({"speed mlp-sgd tensorflow": good}))
    assert len(found) == 6 and all(check.met for check in found)
    bad = result(**{"treadle": 1, "raw": 0.9, "fit": 0.9, "@tf.function": 0.99, "fit,": 1.1})
    found = list(page.checks({"speed mlp-sgd tensorflow": bad}))
    assert not any(check.met for check in found)
    assert found[0].found == "0.99 (0.99 – 0.99)"


def test_contestants_that_learn_something_else_are_named() -> None:
    measured = result(**{"treadle": 1, "raw": 1, "fit": 1, "@tf.function": 1, "fit,": 1})
    assert page.odd_losses(measured) == []
    measured["times"]["fit"]["values"]["loss"] = 0.6
    assert page.odd_losses(measured) == ["fit (loss 0.600, the others 0.500)"]
    measured["times"]["fit"]["steps"] = 5  # a part of the epoch is not comparable
    assert page.odd_losses(measured) == []


def test_growing_memory_and_later_programs_are_not_met() -> None:
    def met(**rates: float) -> list[bool]:
        rows = [
            {name: (1000 + i * rates.get(name, 0)) for name in ("mebibytes", "programs")}
            | {"step": i, "microseconds": 250 + i * rates.get("microseconds", 0)}
            for i in range(20)
        ]
        return [check.met for check in page.checks({"memory torch": {"rows": rows}})]

    assert met(mebibytes=1) == [True, True, True]
    assert met(mebibytes=2) == [False, True, True]
    assert met(programs=1, microseconds=1) == [True, False, False]


def test_the_page_holds_every_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = result(**{"treadle": 1, "raw": 0.5, "fit": 2, "@tf.function": 1.5, "fit,": 2})
    times = measured["times"]
    rows = [
        {"step": i, "mebibytes": 900 + i, "microseconds": 250, "programs": 1} for i in range(20)
    ]
    named = {"treadle, no hooks": times["treadle"], "treadle, data × 10": times["treadle"]}
    named |= {"treadle, parameters × 10": times["fit"], "raw": times["treadle"]}
    named |= {"raw, parameters × 10": times["fit"], **times}
    other = {**measured, "times": named}
    monkeypatch.setattr(page, "DOCS", tmp_path)
    parts = ("machine", "required", "tables")
    begins = [f"<!-- scripts/bench speed --write: {part} -->" for part in parts]
    (tmp_path / "benchmarks.md").write_text("\n<!-- end -->\n".join([*begins, "the end\n"]))
    page.write(
        {
            "memory torch": {**other, "rows": rows},
            "startup jax": {**other, "neighbours": 0.2, "seconds": {"treadle": [3.0, 4.0, 5.0]}},
            "hooks jax": {**other, "each": {"Console": 0.5}},
            "growth jax": {**other, "plain": "raw"},
            "speed mlp-sgd tensorflow keras 4.0": measured,
            "speed mlp-sgd tensorflow": measured,
        },
        newest_keras="4.0",
    )
    text = (tmp_path / "benchmarks.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## What it is held to",
        "## mlp-sgd, tensorflow",
        "## mlp-sgd, tensorflow, Keras 4.0",
        "## Default hooks, mlp-sgd, jax",
        "## Growth, mlp-sgd, jax",
        "## Many steps, mlp-sgd, torch",
        "## Seconds to the first step, mlp-sgd, jax",
    ]
    assert "| raw in-graph loop | 0.50 | 0.50 – 0.50 | 50 | 50 – 50 | 150 | 1.0 | 0.500 |" in text
    assert "pip would install 4.0: `--keras 4.0` measures it." in text
    assert "Others used 20% of the processors meanwhile: not to be trusted." in text
    assert "| treadle | 4.00 | 3.50 – 4.50 |" in text
    assert (
        "| memory, torch: memory after warm-up, 19 steps | flat within 2 % | +1.9% | met |" in text
    )


def test_the_command_knows_every_workload() -> None:
    assert set(page.WORKLOADS) == set(WORKLOADS)


@pytest.mark.long
def test_all_contestants_learn_the_same() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 784)).astype("float32")
    y = (x @ rng.normal(size=(784, 10))).argmax(1).astype("int32")
    workload = replace(WORKLOADS["mlp-adam"], batch_size=BATCH)
    job = Job("mlp-adam", workload, STEPS, (x, y))
    entries = {
        entry.name: entry.make
        for entry in contestants_tensorflow.ENTRIES["supervised"]
        if "eager" not in entry.name
    }
    entries["eager"] = lambda job: contestants_tensorflow.over_tf_data(job, compiled=False)
    losses: dict[str, float] = {}
    for name, make in entries.items():
        contestant = make(job)
        first, second = contestant.round(), contestant.round(2)
        assert (first.steps, second.steps) == (STEPS, 2 * STEPS), name
        assert second.values["loss"] < 0.9 * first.values["loss"], name
        losses[name] = first.values["loss"]
        contestant.close()
    middle = float(np.median(list(losses.values())))
    assert losses == pytest.approx(dict.fromkeys(losses, middle), rel=0.1)


def test_a_section_of_a_page_is_replaced(tmp_path: Any) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n<!-- scripts/bench x --write -->\nold\n<!-- end -->\n\nrest\n")
    for _ in range(2):
        benchmarks.write_section(path, "bench x --write", ["new", "rows", ""])
        assert path.read_text() == (
            "# Page\n\n<!-- scripts/bench x --write -->\n\nnew\nrows\n\n<!-- end -->\n\nrest\n"
        )
    with pytest.raises(ValueError, match=r"page\.md has no line <!-- scripts/bench y -->"):
        benchmarks.write_section(path, "bench y", [])


def test_every_benchmark_has_a_module_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    pages = "".join(path.read_text() for path in [*benchmarks.DOCS.glob("*.md")])
    named = set(re.findall(r"scripts/bench (\w+)", pages))
    assert named <= set(MODULES)
    for name in MODULES:
        with pytest.raises(SystemExit):
            run(name, ["--help"])
        assert f"usage: scripts/bench {name}" in capsys.readouterr().out


def test_each_section_of_a_page_belongs_to_a_command() -> None:
    for path in benchmarks.DOCS.glob("*.md"):
        text = path.read_text()
        begins = re.findall(r"(?m)^<!-- scripts/(bench \w+|package|clusters) .*-->$", text)
        assert {x.split()[-1] for x in begins} <= {*MODULES, "package", "clusters"}
        assert text.count(benchmarks.END) == len(begins), path


@pytest.mark.long
@pytest.mark.parametrize("call", calls.CALLS)
def test_all_contestants_of_evaluation_find_the_same(call: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 784)).astype("float32")
    y = rng.integers(10, size=STEPS * BATCH).astype("int32")
    job = Job("mlp", replace(WORKLOADS["mlp-sgd"], batch_size=BATCH), STEPS, (x, y))
    makers = calls.makers(call, job)
    values = {name: make().round(2).values for name, make in makers.items()}
    expected = values[calls.TREADLE]
    assert len(values) == 4 and expected
    for name, found in values.items():
        assert found == pytest.approx({key: expected.get(key, found[key]) for key in found}), name


def test_tiny_networks_are_not_taken_for_measured_ones(tmp_path: Any, monkeypatch: Any) -> None:
    """`bench accelerator` measures what its file lacks, which a trial with `--small` leaves so."""
    found = {"per_step": [1.0], "first": 1.0, "peak": None, "loss": 1.0, "device": "cpu"}
    measured: list[bool] = []

    def in_process(key: str, rounds: int, small: bool, seconds: float) -> dict[str, Any]:
        measured.append(small)
        return found

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accelerator, "_in_process", in_process)
    one = ["--backend", "jax", "--workload", "mlp", "--contestant", "fit"]
    for _ in range(2):
        accelerator.main([*one, "--small"])
        accelerator.main(one)
    assert measured == [True, False]
    page = tmp_path / "page.md"
    large, tiny = (f"<!-- scripts/bench accelerator{x} --write -->\n" for x in ("", " --small"))
    page.write_text(f"{large}here\n{benchmarks.END}{tiny}there\n{benchmarks.END}the end\n")
    monkeypatch.setattr(accelerator, "PAGE", page)
    accelerator.main([*one, "--small", "--write"])
    text = page.read_text()
    assert text.startswith(f"{large}here\n{benchmarks.END}{tiny}") and text.endswith("the end\n")
    assert "there" not in text and "**jax, mlp** (784-512-512-10" not in text
    assert "| fit | 1 (1 to 1) |" in text


def test_every_line_that_devices_must_show_has_commands() -> None:
    for line in devices.LINES:
        found = [check for check in devices.CHECKS if check.line == line]
        assert any(check.short for check in found)
        for words in [*(check.command for check in found), *(x.short for x in found if x.short)]:
            if words[0].startswith("tests/"):
                text = (benchmarks.ROOT / words[0]).read_text()
                chosen = set(re.findall(r"[\w-]+", words[-1])) - {"and", "or"}
                assert words[-1] == "--all" or all(word in text for word in chosen), words


MEASURED = """
torch, mlp-adam, 2 processes; median of 25 (extremes)
         treadle: 868 (700 to 900) µs of a processor a step, 900 (800 to 990) on the clock; loss 0.2
             DDP: 962 (900 to 990) µs of a processor a step, 900 (800 to 990) on the clock; loss 0.2
                  Treadle takes 0.91 (0.80 to 1.02) of it
 DDP, one bucket: 990 (900 to 999) µs of a processor a step, 900 (800 to 990) on the clock; loss 0.2
                  Treadle takes 0.88 (0.80 to 1.02) of it
exchanges: 0.31 (0.20 to 0.40) % of Treadle's processor time, 243 µs each; waiting in them 0.3 %
"""
FOUND = "0.91 of DDP, 0.88 of DDP, one bucket, exchanges 0.31 %"


@pytest.mark.parametrize(
    ("kind", "printed", "line"),
    [
        ("processes", MEASURED, FOUND),
        ("processes", "Traceback", "did not end"),
        ("against", "mlp-adam  torch  870  868   1.003 (0.990 to 1.020)", "1.003 (0.990 to 1.020)"),
        ("tests/test_x.py", "...\n12 passed in 30.65s\n", "12 passed in 30.65s"),
        ("agreement", "", ""),
    ],
)
def test_what_a_command_has_shown(kind: str, printed: str, line: str) -> None:
    assert devices.result(kind, printed) == line


def test_every_recipe_trains_on_two_workers_of_one_backend() -> None:
    trained = {name: agreement.programs_for(name, [], False) for name in agreement.TOPOLOGIES}
    two = [name for of in trained.values() for name in of[agreement.Topology(2)]]
    assert {x for x in two if x not in agreement.REFERENCE} | {*agreement.REFERENCE} >= {*find()}
    assert len({*two}) == len([x for x in two if x not in agreement.REFERENCE]) + 7
    for of in trained.values():
        assert all(set(agreement.REFERENCE) <= set(names) for names in of.values())


def test_what_differs_from_one_device_is_found() -> None:
    one = {"steps/loss": np.array([1.0, 20.0]), "state/count": np.array(3), "logs/seconds": [1.0]}
    other = {"steps/loss": np.array([1.0, 20.1]), "state/count": np.array(4), "logs/seconds": [2.0]}
    apart = [agreement.difference(other, one, group) for group in agreement.GROUPS]
    assert apart == [(pytest.approx(0.005), "steps/loss"), (0.0, ""), (np.inf, "state/count")]
    row = agreement.Row("digits", "torch", apart)
    assert (row.values, row.variables, row.is_wrong) == (pytest.approx(0.005), np.inf, True)
    rounding = [(1e-7, "steps/loss"), (1e-7, "logs/loss"), (1e-7, "state/count")]
    assert not agreement.Row("digits", "torch", rounding).is_wrong
    assert agreement.Row("digits", "torch", [], "the processes have different bits").is_wrong
    assert agreement.Row("linear-native", "tensorflow", rounding).is_wrong  # it must be refused
    assert agreement.digest(one) == agreement.digest({**one, "logs/seconds": [2.0]})
    assert agreement.digest(one) != agreement.digest(other)


def test_the_chart_shows_peers_and_the_page_lists_those_that_are_faster(tmp_path: Any) -> None:
    kept = {
        "speed mlp-sgd jax": result(
            **{"treadle": 1, "raw": 1, "fit": 0.5, "@tf.function": 2, "fit,": 2}
        )
    }
    line = next(x for x in chart.behind(kept) if x.startswith("| mlp-sgd"))
    assert line.startswith("| mlp-sgd | JAX | fit") and line.endswith("| 0.50 |")
    assert "No loop by hand and no `fit` is faster." in chart.behind({})
    for name in ("a.svg", "b.svg"):
        chart.draw(kept, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text() and "mlp-sgd" in drawn


def test_what_a_program_of_xla_sends_is_read_from_its_text() -> None:
    line = "%all-reduce.1 = (f32[3,4]{1,0}, /*index=1*/bf16[5]{0}, f32[]) all-reduce(%a, %b, %c), x"
    assert messages._bytes_of(line) == 4 * 12 + 2 * 5 + 4
    assert messages._bytes_of("%g = f32[3,4]{1,0} get-tuple-element(%all-reduce.1), index=0") == 0
    assert messages._bytes_of("%p = s32[8]{0} all-gather(%x), dimensions={0}") == 32


def test_the_time_of_messages_and_what_hides_it() -> None:
    network = messages.Network("", latency=1e-3, bandwidth=1e6)
    assert network.seconds(1e3, 4) == pytest.approx(2 * (1e-3 + 1e-3))
    assert network.seconds(4e6, 1024) == pytest.approx(20e-3 + 2 * 1023 / 1024 * 4)
    one = messages.Counted(([8, 4], [8, 5]), 9.0, [[4, 8]], 0)
    assert one.growth() == (10, 1)
    expected = network.seconds(8, 8) + network.seconds(4 + 6, 8)
    assert one.exposed(network, 8) == pytest.approx(expected)
    # PyTorch's `_compute_bucket_assignment_by_size` gives these for the reversed weights.
    sizes = [*[4 * 1024**2, 4096] * 3, 40_960, 40]
    assert messages.buckets(sizes) == [4_239_400, 8_396_800]
    large = messages.Counted(([0], [0]), 9.0, [[20 * 2**20] * 3], 0)
    spent = [network.seconds(each * 2**20, 2) for each in (20, 40)]
    assert large.exposed_of_ddp(network, 2) == pytest.approx(sum(spent) - 6)
    slow = replace(large, seconds=1e3)
    assert slow.exposed_of_ddp(network, 2) == pytest.approx(spent[-1])
