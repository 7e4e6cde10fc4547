"""Activation checkpointing: a module's activations are not kept for backward, but recomputed there.

``full`` keeps only the module's input. It needs the least memory, and one more forward of the module (a third more
work). ``selective`` also keeps the outputs of large matrix products and of fused attention. It recomputes the rest
(norms, activations, softmax), which is cheap to compute and large to keep.

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
from mmm.torch_private.operators import ATTENTION_KERNELS, profiler_marks

MODES = ("none", "full", "selective")

aten = torch.ops.aten
# bmm is not among them: attention by matrix products computes its (seq, seq) scores with it.
KEPT = [aten.mm.default, aten.addmm.default, aten.convolution.default, *ATTENTION_KERNELS]


def check_checkpointing(plan: Plan, mode: str) -> None:
    """Raises ConfigError where there is no such mode, or the plan names no modules. Needs no process group."""
    if mode not in MODES:
        raise ConfigError(f"checkpointing {mode!r} is not one of {', '.join(MODES)}")
    if mode != "none" and not plan.checkpointed:
        raise ConfigError(f"checkpointing {mode!r}: the plan of this model names no modules to checkpoint; use 'none'")


def apply_checkpointing(model: nn.Module, plan: Plan, mode: str) -> None:
    """Checkpoint the modules that the plan names, in place. Names of modules and parameters stay as they are."""
    if mode == "none":
        return
    if mode == "selective":
        # Where an FSDP unit lies inside a checkpointed module (experts), recomputation has another number of FSDP's
        # marks for the profiler than forward had, which PyTorch would refuse. They go onto PyTorch's public list of
        # operators to ignore, and stay there, because the list is read until the last backward.
        torch_checkpoint.SAC_IGNORED_OPS |= profiler_marks()
    checkpointed = _full if mode == "full" else _selective
    for pattern in plan.checkpointed:
        for module in find(model, pattern):
            module.forward = checkpointed(module.forward)  # type: ignore[method-assign]


# torch.compile accepts `checkpoint` only where it is called with its arguments written out, as below. It would silently
# not compile a `partial` of it, and a context that is a variable is an error.


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
