"""Reads weights from a state dict, or from a file of one: each rank only its shards."""

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
from mmm.nn.init import ShardBox, canonical_name, class_name, full_box
from mmm.outside import open_file
from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.ties import find_ties
from mmm.parallel.values import Values, names_in_message, shard_of

StateDict = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class _Source:
    """Where the values of a state dict come from.

    Attributes:
        text: what it is, for messages.
        entries: by canonical name, objects with the ``shape`` and ``dtype`` of each tensor.
        read: function of (canonical name, box) that returns a shard.
    """

    text: str
    entries: Mapping[str, Any]
    read: Callable[[str, ShardBox], Tensor]


def loaded_values(model: nn.Module, weights: StateDict) -> Values:
    """The values of a state dict, of which each rank reads only its shards.

    Args:
        model: the model before it is parallelized. Its parameters may lie on the meta device.
        weights: a state dict, or a file of one: ``.safetensors``, or what ``torch.save`` has written, such as a run's
            ``model.pt``.

    Raises:
        ConfigError: names are missing, or are not in the model, or shapes differ.
        CheckpointError: a file cannot be read.
    """
    model_tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            model_tensors[canonical_name(name)] = tensor
    # Each name of a tied weight, and its first name.
    first_names: dict[str, str] = {}
    for tie in find_ties(model):
        for name in tie:
            first_names[canonical_name(name)] = canonical_name(tie[0])
    if isinstance(weights, Mapping):
        source = _of_mapping(weights)
    else:
        source = _of_file(Path(weights))
    # Maps the first name of a tensor to its name in the source.
    source_names: dict[str, str] = {}
    # Pairs of names that are one tied weight in the model.
    doubles: list[tuple[str, str]] = []
    unknown: list[str] = []
    mismatches: list[str] = []
    for name, entry in source.entries.items():
        if name not in model_tensors:
            unknown.append(name)
            continue
        mismatch = _mismatch(name, entry, model_tensors[name])
        if mismatch:
            mismatches.append(mismatch)
        first_name = first_names.get(name, name)
        if first_name in source_names:
            doubles.append((source_names[first_name], name))
        else:
            source_names[first_name] = name
    missing = []
    for name in model_tensors:
        first_name = first_names.get(name, name)
        if first_name not in source_names:
            missing.append(name)
    model_name = class_name(unwrapped(model))
    problems = []
    if missing:
        problems.append(f"it has no {names_in_message(missing)} of {model_name}")
    if unknown:
        problems.append(f"{model_name} has no {names_in_message(unknown)}")
    if mismatches:
        problems.append(names_in_message(mismatches))
    if problems:
        raise ConfigError(f"{source.text} does not fit: {'; '.join(problems)}")
    for name, other in doubles:
        _check_equal(source, name, other)

    def read(name: str, box: ShardBox) -> Tensor | None:
        if name not in source_names:
            return None
        return source.read(source_names[name], box)

    return read


def _of_mapping(weights: Mapping[str, Any], text: str = "the state dict in weights=") -> _Source:
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ConfigError(
                f"{text} is none: its {name!r} is a {kind}, not a tensor; where the state dict is inside, give that "
                f"(weights=torch.load(…)[…])"
            )
    tensors = {canonical_name(name): tensor.detach() for name, tensor in weights.items()}

    def read(name: str, box: ShardBox) -> Tensor:
        return shard_of(tensors[name], box)

    return _Source(text, tensors, read)


def _of_file(path: Path) -> _Source:
    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        names_in_file = {canonical_name(name): name for name in file.entries}
        entries = {name: file.entries[name_in_file] for name, name_in_file in names_in_file.items()}

        def read(name: str, box: ShardBox) -> Tensor:
            return file.read(names_in_file[name], box.start, box.length)

        return _Source(str(path), entries, read)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: give a file of a state dict, such as {path / 'model.pt'}")
    try:
        # A zip archive can be mapped, so that a rank reads only what it uses. PyTorch's format from before 1.6 cannot.
        with open_file(path) as file_start:
            is_zip = file_start.read(2) == b"PK"
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    # A file of something else may raise anything.
    except Exception as error:
        raise CheckpointError(f"{path} is not read as a state dict: {one_line(error)}") from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    return _of_mapping(state, str(path))


def _mismatch(name: str, entry: Any, tensor: Tensor) -> str:
    """Why an entry cannot be the value of `tensor`; empty where it can."""
    shape = list(entry.shape)
    model_shape = list(tensor.shape)
    if shape != model_shape:
        return f"{name} has shape {shape}, and in the model {model_shape}"
    if _kind(entry.dtype) != _kind(tensor.dtype):
        return f"{name} is of {entry.dtype}, and in the model of {tensor.dtype}"
    return ""


def _kind(dtype: torch.dtype) -> str:
    """The kind of a dtype. Values of one kind are cast to each other."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "integer"


def _check_equal(source: _Source, name: str, other: str) -> None:
    """Raises ConfigError where two names of a tied weight have different values."""
    # Both have the model's shape.
    shape = source.entries[name].shape
    box = full_box(torch.empty(shape, device="meta"))
    value = source.read(name, box).cpu()
    other_value = source.read(other, box).cpu()
    if not torch.equal(value, other_value):
        raise ConfigError(
            f"{source.text} does not fit: {name} and {other} are one tied weight in the model, and differ there: untie "
            f"them in the model, or leave one of them out"
        )
