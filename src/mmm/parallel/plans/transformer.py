"""How the Transformer is cut over tp.

Between the cut matrices the sequence is cut (sequence parallel): norms and residuals are not worked out tp times::

    activations        (batch, seq/tp, dim)          norms, residuals: each rank its own tokens
      │ all-gather over the sequence
      ▼                (batch, seq, dim)
    wq wk wv, w1 w3    [ A₀ │ A₁ │ A₂ │ A₃ ]         columns: each rank its own heads, its own hidden units
      │
      ▼                (batch, seq, heads/tp, …)     attention and SiLU: no communication
                       ┌ A₀ ┐
    wo, w2             │ A₁ │                        rows: each rank a summand of the whole
                       └ ⋮  ┘
      │ reduce-scatter over the sequence
      ▼                (batch, seq/tp, dim)

    tok_embeddings     rows (the vocabulary): each rank looks up its own tokens; the sum is scattered over the sequence
    router             whole: each rank scores its own tokens of the cut sequence; experts are not cut over tp
                       (`mmm.parallel.expert.apply`)
    output             columns (the vocabulary): logits stay cut, and the loss is worked out on the cut logits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from mmm.errors import LayoutError
from mmm.models.transformer import TransformerConfig
from mmm.parallel.advice import Broken, advise
from mmm.parallel.context.apply import context_problems
from mmm.parallel.expert.apply import expert_problems
from mmm.parallel.mesh import Layout
from mmm.parallel.plan import Plan
from mmm.parallel.tensor.kv_heads import KVHeads, kv_head_problems


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
        # Nothing with tp > 1: what takes a DTensor has had silently wrong gradients when compiled (PyTorch 2.13).
    )


def check_transformer(config: TransformerConfig, layout: Layout, seq_length: int, cp_style: str = "ring") -> None:
    """Whether a Transformer of these sizes can be cut as the layout says; needs no process group.

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
        changed = {flag: size for flag, size in sizes.items() if flag != "seq_length" and size != given[flag]}
        return _broken(replace(config, **changed), layout, sizes["seq_length"], cp_style)

    given = {flag: getattr(config, flag) for flag in ("n_heads", "n_kv_heads", "vocab_size", "n_experts")}
    given |= {"ffn_dim": config.hidden_dim, "seq_length": seq_length}
    if text := advise(find, given, layout):
        raise LayoutError(text)


def _broken(config: TransformerConfig, layout: Layout, seq_length: int, cp_style: str) -> list[Broken]:
    """The rules that such a Transformer breaks on a layout."""
    if wrong := config.problems():
        return [Broken(problem, problem) for problem in wrong]
    found = context_problems(config.n_heads, layout, seq_length, cp_style) + expert_problems(config.n_experts, layout)
    if layout.tp == 1:
        return found
    found += kv_head_problems(config.n_kv_heads, config.head_dim, layout.tp)
    for flag, size, what in (
        ("n_heads", config.n_heads, "each rank takes whole heads"),
        ("ffn_dim", config.hidden_dim, "each rank takes the same part of the feed-forward layer"),
        ("seq_length", seq_length, "between the cut matrices each rank takes the same part of the sequence"),
    ):
        if flag == "seq_length" and layout.cp > 1:
            continue  # has had a stricter rule
        if flag == "n_heads" and layout.cp > 1 and cp_style == "ulysses":
            continue  # has had a stricter rule
        if flag == "ffn_dim" and config.n_experts:
            continue  # experts are whole on each tp rank
        if size % layout.tp:
            broken = "is not divisible by" if size > layout.tp else "<"
            found.append(Broken(flag, f"{flag} {size} {broken} tp {layout.tp} ({what})", flag, ("tp",)))
    if (layout.tp - 1) * -(-config.vocab_size // layout.tp) >= config.vocab_size:
        text = f"vocab_size {config.vocab_size} cut over tp {layout.tp} leaves a rank without any of it"
        found.append(Broken("vocab_size", text, "vocab_size", ("tp",)))
    return found
