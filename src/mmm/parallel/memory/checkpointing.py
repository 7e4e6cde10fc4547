"""Activation checkpointing: what a module works out in forward is not kept for backward, but worked out again.

``full`` keeps only what goes into the module: least memory, one more forward of it (a third more work).
``selective`` keeps besides that what the large matrix products and the fused attention gave, and repeats the rest
(norms, activations, softmax), which is cheap to work out and large to keep.

Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016; Korthikanti et al., "Reducing activation
recomputation in large Transformer models", 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mmm.errors import ConfigError
from mmm.parallel.plan import Plan, find

MODES = ("none", "full", "selective")

aten = torch.ops.aten
# bmm is not among them: written-out attention makes its (seq, seq) scores by it.
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
# FSDP marks its work for the profiler, and where a unit of its own lies inside a checkpointed module (experts) another
# number of times in the repeated forward. PyTorch 2.13 keeps a list of what does not count; marks belong on it.
profiler = torch.ops.profiler
MARKS = {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
if hasattr(torch_checkpoint, "SAC_IGNORED_OPS"):
    torch_checkpoint.SAC_IGNORED_OPS |= MARKS


def check_checkpointing(plan: Plan, mode: str) -> None:
    """Whether a model's activations can be checkpointed so; needs no process group.

    Raises:
        ConfigError: no such mode, or a plan that names no module.
    """
    if mode not in MODES:
        raise ConfigError(f"checkpointing {mode!r} is not one of {', '.join(MODES)}")
    if mode != "none" and not plan.checkpointed:
        raise ConfigError(f"checkpointing {mode!r}: the plan of this model names no modules to checkpoint; use 'none'")


def apply_checkpointing(model: nn.Module, plan: Plan, mode: str) -> None:
    """Checkpoint the modules that the plan names, in place; their names, and those of the parameters, stay.

    After tensor parallel (whose hooks inside the module are then repeated too), before compile and FSDP (which gathers
    the parameters outside). Raises as `check_checkpointing`.
    """
    check_checkpointing(plan, mode)
    if mode == "none":
        return
    repeated = _full if mode == "full" else _selective
    for pattern in plan.checkpointed:
        for module in find(model, pattern):
            module.forward = repeated(module.forward)  # type: ignore[method-assign]


# torch.compile takes `checkpoint` only when it is called as here, with arguments written out: a partial of it would be
# left uncompiled, unsaid, and a context that is a variable is an error.


def _full(forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def _selective(forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_keep_products, **kwargs)

    return checkpointed


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(KEPT)
