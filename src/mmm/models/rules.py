"""Rules that the sizes of several models share. Each gives those that a layout breaks, name → sentence with the
numbers, and needs no process group."""

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
    """A size that tp has to divide."""
    if size % tp == 0:
        return {}
    return {name: f"{name} {size} {'is not divisible by' if size > tp else '<'} tp {tp} ({why})"}


def context_rules(n_heads: int, layout: Layout, seq_length: int, ulysses: int) -> dict[str, str]:
    """What keeps a model's sequence from being sharded over cp.

    Args:
        n_heads: query heads of the full model.
        seq_length: in tokens.
        ulysses: ranks of cp that shard heads among them (`Techniques.ulysses_size`).
    """
    if layout.cp == 1:
        return {}
    broken = {}
    chunks = 2 * layout.cp * layout.tp
    if seq_length % chunks:
        product = f"2 · cp {layout.cp}" + (f" · tp {layout.tp}" if layout.tp > 1 else "")
        broken["seq_length"] = (
            f"seq_length {seq_length} is not divisible by {product} = {chunks} (each rank takes two chunks of the same "
            "length)"
        )
    ranks = ulysses * layout.tp
    if ulysses > 1 and n_heads % ranks:
        over = f"cp {layout.cp}" if ulysses == layout.cp else f"{config_field('ulysses')} {ulysses}"
        over += f" · tp {layout.tp} = {ranks}" if layout.tp > 1 else ""
        broken["n_heads"] = f"n_heads {n_heads} is not divisible by {over} (under ulysses {HEADS}; under ring tp does)"
    return broken


def expert_rules(n_experts: int, layout: Layout) -> dict[str, str]:
    """What keeps a model's experts from being sharded over ep.

    Args:
        n_experts: of each layer; 0 for a model without.
    """
    if layout.ep == 1 or (n_experts and n_experts % layout.ep == 0):
        return {}
    if n_experts == 0:
        return {"ep": f"ep {layout.ep}: the model has no experts to shard: give it n_experts, or use ep 1"}
    why = "each rank takes the same number of them"
    return {"n_experts": f"n_experts {n_experts} is not divisible by ep {layout.ep} ({why})"}


def kv_head_rules(n_kv_heads: int, head_dim: int, tp: int) -> dict[str, str]:
    """What keeps key/value heads from being sharded over tp."""
    if n_kv_heads % tp == 0:
        return {}
    if tp % n_kv_heads:
        why = "each rank takes whole key/value heads, or several ranks share one"
        text = f"n_kv_heads {n_kv_heads} and tp {tp}: one has to be a multiple of the other ({why})"
        return {"n_kv_heads": text}
    if n_kv_heads * head_dim % tp:
        part = tp // n_kv_heads
        why = f"each rank computes 1 / {part} of a key/value head, and head_dim {head_dim} is not divisible by {part}"
        return {"n_kv_heads": f"n_kv_heads {n_kv_heads} < tp {tp}: {why}"}
    return {}


def sequence_rules(vocab_size: int, layout: Layout, seq_length: int) -> dict[str, str]:
    """What keeps the sequence between the matrices, and the vocabulary, from being sharded over tp."""
    tp, broken = layout.tp, dict[str, str]()
    if layout.cp == 1:  # else `context_rules` has a stricter rule
        why = "between the sharded matrices each rank takes the same number of tokens"
        broken |= tp_rule("seq_length", seq_length, tp, why)
    if (tp - 1) * -(-vocab_size // tp) >= vocab_size:
        text = f"vocab_size {vocab_size} sharded over tp {tp} leaves a rank without any of it"
        broken["vocab_size"] = text
    return broken


Rules = Callable[[Any, Layout, int, int], dict[str, str]]


def check_by(rules: Rules) -> Callable[[Any, Layout, Tensor, int], None]:
    """`mmm.parallel.plan.Plan.check` of a model whose sizes go onto a layout by `rules`."""

    def check(model: Any, layout: Layout, inputs: Tensor, ulysses: int) -> None:
        seq_length = inputs.shape[1] if inputs.dim() == 2 else 0
        refuse(rules(model.config, layout, seq_length, ulysses))

    return check
