"""Hugging Face accelerate: `Accelerator.prepare`, `backward` and `clip_grad_norm_`."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from small import Block, loss_of, make_optimizer
from torch import Tensor, nn

LARGEST_NORM = 0.05


def ddp(model: nn.Module, mesh: Any) -> Any:
    accelerator = Accelerator(cpu=True)
    return *accelerator.prepare(model, make_optimizer(model.parameters())), accelerator


def fsdp2(model: nn.Module, mesh: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[Block.__name__]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return *accelerator.prepare(model, make_optimizer(model.parameters())), accelerator


def only_the_optimizer(model: nn.Module, mesh: Any) -> Any:
    """A planted mistake: the model itself is not prepared, so nothing averages its gradients."""
    accelerator = Accelerator(cpu=True)
    return model, accelerator.prepare(make_optimizer(model.parameters())), accelerator


def step(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        loss = loss_of(program, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(program.parameters(), LARGEST_NORM)
        return loss.detach()
    model, _, accelerator = program
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    return loss.detach()
