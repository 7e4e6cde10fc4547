"""State dicts of any object, such as a learning-rate scheduler, as JSON.

The JSON becomes a part of ``checkpoint.json``; tensors in the state dict are saved next to the model's. A pickle is
never written or read, because reading one may run code.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmm.errors import ConfigError

# Mappings that state dicts of PyTorch hold, by name. MultiStepLR has a Counter.
MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}


class SavedTensor(NamedTuple):
    """A tensor in a saved state dict.

    Attributes:
        path: where it stands in the state dict, such as ``state.0.exp_avg``.
        shape: shape of the full tensor.
        dtype: its data type.
        place: ``sharded`` for a DTensor; for a plain tensor ``host`` or ``device``, where it was when it was saved.
    """

    path: str
    shape: torch.Size
    dtype: torch.dtype
    place: str


def encode(value: Any, name: str, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Turn a value into JSON, from which `decode` makes it again.

    Args:
        name: name of the object, for messages.
        tensors: receives the tensors in the value, by path.
        path: where the value stands in the object's state dict.

    Raises:
        ConfigError: a value in it is not a number, text, None or tensor, or a list, tuple or dict of those.
    """
    # type(…), not isinstance: a subclass would come back as its base class.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):
        # NumPy's float64 is a float.
        return float(value)
    if isinstance(value, Tensor):
        if path in tensors:
            raise ConfigError(f"{name} of run.state(…) has two tensors that are called {path}", on_every_rank=True)
        tensors[path] = value
        if isinstance(value, DTensor):
            place = "sharded"
        elif value.device.type == "cpu":
            place = "host"
        else:
            place = "device"
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [path, list(value.shape), dtype, place]}
    if kind in (list, tuple):
        items = []
        for index, item in enumerate(value):
            item_path = f"{path}.{index}".lstrip(".")
            items.append(encode(item, name, tensors, item_path))
        if kind is list:
            return items
        return {"tuple": items}
    is_mapping = kind in MAPPINGS.values()
    if is_mapping and all(type(key) in (int, str) for key in value):
        # Pairs, not a JSON object, whose keys are texts only.
        pairs = []
        for key, item in value.items():
            item_path = f"{path}.{key}".lstrip(".")
            pairs.append([key, encode(item, name, tensors, item_path)])
        return {kind.__name__: pairs}
    description = f"a {kind.__name__}"
    if path:
        description = f"{path}, a {kind.__name__}"
    raise ConfigError(
        f"{name} of run.state(…) cannot be saved: its state dict has {description}; it may have numbers, texts, None "
        "and tensors, in lists, tuples and dicts",
        on_every_rank=True,
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Make the value again that `encode` was given.

    Args:
        tensors: the saved tensors by path.

    Raises:
        ValueError, TypeError, KeyError: the JSON was not made by `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    # Every JSON object that `encode` makes has one name, which says its kind.
    ((kind, content),) = value.items()
    if kind == "tensor":
        path = content[0]
        return tensors[path]
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    make = MAPPINGS[kind]
    return make({key: decode(item, tensors) for key, item in content})


def saved_tensors(value: Any) -> Iterator[SavedTensor]:
    """Find the tensors in what `encode` returned. Raises the same errors as `decode`."""
    if isinstance(value, list):
        for item in value:
            yield from saved_tensors(item)
    elif isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind != "tensor":
            yield from saved_tensors(content)
            return
        path, shape, dtype_name, place = content
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{dtype_name} is not a dtype")
        yield SavedTensor(path, torch.Size(shape), dtype, place)
