"""Tensor parallelism on plain tensors: the parameters are `DTensor`, and a forward computes with this rank's shards.

PyTorch's `ColwiseParallel` and `RowwiseParallel` also make the activations DTensors, which find the collectives by
themselves. Here each collective is written out, as an autograd function whose backward is another one::

    forward                                   backward
    gather: all-gather of the tokens          reduce-scatter of the gradients, which are partial sums
    scatter_sum: reduce-scatter of the sums   all-gather of the tokens' gradients

A layer, where the sequence is sharded between the matrices::

    x                (batch, seq/tp, dim)     this rank's tokens: norms and residuals
      │ gather
      ▼              (batch, seq, dim)
    Columns          (batch, seq, …/tp)       this rank's heads or hidden units
      │
      ▼
    Rows             (batch, seq, dim)        this rank's partial sum
      │ scatter_sum
      ▼              (batch, seq/tp, dim)

Where it is not (the ViT), `copied` stands for gather and `summed` for scatter_sum: all ranks have all tokens, and an
all-reduce adds up the gradients on the way in, and the partial sums on the way out.

A plain tensor costs the host less than a DTensor, which is what a small step waits for (docs/guide/tensor-parallel.md
has figures).

Sources: Shoeybi et al., "Megatron-LM", 2019; with the sequence sharded: Korthikanti et al., 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mmm.parallel.tp.replicated import Owners, compute_with_local, replicate
from mmm.torch_private.groups import all_gathered, all_reduced, reduce_scattered
from mmm.torch_private.module import own_parameters

# The dim of (batch, seq, dim) along which tokens are sharded.
TOKENS = 1


class _Gather(torch.autograd.Function):
    """All-gather along a dim. Backward: each rank's gradient of the full tensor is a partial sum: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:  # type: ignore[override]
        ctx.group = group
        ctx.dim = dim
        return all_gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        # A function of autograd as well, so that this backward can be differentiated too.
        return _ScatterSum.apply(gradient, ctx.group, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    """Reduce-scatter along a dim: this rank's shard of the sum of all partial sums. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:  # type: ignore[override]
        ctx.group = group
        ctx.dim = dim
        return reduce_scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Gather.apply(gradient, ctx.group, ctx.dim), None, None


class _Copied(torch.autograd.Function):
    """The tensor itself, which all ranks have. Backward: each rank's gradient is a partial sum: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        # A function may not return its input itself.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Summed.apply(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    """All-reduce of partial sums. Backward: all ranks have the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Copied.apply(gradient, ctx.group), None


def gather(x: Tensor, group: ProcessGroup, dim: int = TOKENS) -> Tensor:
    """Return the full tensor, for a computation of which each rank has a part: all-gather; backward: reduce-scatter.

    Args:
        x: this rank's shard along `dim`, the same length on each rank.
    """
    return _Gather.apply(x, group, dim)


def scatter_sum(x: Tensor, group: ProcessGroup, dim: int = TOKENS) -> Tensor:
    """Return this rank's shard of the sum over the ranks: reduce-scatter; backward: all-gather.

    Args:
        x: this rank's partial sum, whose length along `dim` the ranks divide.
    """
    return _ScatterSum.apply(x, group, dim)


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return a tensor that all ranks have, for a computation of which each has a part; backward: all-reduce."""
    # Token numbers have no gradient to add up.
    if not x.requires_grad:
        return x
    return _Copied.apply(x, group)


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks of their partial sums: all-reduce; backward: each takes the gradient as it is."""
    return _Summed.apply(x, group)


class _ShardedMatrix(ParallelStyle):
    """Shards the parameters of one module.

    Attributes:
        own_dims: maps the name of a parameter in the module to the dim that is sharded. Others are replicated.
    """

    own_dims: ClassVar[Mapping[str, int]]

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Make the module's parameters DTensors, in place."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement: Placement = Replicate()
            if name in self.own_dims:
                placement = Shard(self.own_dims[name])
            sharded = distribute_tensor(parameter.detach(), mesh, [placement])
            own_parameters(module)[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)

    def _linear_problem(self, module: nn.Module, tp: int) -> str:
        """Why a module is not a Linear that `tp` ranks divide, and what to do; empty where it is one."""
        if not isinstance(module, nn.Linear):
            return "shards an nn.Linear: give this module ShardedModule"
        size = module.weight.shape[self.own_dims["weight"]]
        if size % tp:
            return f"splits {size} features, which {tp} ranks do not divide: use a tp that does"
        return ""


class Columns(_ShardedMatrix):
    """Shard a Linear by columns: each rank computes some of its outputs. The module around it is `ColumnsThenRows`.

    Args:
        heads: number of heads that the outputs are. Where these are fewer than ranks, as key/value heads may be, each
            rank computes a part of one and all-gathers the heads, small as they are; neighbours share a head::

                wk           [ k₀ │ k₀ │ k₁ │ k₁ ]   columns: each rank 1/4 of them
                  │ gather                            (batch, seq, kv heads · head_dim)
                  ▼
                local          k₀   k₀   k₁   k₁      (batch, seq, head_dim), for the query heads of this rank
    """

    def __init__(self, heads: int | None = None) -> None:
        self.heads = heads

    # A Linear's weight is (out, in).
    own_dims: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a module cannot be sharded by columns, and what to do; empty where it can."""
        return self._linear_problem(module, tp)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = device_mesh.size()
        self.shard(module, device_mesh)
        heads = self.heads
        # Each rank has whole heads: its columns are all that it needs.
        if heads is None or heads % tp == 0:
            return module
        group = device_mesh.get_group()
        ranks_per_head = tp // heads
        head = device_mesh.get_local_rank() // ranks_per_head

        def own_head(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            # (batch, seq, kv heads · head_dim) → (batch, seq, kv heads, head_dim)
            full = gather(output, group, dim=2)
            return full.unflatten(-1, (heads, -1))[..., head, :]

        module.register_forward_hook(own_head)
        return module


class Rows(_ShardedMatrix):
    """Shard a Linear by rows: each rank computes a partial sum of all outputs. The module around it is
    `ColumnsThenRows`, which adds the partial sums up."""

    own_dims: ClassVar[Mapping[str, int]] = {"weight": 1}

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a module cannot be sharded by rows, and what to do; empty where it can."""
        return self._linear_problem(module, tp)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.shard(module, device_mesh)
        return module


class ColumnsThenRows(ParallelStyle):
    """Compute a module, whose first matrices are `Columns` and whose last is `Rows`, with this rank's shards of them.

    Its first argument is gathered on the way in, and its output, a partial sum on each rank, is added up on the way
    out. Between the two, the module's own code runs, and finds fewer heads or hidden units. Parameters inside that are
    neither, such as a norm over a head, are replicated, and their gradients added up over tp.

    Args:
        tokens: whether the sequence, dim 1, is sharded outside of the module.
    """

    def __init__(self, tokens: bool = True) -> None:
        self.tokens = tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        is_first = device_mesh.get_local_rank() == 0
        replicate(module, None, device_mesh)
        owners: Owners = {}
        # The partial sums may have the bias only once.
        once = set()
        for name, _ in module.named_parameters():
            path, _, own_name = name.rpartition(".")
            owner = module.get_submodule(path)
            owners[name] = (owner, own_name)
            if own_name == "bias" and owner.weight.placements == (Shard(1),):  # type: ignore[union-attr]
                once.add(name)

        def to_local(name: str, parameter: DTensor) -> Tensor:
            if not parameter.placements[0].is_replicate():
                return parameter.to_local()
            # Each rank's gradient comes from its own heads or hidden units: a partial sum.
            local = parameter.to_local(grad_placements=[Partial()])
            if name in once and not is_first:
                # Zeros with a graph, so that the gradient exists on every rank.
                return local * 0
            return local

        compute_with_local(module, owners, to_local)
        forward = module.forward

        @wraps(forward)
        def local_forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.tokens:
                # No name for the full tokens, (batch, seq, dim): they are freed once forward is done with them.
                partial_sum = forward(gather(x, group), *args, **kwargs)
                return scatter_sum(partial_sum, group)
            partial_sum = forward(copied(x, group), *args, **kwargs)
            return summed(partial_sum, group)

        module.forward = local_forward  # type: ignore[method-assign]
        return module


class Vocabulary(_ShardedMatrix):
    """Shard the rows of an embedding. Each rank looks up the tokens that are in its rows; a reduce-scatter over the
    sequence, dim 1, adds up the ranks' lookups."""

    own_dims: ClassVar[Mapping[str, int]] = {"weight": 0}

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a module cannot be sharded by rows of a vocabulary, and what to do; empty where it can."""
        if not isinstance(module, nn.Embedding):
            return "shards an nn.Embedding: give this module ShardedModule"
        if module.max_norm is not None or module.padding_idx is not None or module.scale_grad_by_freq:
            return "takes an embedding without max_norm, padding_idx and scale_grad_by_freq: name it Replicated()"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        # As ``torch.chunk`` splits: the last ranks may have fewer.
        vocab_size: Any = module.num_embeddings
        rows_per_rank = -(-vocab_size // device_mesh.size())
        first = device_mesh.get_local_rank() * rows_per_rank
        self.shard(module, device_mesh)

        def look_up(tokens: Tensor) -> Tensor:
            # (rows of this rank, dim)
            weight: Any = module.weight
            row, is_own = own_rows(tokens, first, weight.shape[0])
            # (batch, seq, dim), zero where another rank has the token.
            vectors = F.embedding(row, weight)
            vectors = vectors.masked_fill(~is_own[..., None], 0)
            return scatter_sum(vectors, group)

        module.forward = look_up  # type: ignore[method-assign]
        compute_with_local(module, {"weight": (module, "weight")}, lambda name, parameter: parameter.to_local())
        return module


def own_rows(tokens: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return for each token its row in a shard of the vocabulary, and whether the shard has it.

    Args:
        first: the shard's first token.
        rows: number of its rows.

    Returns:
        Both of the shape of `tokens`. Tokens that the shard has not get a row that exists.
    """
    row = tokens - first
    is_own = (row >= 0) & (row < rows)
    return row.clamp(0, rows - 1), is_own


class Logits(_ShardedMatrix):
    """Shard the output matrix over the vocabulary. It gathers the tokens, and gives a DTensor of logits, (batch, seq,
    vocab) sharded over the vocabulary: inside ``loss_parallel()`` the loss is computed from that."""

    own_dims: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a module cannot be sharded over the vocabulary, and what to do; empty where it can."""
        if not isinstance(module, nn.Linear):
            return "shards an nn.Linear: give this module ShardedModule"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        vocab_size: Any = module.out_features
        self.shard(module, device_mesh)
        owners: Owners = {name: (module, name) for name, _ in module.named_parameters(recurse=False)}
        compute_with_local(module, owners, lambda name, parameter: parameter.to_local())
        forward = module.forward

        def sharded_forward(x: Tensor) -> DTensor:
            # (batch, seq, rows of this rank): the last ranks may have fewer.
            logits = forward(gather(x, group))
            shape = torch.Size((*logits.shape[:-1], vocab_size))
            # Those of the full tensor, as if it were contiguous: a rank cannot know them from its shard.
            stride = (shape[1] * vocab_size, vocab_size, 1)
            return DTensor.from_local(logits, device_mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

        module.forward = sharded_forward  # type: ignore[method-assign]
        return module
