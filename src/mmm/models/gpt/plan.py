"""How the GPT is sharded over tp: like the Transformer (`mmm.models.llama.plan`), with the sequence sharded between the
matrices.

::

    activations        (batch, seq/tp, dim)          norms, residuals, their dropout: each rank its local tokens
      │ all-gather over the sequence
      ▼                (batch, seq, dim)
    wqkv, w1           [ A₀ │ A₁ │ A₂ │ A₃ ]         columns, with their biases: some of the heads, of the hidden units
      │
      ▼                (batch, seq, heads/tp, …)     attention, the dropout of its weights, and GELU: no communication
                       ┌ A₀ ┐
    wo, w2             │ A₁ │  + bias, once          rows: each rank a partial sum
                       └ ⋮  ┘
      │ reduce-scatter over the sequence
      ▼                (batch, seq/tp, dim)

    tok_embeddings     rows (the vocabulary): each rank looks up its shard; reduce-scatter over the sequence
    pos_embeddings     rows (the positions): the same
    output             columns (the vocabulary): the embedding's matrix, and so sharded alike
"""

from __future__ import annotations

from torch.distributed.tensor.parallel import ParallelStyle

from mmm.layout import Layout
from mmm.models.gpt.model import GPTConfig
from mmm.models.rules import (
    HEADS,
    HIDDEN,
    check_by,
    context_rules,
    leaves_a_rank_without,
    sequence_rules,
    tp_rule,
)
from mmm.parallel.plan import Plan
from mmm.parallel.tp.local import Columns, ColumnsThenRows, Logits, Rows, Vocabulary
from mmm.parallel.tp.replicated import PartialGradient
from mmm.parallel.tp.tensor_parallel import ShardedDropout


def gpt_plan(config: GPTConfig | None = None) -> Plan:
    """The plan of `mmm.models.gpt.model.GPT`, of any size."""
    styles: dict[str, ParallelStyle] = {
        # Each rank looks up what is in its rows: a partial sum, reduce-scattered over the sequence.
        "tok_embeddings": Vocabulary(),
        "pos_embeddings": Vocabulary(),
        "dropout": ShardedDropout(),
        # A rank computes on its tokens: its gradients of a norm's parameters are partial sums.
        "layers.*.attention_norm": PartialGradient(),
        # All-gathers the sequence, because every head attends to all tokens, and reduce-scatters the output.
        "layers.*.attention": ColumnsThenRows(),
        "layers.*.attention.wqkv": Columns(),
        "layers.*.attention.dropout": ShardedDropout(),
        "layers.*.attention.wo": Rows(),
        "layers.*.dropout1": ShardedDropout(),
        "layers.*.ffn_norm": PartialGradient(),
        "layers.*.feed_forward": ColumnsThenRows(),
        "layers.*.feed_forward.w1": Columns(),
        "layers.*.feed_forward.w2": Rows(),
        "layers.*.dropout2": ShardedDropout(),
        "norm": PartialGradient(),
        # All-gathers the tokens. The logits are a DTensor, sharded over the vocabulary: the loss is computed from that.
        "output": Logits(),
    }
    return Plan(
        tensor=styles,
        fsdp_units=(("tok_embeddings", "pos_embeddings"), "layers.*", ("norm", "output")),
        compiled=("layers.*",),
        checkpointed=("layers.*",),
        stages=(("tok_embeddings", "pos_embeddings"), "layers.*", ("norm", "output")),
        attention=("layers.*.attention",),
        sequence=True,
        refused={"ep": "the GPT has no experts"},
        check=check_by(gpt_rules),
        output="output",
    )


def gpt_rules(
    config: GPTConfig,
    layout: Layout,
    seq_length: int,
    ulysses: int,
) -> dict[str, str]:
    """The rules that a GPT breaks on a layout, by name. See `mmm.models.llama.rules.transformer_rules`."""
    problems = config.problems()
    if seq_length < 1:
        problems.append(f"seq_length is {seq_length}: it must be at least 1")
    if problems:
        return {problem: problem for problem in problems}
    broken = context_rules(config.n_heads, layout, seq_length, ulysses)
    if seq_length > config.block_size:
        broken["block_size"] = f"seq_length {seq_length}: the model has positions for block_size {config.block_size}"
    if layout.cp > 1 and config.weights_dropout > 0:
        broken["attention_dropout"] = (
            f"attention_dropout {config.weights_dropout} with cp {layout.cp}: no rank has all weights of a head; "
            "use cp 1, or attention_dropout 0"
        )
    if layout.tp == 1:
        return broken
    # With Ulysses `context_rules` has a stricter rule.
    if layout.cp == 1 or ulysses == 1:
        broken |= tp_rule("n_heads", config.n_heads, layout.tp, HEADS)
    broken |= tp_rule("ffn_dim", config.hidden_dim, layout.tp, HIDDEN)
    if leaves_a_rank_without(config.block_size, layout.tp):
        broken["block_size"] = f"block_size {config.block_size} sharded over tp {layout.tp} leaves a rank without any"
    return broken | sequence_rules(config.vocab_size, layout, seq_length)
