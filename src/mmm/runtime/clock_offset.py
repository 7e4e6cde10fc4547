"""How far this host's clock is from rank 0's: for times of several hosts on one axis."""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import time_ns
from typing import NamedTuple

import torch
import torch.distributed as dist

from mmm.runtime.process_group import broadcast_object, gather_objects
from mmm.runtime.ranks import Rank

ROUNDS = 16  # the shortest of them counts


class Offset(NamedTuple):
    """ns to add to this rank's clock for rank 0's, and by how much that may be wrong."""

    offset: int
    error: int


def clock_offset(rank: Rank, device: torch.device, host: str | None = None, now: Callable[[], int] = time_ns) -> Offset:
    """This rank's. A collective.

    A rank of another host than rank 0's asks rank 0 for its time, as in NTP: rank 0's answer lies in the middle of the
    question's way there and back, up to half of that round trip. Ranks on rank 0's host have its clock.

    Args:
        host: of this rank. now: its clock, ns.

    Source: Mills, "Internet Time Synchronization: The Network Time Protocol", 1991.
    """
    host = host or socket.gethostname()
    if rank.world_size == 1:
        return Offset(0, 0)
    hosts = gather_objects(rank, host)
    first_host = broadcast_object(host)
    message = torch.zeros(1, dtype=torch.int64, device=device)
    best = Offset(0, 0)
    if rank.is_main:
        for other in (number for number, name in enumerate(hosts) if name != host):
            for _ in range(ROUNDS):
                dist.recv(message, other)
                message.item()  # it is here
                dist.send(torch.full_like(message, now()), other)
    elif first_host != host:
        trips = []
        for _ in range(ROUNDS):
            begin = now()
            dist.send(message, 0)
            dist.recv(message, 0)
            answer, end = int(message.item()), now()
            trips.append((end - begin, answer - (begin + end) // 2))
        shortest, offset = min(trips)
        best = Offset(offset, shortest // 2)
    return best
