"""Output matrix and loss worked out together, chunk by chunk of the sequence: the whole logits never exist.

With V tokens in the vocabulary, the logits of a sequence are V / dim times as large as the hidden states that they come
from (128,256 / 4,096 ≈ 31 for an 8B Llama), and in float32; with their gradient they are often the peak of a step::

    hidden states   ┌──────┬──────┬──────┬──────┐   (batch, seq, dim)
                    └──┬───┴──────┴──────┴──────┘
      @ outputᵀ        ▼ one chunk at a time
    logits          ┌──────┐                        (batch, seq / chunks, V): the only ones there are
                    └──┬───┘
      loss             ▼ summed                     kept for backward: one number a token, log Σ exp
    backward        the chunk's logits once more, their gradient, and at once that of the hidden states and the matrix

So a step does the output's matrix product four times instead of three. Gradients of the matrix are summed over the
chunks in the dtype of the weights, and leave as one: FSDP, DDP and ZeRO reduce them once.

Under tp the matrix is cut over the vocabulary. Of each token the ranks exchange the largest logit, the sum of
exponentials and the target's logit; each makes its summand of the hidden states' gradient.

Sources: Hsu et al., "Liger kernel", 2024 (fused linear cross-entropy); Shoeybi et al., "Megatron-LM", 2019 (the
vocabulary cut).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mmm.errors import ConfigError
from mmm.parallel.data.ddp import DDP, ScaleGradient
from mmm.parallel.loss import cross_entropy
from mmm.parallel.plan import Plan, find

Loss = Callable[[Tensor, Tensor, int], Tensor]


class OutputLater(nn.Linear):
    """In the place of an output matrix, with its weight under the same name: gives back the hidden states as they are,
    for `loss_of` to multiply. It is a Linear in how its weight starts.

    Attributes:
        chunks: of the sequence. dtype: of the matrix products.
    """

    def __init__(self, output: nn.Linear, chunks: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = output.in_features, output.out_features
        self.weight, self.chunks, self.dtype = output.weight, chunks, dtype
        self.register_parameter("bias", None)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class RowsCut(ParallelStyle):
    """The rows of a weight cut over tp; what goes in and out is left as it is."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(part.named_parameters(recurse=False)):
                part.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

        return distribute_module(module, device_mesh, cut)


def apply_chunked_loss(model: nn.Module, plan: Plan, chunks: int, dtype: torch.dtype) -> Plan:
    """Leave the product with the output matrix, which the plan names, to the loss; in place.

    Args:
        chunks: of the sequence; 1 leaves everything as it is. dtype: of the matrix products.

    Returns:
        The plan for what is there now.

    Raises:
        ConfigError: chunks below 1, or a plan that names no output matrix.
    """
    if chunks < 1:
        raise ConfigError(f"loss_chunks {chunks}: it must be at least 1")
    if chunks == 1:
        return plan
    if not plan.output:
        raise ConfigError(f"loss_chunks {chunks}: the plan of this model names no output matrix over a sequence; use 1")
    parent, _, name = plan.output.rpartition(".")
    for output in find(model, plan.output):  # one, or on a pipeline stage that is not the last none
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise ConfigError(f"loss_chunks {chunks}: {plan.output} is not a matrix without bias; use 1")
        setattr(model.get_submodule(parent), name, OutputLater(output, chunks, dtype))
    return replace(plan, tensor={**plan.tensor, plan.output: RowsCut()} if plan.output in plan.tensor else plan.tensor)


def keep_output_gathered(model: nn.Module) -> None:
    """Have FSDP leave the output matrix gathered from forward until backward: the loss comes between them."""
    for module in model.modules():
        if isinstance(module, OutputLater) and isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)


def loss_of(*models: nn.Module) -> Loss:
    """The loss that goes with what `apply` has made: (output of the model, targets, count) → this rank's share.

    Args:
        models: one, or the pipeline stages of this rank.
    """
    for model in models:
        for module in model.modules():
            if isinstance(module, OutputLater):
                return ChunkedLoss(model, module)
    return cross_entropy


class ChunkedLoss:
    """`mmm.parallel.loss.cross_entropy`, of hidden states instead of logits."""

    def __init__(self, model: nn.Module, output: OutputLater) -> None:
        self.output = output
        # DDP divides gradients by N, and multiplies what comes into the model by N; this weight is used outside of it.
        self.copies = model.mesh.size() if isinstance(model, DDP) else 1

    def __call__(self, hidden: Tensor, targets: Tensor, count: int) -> Tensor:
        """
        Args:
            hidden: (batch, seq, dim), whole (under tp the same on each rank), or cut over the sequence by tp.
            targets: (batch, seq) int64. count: targets in the global batch.

        Returns:
            Scalar, at least float32; the same on each rank of tp.
        """
        weight, vocabulary = self.output.weight, None
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        if mesh is not None and mesh.mesh_dim_names == ("tp",) and not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        if isinstance(hidden, DTensor):
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),), f"not gathered: {weight.placements}"
            vocabulary = Vocabulary(weight.device_mesh, weight.shape[0])
            # Each rank of tp makes a summand of the gradient, from its part of the vocabulary.
            hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        assert not isinstance(weight, DTensor), "FSDP has not gathered the output matrix"
        if self.copies > 1:
            weight = ScaleGradient.apply(weight, self.copies)
        dtype = self.output.dtype
        total = _ProductAndLoss.apply(hidden.to(dtype), weight.to(dtype), targets, self.output.chunks, vocabulary)
        if not torch.is_grad_enabled() and isinstance(self.output, FSDPModule):
            self.output.reshard()  # there is no backward, after which FSDP would
        return total / count


class Vocabulary:
    """The part of the vocabulary that a rank of tp has logits for: as ``torch.chunk`` cuts it."""

    def __init__(self, mesh: DeviceMesh, size: int) -> None:
        self.group = mesh.get_group()
        self.first = min(mesh.get_local_rank() * -(-size // mesh.size()), size)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        dist.all_reduce(tensor, op, group=self.group)


class _ProductAndLoss(torch.autograd.Function):
    """Σ over the tokens of (log Σ exp logits - the target's logit), logits = hidden @ weightᵀ; never more than a chunk
    of them. Within it autocast is off: dtypes are those of what is given."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, vocabulary: Vocabulary | None
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        lse = torch.empty(targets.shape, dtype=wide, device=hidden.device)  # (batch, seq)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for at in _stretches(hidden.shape[1], chunks):
                logits = (hidden[:, at] @ weight.T).to(wide)  # (batch, chunk, vocabulary held here)
                own, here = _own_targets(targets[:, at], logits.shape[-1], vocabulary)
                wanted = logits.gather(-1, own).squeeze(-1) * here  # (batch, chunk)
                top = logits.amax(-1)
                if vocabulary is not None:
                    vocabulary.reduce(top, dist.ReduceOp.MAX)
                sums = torch.stack((logits.sub_(top[..., None]).exp_().sum(-1), wanted))
                if vocabulary is not None:
                    vocabulary.reduce(sums)
                lse[:, at] = top + sums[0].log()
                total += (lse[:, at] - sums[1]).sum()
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.chunks, ctx.vocabulary = chunks, vocabulary
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        hidden, weight, targets, lse = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=lse.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for at in _stretches(hidden.shape[1], ctx.chunks):
                logits = (hidden[:, at] @ weight.T).to(lse.dtype)
                own, here = _own_targets(targets[:, at], logits.shape[-1], ctx.vocabulary)
                # softmax - (1 at the target), times the gradient of the loss
                d_logits = logits.sub_(lse[:, at, None]).exp_().scatter_add_(-1, own, -here[..., None].to(lse.dtype))
                d_logits = d_logits.mul_(gradient).to(hidden.dtype)
                d_hidden[:, at] = d_logits @ weight
                rows, tokens = d_logits.flatten(0, 1), hidden[:, at].flatten(0, 1)
                if rows.dtype == d_weight.dtype:
                    d_weight.addmm_(rows.T, tokens)
                else:
                    d_weight += rows.T @ tokens
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _stretches(length: int, chunks: int) -> Iterator[slice]:
    """0 … length in at most `chunks` stretches that differ by one at most, none empty."""
    chunks = min(chunks, length)
    for i in range(chunks):
        yield slice(length * i // chunks, length * (i + 1) // chunks)


def _own_targets(targets: Tensor, held: int, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Where the targets stand among the `held` logits of this rank, (batch, chunk, 1), and which are among them at all,
    (batch, chunk); the place of others is 0."""
    own = targets if vocabulary is None else targets - vocabulary.first
    here = (own >= 0) & (own < held)
    return own.where(here, 0)[..., None], here
