"""Profiler traces for Perfetto, in Chrome's JSON trace format."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACE = "trace.json.gz"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A timed event of a trace.

    Attributes:
        process: The host or device that it ran on.
        thread: The thread or stream that it ran on.
        name: The event's name.
        begin: Its start, in microseconds.
        duration: Its duration, in microseconds.
    """

    process: str
    thread: str
    name: str
    begin: float
    duration: float


def write_trace(spans: Iterable[TraceEvent], directory: Path) -> None:
    """Write spans as a file that Perfetto opens."""
    numbers: dict[tuple[str, str], tuple[int, int]] = {}
    processes: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        line = span.process, span.thread
        if span.process not in processes:
            processes[span.process] = len(processes) + 1
            events.append(_named("process_name", span.process, processes[span.process], 0))
        if line not in numbers:
            numbers[line] = processes[span.process], len(numbers) + 1
            events.append(_named("thread_name", span.thread, *numbers[line]))
        pid, tid = numbers[line]
        at = {"pid": pid, "tid": tid, "ts": span.begin, "dur": span.duration}
        events.append({"ph": "X", "name": span.name, **at})
    directory.mkdir(parents=True, exist_ok=True)
    with gzip.open(directory / TRACE, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump({"traceEvents": events}, file)


def read_trace(directory: Path) -> list[TraceEvent]:
    """Return the spans of the trace in a directory."""
    with gzip.open(directory / TRACE, "rt", encoding="utf-8") as file:
        events: list[Mapping[str, Any]] = json.load(file)["traceEvents"]
    processes, threads = dict[Any, str](), dict[Any, str]()
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            processes[event["pid"]] = str(event["args"]["name"])
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = str(event["args"]["name"])
    found: list[TraceEvent] = []
    for event in events:
        # PyTorch's profiler uses the category "Trace" for its own bookkeeping.
        if event.get("ph") == "X" and "dur" in event and event.get("cat") != "Trace":
            pid, tid = event["pid"], event["tid"]
            process, thread = processes.get(pid, str(pid)), threads.get((pid, tid), str(tid))
            begin, duration = float(event["ts"]), float(event["dur"])
            found.append(
                TraceEvent(f"{process} {pid}", f"{thread} {tid}", event["name"], begin, duration)
            )
    return found


def newest(directory: Path, pattern: str) -> Path:
    """Return the newest file below a directory that matches a pattern."""
    return max(directory.rglob(pattern), key=lambda path: path.stat().st_mtime_ns)


def own_times(spans: Iterable[TraceEvent]) -> dict[str, tuple[float, int]]:
    """Return the self time of each name (without nested spans), and how often it ran.

    Example:
        >>> outer = TraceEvent("host", "1", "step", 0, 10)
        >>> inner = TraceEvent("host", "1", "add", 2, 3)
        >>> own_times([inner, outer])
        {'step': (7.0, 1), 'add': (3.0, 1)}
    """
    lines: dict[tuple[str, str], list[TraceEvent]] = {}
    for span in spans:
        lines.setdefault((span.process, span.thread), []).append(span)
    found: dict[str, tuple[float, int]] = {}

    def add(name: str, seconds: float, count: int) -> None:
        before = found.get(name, (0.0, 0))
        found[name] = before[0] + seconds, before[1] + count

    for line in lines.values():
        around: list[TraceEvent] = []
        for span in sorted(line, key=lambda span: (span.begin, -span.duration)):
            while around and around[-1].begin + around[-1].duration <= span.begin:
                around.pop()
            if around:
                add(around[-1].name, -span.duration, 0)
            add(span.name, span.duration, 1)
            around.append(span)
    return found


def _named(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
