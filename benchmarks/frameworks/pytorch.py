"""PyTorch's older FSDP (FSDP1), DDP with ZeRO 1, and FSDP2 over one rank that divides gradients by a factor."""

from typing import Any

import torch
from small import Block, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer

LARGEST_NORM = 0.05


def _fsdp(model: nn.Module, use_orig_params: bool, strategy: ShardingStrategy) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


def flat(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _fsdp(model, False, ShardingStrategy.FULL_SHARD)


def original_parameters(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _fsdp(model, True, ShardingStrategy.FULL_SHARD)


def grad_op(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _fsdp(model, True, ShardingStrategy.SHARD_GRAD_OP)


def ddp_zero1(model: nn.Module, mesh: DeviceMesh) -> Any:
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
    return model, optimizer


def ignored_head(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A planted mistake: FSDP ignores a module, and nothing else averages its gradients."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_modules=[model[3]],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def one_rank_divided(model: nn.Module, mesh: DeviceMesh) -> None:
    """As for the experts of a rank that no other rank has, to which 2 ranks have sent their tokens."""
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(2.0)  # type: ignore[operator]


def clipping(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    if mesh is None:
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    else:
        model.clip_grad_norm_(LARGEST_NORM)  # type: ignore[operator]
    return loss.detach()


def doubled(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None) -> Tensor:
    """Gradients twice as large as they should be, which FSDP then divides by 2."""
    loss = loss_of(model, batch)
    if mesh is None:
        loss.backward()
    else:
        (2 * loss).backward()
    return loss.detach()
