"""Small models as people write them, which know of no mesh; their batches and losses, and how they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.parallel import PartialGradient, Plan, Replicated


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Conv2d(1, 8, 3, padding=1)
        self.coarse = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.mix = mlp(16, 32, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        fine = F.gelu(self.fine(x))
        coarse = F.gelu(self.norm(self.coarse(fine)))
        # (batch, height, width, channels)
        by_place = coarse.movedim(1, -1)
        coarse = coarse + self.mix(by_place).movedim(-1, 1)
        return self.out(torch.cat([fine, self.up(coarse)], dim=1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.head = mlp(8, 16, 3)
        self.blocks = nn.Sequential(Residual(8), Residual(8))

    def forward(self, x):
        return self.head(self.blocks(self.enter(x)).mean((2, 3)))


class Forecaster(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(3, 8, num_layers=2, batch_first=True)
        self.head = mlp(8, 16, 3)

    def forward(self, x):
        return self.head(self.cells(x)[0])


class FusedBlock(nn.Module):
    """Rows of `qkv` by head: q, k and v of the first, then of the second."""

    def __init__(self, width=16, head_dim=4):
        super().__init__()
        self.head_dim = head_dim
        self.before = nn.LayerNorm(width)
        self.between = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mix = mlp(width, 32, width)

    def forward(self, x):
        # (batch, seq, heads, 3, head_dim)
        qkv = self.qkv(self.before(x)).unflatten(-1, (-1, 3, self.head_dim))
        q, k, v = qkv.transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # (batch, seq, width)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mix(self.between(x))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = mlp(6, 16, 4)
        self.decode = mlp(2, 16, 6)

    def forward(self, x, noise):
        mean, log_std = self.encode(x).chunk(2, -1)
        return self.decode(mean + log_std.exp() * noise), mean, log_std


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(3, 8)
        self.message = mlp(16, 32, 8)
        self.read = nn.Linear(8, 1)

    def forward(self, kind, source, target, graph, graphs):
        x = self.kinds(kind)
        for _ in range(2):
            # (edges, 2 · width): both ends of each edge
            ends = torch.cat((x[source], x[target]), 1)
            x = x + torch.zeros_like(x).index_add(0, target, self.message(ends))
        return x.new_zeros(graphs).index_add(0, graph, self.read(x).squeeze(1))


class Spectral(nn.Module):
    def __init__(self, width, modes=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(modes, width, width, dtype=torch.complex64) / width)

    def forward(self, x):
        # (batch, width, points)
        # (batch, width, modes): the lowest frequencies
        modes = torch.fft.rfft(x)[:, :, : len(self.weight)]
        low = torch.einsum("bim,mio->bom", modes, self.weight)
        return torch.fft.irfft(low, n=x.shape[-1])


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(1, 8)
        self.spectral = Spectral(8)
        self.mix = mlp(8, 16, 8)
        self.leave = nn.Linear(8, 1)

    def forward(self, u):
        x = self.enter(u[..., None])
        # (batch, points, width)
        by_frequency = self.spectral(x.movedim(1, 2)).movedim(1, 2)
        x = torch.tanh(by_frequency + self.mix(x))
        return self.leave(x)[..., 0]


class Flow(nn.Module):
    """Runge-Kutta's steps of one field, which is called again and again."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.field = mlp(8, 16, 8)
        self.leave = nn.Linear(8, 5)

    def forward(self, x):
        x = self.enter(x)
        for _ in range(3):
            middle = x + 0.15 * self.field(x)
            x = x + 0.3 * self.field(middle)
        return self.leave(x)


class Experts(nn.Module):
    """Each sample goes to one of four experts; some get none."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 4)
        self.experts = nn.ModuleList(mlp(5, 16, 5) for _ in range(4))

    def forward(self, x):
        score, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                weighted = expert(x[rows]) * score[rows, None]
                result = result.index_add(0, rows, weighted)
        return x + result


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = mlp(5, 16, 4)
        self.text = mlp(5, 16, 4)
        self.scale = Scale()

    def forward(self, image, text):
        image = F.normalize(self.image(image), dim=-1)
        text = F.normalize(self.text(text), dim=-1)
        return self.scale(image), text


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.log_scale.exp()


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class TiedLoRA(nn.Module):
    """A frozen base whose head is its embedding, and small matrices beside two of its own."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight
        self.mix = mlp(8, 16, 8)
        self.requires_grad_(False)
        self.mix[0] = LoRA(self.mix[0])
        self.mix[2] = LoRA(self.mix[2])

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(self.norm(x + self.mix(x)))


class HeadNorm(nn.Module):
    """Attention whose q and k are normed: over each head, or over all of them at once."""

    def __init__(self, width=16, head_dim=4, by_head=True):
        super().__init__()
        self.head_dim, self.by_head = head_dim, by_head
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim if by_head else width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def normed(self, x, norm):
        if self.by_head:
            return norm(x.unflatten(-1, (-1, self.head_dim)))
        return norm(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x):
        q = self.normed(self.q(x), self.q_norm)
        k = self.normed(self.k(x), self.k_norm)
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        # (batch, heads, seq, head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Custom(nn.Module):
    """Parameters and buffers of its own, in lists and dicts, and a counter that forward writes."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.powers = nn.ParameterList([nn.Parameter(torch.full((5,), 0.1 * n)) for n in range(3)])
        shift = nn.Parameter(torch.zeros(5))
        mix = nn.Parameter(torch.eye(5))
        self.named = nn.ParameterDict({"shift": shift, "mix": mix})
        self.register_buffer("table", torch.linspace(-1, 1, 5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = self.gain * x + self.table
        for n, power in enumerate(self.powers):
            x = x + power * x.tanh() ** (n + 1)
        return x @ self.named["mix"] + self.named["shift"]


class Centred(nn.Module):
    """A mean of what it has seen, which each rank would take of its own samples."""

    def __init__(self):
        super().__init__()
        self.net = mlp(5, 16, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0).detach(), 0.1)
        return self.net(x - self.mean)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(5, 16, 5)
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.net(x) * self.log_scale.exp()


class Codebook(nn.Module):
    """A frozen parameter that follows what it sees."""

    def __init__(self):
        super().__init__()
        self.net = mlp(5, 16, 5)
        self.code = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.code.lerp_(x.mean(0), 0.1)
        return self.net(x) + self.code


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"mean": nn.Linear(5, 2), "spread": nn.Linear(5, 3)})

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads.values()], -1)


class Phases(nn.Module):
    """Complex and real parameters in one module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return (x.to(self.weight) @ self.weight).abs() + self.bias


Batch = tuple[Any, ...]


def squared(model: nn.Module, batch: Batch, gather: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum") / y[0].numel()


def one_step(
    case: OwnModel, models: Sequence[nn.Module], optimizers: Sequence[Any], batch: Batch, gather: Any, count: int
) -> Tensor:
    """A step of plain PyTorch; the local loss."""
    loss = case.loss(*models, batch, gather) / count
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@dataclass(frozen=True)
class OwnModel:
    """A model, or several, and a step of them.

    Attributes:
        makes: the constructor of each. plans: how each is sharded. batch: of samples of these numbers.
        loss: (models, batch, gather) → the sum over the samples of the batch. `gather` gives the tensor of all ranks'
            samples, and the number of the first of this rank.
        sgd: instead of AdamW, which takes gradients that are zero but for rounding to steps.
        step: (case, models, optimizers, batch, gather, samples of the global batch) → the local loss.
    """

    makes: tuple[Callable[[], nn.Module], ...]
    plans: tuple[Plan, ...]
    batch: Callable[[Sequence[int]], Batch]
    loss: Callable[..., Tensor] = squared
    sgd: bool = False
    step: Callable[..., Tensor] = one_step


def numbers_of(sample: int) -> torch.Generator:
    return torch.Generator().manual_seed(sample)


def normal(*shape: int) -> Callable[[Sequence[int]], Batch]:
    """A batch of tensors of this shape, each a function of its sample's number, and one of targets."""

    def batch(samples: Sequence[int]) -> Batch:
        drawn = [torch.randn(2, *shape, generator=numbers_of(n), dtype=torch.float64) for n in samples]
        return torch.stack([pair[0] for pair in drawn]), torch.stack([pair[1] for pair in drawn])

    return batch


def plan(
    columns: str = "", rows: str = "", replicated: str = "", partial: str = "", units: Any = (), **more: Any
) -> Plan:
    """Names, separated by spaces, by style."""
    styles = ((columns, ColwiseParallel), (rows, RowwiseParallel), (replicated, Replicated), (partial, PartialGradient))
    return Plan({name: style() for names, style in styles for name in names.split()}, units, **more)


def images(samples):
    x = torch.stack([torch.randn(1, 6, 6, generator=numbers_of(n), dtype=torch.float64) for n in samples])
    return x, torch.tensor(samples) % 3


def classes(model, batch, gather):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum")


def elbo(model, batch, gather):
    x, noise = batch
    made, mean, log_std = model(x, noise[:, :2])
    reconstruction = (made - x).square().sum()
    # The divergence from the standard normal distribution.
    divergence = (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).sum() / 2
    return reconstruction + divergence


def gan_step(case, models, optimizers, batch, gather, count):
    """The critic's loss and step, then the generator's."""
    (generator, critic), (of_generator, of_critic), (real, noise) = models, optimizers, batch
    of_real = F.softplus(-critic(real)).sum()
    of_made = F.softplus(critic(generator(noise).detach())).sum()
    loss = (of_real + of_made) / count
    loss.backward()
    of_critic.step()
    of_critic.zero_grad()
    critic.requires_grad_(False)
    of_generator_loss = F.softplus(-critic(generator(noise))).sum() / count
    of_generator_loss.backward()
    critic.requires_grad_(True)
    of_generator.step()
    of_generator.zero_grad()
    return loss.detach()


def graphs(samples):
    sizes = torch.tensor([2 + sample % 4 for sample in samples])
    kind = torch.cat([torch.randint(3, (2 + n % 4,), generator=numbers_of(n)) for n in samples])
    first = (sizes.cumsum(0) - sizes).tolist()
    edges = []
    for size, start in zip(sizes.tolist(), first, strict=True):
        # (2, edges): every node with every other one of its graph
        pairs = (1 - torch.eye(size)).nonzero().T
        edges.append(pairs + start)
    source, target = torch.cat(edges, 1)
    graph = torch.arange(len(sizes)).repeat_interleave(sizes)
    return (kind, source, target, graph, len(sizes)), torch.tensor(samples, dtype=torch.float64).sin()


def energies(model, batch, gather):
    molecules, energy = batch
    return (model(*molecules) - energy).square().sum()


def second_derivative(model, batch, gather):
    """u'' = f."""
    x, f = batch
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (curvature - f).square().sum()


def contrastive(model, batch, gather):
    """Each image beside the texts of the global batch, and the other way round."""
    image, text = model(*batch)
    (images, first), (texts, _) = gather(image), gather(text)
    own = torch.arange(first, first + len(image))
    by_image = F.cross_entropy(image @ texts.T, own, reduction="sum")
    return by_image + F.cross_entropy(text @ images.T, own, reduction="sum")


def sentences(samples):
    tokens = torch.stack([torch.randint(12, (7,), generator=numbers_of(n)) for n in samples])
    return tokens[:, :-1], tokens[:, 1:]


def next_token(model, batch, gather):
    inputs, targets = batch
    # (batch · seq, vocabulary)
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    return loss / targets.shape[1]


def by_hand(case, models, optimizers, batch, gather, count):
    """Gradient descent without an optimizer."""
    loss = case.loss(*models, batch, gather) / count
    loss.backward()
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.detach()


def of(make: Callable[[], nn.Module], shards: Plan, batch: Any, loss: Any = squared, **more: Any) -> OwnModel:
    return OwnModel((make,), (shards,), batch, loss, **more)


# The rows of docs/your-model.md: the model, its plan, its batch, its loss.
CASES: dict[str, OwnModel] = {
    "U-Net": of(UNet, plan("mix.0", "mix.2", "fine coarse norm up out", units=("mix", "up")), normal(1, 6, 6)),
    "ResNet, BatchNorm": of(
        ResNet,
        plan("head.0", "head.2", "enter blocks.*.conv blocks.*.norm", units=("blocks.*", "head")),
        images,
        classes,
    ),
    "LSTM": of(lambda: Forecaster(nn.LSTM), plan("head.0", "head.2", "cells", units=("cells",)), normal(6, 3)),
    "GRU": of(lambda: Forecaster(nn.GRU), plan("head.0", "head.2", "cells", units=("cells",)), normal(6, 3)),
    "Transformer, fused qkv": of(
        lambda: nn.Sequential(FusedBlock(), FusedBlock()),
        plan("*.qkv *.mix.0", "*.out *.mix.2", "*.before *.between", units=("*",)),
        normal(6, 16),
        sgd=True,
    ),
    "TransformerEncoderLayer": of(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        plan("linear1", "linear2", "self_attn norm1 norm2"),
        normal(6, 8),
        sgd=True,
    ),
    "VAE": of(VAE, plan("*.0", "*.2", units=("encode", "decode")), normal(6), elbo),
    "GAN": OwnModel(
        (lambda: mlp(5, 16, 5), lambda: mlp(5, 16, 1)), (plan("0", "2"), plan("0", "2")), normal(5), step=gan_step
    ),
    "graph net": of(GraphNet, plan("message.0", "message.2", "kinds read", units=("message",)), graphs, energies),
    "FNO, complex weights": of(FNO, plan("mix.0", "mix.2", "enter spectral leave", units=("mix",)), normal(8)),
    "PINN, u''": of(lambda: mlp(1, 16, 1), plan("0", "2"), normal(1), second_derivative),
    "neural ODE": of(Flow, plan("field.0", "field.2", "enter leave", units=("field",)), normal(5)),
    "routed experts": of(Experts, plan("experts.*.0", "experts.*.2", "router", units=("experts.*",)), normal(5)),
    "two towers, contrastive": of(
        Towers, plan("image.0 text.0", "image.2 text.2", "scale", units=("image", "text")), normal(5), contrastive
    ),
    "LoRA, tied head": of(
        TiedLoRA,
        plan("mix.0.base mix.0.up", "mix.2.base mix.2.down", "tokens norm head mix.0.down mix.2.up", units=("mix",)),
        sentences,
        next_token,
    ),
    "attention with a norm of each head": of(
        HeadNorm, plan("q k v", "out", "", "q_norm k_norm"), normal(6, 16), sgd=True
    ),
    "norm over the channels of all heads": of(
        lambda: HeadNorm(by_head=False), plan("q k v", "out", "", "q_norm k_norm"), normal(6, 16), sgd=True
    ),
    "parameters and buffers of the model itself": of(Custom, plan(), normal(5)),
    "parameter without dims": of(Scalar, plan("net.0", "net.2"), normal(5)),
    "running mean in a buffer": of(Centred, plan("net.0", "net.2"), normal(5)),
    "frozen parameter that `forward` writes": of(Codebook, plan("net.0", "net.2"), normal(5)),
    "Embedding with max_norm": of(
        lambda: nn.Sequential(nn.Embedding(12, 8, max_norm=0.5), nn.Linear(8, 12)),
        plan(replicated="0 1"),
        sentences,
        next_token,
    ),
    "gradient descent without an optimizer": of(lambda: mlp(5, 16, 5), plan("0", "2"), normal(5), step=by_hand),
    "ModuleDict as an FSDP unit": of(Heads, plan(replicated="heads.*", units=("heads",)), normal(5)),
    "complex and real parameters in one module": of(Phases, plan(), normal(5)),
    "lazy modules": of(lambda: nn.Sequential(nn.LazyLinear(5)), plan("0"), normal(5)),
}
