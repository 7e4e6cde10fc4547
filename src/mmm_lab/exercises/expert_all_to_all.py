"""Experts: tokens go to the rank that has theirs, and come back.

Each rank has one expert, and tokens of its own; a router has said which expert each token goes to. The numbers differ
from rank to rank, and may be 0. Every rank sorts its tokens by expert, sends them, lets its expert work on what has
come, sends that back, and puts it where the tokens were::

    tokens  a₀ b₁ c₀ d₁ ─ sort ─► a₀ c₀ | b₁ d₁ ─ all-to-all ─► expert ─ all-to-all ─► a c b d ─ unsort ─► a b c d

``all_to_all(x, send, receive, group)`` is given: rows of x to each rank, rows from each; backward sends gradients back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm_lab.exercises.check import Result, verified
from mmm_lab.exercises.tools import numbers, step_on_parts

FUNCTION = "route"
TEMPLATE = '''
import torch
import torch.distributed as dist

from mmm_lab.exercises.tools import all_to_all


def route(tokens, expert_of, expert, group):
    """Return what each token's expert makes of it, in the order of the tokens: (tokens, dim).

    Args:
        tokens: (tokens, dim) of this rank. expert_of: (tokens,), the rank within `group` whose expert each goes to.
        expert: this rank's own, (any number of tokens, dim) → the same shape.
    """
    raise NotImplementedError
'''
DIM = 8


class Experts(nn.Module):
    """Two linears with experts between them; a token's own features say which it goes to."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(4, DIM), nn.Linear(DIM, 3)
        self.experts = nn.ModuleDict({str(number): nn.Linear(DIM, DIM) for number in range(experts)})
        self.number, self.route = experts, None

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inlet(x).flatten(0, 1)
        expert_of = x.flatten(0, 1)[:, : self.number].argmax(-1)
        if self.route is None:
            every = torch.stack([torch.tanh(expert(tokens)) for expert in self.experts.values()])
            done = every[expert_of, torch.arange(len(tokens))]
        else:
            done = self.route(tokens, expert_of)
        return self.outlet(tokens + done).unflatten(0, x.shape[:2])


def check(route: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor], Any], Tensor]) -> Result:
    """One expert a rank."""
    said: list[str] = []
    for ranks in (2, 4):
        result = _on(ranks, route)
        said.append(result.text)
        if not result.right:
            break
    return Result(result.right, "\n".join(said))


def _on(ranks: int, route: Callable[..., Tensor]) -> Result:
    def parallelize(model: Experts, mesh: DeviceMesh) -> None:
        own = model.experts[str(mesh.get_local_rank())]
        model.experts = nn.ModuleDict({str(mesh.get_local_rank()): own})
        model.route = lambda tokens, expert_of: route(  # type: ignore[assignment]
            tokens, expert_of, lambda rows: torch.tanh(own(rows)), mesh.get_group()
        )

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        shared = [p for name, p in model.named_parameters() if "experts" not in name]
        return step_on_parts(model, batch, mesh, shared)

    return verified(
        FUNCTION,
        (f"ep{ranks}",),
        model_fn=lambda: Experts(ranks),
        parallelize_fn=parallelize,
        batch_fn=numbers,
        step_fn=step,
        batch_axes=["ep"],
    )
