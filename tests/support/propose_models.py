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
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())

    def normed(self, q, k):  # (batch, seq, channels)
        return q, k

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.normed(q, k)
        heads = 4 if self.fixed else self.num_heads
        q, k, v = (t.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, self.mask)
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


class MultiQuery(nn.Module):
    """All heads of the queries share one of the keys and values, in a fused matrix."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.head_dim = dim // heads
        self.qkv, self.out = nn.Linear(dim, dim + 2 * self.head_dim), nn.Linear(dim, dim)

    def forward(self, x):
        fused = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = fused[:, :-2], fused[:, -2:-1], fused[:, -1:]
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Written in place between the two matrices, and after them."""

    def __init__(self, dim=16):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(dim, 2 * dim), nn.ReLU(inplace=True), nn.Linear(2 * dim, dim)

    def forward(self, x):
        y = self.down(self.act(self.up(x)))
        y += x
        return y


class Block(nn.Module):
    def __init__(self, attention, dim=16):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), attention(dim)
        self.mlp_norm, self.mlp = nn.LayerNorm(dim), Mlp(dim)

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
            q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
            if bias is None:
                bias = torch.ones(1, self.num_heads, 1, 1, dtype=x.dtype)
            y = F.scaled_dot_product_attention(q + bias, k, v)
            return self.out(y.transpose(1, 2).flatten(2)), bias

    def __init__(self, dim=16):
        super().__init__()
        self.first, self.second = self.Inner(dim), self.Inner(dim)

    def forward(self, x):
        y, bias = self.first(x)
        return self.second(x + y, bias)[0]


class Gated(nn.Module):
    """What the first matrix gives goes past the second as well."""

    def __init__(self, dim=16):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        y = self.up(x)
        return self.down(y.relu()) * y.mean(-1, keepdim=True)


class SharedRows(nn.Module):
    """The second matrix of an MLP is called once more, after another first one."""

    def __init__(self, dim=16):
        super().__init__()
        self.mlp, self.other = Mlp(dim), nn.Linear(dim, 2 * dim)

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
        blocks = [nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 8), (8, 16))]
        self.features, self.classifier = nn.Sequential(*blocks), nn.Linear(16, 10)

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
