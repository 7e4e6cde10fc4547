"""The data types that a program may be verified in: float64, float32 and bf16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mmm_verify.errors import ConfigError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}
# bf16 has no complex type: complex numbers are then in the smallest that PyTorch computes in on the CPU.
COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.bfloat16: torch.complex64}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"bf16"`` → ``torch.bfloat16``.

    Raises:
        ConfigError: it is none of `DTYPES`.
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    raise ConfigError(f"--dtype {dtype}: write {', '.join(DTYPES)}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type as in `DTYPES`, or PyTorch's if it is none of them."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    return str(dtype).removeprefix("torch.")


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in `dtype`, complex numbers as precisely; integers and bools as they are."""
    if tensor.is_complex():
        return tensor.to(COMPLEX[dtype])
    if tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor


def widest(tensor: Tensor) -> Tensor:
    """Floats in float64, complex numbers in complex128: differences of tensors are then exact."""
    return in_dtype(tensor, torch.float64)


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Inside, what is made without a dtype, such as ``torch.zeros(n)``, has this one, as the weights do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
