"""Checks of pairs: an example paired with itself, with another one, or with a flipped image."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final

import keras
import numpy as np
from keras import ops

from ...backends.step_context import context
from ...core.keras_internals import INTERNALS
from ..numbers import Array, as_floats
from .guarding import guarded
from .intervening import (
    Change,
    changed_outputs,
    constant,
    held,
    losses_of,
    noise_like,
    outer_calls,
)
from .recording import LAYER
from .report import Finding
from .spying import CROSS_ENTROPIES, replaced
from .trials import Leaf, Trial, Trials, distance, leaves_of, rows_of

FEWEST: Final = 4
"""The least number of rows that can show another order, or flipped images."""

MOST: Final = 256
"""The largest number of rows that are compared with each other."""

GEOMETRIC: Final = ("RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom", "RandomCrop")


def check(trials: Trials) -> Iterator[Finding]:
    """Check contrastive losses, pairs of arrays, and images with their masks."""
    yield from guarded(trials, _self_pairs, trials)
    yield from guarded(trials, _other_order, trials)
    found = guarded(trials, _flipped_data, trials) or guarded(trials, _flipped_in_the_step, trials)
    yield from found


# Pairs of an example with itself


def _self_pairs(trials: Trials) -> Iterator[Finding]:
    """Lower the similarities of examples to themselves: a loss without them stays the same."""
    last, rows = trials.last, rows_of(trials.last.batch)
    embeds = any(
        x.ndim == 2 and x.shape[1] > 1 and rows is not None and len(x) % rows == 0
        for event in outer_calls(last).values()
        for x in event.arrays.values()
    )
    if rows is None or rows < FEWEST or not embeds:
        return
    trial, seen = without_self_pairs(trials, rows)
    if trial is None or not seen:
        return
    for a, b in zip(losses_of(last), losses_of(trial), strict=False):
        if abs(a - b) > 1e-4 * max(abs(a), 1e-3):
            yield Finding(
                "L-self-pairs",
                "warning",
                "the loss",
                f"of {seen[0]} × {seen[0]} similarities, those of each example to itself count: "
                f"without them the loss is {b:.4g} instead of {a:.4g}",
                "they are always the largest, so the other pairs hardly count",
                "subtract 1e9 * ops.eye(n) from the similarities before the softmax",
            )
            return


def without_self_pairs(trials: Trials, rows: int) -> tuple[Trial | None, list[int]]:
    """Repeat the last step without similarities of examples to themselves.

    Returns:
        The trial, and the size of each square matrix of similarities that enters a softmax.
    """
    seen: list[int] = []
    with _without_self_pairs(rows, seen):
        trial = trials.attempt("L-self-pairs", trials.last.batch)
    return trial, seen


@contextmanager
def _without_self_pairs(rows: int, seen: list[int]) -> Generator[None]:
    """Lower the diagonal of matrices of similarities, as products and where they enter a softmax.

    Such a matrix is symmetric, and has one number on its diagonal that is the largest. Zero there
    would be a distance. Correlations of features look alike, but enter no softmax.

    Args:
        rows: The number of rows of the batch.
        seen: Gets the size of each square matrix that enters a softmax.
    """

    def lowered(x: Any, enters: bool = False) -> Any:
        shape: tuple[Any, ...] = tuple(getattr(x, "shape", ()))
        square = len(shape) == 2 and shape[0] == shape[1] and shape[0] % rows == 0
        if context().build is not None or not square or not ops.is_tensor(x):
            return x
        if enters:
            seen.append(shape[0])
        return _lowered(x, shape[0])

    def argument(place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def called(*args: Any, **kwargs: Any) -> Any:
                if len(args) > place:
                    args = (*args[:place], lowered(args[place], True), *args[place + 1 :])
                return original(*args, **kwargs)

            return called

        return wrapper

    def result(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return lowered(original(*args, **kwargs))

        return called

    with ExitStack() as stack:
        for name in ("matmul", "dot", "einsum"):
            stack.enter_context(replaced(keras.ops, name, result))
        for holder in (keras.ops, keras.activations):
            for name in ("softmax", "log_softmax", "logsumexp", "exp"):
                if hasattr(holder, name):
                    stack.enter_context(replaced(holder, name, argument(0)))
        for name in CROSS_ENTROPIES:
            for holder in (keras.ops, INTERNALS["ops"].resolve()):
                stack.enter_context(replaced(holder, name, argument(1)))
        yield


def _lowered(x: Any, count: int) -> Any:
    eye = ops.eye(count, dtype=x.dtype)
    diagonal = ops.sum(x * eye, axis=1)
    largest = ops.max(ops.stop_gradient(ops.abs(x)))
    equal = ops.max(diagonal) - ops.min(diagonal) < 1e-4 * largest
    symmetric = ops.max(ops.abs(x - ops.transpose(x))) < 1e-4 * largest
    is_largest = ops.all(ops.max(x, axis=1) <= diagonal + 1e-4 * largest)
    similar = equal & symmetric & is_largest & (ops.min(ops.abs(diagonal)) > 1e-3 * largest)
    return x - ops.cast(similar, x.dtype) * 50.0 * ops.maximum(largest, 1.0) * eye


# Pairs in another order


def _other_order(trials: Trials) -> Iterator[Finding]:
    """Find two arrays whose rows are alike, but not those at the same position."""
    rows = rows_of(trials.last.batch)
    if rows is None or rows < 2 * FEWEST:
        return
    leaves = [x for x in leaves_of(trials.last.batch) if x.array.dtype.kind == "f"]
    for number, leaf in enumerate(leaves):
        for other in leaves[:number]:
            if leaf.array.shape != other.array.shape or leaf.array[0].size < 4:
                continue
            share = _misplaced(other.array[:MOST], leaf.array[:MOST])
            if share > 0.8:
                yield Finding(
                    "D-other-order",
                    "warning",
                    leaf.name,
                    f"{share:.0%} of its rows resemble another row of {other.name}, and not the "
                    "one at the same position",
                    "pairs of unrelated examples are trained as if they belonged together",
                    "shuffle both arrays by the same permutation",
                )


def _misplaced(a: Array, b: Array) -> float:
    """Return the share of rows whose only similar row is at another position."""
    x, y = (as_floats(z).reshape(len(z), -1) for z in (a, b))
    x, y = x - x.mean(0), y - y.mean(0)
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)[None]
    if not (sizes > 0).all():
        return 0.0
    alike = (x @ y.T) / sizes
    best = alike.argmax(1)
    own = np.arange(len(x))
    steps = (best - own)[best != own]
    if len(np.unique(best)) < 0.8 * len(x) or len(np.unique(steps)) < 3:
        return 0.0  # a shift by some rows is that of a sequence of states
    return float(((alike[own, best] > 0.85) & (alike[own, own] < 0.6)).mean())


# Images and masks


def _flipped_data(trials: Trials) -> Iterator[Finding]:
    """Compare images with their masks as they are, and flipped: the first must fit better."""
    shapes = [(x.name, x.array.shape[1:3]) for x in leaves_of(trials.last.batch)]
    for i, j in _pairs_of_images(leaves_of(trials.last.batch)):
        decided: list[bool] = []
        for batch in trials.ahead:
            leaves = leaves_of(batch)
            if len(leaves) == len(shapes) and leaves[i].array.shape[1:3] == shapes[i][1]:
                decided += _better_flipped(leaves[i].array, leaves[j].array)
            if len(decided) >= MOST:
                break
        share = float(np.mean(decided)) if len(decided) >= FEWEST else 0.0
        if share > 0.15 and is_target(trials, i, j):
            yield Finding(
                "D-flipped",
                "warning",
                shapes[j][0],
                f"in {share:.0%} of {len(decided)} rows it fits to {shapes[i][0]} if one is "
                "flipped or turned, and not as it is",
                "the model learns masks of other pixels",
                "flip or crop an image and its mask together, by the same random numbers",
            )
            return


def is_target(trials: Trials, *numbers: int) -> bool:
    """Return whether one of these arrays counts in the losses, with all outputs of layers held.

    Two views of an image do not, and are often flipped independently on purpose.
    """
    last, leaves = trials.last, leaves_of(trials.last.batch)
    before = losses_of(last)
    for number in numbers:
        batch = leaves[number].with_(np.roll(leaves[number].array, 1, axis=0))
        with changed_outputs({n: held(event) for n, event in outer_calls(last).items()}):
            trial = trials.attempt("D-flipped", batch)
        if trial is None or not np.allclose(losses_of(trial), before, rtol=1e-6):
            return True
    return False


def _pairs_of_images(leaves: list[Leaf]) -> list[tuple[int, int]]:
    """Return pairs of arrays of images with equal heights and widths."""
    found: list[tuple[int, int]] = []
    for j, other in enumerate(leaves):
        for i, leaf in enumerate(leaves[:j]):
            a, b = leaf.array, other.array
            images = a.ndim in (3, 4) and b.ndim in (3, 4) and min(a.shape[1:3]) >= FEWEST
            if images and a.shape[:3] == b.shape[:3]:
                found.append((i, j))
    return found


def _better_flipped(images: Array, masks: Array) -> list[bool]:
    """Return for each row that is clear whether one of both must be flipped for them to agree."""
    found: list[bool] = []
    for a, b in zip(images, masks, strict=False):
        x = as_floats(a).reshape(*a.shape[:2], -1)[..., :4]
        y = as_floats(b).reshape(*b.shape[:2], -1).mean(-1)
        square = y.shape[0] == y.shape[1]
        turns = [y[:, ::-1], y[::-1], y[::-1, ::-1]]
        turns += [y.T, np.rot90(y), np.rot90(y, 3), np.rot90(y, 2).T] if square else []
        straight, *turned = (_likeness(x, z) for z in (y, *turns))
        if max(straight, *turned) > 0.4 and abs(straight - max(turned)) > 0.25:
            found.append(max(turned) > straight)
    return found


def _likeness(image: Array, mask: Array) -> float:
    """Return the largest correlation of a mask with a channel of an image."""
    x, y = image - image.mean((0, 1)), (mask - mask.mean())[..., None]
    sizes = np.sqrt((x * x).sum((0, 1)) * (y * y).sum())
    return float((np.abs((x * y).sum((0, 1))) / np.maximum(sizes, 1e-9)).max())


def _flipped_in_the_step(trials: Trials) -> Iterator[Finding]:
    """Find images that the step flips while their masks stay.

    A pixel of the outputs and the pixel of the mask at the same place of a flipped row are changed,
    each alone and both: if the loss compares the two, the changes do not just add up.
    """
    last, leaves = trials.last, leaves_of(trials.last.batch)
    for i, j in _pairs_of_images(leaves):
        turned = _turned_rows(last, leaves[i].array)
        mask = leaves[j]
        same_turn = _turned_rows(last, mask.array).any()
        if turned.any() and not same_turn and _compares_in_place(trials, mask, turned):
            yield _flipped(leaves[i], mask, f"{int(turned.sum())} rows")
        elif not turned.any() and not same_turn:
            moved = _moved_by_layers(last, leaves[i].array)
            if moved and not _moved_by_layers(last, mask.array, inputs_only=True):
                yield _flipped(leaves[i], mask, f"images ({moved})")


def _flipped(image: Leaf, mask: Leaf, what: str) -> Finding:
    return Finding(
        "D-flipped",
        "warning",
        mask.name,
        f"train_step transforms {what} of {image.name}, and compares the outputs with this array "
        "as it was",
        "the model learns masks of other pixels",
        "transform the image and its mask together, by the same random numbers",
    )


def _turned_rows(trial: Trial, images: Array) -> Array:
    """Return which rows a layer gets or returns flipped."""
    x = as_floats(images)
    turns = [x[:, :, ::-1], x[:, ::-1], x[:, ::-1, ::-1]]
    found = np.zeros(len(x), bool)
    for event in trial.of(LAYER):
        for array in event.arrays.values():
            if array.shape != x.shape:
                continue
            y = as_floats(array)
            axes = tuple(range(1, x.ndim))
            unlike = np.abs(y - x).max(axes) > 1e-3 * np.abs(x).max()
            for turn in turns:
                found |= unlike & (np.abs(y - turn).max(axes) < 1e-4 * np.abs(x).max())
    return found


def _moved_by_layers(trial: Trial, images: Array, inputs_only: bool = False) -> str:
    """Return the kind of a layer that moves the pixels of these images, or an empty string."""
    for event in trial.of(LAYER):
        x, y = event.get("inputs[0]"), event.get("outputs")
        if event.info.kind not in GEOMETRIC or x is None or x.shape != images.shape:
            continue
        if distance(x, images) < 1e-6 and (inputs_only or (y is not None and distance(x, y) > 0)):
            return event.info.kind
    return ""


def _compares_in_place(trials: Trials, mask: Leaf, turned: Array) -> bool:
    calls = outer_calls(trials.last)
    shape = mask.array.shape[:3]
    fitting = [
        n for n, e in calls.items() if (y := e.get("outputs")) is not None and y.shape[:3] == shape
    ]
    if not fitting:
        return False
    number = max(fitting)
    output = calls[number]["outputs"]
    shifted, other = as_floats(output).copy(), mask.array.copy()
    noise = 3 * noise_like(output)
    shifted[turned, 0, 0] += noise[turned, 0, 0]
    corner = other[turned, 0, 0]
    other[turned, 0, 0] = np.where(corner > 0, corner - 1, corner + 1).astype(other.dtype)

    def losses(values: Array, masks: Array) -> Array:
        change: Change = lambda name, tensor: (  # noqa: E731
            constant(values.astype("float32"), tensor) if name == "outputs" else tensor
        )
        with changed_outputs({number: change}):
            trial = trials.attempt("D-flipped", mask.with_(masks))
        return np.array([np.nan] if trial is None else losses_of(trial))

    none, of_mask, of_output, both = (
        losses(values, masks)
        for values in (as_floats(output), shifted)
        for masks in (mask.array, other)
    )
    cross = np.abs(both - of_output - of_mask + none)
    return bool((cross > 1e-6 * (1 + np.abs(none))).any())
