"""Muon: the momentum of a matrix, orthogonalized, is its update; what is no matrix is updated by AdamW.

A momentum M = U S Vᵀ becomes about U Vᵀ: all its directions weigh alike. A Newton–Schulz iteration comes near that with
matrix products alone. It needs the full matrix, of which a rank has a shard::

    momentum      a shard on each rank           state: as much as SGD's
      │ all-gather over the axes that shard it
      ▼           full, on each rank             Newton–Schulz: every rank computes the same
    update        each rank takes its own shard of the result

The update has the root mean square of one of AdamW, so that learning rate and weight decay are the same for both.

``torch.optim.Muon`` iterates in bfloat16, in which the last bits of a sum, and so the mesh, would show.
Here it is the dtype of the weights.

Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable
for LLM training", 2025 (the scale).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.nn.draw import canonical_name
from mmm.optim.adamw import BETAS, fused, groups_of, take_shards
from mmm.parallel.local import local_box, to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.plan import Plan, matches
from mmm.torch_private.groups import ignore_gathers_in_turns

MOMENTUM, STEPS, COEFFICIENTS, EPS = 0.95, 5, (3.4445, -4.7750, 2.0315), 1e-7
RMS = 0.2  # of AdamW's updates, about


class Muon(torch.optim.AdamW):
    """AdamW, but for groups with ``muon=True``: matrices, of two dims. Every step is a collective of the ranks that
    shard one."""

    def __init__(self, groups: list[dict[str, Any]], **more: Any) -> None:
        super().__init__(groups, **more)
        self._step_supports_amp_scaling = False  # a step that overflows is left out by whoever calls

    def _init_group(self, group: dict[str, Any], parameters: list[Tensor], *columns: list[Tensor]) -> bool:
        if not group.get("muon"):
            has_complex: bool = super()._init_group(group, parameters, *columns)  # type: ignore[no-untyped-call]
            take_shards(parameters, columns)
            return has_complex
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(parameter, group["lr"], group["weight_decay"])
        return False

    def _update(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros((), device=parameter.device)  # AdamW, where it loads a state, asks for one
        state["step"] += 1
        local, gradient = to_local(parameter.detach()), to_local(parameter.grad)  # type: ignore[arg-type]
        momentum = to_local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = own_shard(orthogonalized(gathered(gradient.lerp(momentum, MOMENTUM), parameter)), parameter)
        local.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * RMS * math.sqrt(max(parameter.shape)))


def gathered(local: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor whose shards are sharded as `parameter` is. A collective."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


def own_shard(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of a tensor that this rank has of `parameter`."""
    box = local_box(parameter)
    for dim, (start, length) in enumerate(zip(box.start, box.length, strict=True)):
        full = full.narrow(dim, start, length)
    return full


def orthogonalized(matrix: Tensor) -> Tensor:
    """U f(S) Vᵀ of a matrix U S Vᵀ, (rows, columns); f of a singular value is between 0.6 and 1.3, unless it is small
    beside the others."""
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / wide.norm().clamp(min=EPS)  # no singular value above 1
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def hidden_matrices(model: ParallelModel, plan: Plan) -> list[nn.Parameter]:
    """The parameters of two dims that are neither an embedding nor the output matrix."""
    modules = [pair for module in model.modules.values() for pair in module.named_modules()]
    lookups = {canonical_name(name) for name, module in modules if isinstance(module, nn.Embedding)}

    def is_hidden(name: str) -> bool:
        names = [name, *(other for other, first in model.tied_aliases.items() if first == name)]  # of a tied weight
        owners = [each.rpartition(".")[0] for each in names]
        return not any(owner in lookups or matches(plan.output, owner) for owner in owners)

    return [p for name, p in model.named_parameters() if p.ndim == 2 and is_hidden(name)]


def make_muon(
    model: ParallelModel,
    plan: Plan,
    lr: float,
    weight_decay: float | None = None,
    decayed: str = "all",
    betas: tuple[float, float] | None = None,
) -> Muon:
    """Muon for the `hidden_matrices` of a model, and AdamW for the rest; arguments as of `make_optimizer`."""
    # PyTorch warns that a matrix sharded twice is gathered in two turns: that is fine here.
    ignore_gathers_in_turns()
    matrices = hidden_matrices(model, plan)
    own = {id(parameter) for parameter in matrices}
    rest = groups_of((p for p in model.parameters() if id(p) not in own), weight_decay, decayed)
    groups = [group | {"muon": True} for group in groups_of(matrices, weight_decay)]
    return Muon([*groups, *rest], lr=lr, betas=betas or BETAS, fused=fused([*groups, *rest]))
