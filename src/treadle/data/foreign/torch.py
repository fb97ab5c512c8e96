"""Conversion of a PyTorch `DataLoader` to a source."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...core.structures import mapped
from ...errors import DataError
from ..iterables import forward_only, length_of, type_name
from ..random_states import preserved
from ..reader import BatchSource
from ..source import ReadRequest
from ..states import Keeper, Resumable, generators_of, keeper_of, together


def from_torch(data: Any) -> BatchSource | None:
    """Convert a `DataLoader` to a source; return None for other objects.

    A resumed run restores the generators of the loader, its samplers and its data, creates the
    iterator, and draws and discards the batches before its position. A loader with a state, such as
    torchdata's `StatefulDataLoader`, resumes directly from its state.

    Raises:
        DataError: If `data` is a data set without a loader, which yields single examples.
    """
    from torch.utils.data import DataLoader, Dataset

    if isinstance(data, Dataset):
        raise DataError(
            f"a {type_name(data)} gives single examples: wrap it in "
            f"torch.utils.data.DataLoader(dataset, batch_size=…), with batch_size=None if its "
            f"items are batches already"
        )
    if not isinstance(data, DataLoader):
        return None
    loader: Any = data
    keeper, parts = keeper_of(loader), _lasting_parts(loader)
    return BatchSource(
        partial(_batches, loader, keeper, parts),
        length_of(loader),
        batch_examples=loader.batch_size,
        inexact=_inexact(loader, keeper),
        seeks=False,
        zeros=_zeros_of(loader),
    )


def _zeros_of(loader: Any) -> Callable[[int], Any] | None:
    """Return a function that makes a batch of zeros in the form of a loader's; None without one.

    The function reads the first example, and restores what it has drawn from. A data set that
    workers read is not touched here: a file that it opens must not be shared with them.
    """
    from torch.utils.data import IterableDataset

    single = loader.batch_size is None or isinstance(loader.dataset, IterableDataset)
    if single or loader.num_workers:
        return None

    def zeros(examples: int) -> Any:
        parts = _lasting_parts(loader)
        before = parts.state()
        try:
            with preserved():
                batch = loader.collate_fn([loader.dataset[0]])
        finally:
            parts.restore(before)
        return mapped(lambda x: np.zeros((examples, *x.shape[1:]), np.asarray(x).dtype), batch)

    return zeros


def _batches(
    loader: Any, keeper: Keeper | None, parts: Keeper, reading: ReadRequest
) -> Iterator[Any]:
    """Return an iterator of the loader, which gives its state and that of its parts."""
    inside, last = reading.state(), reading.last_state()
    if keeper is not None and inside is not None:
        keeper.restore(inside["loader"])
    elif last is not None:
        parts.restore(last["parts"])
    opening = {"parts": parts.state()}
    iterator = iter(loader)
    if keeper is not None:
        own = keeper.state
        if inside is not None:
            parts.restore(inside["parts"])  # again, since `iter` has drawn from them
        return Resumable(
            iterator,
            lambda: {"loader": own(), "parts": parts.state()},
            name=keeper.name,
            lasting=bool(opening["parts"]),
            optional=True,
        )
    if not opening["parts"]:
        return iterator
    return Resumable(
        iterator,
        lambda: {"parts": parts.state()},
        name=type_name(loader),
        lasting=True,
        opening=opening,
    )


def _lasting_parts(loader: Any) -> Keeper:
    """Return the generators and the data set state of a loader that continue across epochs."""
    holders = [loader.generator, loader.sampler, loader.batch_sampler]
    data = None
    if loader.num_workers == 0:  # workers use copies, whose state cannot be read
        data = keeper_of(loader.dataset)
        holders += [loader.collate_fn, loader.dataset] if data is None else [loader.collate_fn]
    return together([part for part in (generators_of(*holders), data) if part is not None])


def _inexact(loader: Any, keeper: Keeper | None) -> str | None:
    """Return the reasons why a loader cannot be resumed exactly, or None."""
    from torch.utils.data import IterableDataset

    reasons: list[str] = []
    if isinstance(loader.dataset, IterableDataset):
        if keeper is None and keeper_of(loader.dataset) is None:
            reasons.append(forward_only(f"the {type(loader.dataset).__name__} of a DataLoader"))
    else:
        for sampler in (loader.sampler, loader.batch_sampler):
            if sampler is not None and type(sampler).__module__.split(".")[0] not in KNOWN:
                reasons.append(forward_only(f"the {type(sampler).__name__} of a DataLoader"))
    if loader.num_workers:
        if not getattr(loader, "in_order", True):
            reasons.append("a DataLoader with in_order=False gives what its workers finish first")
        if loader.persistent_workers:
            reasons.append(
                "persistent workers of a DataLoader continue their random numbers from epoch to "
                "epoch, so that batches which draw from them differ after a resume"
            )
        elif keeper is not None:
            reasons.append(
                f"the state of a {keeper.name} does not hold the random numbers of its workers, so "
                f"that batches which draw from them differ after a resume"
            )
    return "; ".join(reasons) or None


KNOWN = ("torch", "torchdata")
"""Packages whose samplers are known to be deterministic for the same random numbers."""
