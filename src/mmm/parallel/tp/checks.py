"""What a style can be right on. What PyTorch does not refuse by itself is refused before a rank computes.

================  ==================================================================================================
style             takes
================  ==================================================================================================
ColwiseParallel,  one matrix: a Linear, an Embedding or a Conv1D (transformers' matrix, kept as (in, out)), or a class
RowwiseParallel,  derived from these that takes and returns one tensor; each rank columns or rows of its own
SectionedColwise
SequenceParallel  a module that computes each token by itself, and takes and returns one tensor
Replicated        any module or parameter
PartialGradient   any but statistics over what other ranks have
================  ==================================================================================================

A style of the user's own, also one derived from these, is taken as it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from mmm.errors import LayoutError
from mmm.nn.draw import class_name
from mmm.parallel.tp.conv1d import column_dim, is_conv1d
from mmm.parallel.tp.replicated import PartialGradient
from mmm.torch_private.module import Convolution, NormBase

REPLICATE = "name it Replicated()"
# What they compute for a token depends on others or on the place of channels; embeddings take tokens of another shape.
BESIDE_TOKENS = (Convolution, NormBase, nn.GroupNorm, nn.RNNBase, nn.Bilinear, nn.PReLU, nn.Embedding, nn.EmbeddingBag)


def is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)


def by_place(module: nn.Module) -> None:
    """Have a module give its only input by place, where PyTorch's styles look for it."""

    def placed(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return ((*args, *kwargs.values()), {}) if kwargs else None

    module.register_forward_pre_hook(placed, with_kwargs=True)


def check_style(model: nn.Module, path: str, style: ParallelStyle, tp: int) -> None:
    """Raises LayoutError where a style cannot be right on the module at `path`, with the module's class and what to do.

    Args:
        model: no style applied to it yet. tp: ranks.
    """
    module = model.get_submodule(path)
    wrong = ""
    if not is_known(style):
        return
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        wrong = _matrix_problem(module, style) or _width_problem(module, style, tp)
    elif isinstance(style, SequenceParallel):
        if list(module.children()) or isinstance(module, BESIDE_TOKENS):
            wrong = f"takes a module that computes each token by itself, without modules inside: {REPLICATE}"
    elif isinstance(style, PartialGradient):
        wrong = next(filter(None, map(style.problem, module.modules())), "")
    if wrong:
        raise LayoutError(f"tp {tp}: {path} ({class_name(module)}): {type(style).__name__} {wrong}")


def is_known(style: ParallelStyle) -> bool:
    """Whether a style is PyTorch's or ours."""
    return type(style).__module__.partition(".")[0] in ("torch", "mmm")


def _matrix_problem(module: nn.Module, style: Any) -> str:
    """Why a module is no matrix that can be sharded by columns or rows, and what to do; empty where it is one."""
    own = dict(module.named_parameters(recurse=False))
    if not is_matrix(module):
        inside = "name the matrices inside it, or " * any(map(is_matrix, module.modules()))
        return f"shards one matrix, that of a Linear, an Embedding or a Conv1D: {inside}{REPLICATE}"
    if list(module.children()) or "weight" not in own:
        return f"shards its own weight alone, and here others are part of it: {REPLICATE}"
    weight = own["weight"]
    sizes = [getattr(module, name, None) for name in ("out_features", "in_features")]
    if isinstance(module, nn.Linear) and sizes != list(weight.shape):
        return f"shards a matrix of {sizes[0]} × {sizes[1]}, and its weight is {tuple(weight.shape)}: {REPLICATE}"
    if isinstance(module, nn.Embedding) and getattr(style, "input_layouts", None) == (Shard(-1),):
        return "takes the tokens for this rank's part of them: give it input_layouts=Replicate()"
    return ""


def _width_problem(module: nn.Module, style: Any, tp: int) -> str:
    """Ranks that give each other, or take, plain tensors of unequal widths do not know the full one."""
    if hasattr(style, "problem"):
        return style.problem(module, tp)
    weight = module.get_parameter("weight")
    by_rows = isinstance(style, RowwiseParallel)
    if is_conv1d(module) and not by_rows and weight.shape[1] == 3 * weight.shape[0]:
        widths = ", ".join([str(len(weight))] * 3)
        return f"would split q, k and v, side by side in it, as one: SectionedColwise({widths})"
    width = weight.shape[column_dim(module) if not by_rows else 1 - column_dim(module)]
    plain = style.input_layouts if by_rows else style.output_layouts * style.use_local_output
    if plain == (Shard(-1),) and width % tp:
        return f"splits {width} {'rows' if by_rows else 'columns'}, which {tp} ranks do not divide: use a tp that does"
    return ""
