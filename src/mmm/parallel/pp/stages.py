"""Where a pipeline splits a model: which of its parts go into which stage.

A stage is the same model with parts left out. Each part costs the floating-point operations of its forward, counted on
the meta device: an embedding looks up and costs nothing, an output matrix over a large vocabulary as much as several
layers. The split makes the slowest stage as cheap as possible, and then the stages as even as possible::

    parts   embedding   layer 0   layer 1   layer 2   layer 3   norm, output
    cost        0          4         4         4         4           6
            └──────── stage 0: 12 ─────────────┘└─── stage 1: 10 ──────────┘

Needs no process group.
"""

from __future__ import annotations

import copy
import linecache
import traceback
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmm.errors import LayoutError
from mmm.nn.draw import class_name
from mmm.parallel.plan import Plan, matches
from mmm.torch_private.module import own_modules

TORCH = str(Path(torch.__file__).parent)
Part = tuple[str, ...]  # names of modules that go into the same stage


def parts_of(model: nn.Module, plan: Plan) -> list[Part]:
    """The parts of a model that a stage has or lacks, in the order of forward.

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
        raise LayoutError(
            f"the plan of this model puts {len(left)} parameters ({left[0]} first) into no pipeline "
            f"stage: name their modules in its stages"
        )
    return parts


def part_costs(model: nn.Module, parts: Sequence[Part], inputs: Tensor) -> list[int]:
    """Floating-point operations of each part's forward.

    Args:
        model: parameters on the meta device. inputs: what forward takes, on the meta device; any number of samples.
    """
    model = copy.deepcopy(model).to("meta")  # its buffers too
    # Attention by matrix products: the counter does not know every fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs)
    counts, root = counter.get_flop_counts(), type(model).__name__
    return [sum(sum(counts.get(f"{root}.{name}", {}).values()) for name in part) for part in parts]


def balance_stages(costs: Sequence[int], stages: int) -> list[range]:
    """The parts of each stage, as ranges of part numbers: consecutive, none empty.

    The largest cost of a stage is the smallest possible, and then the sum of squares.

    Args:
        costs: of each part, in order. stages: at least 1, at most as many as parts.
    """
    assert 1 <= stages <= len(costs)
    before = [0, *accumulate(costs)]

    Best = tuple[float, float, list[int]]  # the largest cost, the sum of squares, and the first part of each stage
    best: dict[int, Best] = {0: (0.0, 0.0, [])}  # by how many parts the stages so far have
    for _ in range(stages):
        extended: dict[int, Best] = {}
        for start, (slowest, squares, firsts) in best.items():
            for end in range(start + 1, len(costs) + 1):
                cost = before[end] - before[start]
                new = (max(slowest, cost), squares + cost**2, [*firsts, start])
                if end not in extended or new < extended[end]:
                    extended[end] = new
        best = extended
    firsts = best[len(costs)][2]
    return [range(first, last) for first, last in zip(firsts, [*firsts[1:], len(costs)], strict=True)]


def take_stage(model: nn.Module, parts: Sequence[Part], stage_parts: range) -> nn.Module:
    """A copy of `model` (parameters on the meta device) with just the parts of those numbers: the others are None, or
    removed from the ModuleDict, ModuleList or Sequential that they are in. Parameter names stay as they are."""
    others = [name for part_id, part in enumerate(parts) if part_id not in stage_parts for name in part]
    modules = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    # What deepcopy finds in its memo it does not copy: a deep model has many times more than a stage.
    without = {*others}
    memo = {id(m): None for name, m in model.named_modules() if name in without and modules[id(m)] == 1}
    stage = copy.deepcopy(model, memo)
    for name in others:
        parent, _, child = name.rpartition(".")
        owner = stage.get_submodule(parent)
        if isinstance(owner, nn.ModuleDict | nn.ModuleList | nn.Sequential):
            del own_modules(owner)[child]  # `del owner[…]` of a list would give those behind it other names
        else:
            setattr(owner, child, None)
    return stage


def check_stages(model: nn.Module, parts: Sequence[Part], stages: Sequence[range], inputs: Tensor) -> None:
    """Try every stage's forward, on the meta device, on the output of the one before; needs no process group.

    Args:
        model, inputs: as for `part_costs`. stages: the numbers of the parts in each, of `balance_stages`.

    Raises:
        LayoutError: a stage cannot run: most often because forward calls a part that the stage does not have.
    """
    model = copy.deepcopy(model).to("meta")
    stage_inputs: tuple[Any, ...] = (inputs,)
    for stage_id, stage_parts in enumerate(stages):
        stage = take_stage(model, parts, stage_parts)
        try:
            with torch.no_grad():
                output = stage(*stage_inputs)
            stage_inputs = output if isinstance(output, tuple) else (output,)
            others = [class_name(part) for part in stage_inputs if not isinstance(part, Tensor)]
            if others and stage_id + 1 < len(stages):
                raise TypeError(f"it returns {others[0]}, and can send the next stage tensors alone, one or a tuple")
        except Exception as error:  # whatever the user's forward raises
            names = [name for part in stage_parts for name in parts[part]]
            raise LayoutError(_why(error, model, stage_id, names)) from error


def _why(error: Exception, model: nn.Module, stage_id: int, names: Sequence[str]) -> str:
    """Why a stage's forward failed, with the line of the user's own file."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if isinstance(frame.f_locals.get("self"), nn.Module) and not file.startswith(TORCH):
            where = f" ({file}:{line}: {linecache.getline(file, line).strip()})"
    return (
        f"pp: stage {stage_id} of {class_name(model)} ({', '.join(names)}) cannot run by itself: "
        f"{type(error).__name__}: {error}{where}; a stage is the same class with parts left out (None), which forward "
        f"has to skip, and takes the output of the one before it (docs/models.md); or use pp 1"
    )
