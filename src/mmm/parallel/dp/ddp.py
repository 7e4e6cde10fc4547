"""DDP: every rank has the full model; gradients are all-reduced while backward is still running.

They are in buckets, each of them one tensor and one all-reduce. ``torch.nn.parallel.DistributedDataParallel`` does the
same, with a mean; it cannot sum what comes of a second backward (forces, penalties on gradients), and it takes a
parameter that a rank's samples do not use only where all outputs are used.

Source: Li et al., "PyTorch Distributed", 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from mmm.parallel.dp.replicas import Part, Replicas

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes, as in PyTorch; the first is small, so that sending begins early


class Bucket(Part):
    """Gradients that are all-reduced as one tensor: each is a view of it.

    A gradient that is there before a backward is a sum over the ranks already. It is divided by their number before
    this rank's own is added to it, so that the sum over the ranks has it once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self.parameters, self.group, self.ranks = parameters, mesh.get_group(), mesh.size()
        self.memory: Tensor | None = None
        self.views: dict[nn.Parameter, Tensor] = {}
        self.summed = dict.fromkeys(parameters, True)  # whether the gradient that is there is a sum over the ranks
        self.without: list[nn.Parameter] = []  # have no gradient now, and get none
        # The nodes live as long as something refers to them.
        self.nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        for node, parameter in zip(self.nodes, parameters, strict=True):
            node.register_prehook(lambda _, p=parameter: self._own(p))

    @torch.no_grad()
    def _own(self, parameter: nn.Parameter) -> None:
        """Before something of this rank alone is added to a gradient."""
        if self.summed[parameter] and parameter.grad is not None:
            parameter.grad.div_(self.ranks)
        self.summed[parameter] = False

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if self.memory is None:
            self.memory = parameter.new_empty(sum(p.numel() for p in self.parameters))
            parts = self.memory.split([p.numel() for p in self.parameters])
            self.views = {p: part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)}
        view = self.views[parameter]
        if parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)

    @torch.no_grad()
    def begin(self) -> dist.Work:
        self.without = [p for p in self.parameters if p.grad is None and not p.requires_grad]
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._own(parameter)
            self.arrived(parameter)
        return dist.all_reduce(self.memory, group=self.group, async_op=True)

    def finish(self) -> None:
        for parameter in self.parameters:
            self.summed[parameter] = True
        for parameter in self.without:
            parameter.grad = None


def buckets_of(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """`parameters` in buckets of one dtype, in this order."""
    bucket, size, most = list[nn.Parameter](), 0, FIRST_BUCKET
    for parameter in parameters:
        if bucket and (size >= most or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size, most = [], 0, BUCKET
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


class DDP(Replicas):
    """Gradients are the sum over the ranks, not the mean."""

    def connect(self) -> None:
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        backwards = reversed(parameters)  # as backward makes their gradients, about
        self._reduce([Bucket(bucket, self.mesh) for bucket in buckets_of(backwards)])
        self.connected = True
