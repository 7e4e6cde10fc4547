"""Reads a model, built on the meta device, into a `ModelSpec`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmm.models.definition import of_config
from mmm_lab.planner.spec import ModelSpec, kinds_of


def model_spec(config: Any, seq_length: int = 0, flops: bool = True) -> ModelSpec:
    """The model with these sizes, as the search sees it.

    Args:
        seq_length: number of tokens in a sample; for language models.
        flops: whether to count FLOPs, which takes 20 ms. Step times need them.
    """
    definition = of_config(config)
    # One layer stands for all, so that a model of a thousand layers is read as quickly.
    model, sample = definition.on_meta(replace(config, n_layers=1), 1, seq_length)
    plan = definition.plan(config)
    scores = 0
    if definition.language:
        # Queries times keys, and scores times values: 2 FLOPs for each multiplication and sum.
        scores = 4 * seq_length**2 * config.n_heads * config.head_dim
    return ModelSpec(
        name=definition.name,
        definition=definition,
        plan=plan,
        config=config,
        kinds=kinds_of(model, plan, sample if flops else None, scores),
        # Indices into `kinds`: the embedding, the layers, the head.
        sequence=(0, *[1] * config.n_layers, 2),
        tied=getattr(config, "tie_word_embeddings", False),
        tokens=definition.tokens(config, seq_length),
        seq_length=seq_length if definition.language else 0,
        program=definition.program,
    )
