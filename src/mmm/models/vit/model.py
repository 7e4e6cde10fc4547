"""A Vision Transformer: the image is split into patches, which go through a pre-norm encoder and are averaged.

It has no class token, and no bias on queries, keys and values. These have a matrix each, because one fused matrix that
is sharded by rows would give each rank the wrong mix of the three. Heads are counted from the tensor, and layers are in
a ``ModuleDict`` under their global number, so the same code runs on a rank with some of the heads or layers.

Sources: Dosovitskiy et al., "An image is worth 16x16 words", 2021; Beyer, Zhai, Kolesnikov, "Better plain ViT baselines
for ImageNet-1k", 2022 (mean instead of class token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.nn.init import Init
from mmm.nn.sizes import below_one, check_images

ATTENTION = ("native", "sdpa")


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT.

    Attributes:
        image_size: side of the square images, in pixels.
        patch_size: side of a patch, in pixels.
        classes: number of classes.
        dim: width of the residual stream.
        mlp_dim: width of the MLP. None for ``4 * dim``.
        attention: ``native`` for `native_attention`, ``sdpa`` for PyTorch's ``F.scaled_dot_product_attention``.
    """

    model_name: ClassVar[str] = "vit"

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
        if self.mlp_dim is None:
            return 4 * self.dim
        return self.mlp_dim

    @property
    def patches(self) -> int:
        """Number of patches of an image, which is the length of the sequence."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self) -> int:
        """Number of elements of a patch."""
        return self.channels * self.patch_size**2

    def problems(self) -> list[str]:
        """What is wrong with these sizes on any layout, one sentence each. Empty if they fit together."""
        sizes = (
            "image_size",
            "patch_size",
            "channels",
            "classes",
            "dim",
            "n_layers",
            "n_heads",
            "mlp_dim",
        )
        problems = below_one(self, sizes)
        if self.attention not in ATTENTION:
            problems.append(f"attention {self.attention!r} is not one of {', '.join(ATTENTION)}")
        # What follows divides by these sizes.
        if problems:
            return problems
        if self.image_size % self.patch_size:
            problems.append(f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}")
        if self.dim % self.n_heads:
            problems.append(f"dim {self.dim} is not divisible by n_heads {self.n_heads}")
        return problems


# tiny to large have the published sizes, with images of 224 pixels and patches of 16.
PRESETS: dict[str, ViTConfig] = {
    "debug": ViTConfig(
        image_size=32,
        patch_size=8,
        classes=10,
        dim=64,
        n_layers=2,
        n_heads=4,
    ),
    "tiny": ViTConfig(dim=192, n_heads=3),
    "small": ViTConfig(),
    "base": ViTConfig(dim=768, n_heads=12),
    "large": ViTConfig(dim=1024, n_layers=24, n_heads=16),
}


def native_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out: ``softmax(q kᵀ / sqrt(head_dim)) v``, all (batch, heads, seq, head_dim).

    Backward needs the weights, (batch, heads, seq, seq). That is the memory that fused kernels save.
    """
    # (batch, heads, seq, seq)
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    # The softmax is computed in float32 or wider: exponentials of half-precision numbers are too coarse.
    wide = torch.promote_types(scores.dtype, torch.float32)
    weight = scores.to(wide).softmax(dim=-1).to(v.dtype)
    return weight @ v


class PatchEmbedding(nn.Module):
    """Images (batch, channels, image_size, image_size) to patches (batch, patches, dim).

    A learned vector for its place is added to each patch.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.channels = config.channels
        self.image_size = config.image_size
        self.patch_size = config.patch_size
        self.projection = nn.Linear(config.patch_dim, config.dim)
        self.positions = nn.Parameter(torch.zeros(config.patches, config.dim))

    def forward(self, images: Tensor) -> Tensor:
        check_images(images, self.channels, self.image_size, "ViT")
        batch, channels, size, _ = images.shape
        p = self.patch_size
        side = size // p
        # Rows and columns of the image become patches, and rows and columns within a patch.
        x = images.reshape(batch, channels, side, p, side, p)
        # (batch, side, side, channels, p, p)
        x = x.permute(0, 2, 4, 1, 3, 5)
        # (batch, patches, patch_dim), patches row by row
        x = x.reshape(batch, side * side, channels * p * p)
        # (batch, patches, dim)
        return self.projection(x) + self.positions


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
        # -1: under tensor parallelism a rank has only some of the heads.
        # (batch, patches, local heads, head_dim) → (batch, local heads, patches, head_dim)
        q = self.wq(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        if self.native:
            out = native_attention(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        # (batch, patches, local heads · head_dim)
        out = out.transpose(1, 2).reshape(batch, seq, -1)
        return self.wo(out)


class MLP(nn.Module):
    """``fc2(gelu(fc1 x))``."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.dim, config.hidden_dim)
        self.fc2 = nn.Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, patches, hidden_dim), then (batch, patches, dim)
        hidden = F.gelu(self.fc1(x))
        return self.fc2(hidden)


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
        problems = config.problems()
        if problems:
            raise ValueError("; ".join(problems))
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
        h = x
        if self.embedding is not None:
            # (batch, patches, dim)
            h = self.embedding(x)
        for layer in self.layers.values():
            h = layer(h)
        if self.norm is not None:
            # (batch, dim)
            h = self.norm(self.mean(h))
        if self.head is not None:
            # (batch, classes)
            h = self.head(h)
        return h

    def mean(self, h: Tensor) -> Tensor:
        """The mean over all patches, (batch, dim)."""
        return h.mean(dim=1)

    def init_rule(self, name: str) -> Init:
        """How a parameter is drawn.

        Norms are 1 and biases 0. Positions and matrices are normal with standard deviation 0.02. Matrices that write
        into the residual stream have 0.02 / sqrt(2 · n_layers), so that it does not grow with the depth. The projection
        of the patches has 1 / sqrt(patch_dim), so that patches start about as large as the image.

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
