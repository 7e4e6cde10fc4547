"""Whether the ranks' gradients of a parameter that each of them has are the same, or partial sums, as a plan says."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm.errors import LayoutError
from mmm.torch_private.module import is_fake


class GradientCheck:
    """Compares the ranks' gradients of parameters, until it is known of each that they are as they have to be: here
    the same."""

    def __init__(self, mesh: DeviceMesh, path: str) -> None:
        self.mesh, self.path = mesh, path
        self.compared: set[str] = set()

    def watch(self, name: str, local: Tensor) -> Tensor:
        """Before a forward that computes with `local`, which is returned."""
        watched = name not in self.compared and local.requires_grad and torch.is_grad_enabled()
        if watched and not torch.compiler.is_compiling():  # `mmm.parallel.own_plan` says what is not compared
            local.register_hook(partial(self.compare, name))
        return local

    def compare(self, name: str, local: Tensor) -> None:
        """A collective over tp."""
        sizes = None if name in self.compared else difference(local, self.mesh)
        if sizes and (wrong := self.judge(name, local, *sizes)):
            path = f"{self.path}.{name}".lstrip(".")
            raise LayoutError(f"tp {self.mesh.size()}: {path} is {wrong}", on_every_rank=True)

    def judge(self, name: str, local: Tensor, off: float, size: float) -> str:
        """What is wrong with a gradient that is off by so much between the ranks; empty where nothing is."""
        self.compared.add(name)
        if off <= torch.finfo(local.dtype).eps ** 0.5 * size:
            return ""
        return (
            f"Replicated(), and the ranks' gradients of it are not the same (off by {off:.1e}, the largest is "
            f"{size:.1e}): where each rank computes on its own heads, channels or tokens, as between a matrix sharded "
            f"by columns and one by rows, the plan has to say PartialGradient(), which adds the gradients up"
        )


@torch.no_grad()
def difference(local: Tensor, mesh: DeviceMesh) -> tuple[float, float] | None:
    """How far a tensor is off that of the first rank, at most, and the largest element there; None where all are zero
    or one is no number. A collective over `mesh`: the same on each rank."""
    if is_fake(local):
        return None
    if local.is_complex():  # collectives find no maximum of complex numbers
        local = torch.view_as_real(local)
    group, first = mesh.get_group(), local.detach().contiguous().clone()
    dist.broadcast(first, group=group, group_src=0)
    finite = local.isfinite().all() & first.isfinite().all()
    facts = torch.stack([(local - first).abs().max(), first.abs().max(), (~finite).to(local.dtype)]).nan_to_num()
    dist.all_reduce(facts, dist.ReduceOp.MAX, group=group)
    off, size, not_finite = facts.tolist()
    return None if not_finite or size == off == 0 else (off, size)
