"""The values that a model of a user's own starts with: those of its constructor, or of a state dict, shard by shard."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from mmm.errors import CheckpointError, ConfigError
from mmm.models.meta import kept_value, pop_value
from mmm.models.weights import ShardBox, canonical_name, full_box
from mmm.outside import open_file
from mmm.parallel.local import to_local
from mmm.parallel.ties import find_ties
from mmm.runtime.log import get_logger

Values = Callable[[str, ShardBox], Tensor | None]
"""(canonical name, the shard that is local) → the shard, on any device and in any dtype; None for a buffer that keeps
what it has. A tied weight is asked for once, under its first name."""
StateDict = str | Path | Mapping[str, Tensor] | Callable[[str], Tensor | None]
NAMED = 3  # tensors that a message names


def check_sizes(model: nn.Module) -> None:
    """Raises ConfigError where a module of PyTorch's lazy ones does not know its sizes yet."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(f"{_names(lazy)} of {class_name(model)} would get its shape from the first input: give sizes")


def constructed_values(model: nn.Module, mesh: DeviceMesh | None) -> Values | None:
    """What the constructor of `model` has put into its parameters (`mmm.models.meta`), each kept until it is asked for.
    None where nothing was kept.

    A collective over `mesh`: where ranks have made different values, those of the first are taken, and that is said.

    Raises:
        ConfigError: some parameters have no values; or the ranks have made different modules.
    """
    owners = {name: _owner(model, name) for name, _ in model.named_parameters()}
    lacking = [name for name, owner in owners.items() if kept_value(*owner) is None]
    if lacking and len(lacking) < len(owners):
        raise ConfigError(
            f"parameter {canonical_name(lacking[0])} of {class_name(model)} has no values, and others have: construct "
            f'all of them on the CPU, with their sizes; or say where values come from, by weights= or init="by_name"'
        )
    if lacking:
        return None
    by_name = {canonical_name(name): owner for name, owner in owners.items()}
    buffers = {canonical_name(name): to_local(buffer) for name, buffer in model.named_buffers()}
    differs = _constructed_differently(model, by_name, buffers, mesh)

    def read(name: str, box: ShardBox) -> Tensor | None:
        full = pop_value(*by_name[name]) if name in by_name else None
        if name in differs:
            assert mesh is not None
            full = _of_first_rank(buffers[name] if full is None else full, mesh)
        return None if full is None else _shard(full, box)

    return read


def _constructed_differently(
    model: nn.Module,
    owners: Mapping[str, tuple[nn.Module, str]],
    buffers: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
) -> set[str]:
    """The names whose values are not the same on all ranks of `mesh`. A collective over it."""
    if mesh is None or mesh.size() == 1:
        return set()
    kept = {name: kept_value(*owner) for name, owner in owners.items()}
    named = [(name, tensor) for name, tensor in (*kept.items(), *buffers.items()) if tensor is not None]
    described = "".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n" for name, tensor in named)
    if _differs([zlib.crc32(described.encode())], mesh):
        raise ConfigError(
            f"ranks have constructed {class_name(model)} with different parameters or buffers: what it is made of may "
            f"not depend on the rank",
            on_every_rank=True,
        )
    names = [named[place][0] for place in _differs([_checksum(tensor) for _, tensor in named], mesh)]
    if names and dist.get_rank() == 0:
        get_logger().warning(
            "ranks have constructed %s of %s with different values: those of the first rank are taken; seed all ranks "
            "alike before, as build_model does, and let no constructor depend on the rank or the time",
            _names(names),
            class_name(model),
        )
    return set(names)


def _of_first_rank(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor of the first rank of `mesh`. A collective over it."""
    copy = tensor.detach().to(mesh.device_type, memory_format=torch.contiguous_format, copy=True)
    for axis in range(mesh.ndim):
        dist.broadcast(copy.view(-1).view(torch.uint8), group=mesh.get_group(axis), group_src=0)
    return copy


def _differs(numbers: list[int], mesh: DeviceMesh) -> list[int]:
    """The places at which the ranks of `mesh` have other numbers. A collective."""
    low, high = (torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type) for _ in range(2))
    for axis in range(mesh.ndim):
        dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group(axis))
        dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return (low != high).nonzero().flatten().tolist()


def _checksum(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")  # which `fully_shard` puts before it


@dataclass(frozen=True)
class _Source:
    """A state dict.

    Attributes:
        text: for messages. entries: by canonical name, with ``shape`` and ``dtype``. read: the shard of one.
    """

    text: str
    entries: Mapping[str, Any]
    read: Callable[[str, ShardBox], Tensor]


def loaded_values(model: nn.Module, weights: StateDict) -> Values:
    """The values of a state dict, of which each rank reads its shards.

    Args:
        model: before it is parallelized; its parameters may lie on the meta device.
        weights: a file (``.safetensors``, or what ``torch.save`` has written of a state dict, such as a run's
            ``model.pt``), a state dict, or a function from a name to the full tensor, which is called for one after
            the other; None for a buffer that keeps what the constructor gave it.

    Raises:
        ConfigError: names that are missing or that the model lacks, or wrong shapes. CheckpointError: a file cannot be
            read.
    """
    tensors = {canonical_name(n): t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    buffers = {canonical_name(name) for name, _ in model.named_buffers()}
    of = type(model).__name__
    if callable(weights):
        return _asked_of(weights, of, tensors, buffers)
    source = _of_mapping(weights) if isinstance(weights, Mapping) else _of_file(Path(weights))
    ties = {canonical_name(tie[0]): tuple(map(canonical_name, tie)) for tie in find_ties(model)}
    first = {name: firsts for firsts, tie in ties.items() for name in tie}
    present = {first.get(name, name) for name in source.entries}
    lacking = [name for name in tensors if first.get(name, name) not in present]
    unknown = [name for name in source.entries if name not in tensors]
    wrong = [
        problem
        for name, entry in source.entries.items()
        if name in tensors and (problem := _mismatch(name, entry, tensors[name]))
    ]
    problems = [
        f"it has no {_names(lacking)} of {of}" if lacking else "",
        f"{of} has no {_names(unknown)}" if unknown else "",
        ", ".join(wrong[:NAMED]) + (f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""),
    ]
    if any(problems):
        raise ConfigError(f"{source.text} does not fit: {'; '.join(filter(None, problems))}")
    chosen = {name: name for name in source.entries}
    for name, tie in ties.items():
        chosen[name], *others = [each for each in tie if each in source.entries]
        for other in others:
            _check_one(source, chosen[name], other)

    def read(name: str, box: ShardBox) -> Tensor | None:
        return source.read(chosen[name], box) if name in chosen else None

    return read


def _asked_of(weights: Callable, of: str, tensors: Mapping[str, Tensor], buffers: set[str]) -> Values:
    def read(name: str, box: ShardBox) -> Tensor | None:
        if name not in tensors:
            return None  # a buffer that no state dict has
        full = weights(name)
        if full is None and name in buffers:
            return None
        if not isinstance(full, Tensor):
            raise ConfigError(f"weights({name!r}) of {of} returned {type(full).__name__}, and has to return its tensor")
        if problem := _mismatch(name, full, tensors[name]):
            raise ConfigError(f"weights({name!r}) does not fit: {problem}")
        return _shard(full.detach(), box)

    return read


def _of_mapping(weights: Mapping[str, Any], text: str = "the state dict in weights=") -> _Source:
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{text} is none: its {name!r} is a {type(tensor).__name__}, and no tensor; where the state dict is "
                f"inside, give that (weights=torch.load(…)[…])"
            )
    tensors = {canonical_name(name): tensor.detach() for name, tensor in weights.items()}
    return _Source(text, tensors, lambda name, box: _shard(tensors[name], box))


def _of_file(path: Path) -> _Source:
    from mmm.checkpoint.safetensors import SafetensorsFile  # and with it all of PyTorch's distributed checkpoints
    from mmm.checkpoint.state import one_line

    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        names = {canonical_name(name): name for name in file.entries}
        entries = {name: file.entries[own] for name, own in names.items()}
        return _Source(str(path), entries, lambda name, box: file.read(names[name], box.start, box.length))
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: give a file of a state dict, such as {path / 'model.pt'}")
    try:
        with open_file(path) as opened:
            mapped = opened.read(2) == b"PK"  # else PyTorch's format of before 1.6, which is read as one
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # what is no such file raises anything
        raise CheckpointError(f"{path} is not read as a state dict: {one_line(error)}") from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, and no state dict")
    return _of_mapping(state, str(path))


def _shard(full: Tensor, box: ShardBox) -> Tensor:
    return full[tuple(slice(start, start + length) for start, length in zip(box.start, box.length, strict=True))]


def _mismatch(name: str, entry: Any, wanted: Tensor) -> str:
    """What keeps a tensor from being the value of `wanted`; empty where nothing does."""
    if tuple(entry.shape) != tuple(wanted.shape):
        return f"{name} has shape {list(entry.shape)}, and in the model {list(wanted.shape)}"
    kinds = [(dtype.is_complex, dtype.is_complex or dtype.is_floating_point) for dtype in (entry.dtype, wanted.dtype)]
    return "" if kinds[0] == kinds[1] else f"{name} is of {entry.dtype}, and in the model of {wanted.dtype}"


def _check_one(source: _Source, name: str, other: str) -> None:
    """Raises ConfigError where two names of a tied weight have different values."""
    boxes = [full_box(torch.empty(source.entries[each].shape, device="meta")) for each in (name, other)]
    a, b = (source.read(each, box) for each, box in zip((name, other), boxes, strict=True))
    if not torch.equal(a.cpu(), b.cpu()):
        raise ConfigError(
            f"{source.text} does not fit: {name} and {other} are one tied weight in the model, and differ there: untie "
            f"them in the model, or leave one of them out"
        )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" (and {len(names) - NAMED} more)" if len(names) > NAMED else "")
