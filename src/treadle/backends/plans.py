"""Execution plans of steps, and the facts about a step that determine them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

XLA = "XLA"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a backend knows about a step before running it.

    Attributes:
        device: The device that it runs on: `"cpu"`, `"gpu"` …
        compilers: The compilers that support it, the usual one first; empty if it cannot be
            compiled. Of TensorFlow's, the last one is a graph without XLA.
        slow: What XLA does slower on a CPU, such as `"convolves"`; empty if nothing: on TensorFlow,
            slower than a graph; on JAX, slower in a loop.
        large: Whether its variables have so many bytes that memory matters more than calls.
        refusal: Why a compiler is missing, as a clause; empty if none is.
        loops: Whether it has loops that are slow as Python, so that no form of batch runs so first.
        reads_sizes: Whether code outside of Keras and the framework asked for a shape of which a
            size is open.
    """

    device: str
    compilers: tuple[str, ...] = ()
    slow: str = ""
    large: bool = False
    refusal: str = ""
    loops: bool = False
    reads_sizes: bool = False

    def without(self, compiler: str, refusal: str) -> "Facts":
        """Return these facts without a compiler that does not support the step."""
        left = tuple(name for name in self.compilers if name != compiler)
        return replace(self, compilers=left, refusal=refusal)


class RefusedError(Exception):
    """A compiler cannot compile a step; the message is the reason, as a clause."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The execution plan of a step.

    Equal plans give bit-for-bit equal results; `largest` does not change them.

    Attributes:
        compiler: One of the facts' compilers; empty if the step runs eagerly.
        fused: Whether several steps run as one call.
        largest: The maximum number of steps whose results are fetched together; 0 if unknown.
        why: The reason for a choice other than the default, as a clause.

    Example:
        >>> print(Plan("graph", fused=True, largest=256))
        windows of up to 256, graph
    """

    compiler: str
    fused: bool
    largest: int
    why: str = ""

    def __str__(self) -> str:
        """Return the plan as one line."""
        windows = f"windows of up to {self.largest}" if self.largest else "windows"
        steps = windows if self.fused else "single steps"
        how = f"{steps}, {self.compiler}" if self.compiler else "eager"
        return f"{how} ({self.why})" if self.why else how


@dataclass(frozen=True, slots=True)
class Execution:
    """How the steps of a run are executed: the plan of the step, and where its data is.

    It is recorded as fields, by `facts`; the sentence is for people.

    Attributes:
        plan: The plan of the step; if batches of other forms run differently, `why` says so.
        resident: Whether the data is on the device as a whole, and not streamed.
        devices: The number of devices in this process.
        shards: Among how many processes the reading of the data is divided.
        repeats: Whether the same step gives the same bits again, and not up to the order of sums.

    Example:
        >>> print(Execution(Plan("XLA", True, 256), resident=True))
        windows of up to 256, XLA, data on the device
        >>> print(Execution(Plan("", False, 16, "it calls print"), resident=False, devices=4))
        eager (it calls print), on 4 devices
    """

    plan: Plan
    resident: bool
    devices: int = 1
    shards: int = 1
    repeats: bool = True

    def __str__(self) -> str:
        """Return the execution as one sentence."""
        where = f", on {self.devices} devices" if self.devices > 1 else ""
        if self.plan.compiler:
            many = f"each of {self.devices}" if self.devices > 1 else "the"
            device = f"{many} device{'s' if self.devices > 1 else ''}"
            streamed = f"streamed to {self.devices} devices" if self.devices > 1 else "streamed"
            where = f", data on {device}" if self.resident else f", data {streamed}"
        text = f"{self.plan}{where}"
        if not self.repeats:
            text += ", repeats up to the order of sums"
        if self.shards > 1:
            text += (
                f", sharded over {self.shards} processes (inexact on another number of processes)"
            )
        return text

    def facts(self) -> dict[str, Any]:
        """Return the fields that a run records, in JSON's types.

        Example:
            >>> facts = Execution(Plan("XLA", True, 256, "…"), resident=True).facts()
            >>> facts
            {'compiler': 'XLA', 'fused': True, 'resident': True, 'shards': 1}
            >>> print(Execution.of(facts))
            windows, XLA, data on the device
        """
        return {
            "compiler": self.plan.compiler,
            "fused": self.plan.fused,
            "resident": self.resident,
            "shards": self.shards,
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Execution":
        """Return an execution with recorded fields; the others do not change any result."""
        plan = Plan(facts["compiler"], facts["fused"], largest=0)
        return cls(plan, facts["resident"], shards=facts["shards"])
