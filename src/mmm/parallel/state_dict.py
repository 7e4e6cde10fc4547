"""The values of a state dict, of which each rank reads its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmm.checkpoint.safetensors import SafetensorsFile
from mmm.checkpoint.storage import one_line
from mmm.errors import CheckpointError, ConfigError
from mmm.nn.draw import ShardBox, canonical_name, class_name, full_box
from mmm.outside import open_file
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.ties import find_ties
from mmm.parallel.values import Values, names_in_message, shard_of

StateDict = str | Path | Mapping[str, Tensor]


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
            ``model.pt``), or a state dict.

    Raises:
        ConfigError: names that are missing or that the model lacks, or wrong shapes. CheckpointError: a file cannot be
            read.
    """
    wanted = {canonical_name(name): t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    first_names = {canonical_name(name): canonical_name(tie[0]) for tie in find_ties(model) for name in tie}
    source = _of_mapping(weights) if isinstance(weights, Mapping) else _of_file(Path(weights))
    chosen: dict[str, str] = {}  # a tensor's first name: its name in the source
    again: list[tuple[str, str]] = []  # two names of a tied weight
    unknown: list[str] = []
    wrong: list[str] = []
    for name, entry in source.entries.items():
        if name not in wanted:
            unknown.append(name)
            continue
        wrong += filter(None, [_mismatch(name, entry, wanted[name])])
        first = first_names.get(name, name)
        if first in chosen:
            again.append((chosen[first], name))
        else:
            chosen[first] = name
    lacking = [name for name in wanted if first_names.get(name, name) not in chosen]
    of = class_name(unwrapped(model))
    problems = [
        f"it has no {names_in_message(lacking)} of {of}" if lacking else "",
        f"{of} has no {names_in_message(unknown)}" if unknown else "",
        names_in_message(wrong),
    ]
    if any(problems):
        raise ConfigError(f"{source.text} does not fit: {'; '.join(filter(None, problems))}")
    for name, other in again:
        _check_one(source, name, other)

    def read(name: str, box: ShardBox) -> Tensor | None:
        return source.read(chosen[name], box) if name in chosen else None

    return read


def _of_mapping(weights: Mapping[str, Any], text: str = "the state dict in weights=") -> _Source:
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"{text} is none: its {name!r} is a {type(tensor).__name__}, and no tensor; where the state dict is "
                f"inside, give that (weights=torch.load(…)[…])"
            )
    tensors = {canonical_name(name): tensor.detach() for name, tensor in weights.items()}
    return _Source(text, tensors, lambda name, box: shard_of(tensors[name], box))


def _of_file(path: Path) -> _Source:
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


def _mismatch(name: str, entry: Any, wanted: Tensor) -> str:
    """What keeps a tensor from being the value of `wanted`; empty where nothing does."""
    if tuple(entry.shape) != tuple(wanted.shape):
        return f"{name} has shape {list(entry.shape)}, and in the model {list(wanted.shape)}"
    if _kind(entry.dtype) != _kind(wanted.dtype):
        return f"{name} is of {entry.dtype}, and in the model of {wanted.dtype}"
    return ""


def _kind(dtype: torch.dtype) -> str:
    """Numbers of one kind are cast to each other."""
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "integer"


def _check_one(source: _Source, name: str, other: str) -> None:
    """Raises ConfigError where two names of a tied weight have different values."""
    box = full_box(torch.empty(source.entries[name].shape, device="meta"))  # both have the model's shape
    if not torch.equal(source.read(name, box).cpu(), source.read(other, box).cpu()):
        raise ConfigError(
            f"{source.text} does not fit: {name} and {other} are one tied weight in the model, and differ there: untie "
            f"them in the model, or leave one of them out"
        )
