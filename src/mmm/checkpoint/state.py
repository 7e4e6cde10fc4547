"""A run's tensors by name, for `torch.distributed.checkpoint`: what to save, and where to load to.

Names are those of the full model, and DTensors say which part is local: so a checkpoint does not know the layout that
it was saved on, and DCP reads of it what another one needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from mmm.checkpoint.manifest import FileSum
from mmm.checkpoint.storage import Reader, read_metadata
from mmm.errors import CheckpointError

MODEL = "model"  # the group of tensors that a trainer's weights are in


def tensors_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What an optimizer keeps for each of these parameters, where it keeps tensors."""
    state = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    tensors = {name: {key: x for key, x in of.items() if isinstance(x, Tensor)} for name, of in state.items()}
    return {name: of for name, of in tensors.items() if of}


def shapes_of(found: Metadata) -> dict[tuple[str, ...], Any]:
    """What a checkpoint has: ("model", name), or ("optimizer", parameter, key) → DCP's description of the tensor."""
    paths: Mapping[str, tuple] = found.planner_data or {}
    return {tuple(paths.get(name, (name,))): entry for name, entry in found.state_dict_metadata.items()}


def metadata_on_all(folder: Path, files: Mapping[str, FileSum]) -> Metadata:
    """A checkpoint's metadata, which rank 0 reads. A collective.

    Raises:
        CheckpointError: they cannot be read; on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read_metadata(folder, files)
    sent: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            sent = [read_metadata(folder, files)]
        except CheckpointError as error:
            sent = [str(error)]
    dist.broadcast_object_list(sent)
    if isinstance(sent[0], str):
        raise CheckpointError(sent[0], on_every_rank=True)
    return sent[0]


def read_tensors(
    folder: Path,
    found: Metadata,
    tensors: Mapping[str, Mapping[str, Tensor]],
    optimizers: Mapping[str, Mapping[str, Tensor]],
    into: Mapping[str, Mapping[str, Mapping[str, Tensor]]] | None = None,
) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Read groups of tensors, in place, and of each optimizer what it keeps for these parameters. A collective.

    Args:
        found: of `metadata_on_all`. tensors: by group and name. optimizers: their parameters, likewise.
        into: what optimizers keep already, as is returned: read in place.

    Returns:
        By optimizer, parameter, and as the optimizer calls it.
    """
    moments: dict[str, dict[str, dict[str, Tensor]]] = {group: {} for group in optimizers}
    for path, entry in shapes_of(found).items():
        if path[1] in optimizers.get(path[0], ()):
            group, name, key = path
            parameter, dtype = optimizers[group][name].detach(), entry.properties.dtype
            same = entry.size == parameter.size()  # sharded as its parameter is
            there = (into or {}).get(group, {}).get(name, {}).get(key)
            if there is None or (there.size(), there.dtype) != (entry.size, dtype):
                there = torch.empty_like(parameter, dtype=dtype) if same else torch.empty(entry.size, dtype=dtype)
            moments[group].setdefault(name, {})[key] = there
    state = {**tensors, **moments}
    try:
        dcp.load(state, storage_reader=Reader(folder, found))
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        text = str(first) if isinstance(first, CheckpointError) else f"{folder} is not loaded: {one_line(first)}"
        raise CheckpointError(text, on_every_rank=True) from None
    return moments


def give_state(optimizer: torch.optim.Optimizer, of_parameter: Mapping[int, dict[str, Any] | None]) -> None:
    """Let an optimizer go on with what it keeps for each parameter, by the parameter's id."""
    order = [of_parameter.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    # PyTorch's own way in: it puts each value on the device, and into the dtype, that the optimizer wants.
    own = {number: state for number, state in enumerate(order) if state}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0] or type(error).__name__
