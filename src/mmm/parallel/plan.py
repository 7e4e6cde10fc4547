"""A plan: data that says how one kind of model is sharded and split. `mmm.models` has one for each model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from mmm.errors import LayoutError
from mmm.layout import Layout
from mmm.nn.draw import class_name
from mmm.runtime.log import get_logger


@dataclass(frozen=True)
class Plan:
    """How a model is parallelized. Names are module paths; ``*`` stands for one component: ``layers.*.attention``.

    Attributes:
        tensor: module, or for `Replicated` and `PartialGradient` also parameter → how its matrices and activations are
            sharded over the tp axis.
        fsdp_units: modules that FSDP gathers and frees as one; a tuple of names is one unit. What is in none
            goes with the root.
        compiled: modules compiled on their own. compiled_with_tp: the same where tp > 1.
        attention: modules whose ``attention_fn`` is where tokens of a sequence interact: what cp replaces.
        checkpointed: modules whose activations are recomputed in backward, where that is asked for.
        experts: mixtures of experts (`mmm.nn.experts`), whose experts ep shards.
        stages: the parts between which a pipeline may split, in the order of forward; a tuple of names is one part.
            What is in none (and has no parameters) is in every stage.
        sequence: whether the model takes (batch, seq) tokens and ``positions`` of them.
        refused: axes along which the model cannot be sharded, and why.
        check: (model, layout, inputs of a step, ulysses) → nothing; raises LayoutError where the model's sizes do not
            fit the layout. ulysses: ranks of cp that shard heads in attention (1: a ring alone). None: all fit.
        output: the matrix that computes the logits of a sequence, which the chunked loss defers.
        optional: names above that some models of this kind lack (here ``*`` stands for anything): `unmatched` is silent
            on them.
    """

    tensor: Mapping[str, ParallelStyle]
    fsdp_units: tuple[str | tuple[str, ...], ...]
    compiled: tuple[str, ...] = ()
    compiled_with_tp: tuple[str, ...] = field(default=())
    checkpointed: tuple[str, ...] = ()
    stages: tuple[str | tuple[str, ...], ...] = ()
    attention: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    sequence: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Any, Layout, Tensor, int], None] | None = None
    output: str = ""
    optional: tuple[str, ...] = ()


def check_axes(plan: Plan, layout: Layout) -> None:
    """Raises LayoutError where the model cannot be sharded along axes of the layout, one sentence each."""
    sizes = {**layout.sizes, "ep": layout.ep}
    wrong = [f"{axis} {sizes[axis]}: {why}; use {axis} 1" for axis, why in plan.refused.items() if sizes[axis] > 1]
    if wrong:
        raise LayoutError("; ".join(wrong))


def matches(pattern: str, name: str) -> bool:
    """Whether a module's path matches a pattern, component by component."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=True))


def sharded_dim(model: nn.Module, plan: Plan, name: str) -> int | None:
    """The dim along which tp shards the parameter of that name; None for one that it replicates."""
    module_name, _, own_name = name.rpartition(".")
    style = next((style for pattern, style in plan.tensor.items() if matches(pattern, module_name)), None)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    by_rows = isinstance(style, RowwiseParallel)
    if own_name == "bias":
        return None if by_rows else 0
    # A Linear keeps its matrix transposed; an embedding's rows are its rows.
    return int(by_rows == isinstance(model.get_submodule(module_name), nn.Linear))


def find(model: nn.Module, pattern: str) -> list[nn.Module]:
    """The modules of `model` with a matching path, each once, in the order of the model; none where a pipeline stage
    lacks them."""
    named = model.named_modules(remove_duplicate=False)
    return list({id(module): module for name, module in named if name and matches(pattern, name)}.values())


NAMING = ("tensor", "fsdp_units", "compiled", "compiled_with_tp", "checkpointed", "stages", "attention", "experts")


def unmatched(plan: Plan, model: nn.Module) -> list[str]:
    """The names in a plan that match no module, one sentence each, with the module that may have been meant.

    Args:
        model: the full one: a pipeline stage lacks modules on purpose.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    patterns = sorted({re.sub(r"\b\d+\b", "*", path) for path in modules})
    lacking = [pattern for pattern in plan.optional if not any(fnmatchcase(path, pattern) for path in modules)]
    texts = []
    for name, where in _fields_by_name(plan).items():
        known = [*modules, *parameters] if "tensor" in where else modules
        optional = any(fnmatchcase(name, pattern) for pattern in lacking)
        if optional or any(matches(name, path) for path in known):
            continue
        advice = "".join(f"; did you mean {path!r}?" for path in get_close_matches(name, patterns, n=1))
        texts.append(
            f"the plan names {name!r} ({', '.join(where)}), and {class_name(model)} has no such module: it is passed "
            f"over{advice}"
        )
    return texts


def _fields_by_name(plan: Plan) -> dict[str, list[str]]:
    """Each name in a plan, and the fields that have it."""
    by_name: dict[str, list[str]] = {}
    for field_name in NAMING:
        for entry in getattr(plan, field_name):
            for name in (entry,) if isinstance(entry, str) else entry:
                by_name.setdefault(name, []).append(field_name)
    if plan.output:
        by_name.setdefault(plan.output, []).append("output")
    return by_name


def warn_unmatched(plan: Plan, model: nn.Module) -> None:
    """Log `unmatched`, on rank 0."""
    if dist.get_rank() == 0:
        for text in unmatched(plan, model):
            get_logger().warning("%s", text, stacklevel=3)
