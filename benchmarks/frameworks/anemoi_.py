"""anemoi-models: attention over the nodes of a grid, of which each rank has some, and all of them for some heads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from anemoi.models.distributed.graph import gather_tensor, shard_tensor
from anemoi.models.distributed.shapes import get_shard_shapes
from anemoi.models.layers.attention import MultiHeadSelfAttention
from anemoi.utils.config import DotDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# 13 nodes do not divide over 2 ranks.
NODES = 13
WIDTH = 16


class Net(nn.Module):
    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, WIDTH)
        kernels = DotDict({"Linear": nn.Linear})
        self.attention = MultiHeadSelfAttention(
            4, WIDTH, kernels, qkv_bias=True, attention_implementation="scaled_dot_product_attention"
        )
        self.decoder = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:  # (batch, nodes, 3) → (batch, nodes, 2)
        # A sharded model takes one sample at a time.
        return torch.stack([self.of_sample(sample) for sample in x])

    def of_sample(self, x: Tensor) -> Tensor:
        shapes = get_shard_shapes(x, 0, self.group)
        own = self.encoder(shard_tensor(x, 0, shapes, self.group))
        hidden = own + self.attention(own, [[*shape[:-1], WIDTH] for shape in shapes], 1, self.group)
        output = self.decoder(hidden)
        return gather_tensor(output, 0, [[*shape[:-1], 2] for shape in shapes], self.group)


def make_model() -> nn.Module:
    return Net()


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, NODES, 3), torch.randn(4, NODES, 2)


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def without_sum(model: Net, mesh: DeviceMesh) -> Net:
    model.group = mesh.get_group()
    return model


def parallelize(model: Net, mesh: DeviceMesh) -> Net:
    """Each rank has the gradients of its own nodes: they are added up."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=mesh.get_group()))
    return without_sum(model, mesh)
