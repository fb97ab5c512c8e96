"""Joining the group of processes that train one task together."""

import atexit
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..core.identity import versions
from ..core.processes import join, process_group
from ..errors import ConfigurationError, ProcessError
from .channel import Channel, answer, connect, free_port, listen, send
from .environment import JOINED_VARIABLE, Place

if TYPE_CHECKING:
    from ..backends.base import Backend


def join_processes(place: Place, backend: "Backend") -> None:
    """Connect this process to the others, and the framework of all of them.

    Args:
        place: The place of this process.
        backend: The backend; its framework must not have computed anything yet.

    Raises:
        ConfigurationError: A process cannot be reached, or has other versions.
    """
    if process_group().size > 1:
        return
    facts: dict[str, Any] = {"backend": backend.name, "versions": versions()}
    mine = {"rank": place.rank, "size": place.size, **facts}
    if place.rank == 0:
        found = listen(place.host, place.port, place.size)
        address = f"{place.host}:{free_port()}"
        links = {rank: link for rank, (link, _) in found.items()}
        fault = _fault(mine, {rank: first for rank, (_, first) in found.items()})
        for link in links.values():
            send(link, {"address": address, "fault": fault})
    else:
        links = {0: connect(place.host, place.port, mine)}
        received = answer(links[0], place.host, place.port)
        address, fault = received["address"], received["fault"]
    if fault:
        for link in links.values():
            link.close()
        raise ConfigurationError(fault)
    channel = Channel(place.rank, place.size, links)
    atexit.register(_leave, channel)
    os.environ[JOINED_VARIABLE] = str(os.getpid())
    try:
        backend.join_processes(channel, address)
    except BaseException as error:
        # A script that goes on must not train alone as a member, nor may the others wait for it.
        channel.abandon(error)
        raise
    join(channel)
    if place.rank == 0:
        print(f"treadle: {place.size} processes, by {place.launcher}", file=sys.stderr)


def _leave(channel: Channel) -> None:
    """Leave the group when the script ends: as planned, or by an exception."""
    error: BaseException | None = getattr(sys, "last_value", None)  # set before `atexit` runs
    if error is not None:
        with suppress(ProcessError):  # another process failed first
            channel.fail(error)
    channel.close()


def _fault(mine: dict[str, Any], others: dict[int, dict[str, Any]]) -> str:
    """Return how the versions of a process differ from those of process 0, or ""."""
    for rank, theirs in sorted(others.items()):
        facts = {**mine, **mine["versions"]}, {**theirs, **theirs["versions"]}
        found = [
            f"{name} is {facts[1].get(name)} there, and {facts[0].get(name)} here"
            for name in ("size", "backend", *mine["versions"])
            if facts[0].get(name) != facts[1].get(name)
        ]
        if found:
            return (
                f"process {rank} differs from process 0: {'; '.join(found)}. Start all processes "
                "with equal settings, in equal environments"
            )
    return ""
