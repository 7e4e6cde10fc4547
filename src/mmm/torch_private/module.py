"""Private names of modules, tensors and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Private: nn.modules.batchnorm._BatchNorm, seen in 2.10 to 2.14; instead: the public classes, one by one.
BatchNorm = nn.modules.batchnorm._BatchNorm
# Private: nn.modules.batchnorm._NormBase, seen in 2.10 to 2.14; instead: BatchNorm, SyncBatchNorm, InstanceNorm.
NormBase = nn.modules.batchnorm._NormBase
# Private: nn.modules.conv._ConvNd, seen in 2.10 to 2.14; instead: the public classes, one by one.
Convolution = nn.modules.conv._ConvNd
# Private: MultiheadAttention and Transformer have the second, seen in 2.10 to 2.14; instead: the first, there too.
RESETS = ("reset_parameters", "_reset_parameters")
# Private: how compile, checkpointing and FSDP1 name what they wrap, seen in 2.10 to 2.14; instead: nothing.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")

# Private: torch._foreach_*, one kernel for many tensors, seen in 2.10 to 2.14; instead: nothing.
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, in which one may be replaced, also by a plain tensor for the length of a forward.

    Private: Module._parameters, seen in 2.10 to 2.14; instead: register_parameter, for parameters alone."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, in which one may be replaced: it stays persistent, or not, as it was.

    Private: Module._buffers, seen in 2.10 to 2.14; instead: named_buffers(recurse=False) and setattr."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules directly in `module`, those that are None too.

    Private: Module._modules, seen in 2.10 to 2.14; instead: named_children, without those that are None."""
    return module._modules


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by what `function` makes of it, in place.

    Private: Module._apply, seen in 2.10 to 2.14; instead: nothing."""
    module._apply(function)


def check_input_dim(norm: Any, x: Tensor) -> None:
    """Raises ValueError where a batch norm's input has not the dims of its class.

    Private: _BatchNorm._check_input_dim, seen in 2.10 to 2.14; instead: nothing."""
    norm._check_input_dim(x)


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory has been written.

    Private: Tensor._version, seen in 2.10 to 2.14; instead: nothing."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd has a tensor as a view of another.

    Private: Tensor._is_view, seen in 2.10 to 2.14; instead: nothing."""
    return tensor._is_view()


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that no other live storage has, also one without memory, whose data_ptr is 0.

    Private: UntypedStorage._cdata, seen in 2.10 to 2.14; instead: nothing."""
    return storage._cdata


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no elements.

    Private: torch._subclasses.fake_tensor.FakeTensor, seen in 2.10 to 2.14; instead: nothing."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
