"""A language model by its sizes, as a `ModelSpec`: read once, on the meta device."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmm.models.gpt import GPTConfig, LanguageConfig
from mmm.parallel.plans.language import language_model, language_plan
from mmm_lab.planner.spec import ModelSpec, kinds_of


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
