"""Five models as people write them, each with a batch; nothing of the package is in them."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(mean_square + self.eps)


def rotate(x, start=0):
    # (batch, seq, heads, head_dim)
    half = x.shape[-1] // 2
    position = torch.arange(start, start + x.shape[1], dtype=x.dtype)
    # (seq, head_dim / 2)
    frequency = 100 ** (torch.arange(half, dtype=x.dtype) / half)
    angle = position[:, None] / frequency
    cos = angle.cos()[:, None]
    sin = angle.sin()[:, None]
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.causal = True

    def forward(self, x):
        # (batch, seq, heads, head_dim)
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(q)
        k = rotate(k)
        # Each head of keys and values serves several of queries.
        heads_a_key = q.shape[2] // k.shape[2]
        k = k.repeat_interleave(heads_a_key, dim=2)
        v = v.repeat_interleave(heads_a_key, dim=2)
        # (batch, heads, seq, head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1 = nn.Linear(dim, 2 * dim, bias=False)
        self.w3 = nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        gate = F.silu(self.w1(x))
        return self.w2(gate * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads)
        self.feed_forward = FeedForward(dim)
        self.attention_norm = RMSNorm(dim)
        self.ffn_norm = RMSNorm(dim)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Llama: rotary positions, grouped heads, SwiGLU."""

    def __init__(self, dim=16, layers=2, vocab=32):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(n): LlamaBlock(dim, 4, 2) for n in range(layers)})
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class GPTBlock(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)
        self.fc = nn.Linear(dim, 4 * dim)
        self.fc_out = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = self.ln_1(x)
        # (batch, heads, seq, head_dim)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.v(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # (batch, seq, dim)
        y = y.transpose(1, 2).flatten(2)
        x = x + self.drop(self.proj(y))
        hidden = F.gelu(self.fc(self.ln_2(x)))
        return x + self.drop(self.fc_out(hidden))


class GPT(nn.Module):
    """A GPT: learned positions, a tied head, dropout."""

    def __init__(self, dim=16, layers=2, vocab=32, seq=8, dropout=0.1):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(seq, dim)
        self.h = nn.ModuleList([GPTBlock(dim, 4, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class CNN(nn.Module):
    """Convolutions with batch statistics."""

    def __init__(self, width=6):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.bn2 = nn.BatchNorm2d(width)
        self.fc1 = nn.Linear(width * 9, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))


class MixerBlock(nn.Module):
    def __init__(self, places, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(places, places)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        # (batch, dim, places)
        by_channel = self.norm(x).transpose(1, 2)
        x = x + self.mix(by_channel).transpose(1, 2)
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden)


class Mixer(nn.Module):
    """An MLP over places and channels: a regression."""

    def __init__(self, places=6, dim=8, layers=2):
        super().__init__()
        self.inlet = nn.Linear(3, dim)
        self.outlet = nn.Linear(dim, 2)
        self.blocks = nn.ModuleList([MixerBlock(places, dim) for _ in range(layers)])

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class GraphNet(nn.Module):
    """Messages along the edges of small graphs, which come as dense matrices, and a filter of frequencies."""

    def __init__(self, dim=8, rounds=2):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.message = nn.ModuleList([nn.Linear(dim, dim) for _ in range(rounds)])
        self.update = nn.ModuleList([nn.GRUCell(dim, dim) for _ in range(rounds)])
        self.filter = nn.Parameter(torch.randn(dim // 2 + 1, 2) * 0.3)
        self.readout = nn.Linear(dim, 1)

    def forward(self, graph):
        nodes = graph["nodes"]
        edges = graph["edges"]
        h = torch.tanh(self.embed(nodes))
        for message, update in zip(self.message, self.update, strict=True):
            incoming = edges @ message(h)
            h = update(incoming.flatten(0, 1), h.flatten(0, 1)).unflatten(0, h.shape[:2])
        # (batch, nodes, dim // 2 + 1), complex
        frequencies = torch.fft.rfft(h) * torch.view_as_complex(self.filter)
        h = torch.fft.irfft(frequencies, n=h.shape[-1])
        return self.readout(h.mean(1))


def _generator():
    return torch.Generator().manual_seed(3)


def tokens():
    g = _generator()
    return torch.randint(0, 32, (8, 8), generator=g), torch.randint(0, 32, (8, 8), generator=g)


def images():
    g = _generator()
    return torch.randn(8, 1, 6, 6, generator=g), torch.randint(0, 4, (8,), generator=g)


def fields():
    g = _generator()
    return torch.randn(8, 6, 3, generator=g), torch.randn(8, 6, 2, generator=g)


def graphs():
    g = _generator()
    edges = (torch.rand(8, 5, 5, generator=g) < 0.5).float()
    return {"nodes": torch.randn(8, 5, 3, generator=g), "edges": edges}, torch.randn(8, 1, generator=g)


# What each model takes.
BATCHES = {Llama: tokens, GPT: tokens, CNN: images, Mixer: fields, GraphNet: graphs}
