"""Private names of the dispatcher, of kernels without a public function, and of trees of tensors."""

from __future__ import annotations

from typing import Any

import torch

# Private: torch.utils._python_dispatch, seen in 2.10 to 2.14; instead: nothing.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Private: torch.utils._pytree, seen in 2.10 to 2.14; instead: torch.utils.pytree, once it promises to stay.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

aten = torch.ops.aten
# Private: kernels of attention that give or take the lse, seen in 2.10 to 2.14; instead: a public one with it.
flash_attention = aten._scaled_dot_product_flash_attention
flash_attention_backward = aten._scaled_dot_product_flash_attention_backward
cpu_attention = aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
# Private: the kernels of F.scaled_dot_product_attention, seen in 2.10 to 2.14; instead: nothing.
ATTENTION_KERNELS = (
    flash_attention.default,
    cpu_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
# Private: what ``item()`` calls, seen in 2.10 to 2.14; instead: nothing.
READ_SCALAR = aten._local_scalar_dense


def profiler_marks() -> set[Any]:
    """The operators by which FSDP marks its parts for the profiler.

    Private: torch.ops.profiler._record_function_*, seen in 2.10 to 2.14; instead: nothing."""
    profiler = torch.ops.profiler
    return {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}


def wait_operator() -> Any:
    """The operator by which functional collectives wait.

    Private: torch.ops._c10d_functional, seen in 2.10 to 2.14; instead: nothing."""
    return torch.ops._c10d_functional.wait_tensor.default


def schema_name(operator: Any) -> str:
    """``c10d::allreduce_``: an operator's name in its schema.

    Private: OpOverload._schema, seen in 2.10 to 2.14; instead: OpOverload.name(), with the overload in it."""
    return operator._schema.name


def schema_arguments(operator: Any) -> Any:
    """An operator's arguments, each with name, type and alias_info.

    Private: OpOverload._schema, seen in 2.10 to 2.14; instead: nothing."""
    return operator._schema.arguments


def has_kernel(name: str) -> bool:
    """Whether an operator, as ``torchvision::nms``, is registered.

    Private: torch._C._dispatch_has_kernel, seen in 2.10 to 2.14; instead: nothing."""
    return torch._C._dispatch_has_kernel(name)
