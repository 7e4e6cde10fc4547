"""A model of this package by its sizes, as a `ModelSpec`: read once, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mmm.models.cnn import CNN, CNNConfig
from mmm.models.gpt import GPTConfig, LanguageConfig
from mmm.models.vit import ViT, ViTConfig
from mmm.parallel.plan import Plan, matches, sharded_dim
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.language import language_model, language_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.parallel.pp.stages import Part, part_costs, parts_of
from mmm.plan.spec import Matrix, ModelSpec, PartKind
from mmm.torch_private.module import base_of, storage_id


def spec_of(config: Any, seq_length: int, flops: bool = True) -> ModelSpec | None:
    """A model of this package by its sizes; None for one that is none.

    Args:
        seq_length: of a Transformer. flops: whether step times are to be predicted: counting takes 20 ms.
    """
    if isinstance(config, LanguageConfig):
        return language_spec(config, seq_length, flops)
    if isinstance(config, ViTConfig):
        return vit_spec(config, flops)
    return cnn_spec(config) if isinstance(config, CNNConfig) else None


def language_spec(config: LanguageConfig, seq_length: int, flops: bool = True) -> ModelSpec:
    # Built with one layer, which stands for all: a thousand layers cost what one does.
    with torch.device("meta"):
        model, sample = language_model(replace(config, n_layers=1)), torch.zeros(1, seq_length, dtype=torch.int64)
    plan = language_plan(config)
    scores = 4 * seq_length**2 * config.n_heads * config.head_dim
    return ModelSpec(
        name="gpt" if isinstance(config, GPTConfig) else "transformer",
        plan=plan,
        config=config,
        kinds=_kinds(model, plan, sample if flops else None, {"layer": scores}),
        sequence=(0, *[1] * config.n_layers, 2),
        tied=config.tie_word_embeddings,
        tokens=seq_length,
        seq_length=seq_length,
        program="mmm.trainer.lm",
    )


def _kinds(model: nn.Module, plan: Plan, sample: Tensor | None, scores: Mapping[str, int]) -> tuple[PartKind, ...]:
    """Embedding, layer and head of a model with one layer.

    Args:
        sample: None where FLOPs do not matter. scores: `PartKind.attention_flops`, by role.
    """
    parts = parts_of(model, plan)
    costs = [0] * len(parts) if sample is None else part_costs(model, parts, sample)
    return tuple(
        PartKind(role, _matrices(model, plan, part), cost, scores.get(role, 0))
        for role, part, cost in zip(("embedding", "layer", "head"), parts, costs, strict=True)
    )


def _matrices(model: nn.Module, plan: Plan, part: Part) -> tuple[Matrix, ...]:
    found = []
    for module in part:
        for own, parameter in model.get_submodule(module).named_parameters():
            name = f"{module}.{own}"
            path = name.rpartition(".")[0]
            expert = any(matches(f"{pattern}.experts", path) for pattern in plan.experts)
            dim = None if expert else sharded_dim(model, plan, name)
            tiled = own.endswith("weight") and any(matches(pattern, path) for pattern in plan.weight_tiled)
            found.append(Matrix(tuple(parameter.shape), dim, expert, tiled))
    return tuple(found)


def vit_spec(config: ViTConfig, flops: bool = True) -> ModelSpec:
    with torch.device("meta"):
        model = ViT(replace(config, n_layers=1))
        sample = torch.zeros(1, config.channels, config.image_size, config.image_size)
    plan = vit_plan()
    return ModelSpec(
        name="vit",
        plan=plan,
        config=config,
        kinds=_kinds(model, plan, sample if flops else None, {}),
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
        PartKind("module", _matrices(model, plan, part), cost, saved=count)
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
