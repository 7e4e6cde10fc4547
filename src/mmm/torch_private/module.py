"""Private names of modules, tensors and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Private: nn.modules.batchnorm._BatchNorm, seen in 2.10 to 2.14. Public replacement: the public classes, one by one.
BatchNorm = nn.modules.batchnorm._BatchNorm
# Private: nn.modules.batchnorm._NormBase, seen in 2.10 to 2.14. Public replacement: BatchNorm, SyncBatchNorm,
# InstanceNorm.
NormBase = nn.modules.batchnorm._NormBase
# Private: nn.modules.conv._ConvNd, seen in 2.10 to 2.14. Public replacement: the public classes, one by one.
Convolution = nn.modules.conv._ConvNd
# Methods by which modules draw their parameters anew.
# Private: the second, of MultiheadAttention and Transformer, seen in 2.10 to 2.14. Public replacement: the first, if
# these two had it.
RESETS = ("reset_parameters", "_reset_parameters")
# Names under which compile, checkpointing, FSDP1 and DDP store the module that they wrap.
# Private: all but the last, seen in 2.10 to 2.14. No public replacement.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")

# One kernel for many tensors.
# Private: torch._foreach_*, seen in 2.10 to 2.14. No public replacement.
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters.

    An entry may be replaced, also by a plain tensor for the length of a forward.

    Private: Module._parameters, seen in 2.10 to 2.14. Public replacement: register_parameter, but only for parameters.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers.

    An entry may be replaced: it stays persistent, or not, as it was.

    Private: Module._buffers, seen in 2.10 to 2.14. Public replacement: named_buffers(recurse=False) and setattr.
    """
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of the modules directly in `module`, including those that are None.

    Private: Module._modules, seen in 2.10 to 2.14. Public replacement: named_children, without those that are None.
    """
    return module._modules


def map_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module by what `function` returns for it, in place.

    Private: Module._apply, seen in 2.10 to 2.14. No public replacement.
    """
    module._apply(function)


def paddings_of(convolution: Any) -> Sequence[int]:
    """Return the paddings of a convolution, ``same`` and ``valid`` included: (left, right, top, bottom), the last dim
    first.

    Private: _ConvNd._reversed_padding_repeated_twice, seen in 2.8 to 2.15. Public replacement: padding, which may be a
    word.
    """
    return convolution._reversed_padding_repeated_twice


def check_input_dim(norm: Any, x: Tensor) -> None:
    """Check that a batch norm's input has the number of dims that its class expects; raises ValueError if not.

    Private: _BatchNorm._check_input_dim, seen in 2.10 to 2.14. No public replacement.
    """
    norm._check_input_dim(x)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory has been written to.

    Private: Tensor._version, seen in 2.10 to 2.14. No public replacement.
    """
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats a tensor as a view of another one.

    Private: Tensor._is_view, seen in 2.10 to 2.14. No public replacement.
    """
    return tensor._is_view()


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that no other live storage has.

    That also holds for storages without memory, whose ``data_ptr`` is 0.

    Private: UntypedStorage._cdata, seen in 2.10 to 2.14. No public replacement.
    """
    return storage._cdata


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no elements.

    Private: torch._subclasses.fake_tensor.FakeTensor, seen in 2.10 to 2.14. No public replacement.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
