"""A Vision Transformer: the image split into patches, a pre-norm encoder, the mean over the patches.

No class token, no bias on queries, keys and values. They are three matrices, since one fused matrix, sharded by rows,
gives each rank the wrong mix of the three. Heads are counted from the tensor, and layers are in a ``ModuleDict`` under
their global number: the same code runs on a rank with some of the heads or layers.

Sources: Dosovitskiy et al., "An image is worth 16x16 words", 2021; Beyer, Zhai, Kolesnikov, "Better plain ViT baselines
for ImageNet-1k", 2022 (mean instead of class token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.draw import Init
from mmm.nn.sizes import below_one, check_images

ATTENTION = ("native", "sdpa")


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT. ``mlp_dim=None`` means ``4 * dim``.

    ``attention``: ``native`` is `native_attention`; ``sdpa`` is PyTorch's ``F.scaled_dot_product_attention``.
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    dim: int = 384
    n_layers: int = 12
    n_heads: int = 6
    mlp_dim: int | None = None
    norm_eps: float = 1e-6
    attention: str = "sdpa"

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """Width of the MLP."""
        return 4 * self.dim if self.mlp_dim is None else self.mlp_dim

    @property
    def patches(self) -> int:
        """Patches of an image: the length of the sequence."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self) -> int:
        """Elements of a patch."""
        return self.channels * self.patch_size**2

    def problems(self) -> list[str]:
        """What is wrong with these sizes by themselves, one sentence each; empty when they fit together."""
        sizes = ("image_size", "patch_size", "channels", "classes", "dim", "n_layers", "n_heads", "mlp_dim")
        problems = below_one(self, sizes)
        if self.attention not in ATTENTION:
            problems.append(f"attention {self.attention!r} is not one of {', '.join(ATTENTION)}")
        if problems:
            return problems
        if self.image_size % self.patch_size:
            problems.append(f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}")
        if self.dim % self.n_heads:
            problems.append(f"dim {self.dim} is not divisible by n_heads {self.n_heads}")
        return problems


# tiny to large are the published sizes, at 224 pixels and patches of 16.
PRESETS: dict[str, ViTConfig] = {
    "debug": ViTConfig(image_size=32, patch_size=8, classes=10, dim=64, n_layers=2, n_heads=4),
    "tiny": ViTConfig(dim=192, n_heads=3),
    "small": ViTConfig(),
    "base": ViTConfig(dim=768, n_heads=12),
    "large": ViTConfig(dim=1024, n_layers=24, n_heads=16),
}


def native_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``softmax(q kᵀ / sqrt(head_dim)) v``, all (batch, heads, seq, head_dim).

    The softmax is computed in float32 or wider. Backward needs the weights, (batch, heads, seq, seq): the memory that
    fused kernels save.
    """
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5  # (batch, heads, seq, seq)
    weight = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(v.dtype)
    return weight @ v  # (batch, heads, seq, head_dim)


class PatchEmbedding(nn.Module):
    """Images (batch, channels, image_size, image_size) to (batch, patches, dim), with a learned vector a place."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.channels, self.image_size = config.channels, config.image_size
        self.patch_size = config.patch_size
        self.projection = nn.Linear(config.patch_dim, config.dim)
        self.positions = nn.Parameter(torch.zeros(config.patches, config.dim))

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels, self.image_size, "ViT")
        batch, channels, size, _ = images.shape
        side, p = size // self.patch_size, self.patch_size
        x = images.reshape(batch, channels, side, p, side, p)
        x = x.permute(0, 2, 4, 1, 3, 5)  # (batch, side, side, channels, p, p)
        x = x.reshape(batch, side * side, channels * p * p)  # (batch, patches, patch_dim), patches row by row
        return self.projection(x) + self.positions  # (batch, patches, dim)


class ViTAttention(nn.Module):
    """Every patch attends to every patch; (batch, patches, dim) in and out."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.native = config.attention == "native"
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # each (batch, local heads, patches, head_dim)
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.native:
            out = native_attention(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))  # (batch, patches, dim)


class MLP(nn.Module):
    """``fc2(gelu(fc1 x))``."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.dim, config.hidden_dim)
        self.fc2 = nn.Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class ViTBlock(nn.Module):
    """Pre-norm block, (batch, patches, dim) in and out."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = ViTAttention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """Images (batch, channels, image_size, image_size) to logits (batch, classes).

    A pipeline stage is this class with ``embedding``, some ``layers``, or ``norm`` and ``head`` set to None or
    removed: it then takes, or returns, (batch, patches, dim). The mean over the patches belongs to ``norm``.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if wrong := config.problems():
            raise ValueError("; ".join(wrong))
        self.config = config
        self.embedding: nn.Module | None = PatchEmbedding(config)
        self.layers = nn.ModuleDict({str(i): ViTBlock(config) for i in range(config.n_layers)})
        self.norm: nn.Module | None = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.head: nn.Module | None = nn.Linear(config.dim, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: images, or hidden states (batch, patches, dim) where the embedding is missing.

        Raises:
            ValueError: images of another size or number of channels.
        """
        h = self.embedding(x) if self.embedding is not None else x  # (batch, patches, dim)
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h.mean(dim=1)) if self.norm is not None else h  # (batch, dim)
        return self.head(h) if self.head is not None else h  # (batch, classes)

    def init_rule(self, name: str) -> Init:
        """Norms 1, biases 0; positions and matrices normal with 0.02, but 0.02 / sqrt(2 · n_layers) where a block
        writes into the residual stream, and 1 / sqrt(patch_dim) for the patches, so that they start about as large as
        the image.

        Args:
            name: the canonical parameter name.
        """
        if name.endswith("bias"):
            return Init("constant", 0.0)
        if "norm" in name:
            return Init("constant", 1.0)
        if name == "embedding.projection.weight":
            return Init("normal", self.config.patch_dim**-0.5)
        if name.endswith(("attention.wo.weight", "mlp.fc2.weight")):
            return Init("normal", 0.02 / math.sqrt(2 * self.config.n_layers))
        return Init("normal", 0.02)
