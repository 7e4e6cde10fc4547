"""One unsharded state dict, which plain PyTorch loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.history.record.folder import cannot_write, keep_mode
from mmm.nn.draw import canonical_name
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.local import unsharded
from mmm.parallel.ties import find_ties
from mmm.run.run import Run
from mmm.torch_private.groups import ignore_gathers_in_turns

if TYPE_CHECKING:
    from mmm.parallel.parallel_model import ParallelModel


def save_model(run: Run, model: nn.Module | ParallelModel) -> Path | None:
    """Write ``model.pt`` into the run's folder: full tensors under their canonical names. A collective.

    Returns:
        The file, on rank 0; None elsewhere.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model.modules.values())
    # Ranks that hold the same layers put each tensor together; one of them keeps it, in its host's memory.
    at = run.layout.coordinates(run.rank.rank)
    keeper = not any(place for axis, place in at.items() if axis != "pp")
    # PyTorch warns that a tensor sharded twice is gathered in two turns: that is fine here.
    ignore_gathers_in_turns()
    state = {name: tensor.cpu() for name, tensor in full_tensors(modules) if keeper}
    state |= {name: state[first] for name, first in second_names(modules).items() if keeper}
    if run.layout.pp > 1 and keeper:
        assert not isinstance(model, nn.Module)  # which has no stages
        state = gather_stages(state, model.mesh["pp"], run.device)
        state |= {name: state[first] for name, first in model.tied_aliases.items() if state}
    if run.outdir is None:
        return None
    path = run.outdir / "model.pt"
    part = path.with_suffix(".part")
    try:
        torch.save(state, part)
        keep_mode(path, part)
        part.replace(path)
    except (OSError, RuntimeError) as error:  # a full disk is a RuntimeError of PyTorch's writer
        part.unlink(missing_ok=True)
        raise cannot_write(path, error if isinstance(error, OSError) else OSError("PyTorch's writer failed")) from None
    run.log.info("model: %s", path, stacklevel=2)
    return path


@torch.no_grad()
def full_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of this rank's modules, unsharded, one after the other; a tied weight once, under its first name. A
    collective of the ranks that have shards of them."""
    for module in modules:
        inner = unwrapped(module)
        again = {name for _, *others in find_ties(inner) for name in others}
        for name, tensor in inner.state_dict().items():
            if name not in again:
                yield canonical_name(name), unsharded(tensor)


def second_names(modules: Iterable[nn.Module]) -> dict[str, str]:
    """The further names of tied weights, and the first of each."""
    ties = [tie for module in modules for tie in find_ties(unwrapped(module))]
    return {canonical_name(name): canonical_name(first) for first, *others in ties for name in others}


def gather_stages(state: dict[str, Tensor], pp: DeviceMesh, device: torch.device) -> dict[str, Tensor]:
    """The tensors of all stages, on the first rank of pp; on the others nothing. A collective over pp."""
    group, stage, first = pp.get_group(), pp.get_local_rank(), dist.get_global_rank(pp.get_group(), 0)
    heads: list = [None] * pp.size()
    dist.all_gather_object(heads, {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}, group=group)
    if stage:
        for tensor in state.values():
            dist.send(tensor.contiguous().to(device), first, group=group)
        return {}
    for other in range(1, pp.size()):
        for name, (shape, dtype) in heads[other].items():
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, dist.get_global_rank(group, other), group=group)
            state[name] = tensor.cpu()
    return state
