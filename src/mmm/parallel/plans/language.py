"""The language models: which module and which plan go with a configuration."""

from __future__ import annotations

from torch import nn

from mmm.models.experts import transformer_of
from mmm.models.gpt import GPT, GPTConfig, LanguageConfig
from mmm.parallel.plan import Plan
from mmm.parallel.plans.gpt import gpt_plan
from mmm.parallel.plans.transformer import transformer_plan


def language_model(config: LanguageConfig) -> nn.Module:
    """The model of these sizes."""
    return GPT(config) if isinstance(config, GPTConfig) else transformer_of(config)


def language_plan(config: LanguageConfig) -> Plan:
    """How it is sharded."""
    return gpt_plan() if isinstance(config, GPTConfig) else transformer_plan(config)
