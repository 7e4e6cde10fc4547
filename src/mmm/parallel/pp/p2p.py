"""A pipeline's sends and receives: a process group for each direction between two ranks.

NCCL and XCCL run what is issued on one communicator one after the other, in that order. A receive that is issued ahead
of its data holds up what follows it, also sends to other ranks, and with them the stages that wait for these. With a
communicator for each direction between two ranks, a message waits for earlier ones from the same sender to the same
receiver alone. Gloo treats the messages of one group like that, and needs no more groups: what runs on CPU ranks cannot
block on these groups either.

Sources: NCCL user guide, "Point-to-point communication"; PyTorch issues 172668 and 188833 (what is held up); PyTorch
pull requests 186173 and 195760, which came after 2.13 (groups by direction, then by direction and pair).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from mmm.torch_private.pipelining import batching


class P2PStage(PipelineStage):
    """PyTorch's stage, whose sends and receives go through `p2p` (`Mesh.p2p`), or where that is empty through its own
    group."""

    p2p: Mapping[tuple[int, int], dist.ProcessGroup] = {}

    def get_fwd_recv_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_fwd_recv_ops(*args))

    def get_fwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_fwd_send_ops(*args))

    def get_bwd_recv_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_bwd_recv_ops(*args))

    def get_bwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_bwd_send_ops(*args))

    def _regrouped(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return [dist.P2POp(op.op, op.tensor, op.peer, self._group_of(op)) for op in ops]

    def _group_of(self, op: dist.P2POp) -> dist.ProcessGroup:
        if not self.p2p:
            return op.group
        sends = op.op is dist.isend
        return self.p2p[(self.group_rank, op.group_peer) if sends else (op.group_peer, self.group_rank)]


@contextlib.contextmanager
def batched_by_group() -> Iterator[None]:
    """Inside, PyTorch's schedules issue the operations of each group as a batch.

    1F1B sends to a rank and receives from it in one batch, which may not have two groups. What only sends, or only
    receives, PyTorch 2.13 issues without a batch, on which XCCL hangs (torch-xpu-ops 3071).
    """
    with batching(_batch_by_group):
        yield


def _batch_by_group(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    works = []
    for group in dict.fromkeys(op.group for op in p2p_ops):
        works += dist.batch_isend_irecv([op for op in p2p_ops if op.group is group])
    return works
