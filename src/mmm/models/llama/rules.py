"""Which sizes of a Transformer go onto which layout."""

from __future__ import annotations

from mmm.layout import Layout
from mmm.models.llama.model import TransformerConfig
from mmm.models.rules import HEADS, HIDDEN, context_rules, expert_rules, kv_head_rules, sequence_rules, tp_rule


def transformer_rules(
    config: TransformerConfig,
    layout: Layout,
    seq_length: int,
    ulysses: int,
) -> dict[str, str]:
    """The rules that a Transformer breaks on a layout, by name.

    Args:
        seq_length: length of a sample in tokens.
        ulysses: number of cp ranks that shard the heads among them (`Techniques.ulysses_size`).
    """
    problems = config.problems()
    if seq_length < 1:
        problems.append(f"seq_length is {seq_length}: it must be at least 1")
    if problems:
        return {problem: problem for problem in problems}
    tp = layout.tp
    broken = context_rules(config.n_heads, layout, seq_length, ulysses)
    broken |= expert_rules(config.n_experts, layout)
    has_window = config.window is not None and config.window < seq_length
    if layout.cp > 1 and has_window:
        broken["window"] = (
            f"window {config.window} with seq_length {seq_length} and cp {layout.cp}: attention over cp sees all "
            "tokens before one; use cp 1, or a shorter seq_length"
        )
    if tp == 1:
        return broken
    broken |= kv_head_rules(config.n_kv_heads, config.head_dim, tp)
    # With Ulysses `context_rules` has a stricter rule.
    if layout.cp == 1 or ulysses == 1:
        broken |= tp_rule("n_heads", config.n_heads, tp, HEADS)
    # Experts are not sharded over tp.
    if not config.n_experts:
        broken |= tp_rule("ffn_dim", config.hidden_dim, tp, HIDDEN)
    return broken | sequence_rules(config.vocab_size, layout, seq_length)
