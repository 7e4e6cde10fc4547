"""Which kernels of PyTorch's ``scaled_dot_product_attention`` a device has, found by trying each."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmm.errors import DeviceError, config_field


def check_sdpa(
    name: str, kernels: dict[str, SDPBackend], device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Whether attention can go by the kernel of that name; needs no process group.

    Args:
        name: one of `kernels`, all that can be asked for by name; another, such as auto, asks for none.
        dtype: of queries, keys and values. shape: of one head's, (seq, head_dim).

    Raises:
        DeviceError: the device has no such kernel for them; with those that it has.
    """
    if name not in kernels or _works(kernels[name], device, dtype, shape):
        return
    working = [other for other, kernel in kernels.items() if _works(kernel, device, dtype, shape)]
    raise DeviceError(
        f"{config_field('sdpa_backend')} "
        f"{name!r}: PyTorch {torch.__version__} has no such kernel on {device.type} for {dtype} and heads "
        f"of {shape[1]} elements; use auto{', ' * bool(working)}{', '.join(working)}",
    )


def _works(kernel: SDPBackend, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    q, k, v = (torch.zeros(1, 1, *shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    try:
        with warnings.catch_warnings(), sdpa_kernel(kernel):
            warnings.simplefilter("ignore")  # PyTorch warns of each thing that keeps a kernel from being used
            F.scaled_dot_product_attention(q, k, v)
    except RuntimeError:
        return False
    return True
