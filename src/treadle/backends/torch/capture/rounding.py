"""How far rounding may move the results of a step.

A compiled step computes the formulas of the uncompiled one with other roundings: it fuses
operations, adds in another order, and does not round to half precision between the operations that
it fuses. A step may amplify this without a limit: Adam divides a gradient that is all rounding by
its own size, and a ReLU passes a gradient or not. So no fixed tolerance is right. What rounding
does to a step is measured: the uncompiled step runs again with other last bits, see `Disturbance`.
What a compiled step computes may differ by twice what these runs differ by. A wrong kernel moves
the moments of an optimizer by much more, even where the variables themselves change by the sign of
a gradient.

Of a variable, not its value is compared but its change, which may be small: SGD with a rate of 1e-5
changes a weight by few units in its last place. Only an update that its own rounding hides may be
wrong.
"""

from typing import Any, Final

import torch

from ..patches import TorchDispatchMode

EXACT, SUMMED, COMPILED = "exact", "summed", "compiled"
"""What may differ: nothing, the last bits of sums, or what rounding in the whole step changes."""

# With another memory layout, the order of summation may vary: this many units in the last place of
# the largest number may differ.
ROUNDING: Final = 64
# Operations in half precision add in float32, and round once: fewer units are lost.
ROUNDING_OF_HALF: Final = 2
STORED: Final = 2  # units in the last place of a variable by which storing it may round
AMPLIFIED: Final = 2  # how many times the differences of disturbed steps a compiled one may have
# Disturbed steps. Few show the rounding of smooth functions; only if a compiled step differs by
# more, further ones look for signs and branches that rounding changes.
FEW, MANY = range(4), range(4, 24)


def last_bits(dtype: torch.dtype) -> float:
    """Return by how much rounding may change a number, relative to its size.

    Example:
        >>> last_bits(torch.float32), last_bits(torch.bfloat16)
        (7.62939453125e-06, 0.015625)
    """
    eps = torch.finfo(dtype).eps
    return (ROUNDING_OF_HALF if _is_half(dtype) else ROUNDING) * eps


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


class Disturbance(TorchDispatchMode):
    """Changes the last bits of the numbers that are rounded to half precision in this context.

    Where a step computes in half precision, it casts its variables and its inputs first, and their
    other last bits would be lost. Only numbers that a cast rounds are changed: 0, 1 and the largest
    number of a type stay as they are.

    Args:
        seed: Determines the new bits.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, x: Any) -> Any:
        """Return a tensor of floating-point numbers with other last bits, others as they are.

        Whole numbers stay, too: a step may compare labels and masks, or cast them to integers, and
        with other ones it would be another step.
        """
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            return x
        return torch.where(x == x.round(), x, self._changed(x))

    def _changed(self, x: Any) -> Any:
        noise = torch.rand(x.shape, generator=self._generator).to(x.device)
        return (x.detach() * (1 + last_bits(x.dtype) * (2 * noise - 1))).to(x.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and change what a cast to half precision rounds."""
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _is_half(made.dtype):
            return torch.where(args[0].to(made.device) == made, made, self._changed(made))
        return made


Sizes = tuple[Any, Any]
"""The largest absolute value of a difference, and the root of the mean of its squares.

Few wrong elements show in the first, many in the second, also where rounding changes few by much.
"""


def sizes(x: Any, y: Any, before_x: Any = None, before_y: Any = None) -> Sizes:
    """Return the sizes of the difference of two tensors, without elements that are not finite.

    Args:
        x: A tensor.
        y: Another one.
        before_x: The variable's value before the step, if its changes are compared.
        before_y: That of the other one.
    """
    difference = x.double() - y.double()
    if before_x is not None and before_y is not None:
        difference -= before_x.double() - before_y.double()
    difference = difference.nan_to_num(0.0, 0.0, 0.0)
    if not difference.numel():
        return 0.0, 0.0
    return difference.abs().max(), difference.square().mean().sqrt()


def larger(these: Sizes, others: Sizes) -> Sizes:
    """Return the larger of both sizes."""
    return max(these[0], others[0]), max(these[1], others[1])


def agree(a: Any, b: Any, how: str, disturbed: Sizes | None = None, before: Any = None) -> bool:
    """Return whether two tensors are equal, bit for bit or within roundings.

    Args:
        a: What a replayed step computed.
        b: What the eager step computed.
        how: What may differ.
        disturbed: The sizes by which disturbed steps differ from `b`, if compiled.
        before: The value of the variable before the step, or None if they are no variable's.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)  # compared there, to which variables are copied one at a time
    equal = (a == b) | (a.isnan() & b.isnan())
    if how == EXACT or not a.dtype.is_floating_point:
        return bool(equal.all())
    if not bool((equal | (a.isfinite() & b.isfinite())).all()):
        return False
    eps, zeros = torch.finfo(a.dtype).eps, torch.zeros_like(b)
    largest, _ = sizes(b, zeros)
    allowed = ROUNDING * eps * largest
    if how == COMPILED:
        changed = largest if before is None else sizes(b, before.to(b.device))[0]
        allowed = last_bits(a.dtype) * changed + (0.0 if before is None else STORED * eps * largest)
    pairs = zip(sizes(a, b), disturbed or (0.0, 0.0), strict=True)
    return all(size <= allowed + AMPLIFIED * other for size, other in pairs)
