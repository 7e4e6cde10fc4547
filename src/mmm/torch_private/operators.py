"""Private names of the dispatcher, of kernels without a public function, and of trees of tensors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# Private: torch.utils._python_dispatch, seen in 2.10 to 2.14. No public replacement.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Private: torch.utils._pytree, seen in 2.10 to 2.14. Public replacement: torch.utils.pytree, once it is stable.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Attention of documents of any length in one call. Its module registers its kernel.
# Public from 2.10 on; None before: documents then make a mask.
varlen_attn: Any = None
if find_spec("torch.nn.attention.varlen"):
    from torch.nn.attention.varlen import varlen_attn

aten = torch.ops.aten
# Functional collectives.
# Private: torch.ops._c10d_functional, seen in 2.8 to 2.15. No public replacement.
C10D = torch.ops._c10d_functional
# Kernels of attention that return or take the log-sum-exp of each row.
# Private: all four, seen in 2.10 to 2.14. Public replacement: a public function that returns it.
flash_attention = aten._scaled_dot_product_flash_attention
flash_attention_backward = aten._scaled_dot_product_flash_attention_backward
cpu_attention = aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
# Before 2.9 this backward writes beyond the gradients of k and v where they have fewer heads than q.
CPU_ATTENTION_GROUPS_HEADS = torch.__version__ >= "2.9"
# Before 2.10, where two axes shard a dim that they do not divide, PyTorch gathers it in a wrong order, silently.
# Private: the class in C++, seen in 2.10 to 2.15. No public replacement.
GATHERS_STRIDED = hasattr(getattr(torch._C, "_distributed", None), "StridedShard")
# The kernels of F.scaled_dot_product_attention, and that of varlen_attn.
# Private: all of them, seen in 2.8 to 2.15, the last one from 2.10 on. No public replacement.
ATTENTION_KERNELS = [
    flash_attention.default,
    cpu_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
if varlen_attn is not None:
    ATTENTION_KERNELS.append(torch.ops.torch_attn._varlen_attn.default)
# The operator that ``item()`` calls.
# Private: aten._local_scalar_dense, seen in 2.10 to 2.14. No public replacement.
READ_SCALAR = aten._local_scalar_dense


def profiler_marks() -> set[Any]:
    """Return the operators by which FSDP marks its sections for the profiler.

    Private: torch.ops.profiler._record_function_*, seen in 2.10 to 2.14. No public replacement.
    """
    profiler = torch.ops.profiler
    return {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}


def wait_operator() -> Any:
    """Return the operator by which functional collectives wait."""
    return C10D.wait_tensor.default


def tensors_in(nested: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def schema_name(operator: Any) -> str:
    """Return an operator's name in its schema, such as ``c10d::allreduce_``.

    Private: OpOverload._schema, seen in 2.10 to 2.14. Public replacement: OpOverload.name(), with the overload in it.
    """
    return operator._schema.name


def schema_arguments(operator: Any) -> Any:
    """Return an operator's arguments, each with ``name``, ``type`` and ``alias_info``.

    Private: OpOverload._schema, seen in 2.10 to 2.14. No public replacement.
    """
    return operator._schema.arguments
