"""Expert parallelism: each rank has some of the experts, and tokens travel to the experts that they chose.

The ep axis re-uses ranks of dp_shard. On ``dp4·ep2`` every rank has its own samples. Neighbours on dp_shard split the
experts between them, and all other parameters are sharded as they are without ep::

                           ep: experts sharded                  all other parameters
                      ┌────────────┬────────────┐
       expert_dp:     │ rank 0     │ rank 1     │               FSDP over dp_shard:
       the same       │ experts 0–3│ experts 4–7│               ranks 0 1 2 3
       experts,       ├────────────┼────────────┤
       other tokens   │ rank 2     │ rank 3     │
                      │ experts 0–3│ experts 4–7│
                      └────────────┴────────────┘
       tokens travel along a row, [0 1] [2 3]; FSDP shards experts, and sums gradients, along a column, [0 2] [1 3]

A layer, on one rank (in backward the same two all-to-alls, the other way)::

    tokens sorted by expert ─► all-to-all ─► sorted by local expert ─► experts ─► unsorted ─► all-to-all ─► as sent
           the ranks first exchange how many tokens each sends to whom, because that differs every time

expert_dp is what ep leaves of dp_shard, × cp × tp. For experts, cp and tp are data parallel axes as well, because each
rank there has other tokens (under tp the sequence is sharded between the matrices, and a token's experts need no other
token). So each expert's gradient is the sum over all tokens of the global batch: within its row, over the tokens that
were sent to it; along its column (and over dp_replicate) FSDP adds them up.

Sources: Lepikhin et al., "GShard", 2021; Gale et al., "MegaBlocks", 2022 (dropless).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from mmm.errors import LayoutError
from mmm.nn.experts import Experts, expert_forward, to_host_list
from mmm.parallel.local import to_local
from mmm.parallel.mesh import Mesh
from mmm.parallel.plan import Plan, find
from mmm.torch_private.groups import all_to_all_single_autograd, wait_tensor


def apply_expert_parallel(model: nn.Module, mesh: Mesh, plan: Plan) -> None:
    """Shard the experts that the plan names over ep, in place. Does nothing where ep is 1.

    Raises:
        LayoutError: the mesh has ep and the plan names no experts; or it has tp, the model has experts, and the mesh
            was built without a mesh for them.
    """
    layout = mesh.layout
    modules = experts_of(model, plan)
    if modules and layout.tp > 1 and mesh.experts is None:
        raise LayoutError(
            f"tp {layout.tp}: a mesh for a model with experts is built by build_mesh(…, experts=True)",
        )
    if layout.ep == 1:
        return
    if not plan.experts:
        raise LayoutError(f"ep {layout.ep}: the plan of this model names no experts; use ep 1")
    assert mesh.experts is not None
    axis = mesh.experts["ep"]
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            # (n_experts, …), sharded by experts: each rank of ep has n_experts / ep of them.
            sharded = distribute_tensor(parameter.data, axis, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
        module.expert_forward = ExpertParallel(axis)


def experts_of(model: nn.Module, plan: Plan) -> list[Experts]:
    """The experts of the layers that the plan names."""
    experts = []
    for pattern in plan.experts:
        for layer in find(model, pattern):
            experts += [module for module in layer.modules() if isinstance(module, Experts)]
    return experts


def expert_dim(parameter: Tensor, ranks: int) -> int:
    """The dim along which `ranks` that have the same experts shard them.

    It is 0, the experts, if their number divides over the ranks; else 1, the rows of each expert, if these divide; else
    0 all the same, so that some ranks have one expert less.

    Args:
        parameter: (n_experts, rows, …), of which n_experts / ep are local.
    """
    experts, rows = to_local(parameter).shape[:2]
    if experts % ranks == 0:
        return 0
    if rows % ranks == 0:
        return 1
    return 0


class ExpertParallel:
    """Experts sharded over `mesh` (one-dimensional). Replaces `mmm.nn.experts.expert_forward`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.size = mesh.size()

    def __call__(
        self,
        x: Tensor,
        tokens_per_expert: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
    ) -> Tensor:
        """
        Args:
            x: (tokens, dim) of this rank, sorted by expert.
            tokens_per_expert: (n_experts,) int64, of this rank's tokens.
            w1, w2, w3: DTensors (n_experts, …), of which n_experts / ep are local.

        Returns:
            (tokens, dim), in the order of `x`.
        """
        # (ep, local experts): how many tokens this rank sends to each expert of each rank of ep.
        to_send = tokens_per_expert.view(self.size, -1)
        # (ep, local experts): how many it receives from each rank for each of its own experts.
        to_receive = torch.empty_like(to_send)
        dist.all_to_all_single(to_receive, to_send, group=self.group)
        # All that the host has to know of the layer, in one read: the sizes of what is sent and received.
        both = torch.stack((to_send, to_receive))
        counts = to_host_list(both, 2 * len(x))
        local_experts = to_send.shape[1]
        tokens_by_rank = []
        for first in range(0, len(counts), local_experts):
            rank_counts = counts[first : first + local_experts]
            tokens_by_rank.append(sum(rank_counts))
        send_sizes = tokens_by_rank[: self.size]
        receive_sizes = tokens_by_rank[self.size :]
        # Tokens that each local expert receives, from all ranks.
        received_counts = counts[len(tokens_per_expert) :]
        tokens_by_expert = []
        for expert_id in range(local_experts):
            tokens_by_expert.append(sum(received_counts[expert_id::local_experts]))
        # An all-to-all over ep: tokens go to their experts, and arrive sorted by source rank, then by expert. In
        # backward their gradients go the other way.
        received = wait_tensor(all_to_all_single_autograd(x, receive_sizes, send_sizes, self.group))
        # (ep · local experts,): the local expert of each count in `to_receive`.
        expert_ids = torch.arange(local_experts, device=x.device)
        expert_ids = expert_ids.expand_as(to_receive).flatten()
        # (received tokens,): the local expert of each. The size is given, so that the host does not wait for it.
        expert = expert_ids.repeat_interleave(to_receive.flatten(), output_size=len(received))
        # Sorted by expert, because each expert multiplies consecutive rows.
        order = expert.argsort(stable=True)
        tokens = received.index_select(0, order)
        output = expert_forward(
            tokens,
            to_receive.sum(0),
            # (local experts, …)
            to_local(w1),
            to_local(w2),
            to_local(w3),
            on_host=tokens_by_expert,
        )
        # Unsorted, and back to the ranks that sent them: (tokens, dim).
        output = output.index_select(0, order.argsort())
        return wait_tensor(all_to_all_single_autograd(output, send_sizes, receive_sizes, self.group))
