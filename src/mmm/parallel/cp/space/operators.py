"""Which modules compute with a field that is split, and how: a style for each type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from mmm.parallel.cp.space import attention, convolutions, norms, pools, upsampling, windows
from mmm.torch_private.module import BatchNorm

# Function of (split, module, its own forward, x, …) that returns this rank's rows of the module's output.
Style = Callable[..., Any]

STYLES: dict[type[nn.Module], Style] = {
    nn.Conv1d: convolutions.convolution,
    nn.Conv2d: convolutions.convolution,
    nn.Conv3d: convolutions.convolution,
    nn.ConvTranspose1d: convolutions.transposed_convolution,
    nn.ConvTranspose2d: convolutions.transposed_convolution,
    nn.ConvTranspose3d: convolutions.transposed_convolution,
    nn.MaxPool1d: pools.max_pooling,
    nn.MaxPool2d: pools.max_pooling,
    nn.MaxPool3d: pools.max_pooling,
    nn.AvgPool1d: pools.average_pooling,
    nn.AvgPool2d: pools.average_pooling,
    nn.AvgPool3d: pools.average_pooling,
    nn.AdaptiveAvgPool1d: pools.mean_of_rows,
    nn.AdaptiveAvgPool2d: pools.mean_of_rows,
    nn.AdaptiveAvgPool3d: pools.mean_of_rows,
    nn.Upsample: upsampling.upsampling,
    nn.PixelShuffle: upsampling.pixel_shuffle,
    nn.PixelUnshuffle: upsampling.pixel_unshuffle,
    nn.GroupNorm: norms.group_norm,
    nn.InstanceNorm1d: norms.group_norm,
    nn.InstanceNorm2d: norms.group_norm,
    nn.InstanceNorm3d: norms.group_norm,
    nn.LayerNorm: norms.layer_norm,
    nn.MultiheadAttention: attention.self_attention,
}
# Kind of module that pads a field → what it puts there.
PADS = {
    "Constant": "zeros",
    "Zero": "zeros",
    "Circular": "circular",
    "Reflection": "reflect",
    "Replication": "replicate",
}
for kind, outside in PADS.items():
    for dims in (1, 2, 3):
        STYLES[getattr(nn, f"{kind}Pad{dims}d")] = partial(pools.padded, outside)

# Each place by itself; or, a batch norm, with sums over all ranks, which `parallelize` gives it.
LOCAL: tuple[type[nn.Module], ...] = (nn.Linear, nn.PReLU, nn.Hardswish, nn.LogSigmoid, BatchNorm, nn.SyncBatchNorm)

# For styles that do not take every module of their type: function of (module, ranks, its arguments …) that returns why
# one is refused, and nothing if it is not.
PROBLEMS: dict[Style, Callable[..., str]] = {
    pools.max_pooling: pools.pooling_problem,
    pools.average_pooling: pools.pooling_problem,
    pools.mean_of_rows: pools.mean_problem,
    upsampling.upsampling: upsampling.upsampling_problem,
    norms.group_norm: norms.instance_problem,
    attention.self_attention: attention.attention_problem,
    windows.shifted_windows: windows.windows_problem,
}


def _forward_of(module: nn.Module, styles: Mapping[type[nn.Module], Any]) -> Any:
    """The entry of the type whose forward is the module's."""
    for cls in type(module).__mro__:
        # A derived class may have another forward.
        if cls in styles and type(module).forward is cls.forward:  # type: ignore[attr-defined]
            return styles[cls]
    return None


def style_of(module: nn.Module, styles: Mapping[type[nn.Module], Style]) -> Style | None:
    """How a module computes with its rows; None if it has no style.

    Args:
        styles: those of a plan, in addition to `STYLES`.
    """
    style: Style | None = _forward_of(module, {**STYLES, **styles})
    return style


def is_local(module: nn.Module) -> bool:
    """Whether a module treats each place by itself."""
    return _forward_of(module, dict.fromkeys(LOCAL, True)) is not None
