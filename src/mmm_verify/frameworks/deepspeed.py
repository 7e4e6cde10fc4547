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
from mmm_verify.observe import parameters_of


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
    return {name: deepspeed.utils.safe_get_full_grad(parameter) for name, parameter in parameters_of(program)}


def weights(program: Any) -> dict[str, Tensor]:
    """The values of parameters that ZeRO 3 keeps empty between uses."""
    by_name = {}
    for name, parameter in parameters_of(program):
        # What ZeRO 3 calls its parameters by.
        if hasattr(parameter, "ds_id"):
            by_name[name] = deepspeed.utils.safe_get_full_fp32_param(parameter)
    return by_name


ADAPTER = Adapter(environment=environment, gradients=gradients, weights=weights)
