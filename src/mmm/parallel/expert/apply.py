"""Expert parallel: whole experts on each rank, and tokens that travel to the experts they chose.

The ep axis re-uses ranks of dp_shard. On ``dp4·ep2`` every rank has samples of its own; neighbours on dp_shard share
the experts out between them, and all else of the model lies as it does without ep::

                           ep: experts cut                      all other parameters
                      ┌────────────┬────────────┐
       expert_dp:     │ rank 0     │ rank 1     │               FSDP over dp_shard:
       the same       │ experts 0–3│ experts 4–7│               ranks 0 1 2 3
       experts,       ├────────────┼────────────┤
       other tokens   │ rank 2     │ rank 3     │
                      │ experts 0–3│ experts 4–7│
                      └────────────┴────────────┘
       tokens travel along a row, [0 1] [2 3]; FSDP cuts experts, and adds up gradients, along a column, [0 2] [1 3]

A layer, on one rank (in backward the same two all-to-alls, the other way)::

    tokens sorted by expert ─► all-to-all ─► sorted by own expert ─► experts ─► as they came ─► all-to-all ─► as sent
           how many to whom is exchanged first, because every rank gets another number of tokens each time

expert_dp is what ep leaves of dp_shard, × cp × tp: to experts cp and tp are data parallel axes as well, because each
rank there has other tokens (under tp the sequence is cut between the matrices, and a token's experts need no other
token). Each expert's gradient is so the sum over all tokens of the global batch: over its row by the tokens that came
to it, over its column (and over dp_replicate) by FSDP.

Sources: Lepikhin et al., "GShard", 2021; Gale et al., "MegaBlocks", 2022 (dropless); Wang et al., "Auxiliary-loss-free
load balancing strategy for mixture-of-experts", 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mmm.errors import LayoutError
from mmm.models.experts import Experts, MixtureOfExperts, expert_forward, to_host_list
from mmm.parallel.advice import Broken
from mmm.parallel.data.fsdp import mixed_precision, offload_policy
from mmm.parallel.mesh import Layout, expert_mesh, has_axis
from mmm.parallel.plan import Plan, find
from mmm.runtime.device import Precision

BALANCE_RATE = 1e-3  # DeepSeek-V3's


def expert_problems(n_experts: int, layout: Layout) -> list[Broken]:
    """What keeps a model's experts from being cut; empty when nothing does.

    Args:
        n_experts: of each layer; 0 for a model without.
    """
    if layout.ep == 1 or (n_experts and n_experts % layout.ep == 0):
        return []
    if n_experts == 0:
        return [Broken("ep", f"ep {layout.ep}: the model has no experts to cut: give it n_experts, or use ep 1")]
    text = f"n_experts {n_experts} is not divisible by ep {layout.ep} (each rank takes the same number of them)"
    return [Broken("n_experts", text, "n_experts", ("ep",))]


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Cut the experts that the plan names over ep, in place; nothing to do where the mesh has none.

    Args:
        mesh: of `build_mesh`.

    Raises:
        LayoutError: the mesh has ep and the plan names no experts; or it has tp, the model has experts, and the mesh
            was built without groups for them.
    """
    layers = [module for pattern in plan.experts for module in find(model, pattern)]
    experts = expert_mesh(mesh)
    if experts is None:
        if layers and has_axis(mesh, "tp"):
            raise LayoutError(
                f"tp {mesh['tp'].size()}: a mesh for a model with experts is built by build_mesh(…, experts=True)"
            )
        return
    if not has_axis(experts, "ep"):
        return
    axis = experts["ep"]
    if not plan.experts:
        raise LayoutError(f"ep {axis.size()}: the plan of this model names no experts; use ep 1")
    for module in _experts_in(layers):
        for name, parameter in list(module.named_parameters()):
            cut = distribute_tensor(parameter.data, axis, [Shard(0)])
            module.register_parameter(name, nn.Parameter(cut))
        module.expert_forward = ExpertParallel(axis)


def _experts_in(layers: Iterable[nn.Module]) -> list[Experts]:
    return [module for layer in layers for module in layer.modules() if isinstance(module, Experts)]


def apply_expert_fsdp(
    model: nn.Module, experts: DeviceMesh, plan: Plan, precision: Precision, offload: bool = False
) -> None:
    """``fully_shard`` each layer's experts over expert_dp, as units of their own, in place.

    Args:
        experts: of `expert_mesh`. offload: keep what is cut on the host.
    """
    over = experts["dp_replicate", "expert_dp"] if has_axis(experts, "dp_replicate") else experts["expert_dp"]
    ranks = experts["expert_dp"].size()
    layers = [module for pattern in plan.experts for module in find(model, pattern)]
    for module in _experts_in(layers):
        fully_shard(
            module,
            mesh=over,
            mp_policy=mixed_precision(precision, False),
            offload_policy=offload_policy(over, offload),
            shard_placement_fn=lambda parameter: Shard(_cut_dim(parameter, ranks)),
        )


def _cut_dim(parameter: Tensor, ranks: int) -> int:
    """The dim to cut a rank's experts by: whole experts where they divide, else rows of each, else experts all the same
    (some ranks then hold one less)."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return 1 if held.shape[0] % ranks and held.shape[1] % ranks == 0 else 0


class ExpertParallel:
    """Experts cut over `mesh` (one-dimensional): takes the place of `mmm.models.experts.expert_forward`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()

    def __call__(self, x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """
        Args:
            x: (rows, dim) of this rank's tokens, sorted by expert. counts: (n_experts,) int64, rows of each.
            w1, w2, w3: DTensors (n_experts, …), of which this rank holds n_experts / ep.

        Returns:
            (rows, dim), in the order of `x`.
        """
        to = counts.view(self.size, -1)  # (ep, experts held): rows for each expert of each rank
        come = torch.empty_like(to)  # (ep, experts held): rows from each rank for each expert held here
        dist.all_to_all_single(come, to, group=self.group)
        send = _by_rank(to, len(x))
        take = _by_rank(come, len(x))
        rows = Exchange.apply(x, send, take, self.group)  # by the rank that they come from, of each by expert
        held = torch.arange(come.shape[1], device=x.device).expand_as(come).flatten()
        expert = held.repeat_interleave(come.flatten(), output_size=len(rows))  # (rows,): of each row
        order = expert.argsort(stable=True)
        local = [w.to_local() for w in (w1, w2, w3)]  # type: ignore[attr-defined]  # (experts held, …)
        done = expert_forward(rows.index_select(0, order), come.sum(0), *local)
        return Exchange.apply(done.index_select(0, order.argsort()), take, send, self.group)


def _by_rank(counts: Tensor, total: int) -> list[int]:
    """Rows for or from each rank: the sums of `counts` (ep, experts held)."""
    numbers = to_host_list(counts, total)
    held = counts.shape[1]
    return [sum(numbers[first : first + held]) for first in range(0, len(numbers), held)]


class Exchange(torch.autograd.Function):
    """All-to-all of rows: the first ``send[0]`` go to rank 0, the next to rank 1, …; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:  # type: ignore
        ctx.send, ctx.take, ctx.group = send, take, group
        taken = x.new_empty(sum(take), *x.shape[1:])
        dist.all_to_all_single(taken, x.contiguous(), take, send, group=group)
        return taken

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return Exchange.apply(gradient, ctx.take, ctx.send, ctx.group), None, None, None


@torch.no_grad()
def balance_experts(model: nn.Module | Iterable[nn.Module], mesh: DeviceMesh, rate: float = BALANCE_RATE) -> Tensor:
    """After a step of the optimizer: make experts that had more tokens than the mean less likely, and the others more.

    Each bias moves by ``rate · sign(mean load - load)``. Loads are whole numbers, added up over micro-batches,
    dp_replicate, dp_shard, cp and tp, so that biases are the same, to the last bit, on every mesh. A collective, but
    where the model has no experts.

    Args:
        model: or this rank's pipeline stages.

    Returns:
        (layers, n_experts) int64 on the CPU: the loads, over all ranks, of the layers held here, in the order of the
        model; (0, 0) where there are none.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, MixtureOfExperts)]
    if not layers:
        return torch.zeros(0, 0, dtype=torch.int64)
    none = torch.zeros_like(layers[0].expert_bias, dtype=torch.int64)
    load = torch.stack(
        [none if layer.tokens_per_expert is None else layer.tokens_per_expert for layer in layers]
    )  # (layers, n_experts)
    for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
        if has_axis(mesh, axis):
            dist.all_reduce(load, group=mesh.get_group(axis))
    direction = (load.sum(1, keepdim=True) - load.shape[1] * load).sign()  # in whole numbers
    for layer, sign in zip(layers, direction, strict=True):
        layer.expert_bias += rate * sign.to(layer.expert_bias.dtype)
        layer.tokens_per_expert = None
    return load.cpu()


def imbalance(load: Tensor) -> float:
    """The largest load over the mean load, of the layer where that is worst: 1 is even, n_experts / top_k the worst.

    Args:
        load: (layers, n_experts), of `balance_experts`.

    Returns:
        NaN where nothing was counted.
    """
    if not load.numel() or not bool(load.any()):
        return float("nan")
    wide = load.double()
    return float((wide.amax(1) / wide.mean(1)).max())
