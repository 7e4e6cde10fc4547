"""Checks that techniques go together, with a layout and with a model. None of them needs a process group."""

from __future__ import annotations

import torch
from torch import nn

from mmm.layout import Layout, Techniques, check_data_parallel
from mmm.parallel.compile import check_compile, check_compiled_experts
from mmm.parallel.cp.space.checks import check_space
from mmm.parallel.cp.styles import check_context_parallel, splits_space
from mmm.parallel.dp.batch_norm import check_batch_norm
from mmm.parallel.dp.data_parallel import check_offload, check_reshard
from mmm.parallel.exact.checks import check_exact
from mmm.parallel.memory.checkpointing import check_checkpointing
from mmm.parallel.plan import Plan
from mmm.runtime.device import refuse_faults
from mmm.torch_private.faults import COMPLEX, INTEGERS


def check_techniques(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    techniques: Techniques,
    dtype: str = "",
    device_type: str = "",
) -> None:
    """Check all rules, except those for the pipeline's schedule (`check_pipeline`) and the model's sizes
    (``plan.check``).

    Args:
        model: the model, or a stage of it.
        dtype: name of the precision, where it is known.
        device_type: of the ranks that have a data-parallel technique, where it is known.

    Raises:
        ConfigError, LayoutError: the first rule that is broken; the message says what to change.
    """
    if not all(parameter.is_floating_point() or parameter.is_complex() for parameter in model.parameters()):
        refuse_faults(INTEGERS)
    # Without an accelerator ranks will be on CPUs. One rank alone may have no FSDP.
    on_cpus = device_type == "cpu" or (layout.ranks > 1 and not torch.accelerator.is_available())
    if on_cpus and any(parameter.is_complex() for parameter in model.parameters()):
        refuse_faults(COMPLEX, techniques.data_parallel)
    # The layout's rules come first, because only the first broken rule is reported.
    check_data_parallel(techniques.data_parallel, layout)
    check_context_parallel(techniques, layout)
    check_reshard(techniques, layout)
    if splits_space(layout, techniques):
        check_space(model, plan)
    # The others read the model or its plan.
    check_batch_norm(model, layout, techniques)
    check_checkpointing(plan, techniques.checkpointing)
    if techniques.compile:
        check_compile(layout, techniques.checkpointing)
        check_compiled_experts(model, plan, techniques.checkpointing)
    if techniques.offload:
        check_offload(techniques.data_parallel, dtype)
    if techniques.exact is not None:
        check_exact(model, layout, techniques, dtype)
