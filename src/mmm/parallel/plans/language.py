"""The language models: which module and which plan go with a configuration."""

from __future__ import annotations

from torch import nn

from mmm.layout import Layout
from mmm.models.gpt import GPT, GPTConfig, LanguageConfig
from mmm.models.transformer import transformer_of
from mmm.parallel.plan import Plan
from mmm.parallel.plans.gpt import check_gpt, gpt_plan
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.rules import check_transformer


def language_model(config: LanguageConfig) -> nn.Module:
    """The model of these sizes."""
    return GPT(config) if isinstance(config, GPTConfig) else transformer_of(config)


def language_plan(config: LanguageConfig) -> Plan:
    """How it is sharded."""
    return gpt_plan() if isinstance(config, GPTConfig) else transformer_plan(config)


def check_language(config: LanguageConfig, layout: Layout, seq_length: int, ulysses: int = 1) -> None:
    """Raises LayoutError with every rule that such a model breaks. Arguments as of `check_transformer`."""
    if isinstance(config, GPTConfig):
        check_gpt(config, layout, seq_length, ulysses)
    else:
        check_transformer(config, layout, seq_length, ulysses)
