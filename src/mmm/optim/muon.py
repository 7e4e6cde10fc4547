"""Muon: a matrix is updated by its orthogonalized momentum; what is not a matrix is updated by AdamW.

A momentum M = U S Vᵀ becomes about U Vᵀ: all its directions get the same weight. A Newton–Schulz iteration approximates
that with matrix products only. It needs the full matrix, of which a rank has a shard::

    momentum      a shard on each rank           state: as much as SGD's
      │ all-gather over the axes that shard it
      ▼           full, on each rank             Newton–Schulz: every rank computes the same
    update        each rank takes its own shard of the result

The update is scaled to the root mean square of one of AdamW's, so that both use the same learning rate and weight
decay.

``torch.optim.Muon`` iterates in bfloat16. There the last bits of a sum, and so the mesh, would show in the result. Here
the iteration uses the dtype of the weights.

Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable
for LLM training", 2025 (the scale).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.nn.init import canonical_name
from mmm.optim.adamw import BETAS, AdamW, fused, groups_of
from mmm.parallel.local import local_box, to_local, unsharded
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.plan import Plan, matches
from mmm.torch_private.groups import ignore_gathers_in_turns

MOMENTUM = 0.95

# The Newton–Schulz iteration: its steps, the coefficients a, b, c of its polynomial, and the least norm to divide by.
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7

# The root mean square of AdamW's updates, about.
RMS = 0.2


class Muon(AdamW):
    """AdamW, except for groups with ``muon=True``, whose parameters are matrices of two dims.

    Every step is a collective of the ranks that shard a matrix.
    """

    def __init__(self, groups: list[dict[str, Any]], **more: Any) -> None:
        super().__init__(groups, **more)
        # With True, `GradScaler` would leave a step that overflows to AdamW's fused kernel, and the matrices would be
        # updated all the same. With False it skips the whole step.
        self._step_supports_amp_scaling = False

    def _init_group(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        *columns: list[Tensor],
    ) -> bool:
        if not group.get("muon"):
            return super()._init_group(group, parameters, *columns)
        # The lists stay empty: AdamW's kernel has nothing to do for this group.
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(parameter, group["lr"], group["weight_decay"])
        return False

    def _update(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        """Update a matrix, (rows, columns), in place. A collective of the ranks that shard it."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
            # AdamW asks for a step when it loads a state.
            state["step"] = torch.zeros((), device=parameter.device)
        state["step"] += 1
        local = to_local(parameter.detach())
        gradient = to_local(parameter.grad)  # type: ignore[arg-type]
        momentum = to_local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        # Nesterov's momentum: the gradient counts once more.
        nesterov = gradient.lerp(momentum, MOMENTUM)
        full_update = orthogonalized(gathered(nesterov, parameter))
        update = own_shard(full_update, parameter)
        local.mul_(1 - lr * weight_decay)
        local.add_(update, alpha=-lr * RMS * math.sqrt(max(parameter.shape)))


def gathered(local: Tensor, parameter: Tensor) -> Tensor:
    """Return the full tensor whose shards are sharded as `parameter` is. A collective."""
    if not isinstance(parameter, DTensor):
        return local
    sharded = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return unsharded(sharded)


def own_shard(full: Tensor, parameter: Tensor) -> Tensor:
    """Return the shard of a full tensor that this rank has of `parameter`: a view."""
    box = local_box(parameter)
    for dim, (start, length) in enumerate(zip(box.start, box.length, strict=True)):
        full = full.narrow(dim, start, length)
    return full


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U f(S) Vᵀ of a matrix U S Vᵀ, (rows, columns).

    f of a singular value is between 0.6 and 1.3, unless the value is small compared with the others.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    # The smaller of x xᵀ and xᵀ x is computed.
    wide = matrix.T if is_tall else matrix
    # No singular value is larger than the norm: after the division all are at most 1.
    x = wide / wide.norm().clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def hidden_matrices(model: ParallelModel, plan: Plan) -> list[nn.Parameter]:
    """Return the parameters of two dims that belong neither to an embedding nor to the output matrix."""
    embeddings = set()
    for stage in model.modules.values():
        for name, module in stage.named_modules():
            if isinstance(module, nn.Embedding):
                embeddings.add(canonical_name(name))
    hidden = []
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2:
            continue
        # A tied weight has several names, and belongs to the module of each.
        names = [name]
        for alias, first in model.tied_aliases.items():
            if first == name:
                names.append(alias)
        is_hidden = True
        for parameter_name in names:
            owner = parameter_name.rpartition(".")[0]
            if owner in embeddings or matches(plan.output, owner):
                is_hidden = False
        if is_hidden:
            hidden.append(parameter)
    return hidden


def make_muon(
    model: ParallelModel,
    plan: Plan,
    lr: float,
    weight_decay: float | None = None,
    decayed: str = "all",
    betas: tuple[float, float] | None = None,
) -> Muon:
    """Make Muon for the `hidden_matrices` of a model, with AdamW for the rest.

    Args:
        model: the parallelized model.
        plan: its plan, which names the output matrix.
        lr, weight_decay, decayed, betas: as in `make_optimizer`.
    """
    # PyTorch warns that a matrix which two axes shard is gathered in two turns: that is fine here.
    ignore_gathers_in_turns()
    matrices = hidden_matrices(model, plan)
    ids = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    groups = [group | {"muon": True} for group in groups_of(matrices, weight_decay)]
    groups += groups_of(rest, weight_decay, decayed)
    return Muon(groups, lr=lr, betas=betas or BETAS, fused=fused(groups))
