"""Modules as people write them, small. None of them knows of meshes."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.mix = nn.GroupNorm(4, 16), mlp(16, 32, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        fine = F.gelu(self.fine(x))
        coarse = F.gelu(self.norm(self.coarse(fine)))
        coarse = coarse + self.mix(coarse.movedim(1, -1)).movedim(-1, 1)
        return self.out(torch.cat([fine, self.up(coarse)], dim=1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Conv2d(1, 8, 3, padding=1, bias=False), mlp(8, 16, 3)
        self.blocks = nn.Sequential(Residual(8), Residual(8))

    def forward(self, x):
        return self.head(self.blocks(self.enter(x)).mean((2, 3)))


class Forecaster(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.head = kind(3, 8, num_layers=2, batch_first=True), mlp(8, 16, 3)

    def forward(self, x):
        return self.head(self.cells(x)[0])


class FusedBlock(nn.Module):
    """Rows of `qkv` by head: q, k and v of the first, then of the second."""

    def __init__(self, width=16, head_dim=4):
        super().__init__()
        self.head_dim = head_dim
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width), mlp(width, 32, width)

    def forward(self, x):
        qkv = self.qkv(self.before(x)).unflatten(-1, (-1, 3, self.head_dim))  # (batch, seq, heads, 3, head_dim)
        q, k, v = qkv.transpose(1, 2).unbind(3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mix(self.between(x))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(6, 16, 4), mlp(2, 16, 6)

    def forward(self, x, noise):
        mean, log_std = self.encode(x).chunk(2, -1)
        return self.decode(mean + log_std.exp() * noise), mean, log_std


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds, self.message, self.read = nn.Embedding(3, 8), mlp(16, 32, 8), nn.Linear(8, 1)

    def forward(self, kind, source, target, graph, graphs):
        x = self.kinds(kind)
        for _ in range(2):
            x = x + torch.zeros_like(x).index_add(0, target, self.message(torch.cat((x[source], x[target]), 1)))
        return x.new_zeros(graphs).index_add(0, graph, self.read(x).squeeze(1))


class Spectral(nn.Module):
    def __init__(self, width, modes=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(modes, width, width, dtype=torch.complex64) / width)

    def forward(self, x):  # (batch, width, points)
        low = torch.einsum("bim,mio->bom", torch.fft.rfft(x)[:, :, : len(self.weight)], self.weight)
        return torch.fft.irfft(low, n=x.shape[-1])


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.spectral, self.mix, self.leave = nn.Linear(1, 8), Spectral(8), mlp(8, 16, 8), nn.Linear(8, 1)

    def forward(self, u):
        x = self.enter(u[..., None])
        x = torch.tanh(self.spectral(x.movedim(1, 2)).movedim(1, 2) + self.mix(x))
        return self.leave(x)[..., 0]


class Flow(nn.Module):
    """Runge-Kutta's steps of one field, which is called again and again."""

    def __init__(self):
        super().__init__()
        self.enter, self.field, self.leave = nn.Linear(5, 8), mlp(8, 16, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.enter(x)
        for _ in range(3):
            x = x + 0.3 * self.field(x + 0.15 * self.field(x))
        return self.leave(x)


class Experts(nn.Module):
    """Each sample goes to one of four experts; some get none."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(5, 4), nn.ModuleList(mlp(5, 16, 5) for _ in range(4))

    def forward(self, x):
        score, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * score[rows, None])
        return x + result


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = mlp(5, 16, 4), mlp(5, 16, 4), Scale()

    def forward(self, image, text):
        return self.scale(F.normalize(self.image(image), dim=-1)), F.normalize(self.text(text), dim=-1)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.log_scale.exp()


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class TiedLoRA(nn.Module):
    """A frozen base whose head is its embedding, and small matrices beside two of its own."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.head.weight, self.mix = self.tokens.weight, mlp(8, 16, 8)
        self.requires_grad_(False)
        self.mix[0], self.mix[2] = LoRA(self.mix[0]), LoRA(self.mix[2])

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(self.norm(x + self.mix(x)))


class HeadNorm(nn.Module):
    """Attention whose q and k are normed: over each head, or over all of them at once."""

    def __init__(self, width=16, head_dim=4, each=True):
        super().__init__()
        self.head_dim, self.each = head_dim, each
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim if each else width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def normed(self, x, norm):
        return norm(x.unflatten(-1, (-1, self.head_dim))) if self.each else norm(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x):
        q, k = self.normed(self.q(x), self.q_norm), self.normed(self.k(x), self.k_norm)
        q, k, v = (t.transpose(1, 2) for t in (q, k, self.v(x).unflatten(-1, (-1, self.head_dim))))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Custom(nn.Module):
    """Parameters and buffers of its own, in lists and dicts, and a counter that forward writes."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.powers = nn.ParameterList([nn.Parameter(torch.full((5,), 0.1 * n)) for n in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(5)), "mix": nn.Parameter(torch.eye(5))})
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
        self.net, self.log_scale = mlp(5, 16, 5), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.net(x) * self.log_scale.exp()


class Codebook(nn.Module):
    """A frozen parameter that follows what it sees."""

    def __init__(self):
        super().__init__()
        self.net, self.code = mlp(5, 16, 5), nn.Parameter(torch.zeros(5), requires_grad=False)

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
        self.weight, self.bias = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64)), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return (x.to(self.weight) @ self.weight).abs() + self.bias
