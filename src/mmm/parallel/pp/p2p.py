"""A pipeline's sends and receives: a process group for each direction between two ranks, and contiguous tensors.

NCCL and XCCL run the operations of one communicator one after the other, in the order in which they are issued. A
receive that is issued before its data has been sent blocks everything that is issued after it, including sends to other
ranks. The stages that need those sends then wait as well. With a communicator for each direction between two ranks, a
message waits only for earlier ones from the same sender to the same receiver. Gloo orders the messages within one group
in this way, and needs no further groups. So a schedule that runs on CPU ranks does not block on these groups either.

Tensors are sent contiguous: shape (2, 3, 4) has strides (12, 4, 1). Convolutions return channels-last tensors, and
transposes return tensors with other strides. Gloo refuses to send these. Other backends send the elements in the order
of memory, and the receive buffer has the strides that were inferred in the first step. ``contiguous()`` is not enough:
where a dim has size 1, PyTorch calls several strides contiguous, and keeps those of the tensor.

Sources: NCCL user guide, "Point-to-point communication"; PyTorch issues 172668 and 188833 (what is held up); PyTorch
pull requests 186173 and 195760, which came after 2.13 (groups by direction, then by direction and pair).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from mmm.torch_private.module import is_view
from mmm.torch_private.operators import tree_map_only


class P2PStage(PipelineStage):
    """PyTorch's stage, with other groups for its sends and receives.

    Attributes:
        p2p: process group by (sender, receiver), which are coordinates on pp (`Mesh.p2p`). If it is empty, all messages
            use the stage's own group.
    """

    p2p: Mapping[tuple[int, int], dist.ProcessGroup] = {}

    def get_fwd_recv_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_fwd_recv_ops(*args))

    def get_fwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_fwd_send_ops(*args))

    def get_bwd_recv_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_bwd_recv_ops(*args))

    def get_bwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._regrouped(super().get_bwd_send_ops(*args))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Up to 2.11, PyTorch first exchanges a number between neighbours: 8 bytes are sent where 4 are expected (2.9),
        # and in a V a rank sends to itself, which gloo refuses. Messages connect the ranks anyway.
        return []

    def _regrouped(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        regrouped = []
        for op in ops:
            group = self._group_of(op)
            regrouped.append(dist.P2POp(op.op, op.tensor, op.peer, group))
        return regrouped

    def _group_of(self, op: dist.P2POp) -> dist.ProcessGroup:
        if not self.p2p:
            return op.group
        if op.op is dist.isend:
            direction = (self.group_rank, op.group_peer)
        else:
            direction = (op.group_peer, self.group_rank)
        return self.p2p[direction]


def batch_by_group(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Issue the operations of each group as one batch. Replaces ``_batch_p2p`` of PyTorch's schedules.

    1F1B sends to a rank and receives from it in one list of operations. These are two directions and so two groups, and
    a batch must have only one. If a stage only sends, or only receives, PyTorch 2.13 issues single operations instead
    of a batch, and XCCL hangs on these (torch-xpu-ops 3071).
    """
    works = []
    groups = dict.fromkeys(op.group for op in p2p_ops)
    for group in groups:
        group_ops = [op for op in p2p_ops if op.group is group]
        works += dist.batch_isend_irecv(group_ops)
    return works


def to_contiguous(tensor: Tensor) -> Tensor:
    """The same elements with the strides of a new tensor of that shape. Copies only where the strides differ."""
    expected = torch.empty(tensor.shape, device="meta").stride()
    if tensor.stride() == expected:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class ContiguousGradient(torch.autograd.Function):
    """The identity in forward. In backward, it makes the gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return to_contiguous(gradient)


def contiguous_between_stages(stage: nn.Module, *, first: bool, last: bool) -> None:
    """Have a stage send contiguous tensors: activations to the next stage, and gradients to the one before.

    This is done by hooks on the module, so that it also holds in the forward by which PyTorch infers the shapes.

    Args:
        first: whether this is the first stage, whose inputs have no gradients to send.
        last: whether this is the last stage, whose logits are not sent.
    """

    def with_contiguous_gradient(x: Tensor) -> Tensor:
        return ContiguousGradient.apply(x) if x.requires_grad else x

    def contiguous_output(x: Tensor) -> Tensor:
        # A schedule that splits backward detaches a stage's output in place, which PyTorch refuses for a view.
        if is_view(x):
            return x.clone(memory_format=torch.contiguous_format)
        return to_contiguous(x)

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(tree_map_only(Tensor, with_contiguous_gradient, list(args)))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tree_map_only(Tensor, contiguous_output, output)

    if not first:
        stage.register_forward_pre_hook(before)
    if not last:
        stage.register_forward_hook(after)
