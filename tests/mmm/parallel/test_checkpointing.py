"""Activation checkpointing: the same gradients, less kept, and the matrix products repeated or not."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmm.errors import ConfigError
from mmm.models.cnn.plan import cnn_plan
from mmm.models.vit.model import ViT, ViTConfig
from mmm.models.vit.plan import vit_plan
from mmm.nn import weights
from mmm.parallel import cross_entropy
from mmm.parallel.memory.checkpointing import apply_checkpointing, check_checkpointing
from support import vision

# Three blocks.
CONFIG = ViTConfig(image_size=12, patch_size=4, channels=1, classes=10, dim=16, n_layers=3, n_heads=4)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def one_backward(mode):
    """Gradients by name, matrix products in backward, and elements kept for it."""
    model = ViT(CONFIG).double()
    weights.initialize(model, 0)
    apply_checkpointing(model, vit_plan(), mode)
    images, classes = vision.batch("vit", 0)
    recomputed = {}

    def keep(tensor):
        recomputed[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 8
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = cross_entropy(model(images), classes, len(classes))
    with Products() as products:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, products.count, sum(recomputed.values())


# 2026-11: of PyTorch 2.15, about the hooks by which this test counts.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
def test_modes():
    expected, products, recomputed = one_backward("none")
    for mode, repeated, share in (("full", True, 0.5), ("selective", False, 1.0)):
        gradients, more_products, less_kept = one_backward(mode)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(gradients[name], gradient)
        # a block has 6 matrix products in forward; the last one's output is not needed and may not be repeated
        assert (more_products - products) in ((15, 18) if repeated else (0,))
        assert less_kept < share * recomputed


@pytest.mark.parametrize(
    ("mode", "plan", "message"),
    [
        ("some", vit_plan, "checkpointing 'some' is not one of none, full, selective"),
        ("full", cnn_plan, "checkpointing 'full': the plan of this model names no modules"),
    ],
)
def test_refused(mode, plan, message):
    with pytest.raises(ConfigError, match=message):
        check_checkpointing(plan(), mode)
