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

from mmm.models.transformer import TransformerConfig
from mmm.parallel.plan import Plan
from mmm.parallel.rules import check_transformer
from mmm.parallel.tp.tensor_parallel import KVHeads


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
        check=lambda model, layout, inputs, ulysses: check_transformer(model.config, layout, inputs.shape[1], ulysses),
        experts=("layers.*.moe",),
        output="output",
        optional=("layers.*.feed_forward*", "layers.*.moe*"),  # a model has the one or the other
        # No compiled_with_tp: modules that take a DTensor have silently wrong gradients when compiled (PyTorch 2.13).
    )
