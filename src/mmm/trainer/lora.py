"""LoRA for the language-model trainer: the model and its plan with the small matrices, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mmm.errors import ConfigError
from mmm.models.definition import ModelDef, of_config
from mmm.nn.init import parameter_count
from mmm.nn.lora import LoRA, LoRALinear, add_lora
from mmm.parallel.plan import Plan
from mmm.parallel.tp.local import Columns, Rows
from mmm.parallel.tp.lora import plan_with_lora
from mmm.trainer.config import Adapter, MeshFlags, Optimizer

# PEFT's defaults for a Llama, a Mistral, a Qwen2 and a Qwen3.
ALPHA = 8.0
TARGETS = ("q_proj", "v_proj")
# PEFT's word for every matrix of a layer.
ALL = "all-linear"


def check_adapter(adapter: Adapter, mesh: MeshFlags, optimizer: Optimizer) -> None:
    """Raises ConfigError for flags that do not go together with --lora."""
    if not adapter.lora:
        return
    lora = f"--lora {adapter.lora}"
    if mesh.exact is not None:
        raise ConfigError(f"{lora} with --exact {mesh.exact}: an exact run trains all parameters; leave one out")
    if optimizer.optimizer == "muon":
        raise ConfigError(
            f"{lora} with --optimizer muon, which is for full matrices, and not for two factors of one: use adamw"
        )


def lora_of(flags: Adapter, sizes: Any) -> LoRA | None:
    """The small matrices that the flags ask for; None without --lora.

    Raises:
        ConfigError: no adapter is written for the model, or it has no such matrix; or it has experts.
    """
    if not flags.lora:
        return None
    definition = of_config(sizes)
    assert definition.names is not None
    # An adapter's matrices would need their order, and one word there names two of its matrices.
    if definition.names.fused:
        raise ConfigError(
            f"--lora {flags.lora} with --model {definition.name}, or its weights: no adapter is written for it; leave "
            "--lora out, or take a llama or a qwen3"
        )
    experts = getattr(sizes, "n_experts", 0)
    if experts:
        raise ConfigError(
            f"--lora {flags.lora} with --n_experts {experts}: an expert's matrices are not adapted; leave one out"
        )
    plan = definition.plan(sizes)
    patterns = patterns_of(definition, plan)
    targets = flags.lora_targets or TARGETS
    if ALL in targets:
        targets = tuple(patterns)
    for target in targets:
        if target not in patterns:
            known = ", ".join([*patterns, ALL])
            raise ConfigError(f"--lora_targets {target}: {definition.name} has {known}")
    # In the order of the model, so that two runs with the same ones are the same.
    targets = tuple(word for word in patterns if word in targets)
    alpha = flags.lora_alpha or ALPHA
    return LoRA(flags.lora, alpha, targets)


def patterns_of(definition: ModelDef, plan: Plan) -> dict[str, str]:
    """Hugging Face's word for each matrix of a layer, such as ``q_proj`` → its name in the plan."""
    assert definition.names is not None
    patterns = {}
    for pattern, style in plan.tensor.items():
        # Matrices that tp shards: neither the embedding nor the output, which PEFT's all-linear leaves out as well.
        if isinstance(style, Columns | Rows):
            word = definition.names.word(pattern)
            patterns[word] = pattern
    return patterns


def adapt(model: nn.Module, definition: ModelDef, plan: Plan, lora: LoRA) -> tuple[Plan, str]:
    """Put the small matrices into a model, in place.

    Args:
        model: the model, on the meta device.
        plan: how it is sharded without them.

    Returns:
        How it is sharded with them; and a note on how many parameters are trained.
    """
    patterns = patterns_of(definition, plan)
    adapted = [patterns[word] for word in lora.targets]
    base = parameter_count(model)
    add_lora(model, adapted, lora.rank, lora.scale)
    trained = parameter_count(model) - base
    percent = 100 * trained / base
    note = f"--lora {lora.rank}: {trained:,} parameters are trained, next to {base:,} that are frozen ({percent:.2f} %)"
    return plan_with_lora(plan, adapted), note


def check_stages(model: nn.Module, lora: LoRA, stages: Sequence[Sequence[str]]) -> None:
    """Raises ConfigError if the first stage of a pipeline has nothing to train: no gradient would get there.

    Args:
        stages: the names of the modules of each stage; empty without a pipeline.
    """
    for first in stages[:1]:
        modules = [module for path in first for module in model.get_submodule(path).modules()]
        if not any(isinstance(module, LoRALinear) for module in modules):
            raise ConfigError(
                f"--lora {lora.rank} with --pp: the first of {len(stages)} stages has only {', '.join(first)}, and no "
                "matrix to train: use fewer stages"
            )
