"""Execution plans of steps, and the facts about a step that determine them."""

from dataclasses import dataclass, replace

XLA = "XLA"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a backend knows about a step before running it.

    Attributes:
        device: The device that it runs on: `"cpu"`, `"gpu"` …
        compilers: The compilers that support it; empty if it cannot be compiled. The backend's
            default is the last one.
        convolves: Whether it contains convolutions or their gradients.
        large: Whether its variables have so many bytes that memory matters more than calls.
        refusal: Why a compiler is missing, as a clause; empty if none is.
    """

    device: str
    compilers: tuple[str, ...] = ()
    convolves: bool = False
    large: bool = False
    refusal: str = ""

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
        largest: The maximum number of steps whose results are fetched together.
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
        steps = f"windows of up to {self.largest}" if self.fused else "single steps"
        how = f"{steps}, {self.compiler}" if self.compiler else "eager"
        return f"{how} ({self.why})" if self.why else how
