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
from mmm.parallel.cp.ring import RingAttention
from mmm.parallel.cp.ulysses import UlyssesAttention
from mmm.parallel.plan import Plan, find
from mmm.parallel.rules import check_cp_style


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, plan: Plan, style: str) -> None:
    """Replace ``attention_fn`` of the attention modules that the plan names, in place.

    Args:
        mesh: the cp axis. style: ``ring`` or ``ulysses``.

    Raises:
        ConfigError: no such style, or a plan that names no attention.
    """
    check_cp_style(style)
    modules = [module for pattern in plan.attention for module in find(model, pattern)]
    if not plan.attention:
        raise ConfigError(f"cp {mesh.size()}: the plan of this model names no attention over a sequence; use cp 1")
    for module in modules:
        module.attention_fn = RingAttention(mesh) if style == "ring" else UlyssesAttention(mesh, module.attention_fn)  # type: ignore
