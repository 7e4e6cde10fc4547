"""The gradients of an exact run: summed over ranks, then over micro-batches, by one far tree over all lanes of dp.

FSDP sums the gradients of each micro-batch over the ranks as soon as it has them. Its own reduce-scatter leaves the
order to the backend, and the order depends on the number of ranks. `TreeReduceScatter` takes its place: an all-to-all
brings each rank all terms of its shard, and it adds them up itself. Bytes are sent as before; only the ring's sums on
the way are gone.

Source: ``torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mmm.parallel.exact.collectives import all_gather, all_to_all
from mmm.parallel.exact.trees import sum_far, visiting_order
from mmm.parallel.local import to_local


class TreeReduceScatter:
    """What FSDP calls instead of a reduce-scatter of gradients.

    Attributes:
        replicas: the ranks of dp_replicate, under HSDP. None without it.
    """

    def __init__(self, replicas: dist.ProcessGroup | None) -> None:
        self.replicas = replicas

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory that FSDP copies gradients into, or the memory that it takes the sums from."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum gradients over the ranks of dp, by the far tree. A collective.

        Args:
            output_tensor: (elements of a shard,): gets the sum of this rank's shard.
            input_tensor: (ranks of the group · elements of a shard,): this rank's gradients, shard after shard.
            group: the ranks of dp_shard.
            op: a sum.
        """
        # (ranks, elements of a shard): what goes to each rank.
        pieces = input_tensor.view(group.size(), -1)
        # One for each coordinate on dp_shard.
        terms = all_to_all(pieces, group)
        if self.replicas is None:
            output_tensor.copy_(sum_far(terms))
            return
        # The outermost axis is the farthest, so its terms have to be here before the first two are added.
        by_replica = all_gather(torch.stack(terms), self.replicas)
        # In the order of the coordinates on dp: dp_replicate, then dp_shard.
        all_terms = [term for replica in by_replica for term in replica.unbind()]
        output_tensor.copy_(sum_far(all_terms))
        # FSDP all-reduces over the replicas afterwards. Adding -0.0 changes no bit, not even that of a zero's sign.
        if self.replicas.rank() > 0:
            output_tensor.fill_(-0.0)


def sum_gradients_by_tree(model: nn.Module, replicas: dist.ProcessGroup | None) -> None:
    """Have FSDP sum the gradients of all units of a model by `TreeReduceScatter`, which has the same arguments."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(TreeReduceScatter(replicas))  # type: ignore[arg-type]


def exact_microbatches(batch: Any, count: int, modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the lanes of a batch as micro-batches. Once the last has had its backward, gradients are those of all.

    Autograd would add the gradient of each micro-batch to the one before: a chain, whose bits depend on how many a rank
    has. Here each is taken away, and they are added up by the far tree.

    Args:
        batch: has a method ``split(count)``.
        count: number of lanes of this rank, a power of two that divides the samples of the batch.
        modules: the modules whose backward follows each micro-batch.
    """
    if count == 1:
        yield batch
        return
    gradients = LaneGradients(modules)
    lanes = batch.split(count)
    for lane in visiting_order(count):
        yield lanes[lane]
        gradients.take()
    gradients.put()


def rows_as_visited(batch: int, count: int) -> Tensor:
    """Return the places of a batch's samples, (batch,) int64, lane by lane in the order in which a rank computes them.

    Args:
        batch: number of samples.
        count: number of lanes.
    """
    # (lanes, samples of a lane)
    rows = torch.arange(batch).view(count, -1)
    return rows[visiting_order(count)].flatten()


class LaneGradients:
    """Adds up the gradients of a step over the lanes of this rank, by the far tree.

    It keeps log2 of their number, and not all.

    Attributes:
        parameters: all parameters of the modules.
        sums: sums over 1, 2, 4, … lanes, the most first, each with their number: what a binary counter of the lanes has
            as ones. A sum is a list in the order of the parameters.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.parameters: list[nn.Parameter] = []
        for module in modules:
            self.parameters += module.parameters()
        self.sums: list[tuple[int, list[Tensor | None]]] = []

    def take(self) -> None:
        """Take the gradients of a lane, whose backward has ended. The parameters have none afterwards."""
        gradients = []
        for parameter in self.parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        lanes = 1
        # Two sums over equally many lanes become one, as a carry in a binary counter.
        while self.sums and self.sums[-1][0] == lanes:
            _, before = self.sums.pop()
            gradients = _add_gradients(before, gradients)
            lanes *= 2
        self.sums.append((lanes, gradients))

    def put(self) -> None:
        """Give the parameters the sums over all lanes that were taken, whose number is a power of two."""
        ((_, total),) = self.sums
        self.sums.clear()
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient


def _add_gradients(total: list[Tensor | None], gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Add gradients to `total`, in place."""
    for first, second in zip(total, gradients, strict=True):
        # A frozen parameter has none, in any lane.
        assert (first is None) == (second is None), "a parameter has a gradient in one lane, and none in another"
        if first is not None and second is not None:
            to_local(first).add_(to_local(second))
    return total
