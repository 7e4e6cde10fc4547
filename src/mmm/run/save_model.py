"""One unsharded state dict, which plain PyTorch loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmm.history.record.folder import cannot_write, keep_mode
from mmm.nn.init import canonical_name
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.local import unsharded
from mmm.parallel.mesh import Mesh
from mmm.parallel.ties import find_ties
from mmm.run.run import Run
from mmm.torch_private.groups import ignore_gathers_in_turns

if TYPE_CHECKING:
    from mmm.parallel.parallel_model import ParallelModel


def save_model(run: Run, model: nn.Module | ParallelModel) -> Path | None:
    """Write ``model.pt`` into the run's folder: full tensors under their canonical names. A collective.

    Returns:
        The file, on rank 0; None on the others.
    """
    if isinstance(model, nn.Module):
        modules = [model]
    else:
        modules = list(model.modules.values())
    # Ranks that hold the same layers gather each tensor; the first of them keeps it, in the memory of its host.
    coordinates = run.layout.coordinates(run.rank.rank)
    others = [coordinate for axis, coordinate in coordinates.items() if axis != "pp"]
    is_keeper = not any(others)
    # PyTorch warns that a tensor sharded twice is gathered in two turns: that is fine here.
    ignore_gathers_in_turns()
    state = {}
    for name, tensor in full_tensors(modules):
        if is_keeper:
            state[name] = tensor.cpu()
    if is_keeper:
        for name, first in second_names(modules).items():
            state[name] = state[first]
        if run.layout.pp > 1:
            # A plain module has no stages.
            assert not isinstance(model, nn.Module)
            state = gather_stages(state, model.mesh, run.device)
            # Empty on all stages but the first.
            if state:
                for name, first in model.tied_aliases.items():
                    state[name] = state[first]
    if run.outdir is None:
        return None
    path = run.outdir / "model.pt"
    unfinished = path.with_suffix(".part")
    try:
        torch.save(state, unfinished)
        keep_mode(path, unfinished)
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        unfinished.unlink(missing_ok=True)
        # PyTorch's writer raises RuntimeError when the disk is full.
        reason = error if isinstance(error, OSError) else OSError("PyTorch's writer failed")
        raise cannot_write(path, reason) from None
    run.log.info("model: %s", path, stacklevel=2)
    return path


@torch.no_grad()
def full_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of this rank's modules, unsharded, one after the other; a tied weight only by its first name.

    A collective of the ranks that have shards of them.
    """
    for module in modules:
        inner = unwrapped(module)
        again = {name for _, *others in find_ties(inner) for name in others}
        for name, tensor in inner.state_dict().items():
            if name not in again:
                yield canonical_name(name), unsharded(tensor)


def second_names(modules: Iterable[nn.Module]) -> dict[str, str]:
    """The further names of tied weights, each with the first name."""
    names: dict[str, str] = {}
    for module in modules:
        for first, *others in find_ties(unwrapped(module)):
            names |= {canonical_name(name): canonical_name(first) for name in others}
    return names


def gather_stages(state: dict[str, Tensor], mesh: Mesh, device: torch.device) -> dict[str, Tensor]:
    """The tensors of all stages, on the first rank of pp; an empty dict on the others. A collective over pp.

    Args:
        state: tensors of this rank's stages, on the host.
        mesh: the mesh, with pp.
        device: where tensors are sent from.
    """
    own_heads = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    # By rank on pp.
    heads = mesh.gather("pp", own_heads)
    group = mesh["pp"].get_group()
    # The tensors are sent one by one, so that a rank holds one more than its own on the device.
    if mesh["pp"].get_local_rank() > 0:
        first = dist.get_global_rank(group, 0)
        for tensor in state.values():
            dist.send(tensor.contiguous().to(device), first, group=group)
        return {}
    for stage_rank in range(1, len(heads)):
        for name, (shape, dtype) in heads[stage_rank].items():
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, dist.get_global_rank(group, stage_rank), group=group)
            state[name] = tensor.cpu()
    return state
