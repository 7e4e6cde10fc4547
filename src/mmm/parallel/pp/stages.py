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
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmm.errors import LayoutError
from mmm.nn.init import class_name
from mmm.parallel.plan import Plan, matches
from mmm.parallel.user_line import user_line
from mmm.torch_private.module import own_modules

# Names of modules that always go into the same stage.
Part = tuple[str, ...]


def parts_of(model: nn.Module, plan: Plan) -> list[Part]:
    """The parts of a model that stages are made of, in the order of forward. No part is split between stages.

    Raises:
        LayoutError: the plan names no parts, or some parameters are in no part.
    """
    names = [name for name, _ in model.named_modules() if name]
    parts: list[Part] = []
    for entry in plan.stages:
        if isinstance(entry, tuple):
            # What several patterns match forms one part.
            modules: list[str] = []
            for pattern in entry:
                modules += [name for name in names if matches(pattern, name)]
            if modules:
                parts.append(tuple(modules))
        else:
            # Each module that matches is a part of its own.
            parts += [(name,) for name in names if matches(entry, name)]
    prefixes = tuple(f"{name}." for part_names in parts for name in part_names)
    left_out = []
    for name, _ in model.named_parameters():
        if not name.startswith(prefixes):
            left_out.append(name)
    if left_out:
        raise LayoutError(
            f"the plan of this model puts {len(left_out)} parameters ({left_out[0]} first) into no pipeline "
            f"stage: name their modules in its stages"
        )
    return parts


def part_costs(model: nn.Module, parts: Sequence[Part], inputs: Tensor) -> list[int]:
    """Floating-point operations of each part's forward.

    Args:
        model: the full model, its parameters on the meta device.
        parts: its parts, from `parts_of`.
        inputs: what forward takes, on the meta device; any number of samples.
    """
    # A copy, because buffers go to the meta device too.
    model = copy.deepcopy(model).to("meta")
    counter = FlopCounterMode(display=False)
    # Attention by matrix products: the counter does not know every fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(inputs)
    # FLOPs by the path of a module, which begins with the class of the model, and then by operator.
    counts = counter.get_flop_counts()
    root = type(model).__name__
    costs = []
    for names in parts:
        cost = 0
        for name in names:
            operations = counts.get(f"{root}.{name}", {})
            cost += sum(operations.values())
        costs.append(cost)
    return costs


def balance_stages(costs: Sequence[int], stages: int) -> list[range]:
    """The parts of each stage, as ranges of part numbers: consecutive, none empty.

    The largest cost of a stage is the smallest possible, and among such splits the sum of squares is the smallest.

    Args:
        costs: the cost of each part, in order.
        stages: number of stages: at least 1, at most as many as parts.
    """
    assert 1 <= stages <= len(costs)
    # Cost of all parts before each one.
    cost_before = [0, *accumulate(costs)]

    # A split of the first parts into stages: its largest cost, its sum of squares, and the first part of each stage.
    # Tuples compare in this order, so the smallest tuple is the best split.
    Split = tuple[float, float, list[int]]
    # Dynamic programming: each round adds a stage. `best[n]` is the best split of the first n parts.
    best: dict[int, Split] = {0: (0.0, 0.0, [])}
    for _ in range(stages):
        extended: dict[int, Split] = {}
        for start, (slowest, squares, firsts) in best.items():
            for end in range(start + 1, len(costs) + 1):
                cost = cost_before[end] - cost_before[start]
                new_slowest = max(slowest, cost)
                new_squares = squares + cost**2
                split = (new_slowest, new_squares, [*firsts, start])
                if end not in extended or split < extended[end]:
                    extended[end] = split
        best = extended
    _, _, firsts = best[len(costs)]
    ends = [*firsts[1:], len(costs)]
    return list(map(range, firsts, ends))


def boundaries_of(stages: Collection[int], n_stages: int) -> int:
    """Number of boundaries between one of a rank's stages and a stage of another rank.

    Args:
        stages: indices of the rank's stages.
        n_stages: number of stages of the model.
    """
    neighbours = [index + step for index in stages for step in (-1, 1)]
    return sum(0 <= index < n_stages and index not in stages for index in neighbours)


def take_stage(model: nn.Module, parts: Sequence[Part], stage_parts: range) -> nn.Module:
    """Copy `model`, with only the parts in `stage_parts`.

    The other parts are None in the copy, or are removed from the ModuleDict, ModuleList or Sequential that they are in.
    Names of parameters stay as they are in the full model.

    Args:
        model: the full model, its parameters on the meta device.
        parts: its parts, from `parts_of`.
        stage_parts: the numbers of the parts that the stage has.
    """
    removed: list[str] = []
    for part_id, names in enumerate(parts):
        if part_id not in stage_parts:
            removed += names
    # Modules that the stage lacks are not copied, since a deep model has many times more modules than a stage: deepcopy
    # takes what is in its memo, here None, instead of a copy. A module with several names may be in this stage under
    # another name, and so is copied.
    removed_names = set(removed)
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if name in removed_names and uses[id(module)] == 1:
            memo[id(module)] = None
    stage = copy.deepcopy(model, memo)
    for name in removed:
        path, _, child = name.rpartition(".")
        owner = stage.get_submodule(path)
        if isinstance(owner, nn.ModuleDict | nn.ModuleList | nn.Sequential):
            # `del owner[…]` of a list would rename all modules behind it.
            del own_modules(owner)[child]
        else:
            setattr(owner, child, None)
    return stage


def check_stages(
    model: nn.Module,
    parts: Sequence[Part],
    stages: Sequence[range],
    inputs: Tensor,
) -> None:
    """Try every stage's forward, on the meta device, with the output of the stage before. Needs no process group.

    Args:
        model: the full model.
        parts: its parts, from `parts_of`.
        stages: the numbers of the parts in each stage, from `balance_stages`.
        inputs: what the first stage takes, on the meta device.

    Raises:
        LayoutError: a stage cannot run, most often because forward calls a part that the stage does not have.
    """
    model = copy.deepcopy(model).to("meta")
    stage_inputs: tuple[Any, ...] = (inputs,)
    for stage_id, stage_parts in enumerate(stages):
        stage = take_stage(model, parts, stage_parts)
        is_last = stage_id + 1 == len(stages)
        try:
            with torch.no_grad():
                output = stage(*stage_inputs)
            stage_inputs = output if isinstance(output, tuple) else (output,)
            others = [class_name(value) for value in stage_inputs if not isinstance(value, Tensor)]
            if others and not is_last:
                raise TypeError(f"it returns {others[0]}, but can only send the next stage a tensor or a tuple of them")
        # A user's forward may raise anything.
        except Exception as error:
            names = [name for part_id in stage_parts for name in parts[part_id]]
            raise LayoutError(_stage_error(error, model, stage_id, names)) from error


def _stage_error(error: Exception, model: nn.Module, stage_id: int, names: Sequence[str]) -> str:
    """Why a stage's forward failed, with the line of the user's own file."""
    location = user_line(traceback.walk_tb(error.__traceback__))
    stage = f"stage {stage_id} of {class_name(model)} ({', '.join(names)})"
    return (
        f"pp: {stage} cannot run by itself: "
        f"{type(error).__name__}: {error}{location}; a stage is the same class with parts left out (None), which "
        f"forward has to skip, and takes the output of the one before it (docs/models.md); or use pp 1"
    )
