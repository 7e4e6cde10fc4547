"""Where a pipeline cuts a model: which of its parts go into which stage.

A stage is the same model with parts left out. Each part costs the floating-point operations of its forward, counted on
the meta device: an embedding looks up and costs nothing, an output matrix over a large vocabulary as much as several
layers. The cuts make the slowest stage as cheap as can be, and among those the stages as even as can be::

    parts   embedding   layer 0   layer 1   layer 2   layer 3   norm, output
    cost        0          4         4         4         4           6
            └──────── stage 0: 12 ─────────────┘└─── stage 1: 10 ──────────┘

Needs no process group.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmm.errors import LayoutError
from mmm.parallel.plan import Plan, matches

Part = tuple[str, ...]  # names of the modules that stay together


def parts_of(model: nn.Module, plan: Plan) -> list[Part]:
    """The parts of a model that a stage holds or lacks, in the order of forward.

    Raises:
        LayoutError: the plan names none, or leaves parameters in no part.
    """
    parts: list[Part] = []
    names = [name for name, _ in model.named_modules() if name]
    for entry in plan.stages:
        if isinstance(entry, tuple):
            parts.append(tuple(name for pattern in entry for name in names if matches(pattern, name)))
        else:
            parts += [(name,) for name in names if matches(entry, name)]
    parts = [part for part in parts if part]
    inside = tuple(f"{name}." for part in parts for name in part)
    left = [name for name, _ in model.named_parameters() if not name.startswith(inside)]
    if left:
        raise LayoutError(f"the plan of this model puts {len(left)} parameters ({left[0]} first) into no pipeline "
                          f"stage: name their modules in its stages")  # fmt: skip
    return parts


def part_costs(model: nn.Module, parts: Sequence[Part], inputs: Tensor) -> list[int]:
    """Floating-point operations of each part's forward.

    Args:
        model: on the meta device. inputs: what forward takes, on the meta device; any number of samples.
    """
    # Attention is counted as matrix products: the counter does not know every fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs)
    counts, root = counter.get_flop_counts(), type(model).__name__
    return [sum(sum(counts.get(f"{root}.{name}", {}).values()) for name in part) for part in parts]


def cut(costs: Sequence[int], stages: int) -> list[range]:
    """The parts of each stage, as ranges of part numbers: consecutive, none empty.

    The largest cost of a stage is the smallest possible; of the cuts with that, the sum of squares is.

    Args:
        costs: of each part, in order. stages: at least 1, at most as many as parts.
    """
    assert 1 <= stages <= len(costs)
    before = [0, *accumulate(costs)]

    def search(limit: float, squares: bool) -> tuple[float, list[int]]:
        """The best value, and the first part of each stage: the largest cost, or the sum of squares within `limit`."""
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # parts used so far → value, first part of each stage
        for _ in range(stages):
            found: dict[int, tuple[float, list[int]]] = {}
            for start, (value, firsts) in best.items():
                for end in range(start + 1, len(costs) + 1):
                    cost = before[end] - before[start]
                    new = value + cost**2 if squares else max(value, cost)
                    if cost <= limit and (end not in found or new < found[end][0]):
                        found[end] = (new, [*firsts, start])
            best = found
        return best[len(costs)]

    slowest, _ = search(float("inf"), squares=False)
    firsts = search(slowest, squares=True)[1]
    return [range(first, last) for first, last in zip(firsts, [*firsts[1:], len(costs)], strict=True)]


def take_stage(model: nn.Module, parts: Sequence[Part], held: range) -> nn.Module:
    """A copy of `model` (on the meta device) with just the parts numbered `held`. Parameter names stay as they are."""
    stage = copy.deepcopy(model)
    for number, part in enumerate(parts):
        for name in part if number not in held else ():
            parent, _, child = name.rpartition(".")
            owner = stage.get_submodule(parent)
            if isinstance(owner, nn.ModuleDict):
                del owner[child]
            else:
                setattr(owner, child, None)
    return stage
