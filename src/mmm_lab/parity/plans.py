"""How the models that only the proof has are sharded. A user's plan may refuse sizes by a function of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from mmm.errors import LayoutError
from mmm.layout import Layout
from mmm.models.llama.plan import transformer_plan
from mmm.models.rules import HIDDEN, context_rules, refuse, tp_rule
from mmm.parallel.plan import Plan
from mmm.parallel.tp.lora import plan_with_lora
from mmm.parallel.tp.replicated import Replicated
from mmm_lab.parity.fixtures import lora
from mmm_lab.parity.fixtures.plain_gpt import GPTConfig


def plain_gpt_plan() -> Plan:
    """Returns the plan of `fixtures.plain_gpt.GPT`, of any size.

    In each block, columns are sharded, then rows. The vocabulary is sharded by rows, in the embedding and in the output
    matrix: they are one tied weight. What is between is replicated.
    """
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "places": Replicated(),
        "blocks.*.norm1": Replicated(),
        # One entrance for the three: their gradients are added here before they are added over tp.
        "blocks.*.attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.norm2": Replicated(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return Plan(
        tensor=styles,
        # The first and the last become one unit: they share a weight.
        fsdp_units=("tokens", "blocks.*", ("norm", "head")),
        checkpointed=("blocks.*",),
        compiled=("blocks.*",),
        attention=("blocks.*.attention",),
        stages=(("tokens", "places"), "blocks.*", ("norm", "head")),
        sequence=True,
        output="head",
        refused={"ep": "the GPT has no experts"},
        check=lambda model, layout, inputs, ulysses: check_plain_gpt(model.config, layout, inputs, ulysses),
    )


def lora_plan() -> Plan:
    """Returns the plan of `fixtures.lora.LoRATransformer`."""
    return plan_with_lora(transformer_plan(lora.SIZES), lora.ADAPTED)


def check_plain_gpt(config: GPTConfig, layout: Layout, inputs: Tensor, ulysses: int) -> None:
    """Check that a GPT of these sizes fits the layout. Needs no process group.

    Args:
        inputs: tokens of a rank's samples, (batch, seq).
        ulysses: ranks of cp that shard heads among them.

    Raises:
        LayoutError: every rule that is broken, with its numbers.
    """
    seq_length = inputs.shape[1]
    # Learned positions end there.
    if seq_length > config.seq_length:
        raise LayoutError(f"{seq_length} tokens in a sequence, and the GPT has places for {config.seq_length}")
    broken = context_rules(config.n_heads, layout, seq_length, ulysses)
    for name in ("n_heads", "vocab_size"):
        size = getattr(config, name)
        # One rule that a size breaks is enough to say.
        if size % layout.tp and name not in broken:
            broken[name] = f"{name} {size} is not divisible by tp {layout.tp}"
    refuse(broken)


def regression_plan() -> Plan:
    """Returns the plan of `fixtures.regression.Regression`: up by columns, down by rows; the rest is replicated."""
    return Plan(
        tensor={
            "blocks.*.norm": Replicated(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": Replicated(),
        },
        fsdp_units=("blocks.*",),
        checkpointed=("blocks.*",),
        stages=("standardize", "blocks.*", "head"),
        refused={"cp": "the perceptron has no sequence to shard", "ep": "the perceptron has no experts"},
        check=_check_hidden,
    )


def batch_norm_plan() -> Plan:
    """Returns the plan of `fixtures.batch_norm.BatchNormNet`: the perceptron by columns, then rows; norms are
    replicated."""
    return Plan(
        tensor={
            "conv": Replicated(),
            "norm1": Replicated(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "norm2": Replicated(),
            "head": Replicated(),
        },
        # Small modules with a neighbour: a unit costs a gather.
        fsdp_units=(("conv", "norm1"), "up", "down"),
        refused={
            "pp": "a micro-batch does not know the statistics of the batch",
            "cp": "an image has no sequence to shard",
            "ep": "the CNN has no experts",
        },
        check=_check_hidden,
    )


def _check_hidden(model: Any, layout: Layout, inputs: Tensor, ulysses: int) -> None:
    """Raises LayoutError: tp does not divide the hidden units."""
    refuse(tp_rule("hidden", model.hidden, layout.tp, HIDDEN))
