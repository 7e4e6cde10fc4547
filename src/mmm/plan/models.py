"""A language model by its sizes, as a `ModelSpec`: read once, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmm.models.gpt import GPTConfig, LanguageConfig
from mmm.parallel.plan import Plan, matches, sharded_dim
from mmm.parallel.plans.language import language_model, language_plan
from mmm.parallel.pp.stages import Part, part_costs, parts_of
from mmm.plan.spec import Matrix, ModelSpec, PartKind


def language_spec(config: LanguageConfig, seq_length: int, flops: bool = True) -> ModelSpec:
    """
    Args:
        flops: whether step times are to be predicted: counting takes 20 ms.
    """
    # Built with one layer, which stands for all: a thousand layers cost what one does.
    with torch.device("meta"):
        model, sample = language_model(replace(config, n_layers=1)), torch.zeros(1, seq_length, dtype=torch.int64)
    plan = language_plan(config)
    scores = 4 * seq_length**2 * config.n_heads * config.head_dim
    return ModelSpec(
        name="gpt" if isinstance(config, GPTConfig) else "transformer",
        plan=plan,
        config=config,
        kinds=kinds_of(model, plan, sample if flops else None, {"layer": scores}),
        sequence=(0, *[1] * config.n_layers, 2),
        tied=config.tie_word_embeddings,
        tokens=seq_length,
        seq_length=seq_length,
        program="mmm.trainer.lm",
    )


def kinds_of(model: nn.Module, plan: Plan, sample: Tensor | None, scores: Mapping[str, int]) -> tuple[PartKind, ...]:
    """Embedding, layer and head of a model with one layer.

    Args:
        sample: None where FLOPs do not matter. scores: `PartKind.attention_flops`, by role.
    """
    parts = parts_of(model, plan)
    costs = [0] * len(parts) if sample is None else part_costs(model, parts, sample)
    return tuple(
        PartKind(role, matrices_of(model, plan, part), cost, scores.get(role, 0))
        for role, part, cost in zip(("embedding", "layer", "head"), parts, costs, strict=True)
    )


def matrices_of(model: nn.Module, plan: Plan, part: Part) -> tuple[Matrix, ...]:
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
