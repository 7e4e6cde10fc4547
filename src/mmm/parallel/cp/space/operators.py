"""Which modules compute with a field that is split, and how: a style for each type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from mmm.parallel.cp.space import attention, convolutions, norms, pools, spectral, upsampling, windows
from mmm.torch_private.module import BatchNorm

# Function of (split, module, its own forward, x, …) that returns this rank's rows of the module's output.
Style = Callable[..., Any]

STYLES: dict[type[nn.Module], Style] = {
    nn.Upsample: upsampling.upsampling,
    nn.PixelShuffle: upsampling.pixel_shuffle,
    nn.GroupNorm: norms.group_norm,
    nn.LayerNorm: norms.layer_norm,
    nn.MultiheadAttention: attention.self_attention,
}
# Modules that PyTorch has for one, two and three dims of space.
OF_DIMS: dict[str, Style] = {
    "Conv": convolutions.convolution,
    "ConvTranspose": convolutions.transposed_convolution,
    "MaxPool": pools.max_pooling,
    "AvgPool": pools.average_pooling,
    "AdaptiveAvgPool": pools.mean_of_rows,
    "InstanceNorm": norms.group_norm,
    # ZeroPad is one of these.
    "ConstantPad": partial(pools.padded, "zeros"),
    "CircularPad": partial(pools.padded, "circular"),
    "ReflectionPad": partial(pools.padded, "reflect"),
    "ReplicationPad": partial(pools.padded, "replicate"),
}
for kind, style in OF_DIMS.items():
    for dims in (1, 2, 3):
        STYLES[getattr(nn, f"{kind}{dims}d")] = style
# Of (batch, channels, …).
CHANNELS_FIRST = (*STYLES.keys() - {nn.LayerNorm, nn.MultiheadAttention},)

# Each place by itself; or, a batch norm, with sums over all ranks, which `parallelize` gives it.
LOCAL = (nn.Linear, nn.PReLU, nn.Hardswish, nn.LogSigmoid, BatchNorm, nn.SyncBatchNorm)

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
    spectral.spectral: spectral.spectral_problem,
}


def style_of(module: nn.Module, styles: Mapping[type[nn.Module], Any]) -> Any:
    """What a table has for the type whose forward is the module's: a derived class may have another. None if nothing.

    Args:
        styles: those of a plan, in addition to `STYLES`.
    """
    table = {**STYLES, **styles}
    for cls in type(module).__mro__:
        if cls in table and type(module).forward is cls.forward:  # type: ignore[attr-defined]
            return table[cls]
    return None


def is_local(module: nn.Module) -> bool:
    """Whether a module treats each place by itself."""
    return style_of(module, dict.fromkeys(LOCAL, True)) is True
