"""Fingerprints of tensors that do not depend on how these are sharded: `mmm diverge` compares two runs by them.

A fingerprint of x has the sums Σ r_k(i)·x(i), k < `PROJECTIONS`, and Σ x(i)². The signs r_k(i) = ±1 are products of one
sign for each index of element i in the full tensor, drawn from the tensor's name. So the fingerprints of shards add up
to that of the full tensor. If two tensors differ by Δ, their sums differ by about the norm of Δ.

Source: Achlioptas, "Database-friendly random projections", 2003; the signs as products: Charikar et al., "Finding
frequent items in data streams", 2002.

A hash of the bits says whether two tensors are equal to the last bit. It is a sum as well, modulo 2⁶³: of the bits of
each element as an integer, times random integers of 64 bits, one for each index of the element. So the hashes of shards
add up to that of the full tensor.

Source: Lemire, Kaser, "Strongly universal string hashing is fast", 2014: integers of 32 bits, times keys of 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmm.nn.draw import ShardBox, random_bits, stream_key

PROJECTIONS = 2
# The projections, and the square of the norm.
COLUMNS = PROJECTIONS + 1
# Elements that are hashed at once, which bounds the temporary memory: each takes 16 bytes.
CHUNK = 1 << 22
CPU_CHUNK = 1 << 15
# Bytes of an element → the integer of that size.
INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


def signs_of(
    name: str,
    box: ShardBox,
    like: Tensor,
) -> list[Tensor]:
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
        # Indices in the full tensor, so that each element has the same signs in every layout.
        index = torch.arange(start, start + length)
        bits = []
        for k in range(PROJECTIONS):
            key = stream_key(0, f"{name}/{dim}/{k}")
            random = random_bits(key, index)
            bits.append(random & 1)
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
    dtype = project_dtype(local)
    values = values.to(dtype)
    norm = torch.linalg.vector_norm(values)
    squares = norm.square().view(1)
    # A scalar has no index, and so no signs.
    if not signs:
        repeated = values.expand(PROJECTIONS)
        return torch.cat((repeated, squares))
    *other_signs, last_signs = signs
    # Summed over one dim after another, the last first: (…, PROJECTIONS) with one dim less each time.
    projected = values @ last_signs
    for dim_signs in reversed(other_signs):
        signed = projected * dim_signs
        projected = signed.sum(-2)
    return torch.cat((projected, squares))


def keys_of(
    name: str,
    box: ShardBox,
    like: Tensor,
) -> list[Tensor]:
    """The factors of the elements in a box of the tensor called `name`, for `bit_hash`.

    Args:
        like: a local tensor of it, which gives the device and the dtype.

    Returns:
        For each dim (length,), and for the integers that an element consists of; random int64.
    """
    element = like.new_empty(1)
    n_parts = _integers_of(element).numel()
    dims = list(zip(box.start, box.length, strict=True))
    dims.append((0, n_parts))
    keys = []
    for dim, (start, length) in enumerate(dims):
        index = torch.arange(start, start + length)
        low_key = stream_key(0, f"{name}/{dim}/low")
        high_key = stream_key(0, f"{name}/{dim}/high")
        low = random_bits(low_key, index)
        high = random_bits(high_key, index)
        # Each has 53 random bits. Shifted by 11, the second ones reach the highest of 64.
        bits = low ^ (high << 11)
        keys.append(bits.to(like.device))
    return keys


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of each element, as an integer of the same size. The two parts of a complex number are one dim more."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    integer = INTEGERS[values.element_size()]
    return values.view(integer)


def _integers_of(tensor: Tensor) -> Tensor:
    """The bits of each element as integers of at most 32 bits, (…, integers of an element)."""
    integers = as_integers(tensor)
    if not tensor.is_complex():
        integers = integers.unsqueeze(-1)
    if integers.dtype == torch.int64:
        # A view of other elements needs the last dim to be contiguous.
        integers = integers.contiguous().view(torch.int32)
    return integers


@torch.no_grad()
def bit_hash(local: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """A hash of all bits of a shard. Two tensors that differ have the same one by chance about once in 2³¹.

    Args:
        local: a tensor of any shape and data type.
        keys: `keys_of` its box.

    Returns:
        An int64 scalar. Those of shards are added up modulo 2⁶³: PyTorch's integers wrap around.
    """
    # (rows, …, integers of an element)
    integers = _integers_of(local)
    first_keys, *other_keys = keys
    if local.ndim == 0:
        products = integers * first_keys
        return products.sum()
    chunk = CHUNK
    if local.device.type == "cpu":
        chunk = CPU_CHUNK
    row_elements = math.prod(integers.shape[1:])
    # At least 1: a row may have no element, or more than a chunk.
    rows = max(1, chunk // max(1, row_elements))
    row_blocks = integers.split(rows)
    key_blocks = first_keys.split(rows)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for hashed, row_keys in zip(row_blocks, key_blocks, strict=True):
        # Summed over one dim after another, the last first: one dim less each time.
        for dim_keys in reversed(other_keys):
            products = hashed * dim_keys
            hashed = products.sum(-1)
        products = hashed * row_keys
        total += products.sum()
    return total


def project_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's fingerprint: float64 for float64 and complex128, else float32."""
    if tensor.dtype in (torch.float64, torch.complex128):
        return torch.float64
    return torch.float32
