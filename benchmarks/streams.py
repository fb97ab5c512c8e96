"""How fast does Treadle train on data that are read while it trains?

Data sets of `tf.data`, PyTorch `DataLoader`s, Grain, generators, and arrays in files, against what
people write instead. All contestants of a stream train the same network on batches from equal
pipelines. Each stream has a process of its own, in which its contestants take turns.

    scripts/bench streams --stream tf.data
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import DOCS, in_process, keep, kept, parser_of, write_section

NETWORK = "a small convolutional network on augmented CIFAR-10, Adam, batch 64"
ROWS_NETWORK = "784-64-64-10, SGD, batch 64"
# The backend and the text of each stream.
STREAMS = {
    "tf.data": (
        "tensorflow",
        f"shuffle, parallel map with flip and crop, batch, prefetch; {NETWORK}",
    ),
    "DataLoader, 0 workers": ("torch", f"flip and crop of each example; {NETWORK}"),
    "DataLoader, 2 workers": ("torch", f"persistent workers; {NETWORK}"),
    "DataLoader, 4 workers": ("torch", f"persistent workers; {NETWORK}"),
    "Grain": ("jax", f"shuffle, map with flip and crop, batch, two threads; {NETWORK}"),
    "generator": ("jax", f"flip and crop of a whole batch with NumPy; {NETWORK}"),
    "memory-mapped": ("tensorflow", f"a sparse file of 10 GB, shuffled; {ROWS_NETWORK}"),
}
TREADLE = "treadle"
STEPS = {"tf.data": 128, "memory-mapped": 2000}
ROW = 784
MAPPED_ROWS = 10 * 10**9 // (ROW * 4)


def main(arguments: list[str]) -> None:
    """Measure what was chosen, and print a table."""
    parser = parser_of("streams", __doc__, 11, "streams.md")
    parser.add_argument("--stream", choices=STREAMS, action="append", help="only this stream")
    parser.add_argument("--only", action="append", help="only contestants with this text")
    chosen = parser.parse_args(arguments)
    if chosen.child:
        print(json.dumps(_measured(chosen.stream[-1], chosen.rounds, chosen.only)))
        return
    results = kept("streams")
    print("\n".join(HEAD))
    for stream in chosen.stream or STREAMS:
        if chosen.backend and STREAMS[stream][0] not in chosen.backend:
            continue
        options = ["--stream", stream, "--rounds", str(chosen.rounds)]
        options += [part for text in chosen.only or () for part in ("--only", text)]
        results[stream] = in_process("streams", STREAMS[stream][0], *options)
        print("\n".join(_rows(stream, results[stream])), flush=True)
    if chosen.write:
        keep("streams", results)
        write_section(DOCS / "streams.md", "bench streams --write", page(results))


HEAD = (
    "| stream | contestant | ms a step (fastest) | processor ms a step "
    "| its time by Treadle's (quartiles) | fastest by fastest |",
    "| --- | --- | --- | --- | --- | --- |",
)


def _rows(stream: str, measured: dict[str, Any]) -> list[str]:
    from .timing import Spread, ratio

    rows: list[str] = []
    times = measured["times"]
    for name, found in times.items():
        share = ratio(found["per_step"], times[TREADLE]["per_step"])
        processor = Spread.of(found["processor"]).median / 1000 if found["processor"] else None
        fastest = min(found["per_step"])
        rows.append(
            f"| {stream} | {name} | {_milliseconds(Spread.of(found['per_step']).median / 1000)} "
            f"({_milliseconds(fastest / 1000)}) "
            f"| {'' if processor is None else _milliseconds(processor)} | {share:.2f} "
            f"| {fastest / min(times[TREADLE]['per_step']):.2f} |"
        )
    return rows


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def page(results: dict[str, Any]) -> list[str]:
    """Return the lines of the section of `docs/streams.md`."""
    from .timing import processor

    lines = [f"{processor()}.", ""]
    known = [name for name in STREAMS if name in results]
    lines += [f"- {name} ({STREAMS[name][0]}): {STREAMS[name][1]}" for name in known]
    lines += ["", *HEAD]
    for name in known:
        lines += _rows(name, results[name])
    memory = results.get("memory-mapped", {}).get("mebibytes")
    if memory:
        lines += [
            "",
            f"Resident memory of the process after each of {len(memory)} turns over the "
            f"memory-mapped file, in MiB: {', '.join(f'{size:,.0f}' for size in memory)}.",
        ]
    return lines


def _measured(stream: str, rounds: int, only: list[str] | None) -> dict[str, Any]:
    """Return the times of each contestant, and what else the stream measures."""
    from .timing import compared

    with tempfile.TemporaryDirectory() as folder:
        if stream == "memory-mapped":
            makers, extra = _mapped(Path(folder, "rows"))
        else:
            makers, extra = _makers(stream), {}
        for name in list(makers):
            if only and name != TREADLE and not any(text in name for text in only):
                del makers[name]
        found = compared(makers, rounds)
    times = {
        name: {"per_step": times.per_step, "processor": times.processor}
        for name, times in found.items()
    }
    return {"times": times, **extra}


def _makers(stream: str) -> dict[str, Callable[[], Any]]:
    from .workloads import job as job_of

    if stream == "tf.data":
        from .contestants_tensorflow import ENTRIES

        job = job_of("streaming", STEPS[stream])
        left_out = ("eager step", "the pipeline alone", "jit_compile=False")
        entries = [e for e in ENTRIES["streaming"] if not e.name.startswith(left_out)]
        entries = [e for e in entries if "jit_compile=False" not in e.name]
        return {entry.name: partial(entry.make, job) for entry in entries}
    job = job_of("streaming", 64)
    by_hand = importlib.import_module(f"benchmarks.by_hand_{STREAMS[stream][0]}")
    how = int(stream.split()[1]) if stream.startswith("DataLoader") else stream
    return by_hand.streaming(job, how)


def _mapped(path: Path) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """Return contestants that train on a sparse file, and on as many bytes in memory as fit."""
    import numpy as np
    import psutil

    import treadle

    from .contestants import Contestant, TreadleLoop
    from .workloads import job as job_of

    steps, sizes = STEPS["memory-mapped"], list[float]()
    job = job_of("mlp-sgd", 1)
    with path.open("wb") as file:
        file.truncate(MAPPED_ROWS * ROW * 4)
    x = np.memmap(path, np.float32, "r", shape=(MAPPED_ROWS, ROW))
    rows = 2**19
    in_memory = np.ones((rows, ROW), np.float32)

    def source(x: Any) -> Any:
        y = np.zeros(len(x), np.int32)
        return treadle.data.limited(treadle.data.from_arrays(x, y, batch_size=64), steps)

    def looped(x: Any) -> Any:
        # Data in memory are streamed too, as they are if they do not fit on the device.
        options = treadle.Options(data_on_device=False)
        made = TreadleLoop(job, source(x), options=options)
        made.steps = steps
        return made

    def mapped() -> Contestant:
        made = looped(x)
        inner = made._epoch

        def epoch() -> dict[str, float]:
            values = inner()
            sizes.append(psutil.Process().memory_info().rss / 2**20)
            return values

        made._epoch = epoch
        return made

    return {TREADLE: mapped, "treadle, arrays in memory": partial(looped, in_memory)}, {
        "mebibytes": sizes
    }


def batches_of(job: Any) -> Iterator[Any]:
    """Yield augmented batches, flipped and cropped with NumPy."""
    import numpy as np

    images, labels = job.arrays
    for rows in job.order():
        found = images[rows]
        flipped = np.random.rand(len(rows)) < 0.5
        found[flipped] = found[flipped, :, ::-1]
        padded = np.pad(found, ((0, 0), (4, 4), (4, 4), (0, 0)))
        top, left = np.random.randint(0, 9, 2)
        yield padded[:, top : top + 32, left : left + 32], labels[rows]
