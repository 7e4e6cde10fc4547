"""The reference for image models: plain PyTorch on one process. Imports nothing from parallel/."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.models import weights
from mmm.models.cnn import CNN, CNNConfig
from mmm.models.vit import ViT, ViTConfig

SEED = 5
GLOBAL_BATCH = 12  # divides over 1, 2, 3 and 4
STEPS = 10
MAX_NORM = {"cnn": 0.5, "vit": 1.0, "vit of one layer": 1.0}  # below the norms of most steps: clipping works
RATE = {"sgd": 0.3, "adamw": 1e-2}
CONFIGS = {
    "cnn": CNNConfig(image_size=12, width1=3, width2=5, hidden=16, conv_dropout=0, fc_dropout=0),
    # 3 × 3 patches: a number that no tp divides
    "vit": ViTConfig(image_size=12, patch_size=4, channels=1, classes=10, dim=16, n_layers=2, n_heads=4),
    "vit of one layer": ViTConfig(image_size=12, patch_size=4, channels=1, classes=10, dim=16, n_layers=1, n_heads=4),
}


def build(model: str) -> nn.Module:
    config = CONFIGS[model]
    return CNN(config) if isinstance(config, CNNConfig) else ViT(config)


@lru_cache
def batch(model: str, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: images (batch, channels, size, size) float64, classes (batch) int64."""
    config = CONFIGS[model]
    numbers = torch.Generator().manual_seed(step)
    shape = (GLOBAL_BATCH, config.channels, config.image_size, config.image_size)
    images = torch.randn(shape, generator=numbers, dtype=torch.float64)
    return images, torch.randint(config.classes, (GLOBAL_BATCH,), generator=numbers)


def optimizer_of(name: str, parameters) -> torch.optim.Optimizer:
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](parameters, lr=RATE[name])


@lru_cache
def train(model: str, optimizer: str):
    """Losses and gradient norms of each step, and the gradients of the first by name, before clipping."""
    net = build(model).double()
    weights.initialize(net, SEED)
    step_of = optimizer_of(optimizer, net.parameters())
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        images, classes = batch(model, step)
        loss = F.cross_entropy(net(images), classes)
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in net.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM[model]).item())
        step_of.step()
        step_of.zero_grad()
        losses.append(loss.item())
    return losses, norms, first
