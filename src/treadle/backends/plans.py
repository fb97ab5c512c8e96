"""How a step runs, and what decides it: the facts that backends know, the plan made of them."""

from dataclasses import dataclass, replace

XLA = "XLA"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a backend knows of a step before it runs.

    Attributes:
        device: `"cpu"`, `"gpu"` …: where it runs.
        compilers: How it can be compiled; empty where it cannot be. What the backend does without
            being asked comes last.
        convolves: Convolutions are among its operations, or their gradients.
        refusal: Why a compiler is missing, as a clause; empty where none is.
    """

    device: str
    compilers: tuple[str, ...] = ()
    convolves: bool = False
    refusal: str = ""

    def without(self, compiler: str, refusal: str) -> "Facts":
        """Return these facts for a compiler that turned out to refuse the step."""
        left = tuple(name for name in self.compilers if name != compiler)
        return replace(self, compilers=left, refusal=refusal)


class RefusedError(Exception):
    """A compiler cannot compile a step; its text says why, as a clause."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step runs.

    Equal plans mean equal bits; `largest` alone does not matter for them.

    Attributes:
        compiler: One of the facts' compilers; empty where Python runs the step.
        fused: Several steps are one call; else each step is one.
        largest: The most steps whose results are fetched together.
        why: What made the choice other than the usual one, as a clause.

    Example:
        >>> print(Plan("graph", fused=True, largest=256))
        windows of up to 256, graph
    """

    compiler: str
    fused: bool
    largest: int
    why: str = ""

    def __str__(self) -> str:
        """Return it as one line."""
        steps = f"windows of up to {self.largest}" if self.fused else "single steps"
        how = f"{steps}, {self.compiler}" if self.compiler else "eager"
        return f"{how} ({self.why})" if self.why else how
