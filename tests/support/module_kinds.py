"""Kinds of modules that real models have, and places between sharded matrices at which a plan may name them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn.utils import parametrizations, prune

from mmm.parallel import PartialGradient, Replicated

# Sizes that all kinds share.
DIM, TOKENS, VOCABULARY = 8, 4, 12


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class Two(nn.Linear):
    def forward(self, x, y):
        return super().forward(x + y)


class Lora(nn.Linear):
    """Matrices inside a matrix."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.a = nn.Linear(sizes[0], 1, bias=False)
        self.b = nn.Linear(1, sizes[1], bias=False)

    def forward(self, x):
        return super().forward(x) + self.b(self.a(x))


class Packed(nn.Linear):
    """Two columns of integers in each element."""

    def __init__(self):
        super().__init__(DIM, DIM)
        self.weight = nn.Parameter(torch.randint(0, 255, (DIM, DIM // 2), dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        # Two numbers of four bits in a byte.
        weight = torch.cat([self.weight >> 4, self.weight & 15], 1)
        return F.linear(x, weight.to(x.dtype), self.bias)


class Renamed(nn.Linear):
    """Without a forward of its own."""


class Scaled(nn.Linear):
    """A parameter beside weight and bias."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.rand(sizes[1]))

    def forward(self, x):
        return super().forward(x) * self.scale


class ScaledEmbedding(nn.Embedding):
    """Gemma 3's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("factor", torch.tensor(3.0))

    def forward(self, ids):
        return super().forward(ids) * self.factor.to(self.weight.dtype)


class Conv1D(nn.Module):
    """As `transformers.pytorch_utils.Conv1D`: the weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / 3)
        self.bias = nn.Parameter(torch.rand(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class Int8(nn.Module):
    """A quantized matrix: integers in a buffer, and their scales."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randint(-5, 5, (DIM, DIM), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype)) * self.scale


class OldInt8(nn.Linear):
    """nn.Linear whose weight is of integers."""

    def __init__(self):
        super().__init__(DIM, DIM)
        self.weight = nn.Parameter(torch.randint(-5, 5, (DIM, DIM), dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Named(nn.Module):
    """Takes keywords, gives a dict, as in transformers."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, *, hidden_states, attention_mask=None):
        hidden = self.matrix(hidden_states) * self.scale
        return {"hidden": hidden if attention_mask is None else hidden * attention_mask, "cache": None}


class Listed(nn.Module):
    """Parameters in lists."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.rand(DIM), torch.rand(DIM)])
        self.named = nn.ParameterDict({"shift": torch.rand(DIM)})

    def forward(self, x):
        return x * self.scales[0] * self.scales[1] + self.named["shift"]


class Norm(nn.Module):
    """A norm of one's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def _bilinear(module, x, ids):
    return module(x, x)


def _sequence(module, x, ids):
    # Channels before places.
    return module(x.transpose(1, 2)).transpose(1, 2)


def _image(module, x, ids):
    return module(x.transpose(1, 2).unflatten(-1, (2, -1))).flatten(2).transpose(1, 2)


def _first(module, x, ids):
    return module(x)[0]


def _attention(module, x, ids):
    return module(query=x, key=x, value=x, need_weights=False)[0]


def _named(module, x, ids):
    mask = torch.ones(TOKENS, 1, dtype=x.dtype)
    return module(hidden_states=x, attention_mask=mask)["hidden"]


def _pruned():
    return prune.random_unstructured(nn.Linear(DIM, DIM), "weight", 0.5)


def _plain(module, x, ids):
    return module(x)


def _ids(module, x, ids):
    return module(ids)


def _bags(module, x, ids):
    return module(ids.flatten()[:, None]).unflatten(0, ids.shape)


# How each kind of module is made, and how it is called.
KINDS = {
    "Linear": (lambda: nn.Linear(DIM, DIM), _plain),
    "Linear, keyword": (lambda: nn.Linear(DIM, DIM), lambda module, x, ids: module(input=x)),
    "Linear, no bias": (lambda: nn.Linear(DIM, DIM, bias=False), _plain),
    "Linear, 7 wide": (lambda: nn.Linear(DIM, 7), lambda module, x, ids: F.pad(module(x), (0, 1))),
    "Linear subclass": (lambda: Renamed(DIM, DIM), _plain),
    "Linear, forward": (lambda: Cast(DIM, DIM), _plain),
    "Linear of two": (lambda: Two(DIM, DIM), lambda module, x, ids: module(x, x)),
    "Linear with lora": (lambda: Lora(DIM, DIM), _plain),
    "Linear, twice": (lambda: nn.Linear(DIM, DIM), lambda module, x, ids: module(x) + module(x[:, :, None])[:, :, 0]),
    "Linear, packed": (Packed, _plain),
    "Linear, tuple": (lambda: Pair(DIM, DIM), _first),
    "Linear, scale": (lambda: Scaled(DIM, DIM), _plain),
    "Linear, int8": (OldInt8, _plain),
    "Linear, pruned": (_pruned, _plain),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(DIM, DIM)), _plain),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(DIM, DIM)).eval(), _plain),
    "Conv1D": (lambda: Conv1D(DIM, DIM), _plain),
    "Conv1D of three": (lambda: Conv1D(3 * DIM, DIM), lambda module, x, ids: module(x).unflatten(-1, (-1, 3)).sum(-1)),
    "Embedding": (lambda: nn.Embedding(VOCABULARY, DIM), _ids),
    "Embedding, padding_idx": (lambda: nn.Embedding(VOCABULARY, DIM, padding_idx=1), _ids),
    "Embedding, max_norm": (lambda: nn.Embedding(VOCABULARY, DIM, max_norm=1.0), _ids),
    "Embedding, by frequency": (lambda: nn.Embedding(VOCABULARY, DIM, scale_grad_by_freq=True), _ids),
    "Embedding, forward": (lambda: ScaledEmbedding(VOCABULARY, DIM), _ids),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(VOCABULARY, DIM), _bags),
    "LayerNorm": (lambda: nn.LayerNorm(DIM), _plain),
    "RMSNorm": (lambda: nn.RMSNorm(DIM), _plain),
    "own norm": (Norm, _plain),
    "GroupNorm": (lambda: nn.GroupNorm(2, DIM), _sequence),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(DIM), _sequence),
    "Conv1d": (lambda: nn.Conv1d(DIM, DIM, 3, padding=1), _sequence),
    "Conv2d": (lambda: nn.Conv2d(DIM, DIM, 1), _image),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(DIM, DIM, 1), _sequence),
    "Bilinear": (lambda: nn.Bilinear(DIM, DIM, DIM), _bilinear),
    "PReLU": (lambda: nn.PReLU(DIM), _sequence),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(DIM, 2, batch_first=True), _attention),
    "LSTM": (lambda: nn.LSTM(DIM, DIM, batch_first=True), _first),
    "GRU": (lambda: nn.GRU(DIM, DIM, batch_first=True), _first),
    "keywords, dict": (Named, _named),
    "ParameterList": (Listed, _plain),
    "int8": (Int8, _plain),
    "Sequential": (lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM)), _plain),
    "Dropout": (lambda: nn.Dropout(0.0), _plain),
}


class Host(nn.Module):
    """A module between two matrices: (batch, tokens, dim) in and out."""

    def __init__(self, kind, heads=1):
        super().__init__()
        make, self.call = KINDS[kind]
        self.heads = heads
        self.norm = nn.LayerNorm(DIM)
        self.before = nn.Linear(DIM, DIM * heads)
        self.kind = make()
        self.after = nn.Linear(DIM * heads, DIM)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = torch.tanh(self.before(self.norm(x)))
        # Over heads, those that are here: (batch · heads, tokens, dim)
        if self.heads > 1:
            # (batch · heads, seq, dim)
            x = x.unflatten(-1, (-1, DIM)).transpose(1, 2).flatten(0, 1)
        ids = ids.repeat_interleave(len(x) // len(ids), 0)
        x = self.call(self.kind, x, ids)
        if self.heads > 1:
            # (batch, seq, heads · dim)
            x = x.unflatten(0, (3, -1)).transpose(1, 2).flatten(2)
        return self.after(torch.tanh(x))


# Of each place: the style of the module, those of the matrices before and after it, and heads between these.
PLACES: dict[str, tuple[ParallelStyle, ParallelStyle, ParallelStyle, int]] = {
    "Colwise": (ColwiseParallel(), Replicated(), RowwiseParallel(), 1),
    "Colwise, gathered": (ColwiseParallel(output_layouts=Replicate()), Replicated(), Replicated(), 1),
    "Rowwise": (RowwiseParallel(), ColwiseParallel(), Replicated(), 1),
    "Rowwise, of full": (RowwiseParallel(input_layouts=Replicate()), Replicated(), Replicated(), 1),
    "Replicated": (Replicated(), Replicated(), Replicated(), 1),
    "Partial": (PartialGradient(), ColwiseParallel(), RowwiseParallel(), 2),
    "Sequence": (
        SequenceParallel(use_local_output=True),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        1,
    ),
}
