"""Damage run directories, or cut the power of runs, and compare the results.

    scripts/fuzz-directories --cases 2000 [--seed S] [--case N]
    scripts/fuzz-directories --power-losses 1000 [--seed S] [--case N]

Each case damages one file or folder of a run directory by chance and runs a command on it. Each
second case damages a file of a finished run, one after the other. The command must either end with
the results of the undamaged run, or with one sentence that names the file: without a traceback,
within a minute of processor time and 600 MiB, and without a change outside the directory. Only if
the manifest of a checkpoint was changed together with its hash, results may differ.

A loss of power drops, cuts or fills with zeros what a run has not synced at one of its operations
on files. The run that resumes must end with the files of an uninterrupted run, except for times.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # threads do not survive a fork
os.environ["KERAS_BACKEND"] = "torch"
os.environ["TREADLE_COMPILE_CACHE"] = "off"

Run = Callable[[int, int], Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz-directories",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=200, help="how many (200)")
    parser.add_argument("--power-losses", type=int, help="cut the power of so many runs instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, with everything it prints")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--found", type=Path, help="a file for the cases that failed")
    parser.add_argument("--totals", type=Path, help="a file for the numbers of cases, as JSON")
    arguments = parser.parse_args()
    count = arguments.power_losses or arguments.cases
    numbers = range(count) if arguments.case is None else [arguments.case]
    found = list(_all(arguments, list(numbers)))
    failed = [case for case in found if case["faults"]]
    if arguments.found:
        arguments.found.write_text("".join(map(_shown, failed)))
    if arguments.totals:
        answers = Counter(case["answer"] for case in found if not case["faults"])
        totals = {"seed": arguments.seed, "cases": len(found), "failed": len(failed), **answers}
        arguments.totals.write_text(json.dumps(totals))
    print(f"{len(found)} cases, {len(failed)} failed")
    for fault, count in Counter(_kind(f) for case in failed for f in case["faults"]).most_common():
        print(f"  {count:5} {fault}")
    return int(bool(failed))


def _all(arguments: argparse.Namespace, numbers: list[int]) -> list[dict[str, Any]]:
    """Run the cases in a few processes."""
    with tempfile.TemporaryDirectory(prefix="treadle-") as name:
        root, children, found = Path(name).resolve(), [], []
        for worker in range(min(arguments.workers, len(numbers))):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    _work(arguments, numbers[worker :: arguments.workers], root / str(worker))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            children.append(pid)
        for pid in children:
            if os.waitpid(pid, 0)[1] != 0:
                raise SystemExit("a worker failed")
        for path in sorted(root.glob("*.jsonl")):
            found += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda case: case["number"])


def _work(arguments: argparse.Namespace, numbers: list[int], root: Path) -> None:
    run, started = _prepared(arguments, root), time.monotonic()
    with root.with_suffix(".jsonl").open("w") as file:
        for done, number in enumerate(numbers, 1):
            case = asdict(run(arguments.seed, number))
            file.write(json.dumps(case) + "\n")
            if case["faults"] or arguments.case is not None:
                lines = 6 if arguments.case is None else 10_000
                print(_shown(case, lines), end="", flush=True)
            if done % 50 == 0:
                each = (time.monotonic() - started) / done
                print(f"{done} of {len(numbers)}, {each:.2f} s each", flush=True)


def _prepared(arguments: argparse.Namespace, root: Path) -> Run:
    """Make the undamaged runs in a folder, and return the function that runs a case."""
    from .imported import import_all

    import_all()
    if arguments.power_losses:
        from .power import PowerLosses

        root.mkdir()
        return PowerLosses(root).run
    from .bases import Place
    from .cases import Cases

    return Cases(Place(root)).run


def _shown(case: dict[str, Any], lines: int = 6) -> str:
    head = f"case {case['number']}: "
    if "losses" in case:
        head += f"power lost after {', then after '.join(case['losses'])}\n"
    else:
        head += f"{case['kind']} run, {case['file']}: {case['damage']}; "
        head += f"{case['command']} ({case['seconds']:.1f} s): {case['answer']}\n"
    shown = [f"  FAULT {fault}" for fault in case["faults"]]
    shown += [f"  | {ascii(line)[1:-1][:300]}" for line in case["message"].splitlines()[-lines:]]
    return head + "\n".join(shown) + "\n"


def _kind(fault: str) -> str:
    return fault.partition(":")[0].partition(",")[0]


if __name__ == "__main__":
    sys.exit(main())
