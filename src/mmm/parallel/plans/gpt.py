"""How the GPT is sharded over tp: in each block columns, then rows; the vocabulary by rows, in the embedding and in the
output matrix, which are one tied weight and so have to be sharded alike. All other modules are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from mmm.errors import LayoutError
from mmm.models.gpt import GPTConfig
from mmm.parallel.advice import Broken, check_sizes
from mmm.parallel.context.apply import context_problems
from mmm.parallel.mesh import Layout
from mmm.parallel.plan import Plan
from mmm.parallel.tensor.replicated import Replicated


def gpt_plan() -> Plan:
    """The plan of `mmm.models.gpt.GPT`, of any size."""
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "places": Replicated(),
        "blocks.*.norm1": Replicated(),
        # One input for query, key and value: their gradients are summed here before they are reduced over tp.
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
        fsdp_units=("tokens", "blocks.*", ("norm", "head")),  # first and last become one: they share a weight
        checkpointed=("blocks.*",),
        compiled=("blocks.*",),
        attention=("blocks.*.attention",),
        stages=(("tokens", "places"), "blocks.*", ("norm", "head")),
        sequence=True,
        output="head",
        refused={"ep": "the GPT has no experts"},
        check=lambda model, layout, inputs, cp_style: check_gpt(model.config, layout, inputs, cp_style),
    )


def check_gpt(config: GPTConfig, layout: Layout, inputs: Tensor, cp_style: str) -> None:
    """Whether a GPT of these sizes fits a layout; needs no process group.

    Raises:
        LayoutError: every rule that is broken, with its numbers and what to change.
    """
    seq_length = inputs.shape[1]
    if seq_length > config.seq_length:
        raise LayoutError(f"{seq_length} tokens in a sequence, and the GPT has places for {config.seq_length}")

    def find(sizes: Mapping[str, int], layout: Layout) -> list[Broken]:
        found = context_problems(sizes["n_heads"], layout, sizes["seq_length"], cp_style)
        for name in ("n_heads", "vocab_size"):
            if sizes[name] % layout.tp and name not in {broken.rule for broken in found}:
                text = f"{name} {sizes[name]} is not divisible by tp {layout.tp}"
                found.append(Broken(name, text, name, ("tp",)))
        return found

    given = {"n_heads": config.n_heads, "vocab_size": config.vocab_size, "seq_length": seq_length}
    check_sizes(find, given, layout)
