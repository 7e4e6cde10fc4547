"""The ViT and the MNIST net by their sizes, as `ModelSpec`s: read once, on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mmm.models.cnn import CNN, CNNConfig
from mmm.models.vit import ViT, ViTConfig
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.parallel.pp.stages import part_costs, parts_of
from mmm.torch_private.module import base_of, storage_id
from mmm_lab.planner.spec import ModelSpec, PartKind, kinds_of, matrices_of


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


def cnn_spec(config: CNNConfig) -> ModelSpec:
    with torch.device("meta"):
        model, sample = CNN(config), torch.zeros(1, config.channels, config.image_size, config.image_size)
    plan = cnn_plan()
    parts = parts_of(model, plan)
    saved = _saved(model, [model.get_submodule(name) for (name,) in parts], sample)
    kinds = tuple(
        PartKind("module", matrices_of(model, plan, part), cost, saved=count)
        for part, cost, count in zip(parts, part_costs(model, parts, sample), saved, strict=True)
    )
    return ModelSpec(
        name="cnn",
        plan=plan,
        config=config,
        kinds=kinds,
        sequence=tuple(range(len(kinds))),
        tied=False,
        tokens=1,
        seq_length=0,
        program="mmm.trainer.cnn",
        flags=("--dataset", "mnist"),
    )


def _saved(model: nn.Module, parts: Sequence[nn.Module], sample: Tensor) -> list[int]:
    """Elements that the forward of `sample`, on the meta device, leaves for backward, by the part that runs last."""
    counts, now = [0] * len(parts), 0
    weights = {id(parameter) for parameter in model.parameters()}
    seen: dict[int, Any] = {}

    def enter(number: int, *_: Any) -> None:
        nonlocal now
        now = number

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        base = base_of(tensor)
        if id(base) not in weights and storage_id(storage) not in seen:
            seen[storage_id(storage)] = storage  # kept, so that the number stays its own
            counts[now] += storage.nbytes() // tensor.element_size()
        return tensor

    hooks = [module.register_forward_pre_hook(partial(enter, number)) for number, module in enumerate(parts)]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(sample)
    for hook in hooks:
        hook.remove()
    return counts
