"""How a Qwen3 is sharded over tp: like a Llama (`mmm.models.llama.plan`).

The norms over heads are replicated. A rank has only some of the heads, so their gradients are partial sums, which
`PartialGradient` adds up over the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmm.models.llama.plan import transformer_plan
from mmm.parallel.plan import Plan
from mmm.parallel.tp.replicated import PartialGradient


def qwen3_plan(config: Any) -> Plan:
    """The plan of `mmm.models.qwen3.model.Qwen3`."""
    plan = transformer_plan(config)
    norms = {
        "layers.*.attention.q_norm": PartialGradient(),
        "layers.*.attention.k_norm": PartialGradient(),
    }
    return replace(plan, tensor={**plan.tensor, **norms})
