"""Initial weights, drawn: a pure function of (seed, canonical parameter name, element index).

Element ``i`` of parameter ``name`` is output ``i`` of a SplitMix64 stream whose key is a hash of (seed, name). So a
rank draws just its shard of a matrix, also for a model built on the meta device, and the weights do not depend on how
the model is sharded, on how many layers it has, or on the order of construction.

Source of the generator: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmm.torch_private.module import WRAPPERS, map_tensors

CHUNK = 1 << 22  # elements drawn at once on a device, which bounds the temporary memory to a few times 32 MiB
CPU_CHUNK = 1 << 15  # the same for each thread of a CPU: the temporary memory stays in its cache

BITS = 53  # that a float64 holds

_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class Init:
    """How the elements of one parameter are drawn.

    ``normal``: mean 0, standard deviation `scale`. ``uniform``: in [-scale, scale). ``constant``: `scale` everywhere.
    The row numbered `zero_row`, if any, starts with zeros (what an embedding does for padding).
    """

    kind: str
    scale: float
    zero_row: int | None = None


@dataclass(frozen=True)
class ShardBox:
    """The shard of a tensor that is local: per dim the first index, the length and the full length, in elements."""

    start: tuple[int, ...]
    length: tuple[int, ...]
    full: tuple[int, ...]


def class_name(module: object) -> str:
    """Of a module's class as its author wrote it: ``fully_shard`` makes another of it, called FSDP and that name."""
    kind, *bases = type(module).__mro__
    return (bases[1] if bases[0].__name__ == "FSDPModule" else kind).__name__


def canonical_name(name: str) -> str:
    """``name`` without what compile, checkpoint, DDP or FSDP wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def stream_key(seed: int, name: str) -> int:
    """The 64-bit key of a parameter's stream: the first 8 bytes of SHA-256 over seed and canonical name."""
    digest = hashlib.sha256(f"{seed}/{canonical_name(name)}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _logical_shift(z: Tensor, bits: int, out: Tensor) -> Tensor:
    """``z >> bits`` with zeros from the left (torch shifts in copies of the sign), in `out`."""
    return torch.bitwise_right_shift(z, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def random_bits(key: int | Tensor, index: Tensor, first: int = 0) -> Tensor:
    """`BITS` random bits each, as int64, for the int64 element indices first + `index` (any shape).

    Args:
        key: of the stream; or one for each row of `index`, int64, (rows, 1).
    """
    if isinstance(key, Tensor):
        # key / γ modulo 2⁶⁴, added before the product: torch.compile counts an arange in 32 bits, and makes of one
        # times γ a formula of integers beyond 64, both of which Triton refuses.
        z = (index + (key * _signed(pow(_GAMMA, -1, 1 << 64)) + (first + 1))).mul_(_signed(_GAMMA))
    else:
        z = (index * _signed(_GAMMA)).add_(_signed(key + (first + 1) * _GAMMA))
    # From here on in place: memory is what it costs.
    shifted = torch.empty_like(z)
    z.bitwise_xor_(_logical_shift(z, 30, shifted)).mul_(_signed(_MIX1))
    z.bitwise_xor_(_logical_shift(z, 27, shifted)).mul_(_signed(_MIX2))
    z.bitwise_xor_(_logical_shift(z, 31, shifted))
    return _logical_shift(z, 64 - BITS, shifted)


def uniform01(key: int, index: Tensor) -> Tensor:
    """Float64 in (0, 1), of `random_bits`."""
    return random_bits(key, index).double().add_(0.5).mul_(2.0**-BITS)


def _draw(rule: Init, key: int, index: Tensor) -> Tensor:
    centred = uniform01(key, index).mul_(2).sub_(1)  # in (-1, 1)
    if rule.kind == "uniform":
        return centred.mul_(rule.scale)
    if rule.kind == "normal":
        return centred.erfinv_().mul_(math.sqrt(2.0) * rule.scale)
    raise ValueError(f"unknown kind of initial weights {rule.kind!r}: normal, uniform or constant")


def _element_indices(box: ShardBox, first: int, last: int, device: torch.device) -> Tensor:
    """Indices in the full tensor (row-major) of elements first..last of the box (row-major), int64."""
    local = torch.arange(first, last, device=device)
    offset, inside, stride, index = 0, 1, 1, local
    for start, length, full in list(zip(box.start, box.length, box.full, strict=True))[:0:-1]:
        offset, inside = offset + start * stride, inside * length
        if length < full:  # each time the box goes on in the next row, what is between is passed over
            index = index + local.div(inside, rounding_mode="floor").mul_((full - length) * stride)
        stride *= full
    return index.add_(offset + (box.start[0] * stride if box.start else 0))


@torch.no_grad()
def fill_(local: Tensor, rule: Init, key: int, box: ShardBox, device: torch.device | None = None) -> None:
    """Fill `local` (shape ``box.length``) with its shard of the parameter, in place.

    The elements are computed in float64 and rounded once to the dtype of `local`. They are the same on every device up
    to the last bits of the device's ``erfinv``.

    Args:
        device: computes them. None: that of `local`.
    """
    if rule.zero_row is not None:
        fill_(local, replace(rule, zero_row=None), key, box, device)
        row = rule.zero_row - box.start[0]
        if 0 <= row < box.length[0]:
            local[row].zero_()
        return
    if rule.kind == "constant":
        local.fill_(rule.scale)
        return
    total = local.numel()
    if device is None or device.type == "meta":  # which has no values to copy
        device = local.device
    if accum_dtype(device) != torch.float64:
        device = torch.device("cpu")
    chunk = CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else CHUNK
    if local.is_contiguous():
        flat = local.view(-1)
        for first in range(0, total, chunk):
            last = min(first + chunk, total)
            flat[first:last].copy_(_draw(rule, key, _element_indices(box, first, last, device)))
    elif total:
        local.copy_(_draw(rule, key, _element_indices(box, 0, total, device)).view(box.length))


def full_box(parameter: Tensor) -> ShardBox:
    """The box of a parameter that is not sharded."""
    shape = tuple(parameter.shape)
    return ShardBox((0,) * len(shape), shape, shape)


def fill_all(
    drawn: Iterable[tuple[str, Tensor, Init]],
    seed: int,
    box_of: Callable[[Tensor], ShardBox] = full_box,
    local_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
    device: torch.device | None = None,
) -> None:
    """Draw tensors, in place.

    Args:
        drawn: the name that each is drawn by, the tensor, on its final device (not meta), and its rule.
        box_of: of a sharded tensor, this rank's shard.
        local_of: of a sharded tensor, its local tensor.
        device: computes the elements, wherever they lie. None: each where it lies.
    """
    for name, tensor, rule in drawn:
        fill_(local_of(tensor), rule, stream_key(seed, name), box_of(tensor), device)


def accum_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it: Apple's, and Intel's smaller ones (Arc)."""
    without = device.type == "mps"
    if device.type == "xpu":
        without = not getattr(torch.xpu.get_device_properties(device), "has_fp64", True)
    return torch.float32 if without else torch.float64


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point parameters and buffers to `dtype`, in place; integers and bools stay.

    Unlike ``model.to(dtype)``, which drops their imaginary part, complex tensors (rotary tables) stay complex:
    complex128 for float64, else complex64.
    """
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(complex_dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    map_tensors(model, converted)


def parameter_count(modules: Sequence[nn.Module] | nn.Module) -> int:
    """Number of parameter elements, shared ones once, of the full tensors where they are sharded."""
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    return sum(p.numel() for p in {id(p): p for root in roots for p in root.parameters()}.values())
