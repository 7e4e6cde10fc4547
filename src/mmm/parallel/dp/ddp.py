"""DDP: every rank has the full model; gradients are all-reduced while backward is still running.

``torch.nn.parallel.DistributedDataParallel`` does this: gradients are in buckets, and each bucket is one tensor and one
all-reduce. It takes the mean over the ranks. Here a hook sums, because each rank's loss is divided by the global count
already. A factor on the loss would do the same for parameters, but it would also scale the gradients that leave a
model by its input: a generator learns through its critic, and forces are gradients of positions.

PyTorch's reducer expects one backward for each forward, which reaches every parameter. Hooks around it allow any::

    first gradient of a backward   the reducer begins anew: this may be the second backward of one forward
    each gradient                  a sum from an earlier backward is divided by the ranks, because it is summed again
    end of the backward            a parameter that nothing has reached counts as zero on this rank

Source: Li et al., "PyTorch Distributed", 2020.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from mmm.parallel.dp.wrapped import Wrapper
from mmm.torch_private.autograd import at_end_of_backward

# The argument that makes buffers each rank's own, instead of rank 0's on all ranks. PyTorch 2.13 has renamed it.
KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in KNOWN else "broadcast_buffers"
KEEP_BUFFERS: dict[str, Any] = {SYNC_BUFFERS: False}


class Reach(torch.autograd.Function):
    """A scalar whose backward reaches parameters, and adds nothing to their gradients."""

    @staticmethod
    def forward(ctx: Any, scalar: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + ctx.count)


def sum_over_ranks(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook. Without one, DDP would divide by the number of ranks.

    PyTorch reads the annotations of a hook, which is why this file does not postpone them.
    """
    # All ranks that have a replica of the model, once a bucket, as soon as its last gradient is ready.
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class DDP(Wrapper):
    """A model whose gradients are the sum over the ranks, not the mean."""

    def connect(self) -> None:
        self._parameters_summed = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.sum_gradients_of(self._parameters_summed)
        # Parameters whose gradient is a sum over the ranks by now.
        self._summed: set[nn.Parameter] = set()
        # Parameters that the backward under way has reached.
        self._reached: set[nn.Parameter] = set()
        self._in_backward = False
        # Autograd's accumulation nodes, which live only as long as something refers to them.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._parameters_summed]
        for node, parameter in zip(self._nodes, self._parameters_summed, strict=True):
            node.register_prehook(lambda _, parameter=parameter: self._before_gradient(parameter))
        # In a list: as an attribute it would be a module inside this one, and add its names.
        self._ddp: list[DistributedDataParallel] = []
        if self._parameters_summed:
            group = self.mesh.get_group()
            ddp = DistributedDataParallel(
                self.module, process_group=group, init_sync=False, gradient_as_bucket_view=True, **KEEP_BUFFERS
            )
            ddp.register_comm_hook(group, sum_over_ranks)
            self._ddp.append(ddp)
        self.connected = True

    def sync_gradients(self, now: bool) -> None:
        super().sync_gradients(now)
        for ddp in self._ddp:
            ddp.require_backward_grad_sync = now

    def compute(self, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            self.refuse_thawed()
            # A backward that has failed leaves its state.
            self._in_backward = False
            self._reached.clear()
        model = self._ddp[0] if self._ddp else self.module
        return model(*inputs, **named)

    @torch.no_grad()
    def _before_gradient(self, parameter: nn.Parameter) -> None:
        """Runs before a backward adds this rank's own gradient to ``parameter.grad``."""
        if self.reduce_now and not self._in_backward:
            self._in_backward = True
            self._ddp[0].reducer.prepare_for_backward([])
            at_end_of_backward(self._reach_the_others)
        if parameter in self._summed and parameter.grad is not None:
            # A sum that is the same on n ranks, divided by n, is itself again after the all-reduce.
            parameter.grad.div_(self.mesh.size())
        self._summed.discard(parameter)
        self._reached.add(parameter)

    def _reach_the_others(self) -> None:
        """At the end of a backward, reach the parameters that it has not: the reducer waits for them.

        So every rank all-reduces every bucket, also where its samples do not use some parameters.
        """
        unreached = [parameter for parameter in self._parameters_summed if parameter not in self._reached]
        frozen = [parameter for parameter in unreached if not parameter.requires_grad]
        frozen_without_grad = [parameter for parameter in frozen if parameter.grad is None]
        if unreached:
            for parameter in frozen:
                parameter.requires_grad_()
            with torch.enable_grad():
                scalar = Reach.apply(unreached[0].new_zeros((), dtype=torch.float32), *unreached)
            scalar.backward()
            for parameter in frozen:
                parameter.requires_grad_(False)
            for parameter in frozen_without_grad:
                parameter.grad = None
        self._summed.update(self._parameters_summed)
        self._reached.clear()
        self._in_backward = False
