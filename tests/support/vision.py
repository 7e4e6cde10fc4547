"""The reference for image models: plain PyTorch on one process. Imports nothing from parallel/."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from mmm.models.cnn.model import CNN, CNNConfig
from mmm.models.vit.model import ViT, ViTConfig

SEED = 5
# Divides over 1, 2, 3 and 4.
GLOBAL_BATCH = 12
# Small image models.
CONFIGS = {
    "cnn": CNNConfig(image_size=12, width1=3, width2=5, hidden=16, conv_dropout=0, fc_dropout=0),
    # 3 × 3 patches: a number that no tp divides
    "vit": ViTConfig(image_size=12, patch_size=4, channels=1, classes=10, dim=16, n_layers=2, n_heads=4),
}


def build(model: str) -> nn.Module:
    config = CONFIGS[model]
    if isinstance(config, CNNConfig):
        return CNN(config)
    return ViT(config)


@lru_cache
def batch(model: str, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: images (batch, channels, size, size) float64, classes (batch) int64."""
    config = CONFIGS[model]
    rng = torch.Generator().manual_seed(step)
    shape = (GLOBAL_BATCH, config.channels, config.image_size, config.image_size)
    # It is kept, so whoever asks first may not decide on the device.
    images = torch.randn(shape, generator=rng, dtype=torch.float64, device="cpu")
    return images, torch.randint(config.classes, (GLOBAL_BATCH,), generator=rng, device="cpu")
