"""Which sizes of a model go onto which layout. Each function gives the rules that are broken, name → sentence with the
numbers; none where everything fits. Needs no process group, and no model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import CP_STYLES, Layout, Techniques

if TYPE_CHECKING:
    from mmm.models.cnn import CNNConfig
    from mmm.models.transformer import TransformerConfig
    from mmm.models.vit import ViTConfig

HEADS = "each rank takes whole heads"
HIDDEN = "each rank takes the same number of hidden units"


def refuse(broken: dict[str, str]) -> None:
    """Raises LayoutError with every rule that is broken."""
    if broken:
        raise LayoutError("; ".join(broken.values()))


def check_cp_style(style: str) -> None:
    """Raises ConfigError where there is no such way to shard a sequence."""
    if style not in CP_STYLES:
        raise ConfigError(f"{config_field('cp_style')} {style!r} is not one of {', '.join(CP_STYLES)}")


def check_context_parallel(techniques: Techniques, layout: Layout) -> None:
    """Whether ``cp_style`` and ``ulysses`` go together and with a layout; needs no process group.

    Raises:
        ConfigError: no such style, or ``ulysses`` with another than usp, or usp without it.
        LayoutError: it does not divide cp.
    """
    style, size, field = techniques.cp_style, techniques.ulysses, config_field("ulysses")
    check_cp_style(style)
    if style != "usp" and size is not None:
        raise ConfigError(
            f"{field} {size} with {config_field('cp_style')} {style}: it says how many ranks of cp share heads under "
            f"usp; leave it out, or use usp"
        )
    if style != "usp" or layout.cp == 1:
        return
    if size is None:
        raise ConfigError(
            f"{config_field('cp_style')} usp: give {field}, ranks of cp that share heads, a divisor of cp {layout.cp}"
        )
    if size < 1 or layout.cp % size:
        raise LayoutError(f"{field} {size} does not divide cp {layout.cp}: give one of {divisors_text(layout.cp)}")


def divisors_text(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def resolve_ulysses(techniques: Techniques, layout: Layout, n_heads: int, ranks_per_host: int | None) -> Techniques:
    """With ``ulysses`` of usp, where it is left open: the most ranks of cp that share a host and divide the heads.

    Args:
        n_heads: query heads of the full model. ranks_per_host: None where it is not known.

    Raises:
        ConfigError: it is not known, or hosts have different numbers of ranks.
    """
    if techniques.cp_style != "usp" or techniques.ulysses is not None or layout.cp == 1:
        return techniques
    if ranks_per_host is None or layout.ranks % ranks_per_host:
        raise ConfigError(
            f"{config_field('cp_style')} usp: nothing says which ranks of cp share a host: give "
            f"{config_field('ulysses')}, one of {divisors_text(layout.cp)}"
        )
    return replace(techniques, ulysses=host_ulysses(layout.cp, layout.tp, n_heads, ranks_per_host))


def host_ulysses(cp: int, tp: int, n_heads: int, ranks_per_host: int) -> int:
    """The most neighbours along cp that share a host and, with tp, divide the heads."""
    sizes = (n for n in range(1, cp + 1) if cp % n == 0)
    return max((n for n in sizes if ranks_per_host % (n * tp) == 0 and n_heads % (n * tp) == 0), default=1)


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
    if tp == 1:
        return broken
    broken |= kv_head_rules(config.n_kv_heads, config.head_dim, tp)
    if layout.cp == 1 or ulysses == 1:  # else `context_rules` has a stricter rule
        broken |= tp_rule("n_heads", config.n_heads, tp, HEADS)
    if not config.n_experts:  # which are not sharded over tp
        broken |= tp_rule("ffn_dim", config.hidden_dim, tp, HIDDEN)
    return broken | sequence_rules(config.vocab_size, layout, seq_length)


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


def check_transformer(config: TransformerConfig, layout: Layout, seq_length: int, ulysses: int = 1) -> None:
    """Raises LayoutError with every rule that such a Transformer breaks. Arguments as of `transformer_rules`."""
    refuse(transformer_rules(config, layout, seq_length, ulysses))


def vit_rules(config: ViTConfig, layout: Layout) -> dict[str, str]:
    """Of a Vision Transformer."""
    if wrong := config.problems():
        return {problem: problem for problem in wrong}
    heads = tp_rule("n_heads", config.n_heads, layout.tp, HEADS)
    return heads | tp_rule("mlp_dim", config.hidden_dim, layout.tp, HIDDEN)


def cnn_rules(config: CNNConfig, layout: Layout) -> dict[str, str]:
    """Of the CNN."""
    if wrong := config.problems():
        return {problem: problem for problem in wrong}
    return tp_rule("hidden", config.hidden, layout.tp, "each rank takes the same number")
