"""A model by its sizes, as a `ModelSpec`: read once, on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmm.models.definition import of_config
from mmm_lab.planner.spec import ModelSpec, kinds_of


def model_spec(config: Any, seq_length: int = 0, flops: bool = True) -> ModelSpec:
    """
    Args:
        seq_length: in tokens; of a language model.
        flops: whether step times are to be predicted: counting takes 20 ms.
    """
    definition = of_config(config)
    # Built with one layer, which stands for all: a thousand layers cost what one does.
    model, sample = definition.on_meta(replace(config, n_layers=1), 1, seq_length)
    plan = definition.plan(config)
    scores = 4 * seq_length**2 * config.n_heads * config.head_dim
    return ModelSpec(
        name=definition.name,
        definition=definition,
        plan=plan,
        config=config,
        kinds=kinds_of(model, plan, sample if flops else None, {"layer": scores} if definition.language else {}),
        sequence=(0, *[1] * config.n_layers, 2),
        tied=getattr(config, "tie_word_embeddings", False),
        tokens=definition.tokens(config, seq_length),
        seq_length=seq_length if definition.language else 0,
        program=definition.program,
    )
