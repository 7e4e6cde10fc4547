"""Private names of the dispatcher, of kernels without a public function, and of trees of tensors."""

from __future__ import annotations

from collections.abc import Iterator
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


def operators_of(*namespaces: str) -> Iterator[Any]:
    """All operators of these namespaces, an overload each.

    Private: torch._C._dispatch_get_all_op_names, seen in 2.10 to 2.14; instead: nothing."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, full_name = name.partition("::")
        if namespace in namespaces:
            operator, _, overload = full_name.partition(".")
            yield getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def end_library(library: torch.library.Library) -> None:
    """Undo what a library has registered.

    Private: Library._destroy, seen in 2.10 to 2.14; instead: nothing that acts at once."""
    library._destroy()


def keys_below_backend_select() -> Any:
    """The dispatch keys after BackendSelect.

    Private: torch._C._dispatch_keyset_full_after, seen in 2.10 to 2.14; instead: nothing."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def call_backend(operator: Any, keys: Any, *args: Any, **named: Any) -> Any:
    """Go on to the backend. Not by `redispatch` where there is another way: it keeps the GIL, which gloo's threads need
    before what is waited for can end.

    Private: torch._C._dispatch_has_kernel_for_dispatch_key and OpOverload._op_dk, seen in 2.10 to 2.14; instead:
    redispatch, once it gives the GIL away."""
    for key in (keys.highestPriorityTypeId(), torch._C.DispatchKey.CompositeExplicitAutograd):
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
            return operator._op_dk(key, *args, **named)
    return operator.redispatch(keys, *args, **named)
