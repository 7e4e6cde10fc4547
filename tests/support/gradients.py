"""How far the gradients of a parallel model are from those of one device."""

import math

from torch.distributed.tensor import DTensor

from mmm.nn.init import canonical_name
from mmm.torch_private.groups import ignore_gathers_in_turns
from mmm_verify.difference import relative, scale_of, size_of


def gradient_differences(parallel_model, expected):
    """max|g - g0| / max|g0| of each gradient that this rank has. A collective: sharded ones are gathered.

    One that is 0 but for rounding is measured by the largest gradient of the model. One that is missing is infinitely
    far off, and so is one of a parameter that one device does not have.
    """
    ignore_gathers_in_turns()
    largest = max(size_of(gradient) for gradient in expected.values())
    differences = {}
    for full_name, parameter in parallel_model.named_parameters():
        name = canonical_name(full_name)
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if gradient is None or name not in expected:
            differences[name] = math.inf
            continue
        # The worst of a tied weight that is in two stages of this rank.
        difference = relative(gradient.cpu(), expected[name], scale_of(expected[name], largest))
        differences[name] = max(difference, differences.get(name, 0.0))
    return differences
