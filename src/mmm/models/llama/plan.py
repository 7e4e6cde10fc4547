"""How the Transformer is sharded over tp.

Between the sharded matrices the sequence is sharded (sequence parallel), so that norms and residuals are computed once
and not on every rank::

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

from torch.distributed.tensor.parallel import ParallelStyle

from mmm.models.llama.model import TransformerConfig
from mmm.models.llama.rules import transformer_rules
from mmm.models.rules import check_by
from mmm.parallel.plan import Plan
from mmm.parallel.tp.local import Columns, ColumnsThenRows, Logits, Rows, Vocabulary
from mmm.parallel.tp.replicated import PartialGradient


def transformer_plan(config: TransformerConfig | None = None) -> Plan:
    """The plan of `mmm.models.llama.model.Transformer`, of any size.

    Args:
        config: needed if tp is larger than the number of key/value heads. Ranks then share a head.
    """
    kv_heads = None if config is None else config.n_kv_heads
    styles: dict[str, ParallelStyle] = {
        # Each rank looks up the tokens of its rows: a partial sum, reduce-scattered over the sequence.
        "tok_embeddings": Vocabulary(),
        # A rank computes on its tokens: its gradient of a norm's weight is a partial sum.
        "layers.*.attention_norm": PartialGradient(),
        # All-gathers x over the sequence, and reduce-scatters the output. Cosines and sines are the same on every rank.
        "layers.*.attention": ColumnsThenRows(),
        "layers.*.attention.wq": Columns(),
        "layers.*.attention.wk": Columns(kv_heads),
        "layers.*.attention.wv": Columns(kv_heads),
        "layers.*.attention.wo": Rows(),
        "layers.*.ffn_norm": PartialGradient(),
        "layers.*.feed_forward": ColumnsThenRows(),
        "layers.*.feed_forward.w1": Columns(),
        "layers.*.feed_forward.w3": Columns(),
        "layers.*.feed_forward.w2": Rows(),
        # Experts take the local tokens. The router's weight is replicated, and its gradient summed.
        "layers.*.moe.router": PartialGradient(),
        "norm": PartialGradient(),
        # All-gathers the tokens. The logits are a DTensor, sharded over the vocabulary: the loss is computed from that.
        "output": Logits(),
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
        # A model has only one of these.
        optional=("layers.*.feed_forward*", "layers.*.moe*"),
    )
