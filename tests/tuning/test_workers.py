"""Worker processes, with a program that trains nothing."""

import textwrap
from pathlib import Path

import pytest

from tests.tune_searches import apart, quick, wanted  # noqa: F401
from tests.waiting import WATCHDOG
from treadle.tuning import workers
from treadle.tuning.study import Study

PROGRAM = """
    import json, os, signal, sys, time
    from pathlib import Path

    json.loads(sys.stdin.readline())
    trials = 0
    Path("threads").mkdir(exist_ok=True)
    Path("threads", str(os.getpid())).write_text(os.environ.get("OMP_NUM_THREADS", "all"))
    for line in sys.stdin:
        order = json.loads(line)
        trials += 1
        Path("pids").open("a").write(f"{order['number']} {os.getpid()} {trials}\\n")
        stopped = False
        if Path(f"exit-{order['number']}").exists():
            os.close(1)  # as Python does before it exits
            time.sleep(0.3)
            os._exit(3)
        for at in range(3):
            print(json.dumps({"report": [at, 1.0 + order["number"]]}), flush=True)
            stopped = stopped or json.loads(sys.stdin.readline())
            fatal = Path(f"kill-{order['number']}")
            if at == 1 and fatal.exists():
                if fatal.read_text() == "once":
                    fatal.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        outcome = {"ended": "complete", "value": 1.0 + order["number"], "seed": 0}
        print(json.dumps({"outcome": outcome}), flush=True)
"""


def through_processes(monkeypatch, trials, count):
    Path("program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(workers, "PROGRAM", ("program.py",))
    monkeypatch.setattr(workers, "cores", lambda: 8)
    monkeypatch.setattr(workers, "EXIT_PATIENCE", WATCHDOG)
    found = Study(wanted(pruning=False), trials, Path("there"), fresh=False)
    told = []
    try:
        workers.Workers(found, count, {}, told.append).run()
        assert sorted(told, key=lambda trial: trial.number) == list(found.results())
    finally:
        found.close()
    begun = [tuple(map(int, line.split())) for line in Path("pids").read_text().splitlines()]
    return found.results(), begun


def threads_of_processes(begun):
    folder = Path("threads")
    found = {(folder / str(pid)).read_text() for _, pid, _ in begun}
    assert len(found) == 1
    return found.pop()


def test_processes_are_replaced_where_they_die(monkeypatch):
    Path("kill-1").write_text("once")
    Path("kill-2").write_text("always")
    trials, begun = through_processes(monkeypatch, 5, 1)
    assert [trial.ended for trial in trials] == ["complete"] * 2 + ["failed"] + ["complete"] * 2
    assert [trial.reports for trial in trials] == [3, 3, 2, 3, 3]
    killed = "was killed by SIGKILL (possibly out of memory)"
    assert trials[2].error == (
        f"its process {killed}, and the one that replaced it {killed}; see "
        "there/trials/0002/output.txt"
    )
    assert [number for number, *_ in begun] == [0, 1, 1, 2, 2, 3, 4]
    assert len({pid for _, pid, _ in begun}) == 4


def test_the_exit_code_of_a_process_is_that_with_which_it_ended(monkeypatch):
    Path("exit-0").touch()
    trials, _ = through_processes(monkeypatch, 2, 1)
    assert trials[0].error == (
        "its process ended with code 3, and the one that replaced it ended with code 3; see "
        "there/trials/0000/output.txt"
    )


def test_a_process_that_dies_before_it_takes_the_answer_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(Study, "over", lambda self, number: number == 1 and self._reports(1) == 2)
    Path("kill-1").write_text("always")
    trials, begun = through_processes(monkeypatch, 3, 1)
    assert [trial.ended for trial in trials] == ["complete", "pruned", "complete"]
    assert trials[1].reports == 2 and [number for number, *_ in begun] == [0, 1, 2]


def test_processes_are_renewed(monkeypatch):
    monkeypatch.setattr(workers, "RENEWED", 2)
    trials, begun = through_processes(monkeypatch, 5, 1)
    assert [trial.ended for trial in trials] == ["complete"] * 5
    assert [count for *_, count in begun] == [1, 2, 1, 2, 1]


def test_several_processes_share_the_trials(monkeypatch):
    trials, begun = through_processes(monkeypatch, 7, 3)
    assert [trial.value for trial in trials] == [1.0 + number for number in range(7)]
    assert sorted(number for number, *_ in begun) == list(range(7))
    assert len({pid for _, pid, _ in begun}) == 3


@pytest.mark.parametrize(("count", "threads"), [(1, "all"), (3, "2"), (9, "1")])
def test_several_processes_share_the_cores(monkeypatch, count, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, begun = through_processes(monkeypatch, 9, count)
    assert threads_of_processes(begun) == threads


def test_threads_that_were_asked_for_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    _, begun = through_processes(monkeypatch, 3, 3)
    assert threads_of_processes(begun) == "5"
