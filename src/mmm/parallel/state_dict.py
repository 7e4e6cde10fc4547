"""The values of a state dict, of which each rank reads its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmm.checkpoint.safetensors import SafetensorsFile
from mmm.checkpoint.state import one_line
from mmm.errors import CheckpointError, ConfigError
from mmm.nn.draw import ShardBox, canonical_name, full_box
from mmm.nn.weights import class_name
from mmm.outside import open_file
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.ties import find_ties
from mmm.parallel.values import NAMED, Values, names_in_message, shard_of

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
    tensors = {canonical_name(n): t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    of = class_name(unwrapped(model))
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
        f"it has no {names_in_message(lacking)} of {of}" if lacking else "",
        f"{of} has no {names_in_message(unknown)}" if unknown else "",
        ", ".join(wrong[:NAMED]) + (f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""),
    ]
    if any(problems):
        raise ConfigError(f"{source.text} does not fit: {'; '.join(filter(None, problems))}")
    chosen = {name: name for name in source.entries}
    for name, tie in ties.items():
        chosen[name], *others = [alias for alias in tie if alias in source.entries]
        for other in others:
            _check_one(source, chosen[name], other)

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
    kinds = [(dtype.is_complex, dtype.is_complex or dtype.is_floating_point) for dtype in (entry.dtype, wanted.dtype)]
    return "" if kinds[0] == kinds[1] else f"{name} is of {entry.dtype}, and in the model of {wanted.dtype}"


def _check_one(source: _Source, name: str, other: str) -> None:
    """Raises ConfigError where two names of a tied weight have different values."""
    boxes = [full_box(torch.empty(source.entries[alias].shape, device="meta")) for alias in (name, other)]
    a, b = (source.read(alias, box) for alias, box in zip((name, other), boxes, strict=True))
    if not torch.equal(a.cpu(), b.cpu()):
        raise ConfigError(
            f"{source.text} does not fit: {name} and {other} are one tied weight in the model, and differ there: untie "
            f"them in the model, or leave one of them out"
        )
