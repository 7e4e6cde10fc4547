"""A model of one's own on data-parallel ranks, beside plain PyTorch on the full batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.nn.init import canonical_name
from mmm.parallel import Layout, Plan, build_mesh, materialize, meta_parameters, parallelize
from mmm.runtime.device import Precision

FP64 = Precision("fp64", torch.float64, torch.float64)
CPU = torch.device("cpu")


def build(
    make: Callable[[], nn.Module], layout: Layout, plan: Plan | None = None, seed: int = 0, precision=FP64, **options
):
    with meta_parameters():
        model = make()
    model = parallelize(model, build_mesh(layout, "cpu"), plan or Plan({}, fsdp_units=()), precision, **options)
    materialize(model, CPU, seed, init="by_name")
    return model


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {canonical_name(name): full(parameter) for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Each full gradient; one that is missing is zero."""
    return {
        canonical_name(name): torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else full(p.grad)
        for name, p in model.named_parameters()
    }


def plain(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """A model without parallelism that has the weights of `model` now. A collective."""
    net = make().double()
    with torch.no_grad():
        for name, value in parameters(model).items():
            net.get_parameter(name).copy_(value)
    return net


def own(batch: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's samples of a global batch."""
    return batch.tensor_split(ranks)[rank].clone()


def furthest(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any element; NaN if there is one."""
    assert tensors.keys() == expected.keys()
    return torch.stack([(tensors[name] - expected[name]).abs().max() for name in expected]).max().item()
