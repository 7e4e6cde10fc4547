"""Draws initial weights: a pure function of (seed, canonical parameter name, element index).

Element ``i`` of parameter ``name`` is output ``i`` of a SplitMix64 stream whose key is a hash of (seed, name). So a
rank draws only its shard of a matrix, also for a model that was built on the meta device. The weights do not depend on
how the model is sharded, on how many layers it has, or on the order of construction.

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

# Elements drawn at once on a device. This bounds the temporary memory to a few times 32 MiB.
CHUNK = 1 << 22
# The same for each thread of a CPU: the temporary memory stays in its cache.
CPU_CHUNK = 1 << 15

# Random bits in a draw, as many as a float64 holds exactly.
BITS = 53

# The constants of SplitMix64.
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class Init:
    """How the elements of one parameter are drawn.

    Attributes:
        kind: ``normal``, with mean 0; ``uniform``; or ``constant``.
        scale: the standard deviation of a normal distribution; the bound of a uniform one, in [-scale, scale); or the
            constant.
        zero_row: the index of a row that starts with zeros, as an embedding's padding does. None: there is none.
    """

    kind: str
    scale: float
    zero_row: int | None = None


@dataclass(frozen=True)
class ShardBox:
    """The shard of a tensor that is local, in elements along each dim.

    Attributes:
        start: the first index.
        length: the length of the shard.
        full: the length of the full tensor.
    """

    start: tuple[int, ...]
    length: tuple[int, ...]
    full: tuple[int, ...]


def class_name(module: object) -> str:
    """The name of a module's class as its author wrote it.

    ``fully_shard`` makes another class of it, whose name is FSDP followed by that of the first.
    """
    kind, *bases = type(module).__mro__
    if bases[0].__name__ == "FSDPModule":
        return bases[1].__name__
    return kind.__name__


def canonical_name(name: str) -> str:
    """``name`` without what the wrappers of compile, checkpoint, DDP or FSDP add to it."""
    return ".".join(component for component in name.split(".") if component not in WRAPPERS)


def stream_key(seed: int, name: str) -> int:
    """The 64-bit key of a parameter's stream: the first 8 bytes of SHA-256 over seed and canonical name."""
    text = f"{seed}/{canonical_name(name)}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _signed(value: int) -> int:
    """The int64 with the same low 64 bits: PyTorch's integers are signed, and wrap around like unsigned ones."""
    value &= (1 << 64) - 1
    if value >= 1 << 63:
        return value - (1 << 64)
    return value


def _logical_shift(z: Tensor, bits: int, out: Tensor) -> Tensor:
    """``z >> bits`` with zeros from the left (torch shifts in copies of the sign), written to `out`."""
    low_bits = (1 << (64 - bits)) - 1
    return torch.bitwise_right_shift(z, bits, out=out).bitwise_and_(low_bits)


def random_bits(key: int | Tensor, index: Tensor, first: int = 0) -> Tensor:
    """`BITS` random bits for each element index first + `index`.

    Args:
        key: the key of the stream; or one for each row of `index`, int64, (rows, 1).
        index: int64, any shape.

    Returns:
        int64, the shape of `index`, or (rows, …).
    """
    if isinstance(key, Tensor):
        # The state of element i is key + (i + 1) · γ. The key is divided by γ modulo 2⁶⁴ and added before the product:
        # torch.compile counts an arange in 32 bits, and makes of one times γ a formula of integers beyond 64 bits, both
        # of which Triton refuses.
        one_over_gamma = _signed(pow(_GAMMA, -1, 1 << 64))
        start = key * one_over_gamma + (first + 1)
        z = (index + start).mul_(_signed(_GAMMA))
    else:
        start_state = _signed(key + (first + 1) * _GAMMA)
        z = (index * _signed(_GAMMA)).add_(start_state)
    # From here on in place, because memory is what limits this.
    shifted = torch.empty_like(z)
    z.bitwise_xor_(_logical_shift(z, 30, shifted)).mul_(_signed(_MIX1))
    z.bitwise_xor_(_logical_shift(z, 27, shifted)).mul_(_signed(_MIX2))
    z.bitwise_xor_(_logical_shift(z, 31, shifted))
    return _logical_shift(z, 64 - BITS, shifted)


def uniform01(key: int, index: Tensor) -> Tensor:
    """Float64 in (0, 1), from `random_bits`, with the shape of `index`."""
    return random_bits(key, index).double().add_(0.5).mul_(2.0**-BITS)


def _draw(rule: Init, key: int, index: Tensor) -> Tensor:
    """The elements of a parameter at these indices, float64."""
    # In (-1, 1).
    centred = uniform01(key, index).mul_(2).sub_(1)
    if rule.kind == "uniform":
        return centred.mul_(rule.scale)
    if rule.kind == "normal":
        # The inverse of the distribution function.
        return centred.erfinv_().mul_(math.sqrt(2.0) * rule.scale)
    raise ValueError(f"unknown kind of initial weights {rule.kind!r}: normal, uniform or constant")


def _element_indices(
    box: ShardBox,
    first: int,
    last: int,
    device: torch.device,
) -> Tensor:
    """The indices, in the full tensor, of elements first … last - 1 of a box. Both are counted row by row.

    Returns:
        (last - first,) int64.
    """
    local = torch.arange(first, last, device=device)
    index = local
    # Index of the box's first element in the full tensor.
    offset = 0
    # Elements of the box, and of the full tensor, in one row of the dims behind the current one.
    box_stride = 1
    stride = 1
    # All dims but the first, from the last one on.
    for dim in range(len(box.full) - 1, 0, -1):
        offset = offset + box.start[dim] * stride
        box_stride *= box.length[dim]
        left_out = box.full[dim] - box.length[dim]
        if left_out:
            # Each time the box continues in the next row, what it leaves out of this row is passed over.
            index = index + local.div(box_stride, rounding_mode="floor").mul_(left_out * stride)
        stride *= box.full[dim]
    if box.start:
        offset = offset + box.start[0] * stride
    return index.add_(offset)


@torch.no_grad()
def fill_(
    local: Tensor,
    rule: Init,
    key: int,
    box: ShardBox,
    device: torch.device | None = None,
) -> None:
    """Fill `local` with its shard of the parameter, in place.

    The elements are computed in float64 and rounded once to the dtype of `local`. They are the same on every device, up
    to the last bits of the device's ``erfinv``.

    Args:
        local: shape ``box.length``.
        rule: how the parameter is drawn.
        key: the key of its stream.
        box: which shard of the parameter this is.
        device: the device that computes the elements. None: that of `local`.
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
    # The meta device has no values to copy.
    if device is None or device.type == "meta":
        device = local.device
    if accum_dtype(device) != torch.float64:
        device = torch.device("cpu")
    chunk = CHUNK
    if device.type == "cpu":
        chunk = CPU_CHUNK * torch.get_num_threads()
    if local.is_contiguous():
        flat = local.view(-1)
        for first in range(0, total, chunk):
            last = min(first + chunk, total)
            index = _element_indices(box, first, last, device)
            flat[first:last].copy_(_draw(rule, key, index))
    elif total:
        # Strided memory cannot be filled chunk by chunk.
        index = _element_indices(box, 0, total, device)
        elements = _draw(rule, key, index)
        local.copy_(elements.view(box.length))


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
        drawn: for each tensor the name that it is drawn by, the tensor on its final device (not meta), and its rule.
        seed: of the run.
        box_of: function that returns this rank's shard of a sharded tensor.
        local_of: function that returns the local tensor of a sharded tensor.
        device: the device that computes the elements, wherever they lie. None: each where it lies.
    """
    for name, tensor, rule in drawn:
        local = local_of(tensor)
        box = box_of(tensor)
        fill_(local, rule, stream_key(seed, name), box, device)


def accum_dtype(device: torch.device) -> torch.dtype:
    """float64; float32 on devices without it: Apple's, and Intel's smaller ones (Arc)."""
    has_float64 = device.type != "mps"
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        has_float64 = getattr(properties, "has_fp64", True)
    if has_float64:
        return torch.float64
    return torch.float32


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point parameters and buffers to `dtype`, in place. Integers and bools stay.

    Complex tensors (rotary tables) become complex128 for float64, else complex64: ``model.to(dtype)`` would drop their
    imaginary part.
    """
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(complex_dtype)
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    map_tensors(model, converted)


def parameter_count(modules: Sequence[nn.Module] | nn.Module) -> int:
    """Number of elements of all parameters: shared ones count once, sharded ones in full."""
    if isinstance(modules, nn.Module):
        modules = [modules]
    elements: dict[int, int] = {}
    for module in modules:
        for parameter in module.parameters():
            elements[id(parameter)] = parameter.numel()
    return sum(elements.values())
