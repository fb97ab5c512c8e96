"""PyTorch's `DataLoader` as a source."""

from collections.abc import Iterator
from typing import Any

from ...errors import DataError
from ..iterables import forward_only, length_of, type_name
from ..reader import BatchSource
from ..reading import Reading
from ..states import Keeper, Resumable, keeper_of


def from_torch(data: Any) -> BatchSource | None:
    """Return a `DataLoader` as a source; None for what is none.

    A resumed run makes its iterator anew, sets the generators that loader and sampler were given to
    what they were, and draws and discards the batches before. A loader that keeps a state of its
    own, as torchdata's `StatefulDataLoader` does, goes on from that at once.

    Raises:
        DataError: A data set without a loader, which gives single examples.
    """
    from torch.utils.data import DataLoader, Dataset

    if isinstance(data, Dataset):
        raise DataError(
            f"a {type_name(data)} gives single examples: wrap it in "
            f"torch.utils.data.DataLoader(dataset, batch_size=…), with batch_size=None where its "
            f"items are batches already"
        )
    if not isinstance(data, DataLoader):
        return None
    loader: Any = data
    keeper, parts = keeper_of(loader), _lasting_parts(loader)

    def kept() -> list[Any]:
        return [part.state() for part in parts]

    def put_back(states: list[Any]) -> None:
        for part, state in zip(parts, states, strict=True):
            part.restore(state)

    def batches(reading: Reading) -> Iterator[Any]:
        inside, before = reading.state(), reading.before()
        if keeper is not None and inside is not None:
            keeper.restore(inside["loader"])
        elif inside is not None or before is not None:
            put_back((before if inside is None else inside)["parts"])
        opening = {"parts": kept()}
        iterator = iter(loader)
        if keeper is not None:
            own = keeper.state
            if inside is not None:
                put_back(inside["parts"])  # `iter` has drawn from them
            return Resumable(
                iterator,
                lambda: {"loader": own(), "parts": kept()},
                name=keeper.name,
                lasting=bool(parts),
                optional=True,
            )
        if not parts:
            return iterator
        return Resumable(
            iterator,
            lambda: {"parts": kept()},
            name=type_name(loader),
            lasting=True,
            opening=opening,
        )

    return BatchSource(
        batches,
        length_of(loader),
        batch_examples=loader.batch_size,
        inexact=_inexact(loader, keeper),
        seeks=False,
    )


def _lasting_parts(loader: Any) -> list[Keeper]:
    """Return what a loader draws from that goes on from epoch to epoch."""
    holders = [loader, loader.sampler, loader.batch_sampler]
    holders.append(getattr(loader.batch_sampler, "sampler", None))
    found = {id(g): g for h in holders if (g := getattr(h, "generator", None)) is not None}
    parts = [Keeper("Generator", g.get_state, g.set_state) for g in found.values()]
    data = keeper_of(loader.dataset) if loader.num_workers == 0 else None  # workers have copies
    return parts if data is None else [*parts, data]


def _inexact(loader: Any, keeper: Keeper | None) -> str | None:
    """Say what of a loader does not come again as it was; None where all does."""
    from torch.utils.data import IterableDataset

    told: list[str] = []
    if isinstance(loader.dataset, IterableDataset):
        if keeper is None and keeper_of(loader.dataset) is None:
            told.append(forward_only(f"the {type(loader.dataset).__name__} of a DataLoader"))
    else:
        for sampler in (loader.sampler, loader.batch_sampler):
            if sampler is not None and type(sampler).__module__.split(".")[0] not in KNOWN:
                told.append(forward_only(f"the {type(sampler).__name__} of a DataLoader"))
    if loader.num_workers:
        if not getattr(loader, "in_order", True):
            told.append("a DataLoader with in_order=False gives what its workers finish first")
        if loader.persistent_workers:
            told.append(
                "persistent workers of a DataLoader go on with their random numbers from epoch to "
                "epoch, so that batches which draw from them come otherwise after a resume"
            )
        elif keeper is not None:
            told.append(
                f"the state of a {keeper.name} does not hold the random numbers of its workers, so "
                f"that batches which draw from them come otherwise after a resume"
            )
    return "; ".join(told) or None


KNOWN = ("torch", "torchdata")
"""Packages whose samplers give the same order again where their random numbers are the same."""
