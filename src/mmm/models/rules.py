"""Rules about sizes and layouts that several models share.

Each function returns the rules that a layout breaks, by the name of the size: a sentence with the numbers. None needs
a process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mmm.errors import LayoutError, config_field
from mmm.layout import Layout

HEADS = "each rank takes whole heads"
HIDDEN = "each rank takes the same number of hidden units"


def refuse(broken: dict[str, str]) -> None:
    """Raises LayoutError with every rule that is broken."""
    if broken:
        raise LayoutError("; ".join(broken.values()))


def tp_rule(name: str, size: int, tp: int, why: str) -> dict[str, str]:
    """The rule that tp has to divide a size.

    Args:
        why: the reason, which ends the sentence.
    """
    if size % tp == 0:
        return {}
    relation = "<"
    if size > tp:
        relation = "is not divisible by"
    return {name: f"{name} {size} {relation} tp {tp} ({why})"}


def context_rules(
    n_heads: int,
    layout: Layout,
    seq_length: int,
    ulysses: int,
) -> dict[str, str]:
    """Rules for sharding a model's sequence over cp.

    Args:
        n_heads: number of query heads of the full model.
        seq_length: length of a sample in tokens.
        ulysses: number of cp ranks that shard the heads among them (`Techniques.ulysses_size`).
    """
    cp = layout.cp
    tp = layout.tp
    if cp == 1:
        return {}
    broken = {}
    # A rank has one chunk from the head of the sequence and one from its tail, and tp shards each of them.
    chunks = 2 * cp * tp
    if seq_length % chunks:
        product = f"2 · cp {cp}"
        if tp > 1:
            product += f" · tp {tp}"
        broken["seq_length"] = (
            f"seq_length {seq_length} is not divisible by {product} = {chunks} (each rank takes two chunks of the same "
            "length)"
        )
    # The ranks that share the heads of a layer.
    ranks = ulysses * tp
    if ulysses > 1 and n_heads % ranks:
        product = f"{config_field('ulysses')} {ulysses}"
        if ulysses == cp:
            product = f"cp {cp}"
        if tp > 1:
            product += f" · tp {tp} = {ranks}"
        broken["n_heads"] = (
            f"n_heads {n_heads} is not divisible by {product} (under ulysses {HEADS}; under ring tp does)"
        )
    return broken


def expert_rules(n_experts: int, layout: Layout) -> dict[str, str]:
    """Rules for sharding a model's experts over ep.

    Args:
        n_experts: number of experts in each layer; 0 for a model without experts.
    """
    ep = layout.ep
    if ep == 1:
        return {}
    if n_experts == 0:
        return {"ep": f"ep {ep}: the model has no experts to shard: give it n_experts, or use ep 1"}
    if n_experts % ep == 0:
        return {}
    why = "each rank takes the same number of them"
    return {"n_experts": f"n_experts {n_experts} is not divisible by ep {ep} ({why})"}


def kv_head_rules(n_kv_heads: int, head_dim: int, tp: int) -> dict[str, str]:
    """Rules for sharding key/value heads over tp."""
    # Each rank has whole heads.
    if n_kv_heads % tp == 0:
        return {}
    if tp % n_kv_heads:
        why = "each rank takes whole key/value heads, or several ranks share one"
        text = f"n_kv_heads {n_kv_heads} and tp {tp}: one has to be a multiple of the other ({why})"
        return {"n_kv_heads": text}
    # Several ranks share a head: each computes some rows of it, and they gather the rest.
    if n_kv_heads * head_dim % tp:
        n = tp // n_kv_heads
        why = f"each rank computes 1 / {n} of a key/value head, and head_dim {head_dim} is not divisible by {n}"
        return {"n_kv_heads": f"n_kv_heads {n_kv_heads} < tp {tp}: {why}"}
    return {}


def sequence_rules(vocab_size: int, layout: Layout, seq_length: int) -> dict[str, str]:
    """Rules for sharding over tp: the sequence, between the sharded matrices, and the vocabulary."""
    tp = layout.tp
    broken = {}
    # Under cp `context_rules` has a stricter rule.
    if layout.cp == 1:
        why = "between the sharded matrices each rank takes the same number of tokens"
        broken = tp_rule("seq_length", seq_length, tp, why)
    if leaves_a_rank_without(vocab_size, tp):
        broken["vocab_size"] = f"vocab_size {vocab_size} sharded over tp {tp} leaves a rank without any of it"
    return broken


def leaves_a_rank_without(size: int, ranks: int) -> bool:
    """Whether `torch.chunk` of `size` rows over `ranks` leaves the last rank without any.

    A shard has ceil(size / ranks) rows, so the first ranks may take all. Of 9 rows over 8 ranks, four ranks get 2 rows,
    one gets 1, and three get none.
    """
    rows = -(-size // ranks)
    return (ranks - 1) * rows >= size


# (sizes, layout, seq_length, ulysses) → the rules that are broken.
Rules = Callable[[Any, Layout, int, int], dict[str, str]]


def check_by(rules: Rules) -> Callable[[Any, Layout, Tensor, int], None]:
    """Make a `mmm.parallel.plan.Plan.check` from the rules of a model. It raises LayoutError."""

    def check(model: Any, layout: Layout, inputs: Tensor, ulysses: int) -> None:
        seq_length = 0
        # Tokens are (batch, seq), images have four dims.
        if inputs.dim() == 2:
            seq_length = inputs.shape[1]
        refuse(rules(model.config, layout, seq_length, ulysses))

    return check
