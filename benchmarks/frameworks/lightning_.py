"""Lightning Fabric: its strategies for DDP, FSDP and a `DeviceMesh` of its own."""

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from small import loss_of, make_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LARGEST_NORM = 0.05


def _fabric(strategy: Any, mesh: DeviceMesh) -> Fabric:
    # Ranks are there already, as torchrun starts them.
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=mesh.size(), plugins=[TorchElasticEnvironment()])
    fabric.launch()
    return fabric


def ddp(model: nn.Module, mesh: DeviceMesh) -> Any:
    fabric = _fabric(DDPStrategy(), mesh)
    return *fabric.setup(model, make_optimizer(model.parameters())), fabric


def fsdp1(model: nn.Module, mesh: DeviceMesh) -> Any:
    return *_fabric(FSDPStrategy(), mesh).setup(model, make_optimizer(model.parameters())), None


def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What Lightning calls with its own mesh, of the axes data_parallel and tensor_parallel."""
    for block in model[1:3]:
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if mesh["data_parallel"].size() > 1:
            fully_shard(block, mesh=mesh["data_parallel"])
    if mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def model_parallel(model: nn.Module, mesh: DeviceMesh) -> Any:
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    strategy = ModelParallelStrategy(apply, sizes.get("dp", 1), sizes.get("tp", 1))
    fabric = _fabric(strategy, mesh)
    model = fabric.setup_module(model)
    return model, fabric.setup_optimizers(make_optimizer(model.parameters())), fabric


def step_without_clipping(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        return loss_of(program, batch)
    model, _, fabric = program
    loss = loss_of(model, batch)
    fabric.backward(loss)
    return loss.detach()


def forgotten_sync(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    """A planted mistake: `no_backward_sync`, as for a micro-batch that is not the last one."""
    if mesh is None:
        return loss_of(program, batch)
    model, _, fabric = program
    with fabric.no_backward_sync(model):
        return step_without_clipping(program, batch, mesh)


def step(program: Any, batch: tuple[Tensor, Tensor], mesh: Any) -> Tensor:
    if mesh is None:
        loss = loss_of(program, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(program.parameters(), LARGEST_NORM)
        return loss.detach()
    model, optimizer, fabric = program
    loss = loss_of(model, batch)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=LARGEST_NORM, error_if_nonfinite=False)
    return loss.detach()
