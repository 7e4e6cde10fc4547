"""Expert parallelism: each rank has some of the experts, and tokens travel to the experts they chose.

The ep axis re-uses ranks of dp_shard. On ``dp4·ep2`` every rank has samples of its own; neighbours on dp_shard split
the experts between them, and all other parameters are sharded as they are without ep::

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

expert_dp is what ep leaves of dp_shard, × cp × tp: to experts cp and tp are data parallel axes as well, because each
rank there has other tokens (under tp the sequence is sharded between the matrices, and a token's experts need no other
token). Each expert's gradient is thus the sum over all tokens of the global batch: over its row by the tokens that came
to it, over its column (and over dp_replicate) by FSDP.

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
    """Shard the experts that the plan names over ep, in place; nothing to do where the mesh has none.

    Raises:
        LayoutError: the mesh has ep and the plan names no experts; or it has tp, the model has experts, and the mesh
            was built without a mesh for them.
    """
    layout, modules = mesh.layout, experts_of(model, plan)
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
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, axis, [Shard(0)])))
        module.expert_forward = ExpertParallel(axis)


def experts_of(model: nn.Module, plan: Plan) -> list[Experts]:
    """The experts of the layers that the plan names."""
    layers = [layer for pattern in plan.experts for layer in find(model, pattern)]
    return [module for layer in layers for module in layer.modules() if isinstance(module, Experts)]


def expert_dim(parameter: Tensor, ranks: int) -> int:
    """The dim that `ranks` with the same experts shard a rank's experts along: 0, experts, where they divide over the
    ranks; else 1, the rows of each, where those divide; else 0 all the same (some ranks then have one expert less)."""
    experts, rows = to_local(parameter).shape[:2]
    return 1 if experts % ranks and rows % ranks == 0 else 0


class ExpertParallel:
    """Experts sharded over `mesh` (one-dimensional): replaces `mmm.nn.experts.expert_forward`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()

    def __call__(self, x: Tensor, tokens_per_expert: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """
        Args:
            x: (tokens, dim) of this rank, sorted by expert. tokens_per_expert: (n_experts,) int64.
            w1, w2, w3: DTensors (n_experts, …), of which n_experts / ep are local.

        Returns:
            (tokens, dim), in the order of `x`.
        """
        to_send = tokens_per_expert.view(self.size, -1)  # (ep, local experts): tokens for each expert of each rank
        to_receive = torch.empty_like(to_send)  # (ep, local experts): tokens from each rank for each local expert
        dist.all_to_all_single(to_receive, to_send, group=self.group)
        # All that the host has to know of the layer, in one read.
        counts = to_host_list(torch.stack((to_send, to_receive)), 2 * len(x))
        local = to_send.shape[1]
        by_rank = [sum(counts[first : first + local]) for first in range(0, len(counts), local)]
        send, receive = by_rank[: self.size], by_rank[self.size :]
        of_experts = [sum(counts[len(tokens_per_expert) + i :: local]) for i in range(local)]
        # Tokens to their experts, sorted by source rank, then by expert; in backward their gradients the other way.
        tokens = wait_tensor(all_to_all_single_autograd(x, receive, send, self.group))
        of_each = torch.arange(local, device=x.device).expand_as(to_receive).flatten()
        expert = of_each.repeat_interleave(to_receive.flatten(), output_size=len(tokens))  # (tokens,): of each token
        order = expert.argsort(stable=True)
        w1, w2, w3 = (to_local(w) for w in (w1, w2, w3))  # each (local experts, …)
        output = expert_forward(tokens.index_select(0, order), to_receive.sum(0), w1, w2, w3, of_experts)
        output = output.index_select(0, order.argsort())
        return wait_tensor(all_to_all_single_autograd(output, send, receive, self.group))
