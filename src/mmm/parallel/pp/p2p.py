"""A pipeline's sends and receives: a process group for each direction between two ranks, and contiguous tensors.

NCCL and XCCL run what is issued on one communicator one after the other, in that order. A receive that is issued ahead
of its data holds up what follows it, also sends to other ranks, and with them the stages that wait for these. With a
communicator for each direction between two ranks, a message waits for earlier ones from the same sender to the same
receiver alone. Gloo treats the messages of one group like that, and needs no more groups: what runs on CPU ranks cannot
block on these groups either.

What is sent is contiguous: shape (2, 3, 4) has strides (12, 4, 1). Convolutions return channels-last, transposes any
strides, and gloo sends neither; a receive buffer has the strides that the first step inferred. ``contiguous()`` is not
enough: where a dim has size 1, PyTorch calls several strides contiguous, and keeps the one that is there.

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


def batch_by_group(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Issue the operations of each group as a batch.

    1F1B sends to a rank and receives from it in one batch, which may not have two groups. What only sends, or only
    receives, PyTorch 2.13 issues without a batch, on which XCCL hangs (torch-xpu-ops 3071).
    """
    works = []
    for group in dict.fromkeys(op.group for op in p2p_ops):
        works += dist.batch_isend_irecv([op for op in p2p_ops if op.group is group])
    return works


def to_contiguous(tensor: Tensor) -> Tensor:
    """The same elements with the strides of a new tensor of that shape; copied only where it has others."""
    expected = torch.empty(tensor.shape, device="meta").stride()
    return tensor if tensor.stride() == expected else tensor.clone(memory_format=torch.contiguous_format)


class ContiguousGradient(torch.autograd.Function):
    """The identity in forward; in backward, the gradient `to_contiguous`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return to_contiguous(gradient)


def contiguous_between_stages(stage: nn.Module, first: bool, last: bool) -> None:
    """Make contiguous what a stage sends: activations to the next one, and gradients to the one before.

    Hooks on the module do it, so that it also holds where PyTorch infers the shapes.

    Args:
        first, last: whether it is the first or the last stage: inputs have no gradients to send, and logits stay.
    """

    def wrap(x: Tensor) -> Tensor:
        return ContiguousGradient.apply(x) if x.requires_grad else x

    def copy(x: Tensor) -> Tensor:
        # A backward that is split detaches a stage's output in place, which PyTorch cannot do to a view.
        return x.clone(memory_format=torch.contiguous_format) if is_view(x) else to_contiguous(x)

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(tree_map_only(Tensor, wrap, list(args)))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tree_map_only(Tensor, copy, output)

    if not first:
        stage.register_forward_pre_hook(before)
    if not last:
        stage.register_forward_hook(after)
