"""Which device this rank computes on, which backend its collectives use, and which data types are real there.

Intel GPUs: PyTorch's own ``torch.xpu`` and its xccl backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mmm.errors import DeviceError
from mmm.runtime.ranks import Rank
from mmm.units import counted

DEVICES = ("auto", "cpu", "cuda", "xpu", "mps")


def is_available(kind: str) -> bool:
    """Whether this PyTorch can compute on devices of that kind here."""
    if kind == "cuda":
        return torch.cuda.is_available()
    if kind == "xpu":
        return torch.xpu.is_available()
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu"


def choose_device(asked: str, rank: Rank) -> torch.device:
    """The device of this rank.

    Args:
        asked: ``auto`` (what ``launch --device`` said, else the first of cuda, xpu that is there, else cpu) or the kind
            of device.

    Raises:
        DeviceError: no such device here.
    """
    if asked not in DEVICES:
        raise DeviceError(f"device {asked!r} is not one of {', '.join(DEVICES)}")
    if asked == "auto":
        asked = os.environ.get("MMM_DEVICE", "auto")
    if asked == "auto":
        asked = next((kind for kind in ("cuda", "xpu") if is_available(kind)), "cpu")
    if not is_available(asked):
        raise DeviceError(
            f"--device {asked}: this PyTorch ({torch.__version__}) sees no {asked} device here; use --device cpu, or "
            f"install a PyTorch built for it"
        )
    if asked == "mps" and rank.world_size > 1:
        raise DeviceError(
            f"mps is one device and has no collectives, but there are {rank.world_size} ranks: use "
            f"--device cpu, or one rank"
        )
    if asked in ("cpu", "mps"):
        return torch.device(asked)
    # A scheduler may show each rank just its own, one or several: `check_devices` sees what they come to.
    device = torch.device(asked, (rank.local_rank or 0) % max(getattr(torch, asked).device_count(), 1))
    getattr(torch, asked).set_device(device)
    return device


def left_out(asked: str, device: torch.device) -> str | None:
    """What ``auto`` has left out, in words."""
    if asked == "auto" and device.type == "cpu" and "MMM_DEVICE" not in os.environ and is_available("mps"):
        return "device: cpu; the Apple GPU here has no collectives: --device mps uses it, on one rank"
    return None


def identity(device: torch.device) -> str:
    """What tells an accelerator from all others of its host; "" where PyTorch does not say."""
    uuid = str(getattr(getattr(torch, device.type).get_device_properties(device), "uuid", ""))
    if not uuid or (device.type == "cuda" and torch.version.hip is None):
        return uuid
    # Parts of an AMD or Intel GPU may have one uuid: two ranks that are shown different lists count as apart.
    shown = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    return " ".join([uuid, str(device.index), *(f"{name}={os.environ[name]}" for name in shown if name in os.environ)])


def backend_for(device: torch.device) -> str:
    """The process-group backend: nccl, xccl, gloo.

    An accelerator's alone, without gloo beside it, which connects all ranks to all.
    """
    if device.type == "cuda":
        return "nccl"
    if device.type == "xpu":
        if dist.is_xccl_available():
            return "xccl"
        raise DeviceError(
            "this PyTorch has no xccl backend, which collectives between Intel GPUs need: use a build of PyTorch for "
            "XPU (docs/install.md)"
        )
    return "gloo"


def collective_library() -> str:
    """What the process group communicates by: ``gloo``, ``nccl 2.27.5``; ``no process group`` where there is none."""
    name = dist.get_backend() if dist.is_initialized() else "no process group"
    return f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else name


def devices_in_use(device: torch.device, ranks: int) -> str:
    """Of this host: ``4 ranks on 2 CPU cores``, ``4 ranks on NVIDIA H200``. ranks: those of this host."""
    count = counted(ranks, "rank")
    if device.type in ("cuda", "xpu"):
        return f"{count} on {getattr(torch, device.type).get_device_name(device)}"
    return f"{count} on {os.cpu_count()} CPU cores" if device.type == "cpu" else f"{count} on {device.type}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; nothing to do on a CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


@dataclass(frozen=True)
class Precision:
    """Data types of a run.

    Attributes:
        name: fp32, bf16, fp16 or fp64.
        storage: dtype of weights and optimizer state. compute: of matrix products and activations.
        reason: why, where it was chosen and not asked for.
    """

    name: str
    storage: torch.dtype
    compute: torch.dtype
    reason: str = "asked for"

    @property
    def mixed(self) -> bool:
        return self.storage != self.compute


_PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


def _computes_bf16(device: torch.device) -> bool:
    """Whether bf16 runs on an accelerator's hardware rather than being emulated."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "xpu"


def choose_precision(asked: str, device: torch.device) -> Precision:
    """``auto``: bf16 mixed precision on an accelerator that computes in it, else float32.

    On a CPU that has bf16 it is float32 too: bf16 gains or loses time by the model's sizes (steps have taken twice as
    long), and makes the losses of meshes differ in the third digit.

    Raises:
        DeviceError: on MPS, which has no float64, and where a model has no wrapper that would mix data types.
    """
    if asked == "auto":
        name = "bf16" if _computes_bf16(device) else "fp32"
        reason = f"{device.type} {'computes in' if name == 'bf16' else 'would emulate'} bf16"
        if device.type == "cpu":
            reason = "auto: bf16 on accelerators only"
        return Precision(name, *_PRECISIONS[name], reason)
    if asked not in _PRECISIONS:
        raise DeviceError(f"dtype {asked!r} is not one of auto, {', '.join(_PRECISIONS)}")
    if asked == "fp64" and device.type == "mps":
        raise DeviceError("--dtype fp64: MPS has no float64; use --device cpu")
    if asked in ("bf16", "fp16") and device.type == "mps":
        raise DeviceError(f"--dtype {asked}: on MPS a model computes in the data type of its weights; use --dtype fp32")
    return Precision(asked, *_PRECISIONS[asked])


@contextmanager
def full_float32(precision: Precision) -> Iterator[None]:
    """fp32 means fp32, for the length of a ``with`` block: no TensorFloat-32, which keeps 10 bits of 23.

    cuDNN's convolutions use it by default, and matrix products where a program has asked for it before. Nothing is
    changed for a run of another data type.
    """
    if precision.compute != torch.float32:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    newer: list[Any] = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul]
    older = _older_flags()
    before = [flags.fp32_precision for flags in newer]
    # In this order: an older flag changes the newer ones, and cannot be read where only a newer one was set.
    cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    for flags in newer:
        flags.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            cudnn.allow_tf32 = older[0]
            torch.set_float32_matmul_precision(older[1])
        for flags, value in zip(newer, before, strict=True):
            flags.fp32_precision = value


def _older_flags() -> tuple[bool, str] | None:
    """Whether cuDNN may use TensorFloat-32, and the precision of matrix products; None where the program has set newer
    flags itself, which PyTorch does not translate."""
    cudnn: Any = torch.backends.cudnn
    try:
        return cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
