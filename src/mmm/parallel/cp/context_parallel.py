"""Context parallelism: the sequence sharded over the ranks of the cp axis, for sequences that are too long for one.

All modules except attention treat each token by itself, and stay as they are. Attention is causal: the last token
attends to ``seq`` keys and the first to one, so that consecutive shards would be unequal work. Therefore the sequence
is split into 2 · cp chunks, and each rank takes one from the head and its counterpart from the tail; with cp = 4::

    chunk    0    1    2    3  │  4    5    6    7         work of a chunk: 1 3 5 7 9 11 13 15 (in half squares)
    rank     0    1    2    3  │  3    2    1    0         of a rank: 1 + 15 = 3 + 13 = 5 + 11 = 7 + 9
             └────┴────┴────┴──┴──┴────┴────┴────┘

Three styles of attention reach the tokens of all ranks. ``ring`` (`mmm.parallel.cp.ring`) sends keys and values around
the ranks. ``ulysses`` (`mmm.parallel.cp.ulysses`) shards heads instead of the sequence during attention. ``usp``
(Unified Sequence Parallelism) puts one inside the other: neighbours shard heads, and rings, with one rank of each such
group, send around the keys and values that these ranks then have; with cp = 4 and ``ulysses`` 2::

    ranks                  0     1     2     3
    chunks                0 7   1 6   2 5   3 4
    all-to-all           [ 01    67] [ 23    45]     of ranks 0 and 1, and 2 and 3: each has half of the heads
    ring, half of heads    0 ───────── 2             0 1 6 7 and 2 3 4 5: again a chunk of the head and one of the tail
                                 1 ───────── 3

A group together has the chunks that one rank has in a ring over the groups: the balance above stays. The all-to-all
needs the fast links of a host, while the ring hides behind compute: by default `ulysses` covers the ranks of one host.

All ranks of a cp group have the same parameters and different tokens, so that for gradients cp is one more data
parallel axis: FSDP shards parameters, and sums gradients, over dp_shard × cp together (``dp_shard_cp``).

Sources: the Llama team, "The Llama 3 Herd of Models", 2024, section 3.3.2; ``torch.distributed.tensor.experimental``
splits the same way. Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mmm.errors import ConfigError, config_field
from mmm.parallel.cp.ring import RingAttention
from mmm.parallel.cp.ulysses import UlyssesAttention
from mmm.parallel.mesh import Mesh
from mmm.parallel.plan import Plan, find


def apply_context_parallel(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    ulysses: int,
) -> None:
    """Replace ``attention_fn`` of the attention modules that the plan names, in place. A collective of all ranks.

    Args:
        ulysses: how many ranks of cp shard heads among them, a divisor of cp: 1 for only a ring, cp for no ring.

    Raises:
        ConfigError: the plan names no attention.
    """
    if not plan.attention:
        others = "use cp 1"
        if plan.space is not None:
            others = f"use {config_field('cp_style')} space, which splits fields"
        raise ConfigError(f"cp {mesh.layout.cp}: the plan of this model names no attention over a sequence; {others}")
    for pattern in plan.attention:
        for module in find(model, pattern):
            module.attention_fn = attention_over_cp(mesh, ulysses, module.attention_fn)  # type: ignore


def attention_over_cp(mesh: Mesh, ulysses: int, attention_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make causal attention over a sequence that is sharded over cp. A collective of all ranks.

    Args:
        ulysses: how many ranks of cp shard heads among them, as for `apply_context_parallel`.
        attention_fn: a model's own attention, over a full sequence.
    """
    ring, heads = mesh.split_cp(ulysses)
    attention = attention_fn
    if ring is not None:
        attention = RingAttention(ring)
    if heads is not None:
        # Outside of the ring: after the all-to-all a rank has its group's tokens for some heads, and the ring then goes
        # over the groups.
        attention = UlyssesAttention(heads, attention)
    return attention
