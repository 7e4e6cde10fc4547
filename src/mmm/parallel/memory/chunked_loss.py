"""Output matrix and loss computed together, in chunks of the sequence: the full logits never exist.

With V tokens in the vocabulary, the logits of a sequence are V / dim times as large as the hidden states that they come
from (128,256 / 4,096 ≈ 31 for an 8B Llama), and are in float32. With their gradient they are often the peak of a step::

    hidden states   ┌──────┬──────┬──────┬──────┐   (batch, seq, dim)
                    └──┬───┴──────┴──────┴──────┘
      @ outputᵀ        ▼ one chunk at a time
    logits          ┌──────┐                        (batch, seq / chunks, V): the only ones there are
                    └──┬───┘
      loss             ▼ summed                     kept for backward: one number a token, log Σ exp
    backward        the chunk's logits recomputed, their gradient, and from it that of hidden states and matrix

So a step computes four products with the output matrix instead of three. Gradients of the matrix are summed over the
chunks in float32 at least, and returned as one: FSDP, DDP and ZeRO reduce them once.

Under tp the matrix is sharded over the vocabulary. For each token the ranks of tp reduce the largest logit, the sum of
exponentials and the target's logit. Each rank computes a partial sum of the hidden states' gradient.

Sources: Hsu et al., "Liger kernel", 2024 (fused linear cross-entropy); Shoeybi et al., "Megatron-LM", 2019 (the
sharded vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mmm.errors import ConfigError
from mmm.layout import PADDING
from mmm.parallel.double_backward import refuse_create_graph
from mmm.parallel.local import to_local
from mmm.parallel.loss import Loss, cross_entropy
from mmm.parallel.plan import Plan, find
from mmm.parallel.tp.local import Logits


class DeferredLMHead(nn.Linear):
    """Replaces the output matrix, and keeps its weight under the same name. It returns the hidden states as they are:
    the loss multiplies them by the weight. Its weight is initialized like that of a Linear.

    Attributes:
        chunks: number of chunks of the sequence.
        dtype: data type of the matrix products.
    """

    def __init__(self, output: nn.Linear, chunks: int, dtype: torch.dtype) -> None:
        # Not Linear's constructor, which would make a weight.
        nn.Module.__init__(self)
        self.in_features = output.in_features
        self.out_features = output.out_features
        self.weight = output.weight
        self.chunks = chunks
        self.dtype = dtype
        self.register_parameter("bias", None)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class RowsSharded(ParallelStyle):
    """Shard the rows of a weight over tp. The hidden states pass through.

    Args:
        tokens: whether hidden states are a plain tensor of this rank's tokens. They become a DTensor, sharded over the
            sequence, so that the loss knows.
    """

    def __init__(self, tokens: bool) -> None:
        self.tokens = tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, child: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(child.named_parameters(recurse=False)):
                sharded = distribute_tensor(parameter, mesh, [Shard(0)])
                child.register_parameter(key, nn.Parameter(sharded))

        def name_sharding(module: nn.Module, args: Any, hidden: Tensor) -> DTensor:
            # (batch, seq / tp, dim) on this rank
            return DTensor.from_local(hidden, device_mesh, [Shard(1)], run_check=False)

        if self.tokens:
            module.register_forward_hook(name_sharding)
        return distribute_module(module, device_mesh, shard)


def apply_chunked_loss(
    model: nn.Module,
    plan: Plan,
    chunks: int,
    dtype: torch.dtype,
) -> Plan:
    """Replace the output matrix that the plan names by a `DeferredLMHead`, in place.

    Args:
        chunks: number of chunks of the sequence; 1 changes nothing.
        dtype: data type of the matrix products.

    Returns:
        The plan for the changed model.

    Raises:
        ConfigError: chunks is below 1, or the plan names no output matrix.
    """
    if chunks < 1:
        raise ConfigError(f"loss_chunks {chunks}: it must be at least 1")
    if chunks == 1:
        return plan
    if not plan.output:
        raise ConfigError(f"loss_chunks {chunks}: the plan of this model names no output matrix over a sequence; use 1")
    path, _, name = plan.output.rpartition(".")
    # A pipeline stage that is not the last has no output matrix.
    for output in find(model, plan.output):
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise ConfigError(f"loss_chunks {chunks}: {plan.output} is not a matrix without bias; use 1")
        parent = model.get_submodule(path)
        setattr(parent, name, DeferredLMHead(output, chunks, dtype))
    if plan.output not in plan.tensor:
        return plan
    # The vocabulary stays sharded over tp, but the module no longer computes logits from sharded inputs.
    tokens = isinstance(plan.tensor[plan.output], Logits)
    styles = {**plan.tensor, plan.output: RowsSharded(tokens)}
    return replace(plan, tensor=styles)


def keep_output_gathered(model: nn.Module) -> None:
    """Have FSDP leave the output matrix gathered from forward until backward: the loss comes between them."""
    for module in model.modules():
        is_output = isinstance(module, DeferredLMHead)
        if is_output and isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)


def loss_of(*models: nn.Module) -> Loss:
    """Return the loss for a model that `parallelize` has parallelized, as a function of its output, targets and count.

    Args:
        models: the model, or the pipeline stages of this rank.
    """
    for model in models:
        for module in model.modules():
            if isinstance(module, DeferredLMHead):
                return ChunkedLoss(module)
    return cross_entropy


class ChunkedLoss:
    """`mmm.parallel.loss.cross_entropy`, computed from hidden states instead of logits."""

    def __init__(self, output: DeferredLMHead) -> None:
        self.output = output

    def __call__(
        self,
        hidden: Tensor,
        targets: Tensor,
        count: int | Tensor,
    ) -> Tensor:
        """
        Args:
            hidden: (batch, seq, dim), full (under tp the same on each rank), or sharded over the sequence by tp.
            targets: (batch, seq) int64; `PADDING` where a token has none.
            count: number of targets in the global batch.

        Returns:
            Scalar, at least float32; the same on each rank of tp.
        """
        weight = self.output.weight
        vocab_shard = None
        if isinstance(weight, DTensor) and not isinstance(hidden, DTensor):
            mesh = weight.device_mesh
            # Over tp only: FSDP's shards must have been gathered.
            if mesh.mesh_dim_names == ("tp",):
                hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        if isinstance(hidden, DTensor):
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),), f"not gathered: {weight.placements}"
            vocab_shard = VocabShard(weight.device_mesh, weight.shape[0])
            # (batch, seq, dim), an all-gather over tp where the sequence is sharded. Each rank of tp computes a partial
            # sum of the gradient, from its shard of the vocabulary: backward adds them up over tp.
            full = hidden.redistribute(placements=[Replicate()])
            hidden = full.to_local(grad_placements=[Partial()])
            weight = to_local(weight)
        assert not isinstance(weight, DTensor), "FSDP has not gathered the output matrix"
        chunks = self.output.chunks
        hidden = hidden.to(self.output.dtype)
        weight = weight.to(self.output.dtype)
        total = _ProductAndLoss.apply(hidden, weight, targets, chunks, vocab_shard)
        if not torch.is_grad_enabled() and isinstance(self.output, FSDPModule):
            # FSDP itself frees the gathered matrix only after a backward.
            self.output.reshard()
        return total / count


class VocabShard:
    """The shard of the vocabulary that a rank of tp has logits for, as ``torch.chunk`` splits it."""

    def __init__(self, mesh: DeviceMesh, size: int) -> None:
        self.group = mesh.get_group()
        rows_per_rank = -(-size // mesh.size())
        first = mesh.get_local_rank() * rows_per_rank
        # The last ranks may have none.
        self.first = min(first, size)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks of tp, in place."""
        dist.all_reduce(tensor, op, group=self.group)


class _ProductAndLoss(torch.autograd.Function):
    """Σ over the tokens with a target of (log Σ exp logits - the target's logit), logits = hidden @ weightᵀ, in chunks.
    Autocast is off inside: the dtypes are those of the arguments."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunks: int,
        vocab_shard: VocabShard | None,
    ) -> Tensor:
        accum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        # (batch, seq): log Σ exp of each token's logits, from which backward recomputes softmax.
        lse = torch.empty(targets.shape, dtype=accum_dtype, device=hidden.device)
        total = torch.zeros((), dtype=accum_dtype, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(hidden.shape[1], chunks):
                # (batch, chunk, local vocabulary)
                chunk_hidden = hidden[:, chunk]
                logits = chunk_hidden @ weight.T
                logits = logits.to(accum_dtype)
                chunk_targets = targets[:, chunk]
                index, is_local = _local_targets(chunk_targets, logits.shape[-1], vocab_shard)
                # (batch, chunk): 0 on the ranks of tp that do not have the target's logit.
                target_logits = logits.gather(-1, index).squeeze(-1)
                target_logits = target_logits * is_local
                largest = logits.amax(-1)
                if vocab_shard is not None:
                    vocab_shard.reduce(largest, dist.ReduceOp.MAX)
                # Less the largest, so that no exponential is infinite. In place: logits are what costs memory here.
                logits = logits.sub_(largest[..., None])
                exponentials = logits.exp_()
                # (2, batch, chunk), so that the ranks of tp sum both in one all-reduce.
                sums = torch.stack((exponentials.sum(-1), target_logits))
                if vocab_shard is not None:
                    vocab_shard.reduce(sums)
                exp_sum, target_logits = sums
                chunk_lse = largest + exp_sum.log()
                lse[:, chunk] = chunk_lse
                losses = chunk_lse - target_logits
                losses = losses.masked_fill_(chunk_targets == PADDING, 0)
                total += losses.sum()
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.chunks = chunks
        ctx.vocab_shard = vocab_shard
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # type: ignore[override]
        refuse_create_graph("a loss in chunks", "it has no second derivative; use loss_chunks 1")
        hidden, weight, targets, lse = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        # A frozen matrix has no gradient.
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight, dtype=lse.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _chunks(hidden.shape[1], ctx.chunks):
                chunk_hidden = hidden[:, chunk]
                chunk_targets = targets[:, chunk]
                # (batch, chunk, local vocabulary)
                logits = chunk_hidden @ weight.T
                logits = logits.to(lse.dtype)
                index, is_local = _local_targets(chunk_targets, logits.shape[-1], ctx.vocab_shard)
                # The gradient of the logits: softmax - (1 at the target), times the gradient of the loss. In place,
                # because logits are what costs memory here.
                logits = logits.sub_(lse[:, chunk, None])
                d_logits = logits.exp_()
                is_target = is_local[..., None].to(lse.dtype)
                d_logits = d_logits.scatter_add_(-1, index, -is_target)
                has_target = chunk_targets != PADDING
                d_losses = has_target[..., None] * gradient
                d_logits = d_logits.mul_(d_losses)
                d_logits = d_logits.to(hidden.dtype)
                d_hidden[:, chunk] = d_logits @ weight
                if d_weight is None:
                    continue
                # (batch · chunk, local vocabulary) and (batch · chunk, dim)
                rows = d_logits.flatten(0, 1)
                tokens = chunk_hidden.flatten(0, 1)
                if rows.dtype == d_weight.dtype:
                    d_weight.addmm_(rows.T, tokens)
                else:
                    d_weight += rows.T @ tokens
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None


def _chunks(length: int, chunks: int) -> Iterator[slice]:
    """Slices of 0 … length, at most `chunks` of them, none empty. Their lengths differ by one at most."""
    chunks = min(chunks, length)
    for i in range(chunks):
        start = length * i // chunks
        end = length * (i + 1) // chunks
        yield slice(start, end)


def _local_targets(targets: Tensor, local_size: int, vocab_shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Where this rank's logits have the targets.

    Args:
        targets: (batch, chunk), in the full vocabulary.
        local_size: number of tokens in this rank's shard of the vocabulary.

    Returns:
        (batch, chunk, 1), the index of each target among this rank's logits, 0 for a target that it does not have; and
        (batch, chunk), whether it has the target.
    """
    index = targets
    if vocab_shard is not None:
        index = targets - vocab_shard.first
    # Also not `PADDING`, which is negative.
    is_local = (index >= 0) & (index < local_size)
    index = index.where(is_local, 0)
    return index[..., None], is_local
