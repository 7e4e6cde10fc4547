"""A plan: data that says how one kind of model is sharded and split. `mmm.models` has one for each model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from mmm.errors import LayoutError
from mmm.layout import Layout
from mmm.nn.init import class_name
from mmm.runtime.log import get_logger


@dataclass(frozen=True)
class Field:
    """How a model computes with fields, which ``cp_style space`` splits into strips of rows.

    Attributes:
        shape: that of a full input, without its batch, such as (channels, rows, columns).
        dim: which dim of an input is its rows: 2 of (batch, channels, rows, columns).
        parameters: parameters and buffers that are fields themselves, such as learned positions, and which dim of each
            is its rows. A rank computes with its own rows of them.
        styles: for further types of modules, how they compute with a rank's rows (docs/space.md).
        targets: which dim of the targets is their rows. None: outputs and targets are classes, or other numbers of a
            sample, which every rank computes.
    """

    shape: tuple[int, ...]
    dim: int = 2
    parameters: Mapping[str, int] = field(default_factory=dict)
    styles: Mapping[type[nn.Module], Callable[..., Any]] = field(default_factory=dict)
    targets: int | None = 2


@dataclass(frozen=True)
class Plan:
    """How a model is parallelized. Names are module paths; ``*`` stands for one component: ``layers.*.attention``.

    Attributes:
        tensor: maps a module's name to its parallel style: how its matrices and activations are sharded over the tp
            axis. `Replicated` and `PartialGradient` also take the name of a parameter.
        fsdp_units: modules that FSDP gathers and frees as one. A tuple of names is one unit. What is in no unit is
            gathered with the root.
        compiled: modules that are compiled, each on its own. With tp they have to take and return plain tensors.
        checkpointed: modules whose activations are recomputed in backward, where that is asked for.
        stages: the parts between which a pipeline may split, in the order of forward. A tuple of names is one part.
            A module that is in none of them (and has no parameters) is in every stage.
        attention: modules whose ``attention_fn`` is where tokens of a sequence interact, and nowhere else: cp replaces
            it, and a model that writes text keeps their keys and values. Empty if tokens interact elsewhere.
        experts: mixtures of experts (`mmm.nn.experts`), whose experts ep shards.
        sequence: whether the model takes (batch, seq) tokens and their ``positions``.
        refused: axes along which the model cannot be sharded, and why.
        check: function of (model, layout, inputs of a step, ulysses) that raises LayoutError where the model's sizes
            do not fit the layout. ulysses: cp ranks that shard heads in attention (1: a ring only). None: every size
            fits.
        output: the matrix that computes the logits of a sequence. The chunked loss defers it.
        rest: style for parameters that `tensor` does not name, such as ``Replicated()``. None: it has to name all.
        space: what fields the model computes with, for ``cp_style space``. None: it takes no field.
        optional: names above that some models of this kind lack (here ``*`` stands for any text): `unmatched` does not
            report them.
    """

    tensor: Mapping[str, ParallelStyle]
    fsdp_units: tuple[str | tuple[str, ...], ...]
    compiled: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    stages: tuple[str | tuple[str, ...], ...] = ()
    attention: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    sequence: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Any, Layout, Tensor, int], None] | None = None
    output: str = ""
    rest: ParallelStyle | None = None
    space: Field | None = None
    optional: tuple[str, ...] = ()


def check_axes(plan: Plan, layout: Layout) -> None:
    """Raises LayoutError where the model cannot be sharded along axes of the layout: one sentence for each axis."""
    sizes = {**layout.sizes, "ep": layout.ep}
    problems = []
    for axis, reason in plan.refused.items():
        size = sizes[axis]
        if size > 1:
            problems.append(f"{axis} {size}: {reason}; use {axis} 1")
    if problems:
        raise LayoutError("; ".join(problems))


def matches(pattern: str, name: str) -> bool:
    """Return whether a module's path matches a pattern, component by component."""
    components = name.split(".")
    patterns = pattern.split(".")
    if len(components) != len(patterns):
        return False
    return all(map(fnmatchcase, components, patterns))


def sharded_dim(model: nn.Module, plan: Plan, name: str) -> int | None:
    """Return the dim along which tp shards the parameter `name`; None if tp replicates it."""
    module_name, _, own_name = name.rpartition(".")
    style = None
    for pattern, pattern_style in plan.tensor.items():
        if matches(pattern, module_name):
            style = pattern_style
            break
    # The styles of `mmm.parallel.tp.local` say it themselves.
    own_dims = getattr(style, "own_dims", None)
    if own_dims is not None:
        return own_dims.get(own_name)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    by_rows = isinstance(style, RowwiseParallel)
    if own_name == "bias":
        # Output columns are sharded with their bias. A matrix that is sharded by rows gives partial sums of the whole
        # output, to which the whole bias is added once.
        if by_rows:
            return None
        return 0
    # A Linear keeps its matrix transposed, as (out, in); an embedding's rows are its rows.
    transposed = isinstance(model.get_submodule(module_name), nn.Linear)
    return int(by_rows == transposed)


def find(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules of `model` whose path matches, each once, in the order of the model. Empty if there are none,
    as on a pipeline stage that lacks them."""
    # By id, because a module may have two names.
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and matches(pattern, name):
            modules[id(module)] = module
    return list(modules.values())


NAMING = ("tensor", "fsdp_units", "compiled", "checkpointed", "stages", "attention", "experts")


def unmatched(plan: Plan, model: nn.Module) -> list[str]:
    """Return a sentence for each name in a plan that matches no module.

    Args:
        model: the full model: a pipeline stage lacks modules on purpose.
    """
    # The model itself has an empty name.
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # Optional patterns that nothing in this model matches: names below them are silently passed over.
    absent = []
    for pattern in plan.optional:
        is_present = any(fnmatchcase(path, pattern) for path in modules)
        if not is_present:
            absent.append(pattern)
    sentences = []
    for name, field_names in _fields_by_name(plan).items():
        paths = modules
        if "tensor" in field_names:
            paths = [*modules, *parameters]
        is_optional = any(fnmatchcase(name, pattern) for pattern in absent)
        is_matched = any(matches(name, path) for path in paths)
        if is_optional or is_matched:
            continue
        fields_text = ", ".join(field_names)
        model_name = class_name(model)
        sentences.append(
            f"the plan names {name!r} ({fields_text}), and {model_name} has no such module: it is passed over"
        )
    return sentences


def _fields_by_name(plan: Plan) -> dict[str, list[str]]:
    """Return the fields in which each name of a plan stands."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for field_name in NAMING:
        for entry in getattr(plan, field_name):
            # A tuple of names is one unit, or one stage.
            names = entry
            if isinstance(entry, str):
                names = (entry,)
            for name in names:
                by_name[name].append(field_name)
    if plan.output:
        by_name[plan.output].append("output")
    return by_name


def warn_unmatched(plan: Plan, model: nn.Module) -> None:
    """Log what `unmatched` says, on rank 0."""
    if dist.get_rank() > 0:
        return
    logger = get_logger()
    for sentence in unmatched(plan, model):
        # The log shows the line of the program, not this one.
        logger.warning("%s", sentence, stacklevel=3)
