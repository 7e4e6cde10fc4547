"""Experts: tokens go to the rank that has theirs, and come back.

Each rank has one expert, and tokens of its own. A router has said which expert each token goes to. How many go to an
expert differs from rank to rank, and may be 0. Every rank sorts its tokens by expert, sends them, lets its expert work
on what has come, sends that back, and puts it where the tokens were::

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
from mmm_lab.exercises.tools import make_numbers, step_on_shards

FUNCTION = "route"
TEMPLATE = '''
import torch
import torch.distributed as dist

from mmm_lab.exercises.tools import all_to_all


def route(tokens, expert_of, expert, group):
    """Return what each token's expert makes of it, in the order of the tokens: (tokens, dim).

    Args:
        tokens: (tokens, dim), those of this rank.
        expert_of: (tokens,), the rank within `group` whose expert each token goes to.
        expert: this rank's expert, (any number of tokens, dim) → the same shape.
    """
    raise NotImplementedError
'''
DIM = 8


class Experts(nn.Module):
    """Two linears with experts between them: (batch, tokens, 4) → (batch, tokens, 3).

    A token's own features say which expert it goes to.
    """

    def __init__(self, n_experts: int) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.inlet = nn.Linear(4, DIM)
        self.outlet = nn.Linear(DIM, 3)
        # By name: a rank keeps one, which has to keep its name.
        self.experts = nn.ModuleDict({str(index): nn.Linear(DIM, DIM) for index in range(n_experts)})
        self.route: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inlet(x).flatten(0, 1)  # (batch · tokens, DIM)
        expert_of = x.flatten(0, 1)[:, : self.n_experts].argmax(-1)  # (batch · tokens,)
        if self.route is not None:
            out = self.route(tokens, expert_of)
        else:
            # (experts, batch · tokens, DIM): every expert works on all tokens, and each token takes its own.
            by_expert = [torch.tanh(expert(tokens)) for expert in self.experts.values()]
            out = torch.stack(by_expert)[expert_of, torch.arange(len(tokens))]
        y = self.outlet(tokens + out)
        return y.unflatten(0, x.shape[:2])


def check(route: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor], Any], Tensor]) -> Result:
    """Give each rank one expert, and route tokens by the answer."""
    on_two = _check_on(2, route)
    if not on_two.right:
        return on_two
    on_four = _check_on(4, route)
    return Result(on_four.right, f"{on_two.text}\n{on_four.text}")


def _check_on(ranks: int, route: Callable[..., Tensor]) -> Result:
    def parallelize(model: Experts, mesh: DeviceMesh) -> None:
        name = str(mesh.get_local_rank())
        linear = model.experts[name]
        model.experts = nn.ModuleDict({name: linear})

        def expert(tokens: Tensor) -> Tensor:
            return torch.tanh(linear(tokens))

        model.route = lambda tokens, expert_of: route(tokens, expert_of, expert, mesh.get_group())

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
        # An expert's gradient is complete: its rank has seen all of its tokens.
        shared = [parameter for name, parameter in model.named_parameters() if "experts" not in name]
        return step_on_shards(model, batch, mesh, shared)

    return verified(
        FUNCTION,
        (f"ep{ranks}",),
        model_fn=lambda: Experts(ranks),
        parallelize_fn=parallelize,
        batch_fn=make_numbers,
        step_fn=step,
        batch_axes=["ep"],
    )
