"""What all processes must agree on before a step runs: batches, variables, and their values."""

import hashlib
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Final

import numpy as np
from keras import ops
from keras.backend import standardize_dtype

from ...backends.program import Program
from ...backends.types import Tensor, Variable
from ...backends.window import Window, own_rows
from ...core import structures
from ...core.processes import ProcessGroup
from ...errors import ConfigurationError, DataError, StepError
from .collectives import Collectives
from .rows import has_rows

AT: Final = "preparing a step for batches of a new form"
_OF_MEMORY: Final = "MemoryError|out of memory|can't allocate|ALLOC_FAILED|ResourceExhausted"


def check_batch(batch: Any, name: str, processes: Collectives) -> None:
    """Check that all processes have the same batch.

    Raises:
        DataError: They have different ones.
    """
    mine = [
        [str(x.dtype), list(x.shape), hashlib.blake2b(np.asarray(x).tobytes()).hexdigest()]
        for x in structures.flatten(batch)
    ]
    for rank, other in enumerate(processes.group.exchange(mine, AT)):
        if other != mine:
            raise DataError(
                f"{name}: process {rank} has another batch than process {processes.rank}. All "
                "processes must read the same data in the same order, and take their rows of each "
                "batch: give all the same seed and data, or use treadle.data.sharded"
            )


def rows_to_compare(examples: int, processes: int) -> int:
    """Return of how many rows of a batch results are compared: those of one process, at least 2."""
    return max(own_rows(examples, 0, processes)[1], min(2, examples))


def first_rows(batch: Any, examples: int, few: int) -> Any:
    """Return the first rows of a batch with so many examples."""
    return structures.mapped(lambda x: x[:few] if has_rows(x, examples) else x, batch)


@contextmanager
def lacking_memory() -> Generator[None]:
    """End this context early, without an error, if there is too little memory."""
    try:
        yield
    except Exception as error:
        if not is_of_memory(error):
            raise


def is_of_memory(error: Exception) -> bool:
    """Return whether an error says that there is too little memory, of Python or a framework."""
    text = f"{type(error).__name__} {error}"
    return re.search(_OF_MEMORY, text) is not None


def completed(window: Window, group: ProcessGroup) -> Window:
    """Return a window with the rows of all processes, of which each has its own in their places."""
    if window.shares is None or window.shares.whole:
        return window
    first, count = own_rows(window.examples, group.rank, group.size)
    leaves = structures.flatten(window.batches)
    received = group.exchange_arrays([x[:, first : first + count] for x in leaves], AT)
    whole = [np.concatenate(parts, axis=1) for parts in zip(*received, strict=True)]
    return Window(structures.pack(window.batches, whole), window.count, window.examples)


def share_state(program: Program, processes: Collectives) -> None:
    """Give new variables the values of process 0; values of others must be equal already.

    Raises:
        ConfigurationError: The processes have different variables.
        StepError: A variable has different values although earlier steps used it.
    """
    named = variables_of(program)
    forms = [[path, standardize_dtype(v.dtype), list(v.shape)] for path, v in named.items()]
    for rank, other in enumerate(processes.group.exchange(forms, AT)):
        if other != forms:
            differ = (a for a, b in zip_longest(forms, other) if a != b)
            raise ConfigurationError(
                f"process {processes.rank} has {len(forms)} variables, and process {rank} has "
                f"{len(other)}; the first that differs here is {next(differ)}: start all processes "
                "with the same script, settings and data"
            )
    is_new = {path: processes.share(v) for path, v in named.items()}
    generator = processes.generator()
    mine = digests_of(program) | ({} if generator is None else {"": _digest(generator)})
    everyone = processes.group.exchange(mine, AT)
    differing = [path for path in mine if any(other[path] != mine[path] for other in everyone)]
    for path in differing:
        if not path or is_new[path]:
            continue
        raise StepError(
            f"{path} has different values in the {processes.size} processes: each has changed it "
            "by itself. Change variables in steps, or in all processes alike"
        )
    for path in differing:
        if path:
            named[path].assign(processes.from_first(value_of(named[path])))
        else:
            processes.set_generator(processes.from_first(generator))


def refusal(reason: str, messages: Sequence[str], processes: Collectives) -> str:
    """Return why a step cannot be captured in one of the processes; empty if it can in all.

    Args:
        reason: Why it cannot be captured in this process; empty if it can.
        messages: What the captured step sums over the processes, in order.
        processes: The processes.
    """
    everyone = processes.group.exchange([reason, list(messages)], AT)
    for rank, (why, _) in enumerate(everyone):
        if why:
            return why if why == reason else f"in process {rank}, {why}"
    if any(others != everyone[0][1] for _, others in everyone):
        return "the processes have captured different sums"
    return ""


def variables_of(program: Program) -> dict[str, Any]:
    """Return the state's variables by path."""
    return dict(program.new_context(0).variables)


def value_of(variable: Variable) -> Tensor:
    """Return a variable's value as a tensor that is not differentiated, without a cast."""
    return ops.stop_gradient(ops.convert_to_tensor(getattr(variable, "_value", variable)))


def digests_of(program: Program) -> dict[str, str]:
    """Return digests of the values of the state's variables, by path."""
    return {path: _digest(value_of(v)) for path, v in variables_of(program).items()}


def _digest(tensor: Tensor) -> str:
    raw = np.ascontiguousarray(ops.convert_to_numpy(tensor)).tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
