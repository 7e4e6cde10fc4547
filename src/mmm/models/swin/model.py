"""A Swin Transformer of one resolution: a field of places, and attention within windows of it, which shift.

A place is a patch, in the extreme a single pixel. Attention costs window² for each place, however large the field is.
In every second block the windows are shifted by half a window, so that what was apart comes together::

    plain      ┌───┬───┬───┐      shifted   ─┬───┬───┬─     A field rolled by half a window has whole windows
               │   │   │   │                 │   │   │      again. Its last ones hold places from both ends of the
               ├───┼───┼───┤                ─┼───┼───┼─     field; a mask keeps these apart.
               │   │   │   │                 │   │   │

Nothing depends on the size of the field: places within a window are told apart by rotary positions, one half of a head
for rows and one for columns. The published Swin merges patches from stage to stage; this one keeps all of them, as
models of weather do, so its layers are alike. Layers are in a ``ModuleDict`` under their global number, and heads are
counted from the tensor, so the same code runs on a rank with some of the layers or heads.

Sources: Liu et al., "Swin Transformer: hierarchical vision transformer using shifted windows", 2021; Heo et al.,
"Rotary position embedding for vision transformer", 2024 (axial positions); Hatanpää et al., "AERIS: Argonne Earth
systems model for reliable and skillful predictions", 2025 (one resolution, pixels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmm.models.vit.model import ViT, ViTAttention, ViTBlock, ViTConfig
from mmm.nn.rope import rotary_table, rotate
from mmm.nn.sizes import below_one

# Base of the rotary wavelengths: windows are short.
ROPE_THETA = 100.0


@dataclass(frozen=True)
class SwinConfig(ViTConfig):
    """Sizes of a Swin Transformer: those of a ViT, and the window.

    Attributes:
        patch_size: side of a patch, in pixels. 1: each pixel is a place.
        window: side of a window, in places.
    """

    model_name: ClassVar[str] = "swin"

    image_size: int = 128
    patch_size: int = 1
    dim: int = 192
    n_layers: int = 8
    window: int = 8

    def problems(self) -> list[str]:
        """What is wrong with these sizes on any layout, one sentence each. Empty if they fit together."""
        problems = below_one(self, ("window",)) + super().problems()
        if problems:
            return problems
        # Pixels.
        window = self.patch_size * self.window
        if self.image_size % window:
            problems.append(
                f"image_size {self.image_size} is not divisible by patch_size {self.patch_size} · window {self.window} "
                f"= {window}"
            )
        if self.head_dim % 4:
            problems.append(
                f"dim {self.dim} / n_heads {self.n_heads} = {self.head_dim} is not divisible by 4 (a head has pairs of "
                "elements for rows, and as many for columns)"
            )
        if self.attention != "sdpa":
            problems.append(f"attention {self.attention!r}: a Swin has only sdpa")
        return problems


PRESETS: dict[str, SwinConfig] = {
    "debug": SwinConfig(
        image_size=16,
        classes=10,
        dim=32,
        n_layers=2,
        n_heads=4,
        window=4,
    ),
    "small": SwinConfig(),
    "large": SwinConfig(dim=768, n_layers=16, n_heads=12, window=16),
}


def split_windows(x: Tensor, window: int) -> Tensor:
    """(batch, rows, columns, dim) to (batch · windows, window², dim), windows row by row."""
    batch, rows, columns, dim = x.shape
    x = x.view(batch, rows // window, window, columns // window, window, dim)
    return x.transpose(2, 3).reshape(-1, window**2, dim)


def join_windows(windows: Tensor, rows: int, columns: int) -> Tensor:
    """The way back of `split_windows`."""
    _, places, dim = windows.shape
    window = math.isqrt(places)
    x = windows.view(-1, rows // window, columns // window, window, window, dim)
    return x.transpose(2, 3).reshape(-1, rows, columns, dim)


def same_end(over_rows: Tensor, over_columns: Tensor, window: int) -> Tensor:
    """Whether two places of a window come from the same end of a field that was rolled.

    Args:
        over_rows, over_columns: (rows,) and (columns,) bool, which of them were rolled over the field's edge.

    Returns:
        (windows, window², window²) bool.
    """
    end = 2 * over_rows.long()[:, None] + over_columns.long()
    # (windows, window²)
    end = split_windows(end[None, ..., None], window).squeeze(-1)
    return end[:, :, None] == end[:, None, :]


class WindowAttention(ViTAttention):
    """Every place attends to the places of its window; (batch, rows, columns, dim) in and out.

    Attributes:
        window: side of a window, in places.
        shift: how far windows are shifted, down and to the right.
    """

    def __init__(self, config: SwinConfig, shift: int) -> None:
        super().__init__(config)
        self.window = config.window
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        _, rows, columns, _ = x.shape
        # Where there is one window, there is nothing to bring together.
        down = self.shift if rows > self.window else 0
        right = self.shift if columns > self.window else 0
        x = x.roll((-down, -right), (1, 2))
        # (batch · windows, window², dim)
        x = split_windows(x, self.window)
        # -1: under tensor parallelism a rank has only some of the heads.
        heads = (*x.shape[:2], -1, self.head_dim)
        cos, sin = self.angles(x.device)
        # (batch · windows, window², local heads, head_dim) → (batch · windows, local heads, window², head_dim)
        q = rotate(self.wq(x).view(heads), cos, sin).transpose(1, 2)
        k = rotate(self.wk(x).view(heads), cos, sin).transpose(1, 2)
        v = self.wv(x).view(heads).transpose(1, 2)
        mask = None
        if self.shift:
            # What the roll has brought over the field's edge: its last rows and columns then.
            over_rows = torch.arange(rows, device=x.device) >= rows - down
            over_columns = torch.arange(columns, device=x.device) >= columns - right
            mask = same_end(over_rows, over_columns, self.window)
            # Windows of a sample lie next to each other. (batch · windows, 1, window², window²)
            mask = mask.repeat(len(x) // len(mask), 1, 1)[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        # (batch · windows, window², local heads · head_dim)
        out = out.transpose(1, 2).flatten(2)
        return join_windows(self.wo(out), rows, columns).roll((down, right), (1, 2))

    def angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a window's places, (window², head_dim / 2): of the row, then of the column."""
        places = torch.arange(self.window**2, device=device)
        by_row = rotary_table(places // self.window, self.head_dim // 2, ROPE_THETA)
        by_column = rotary_table(places % self.window, self.head_dim // 2, ROPE_THETA)
        cos = torch.cat((by_row[0], by_column[0]), dim=-1)
        sin = torch.cat((by_row[1], by_column[1]), dim=-1)
        return cos, sin


class SwinBlock(ViTBlock):
    """Pre-norm block, (batch, rows, columns, dim) in and out."""

    def __init__(self, config: SwinConfig, shift: int) -> None:
        super().__init__(config)
        self.attention = WindowAttention(config, shift)


class FieldEmbedding(nn.Module):
    """Images (batch, channels, image_size, image_size) to places (batch, rows, columns, dim)."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        patch = config.patch_size
        self.projection = nn.Conv2d(config.channels, config.dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.projection(images).permute(0, 2, 3, 1)


class Swin(ViT):
    """Images (batch, channels, image_size, image_size) to logits (batch, classes).

    A pipeline stage is as one of the ViT. It takes, or returns, (batch, rows, columns, dim).
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config)
        self.embedding = FieldEmbedding(config)
        # Every second block has shifted windows.
        shifts = (0, config.window // 2)
        self.layers = nn.ModuleDict({str(i): SwinBlock(config, shifts[i % 2]) for i in range(config.n_layers)})
        # The mean over the places, as a module that can compute with some of the rows.
        self.pool = nn.AdaptiveAvgPool2d(1)

    def mean(self, h: Tensor) -> Tensor:
        return self.pool(h.permute(0, 3, 1, 2)).flatten(1)
