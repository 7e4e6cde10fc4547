"""Chooses the device that this rank computes on, the backend of its collectives, and the data types that it uses.

Intel GPUs are used by PyTorch's own ``torch.xpu`` and its xccl backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from mmm.errors import DeviceError
from mmm.runtime.ranks import Rank
from mmm.torch_private.faults import met
from mmm.units import counted
from mmm_launch.contract import DEVICE_VARIABLE

# The workspaces with which cuBLAS gives the same bits each time: buffers of so many KiB, and their number.
# Source: NVIDIA, cuBLAS documentation, "Results reproducibility".
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
DEVICES = ("auto", "cpu", "cuda", "xpu", "mps")
# Whatever does not work with this PyTorch, or a newer one, ends with an error (docs/install.md). pip has it from
# pyproject.toml.
OLDEST_TORCH = "2.8"


def too_old() -> str:
    """Says which PyTorch is needed if this one is older; empty if it is not.

    A site's own build, such as 2.8.0a0+git, counts as its release, although pip takes it for an older one.
    """
    # Of the versions of a release, one with "dev0" is the first.
    if TorchVersion(torch.__version__) >= f"{OLDEST_TORCH}.dev0":
        return ""
    return (
        f"mmm needs PyTorch {OLDEST_TORCH} or newer, and this one is {torch.__version__}: "
        f"pip install 'torch>={OLDEST_TORCH}'"
    )


def refuse_faults(*choices: str) -> None:
    """Refuse what this PyTorch cannot do (`mmm.torch_private.faults`).

    Args:
        choices: what was chosen.

    Raises:
        DeviceError: together they meet a row of the table.
    """
    for fault in met(choices):
        raise DeviceError(f"{fault} (this is PyTorch {torch.__version__})")


def is_available(kind: str) -> bool:
    """Whether this PyTorch can compute on devices of a kind (``cuda``, ``xpu``, ``mps``, ``cpu``) here."""
    if kind == "cuda":
        return torch.cuda.is_available()
    if kind == "xpu":
        return torch.xpu.is_available()
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu"


def choose_device(asked: str, rank: Rank) -> torch.device:
    """Choose the device of this rank, and make it the current one.

    Args:
        asked: the kind of device, or ``auto``: what ``launch --device`` said, else the first of cuda and xpu that is
            available, else cpu.
        rank: this process's place. Its local rank chooses among the devices of the host.

    Raises:
        DeviceError: there is no such device here, or this PyTorch is too old.
    """
    if too_old():
        raise DeviceError(too_old())
    if asked not in DEVICES:
        raise DeviceError(f"device {asked!r} is not one of {', '.join(DEVICES)}")
    if asked == "auto":
        asked = os.environ.get(DEVICE_VARIABLE, "auto")
    if asked == "auto":
        accelerators = [kind for kind in ("cuda", "xpu") if is_available(kind)]
        asked = accelerators[0] if accelerators else "cpu"
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
    # A scheduler may show each rank only its own devices, one or several. So the remainder is taken here, and
    # `check_devices` finds out later whether two ranks have chosen the same device.
    module = getattr(torch, asked)
    n_devices = max(module.device_count(), 1)
    device = torch.device(asked, (rank.local_rank or 0) % n_devices)
    module.set_device(device)
    return device


def identity(device: torch.device) -> str:
    """Return a text that tells an accelerator from all others of its host; "" where PyTorch does not know one."""
    properties = getattr(torch, device.type).get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    if not uuid or (device.type == "cuda" and torch.version.hip is None):
        return uuid
    # The parts of an AMD or Intel GPU may share one uuid. Two ranks that are shown different lists of devices are
    # therefore taken to have different ones.
    parts = [uuid, str(device.index)]
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        if name in os.environ:
            parts.append(f"{name}={os.environ[name]}")
    return " ".join(parts)


def backend_for(device: torch.device) -> str:
    """Return the process-group backend for a device: nccl, xccl or gloo.

    An accelerator gets only its own backend. Adding gloo for CPU tensors would connect all ranks to all.

    Raises:
        DeviceError: this PyTorch has no backend for the device.
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
    """Name the library that the process group communicates by: ``gloo``, ``nccl 2.27.5``, or ``no process group``."""
    if not dist.is_initialized():
        return "no process group"
    name = dist.get_backend()
    if name == "nccl":
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return f"nccl {version}"
    return name


def devices_in_use(device: torch.device, ranks: int) -> str:
    """Describe what the ranks of this host compute on: ``4 ranks on 2 CPU cores``, ``4 ranks on NVIDIA H200``.

    Args:
        device: this rank's device.
        ranks: number of ranks on this host.
    """
    if device.type in ("cuda", "xpu"):
        name = getattr(torch, device.type).get_device_name(device)
    elif device.type == "cpu":
        name = f"{os.cpu_count()} CPU cores"
    else:
        name = device.type
    return f"{counted(ranks, 'rank')} on {name}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queue. Does nothing on a CPU, which has no queue."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


@dataclass(frozen=True)
class Precision:
    """The data types of a run.

    Attributes:
        name: fp32, bf16, fp16 or fp64.
        storage: dtype of weights and optimizer state.
        compute: dtype of matrix products and activations.
        reason: why this precision was chosen; "asked for" if the user named it.
    """

    name: str
    storage: torch.dtype
    compute: torch.dtype
    reason: str = "asked for"

    @property
    def mixed(self) -> bool:
        """Whether the model computes in another dtype than it stores its weights in."""
        return self.storage != self.compute


# Name: (storage, compute).
_PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


def _computes_bf16(device: torch.device) -> bool:
    """Whether an accelerator's hardware computes in bf16, rather than emulating it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "xpu"


def choose_precision(asked: str, device: torch.device) -> Precision:
    """Choose the data types of a run.

    ``auto`` is bf16 mixed precision on an accelerator that computes in it, else float32. A CPU gets float32 even if it
    has bf16: whether bf16 saves time there depends on the model's sizes (steps have taken twice as long), and it makes
    the losses of different meshes differ in the third digit.

    Args:
        asked: ``auto``, fp32, bf16, fp16 or fp64.
        device: device that the model computes on.

    Raises:
        DeviceError: the name is unknown, or MPS is asked for float64, which it lacks, or for mixed precision, for which
            a model has no wrapper there.
    """
    if asked == "auto":
        name = "bf16" if _computes_bf16(device) else "fp32"
        if device.type == "cpu":
            reason = "auto: bf16 on accelerators only"
        elif name == "bf16":
            reason = f"{device.type} computes in bf16"
        else:
            reason = f"{device.type} would emulate bf16"
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
    """Make a float32 run compute in full float32 for the length of a ``with`` block, without TensorFloat-32.

    TensorFloat-32 keeps 10 bits of float32's 23. cuDNN's convolutions use it by default, and matrix products use it
    where a program has asked for it before. Does nothing for a run that computes in another data type.
    """
    if precision.compute != torch.float32:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    newer: list[Any] = []
    # PyTorch 2.8 has the older flags alone.
    if hasattr(cudnn, "conv"):
        newer = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul]
    older = _older_flags()
    before = [flags.fp32_precision for flags in newer]
    # The older flags are set first: setting one changes the newer ones, and reading one fails where only a newer one
    # was set.
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


@contextmanager
def deterministic(enabled: bool, device: torch.device) -> Iterator[None]:
    """Have PyTorch use only deterministic algorithms for the length of a ``with`` block, if this is `enabled`.

    An operation that has none raises PyTorch's RuntimeError, which names it. Attention follows: its fused kernels on
    CUDA then take the deterministic way in backward, and PyTorch leaves out the one that has none (cuDNN's).

    Args:
        device: this rank's device.

    Raises:
        DeviceError: the environment gives cuBLAS a workspace that lets its bits vary.
    """
    if not enabled:
        yield
        return
    if device.type == "cuda":
        _deterministic_cublas()
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    was_enabled = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, mkldnn.deterministic
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic = True
    # The benchmark chooses the fastest algorithm, which may be another one in the next run.
    cudnn.benchmark = False
    # oneDNN has the products of CPUs and of Intel GPUs.
    mkldnn.deterministic = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=only_warned)
        cudnn.deterministic, cudnn.benchmark, mkldnn.deterministic = before


def _deterministic_cublas() -> None:
    """Give cuBLAS a workspace of a fixed size for each stream.

    cuBLAS reads the variable when it starts. If a product was computed before, PyTorch raises an error at the next one.
    """
    workspace = os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACES[0])
    if workspace not in WORKSPACES:
        either = " or ".join(WORKSPACES)
        raise DeviceError(
            f"--deterministic: {WORKSPACE_VARIABLE} is {workspace}, and cuBLAS gives the same bits each time only with "
            f"{either}: set it to one of them, or unset it"
        )


def _older_flags() -> tuple[bool, str] | None:
    """Read whether cuDNN may use TensorFloat-32, and the precision of matrix products.

    None where the program has set newer flags itself: PyTorch does not translate them into the older ones.
    """
    cudnn: Any = torch.backends.cudnn
    try:
        return cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
