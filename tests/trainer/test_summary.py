"""The summary of a model before it is sharded."""

import torch

from mmm.models.vit import ViT, ViTConfig
from mmm.trainer.config.spec import model_summary


def test_multiply_adds_are_those_of_all_tokens():
    sizes = ViTConfig(image_size=32, patch_size=8, classes=10, dim=64, n_layers=2, n_heads=4)
    with torch.device("meta"):
        model, images = ViT(sizes), torch.zeros(3, sizes.channels, 32, 32)
    tokens, dim, patch = 3 * 16, 64, 8 * 8 * sizes.channels
    layer = tokens * (4 * dim * dim + 2 * 4 * dim * dim) + 2 * tokens * 16 * dim  # projections, MLP, attention
    expected = tokens * patch * dim + 2 * layer + 3 * dim * sizes.classes
    assert f"Total mult-adds: {expected:,}, of forward's matrix products" in model_summary(model, images)
