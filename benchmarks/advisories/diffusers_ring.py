"""Training with diffusers' ring attention. PyTorch's formulas stand for flash-attn's kernel, which has no CPU."""

import diffusers.models.attention_dispatch as dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import device, einsum, nn, randn
from torch.distributed.device_mesh import init_device_mesh


def forward(q, k, v, dropout, scale, *others):
    scores = scale * einsum("bqhd,bkhd->bhqk", q, k)
    return einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1), None, None


def backward(grad, q, k, v, out, sums, grad_q, grad_k, grad_v, dropout, scale, *others):
    b, n, h, _ = q.shape
    sums = sums.as_strided((b, h, n, 1), (h * n, n, 1, 1))  # the kernel takes it as contiguous
    share = (scale * einsum("bqhd,bkhd->bhqk", q, k) - sums).exp()
    along = (grad * out).sum(-1).transpose(1, 2)[..., None]
    change = scale * share * (einsum("bqhd,bkhd->bhqk", grad, v) - along)
    grad_q.copy_(einsum("bhqk,bkhd->bqhd", change, k))
    grad_k.copy_(einsum("bhqk,bqhd->bkhd", change, q))
    grad_v.copy_(einsum("bhqk,bqhd->bkhd", share, grad))


dispatch._wrapped_flash_attn_forward, dispatch._wrapped_flash_attn_backward = forward, backward


class Attention(nn.Linear):
    ranks = None

    def forward(self, x):
        q, k, v = super().forward(x).unflatten(-1, (3, 2, 4)).unbind(2)
        if self.ranks:
            return dispatch.dispatch_attention_fn(q, k, v, backend="flash", parallel_config=self.ranks)
        return forward(q, k, v, 0.0, 0.5)[0]


def make_model():
    return nn.Sequential(Attention(8, 24))


def make_batch():
    return randn(2, 8, 8)


def ring(model, mesh, degree=2):
    config = ContextParallelConfig(ring_degree=degree, ulysses_degree=2 // degree, convert_to_fp32=False)
    model[0].ranks = ParallelConfig(context_parallel_config=config)
    axes = init_device_mesh("cpu", (degree, 2 // degree), mesh_dim_names=("ring", "ulysses"))
    model[0].ranks.setup(mesh.get_rank(), 2, device("cpu"), mesh=axes)
    return nn.parallel.DistributedDataParallel(model)


def ulysses(model, mesh):
    return ring(model, mesh, 1)


def step(model, batch, mesh):
    own = batch if mesh is None else batch.chunk(2, 1)[mesh.get_local_rank()]
    return model(own).square().mean()
