"""What objects of any kind have as their state dict, such as a scheduler of the learning rate: as JSON, which goes into
``checkpoint.json``; the tensors in it are saved beside the model's. No pickle is made of it, and none is read."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmm.errors import ConfigError

MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}


class SavedTensor(NamedTuple):
    """A tensor in a state dict, by its path in it. place: ``sharded`` (a DTensor), or where a full one lay, ``host`` or
    ``device``."""

    path: str
    shape: torch.Size
    dtype: torch.dtype
    place: str


def encode(value: Any, name: str, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A value as JSON has it, from which `decode` makes it again.

    Args:
        name: of the object, for messages. path: of the value in the object's state dict.
        tensors: those in the value are put here, by path.

    Raises:
        ConfigError: something in it is neither a number, a text, None or a tensor, nor a list, tuple or dict of those.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        if path in tensors:
            raise ConfigError(f"{name} of run.state(…) has two tensors that are called {path}", on_every_rank=True)
        tensors[path] = value
        place = "sharded" if isinstance(value, DTensor) else "host" if value.device.type == "cpu" else "device"
        return {"tensor": [path, list(value.shape), str(value.dtype).removeprefix("torch."), place]}
    if type(value) in (list, tuple):
        items = [encode(each, name, tensors, f"{path}.{place}".lstrip(".")) for place, each in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) in MAPPINGS.values() and all(type(key) in (int, str) for key in value):
        pairs = [[key, encode(each, name, tensors, f"{path}.{key}".lstrip("."))] for key, each in value.items()]
        return {type(value).__name__: pairs}
    what = f"{path}, a {type(value).__name__}" if path else f"a {type(value).__name__}"
    raise ConfigError(
        f"{name} of run.state(…) cannot be saved: its state dict has {what}; it may have numbers, texts, None and "
        "tensors, in lists, tuples and dicts",
        on_every_rank=True,
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `encode` was given.

    Args:
        tensors: by path.

    Raises:
        ValueError, TypeError, KeyError: `encode` has not made it.
    """
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "tuple":
        return tuple(decode(each, tensors) for each in content)
    return MAPPINGS[kind]({key: decode(each, tensors) for key, each in content})


def saved_tensors(value: Any) -> Iterator[SavedTensor]:
    """The tensors in what `encode` has returned. Raises as `decode`."""
    if isinstance(value, list):
        for each in value:
            yield from saved_tensors(each)
    elif isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind != "tensor":
            yield from saved_tensors(content)
            return
        path, shape, dtype, place = content
        if not isinstance(found := getattr(torch, dtype, None), torch.dtype):
            raise TypeError(f"{dtype} is no dtype")
        yield SavedTensor(path, torch.Size(shape), found, place)
