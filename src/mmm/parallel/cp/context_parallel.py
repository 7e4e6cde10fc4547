"""Context parallelism: the sequence sharded over the ranks of the cp axis, for sequences that are too long for one.

All modules except attention treat each token by itself, and stay as they are. Attention is causal: the last token
attends to ``seq`` keys and the first to one, so that consecutive shards would be unequal work. The sequence is split
into 2 · cp chunks, and each rank takes one from the head and its counterpart from the tail; cp = 4::

    chunk    0    1    2    3  │  4    5    6    7         work of a chunk: 1 3 5 7 9 11 13 15 (in half squares)
    rank     0    1    2    3  │  3    2    1    0         of a rank: 1 + 15 = 3 + 13 = 5 + 11 = 7 + 9
             └────┴────┴────┴──┴──┴────┴────┴────┘

Three styles of attention reach the tokens of all ranks: ``ring`` (`mmm.parallel.cp.ring`) sends keys and values
round, ``ulysses`` (`mmm.parallel.cp.ulysses`) shards heads instead of the sequence during attention, and ``usp``
(Unified Sequence Parallelism) does one inside the other: neighbours shard heads, and rings of one rank of each such
group send what these then have of keys and values round; cp = 4, ``ulysses`` 2::

    ranks                  0     1     2     3
    chunks                0 7   1 6   2 5   3 4
    all-to-all           [ 01    67] [ 23    45]     of ranks 0 and 1, and 2 and 3: each has half of the heads
    ring, half of heads    0 ───────── 2             0 1 6 7 and 2 3 4 5: again a chunk of the head and one of the tail
                                 1 ───────── 3

What a group has together is what a rank of a ring over the groups has: the balance above stays. The all-to-all wants
the fast links of a host, the ring hides behind compute: by default `ulysses` are the ranks of a host.

All ranks of a cp group have the same parameters and different tokens, so that for gradients cp is one more data
parallel axis: FSDP shards parameters, and sums gradients, over dp_shard × cp together (``dp_shard_cp``).

Sources: the Llama team, "The Llama 3 Herd of Models", 2024, section 3.3.2; ``torch.distributed.tensor.experimental``
splits the same way. Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.parallel.cp.ring import RingAttention
from mmm.parallel.cp.ulysses import UlyssesAttention
from mmm.parallel.mesh import Mesh
from mmm.parallel.plan import Plan, find


def apply_context_parallel(model: nn.Module, mesh: Mesh, plan: Plan, ulysses: int) -> None:
    """Replace ``attention_fn`` of the attention modules that the plan names, in place. A collective.

    Args:
        ulysses: ranks of cp that shard heads among them, a divisor of cp: 1 for a ring alone, cp for no ring.

    Raises:
        ConfigError: a plan that names no attention.
    """
    modules = [module for pattern in plan.attention for module in find(model, pattern)]
    if not plan.attention:
        raise ConfigError(f"cp {mesh.layout.cp}: the plan of this model names no attention over a sequence; use cp 1")
    for module in modules:
        module.attention_fn = attention_over_cp(mesh, ulysses, module.attention_fn)  # type: ignore


def attention_over_cp(mesh: Mesh, ulysses: int, attention_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Causal attention over a sequence that is sharded over cp. A collective.

    Args:
        attention_fn: to a full sequence, of a model. ulysses: as of `apply_context_parallel`.
    """
    ring, heads = mesh.split_cp(ulysses)
    attention = attention_fn if ring is None else RingAttention(ring)
    return attention if heads is None else UlyssesAttention(heads, attention)
