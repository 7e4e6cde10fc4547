"""Which modules a style can be right on. What PyTorch itself does not refuse is refused here, before a rank computes.

================  ==================================================================================================
style             takes
================  ==================================================================================================
ColwiseParallel,  one matrix: a Linear, an Embedding or a Conv1D (transformers' matrix, kept as (in, out)), or a class
RowwiseParallel,  derived from these that takes and returns one tensor; each rank has its own columns or rows
SectionedColwise
SequenceParallel  a module that computes each token by itself, and takes and returns one tensor
Replicated        any module or parameter
PartialGradient   any module or parameter, except statistics over what other ranks have
Columns, Rows     an nn.Linear inside of a module that is ColumnsThenRows
ColumnsThenRows   any module that takes and returns one tensor
Vocabulary        an nn.Embedding
Logits            an nn.Linear
ShardedModule     any module; which of its parameters, and along which dim, the style says
ShardedAttention  an nn.MultiheadAttention
GatheredChannels  a module that takes and returns one tensor of channels
================  ==================================================================================================

A style of the user's own is taken as it is, even where it is derived from one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from mmm.errors import LayoutError
from mmm.nn.init import class_name
from mmm.parallel.tp.conv1d import column_dim, is_conv1d
from mmm.parallel.tp.local import ColumnsThenRows
from mmm.parallel.tp.replicated import PartialGradient
from mmm.runtime.device import refuse_faults
from mmm.torch_private.faults import MATRIX
from mmm.torch_private.module import Convolution, NormBase

REPLICATE = "name it Replicated()"
# What these compute for a token depends on other tokens or on the place of channels. An embedding takes tokens of
# another shape.
NOT_BY_TOKEN = (
    Convolution,
    NormBase,
    nn.GroupNorm,
    nn.RNNBase,
    nn.Bilinear,
    nn.PReLU,
    nn.Embedding,
    nn.EmbeddingBag,
)

# They make DTensors of a module's inputs or outputs.
WITH_DTENSORS = (ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput)


def is_matrix(module: nn.Module) -> bool:
    """Return whether a module is one of the matrices that can be sharded by columns or rows."""
    return isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)


def pass_inputs_by_position(module: nn.Module) -> None:
    """Have a module receive keyword arguments by position: PyTorch's styles look for its only input there."""

    def to_positions(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not kwargs:
            # None: a hook that changes nothing.
            return None
        all_args = (*args, *kwargs.values())
        return all_args, {}

    module.register_forward_pre_hook(to_positions, with_kwargs=True)


def check_style(
    model: nn.Module,
    path: str,
    style: ParallelStyle,
    tp: int,
) -> None:
    """Raises LayoutError where a style cannot be right on the module at `path`, with the module's class and what to do.

    Args:
        model: the model before any style is applied to it.
        path: the module's name in the model.
        tp: number of ranks on the tp axis.
    """
    module = model.get_submodule(path)
    problem = ""
    if not is_known(style):
        return
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        problem = _matrix_problem(module, style) or _width_problem(module, style, tp)
    elif isinstance(style, SequenceParallel):
        if list(module.children()) or isinstance(module, NOT_BY_TOKEN):
            problem = f"takes a module that computes each token by itself, without modules inside: {REPLICATE}"
        elif is_matrix(module):
            refuse_faults(MATRIX, "SequenceParallel")
    elif isinstance(style, PartialGradient):
        # It holds for the parameters of all modules inside; the first problem is reported.
        for inner in module.modules():
            problem = problem or style.problem(inner)
    elif hasattr(style, "problem"):
        problem = style.problem(module, tp)
    if problem:
        style_name = type(style).__name__
        raise LayoutError(f"tp {tp}: {path} ({class_name(module)}): {style_name} {problem}")


def check_inside(styles: Sequence[tuple[str, ParallelStyle]], tp: int) -> None:
    """Raises LayoutError where a style that computes with DTensors is inside of a module that is `ColumnsThenRows`.

    Args:
        styles: (path of a module, its style) for all that the plan names.
        tp: number of ranks on the tp axis.
    """
    blocks = [path for path, style in styles if isinstance(style, ColumnsThenRows)]
    for path, style in styles:
        if not is_known(style) or not isinstance(style, WITH_DTENSORS):
            continue
        for block in blocks:
            if path.startswith(f"{block}."):
                raise LayoutError(
                    f"tp {tp}: {path} has {type(style).__name__}, which computes with DTensors, and is inside of "
                    f"{block}, which has ColumnsThenRows and computes with plain tensors: give {path} Columns, Rows or "
                    f"PartialGradient, or have no ColumnsThenRows around it",
                )


def is_known(style: ParallelStyle) -> bool:
    """Return whether a style is PyTorch's or from this package."""
    package, _, _ = type(style).__module__.partition(".")
    return package in ("torch", "mmm")


def _matrix_problem(module: nn.Module, style: Any) -> str:
    """Why a module is not a matrix that can be sharded by columns or rows, and what to do; empty where it is one."""
    parameters = dict(module.named_parameters(recurse=False))
    if not is_matrix(module):
        advice = REPLICATE
        if any(map(is_matrix, module.modules())):
            advice = f"name the matrices inside it, or {REPLICATE}"
        return f"shards one matrix, that of a Linear, an Embedding or a Conv1D: {advice}"
    # A parametrized Linear computes its weight from parameters of modules inside it.
    if list(module.children()) or "weight" not in parameters:
        return f"shards only the module's own weight, and here others are part of it: {REPLICATE}"
    shape = tuple(parameters["weight"].shape)
    if isinstance(module, nn.Linear):
        out_features = module.out_features
        in_features = module.in_features
        if shape != (out_features, in_features):
            return f"shards a matrix of {out_features} × {in_features}, and its weight is {shape}: {REPLICATE}"
    if isinstance(module, nn.Embedding):
        input_layouts = getattr(style, "input_layouts", None)
        if input_layouts == (Shard(-1),):
            return "takes the tokens for this rank's part of them: give it input_layouts=Replicate()"
    return ""


def _width_problem(module: nn.Module, style: Any, tp: int) -> str:
    """Why the width of a matrix does not fit `tp` ranks; empty where it does.

    Ranks that give or take plain tensors have to have equal widths: they cannot know the width of the full tensor.
    """
    if hasattr(style, "problem"):
        return style.problem(module, tp)
    shape = module.get_parameter("weight").shape
    column = column_dim(module)
    by_rows = isinstance(style, RowwiseParallel)
    if is_conv1d(module) and not by_rows:
        rows, columns = shape
        # (dim, 3 · dim): GPT-2's attention has one matrix for q, k and v.
        if columns == 3 * rows:
            return f"would split q, k and v, side by side in it, as one: SectionedColwise({rows}, {rows}, {rows})"
    # Whether ranks exchange plain tensors of their own channels.
    if by_rows:
        sharded = "rows"
        width = shape[1 - column]
        is_plain = style.input_layouts == (Shard(-1),)
    else:
        sharded = "columns"
        width = shape[column]
        is_plain = style.use_local_output and style.output_layouts == (Shard(-1),)
    if is_plain and width % tp:
        return f"splits {width} {sharded}, which {tp} ranks do not divide: use a tp that does"
    return ""
