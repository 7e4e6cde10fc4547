"""What verify has to be told about a framework that does not keep its state where PyTorch does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm_verify.errors import ConfigError, describe, is_for_user
from mmm_verify.shards import LocalShard, canonical_name

# Every message about a fault of an adapter begins with this: the program is not to blame for it.
FAULT = "--adapter: "


@dataclass(frozen=True)
class Adapter:
    """Tells verify where a framework keeps what PyTorch keeps in parameters, in ``grad`` and in DTensors.

    Every function is optional. All ranks call each function at the same points, so it may communicate. On one device,
    only `environment` is called: the model there is a plain module.

    Attributes:
        environment: (rank, mesh) → a context manager in which a program lives, with the framework's process groups or
            environment variables. The mesh is None around the model on one device, which each rank makes too.
        gradients: program → gradients by parameter name, after backward, for parameters whose gradient is not in
            ``grad``. A gradient may be full, a DTensor, or local in the same way as its weight; None if there is none.
        weights: program → tensors by parameter name, for parameters that do not hold their value themselves. It is
            called before the first step and after each step.
        name: (rank, name) → the name on one device of a parameter, a buffer or a module of this rank.
        place: (name, tensor) → which part of the full tensor a plain parameter or buffer of this rank is: for each dim,
            the indices that are local, in the order in which they lie in memory, or None for all of them. Indices past
            the end of the full tensor are padding, and come last. None instead of all this if verify has to find out.
    """

    environment: Callable[[int, DeviceMesh | None], AbstractContextManager[Any]] | None = None
    gradients: Callable[[Any], Mapping[str, Tensor | None]] | None = None
    weights: Callable[[Any], Mapping[str, Tensor]] | None = None
    name: Callable[[int, str], str] | None = None
    place: Callable[[str, Tensor], Sequence[Sequence[int] | Tensor | None] | None] | None = None


# For a program whose weights and gradients are where PyTorch has them.
NO_ADAPTER = Adapter()


@contextlib.contextmanager
def blamed(function: str) -> Iterator[None]:
    """Inside, an error is reported as one of this function of the adapter. Raises ConfigError."""
    try:
        yield
    # The adapter is a user's code: it may raise anything.
    except Exception as error:
        if is_for_user(error):
            raise
        raise ConfigError(f"{FAULT}its {function} raises {describe(error)}") from error


@contextlib.contextmanager
def inside_environment(adapter: Adapter, rank: int, mesh: DeviceMesh | None) -> Iterator[None]:
    """Inside, a program lives in the adapter's environment. See `Adapter.environment`."""
    with contextlib.ExitStack() as stack:
        if adapter.environment is not None:
            with blamed("environment"):
                stack.enter_context(adapter.environment(rank, mesh))
        yield


def tensors_by_name(
    function: Callable[[Any], Mapping[str, Tensor | None]] | None,
    kind: str,
    program: Any,
    known: Sequence[str],
) -> dict[str, Tensor | None]:
    """Call an adapter's `gradients` or `weights`.

    Args:
        function: the adapter's function; None if it has none.
        kind: its name, for messages.
        program: what the ranks run.
        known: the names that it may use.

    Raises:
        ConfigError: it fails, or does not return tensors by the names of the program.
    """
    if function is None:
        return {}
    with blamed(kind):
        tensors = function(program)
    if not isinstance(tensors, Mapping):
        returned = type(tensors).__name__
        raise ConfigError(f"{FAULT}its {kind} returns {returned}: it has to return a dict, name → tensor")
    by_name: dict[str, Tensor | None] = {}
    for full_name, tensor in tensors.items():
        # Frameworks wrap modules: their names have components that the model's have not.
        name = canonical_name(full_name)
        if name not in known:
            raise ConfigError(
                f"{FAULT}its {kind} returns {name}, which the program has not: its names are those of "
                f"named_parameters(), such as {known[0]}"
            )
        if not isinstance(tensor, Tensor | None):
            returned = type(tensor).__name__
            raise ConfigError(f"{FAULT}its {kind} returns {returned} for {name}: return a tensor")
        by_name[name] = tensor
    return by_name


def shard_of(adapter: Adapter, name: str, tensor: Tensor) -> LocalShard | None:
    """Which part of the full tensor a plain tensor is, by the adapter's `place`. None if that does not say.

    Raises:
        ConfigError: `place` fails, or what it returns does not fit the tensor.
    """
    if adapter.place is None:
        return None
    with blamed("place"):
        local_indices = adapter.place(name, tensor)
    if local_indices is None:
        return None
    # For each dim: how many indices are local, which ones, and how many there are in the full tensor.
    lengths: list[int] = []
    indices: list[Tensor | None] = []
    full_shape: list[int | None] = []
    for dim, index in enumerate(local_indices):
        if index is not None:
            index = torch.as_tensor(index, dtype=torch.long)
            lengths.append(len(index))
            # The rank does not know how long the full tensor is: whatever lies beyond its end is padding.
            full_shape.append(None)
        else:
            # All of this dim is local. There is no such dim if too many indices are returned: the check below fails.
            size = 0
            if dim < tensor.ndim:
                size = tensor.shape[dim]
            lengths.append(size)
            full_shape.append(size)
        indices.append(index)
    local_shape = tuple(tensor.shape)
    if tuple(lengths) != local_shape:
        raise ConfigError(
            f"{FAULT}its place returns indices for {tuple(lengths)} elements of {name}, which has {local_shape} on "
            "this rank"
        )
    return LocalShard(tuple(indices), tuple(full_shape))
