"""How a step runs, and what decides it: the facts that backends know, the plan made of them."""

from dataclasses import dataclass

XLA = "XLA"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a backend knows of a step before it runs.

    Attributes:
        device: `"cpu"`, `"gpu"` …: where it runs.
        compilers: How it can be compiled, the backend's default first; empty where it cannot be.
        convolves: Convolutions are among its operations, or their gradients.
        refusal: Why it cannot be compiled, as a clause; empty where it can.
    """

    device: str
    compilers: tuple[str, ...] = ()
    convolves: bool = False
    refusal: str = ""


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
