"""The ViT by its sizes, as a `ModelSpec`: read once, on the meta device."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmm.models.vit import ViT, ViTConfig
from mmm.parallel.plans.vit import vit_plan
from mmm_lab.planner.spec import ModelSpec, kinds_of


def vit_spec(config: ViTConfig, flops: bool = True) -> ModelSpec:
    with torch.device("meta"):
        model = ViT(replace(config, n_layers=1))
        sample = torch.zeros(1, config.channels, config.image_size, config.image_size)
    plan = vit_plan()
    return ModelSpec(
        name="vit",
        plan=plan,
        config=config,
        kinds=kinds_of(model, plan, sample if flops else None, {}),
        sequence=(0, *[1] * config.n_layers, 2),
        tied=False,
        tokens=config.patches,
        seq_length=0,
        program="mmm.trainer.vit",
    )
