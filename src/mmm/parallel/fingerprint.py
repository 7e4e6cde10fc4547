"""Fingerprints of tensors that do not depend on how these are sharded: `mmm diverge` compares two runs by them.

A fingerprint of x has the sums Σ r_k(i)·x(i), k < `PROJECTIONS`, and Σ x(i)². The signs r_k(i) = ±1 are products of one
sign for each index of element i in the full tensor, drawn from the tensor's name. So the fingerprints of shards add up
to that of the full tensor. If two tensors differ by Δ, their sums differ by about the norm of Δ.

Source: Achlioptas, "Database-friendly random projections", 2003; the signs as products: Charikar et al., "Finding
frequent items in data streams", 2002.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmm.nn.draw import ShardBox, random_bits, stream_key

PROJECTIONS = 2
# The projections, and the square of the norm.
COLUMNS = PROJECTIONS + 1


def signs_of(name: str, box: ShardBox, like: Tensor) -> list[Tensor]:
    """The signs of the elements in a box of the tensor called `name`.

    Args:
        like: a local tensor of it, which gives the device and the dtype.

    Returns:
        For each dim (length, PROJECTIONS), ±1; for a complex tensor also (2, PROJECTIONS), for its two parts.
    """
    dims = list(zip(box.start, box.length, strict=True))
    if like.is_complex():
        dims.append((0, 2))
    dtype = project_dtype(like)
    signs = []
    for dim, (start, length) in enumerate(dims):
        index = torch.arange(start, start + length)
        bits = []
        for k in range(PROJECTIONS):
            key = stream_key(0, f"{name}/{dim}/{k}")
            bits.append(random_bits(key, index) & 1)
        # (length, PROJECTIONS): 0 and 1 become -1 and 1.
        dim_signs = 2 * torch.stack(bits, dim=1) - 1
        signs.append(dim_signs.to(like.device, dtype))
    return signs


@torch.no_grad()
def fingerprint(local: Tensor, signs: Sequence[Tensor]) -> Tensor:
    """The fingerprint of a shard.

    Args:
        local: a tensor of any shape; integers and complex numbers too.
        signs: `signs_of` its box.

    Returns:
        (COLUMNS,), in `project_dtype`.
    """
    values = local.detach()
    if values.is_complex():
        # (…, 2)
        values = torch.view_as_real(values)
    values = values.to(project_dtype(local))
    norm = torch.linalg.vector_norm(values)
    squares = norm.square().view(1)
    # A scalar has no index, and so no signs.
    if not signs:
        return torch.cat((values.expand(PROJECTIONS), squares))
    # Summed over one dim after another, the last first: (…, PROJECTIONS) with one dim less each time.
    projected = values @ signs[-1]
    for dim_signs in reversed(signs[:-1]):
        projected = (projected * dim_signs).sum(-2)
    return torch.cat((projected, squares))


def project_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's fingerprint: float64 for float64 and complex128, else float32."""
    if tensor.dtype in (torch.float64, torch.complex128):
        return torch.float64
    return torch.float32
