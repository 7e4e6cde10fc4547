"""What every example asks of FSDP."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over the ranks, where FSDP would average them: each local loss is divided by the global count.

    `mmm.examples.fsdp_tp` writes it out, and has the mistake of not doing it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
