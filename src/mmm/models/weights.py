"""Initial weights as a pure function of (seed, canonical parameter name, element index).

Every element of a parameter is drawn on its own, from a counter: element number ``i`` of the parameter called ``name``
is output ``i`` of a SplitMix64 stream whose key is a hash of (seed, name). So a rank that holds a part of a matrix
draws just that part, from the meta device if need be, and the weights of a model do not depend on how it is cut, on how
many layers stand beside it, or on the order of construction.

Source of the generator: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

CHUNK = 1 << 22  # elements drawn at once: bounds the temporary memory to a few times 32 MiB
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")

_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class Init:
    """How the elements of one parameter are drawn.

    ``normal``: mean 0, standard deviation `scale`. ``uniform``: in [-scale, scale). ``constant``: `scale` everywhere.
    """

    kind: str
    scale: float


class Initializable(Protocol):
    """A model that says how each of its parameters and buffers starts: ``init_rule("layers.0.ffn_norm.weight")``."""

    def init_rule(self, name: str) -> Init: ...


@dataclass(frozen=True)
class Box:
    """The part of a tensor that is held here: per dim the first index and the length, in elements."""

    start: tuple[int, ...]
    length: tuple[int, ...]
    whole: tuple[int, ...]


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


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch shifts in copies of the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform01(key: int, index: Tensor) -> Tensor:
    """Float64 in (0, 1), 53 random bits each, for the int64 element numbers `index` (any shape)."""
    z = index * _signed(_GAMMA) + _signed(key + _GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX2)
    z = z ^ _shift_right(z, 31)
    return (_shift_right(z, 11).double() + 0.5) * 2.0**-53


def _draw(rule: Init, key: int, index: Tensor) -> Tensor:
    u = uniform01(key, index)
    if rule.kind == "uniform":
        return (2 * u - 1) * rule.scale
    if rule.kind == "normal":
        return torch.erfinv(2 * u - 1) * (math.sqrt(2.0) * rule.scale)
    raise ValueError(f"unknown kind of initial weights {rule.kind!r}: normal, uniform or constant")


def _element_numbers(box: Box, first: int, last: int, device: torch.device) -> Tensor:
    """Numbers in the whole tensor (row-major) of elements first..last of the box (row-major), int64."""
    local = torch.arange(first, last, device=device)
    number = torch.zeros_like(local)
    stride = 1
    for start, length, whole in zip(reversed(box.start), reversed(box.length), reversed(box.whole), strict=True):
        number += (local % length + start) * stride
        local = local // length
        stride *= whole
    return number


@torch.no_grad()
def fill_(local: Tensor, rule: Init, key: int, box: Box) -> None:
    """Fill `local` (shape ``box.length``) with its part of the parameter, in place.

    The numbers are worked out in float64 and rounded once to the dtype of `local`. They are the same on every device up
    to the last bits of the device's ``erfinv``.
    """
    if rule.kind == "constant":
        local.fill_(rule.scale)
        return
    total = local.numel()
    # MPS has no float64: draw on the host and copy.
    device = torch.device("cpu") if local.device.type == "mps" else local.device
    if local.is_contiguous():
        flat = local.view(-1)
        for first in range(0, total, CHUNK):
            last = min(first + CHUNK, total)
            flat[first:last].copy_(_draw(rule, key, _element_numbers(box, first, last, device)))
    elif total:
        local.copy_(_draw(rule, key, _element_numbers(box, 0, total, device)).view(box.length))


def whole_box(parameter: Tensor) -> Box:
    """The box of a parameter that is not cut."""
    shape = tuple(parameter.shape)
    return Box((0,) * len(shape), shape, shape)


def initialize(
    model: nn.Module,
    seed: int,
    box_of: Callable[[Tensor], Box] = whole_box,
    local_of: Callable[[Tensor], Tensor] = lambda parameter: parameter,
) -> None:
    """Draw every parameter of `model`, and every buffer, in place.

    Args:
        model: has ``init_rule(name) -> Init``; parameters lie on their final device (not meta). Buffers are whole.
        seed: of the run.
        box_of, local_of: for cut parameters, which part this rank holds and the tensor that holds it.
    """
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        rule = model.init_rule(name)  # type: ignore[operator]
        fill_(local_of(parameter), rule, stream_key(seed, name), box_of(parameter))
    for name, buffer in model.named_buffers():
        name = canonical_name(name)
        fill_(buffer, model.init_rule(name), stream_key(seed, name), whole_box(buffer))  # type: ignore[operator]


def parameter_count(modules: Sequence[nn.Module] | nn.Module) -> int:
    """Number of parameter elements, shared ones once (of whole tensors, also where they are cut)."""
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    return sum(p.numel() for p in {id(p): p for root in roots for p in root.parameters()}.values())
