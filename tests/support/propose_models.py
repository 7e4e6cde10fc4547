"""Models as people write them, of each kind that a plan is found for, or is not; nothing of the package is in them."""

import torch
import torch.nn.functional as F
from torch import nn

from support.verify.models import LlamaBlock


class Heads(nn.Module):
    """Attention of a fused matrix in the order q, k, v, and what subclasses change."""

    fixed = False

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.num_heads = heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

    def normed(self, q, k):
        # (batch, seq, channels)
        return q, k

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.normed(q, k)
        heads = 4 if self.fixed else self.num_heads
        # (batch, heads, seq, head_dim)
        q, k, v = (t.view(*x.shape[:2], heads, self.head_dim) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, self.mask)
        # (batch, seq, channels)
        return self.out(y.transpose(1, 2).flatten(2))


class FixedHeads(Heads):
    """The number of heads stands in the code."""

    fixed = True


class NormOverHead(Heads):
    """A norm over the dim of each head."""

    def __init__(self, dim=16, heads=4):
        super().__init__(dim, heads)
        self.q_norm = nn.LayerNorm(self.head_dim)

    def normed(self, q, k):
        return self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2), k


class NormOverAll(Heads):
    """A norm over all channels of the queries."""

    def __init__(self, dim=16, heads=4):
        super().__init__(dim, heads)
        self.q_norm = nn.LayerNorm(dim)

    def normed(self, q, k):
        return self.q_norm(q), k


class MeanOverAll(Heads):
    """The mean of all channels of the queries."""

    def normed(self, q, k):
        return q * q.mean(-1, keepdim=True), k


class MultiQuery(nn.Module):
    """All heads of the queries share one of the keys and values, in a fused matrix."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, dim + 2 * self.head_dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        fused = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q = fused[:, :-2]
        k = fused[:, -2:-1]
        v = fused[:, -1:]
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        # (batch, seq, channels)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Written in place between the two matrices, and after them."""

    def __init__(self, dim=16):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        y = self.down(self.act(self.up(x)))
        y += x
        return y


class Block(nn.Module):
    def __init__(self, attention, dim=16):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention(dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, attention, tie=False, layers=2, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(240, dim)
        self.layers = nn.ModuleList(Block(attention, dim) for _ in range(layers))
        self.head = nn.Linear(dim, 240, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Skips(nn.Module):
    """The first block's output goes into the last as well."""

    def __init__(self, dim=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(Heads, dim) for _ in range(3))

    def forward(self, x):
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first) + first)


class Shares(nn.Module):
    """A mask whose shape the first block says, and the second takes."""

    class Inner(Heads):
        def forward(self, x, bias=None):
            q, k, v = self.qkv(x).chunk(3, -1)
            # (batch, heads, seq, head_dim)
            q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            if bias is None:
                bias = torch.ones(1, self.num_heads, 1, 1, dtype=x.dtype)
            y = F.scaled_dot_product_attention(q + bias, k, v)
            return self.out(y.transpose(1, 2).flatten(2)), bias

    def __init__(self, dim=16):
        super().__init__()
        self.first = self.Inner(dim)
        self.second = self.Inner(dim)

    def forward(self, x):
        y, bias = self.first(x)
        return self.second(x + y, bias)[0]


class Gated(nn.Module):
    """What the first matrix gives goes past the second as well."""

    def __init__(self, dim=16):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        y = self.up(x)
        return self.down(y.relu()) * y.mean(-1, keepdim=True)


class UsesWeight(Gated):
    """The first matrix is used in a function."""

    def forward(self, x):
        return self.down(F.linear(x, self.up.weight).relu())


class SharedRows(nn.Module):
    """The second matrix of an MLP is called once more, after another first one."""

    def __init__(self, dim=16):
        super().__init__()
        self.mlp = Mlp(dim)
        self.other = nn.Linear(dim, 2 * dim)

    def forward(self, x):
        return self.mlp(x) + self.mlp.down(self.other(x).tanh())


class TiedUps(nn.Module):
    """Two MLPs with one first matrix."""

    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList([Mlp(), Mlp()])
        self.mlps[1].up.weight = self.mlps[0].up.weight

    def forward(self, x):
        return self.mlps[1](self.mlps[0](x).tanh())


class WeightInFunction(Decoder):
    """The embedding's weight computes the logits, without a module that is tied to it."""

    def forward(self, tokens):
        return F.linear(self.layers[0](self.embedding(tokens)), self.embedding.weight)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = []
        # (batch, 3, 16, 16) → (batch, 16, 4, 4)
        for channels, out in ((3, 8), (8, 16)):
            convolution = nn.Conv2d(channels, out, 3, stride=2, padding=1)
            blocks.append(nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU()))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Linear(16, 10)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def llama():
    return nn.Sequential(*(LlamaBlock(16, 4, 2) for _ in range(2)))


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)


def floats():
    return torch.randn(4, 6, 16)


def tokens():
    return torch.randint(240, (4, 6))


def images():
    return torch.randn(4, 3, 16, 16)


class Experts(nn.Module):
    """All experts in one parameter each: gate and up fused (experts, 2 · hidden, dim), and down (experts, dim, hidden).

    Every token goes to every expert, with its own weights.
    """

    def __init__(self, dim=16, hidden=24, experts=3):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.mixed = self.Mixed(dim, hidden, experts)

    class Mixed(nn.Module):
        def __init__(self, dim, hidden, experts):
            super().__init__()
            self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, dim) / dim**0.5)
            self.down = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)
            self.bias = nn.Parameter(torch.randn(dim))

        def forward(self, x, weights):
            # (batch, seq, dim), (batch, seq, experts)
            gate, up = torch.einsum("bsd,ehd->bseh", x, self.gate_up).chunk(2, -1)
            outputs = torch.einsum("bseh,edh->bsed", F.silu(gate) * up, self.down)
            return torch.einsum("bsed,bse->bsd", outputs, weights) + self.bias

    def forward(self, x):
        return self.mixed(x, self.router(x).softmax(-1))


class FewChangesByHeads(Heads):
    """With another number of heads, and as many channels in all, its output is nearly the same: weights are small."""

    def __init__(self, dim=16, heads=4):
        super().__init__(dim, heads)
        self.split_size = dim
        with torch.no_grad():
            self.qkv.weight.mul_(1e-3)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.split_size, -1)
        # (batch, heads, seq, head_dim)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, self.mask)
        # (batch, seq, channels)
        return self.out(y.transpose(1, 2).flatten(2))


class Sinks(Heads):
    """A parameter for each head, which the attention itself has."""

    def __init__(self, dim=16, heads=4):
        super().__init__(dim, heads)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.sinks = nn.Parameter(torch.randn(heads))
        del self.qkv

    def forward(self, x):
        # (batch, heads, seq, head_dim)
        by_head = (-1, self.head_dim)
        q = self.q(x).unflatten(-1, by_head).transpose(1, 2)
        k = self.k(x).unflatten(-1, by_head).transpose(1, 2)
        v = self.v(x).unflatten(-1, by_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        y = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        # (batch, seq, channels)
        return self.out(y.transpose(1, 2).flatten(2))


class NormsOverAll(Heads):
    """Norms over all channels of the queries, and of fewer keys."""

    def __init__(self, dim=16, heads=4):
        super().__init__(dim, heads)
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim // 2)
        self.v = nn.Linear(dim, dim // 2)
        self.q_norm = nn.LayerNorm(dim)
        self.k_norm = nn.RMSNorm(dim // 2)
        del self.qkv

    def forward(self, x):
        q = self.q_norm(self.q(x))
        k = self.k_norm(self.k(x))
        v = self.v(x)
        # (batch, heads, seq, head_dim)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        # (batch, seq, channels)
        return self.out(y.transpose(1, 2).flatten(2))


class PyTorchAttention(nn.Module):
    """PyTorch's own attention, with a mask of positions and one of padding."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        padding = x[..., 0] > 1
        padding[:, 0] = False
        y, weights = self.attention(x, x, x, attn_mask=causal, key_padding_mask=padding)
        return x + y + weights.square().mean((1, 2), keepdim=True)


class UNet(nn.Module):
    """Convolutions with a norm of groups, a convolution of each channel, and a way past the bottleneck."""

    def __init__(self, width=8):
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, 2, 1)
        self.bottleneck = nn.Sequential(
            nn.Conv2d(16, width, 1),
            nn.GroupNorm(2, width),
            nn.GELU(),
            nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False),
            nn.Conv2d(width, 16, 1),
        )
        self.up = nn.ConvTranspose2d(16, 3, 2, 2)

    def forward(self, x):
        # (batch, 3, side, side), in and out
        x = self.down(x).tanh()
        return self.up(x + self.bottleneck(x))


class GatedConvolutions(nn.Module):
    """A convolution whose output is halved: gate and value."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(6, 16, 3, padding=1)
        self.second = nn.Conv1d(8, 6, 1)

    def forward(self, x):
        # (batch, 6, length)
        return x + self.second(F.glu(self.first(x), 1))


class Scaled(nn.Module):
    """A parameter without dims, and one without elements."""

    def __init__(self, dim=16):
        super().__init__()
        self.blocks = nn.Sequential(Mlp(dim), Mlp(dim))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.tokens = nn.Parameter(torch.zeros(1, 0, dim))

    def forward(self, x):
        x = torch.cat([x, self.tokens.expand(len(x), -1, -1)], 1)
        return self.blocks(x) * self.scale


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's: a batch norm with a forward of its own, which ends in dropout and an activation."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class NormsWithActivations(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        last = nn.Conv2d(8, 4, 3, stride=2, padding=1)
        self.body = nn.Sequential(first, BatchNormAct2d(8), last)

    def forward(self, x):
        return self.body(x).flatten(1)
