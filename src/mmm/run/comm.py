"""How ranks communicate outside of the model: the one seam between a run and the world.

A run communicates by `TorchComm`. A dry run gives it another object, and so does a test that makes no process group::

    with talking_through(comm):
        program()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmm.runtime import process_group
from mmm.runtime.ranks import Rank

if TYPE_CHECKING:
    from mmm.run.run import Run


class TorchComm:
    """Communicates by the default group of torch.distributed. All methods but `locate` are collectives.

    Attributes:
        rank: this process, once it is located.
        dry: whether tensors have no elements, so that nobody writes, prints or decides by them.
    """

    rank: Rank
    dry = False

    def locate(self, rank: Rank, timeout: float) -> Rank:
        """The rank with its local numbers.

        Args:
            timeout: seconds that the ranks may take to meet.
        """
        self.rank = process_group.locate(rank, timeout)
        return self.rank

    def group(self, run: Run, meet: Callable[[dist.Store], None]) -> AbstractContextManager[None]:
        """The default process group, for the length of a ``with`` block.

        Args:
            meet: called with the store that all ranks share, before there is a group.
        """
        return process_group.process_group(run.rank, run.device, run.options.timeout, meet)

    def table(self, own: Tensor) -> Tensor:
        """Every rank's `own`, (n,), by rank: (ranks, n), on the device."""
        return process_group.gather_table(own)

    def floats(self, own: list[float], device: torch.device) -> Tensor:
        """Every rank's n numbers, by rank: (ranks, n) float64, on the host."""
        return torch.tensor(process_group.gather_floats(own, device), dtype=torch.float64)

    def gather(self, own: Any) -> list[Any]:
        """Every rank's object, by rank, on rank 0; an empty list on the others."""
        return process_group.gather_objects(self.rank, own)

    def gather_everywhere(self, own: Any) -> list[Any]:
        """Every rank's object, by rank, on every rank."""
        if self.rank.world_size == 1 or self.dry:
            return [own]
        # PyTorch fills a list that the caller has made.
        by_rank = [None] * self.rank.world_size
        dist.all_gather_object(by_rank, own)
        return by_rank

    def broadcast(self, own: Any, source: int = 0) -> Any:
        """The object of rank `source`, on every rank."""
        return process_group.broadcast_object(own, source)

    def largest(self, own: Tensor) -> Tensor:
        """The largest of all ranks' tensors, element by element, in place."""
        if self.rank.world_size > 1:
            dist.all_reduce(own, dist.ReduceOp.MAX)
        return own

    def sum(self, own: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place."""
        if self.rank.world_size > 1:
            dist.all_reduce(own)
        return own

    def new_group(self) -> dist.ProcessGroup | None:
        """Another group of all ranks, which sends from the host, whatever the device is."""
        # NCCL and XCCL send only from the device.
        return dist.new_group(backend="gloo")


# The innermost block of `talking_through` is last.
_INSIDE: list[TorchComm] = []


def current_comm() -> TorchComm:
    """What a run that starts now communicates by."""
    return _INSIDE[-1] if _INSIDE else TorchComm()


@contextmanager
def talking_through(comm: TorchComm) -> Iterator[None]:
    """Inside, a run that starts communicates by `comm`."""
    _INSIDE.append(comm)
    try:
        yield
    finally:
        _INSIDE.remove(comm)
