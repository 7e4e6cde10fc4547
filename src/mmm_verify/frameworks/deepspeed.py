"""DeepSpeed: gradients and weights of its ZeRO stages, which its own functions gather."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed.ops
import deepspeed.utils
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmm_verify.adapter import Adapter
from mmm_verify.observe import modules_of, parameters_of


@contextlib.contextmanager
def environment(rank: int, mesh: DeviceMesh | None) -> Iterator[None]:
    """Inside, DeepSpeed communicates by PyTorch's process group, also on a host without an accelerator."""
    name = "deepspeed_shm_comm"
    operators = deepspeed.ops.__compatible_ops__
    before = operators.get(name, False)
    if not torch.cuda.is_available():
        # An all-reduce by shared memory, which DeepSpeed would first compile, for minutes.
        operators[name] = False
    try:
        yield
    finally:
        operators[name] = before


def gradients(program: Any) -> dict[str, Tensor | None]:
    """Full gradients. Under tensor parallelism, those of this rank's part of a weight."""
    # By what an engine has multiplied the loss, which its step takes back.
    scale = 1.0
    for module in modules_of(program):
        scale = getattr(getattr(module, "optimizer", None), "loss_scale", scale)
    by_name: dict[str, Tensor | None] = {}
    for name, parameter in parameters_of(program):
        # BF16_Optimizer adds gradients up here, and steps by that; `grad` has the last micro-batch.
        gradient = getattr(parameter, "_hp_grad", None)
        if gradient is None:
            gradient = deepspeed.utils.safe_get_full_grad(parameter)
        else:
            # (elements,)
            gradient = gradient.view_as(parameter)
        if gradient is not None:
            gradient = gradient / scale
        by_name[name] = gradient
    return by_name


def weights(program: Any) -> dict[str, Tensor]:
    """The values of parameters that ZeRO 3 keeps empty between uses."""
    by_name = {}
    for name, parameter in parameters_of(program):
        # What ZeRO 3 calls its parameters by.
        if hasattr(parameter, "ds_id"):
            by_name[name] = deepspeed.utils.safe_get_full_fp32_param(parameter)
    return by_name


ADAPTER = Adapter(environment=environment, gradients=gradients, weights=weights)
