"""How fast is training on a GPU, and how much of its memory does it take?

Treadle in windows, one step at a time, with deterministic algorithms, and on PyTorch compiled by
Inductor and in a CUDA graph; next to Keras' `fit` and loops written by hand. Each has a process of
its own. Results are kept in a file, and those that are in it are not measured again: if the time of
a call is over, the next call measures the rest. Remove the file to measure again.

    scripts/bench accelerator --write
    python -m benchmarks accelerator --backend jax --workload mlp --seconds 500

The second form runs in the environment of a machine that has the frameworks for its GPU already.
Without a GPU, `--small` shows that everything runs; its results have a file and a section of the
page of their own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from . import parser_of

BACKENDS = ("jax", "torch", "tensorflow")
WORKLOADS = {
    "mlp": "784-512-512-10, batch 128, float32",
    "resnet18": "ResNet-18 for 32 × 32 images, batch 256, bfloat16",
    "transformer": "width 512, 6 blocks, 256 tokens, batch 32, bfloat16",
}
TINY = {
    "mlp": "784-64-64-10, batch 32, float32",
    "resnet18": "the same layers with 4 to 32 channels, batch 4, bfloat16",
    "transformer": "width 32, 2 blocks, 16 tokens, batch 4, bfloat16",
}
COMMON = (
    "treadle, windows",
    "treadle, windows, deterministic",
    "treadle, each loss read",
    "fit",
)
OTHERS = {
    "jax": ("jitted step", "jitted step, each loss read", "raw lax.scan"),
    "torch": (
        *("treadle, inductor", "treadle, cuda-graph", "torch.nn", "torch.nn, each loss read"),
        "torch.nn, torch.compile",
    ),
    "tensorflow": (),
}
LONGEST = 240  # seconds for one contestant, most of which PyTorch's compiler takes
RESULTS, SMALL = Path("build/accelerator.json"), Path("build/accelerator-small.json")
PAGE = Path(__file__).parent.parent / "docs" / "accelerators.md"
BEGIN, END = "<!-- scripts/bench accelerator{} --write -->\n", "<!-- end -->\n"

Results = dict[str, dict[str, Any]]
"""What was measured, by backend, workload and contestant, joined by `/`."""


def main(arguments: list[str]) -> None:
    """Measure what is missing, and print the tables."""
    parser = parser_of("accelerator", __doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this backend")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one")
    parser.add_argument("--contestant", action="append", help="only this one")
    parser.add_argument("--rounds", type=int, default=5, help="epochs that are timed (5)")
    parser.add_argument("--seconds", type=float, default=570, help="time of this call (570)")
    parser.add_argument(
        "--results", type=Path, help=f"file of the results ({RESULTS}, with --small {SMALL})"
    )
    parser.add_argument("--small", action="store_true", help="tiny networks, for a CPU")
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables in docs/{PAGE.name}"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    chosen.results = chosen.results or (SMALL if chosen.small else RESULTS)
    if chosen.child:
        found = measured(chosen.workload[0], chosen.contestant[0], chosen.rounds, chosen.small)
        print(json.dumps(found))
        return
    kept: Results = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    ends = time.monotonic() + chosen.seconds
    for key in _keys(chosen):
        left = ends - time.monotonic()
        if key in kept or left <= 0:
            continue
        found = _in_process(key, chosen.rounds, chosen.small, min(left, LONGEST))
        if found is None:
            continue  # there was too little time for it
        kept[key] = found
        print(f"{key}: {found.get('failed') or _cells(found)}", flush=True)
        chosen.results.parent.mkdir(parents=True, exist_ok=True)
        chosen.results.write_text(json.dumps(kept, indent=1))
    print("\n".join(["", *tables(kept, chosen.small)]))
    missing = [key for key in _keys(chosen) if key not in kept]
    if missing:
        print(f"\nnot measured yet: {', '.join(missing)}\nrun the same command again")
    if chosen.write:
        write(kept, chosen.small)


def _keys(chosen: Any) -> list[str]:
    return [
        f"{backend}/{workload}/{name}"
        for backend in chosen.backend or BACKENDS
        for workload in chosen.workload or WORKLOADS
        for name in (*COMMON, *OTHERS[backend])
        if not chosen.contestant or name in chosen.contestant
    ]


def _in_process(key: str, rounds: int, small: bool, seconds: float) -> dict[str, Any] | None:
    """Measure a contestant; None if it took as long as the call had left, and not its own limit."""
    backend, workload, name = key.split("/")
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    command = [sys.executable, "-m", "benchmarks", "accelerator", "--child"]
    command += ["--workload", workload, "--contestant", name, "--rounds", str(rounds)]
    command += ["--small"] if small else []
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {LONGEST} s"} if seconds >= LONGEST else None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": lines[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(workload: str, name: str, rounds: int, small: bool) -> dict[str, Any]:
    """Return the times of a contestant on the active backend, and its peak of memory."""
    import treadle

    precision = "mixed_bfloat16" if workload in ("resnet18", "transformer") else "float32"
    treadle.setup(seed=0, precision=precision, deterministic=name.endswith("deterministic"))

    from .accelerated import Job, contestants, device, peak_bytes

    job = Job.of(workload, small)
    started = time.perf_counter()
    epoch = contestants()[name](job)
    epoch()
    first = time.perf_counter() - started
    epoch()
    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        loss = epoch()
        times.append((time.perf_counter() - started) / job.size.steps * 1e6)
    peak = peak_bytes()
    return {
        "per_step": sorted(times),
        "first": first,
        "peak": None if peak is None else peak / 2**20,
        "loss": float(loss),
        "device": device(),
    }


def tables(kept: Results, small: bool) -> list[str]:
    """Return a table for each backend and workload, with times relative to windows of Treadle."""
    lines: list[str] = []
    for backend in BACKENDS:
        for workload, about in (TINY if small else WORKLOADS).items():
            prefix = f"{backend}/{workload}/"
            found = {key.removeprefix(prefix): x for key, x in kept.items() if prefix in key}
            if not found:
                continue
            devices = sorted({x["device"] for x in found.values() if "device" in x})
            lines += [f"**{backend}, {workload}** ({about}) on {', '.join(devices) or '?'}:", ""]
            lines += ["| | µs a step (quartiles) | times Treadle's windows | peak MiB | start, s |"]
            lines += ["| --- | --- | --- | --- | --- |"]
            base = found.get(COMMON[0], {}).get("per_step")
            for name in (*COMMON, *OTHERS[backend]):
                if name in found:
                    lines.append(f"| {name} | {_cells(found[name], base)} |")
            lines.append("")
    return lines


def _cells(found: dict[str, Any], base: list[float] | None = None) -> str:
    if "failed" in found:
        return f"failed: {found['failed']} | | |".replace("\n", " ")
    times = found["per_step"]
    low, median, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    ratio = "" if base is None else f"{median / quantiles(base * 2, n=4)[1]:.2f}"
    peak = "" if found["peak"] is None else f"{found['peak']:,.0f}"
    return f"{median:,.0f} ({low:,.0f} to {high:,.0f}) | {ratio} | {peak} | {found['first']:.0f}"


def write(kept: Results, small: bool) -> None:
    """Write the tables in the page; those of tiny networks have a section of their own."""
    begin = BEGIN.format(" --small" if small else "")
    before, _, rest = PAGE.read_text().partition(begin)
    body = "\n".join(tables(kept, small))
    PAGE.write_text(f"{before}{begin}\n{body}\n{END}{rest.partition(END)[2]}")
