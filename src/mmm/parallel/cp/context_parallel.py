"""Context parallelism: the sequence sharded over the ranks of the cp axis, for sequences that are too long for one.

All modules except attention treat each token by itself, and stay as they are. Attention is causal: the last token
attends to ``seq`` keys and the first to one, so that consecutive shards would be unequal work. The sequence is split
into 2 · cp chunks, and each rank takes one from the head and its counterpart from the tail; cp = 4::

    chunk    0    1    2    3  │  4    5    6    7         work of a chunk: 1 3 5 7 9 11 13 15 (in half squares)
    rank     0    1    2    3  │  3    2    1    0         of a rank: 1 + 15 = 3 + 13 = 5 + 11 = 7 + 9
             └────┴────┴────┴──┴──┴────┴────┴────┘

Two styles of attention reach the tokens of all ranks: ``ring`` (`mmm.parallel.cp.ring`) sends keys and values
round, ``ulysses`` (`mmm.parallel.cp.ulysses`) shards heads instead of the sequence during attention.

All ranks of a cp group have the same parameters and different tokens, so that for gradients cp is one more data
parallel axis: FSDP shards parameters, and sums gradients, over dp_shard × cp together (``dp_shard_cp``).

Source: the Llama team, "The Llama 3 Herd of Models", 2024, section 3.3.2; ``torch.distributed.tensor.experimental``
splits the same way.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmm.errors import ConfigError
from mmm.layout import Layout
from mmm.parallel.advice import Broken
from mmm.parallel.cp.ring import RingAttention
from mmm.parallel.cp.ulysses import UlyssesAttention
from mmm.parallel.plan import Plan, find

STYLES = ("ring", "ulysses")


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, plan: Plan, style: str) -> None:
    """Replace ``attention_fn`` of the attention modules that the plan names, in place.

    Args:
        mesh: the cp axis. style: ``ring`` or ``ulysses``.

    Raises:
        ConfigError: no such style, or a plan that names no attention.
    """
    _check_style(style)
    modules = [module for pattern in plan.attention for module in find(model, pattern)]
    if not plan.attention:
        raise ConfigError(f"cp {mesh.size()}: the plan of this model names no attention over a sequence; use cp 1")
    for module in modules:
        module.attention_fn = RingAttention(mesh) if style == "ring" else UlyssesAttention(mesh, module.attention_fn)  # type: ignore


def _check_style(style: str) -> None:
    if style not in STYLES:
        raise ConfigError(f"cp_style {style!r} is not one of {', '.join(STYLES)}", fields=("cp_style",))


def context_problems(n_heads: int, layout: Layout, seq_length: int, style: str) -> list[Broken]:
    """What keeps a model's sequence from being sharded; empty where nothing does.

    Args:
        n_heads: query heads of the full model. seq_length: in tokens.
    """
    _check_style(style)
    if layout.cp == 1:
        return []
    found = []
    chunks = 2 * layout.cp * layout.tp
    if seq_length % chunks:
        product = f"2 · cp {layout.cp}" + (f" · tp {layout.tp}" if layout.tp > 1 else "")
        text = (
            f"seq_length {seq_length} is not divisible by {product} = {chunks} (each rank takes two chunks of the same "
            f"length)"
        )
        found.append(Broken("seq_length", text, "seq_length", ("cp",)))
    ranks = layout.cp * layout.tp
    if style == "ulysses" and n_heads % ranks:
        over = f"cp {layout.cp}" + (f" · tp {layout.tp} = {ranks}" if layout.tp > 1 else "")
        text = f"n_heads {n_heads} is not divisible by {over} (under ulysses each rank takes whole heads)"
        field = "" if n_heads % layout.tp else "cp_style ring"
        found.append(Broken("n_heads", text, "n_heads", ("cp",), field))
    return found
