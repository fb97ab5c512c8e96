"""Run random programs: scripts/fuzz --programs 2000 --backend jax [--seed S] [--without FEATURE].

Workers run the programs, each some of them, since TensorFlow never frees what XLA compiled. A
program that fails is shrunk, printed as a script, and written into a folder.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .grammar import FEATURES, HAS

ROOT = Path(__file__).parents[2]
PER_WORKER = {"tensorflow": 15, "jax": 40, "torch": 40}
SECONDS = 900  # for one program, shrinking included


def main() -> int:
    arguments = parsed()
    if arguments.worker:
        work(arguments)
        return 0
    return lead(arguments)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Run random programs.")
    parser.add_argument("--programs", type=int, default=100, help="how many")
    parser.add_argument("--backend", default="jax", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=FEATURES, help="what no program is to use"
    )
    parser.add_argument(
        "--with", dest="needed", choices=HAS, help="skip the seeds whose programs lack this"
    )
    parser.add_argument("--short", action="store_true", help="smaller programs, fewer checks")
    parser.add_argument("--no-shrink", action="store_true", help="report failures as they are")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="a folder")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(arguments: argparse.Namespace) -> None:
    """Run programs in this process and tell of each on a line of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends this process
    if arguments.backend == "torch":
        import torch

        torch.set_num_threads(1)  # tiny tensors: threads only wait for one another
    if arguments.backend == "jax":
        import jax

        # The runs of one program compile the same programs again, and so do the next workers.
        cache = Path(tempfile.gettempdir()) / f"treadle-jax-{jax.__version__}"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from .report import examined
    from .search import program_of

    features = frozenset(FEATURES) - set(arguments.without)
    for number in range(arguments.seed, arguments.seed + arguments.programs):
        tell(begins=number)
        needed, program = arguments.needed, program_of(number, features, arguments.short)
        if needed is not None and not HAS[needed](program):
            tell(seed=number, result="skipped")
            continue
        tell(**examined(number, features, arguments.short, not arguments.no_shrink))


def tell(**line: object) -> None:
    sys.__stdout__.write(json.dumps(line) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def lead(arguments: argparse.Namespace) -> int:
    """Start workers one after the other, until all programs have run."""
    number, end = arguments.seed, arguments.seed + arguments.programs
    started, counts = time.monotonic(), Counter[str]()
    plans = Counter[str]()
    try:
        while number < end:
            process = worker(arguments, number, min(PER_WORKER[arguments.backend], end - number))
            try:
                number = follow(arguments, process, number, started, counts, plans)
            finally:
                process.kill()
                process.wait()
    except KeyboardInterrupt:
        print("stopped")
    seconds = time.monotonic() - started
    done = sum(counts.values())
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{arguments.backend}: {done} programs in {seconds:.0f} s: {told or 'none'}")
    for plan, count in plans.most_common(6):
        print(f"  {count} {plan}")
    return int(set(counts) - {"agree", "skipped"} != set())


def worker(arguments: argparse.Namespace, first: int, count: int) -> "subprocess.Popen[str]":
    own = [f"--programs={count}", f"--seed={first}", f"--backend={arguments.backend}", "--worker"]
    own += ["--no-shrink"] if arguments.no_shrink else []
    own += ["--short"] if arguments.short else []
    own += ["--with", arguments.needed] if arguments.needed else []
    own += ["--without", *arguments.without] if arguments.without else []
    environment = os.environ | {"KERAS_BACKEND": arguments.backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    errors = arguments.failures.with_suffix(".log").open("a")
    with errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz", *own],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def follow(
    arguments: argparse.Namespace,
    process: "subprocess.Popen[str]",
    number: int,
    started: float,
    counts: Counter[str],
    plans: Counter[str],
) -> int:
    """Read the output of a worker; return the number of the next program."""
    assert process.stdout is not None
    begun, shown = False, 0.0
    limit = signal.signal(signal.SIGALRM, lambda *_: process.kill())
    for text in process.stdout:
        signal.alarm(SECONDS)
        line = json.loads(text)
        if "begins" in line:
            number, begun = line["begins"], True
            continue
        begun = False
        number += 1
        counts[line["result"]] += 1
        plans.update([line["plan"]] if "plan" in line else [])
        done = sum(counts.values())
        failed = line["result"] not in ("agree", "skipped")
        if failed:
            told(arguments, line)
        if failed or time.monotonic() > shown + 30:
            shown = time.monotonic()
            seconds = time.monotonic() - started
            told_counts = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
            print(f"{done} of {arguments.programs}, {seconds / done:.1f} s each: {told_counts}")
            sys.stdout.flush()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, limit)
    if process.wait() != 0 or begun:
        if not begun:
            raise SystemExit(f"the worker ended with {process.returncode}: see its log")
        counts["crash"] += 1
        line = {"seed": number, "result": "crash", "message": f"exit code {process.returncode}"}
        told(arguments, {**line, "program": "", "script": ""})
        number += 1
    return number


def told(arguments: argparse.Namespace, line: dict[str, str]) -> None:
    """Print a failure, and write its script."""
    print(f"\nseed {line['seed']}: {line['result']}\n{line['message']}\n{line['program']}")
    if line["script"]:
        arguments.failures.mkdir(parents=True, exist_ok=True)
        path = arguments.failures / f"{arguments.backend}-{line['seed']}.py"
        path.write_text(line["script"])
        print(f"a script that shows it: {path}")
        if arguments.programs == 1:
            print(line["script"])


if __name__ == "__main__":
    sys.exit(main())
