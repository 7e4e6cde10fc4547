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

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from mmm.layout import Layout
from mmm.models.llama.model import TransformerConfig
from mmm.models.rules import (
    HEADS,
    HIDDEN,
    check_by,
    context_rules,
    expert_rules,
    kv_head_rules,
    sequence_rules,
    tp_rule,
)
from mmm.parallel.plan import Plan
from mmm.parallel.tp.tensor_parallel import KVHeads


def transformer_plan(config: TransformerConfig | None = None) -> Plan:
    """The plan of `mmm.models.llama.model.Transformer`, of any size.

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
        check=check_by(transformer_rules),
        experts=("layers.*.moe",),
        output="output",
        optional=("layers.*.feed_forward*", "layers.*.moe*"),  # a model has the one or the other
        # No compiled_with_tp: modules that take a DTensor have silently wrong gradients when compiled (PyTorch 2.13).
    )


def transformer_rules(config: TransformerConfig, layout: Layout, seq_length: int, ulysses: int) -> dict[str, str]:
    """Of a Transformer.

    Args:
        seq_length: in tokens.
        ulysses: ranks of cp that shard heads among them (`Techniques.ulysses_size`).
    """
    wrong = config.problems() + ([f"seq_length is {seq_length}: it must be at least 1"] if seq_length < 1 else [])
    if wrong:
        return {problem: problem for problem in wrong}
    tp = layout.tp
    broken = context_rules(config.n_heads, layout, seq_length, ulysses) | expert_rules(config.n_experts, layout)
    if layout.cp > 1 and config.window is not None and config.window < seq_length:
        broken["window"] = (
            f"window {config.window} with seq_length {seq_length} and cp {layout.cp}: attention over cp sees all "
            "tokens before one; use cp 1, or a shorter seq_length"
        )
    if tp == 1:
        return broken
    broken |= kv_head_rules(config.n_kv_heads, config.head_dim, tp)
    if layout.cp == 1 or ulysses == 1:  # else `context_rules` has a stricter rule
        broken |= tp_rule("n_heads", config.n_heads, tp, HEADS)
    if not config.n_experts:  # which are not sharded over tp
        broken |= tp_rule("ffn_dim", config.hidden_dim, tp, HIDDEN)
    return broken | sequence_rules(config.vocab_size, layout, seq_length)
