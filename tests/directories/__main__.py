"""Damage run directories: scripts/fuzz-directories --cases 2000 [--seed S] [--case N].

Each case damages one file or folder of a run directory by chance and runs a command on it. The
command must either end with the results of the undamaged run, or with one sentence that names the
file: without a traceback, within 5 seconds and 1 GiB, and without a change outside the directory.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # threads do not survive a fork
os.environ["KERAS_BACKEND"] = "torch"
os.environ["TREADLE_COMPILE_CACHE"] = "off"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz-directories", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, with everything it prints")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--found", type=Path, help="a file for the cases that failed")
    arguments = parser.parse_args()
    numbers = range(arguments.cases) if arguments.case is None else [arguments.case]
    found = list(_all(arguments, list(numbers)))
    failed = [case for case in found if case["faults"]]
    if arguments.found:
        arguments.found.write_text("".join(_shown(case) for case in failed))
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
    from .bases import Place
    from .imported import import_all

    import_all()
    from .cases import Cases

    cases, started = Cases(Place(root)), time.monotonic()
    with root.with_suffix(".jsonl").open("w") as file:
        for done, number in enumerate(numbers, 1):
            case = asdict(cases.run(arguments.seed, number))
            file.write(json.dumps(case) + "\n")
            if case["faults"] or arguments.case is not None:
                print(_shown(case), end="", flush=True)
            if done % 50 == 0:
                each = (time.monotonic() - started) / done
                print(f"{done} of {len(numbers)}, {each:.2f} s each", flush=True)


def _shown(case: dict[str, Any]) -> str:
    head = f"case {case['number']}: {case['kind']} run, {case['file']}: {case['damage']}; "
    head += f"{case['command']} ({case['seconds']:.1f} s): {case['answer']}\n"
    lines = [f"  FAULT {fault}" for fault in case["faults"]]
    lines += [f"  | {ascii(line)[1:-1][:300]}" for line in case["message"].splitlines()[-6:]]
    return head + "\n".join(lines) + "\n"


def _kind(fault: str) -> str:
    return fault.partition(":")[0].partition(",")[0]


if __name__ == "__main__":
    sys.exit(main())
