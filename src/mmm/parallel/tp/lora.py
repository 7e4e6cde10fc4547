"""How the two small matrices of LoRA (`mmm.nn.lora`) are sharded over tp: as the matrix next to them asks for.

::

    next to Columns          x (all of it)  ── A, the same on each rank ──► (…, rank) ── B's columns ──► own heads
    next to Rows             own hidden units ── A's rows ──► partial sums ── B, the same on each rank ──► partial sums

Either way the sum with the matrix's own output is what the module around them expects, and nothing more is sent in
forward. In backward each rank has only its part of the gradient of the matrix that all ranks have: `ColumnsThenRows`
adds these up over tp.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mmm.nn.lora import A, B
from mmm.parallel.plan import Plan
from mmm.parallel.tp.local import Columns, Rows


def plan_with_lora(plan: Plan, patterns: Collection[str]) -> Plan:
    """The plan of a model after `mmm.nn.lora.add_lora`, from the plan of its base.

    Args:
        patterns: the adapted matrices, by their names in the plan. Each of them is `Columns` or `Rows` there.
    """
    styles = dict(plan.tensor)
    for pattern in patterns:
        style = plan.tensor[pattern]
        if isinstance(style, Columns):
            # Without `heads`: the module around A and B is the matrix, which gathers the sum of both where it has to.
            styles[f"{pattern}.{B}"] = Columns()
        else:
            assert isinstance(style, Rows)
            styles[f"{pattern}.{A}"] = Rows()
    return replace(plan, tensor=styles)
