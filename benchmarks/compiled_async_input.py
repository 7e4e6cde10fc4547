"""Two gradients that PyTorch 2.13 gets wrong where tensor parallelism meets torch.compile: a program without mmm.

    torchrun --nproc-per-node 2 benchmarks/compiled_async_input.py            # backend aot_eager: needs no C++ compiler
    torchrun --nproc-per-node 2 benchmarks/compiled_async_input.py inductor

An embedding with sharded rows gives an AsyncCollectiveTensor: the result of a reduce-scatter that is still on its way.
It enters a compiled layer, and the embedding gets no gradient. The program compares gradients with those of the same
model without compilation. It prints max|g - g0| / max|g0| for each parameter, of these programs:

    FSDP               the layers are also FSDP units (on one data-parallel rank): a gradient of 0, and no message
    no FSDP            DTensor raises an error, because it gets a plain tensor of zeros as a gradient
    FSDP, waits        as the first, but the layer gets the arrived result: right

With inductor, another function is compiled twice. The second time its graph comes from the cache on disk, where the
graphs of all ranks have the same key (pytorch#188390). So a rank may take another rank's part of its gradient.
TORCHINDUCTOR_AUTOGRAD_CACHE=0 is the cure.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Layer(nn.Module):
    """(batch, tokens / tp, 4) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Arrived(torch.autograd.Function):
    """The cure: wait outside of the graph, and pass the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        arrived = x.trigger_wait()
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def gradients(mesh: DeviceMesh, backend: str, fsdp: bool = True, waits: bool = False) -> dict[str, Tensor]:
    """The full gradients of an embedding and a layer, by name. backend "": nothing is compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), Layer()).double()
    styles = {
        # Each rank looks up its rows: a partial sum, reduce-scattered over the tokens.
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1.up": ColwiseParallel(input_layouts=Shard(1)),
        "1.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], styles)
    if waits:
        model[0].register_forward_hook(lambda module, args, x: Arrived.apply(x))
    if backend:
        model[1].compile(backend=backend)
    if fsdp:
        for module in (*model, model):
            fully_shard(module, mesh=mesh["dp"])
    model(torch.arange(8).view(1, 8)).square().sum().backward()
    full = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        full[name] = parameter.grad.full_tensor()
    return full


def gathered(x: DTensor) -> DTensor:
    """Forward all-gathers the rows. Backward takes the rank's rows of the gradient: each rank has its own graph."""
    return x.redistribute(placements=[Replicate()])


def gradient_of_gathered(mesh: DeviceMesh, function: Callable[[DTensor], DTensor]) -> Tensor:
    """The gradient of this rank's rows, (2, 4)."""
    torch.manual_seed(mesh.get_rank())
    rows = torch.randn(2, 4, requires_grad=True)
    full = function(DTensor.from_local(rows * 2, mesh["tp"], [Shard(0)]))
    full.to_local(grad_placements=[Partial()]).square().sum().backward()
    assert rows.grad is not None
    return rows.grad


def main() -> None:
    # FSDP warns that an output is a view, which does not matter: nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    backend = (*sys.argv[1:], "aot_eager")[0]
    mesh = init_device_mesh("cpu", (1, int(os.environ["WORLD_SIZE"])), mesh_dim_names=("dp", "tp"))
    for title, fsdp, waits in (("FSDP", True, False), ("no FSDP", False, False), ("FSDP, waits", True, True)):
        uncompiled = gradients(mesh, "", fsdp)
        torch.compiler.reset()
        try:
            compiled = gradients(mesh, backend, fsdp, waits)
            errors = []
            for name, gradient in uncompiled.items():
                error = (compiled[name] - gradient).abs().max() / gradient.abs().max()
                errors.append(f"{name} {error:.1e}")
            text = ", ".join(errors)
        except AttributeError as error:
            text = f"AttributeError: {error}"
        if mesh.get_rank() == 0:
            print(f"{title:12} {text}")
    if mesh.get_rank() == 0:
        print(f"PyTorch {torch.__version__}, {backend}", flush=True)
    if backend == "inductor":
        right = gradient_of_gathered(mesh, gathered)
        for time in ("first", "second"):
            torch.compiler.reset()
            gradient = gradient_of_gathered(mesh, torch.compile(gathered))
            error = (gradient - right).abs().max() / right.abs().max()
            print(f"rank {mesh.get_rank()}, compiled for the {time} time: {error:.1e}", flush=True)
            torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
