"""How the Transformer is sharded over tp.

Between the sharded matrices the sequence is sharded (sequence parallel), so that no rank repeats norms and residuals::

    activations        (batch, seq/tp, dim)          norms, residuals: each rank its local tokens
      │ all-gather over the sequence
      ▼                (batch, seq, dim)
    wq wk wv, w1 w3    [ A₀ │ A₁ │ A₂ │ A₃ ]         columns: each rank some of the heads, of the hidden units
      │
      ▼                (batch, seq, heads/tp, …)     attention and SiLU: no communication
                       ┌ A₀ ┐
    wo, w2             │ A₁ │                        rows: each rank a partial sum
                       └ ⋮  ┘
      │ reduce-scatter over the sequence
      ▼                (batch, seq/tp, dim)

    tok_embeddings     rows (the vocabulary): each rank looks up its shard; reduce-scatter over the sequence
    router             replicated: each rank scores its local tokens; experts are not sharded over tp
                       (`mmm.parallel.ep.expert_parallel`)
    output             columns (the vocabulary): logits stay sharded, and so does the loss computed from them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from mmm.errors import LayoutError
from mmm.layout import Layout
from mmm.models.transformer import TransformerConfig
from mmm.parallel.advice import Broken, check_sizes
from mmm.parallel.cp.context_parallel import context_problems
from mmm.parallel.ep.expert_parallel import expert_problems
from mmm.parallel.plan import Plan
from mmm.parallel.tp.kv_heads import KVHeads, kv_head_problems


def transformer_plan(config: TransformerConfig | None = None) -> Plan:
    """The plan of `mmm.models.transformer.Transformer`, of any size.

    Args:
        config: needed where tp is larger than the number of key/value heads, which are then shared (`KVHeads`).
    """
    kv_heads = ColwiseParallel if config is None else lambda: KVHeads(config.n_kv_heads)
    styles: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": kv_heads(),
        "layers.*.attention.wv": kv_heads(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.moe": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "layers.*.moe.router": SequenceParallel(sequence_dim=0, use_local_output=True),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return Plan(
        tensor=styles,
        fsdp_units=("tok_embeddings", "layers.*", ("norm", "output")),
        uniform=True,
        compiled=("layers.*",),
        checkpointed=("layers.*",),
        stages=("tok_embeddings", "layers.*", ("norm", "output")),
        attention=("layers.*.attention",),
        sequence=True,
        check=lambda model, layout, inputs, style: check_transformer(model.config, layout, inputs.shape[1], style),
        experts=("layers.*.moe",),
        output="output",
        tiled=("layers.*.feed_forward",),
        optional=("layers.*.feed_forward*", "layers.*.moe*"),  # a model has the one or the other
        # No compiled_with_tp: modules that take a DTensor have silently wrong gradients when compiled (PyTorch 2.13).
    )


def check_transformer(config: TransformerConfig, layout: Layout, seq_length: int, cp_style: str = "ring") -> None:
    """Whether a Transformer of these sizes fits a layout; needs no process group.

    Args:
        seq_length: in tokens. cp_style: ``ring`` or ``ulysses``, where cp is above 1.

    Raises:
        LayoutError: every rule that is broken, with its numbers and what to change.
    """
    wrong = config.problems()
    if seq_length < 1:
        wrong.append(f"seq_length is {seq_length}: it must be at least 1")
    if wrong:
        raise LayoutError("; ".join(wrong))

    def find(sizes: Mapping[str, int], layout: Layout) -> list[Broken]:
        changed: dict[str, Any] = {n: size for n, size in sizes.items() if n != "seq_length" and size != given[n]}
        return broken_rules(replace(config, **changed), layout, sizes["seq_length"], cp_style)

    given = {name: getattr(config, name) for name in ("n_heads", "n_kv_heads", "vocab_size", "n_experts")}
    given |= {"ffn_dim": config.hidden_dim, "seq_length": seq_length}
    check_sizes(find, given, layout)


def broken_rules(config: TransformerConfig, layout: Layout, seq_length: int, cp_style: str) -> list[Broken]:
    """The rules that such a Transformer breaks on a layout, without advice. Arguments as of `check_transformer`."""
    if wrong := config.problems():
        return [Broken(problem, problem) for problem in wrong]
    found = context_problems(config.n_heads, layout, seq_length, cp_style)
    if layout.ep > 1:
        found += expert_problems(config.n_experts, layout)
    if layout.tp == 1:
        return found
    found += kv_head_problems(config.n_kv_heads, config.head_dim, layout.tp)
    for name, size, what in (
        ("n_heads", config.n_heads, "each rank takes whole heads"),
        ("ffn_dim", config.hidden_dim, "each rank takes the same number of hidden units"),
        ("seq_length", seq_length, "between the sharded matrices each rank takes the same number of tokens"),
    ):
        if name == "seq_length" and layout.cp > 1:
            continue  # `context_problems` has a stricter rule
        if name == "n_heads" and layout.cp > 1 and cp_style == "ulysses":
            continue  # `context_problems` has a stricter rule
        if name == "ffn_dim" and config.n_experts:
            continue  # experts are not sharded over tp
        if size % layout.tp:
            broken = "is not divisible by" if size > layout.tp else "<"
            found.append(Broken(name, f"{name} {size} {broken} tp {layout.tp} ({what})", name, ("tp",)))
    if (layout.tp - 1) * -(-config.vocab_size // layout.tp) >= config.vocab_size:
        text = f"vocab_size {config.vocab_size} sharded over tp {layout.tp} leaves a rank without any of it"
        found.append(Broken("vocab_size", text, "vocab_size", ("tp",)))
    return found
