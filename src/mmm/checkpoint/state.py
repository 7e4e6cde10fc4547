"""A run's tensors by name, for ``torch.distributed.checkpoint`` (DCP): what to save, and where to load it.

Names are those of the full model, and DTensors say which shard is local. So a checkpoint does not depend on the layout
that it was saved on: on another layout DCP reads the parts that each rank needs.
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
from mmm.checkpoint.storage import Reader, one_line, read_metadata
from mmm.errors import CheckpointError

# The group of tensors that holds a trainer's weights.
MODEL = "model"
# What an optimizer keeps for its parameters, such as ``moments["layers.0.attention.wq.weight"]["exp_avg"]``.
Moments = dict[str, dict[str, Tensor]]


def tensors_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> Moments:
    """The tensors that an optimizer keeps for each of these parameters; a parameter without any is left out."""
    tensors: Moments = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        moments = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if moments:
            tensors[name] = moments
    return tensors


def shapes_of(metadata: Metadata) -> dict[tuple[str, ...], Any]:
    """What a checkpoint holds: ("model", name) or ("optimizer", parameter, key) → DCP's description of the tensor."""
    # DCP calls a tensor by its path with dots; planner_data has the path itself, which a name with dots needs.
    paths: Mapping[str, tuple] = metadata.planner_data or {}
    shapes = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = paths.get(name, (name,))
        shapes[tuple(path)] = entry
    return shapes


def metadata_on_all(folder: Path, files: Mapping[str, FileSum]) -> Metadata:
    """Read a checkpoint's metadata on rank 0 and give it to every rank. A collective of all ranks.

    Raises:
        CheckpointError: the metadata cannot be read; raised on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read_metadata(folder, files)
    # Rank 0 broadcasts either the metadata or, as a text, why it cannot be read.
    sent: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            sent = [read_metadata(folder, files)]
        except CheckpointError as error:
            sent = [str(error)]
    dist.broadcast_object_list(sent)
    metadata_or_reason = sent[0]
    if isinstance(metadata_or_reason, str):
        raise CheckpointError(metadata_or_reason, on_every_rank=True)
    return metadata_or_reason


def read_tensors(
    folder: Path,
    metadata: Metadata,
    tensors: Mapping[str, Mapping[str, Tensor]],
    optimizers: Mapping[str, Mapping[str, Tensor]],
    into: Mapping[str, Moments] | None = None,
) -> dict[str, Moments]:
    """Read tensors in place, and read what each optimizer keeps for its parameters. A collective of all ranks.

    Args:
        metadata: the checkpoint's metadata, from `metadata_on_all`.
        tensors: the tensors to read into, by group and name.
        optimizers: the parameters of each optimizer, by group and name.
        into: tensors that the optimizers keep already, in the form that is returned; they are read in place.

    Returns:
        What the optimizers keep, by group, parameter and key, such as ``exp_avg``.

    Raises:
        CheckpointError: a tensor is missing, has another shape or cannot be read; raised on every rank.
    """
    moments: dict[str, Moments] = {group: {} for group in optimizers}
    for path, entry in shapes_of(metadata).items():
        if path[1] not in optimizers.get(path[0], ()):
            continue
        group, name, key = path
        dtype = entry.properties.dtype
        parameter = optimizers[group][name].detach()
        target = None
        if into is not None:
            target = into.get(group, {}).get(name, {}).get(key)
        if target is None or target.size() != entry.size or target.dtype != dtype:
            if entry.size == parameter.size():
                # Sharded as its parameter is.
                target = torch.empty_like(parameter, dtype=dtype)
            else:
                # Such as AdamW's step: a full tensor on every rank.
                target = torch.empty(entry.size, dtype=dtype)
        of_parameter = moments[group].setdefault(name, {})
        of_parameter[key] = target
    state = {**tensors, **moments}
    try:
        dcp.load(state, storage_reader=Reader(folder, metadata))
    except CheckpointException as error:
        raise failed(error, f"{folder} is not loaded") from None
    return moments


def give_state(optimizer: torch.optim.Optimizer, of_parameter: Mapping[int, dict[str, Any] | None]) -> None:
    """Restore what an optimizer keeps for each parameter, by the parameter's id."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = [of_parameter.get(id(parameter)) for parameter in parameters]
    # A state dict calls parameters by their index. Loading one puts each value on the device and into the dtype that
    # the optimizer wants.
    own = {index: state for index, state in enumerate(order) if state}
    state_dict = optimizer.state_dict()
    state_dict["state"] = own
    optimizer.load_state_dict(state_dict)


def failed(error: BaseException, problem: str) -> CheckpointError:
    """What to raise, on every rank, when DCP failed: a CheckpointError of a rank names the file already."""
    cause = first_failure(error)
    text = f"{problem}: {one_line(cause)}"
    if isinstance(cause, CheckpointError):
        text = str(cause)
    return CheckpointError(text, on_every_rank=True)


def first_failure(error: BaseException) -> BaseException:
    """The error of the first rank on which DCP failed; `error` itself if it does not come from DCP."""
    if isinstance(error, CheckpointException):
        for rank_error, _ in error.failures.values():
            return rank_error
    return error
