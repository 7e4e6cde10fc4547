"""What every example asks FSDP to do."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP sum gradients over the ranks. By default it averages them.

    Each local loss is already divided by the global count, so the gradients of all ranks add up to the gradient of the
    global loss. `mmm.examples.fsdp_tp` writes this out, and can make the mistake of leaving it out.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo has no sum that is scaled.
            module.set_force_sum_reduction_for_comms(True)
