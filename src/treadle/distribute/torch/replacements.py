"""What replaces random draws and moments while a process computes its rows of a batch.

Random draws: all processes draw the numbers for the whole batch, so that their generators stay
equal, and each takes its rows. Random bits of other rows are skipped where possible, which takes
less time and memory than to draw numbers. Draws that do not depend on the number of rows are equal
in all.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from ...backends.torch.capture.nodes import Kind, aten, is_operator
from ...backends.torch.patches import TorchDispatchMode
from ...core.keras_internals import INTERNALS as KERAS_INTERNALS
from ...errors import StepError
from ..dividing.moments import masked_moments, moments_with
from ..dividing.rows import DRAW, OwnRows, applied, rows, seen

# Draws whose number of random bits does not depend on their parameters, which may therefore be any
# in rows of other processes; with the position of the parameters, and a valid value.
_WITH_PARAMETERS: dict[Any, tuple[int, float]] = {
    aten.bernoulli.default: (0, 0.5),
    aten.bernoulli.p: (0, 0.5),
    aten.multinomial.default: (0, 1.0),
    aten.normal.Tensor_float: (0, 0.0),
    aten.normal.float_Tensor: (1, 1.0),
    aten.native_dropout.default: (0, 1.0),
    aten.rand_like.default: (0, 0.0),
    aten.randn_like.default: (0, 0.0),
    aten.randint_like.default: (0, 0.0),
    aten.randint_like.low_dtype: (0, 0.0),
}
_IN_PLACE = frozenset(
    {
        *(aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default),
        *(aten.exponential_.default, aten.random_.default, aten.random_.to),
        *(getattr(aten.random_, "from"), aten.log_normal_.default, aten.cauchy_.default),
    }
)

# Draws of numbers that do not depend on one another, with their arguments for a tensor.
_INDEPENDENT: dict[Any, Callable[[torch.Tensor], dict[str, Any]]] = {
    aten.bernoulli.default: lambda x: {"self": x},
    aten.rand.generator: lambda x: {"size": x.shape, "dtype": x.dtype, "device": x.device},
    aten.uniform_.default: lambda x: {"self": x},
    aten.bernoulli_.float: lambda x: {"self": x, "p": 0.5},  # of an unseeded Dropout
}


def _words(func: Any, dtype: torch.dtype) -> int | None:
    """Return how many words of 32 random bits a draw on a CPU takes for each number, or None.

    It is found by experiment: PyTorch does not document it, and kernels of processors differ.
    """
    arguments = _INDEPENDENT[func]
    first, second = torch.Generator("cpu").manual_seed(0), torch.Generator("cpu")
    x = torch.full((700,), 0.5, dtype=dtype, device="cpu")  # a generator makes 624 words at once
    whole = func(**arguments(x.clone()), generator=first)
    for words in (1, 2):
        _skip(32 * words, second.manual_seed(0))
        found = func(**arguments(x[:600].clone()), generator=second)
        _skip(68 * words, second)
        if torch.equal(found, whole[32:632]) and torch.equal(first.get_state(), second.get_state()):
            return words
    return None


def _skip(words: int, generator: torch.Generator | None) -> None:
    """Skip words of 32 random bits of a generator on a CPU.

    An integer of 64 bits takes two. They are written to memory that fits into a processor's cache.
    """
    unused = torch.empty(min(words // 2, _INTEGERS), dtype=torch.int64, device="cpu")
    for done in range(0, words // 2, _INTEGERS):
        unused[: words // 2 - done].random_(generator=generator)
    if words % 2:
        torch.empty(1, dtype=torch.uint8, device="cpu").random_(generator=generator)


_INTEGERS: Final = 2**16
_FEW: Final = 2**12
"""So many numbers take about as long as skipping twice, which calls six operators."""

_WORDS: Final = {
    (func, dtype): _words(func, dtype)
    for func in _INDEPENDENT
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def _words_of(func: Any, args: Any, kwargs: Any) -> int | None:
    """Return the words that a draw takes for each number, or None if that is not known."""
    if func is aten.rand.generator:
        dtype, device = kwargs.get("dtype"), torch.device(kwargs.get("device") or "cpu")
    elif func in _INDEPENDENT and args[0].is_contiguous():  # otherwise numbers have another order
        dtype, device = args[0].dtype, args[0].device
    else:
        return None
    found = _WORDS.get((func, dtype or torch.get_default_dtype()))
    return found if device.type == "cpu" else None


class Draws(TorchDispatchMode):
    """Draws for the whole batch, and returns the rows of this process."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if not is_operator(func) or not Kind.of(func).random:
            return func(*args, **kwargs)
        mine, noted = rows(), seen()
        if mine is None and noted is None:
            return func(*args, **kwargs)
        shape = _shape_of(func, args, kwargs)
        if shape is None:  # drops nothing
            return func(*args, **kwargs)
        if noted is not None:
            noted.shapes[DRAW].add(shape)
        if mine is None:
            return func(*args, **kwargs)
        whole = mine.whole_shape(DRAW, shape)
        if whole is None or whole == shape:
            return func(*args, **kwargs)
        return _drawn(func, args, kwargs, mine, whole)


def _shape_of(func: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the shape of what an operator draws, or None if it draws nothing."""
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    if given.get("dropout_p") == 0:
        return None
    if "size" in given:
        return tuple(given["size"])
    if func in (aten.randperm.default, aten.randperm.generator):
        return (args[0],)
    if func in _WITH_PARAMETERS:
        return tuple(args[_WITH_PARAMETERS[func][0]].shape)
    return tuple(args[0].shape) if isinstance(args[0], torch.Tensor) else ()


def _drawn(func: Any, args: Any, kwargs: Any, mine: OwnRows, whole: tuple[int, ...]) -> Any:
    """Draw for the whole batch, and return the rows of this process.

    Raises:
        StepError: The draw of a row depends on what other rows are.
    """
    words, row = _words_of(func, args, kwargs), math.prod(whole[1:])
    if words is not None and whole[0] == mine.examples and mine.examples * row > _FEW:
        generator = kwargs.get("generator")
        _skip(mine.first * row * words, generator)
        found = func(*args, **kwargs)
        _skip((mine.examples - mine.first - mine.count) * row * words, generator)
        return found
    names = [argument.name for argument in func._schema.arguments]
    if "size" in names:
        at = names.index("size")
        return mine.rows_of(func(*args[:at], list(whole), *args[at + 1 :], **kwargs))
    if func in _IN_PLACE:
        drawn = func(_empty_like(args[0], whole), *args[1:], **kwargs)
        return args[0].copy_(mine.rows_of(drawn))
    if func not in _WITH_PARAMETERS:
        raise StepError(
            f"{func} draws for the {mine.examples} rows of a batch together, which several "
            "processes cannot divide: draw uniform or normal numbers, or train with one process"
        )
    at, value = _WITH_PARAMETERS[func]
    given: Callable[[Any], tuple[Any, ...]] = lambda x: (*args[:at], x, *args[at + 1 :])  # noqa: E731
    if func is aten.native_dropout.default:
        scaled, mask = func(*given(args[at].new_ones(whole)), **kwargs)
        return args[at] * mine.rows_of(scaled), mine.rows_of(mask)
    return mine.rows_of(func(*given(mine.padded(args[at], value)), **kwargs))


def _empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """Return an empty tensor of another shape whose axes are in the same order in memory."""
    order = sorted(range(x.ndim), key=lambda axis: (-x.stride(axis), axis))
    made = x.new_empty([shape[axis] for axis in order])
    return made.permute([order.index(axis) for axis in range(x.ndim)])


def _moments(x: Any, axes: list[int], mine: OwnRows) -> tuple[Any, Any]:
    sums = torch.stack([x.sum(axes, keepdim=True), x.square().sum(axes, keepdim=True)])
    number = math.prod(x.shape[axis] for axis in axes) * mine.examples / mine.count
    total = mine.sum(sums) / number
    mean = total[0]
    return mean, total[1] - mean.square()


REPLACEMENTS: Final = {
    KERAS_INTERNALS["moments"]: moments_with(_moments, ("float16",), torch.clip),
    KERAS_INTERNALS["masked_moments"]: masked_moments,
    KERAS_INTERNALS["apply"]: applied,
}
"""What replaces functions of the registers; `Draws` replaces operators."""
